"""Attention sinks by denoising step: which positions receive most of the attention, and for how long?

The attention that position j receives from the queries i of one head is a column sum of the pattern A,

    r_j = Σ_i A_ij,

so that the r_j of a head add up to its number of queries, and where all see all, equal attention gives r_j = 1.
Position j is a sink if r_j exceeds the mean of all other positions by more than a threshold ε (Rulli et al. 2025, arXiv
2510.15731, eq. 3). The paper defines the score as the mean over the queries, which is at most 1, and uses ε = 3, with
scores of up to 50 in its histograms. This fits sums, in multiples of equal attention, which are used here.

On a causal model an early position has more queries, and equal attention gives it more: e_j = Σ_(i ≥ j) 1 / (i + 1). A
position is therefore a sink by its excess r_j - e_j. Where all see all, e_j is 1 everywhere, and the excess
decides as in the paper. (The mean over the queries that see j is `incoming`. By that measure the last token of a causal
text, whose only query is itself, would often exceed all others.)

Padding, and positions that a text has not reached, are neither queries nor keys. Patterns are reduced inside the hook,
and never kept.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.engine.by_step import ByStep, Reading
from diffusion_lens.analysis.engine.inputs import ForwardPass, Readable, SharedPass
from diffusion_lens.model.attention import AttentionPattern
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer, origins_of
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import Table, texts_of
from diffusion_lens.settings import Whole, not_negative, one_of, pick_indices
from diffusion_lens.settings.figures import styled

KINDS = ("masked", "special", "prompt", "written")
_BYTES_OF_A_POSITION = 13  # of equal attention, the number of queries and a flag


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
class AttentionSinks(ByStep):
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

    KIND = "attention sinks"
    SHOWS = "the attention that each position receives, mean over heads, with a dot at each sink"

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
        sinks, n = self.is_sink, int(self.present.sum())
        n_sinks = float(sinks.sum()) or float("nan")
        return {
            kind: (float((sinks & self._by_head(where)).sum()) / n_sinks, float(where.sum()) / n)
            for kind, where in of_kind.items()
        }

    def tokens(self, most: Whole = 5) -> list[tuple[str, float]]:
        """The tokens that are sinks most often, as text, with their share of all sinks."""
        canvases = self.canvases[..., None, None, :, :].expand_as(self.received)
        counts = Counter(canvases[self.is_sink].tolist())
        total = sum(counts.values())
        return [(self.words[int(token)], count / total) for token, count in counts.most_common(int(most))]

    @styled
    def plot(self, layer: Whole = -1, row: Whole = 0, ax: Any = None, title: str | None = None) -> Any:
        """Attention received in one layer, mean over heads, by position and step; returns the matplotlib axes.

        A dot marks a sink of at least one head. `layer` is one of the `layers`; negative numbers count from their end.
        Without steps the columns are layers.
        """
        (row_index,) = pick_indices("row", [row], self.received.shape[-2])
        mean, sink = self.received.mean(dim=-3)[..., row_index, :], self.is_sink.any(dim=-3)[..., row_index, :]
        if self.steps is None:
            values, dots, columns, where = mean.mT, sink.mT, self.layers, "Attention received"
        else:
            index = self._index("layer", layer)
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
        heads, rows, positions = range(n_heads), range(batch), range(n_pos)
        axes = {**self._step_axis(), "layer": self.layers, "head": heads, "batch": rows, "pos": positions}
        values = {
            "token": texts_of(self._by_head(self.canvases), self.words),
            "received": self.received,
            "excess": self.excess,
            "sink": self.is_sink,
        }
        return Table.of_cells(axes, values, most="excess")

    def __repr__(self) -> str:
        return f"AttentionSinks({self._extent}, {int(self.is_sink.sum())} sinks)"

    def _by_head(self, x: Tensor) -> Tensor:
        return x[..., None, None, :, :]

    def _require_steps(self) -> tuple[int, ...]:
        if self.steps is None:
            raise ValueError("a single pass has no steps: compute the sinks of a trajectory, model.denoise(...)")
        return self.steps


@begins_run
@torch.no_grad()
def attention_sinks(
    model: DiffusionTransformer,
    inputs: Readable,
    *,
    threshold: float = 3.0,
    steps: Whole | Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = None,
    heads: str = "each",
    attention_mask: Tensor | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> AttentionSinks:
    """The attention that each position receives, by step, layer and head, and which positions are sinks.

    The caller's hooks act, also those that change patterns. Without hooks, steps with the same canvas share a forward
    pass; a causal model takes a single one. Under guidance it is the conditional branch.

    Args:
        model: Model of either variant.
        inputs: A trajectory, or texts, Int[batch pos] tokens, queries or facts for a single pass without a step.
        threshold: ε, in multiples of equal attention.
        steps: Steps of the trajectory, negative ones from the end; by default all.
        layers: Layers, negative ones from the end; by default all.
        heads: "each", or "mean" for the average over the heads of a layer, which takes less memory.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        max_bytes: Most memory for the result and for one forward pass.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A step or layer that does not exist, steps without a trajectory, or a budget that is too small.
    """
    one_of("each", "mean")("heads", heads)
    epsilon = not_negative("threshold", threshold, "every position above the mean")
    reading = Reading.of(model, inputs, steps, layers, attention_mask)
    n_steps, n_heads = reading.n_steps, 1 if heads == "mean" else model.cfg.n_heads
    shape = (n_steps, reading.batch, reading.pos)
    n_bytes = math.prod(shape) * (4 * len(reading.layers) * n_heads + _BYTES_OF_A_POSITION)
    advice = "give fewer steps or layers, heads='mean', or fewer rows"
    reading.require_memory(n_bytes, max_bytes, "the attention received takes", advice)
    tensors = {
        "received": torch.full((n_steps, len(reading.layers), n_heads, *shape[1:]), torch.nan),
        "even": torch.empty(shape),
        "n_queries": torch.empty(shape, dtype=torch.long),
        "special": torch.empty(shape, dtype=torch.bool),
    }

    def reduce(one: SharedPass) -> None:
        _receive(one, reading.layers, tensors["received"])
        for index, canvas in one.served.items():
            tensors["even"][index], tensors["n_queries"][index] = _equal_attention(canvas)
            tensors["special"][index] = _special(model, canvas.tokens) & canvas.present

    read = reading.read(reduce, "attention sinks", progress)
    return AttentionSinks(
        **{name: reading.without_steps(x) for name, x in tensors.items()},
        canvases=read.tokens,
        masked=read.masked,
        given=read.given,
        final=read.final,
        threshold=epsilon,
        words=read.words,
        record={**reading.record(), "heads": heads},
    )


def _receive(one: SharedPass, layers: Sequence[int], received: Float[Tensor, "step layer head batch pos"]) -> None:
    """Write the column sums of the patterns of some layers, at the positions and steps that the pass serves."""
    groups = one.by_reach()
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in layers]

    def reduce(pattern: Tensor, hook: Any) -> None:
        wide = pattern.to(torch.promote_types(pattern.dtype, torch.float32))
        of_layer = received[:, names.index(hook.name)]
        for indices, reached in groups:
            present = reached.to(wide.device)
            columns = (present[:, None, None].to(wide) @ wide)[:, :, 0].transpose(0, 1)
            columns = columns.mean(dim=0, keepdim=True) if of_layer.shape[1] == 1 else columns
            of_layer[indices, ..., : pattern.shape[-1]] = columns.masked_fill(~present, torch.nan).cpu().float()

    one.read.run([(name, reduce) for name in names])


def _equal_attention(read: ForwardPass) -> tuple[Tensor, Tensor]:
    """What each position receives by equal attention, and the number of its queries; 0 where there is no token."""
    tokens, present = read.tokens, read.present
    pattern = AttentionPattern.of(read.model.cfg)
    with read.model.clock.at(read.step):
        origins = origins_of(read.model, tokens, read.real)
    visibility = pattern.visibility(tokens.shape[1], tokens.device, read.real, origin=origins)
    allowed = visibility.dense(tokens.shape[1], tokens.shape[1], tokens.device)[:, 0].expand(len(tokens), -1, -1)
    seen = (allowed & present[:, :, None] & present[:, None, :]).float()
    shares = seen / seen.sum(dim=2, keepdim=True).clamp(min=1)
    return shares.sum(dim=1), seen.sum(dim=1)


def _special(model: DiffusionTransformer, tokens: Tensor) -> Tensor:
    """True at special tokens of the tokenizer other than [MASK]."""
    ids = set(getattr(model.tokenizer, "all_special_ids", ())) - {model.cfg.mask_token_id}
    return torch.isin(tokens, torch.tensor(sorted(ids), dtype=tokens.dtype, device=tokens.device))
