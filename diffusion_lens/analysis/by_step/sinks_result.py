"""The result of `attention_sinks`: which positions are sinks, and how long they stay."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.display import PicturedResult, Table, texts_of
from diffusion_lens.records import as_dataclass, load_result, save_result
from diffusion_lens.settings import Whole, pick_indices
from diffusion_lens.shapes import PosMask, Tokens

_TENSORS = ("received", "even", "n_queries", "canvases", "masked", "special", "given", "final")
KINDS = ("masked", "special", "prompt", "written")


@dataclass(frozen=True)
class SinkSpan:
    """A sink that stays for some consecutive steps.

    Attributes:
        layer, head, row, position: Where it is; the head is 0 for an average over heads.
        first_step: Step at which it appears.
        n_steps: Number of steps for which it stays.
    """

    layer: int
    head: int
    row: int
    position: int
    first_step: int
    n_steps: int


@dataclass(frozen=True, eq=False)
class AttentionSinks(PicturedResult):
    """The attention that positions receive, and the sinks among them.

    Without steps, the tensors have no axis of steps. `dataclasses.replace(sinks, threshold=...)` applies another
    threshold.

    Columns of the data frame: step (of a trajectory), layer, head (from 0), batch, pos, token, received, excess,
    sink.

    Attributes:
        received: Float[*step layer head batch pos], attention received from all queries together, NaN at padding and
            where the text has not been reached. The values of one head add up to its number of queries.
        even: Float[*step batch pos], the same if every query attended equally to all positions that it sees.
        n_queries: Int[*step batch pos], number of queries that see a position.
        canvases: Int[*step batch pos], the tokens that were read; -1 where a growing text has not been reached.
        masked: Bool[*step batch pos], positions that contain [MASK]; under uniform noise those that the step may write.
        special: Bool[*step batch pos], special tokens of the tokenizer, such as the end token.
        given: Bool[batch pos], positions of the prompt of a run; false without a run.
        final: Int[batch pos], the final canvas of the run; without a run the tokens that were read.
        threshold: By how much a sink exceeds the mean of all other positions, in multiples of equal attention.
        words: Text of every id that occurs.
        record: Steps, layers, heads, inputs, model, hash of the weights, hooks, versions.
    """

    received: Float[Tensor, "*step layer head batch pos"]
    even: Float[Tensor, "*step batch pos"]
    n_queries: Int[Tensor, "*step batch pos"]
    canvases: Int[Tensor, "*step batch pos"]
    masked: Bool[Tensor, "*step batch pos"]
    special: Bool[Tensor, "*step batch pos"]
    given: PosMask
    final: Tokens
    threshold: float
    words: dict[int, str]
    record: dict[str, Any]

    @property
    def steps(self) -> tuple[int, ...] | None:
        """The steps; `None` for a single pass."""
        return None if self.record["steps"] is None else tuple(self.record["steps"])

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers."""
        return tuple(self.record["layers"])

    @property
    def present(self) -> Bool[Tensor, "*step batch pos"]:
        """The positions that contain a token or [MASK]."""
        return self.n_queries > 0

    @property
    def incoming(self) -> Float[Tensor, "*step layer head batch pos"]:
        """Mean attention from the queries that see a position, between 0 and 1."""
        return self.received / self._by_head(self.n_queries)

    @property
    def excess(self) -> Float[Tensor, "*step layer head batch pos"]:
        """Attention received beyond equal attention, minus the mean of the same over all other positions."""
        beyond = self.received - self._by_head(self.even)
        n = self._by_head(self.present.sum(dim=-1, keepdim=True))
        others = (beyond.nansum(dim=-1, keepdim=True) - beyond) / (n - 1)
        return beyond - others

    @property
    def is_sink(self) -> Bool[Tensor, "*step layer head batch pos"]:
        """The positions whose excess is above the threshold."""
        return self.excess.nan_to_num(nan=-torch.inf) > self.threshold

    @property
    def persistence(self) -> Float[Tensor, "layer head batch pos"]:
        """Of the steps at which a position contains a token, the share at which it is a sink; NaN if there are none."""
        self._require_steps()
        return self.is_sink.sum(dim=0) / self._by_head(self.present).expand_as(self.is_sink).sum(dim=0)

    @property
    def overlap(self) -> Float[Tensor, "transition layer head batch"]:
        """Jaccard index of the sinks at consecutive steps of `steps`: 1 if they stay, 0 if all move; NaN without sinks.

        Entry i compares the steps i and i + 1.
        """
        self._require_steps()
        before, after = self.is_sink[:-1], self.is_sink[1:]
        shared: Tensor = (before & after).sum(dim=-1) / (before | after).sum(dim=-1)
        return shared

    def spans(self) -> list[SinkSpan]:
        """Every sink with the steps for which it stays, the longest first.

        Raises:
            ValueError: The steps are not consecutive, so that lifetimes are unknown.
        """
        steps = self._require_steps()
        if steps != tuple(range(steps[0], steps[0] + len(steps))):
            raise ValueError(f"lifetimes need consecutive steps; the steps are {list(steps)}")
        sinks = self.is_sink
        padded = torch.nn.functional.pad(sinks.movedim(0, -1), (1, 1)).int().diff(dim=-1)
        spans = []
        # In reading order, the beginnings and the ends of one position alternate.
        for start, stop in zip((padded == 1).nonzero().tolist(), (padded == -1).nonzero().tolist(), strict=True):
            layer, head, row, position, first = start
            spans.append(SinkSpan(self.layers[layer], head, row, position, steps[0] + first, stop[-1] - first))
        return sorted(spans, key=lambda span: -span.n_steps)

    def kinds(self) -> dict[str, tuple[float, float]]:
        """For each kind of position its share of all sinks, and its share of all positions, for comparison.

        Kinds: "masked" contains [MASK], or may be noise; "special" is a special token; "prompt" is another given token;
        "written" is a token that the run has written, or without a run any other token. The first share is NaN without
        sinks.
        """
        masked, special = self.masked & self.present, self.special & ~self.masked & self.present
        prompt = self.given & ~masked & ~special & self.present
        of_kind = dict(zip(KINDS, (masked, special, prompt, self.present & ~masked & ~special & ~prompt), strict=True))
        sinks, n_sinks, n = self.is_sink, int(self.is_sink.sum()), int(self.present.sum())
        return {
            kind: (
                float((sinks & self._by_head(where)).sum()) / n_sinks if n_sinks else float("nan"),
                float(where.sum()) / n,
            )
            for kind, where in of_kind.items()
        }

    def tokens(self, most: Whole = 5) -> list[tuple[str, float]]:
        """The tokens that are sinks most often, as text, with their share of all sinks."""
        canvases = self.canvases[..., None, None, :, :].expand_as(self.received)
        counts = Counter(canvases[self.is_sink].tolist())
        total = sum(counts.values())
        return [(self.words[int(token)], count / total) for token, count in counts.most_common(int(most))]

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        words = [[token, word] for token, word in self.words.items()]
        saved = {"threshold": self.threshold, "words": words, "record": self.record}
        return save_result(path, "attention sinks", tensors, saved)

    @classmethod
    def load(cls, path: str | Path) -> "AttentionSinks":
        """Read what `save` wrote."""
        tensors, saved = load_result(path, "attention sinks")
        words = {int(token): word for token, word in saved["words"]}
        return as_dataclass(cls, {**tensors, **saved, "words": words})

    def plot(self, layer: Whole = -1, row: Whole = 0, ax: Any = None, title: str | None = None) -> Any:
        """Attention received in one layer, mean over heads, by position and step; returns the matplotlib axes.

        A dot marks a sink of at least one head. Without steps the columns are layers.
        """
        (row_index,) = pick_indices("row", [row], self.received.shape[-2])
        mean, sink = self.received.mean(dim=-3)[..., row_index, :], self.is_sink.any(dim=-3)[..., row_index, :]
        if self.steps is None:
            values, dots, columns, where = mean.mT, sink.mT, self.layers, "Attention received"
        else:
            (index,) = pick_indices("layer", [layer], len(self.layers))
            values, dots, columns = mean[:, index].mT, sink[:, index].mT, self.steps
            where = f"Attention received in layer {self.layers[index]}"
        ax = plots.labelled_map(
            values,
            rows=[plots.readable(self.words[int(token)]) for token in self.final[row_index]],
            layers=columns,
            xlabel="layer" if self.steps is None else "denoising step",
            hue="Purples",
            limits=(0.0, float(values.nan_to_num().max())),
            bar="sum",
            title=title or where,
            ax=ax,
        )
        positions, marked = dots.nonzero(as_tuple=True)
        ax.plot(marked.tolist(), positions.tolist(), linestyle="", marker=".", color="C1")
        return ax

    def _table(self) -> Table:
        n_heads, batch, n_pos = self.received.shape[-3:]
        steps = {} if self.steps is None else {"step": self.steps}
        axes = {
            **steps, "layer": self.layers, "head": range(n_heads), "batch": range(batch), "pos": range(n_pos)
        }  # fmt: skip
        values = {
            "token": texts_of(self._by_head(self.canvases), self.words),
            "received": self.received,
            "excess": self.excess,
            "sink": self.is_sink,
        }
        return Table.of_cells(axes, values, most="excess")

    def __repr__(self) -> str:
        steps = "one pass" if self.steps is None else f"{len(self.steps)} steps of {self.record['n_steps']}"
        return f"AttentionSinks({steps}, {len(self.layers)} layers, {int(self.is_sink.sum())} sinks)"

    def _by_head(self, x: Tensor) -> Tensor:
        """[*step batch pos] with the axes of layers and heads."""
        return x[..., None, None, :, :]

    def _require_steps(self) -> tuple[int, ...]:
        if self.steps is None:
            raise ValueError("a single pass has no steps: compute the sinks of a trajectory, model.denoise(...)")
        return self.steps
