"""What a run predicted at every step: the likeliest tokens at each position that the step might write.

A step predicts p(x_0 | x_t) at every masked position at once and writes a few of these predictions. The others are what
the network believed and did not say: with them a run shows when it made up its mind, and whether it was right. They are
recorded during the run, `model.denoise(..., predictions=k)`, or by a forced replay of a run without them,
`trajectory.predictions(model, top_k=k)`, with the same numbers.

The distribution is p(x_0) of the network's head after guidance and after hooks at `denoise.hook_logits`, at
temperature 1. The likeliest tokens are among those that the model can write, that is, without [MASK], as in the logit
lens; of equally likely ones the lowest id comes first, as where the loop chooses. Only entries that were predicted are
kept, and a token as an index among those that occur, in two bytes where these are at most 65,536.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer, UInt8
from torch import Tensor

from diffusion_lens.denoising.recorded_elsewhere import joined, read_rows
from diffusion_lens.denoising.sampler import Prediction
from diffusion_lens.hooks.step import StepState
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import PicturedResult, Saved, Table, shown_model, texts_of
from diffusion_lens.settings import Whole, at_least, checked_arguments, one_of, pick_indices
from diffusion_lens.settings.figures import styled
from weight_conversion import renamed_when_whole

NOTHING = -1
MAX_BYTES = 2**31
CPU_LOGITS_BYTES = 24 * 2**20  # of the logits that are computed or ranked together
# What `plot` can show: the title of the colour bar, and the colours.
SHOWN = {
    "entropy": ("entropy (nats)", "viridis_r"),
    "probability": ("p(likeliest)", "viridis"),
    "margin": ("p(first) - p(second)", "viridis"),
}


@dataclass(frozen=True, eq=False)
class Predictions(PicturedResult, Saved):
    """The likeliest tokens at each position that each step might write, with probabilities and entropy.

    `tokens`, `probabilities`, `entropy` and `masked` are whole tables with named axes, made of the entries when they
    are first read. Tables of numbers are NaN, and those of tokens -1, where nothing is predicted.

    Columns of the data frame: step, batch, pos, entropy, margin (of two or more tokens), written, and where the tokens
    are known, likeliest, probability, right; a row for each prediction.

    Attributes:
        steps: Index of each step.
        flags: UInt8[step batch byte], a bit for each position that a step predicts, the first position highest.
        ids: Int[token], the tokens that occur.
        entry_tokens: Integer[entry top], index in `ids` of the likeliest tokens, the likeliest first; entries are in
            the order of step, row and position.
        entry_probabilities: Float[entry top], their probabilities.
        entry_entropy: Float[entry] in nats, entropy of the prediction.
        written: Int[batch pos], the final canvas.
        revealed_at: Int[batch pos], the step that revealed each position, as in `Trajectory`.
        words: Text of every id that occurs, on the final canvas too.
        record: That of the run.
        n_steps: Int[batch], number of steps of each row, where rows of several runs were read; `None` if all rows have
            those of `steps`.
    """

    KIND = "predictions"
    SHOWS = "what each denoising step predicts at each position, with the entropy of the prediction"
    AXES = (("step", "steps"),)
    _SAID = ("show",)

    steps: list[int]
    flags: UInt8[Tensor, "step batch byte"]
    ids: Int[Tensor, "token"]
    entry_tokens: Integer[Tensor, "entry top"]
    entry_probabilities: Float[Tensor, "entry top"]
    entry_entropy: Float[Tensor, "entry"]
    written: Tokens
    revealed_at: Int[Tensor, "batch pos"]
    words: dict[int, str] = field(repr=False)
    record: dict[str, Any] = field(repr=False)
    n_steps: Int[Tensor, "batch"] | None = None

    def _check(self) -> None:
        if self.flags.shape[2] != -(-self.written.shape[1] // 8) or int(self.masked.sum()) != len(self.entry_entropy):
            raise ValueError(f"the flags are not those of {len(self.entry_entropy)} predictions on this canvas")
        if self.entry_tokens.numel() and int(self.entry_tokens.long().max()) >= len(self.ids):
            raise ValueError("an index of a token is outside ids")
        if unknown := {*self.ids.tolist(), *self.written.unique().tolist()} - self.words.keys():
            raise ValueError(f"words lacks the token {min(unknown)}")

    @classmethod
    def of(
        cls,
        tokens: Integer[Tensor, "entry top"],
        probabilities: Float[Tensor, "entry top"],
        entropy: Float[Tensor, "entry"],
        masked: Bool[Tensor, "step batch pos"],
        **others: Any,
    ) -> "Predictions":
        """Predictions from the entries where `masked` is true, in reading order, and the other fields."""
        ids, indices = tokens.unique(return_inverse=True)
        return cls(
            flags=_flags(masked),
            ids=ids.long(),
            entry_tokens=indices.to(_smallest(len(ids))),
            entry_probabilities=probabilities,
            entry_entropy=entropy,
            **others,
        )

    @cached_property
    def masked(self) -> Bool[Tensor, "step batch pos"]:
        """The positions that each step predicted: masked ones, under uniform noise all that the step might change, and
        of a text that grows the next one."""
        bits = np.unpackbits(self.flags.numpy(), axis=2, count=self.written.shape[1])
        return torch.from_numpy(bits).bool()

    @cached_property
    def tokens(self) -> Int[Tensor, "step batch pos top"]:
        """The likeliest tokens, the likeliest first."""
        return self._whole(self.ids[self.entry_tokens.long()], NOTHING)

    @cached_property
    def probabilities(self) -> Float[Tensor, "step batch pos top"]:
        """Their probabilities."""
        return self._whole(self.entry_probabilities, torch.nan)

    @cached_property
    def entropy(self) -> Float[Tensor, "step batch pos"]:
        """Entropy of each prediction, in nats."""
        return self._whole(self.entry_entropy, torch.nan)

    @property
    def likeliest(self) -> Int[Tensor, "step batch pos"]:
        """x̂0, the likeliest token at each position; a `ValueError` if only the steps are known that wrote the text."""
        if not self.top_k:
            raise ValueError(
                "the likeliest tokens are not known: what was read says only which step wrote each token, as step maps "
                "do. Take predictions of a run, model.denoise(..., predictions=5)"
            )
        return self.tokens[..., 0]

    @property
    def margin(self) -> Float[Tensor, "step batch pos"]:
        """Probability of the likeliest token minus that of the second; a `ValueError` if one token was recorded."""
        if self.top_k < 2:
            raise ValueError("the margin needs the two likeliest tokens, and one was recorded: predictions=2 or more")
        return self.probabilities[..., 0] - self.probabilities[..., 1]

    @property
    def remaining_entropy(self) -> Float[Tensor, "step batch"]:
        """Sum of the entropies of all predictions of a step, in nats: what the canvas still leaves open, as far as the
        network sees each position alone. It is 0 where nothing is predicted."""
        n_steps, n_rows, _ = self.masked.shape
        steps, rows, _ = self.masked.nonzero(as_tuple=True)
        total = torch.zeros(n_steps * n_rows, dtype=torch.float64)
        total.index_add_(0, steps * n_rows + rows, self.entry_entropy.double())
        return total.reshape(n_steps, n_rows).float()

    @property
    def top_k(self) -> int:
        """Number of tokens that are recorded at each position."""
        return self.entry_tokens.shape[1]

    def __len__(self) -> int:
        """Number of rows of the batch."""
        return len(self.written)

    @classmethod
    @checked_arguments
    def read(
        cls,
        source: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        model: DiffusionTransformer | None = None,
        block_length: Whole | None = None,
    ) -> "Predictions":
        """Predictions that another program recorded; what it did not record is NaN.

        A file of JSON lines has one run on each line (here in two), which becomes one row:

            {"written": [7, 2, 9],
             "steps": [{"pos": [1, 2], "tokens": [[5, 2], [9, 4]]}, {"pos": [1], "tokens": [[2, 5]]}]}

        `written` is the final canvas, and `steps` has an entry for each step with the positions that it predicted, and
        at each the ids of the likeliest tokens, the likeliest first, as many at all positions of the file. A step may
        also have "probabilities", as nested as the tokens, and "entropy", in nats, one for each position. A run may
        also have "revealed_at", the step that wrote each position or -1, by default the last that predicted it;
        "first_step", the index of the first step; "words", texts by id; and "model", a name. `to_jsonl` writes this.

        Other sources are the .pt files of Prophet (`save_question_histories`) and responses of sglang with
        `return_step_maps`, as JSON lines too. Of step maps, no predicted token is known.

        Args:
            source: A file, or what it contains.
            model: The model that wrote the runs, for the texts of the tokens and the name in the record; by default
                texts are the ids.
            block_length: Of step maps, number of positions in a block.

        Raises:
            ValueError: A line or a field that does not fit, which the message names; an id that the model lacks.
            FileNotFoundError: There is no such file.
        """
        rows = read_rows(source, block_length)
        fields = joined(rows)
        ids = sorted({*fields["written"].unique().tolist(), *fields["tokens"].unique().tolist()} - {NOTHING})
        if model is not None and ids and ids[-1] >= model.cfg.d_vocab:
            raise ValueError(
                f"the runs contain the id {ids[-1]}, and {model.cfg.model_name!r} has ids below {model.cfg.d_vocab}: "
                "give the model that wrote them"
            )
        texts = map(str, ids) if model is None else model.words(ids)
        words = {
            NOTHING: "",
            **dict(zip(ids, texts, strict=True)),
            **{k: v for row in rows for k, v in row.words.items()},
        }
        named = next((row.model for row in rows if row.model is not None), "unnamed")
        record = {"model": named if model is None else model.cfg.model_name}
        if isinstance(source, str | Path):
            record["source"] = str(source)
        return cls.of(**fields, words=words, record=record)

    def to_jsonl(self, path: str | Path) -> Path:
        """Write JSON lines, one for each row, in the format that `read` describes."""
        tables = {"tokens": self.tokens, "probabilities": self.probabilities, "entropy": self.entropy}
        words = {str(each): text for each, text in self.words.items()}
        lines = []
        for row in range(len(self)):
            steps = [
                {
                    "pos": masked.nonzero()[:, 0].tolist(),
                    **{name: _with_null(table[place, row][masked]) for name, table in tables.items()},
                }
                for place, masked in enumerate(self.masked[:, row])
                if self.n_steps is None or self.steps[place] < self.n_steps[row]
            ]
            whole = {"written": self.written[row].tolist(), "revealed_at": self.revealed_at[row].tolist()}
            run = {
                "model": shown_model(self.record),
                "first_step": self.steps[0],
                **whole,
                "steps": steps,
                "words": words,
            }
            lines.append(json.dumps(run))
        target = Path(path)
        with renamed_when_whole(target) as part:
            part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return target

    def half(self) -> "Predictions":
        """The same with numbers in float16, for files of half the size: probabilities are then right to 5e-4 of each,
        and those below 6e-8 are 0."""
        numbers = {"entry_probabilities": self.entry_probabilities.half(), "entry_entropy": self.entry_entropy.half()}
        return Predictions(**{each.name: getattr(self, each.name) for each in fields(self)} | numbers)

    def part(self, rows: Sequence[int], first: int = 0) -> "Predictions":
        """Some rows of the batch, in this order, from an entry of `steps` on."""
        masked = self.masked[first:, rows]
        number = torch.zeros(self.masked.shape, dtype=torch.long)
        number[self.masked] = torch.arange(len(self.entry_entropy))
        kept = number[first:, rows][masked]
        return Predictions.of(
            self.ids[self.entry_tokens[kept].long()],
            self.entry_probabilities[kept],
            self.entry_entropy[kept],
            masked,
            steps=self.steps[first:],
            written=self.written[rows],
            revealed_at=self.revealed_at[rows],
            words=self.words,
            record=self.record,
            n_steps=None if self.n_steps is None else self.n_steps[rows],
        )

    @staticmethod
    def stream(folder: str | Path) -> "Iterator[Predictions]":
        """The predictions in the files of a folder, one file after the other in the order of their names, so that
        those of many runs are never in memory together; a `ValueError` if there is none."""
        paths = sorted(Path(folder).glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{folder} contains no .safetensors file: save predictions of runs there")
        return map(Predictions.load, paths)

    @styled
    def plot(
        self, row: Whole = 0, *, show: str = "entropy", ax: Any = None, title: str | None = None, folded: bool = True
    ) -> Any:
        """The canvas of one row, a column for each step, with the likeliest token in each cell; returns the axes.

        Args:
            row: Row of the batch.
            show: What the colour shows: "entropy", "probability" of the likeliest token, or the "margin".
            folded: Whether neighbouring steps with the same tokens and numbers share a column; otherwise every step has
                its own.
        """
        from diffusion_lens import plots

        one_of(*SHOWN)("show", show)
        (index,) = pick_indices("row", [row], len(self))
        positions = self.masked[:, index].any(dim=0).nonzero()[:, 0].tolist()
        values = self.probabilities[..., 0] if show == "probability" else getattr(self, show)
        values = values[:, index, positions].T.float()
        likeliest = self.likeliest[:, index, positions].T
        shown = torch.stack([likeliest.double(), values.double()]).nan_to_num(nan=NOTHING)
        new = (shown[..., 1:] != shown[..., :-1]).flatten(0, 1).any(dim=0).tolist()
        first = [i for i in range(len(self.steps)) if i == 0 or new[i - 1] or not folded]
        spans = zip(first, [*first[1:], len(self.steps)], strict=True)
        values, likeliest = values[:, first], likeliest[:, first]
        known, (bar, hue) = values[~values.isnan()], SHOWN[show]
        return plots.token_map(
            values,
            [[self.words.get(int(t), "") for t in each] for each in likeliest],
            rows=[f"{i}  {plots.readable(self.words[int(self.written[index, i])])}" for i in positions],
            layers=[f"{self.steps[i]}-{self.steps[j - 1]}" if j - i > 1 else self.steps[i] for i, j in spans],
            xlabel="denoising step",
            hue=hue,
            limits=(0.0, float(known.max()) if show == "entropy" and len(known) else 1.0),
            bar=bar,
            title=title or f"{shown_model(self.record)}: what each step predicted",
            ax=ax,
        )

    def _shows(self, show: str = "entropy") -> str:
        colour = {"entropy": "entropy of the prediction", "probability": "probability of the likeliest token"}
        of = colour.get(one_of(*SHOWN)("show", show), "margin between the two likeliest tokens")
        return self.SHOWS.replace("entropy of the prediction", of)

    def _whole(self, entries: Tensor, absent: int | float) -> Tensor:
        """A table of all steps, rows and positions."""
        table = entries.new_full((*self.masked.shape, *entries.shape[1:]), absent)
        table[self.masked] = entries
        return table

    def _table(self) -> Table:
        steps, rows, positions = self.masked.nonzero(as_tuple=True)
        written = self.written[rows, positions]
        columns = {
            "step": torch.tensor(self.steps)[steps],
            "batch": rows,
            "pos": positions,
            "entropy": self.entry_entropy,
            **({"margin": self.margin[self.masked]} if self.top_k > 1 else {}),
            "written": texts_of(written, self.words),
        }
        if self.top_k:
            likeliest = self.likeliest[self.masked]
            columns["likeliest"] = texts_of(likeliest, self.words)
            columns["probability"] = self.entry_probabilities[:, 0]
            columns["right"] = likeliest == written
        return Table(columns)

    def __repr__(self) -> str:
        shape = f"{len(self.steps)} steps, {len(self)} x {self.written.shape[1]} positions"
        return f"Predictions({shown_model(self.record)}, {shape}, top {self.top_k})"


def _with_null(values: Tensor) -> Any:
    """Nested lists for JSON, which has no NaN."""
    numbers = values.numpy().astype(object)
    numbers[values.isnan().numpy()] = None
    return numbers.tolist()


class Ranked(NamedTuple):
    """The likeliest tokens of rows of logits, their probabilities, and the entropy of each row."""

    tokens: Int[Tensor, "entry top"]
    probabilities: Float[Tensor, "entry top"]
    entropy: Float[Tensor, "entry"]


def ranked(logits: Float[Tensor, "entry d_vocab_out"], top_k: int, cfg: DiffusionConfig) -> Ranked:
    """The likeliest tokens that a model can write, from logits whose softmax is p(x_0), in float32 at least."""
    writable = cfg.writable(torch.arange(logits.shape[1], device=logits.device))
    n_at_once = max(1, CPU_LOGITS_BYTES // (4 * logits.shape[1]))
    parts = []
    for some in logits.split(n_at_once):
        wide = some.to(torch.promote_types(some.dtype, torch.float32))
        p, top = wide.softmax(dim=-1), likeliest_of(wide, top_k, writable)
        parts.append(Ranked(top, p.gather(-1, top), torch.special.entr(p).sum(dim=-1)))
    return Ranked(*map(torch.cat, zip(*parts, strict=True)))


def likeliest_of(
    logits: Float[Tensor, "entry d_vocab_out"], top_k: int, writable: Bool[Tensor, "d_vocab_out"]
) -> Int[Tensor, "entry top"]:
    """The tokens with the largest logits among those that can be written, the largest first.

    Of equal logits, which are common in bfloat16, the one with the lowest id comes first, as `argmax` has it, by which
    the loop chooses; `topk` takes any of them.
    """
    lowest = torch.finfo(logits.dtype).min  # A token that a hook forbids comes after all others, but before [MASK].
    left = logits.clamp(min=lowest).masked_fill_(~writable, -torch.inf)
    chosen = []
    for _ in range(top_k):
        chosen.append(left.argmax(dim=-1, keepdim=True))
        left.scatter_(-1, chosen[-1], -torch.inf)
    return torch.cat(chosen, dim=-1)


class PredictionRecorder:
    """Keeps the predictions of a run while it takes its steps.

    Args:
        n_entries: The most predictions that the run makes.
        shape: Number of rows and of positions.
        name: Name of the argument `top_k` in errors.

    Raises:
        ValueError: The model cannot write so many tokens, or the predictions would exceed `max_bytes`.
    """

    def __init__(
        self,
        cfg: DiffusionConfig,
        top_k: Whole,
        steps: range,
        n_entries: int,
        shape: tuple[int, int],
        max_bytes: int = MAX_BYTES,
        name: str = "predictions",
    ) -> None:
        self.cfg, self.steps, self.top_k = cfg, steps, at_least(1, name, top_k)
        n_writable = int(cfg.writable(torch.arange(cfg.d_vocab_out)).sum())
        if self.top_k > n_writable:
            raise ValueError(f"{name}={self.top_k}, but {cfg.model_name!r} can write {n_writable} tokens")
        # Once as they are recorded, and once in the result.
        needed = 2 * (n_entries * (8 * self.top_k + 4) + len(steps) * shape[0] * shape[1])
        if needed > max_bytes:
            raise ValueError(
                f"{name}={self.top_k} tokens at up to {n_entries:,} positions of {len(steps)} steps take {needed:,} "
                f"bytes, and {max_bytes:,} are allowed: denoise fewer rows at once and save the predictions of each "
                "batch, which `Predictions.stream` reads one after the other, record fewer tokens, or give "
                "trajectory.predictions(model, max_bytes=...) more"
            )
        self._masked = [torch.zeros(shape, dtype=torch.bool)] * len(steps)
        self._parts: list[Ranked] = []
        self._occurs = torch.zeros(cfg.d_vocab_out, dtype=torch.bool)

    def add(self, state: StepState, positions: PosMask, prediction: Prediction) -> None:
        """Keep what a step predicts at these positions, except in rows that have finished."""
        logits, sigma = prediction.output, prediction.sigma
        if sigma is not None:
            logits = prediction.head.clean_logits(logits, prediction.present, prediction.amount(sigma))
        if state.handed is not None:
            kept = positions & ~state.handed.finished[:, None]
            positions, logits = kept, logits[kept[positions]]
        if not len(logits):
            return
        top, p, entropy = (each.cpu() for each in ranked(logits, self.top_k, self.cfg))
        self._masked[state.index - self.steps.start] = positions.cpu()
        self._occurs[top] = True
        self._parts.append(Ranked(top.int(), p.float(), entropy.float()))

    @property
    def ids(self) -> Int[Tensor, "token"]:
        """The tokens that occur so far."""
        return self._occurs.nonzero()[:, 0]

    def result(self, **others: Any) -> Predictions:
        """The predictions with the other fields: the final canvas, the words of all tokens, and the record."""
        ids, k = self.ids, self.top_k
        index = torch.zeros(len(self._occurs), dtype=torch.int32)
        index[ids] = torch.arange(len(ids), dtype=torch.int32)
        index = index.to(_smallest(len(ids)))
        return Predictions(
            flags=_flags(torch.stack(self._masked)),
            ids=ids,
            entry_tokens=torch.cat([index.new_empty(0, k), *(index[part.tokens.long()] for part in self._parts)]),
            entry_probabilities=torch.cat([torch.empty(0, k), *(part.probabilities for part in self._parts)]),
            entry_entropy=torch.cat([torch.empty(0), *(part.entropy for part in self._parts)]),
            steps=list(self.steps),
            **others,
        )


def _flags(masked: Bool[Tensor, "step batch pos"]) -> UInt8[Tensor, "step batch _"]:
    return torch.from_numpy(np.packbits(masked.numpy(), axis=2))


def _smallest(n: int) -> torch.dtype:
    """The smallest type of indices of `n` tokens."""
    return torch.uint16 if n <= 2**16 else torch.int32
