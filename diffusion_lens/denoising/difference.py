"""The difference of two runs of one prompt: what each wrote where the other wrote something else, and since which step.

Two runs are compared canvas by canvas, at equal step numbers. A run with fewer steps keeps its final canvas, so that
the last comparison is that of the final texts. Positions that are not written yet count as equal, whether they contain
[MASK] or the text has not reached them; a position that one run has written and the other has not differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.model.text import END_TEXTS
from diffusion_lens.records.results import PicturedResult, Saved, Table, shown_model, texts_of
from diffusion_lens.settings import Whole, pick_indices
from diffusion_lens.settings.figures import styled

UNWRITTEN = -1
_LONGEST = 40  # characters of a text in the line and in the title of the picture
_NOTICED = 0.005  # difference of two confidences that is worth a word


@dataclass(frozen=True, eq=False)
class RunDifference(PicturedResult, Saved):
    """The difference of two runs of one prompt, `run.diff(other)`.

    Columns of the data frame: batch, pos, step, until, was, now, first_step, confidence_was, confidence_now,
    final_differs; a row for each position and pair of different texts, which the canvases contain after the steps from
    `step` to `until`. Empty texts are not written yet; step -1 is the canvas before step 0. `first_step` is the first
    step of the position's first row, and the confidences belong to its final tokens.

    Attributes:
        canvases: Int[run canvas batch pos], the canvases of the first and of the second run, and -1 where nothing is
            written yet.
        revealed_at: Int[run batch pos], the step that revealed each position, as in `Trajectory`.
        confidences: Float[run batch pos], the probability of each token when it was revealed, as in `Trajectory`.
        real: Bool[batch pos], false at padding, where nothing is compared.
        words: Text of every id that occurs.
        record: That of the first run; that of the second as "other", and the number of the step that follows the first
            canvas as "compared_from".
    """

    KIND = "run_difference"
    SHOWS = "two runs of one prompt after each denoising step, with both texts where they differ"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"model": str, "compared_from": int, "other": dict[str, Any]}

    canvases: Int[Tensor, "run canvas batch pos"]
    revealed_at: Int[Tensor, "run batch pos"]
    confidences: Float[Tensor, "run batch pos"]
    real: Bool[Tensor, "batch pos"]
    words: dict[int, str] = field(repr=False)
    record: dict[str, Any] = field(repr=False)

    def _check(self) -> None:
        if len(self.canvases) != 2 or not self.canvases.shape[1]:
            raise ValueError("a difference has the canvases of two runs")
        if unknown := set(self.canvases.unique().tolist()) - self.words.keys():
            raise ValueError(f"words lacks the token {min(unknown)}, which is on the canvases")

    @classmethod
    def of(cls, was: Any, now: Any) -> "RunDifference":
        """The difference of two trajectories; a `ValueError` unless they have one shape, vocabulary and prompt."""
        _require_one_prompt(was, now)
        runs = (was, now)
        start = max(run.first_step for run in runs)
        stop = max(run.first_step + run.n_steps for run in runs)
        canvases = []
        for run in runs:
            indices = (torch.arange(start, stop + 1) - run.first_step).clamp(max=run.n_steps)
            tokens = run.canvases.cpu()[indices]
            canvases.append(tokens.masked_fill(run.is_masked(tokens), UNWRITTEN))
        return cls(
            canvases=torch.stack(canvases),
            revealed_at=torch.stack([run.revealed_at.cpu() for run in runs]),
            confidences=torch.stack([run.confidence.cpu() for run in runs]),
            real=was.real.cpu(),
            words={**now.words, **was.words, UNWRITTEN: ""},
            record={**was.record, "other": now.record, "compared_from": start},
        )

    @cached_property
    def differs(self) -> Bool[Tensor, "canvas batch pos"]:
        """The positions at which the canvases differ, before the first step that is compared and after each."""
        return (self.canvases[0] != self.canvases[1]) & self.real

    @property
    def first_step(self) -> int | None:
        """First step after which the canvases differ; `None` if they never do. If the first canvases differ, it is the
        number of the step before them, -1 for whole runs."""
        differing = self.differs.flatten(1).any(dim=1).nonzero()
        return self._step(int(differing[0])) if len(differing) else None

    @property
    def tokens(self) -> Bool[Tensor, "batch pos"]:
        """The positions whose final token differs."""
        return self.differs[-1]

    @property
    def order(self) -> Bool[Tensor, "batch pos"]:
        """The positions that the runs revealed in different steps."""
        return self.revealed_at[0] != self.revealed_at[1]

    @property
    def confidence(self) -> Float[Tensor, "batch pos"]:
        """The second run's confidence minus the first's."""
        return self.confidences[1] - self.confidences[0]

    def __len__(self) -> int:
        """Number of rows of the batch."""
        return len(self.real)

    def sentences(self, row: Whole = 0) -> list[str]:
        """The differences of the final texts of a row in words, such as "Plerrick → Mondall, from step 3".

        There is a sentence for each group of neighbouring positions whose final tokens differ since the same step. It
        is the first one since which both runs have a token there, not the same, until the end; of a position that one
        run does not write, the first since which only the other has written it. Text after the end token of both runs
        is not compared.
        """
        (index,) = pick_indices("row", [row], len(self))
        return [f"{was} → {now}, from {when}" for was, now, when in self._changes(index)]

    @styled
    def plot(self, row: Whole = 0, *, ax: Any = None, title: str | None = None, folded: bool = True) -> Any:
        """Both canvases by step: what is the same is pale, and where they differ both texts stand in a coloured cell;
        returns the matplotlib axes.

        Args:
            row: Row of the batch.
            folded: Whether steps that write nothing in both runs share a thin row; otherwise every step has its own.
        """
        from diffusion_lens import plots

        (index,) = pick_indices("row", [row], len(self))
        was, now = (
            [
                [None if token == UNWRITTEN else self.words[token] for token in canvas]
                for canvas in run[:, index].tolist()
            ]
            for run in self.canvases
        )
        differs, start = self.differs[:, index].tolist(), int(self.record["compared_from"])
        return plots.difference_grid(was, now, differs, start, ax=ax, title=title or self._said(index), folded=folded)

    def _picture(self) -> Any:
        return self.plot((self._rows() or [0])[0])

    def _rows(self) -> list[int]:
        """The rows of the batch with a difference."""
        return [row for row, differs in enumerate(self.differs.permute(1, 0, 2)) if differs.any()]

    def _step(self, canvas: int) -> int:
        """The step after which the runs had a canvas."""
        return int(self.record["compared_from"]) + canvas - 1

    def _when(self, canvas: int) -> str:
        start = int(self.record["compared_from"])
        return f"step {self._step(canvas)}" if canvas else f"before step {start}" if start else "the start"

    def _since(self) -> Int[Tensor, "batch pos"]:
        """The first canvas from which on the texts differ until the end; one past the last if the end is equal."""
        written = (self.canvases != UNWRITTEN).all(dim=0)
        apart = self.differs & (written | ~written[-1])
        numbers = torch.arange(len(apart))[:, None, None]
        return numbers.where(~apart, -1).amax(dim=0) + 1

    def _is_text(self) -> Bool[Tensor, "run batch pos"]:
        """The positions of the final canvases up to the first end token that the run has written."""
        ends = torch.tensor([token for token, text in self.words.items() if text.strip() in END_TEXTS])
        ended = torch.isin(self.canvases[:, -1], ends) & (self.revealed_at >= 0)
        return ended.long().cumsum(dim=-1) - ended.long() == 0

    def _changes(self, row: int) -> list[tuple[str, str, str]]:
        """Both texts of each group of neighbours whose final texts differ since one step, and since when."""
        from diffusion_lens import plots  # when it is needed: loading a model should not wait for it

        spaced = any(text[:1] in (" ", "▁") for text in self.words.values())
        is_text = self._is_text()[:, row]

        def said(run: int, group: list[int]) -> str:
            tokens = [int(self.canvases[run, -1, row, pos]) for pos in group if is_text[run, pos]]
            if not tokens:
                return "(ended)"
            if set(tokens) == {UNWRITTEN}:
                return "(unwritten)"
            texts = [self.words[token] if token != UNWRITTEN else "·" for token in tokens]
            return plots.readable("".join(texts)) if spaced else " ".join(map(plots.readable, texts))

        since = self._since()[row].tolist()
        final = (self.tokens[row] & is_text.any(dim=0)).tolist()
        keys = [(differ, since[pos]) for pos, differ in enumerate(final)]
        groups = [(key, list(group)) for key, group in groupby(range(len(final)), keys.__getitem__)]
        return [(said(0, group), said(1, group), self._when(start)) for (differ, start), group in groups if differ]

    def _said(self, row: int) -> str:
        """The difference of a row in few words: as many sentences as fit a title, and how many more there are."""
        from diffusion_lens.plots.axes import shortened

        if changes := self._changes(row):
            said = [
                f"{shortened(was, _LONGEST)} → {shortened(now, _LONGEST)}, from {when}" for was, now, when in changes
            ]
            n_said = 1 + (len(said) > 1 and len(said[0]) + len(said[1]) < 2 * _LONGEST)
            more = len(said) - n_said
            return "; ".join(said[:n_said]) + (f"; {more} more" if more else "")
        differing = (self.differs[:, row] & self._is_text()[:, row].any(dim=0)).any(dim=1).nonzero()
        largest = float(self._confidence_apart()[row])
        other = f"the same text, other canvases from {self._when(int(differing[0]))}" if len(differing) else ""
        if largest >= _NOTICED:
            return f"{other or 'the same text'}; confidences differ by up to {largest:.2g}"
        return other or "no difference"

    def _confidence_apart(self) -> Float[Tensor, "batch"]:
        """The largest difference of confidences in each row."""
        compared = self.real & self._is_text().any(dim=0) & (self.revealed_at >= 0).any(dim=0)
        return (self.confidence.abs().nan_to_num() * compared).amax(dim=1)

    def _table(self) -> Table:
        was, now = self.canvases
        n_canvases = len(was)
        # 1. A row begins where the pair of tokens changes, and ends before the next change.
        changed = torch.ones_like(self.differs)
        changed[1:] = (was[1:] != was[:-1]) | (now[1:] != now[:-1])
        numbers = torch.arange(n_canvases)[:, None, None].where(changed, n_canvases)
        following = torch.cat([numbers[1:], torch.full_like(numbers[:1], n_canvases)]).flip(0).cummin(dim=0).values
        ends = following.flip(0) - 1
        rows, positions, canvases = (self.differs & changed).permute(1, 2, 0).nonzero(as_tuple=True)
        # 2. The first difference of each position.
        first = self.differs.int().argmax(dim=0)
        cells, start = (rows, positions), int(self.record["compared_from"]) - 1
        columns = {
            "batch": rows,
            "pos": positions,
            "step": canvases + start,
            "until": ends[canvases, rows, positions] + start,
            "was": texts_of(was[canvases, rows, positions], self.words),
            "now": texts_of(now[canvases, rows, positions], self.words),
            "first_step": first[cells] + start,
            "confidence_was": self.confidences[0][cells],
            "confidence_now": self.confidences[1][cells],
            "final_differs": self.tokens[cells],
        }
        return Table(columns)

    def __repr__(self) -> str:
        models = dict.fromkeys(map(shown_model, (self.record, self.record["other"])))
        rows = self._rows()
        row = rows[0] if rows else int(self._confidence_apart().argmax())
        said = self._said(row)
        where = f"row {row}: " if said != "no difference" and len(self) > 1 else ""
        more = f"; {len(rows)} of {len(self)} rows differ" if len(self) > 1 else ""
        return f"{type(self).__name__}({' and '.join(models)}, {where}{said}{more})"


def _require_one_prompt(was: Any, now: Any) -> None:
    """Raise a `ValueError` unless two trajectories have one shape, one vocabulary and one prompt."""
    runs = (was, now)
    shapes = [list(run.tokens.shape) for run in runs]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"runs of different shape cannot be compared: they have {shapes[0]} and {shapes[1]} [batch pos]. Denoise "
            "the same prompts to the same length=; run.row(index) is one row of a batch"
        )
    # 1. Two models of one vocabulary may differ in [MASK].
    shared = (was.words.keys() & now.words.keys()) - {UNWRITTEN, was.blank, now.blank}
    different = sorted(token for token in shared if was.words[token] != now.words[token])
    fitting = "Compare runs of one model, or of models that share a vocabulary, such as those of load_pair"
    names = " and ".join(repr(shown_model(run.record)) for run in runs)
    if different:
        texts = [run.words[different[0]] for run in runs]
        raise ValueError(
            f"the runs of {names} have different vocabularies: the id {different[0]} is {texts[0]!r} in the first and "
            f"{texts[1]!r} in the second. {fitting}"
        )
    # 2. The given tokens, by their ids and, if these differ, by their texts.
    prompts = [run.prompt.cpu().masked_fill(~(run.given.cpu() & run.real.cpu()), UNWRITTEN) for run in runs]
    unequal = ((prompts[0] != prompts[1]) | (was.real.cpu() != now.real.cpu())).any(dim=1)
    if unequal.any():
        row = int(unequal.int().argmax())
        texts = [
            " ".join(run.words.get(token, f"<{token}>") for token in prompt[row].tolist() if token != UNWRITTEN)
            for run, prompt in zip(runs, prompts, strict=True)
        ]
        if texts[0] == texts[1] and torch.equal(prompts[0] == UNWRITTEN, prompts[1] == UNWRITTEN):
            raise ValueError(f"the runs of {names} have different vocabularies: other ids for {texts[0]!r}. {fitting}")
        raise ValueError(
            f"the two runs have different prompts: {texts[0]!r} and {texts[1]!r} in row {row}; compare runs of the "
            "same prompt at the same positions"
        )
