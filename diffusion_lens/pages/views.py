"""The views of a run: an entry of the manifest that lists what there is, and a chunk for each step.

    alternatives/{step}       positions [n], top_tokens [n k], top_probabilities [n k]
    lens/{step}               top_tokens [layer pos k], top_probabilities [layer pos k], entropy [layer pos],
                              rank [layer pos], probability [layer pos]
    attention/{layer}/{step}  pattern [head query key]
    trace/{name}/{step}       scores [pos layer]; header: clean, corrupted, highest

Tokens are indices into the words of the run. A chunk with further words lists them in its header as `words`; they
follow those of the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from diffusion_lens.pages.chunks import Stored, pack
from diffusion_lens.pages.words import Words


@runtime_checkable
class Lens(Protocol):
    """What the view of a logit lens reads; `LogitLens` has these attributes."""

    @property
    def top_tokens(self) -> Tensor: ...

    @property
    def top_probabilities(self) -> Tensor: ...

    @property
    def entropy(self) -> Tensor: ...

    @property
    def target_ranks(self) -> Tensor: ...

    @property
    def target_probabilities(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...

    @property
    def tokens(self) -> Tensor: ...

    @property
    def positions(self) -> list[int]: ...

    @property
    def layers(self) -> list[int]: ...

    @property
    def labels(self) -> list[str]: ...

    @property
    def steps(self) -> list[int] | None: ...

    @property
    def words(self) -> dict[int, str]: ...

    @property
    def record(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class View:
    """One view of a run.

    Attributes:
        entry: Entry of the manifest.
        chunks: Bytes of each chunk, by name.
    """

    entry: dict[str, Any]
    chunks: dict[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class TraceGrids:
    """The causal traces of one kind at several steps.

    Attributes:
        name: Name of the view among the traces of its run.
        kind: Kind of state that was restored, "resid", "mlp" or "attn".
        subject: First position of the subject, and one past its last.
        positions, layers: Position and layer of each entry of the grids.
        steps: Step of each grid.
        answer: Text of the answer.
        scores: Float[step pos layer], NaN where nothing was restored.
        clean, corrupted: p(answer) of the two runs at each step.
    """

    name: str
    kind: str
    subject: tuple[int, int]
    positions: Sequence[int]
    layers: Sequence[int]
    steps: Sequence[int]
    answer: str
    scores: Tensor
    clean: Sequence[float]
    corrupted: Sequence[float]

    @property
    def highest(self) -> float:
        """The highest score of all steps, at which the colour scale ends."""
        return float(self.scores.nan_to_num().max())


def steps_of(lens: Lens) -> list[int]:
    """The steps that a lens of a trajectory read."""
    return [lens.record["step"]] if lens.steps is None else lens.steps


def lens_entry(lens: Lens, row: int, words: Words) -> dict[str, Any]:
    """The manifest's entry of a lens; `targets` are the words whose rank and probability are shown."""
    return {
        "labels": lens.labels,
        "layers": lens.layers,
        "positions": lens.positions,
        "steps": steps_of(lens),
        "k": lens.top_tokens.shape[-1],
        "targets": words.indices(lens.targets[row, :, 0], lens.words).tolist(),
        "chunk": "lens/{step}",
    }


def lens_chunk(lens: Lens, index: int, row: int, words: Words) -> bytes:
    """The readings of one step of a lens.

    Args:
        index: Index of the step among those of the lens.
        row: Row of the batch.
    """

    def table(x: Tensor) -> Tensor:
        return x[:, row] if lens.steps is None else x[index, :, row]

    arrays = {
        "top_tokens": words.stored(table(lens.top_tokens), lens.words),
        "top_probabilities": Stored.shares(table(lens.top_probabilities)),
        "entropy": Stored.numbers(table(lens.entropy)),
        "rank": Stored.integers(table(lens.target_ranks)[..., 0]),
        "probability": Stored.shares(table(lens.target_probabilities)[..., 0]),
    }
    return pack(arrays, **words.header)


def lens_view(lens: Lens, row: int, words: Words) -> View:
    """All steps of a lens."""
    chunks = {f"lens/{step}": lens_chunk(lens, i, row, words) for i, step in enumerate(steps_of(lens))}
    return View(lens_entry(lens, row, words), chunks)


def alternatives_of_lens(lens: Lens, row: int, blank: int) -> Iterator[tuple[int, list[int], Tensor, Tensor]]:
    """What the last layer predicts at the masked positions: step, positions, top tokens and probabilities [n k].

    Raises:
        ValueError: The lens did not read the state after the last block.
    """
    layer = lens.labels.index("final_post")
    for i, step in enumerate(steps_of(lens)):
        of_step = (lens.tokens, lens.top_tokens, lens.top_probabilities)
        canvas, top, p = of_step if lens.steps is None else (x[i] for x in of_step)
        masked = (canvas[row] == blank) & (top[layer, row, :, 0] >= 0)
        tokens, p = top[layer, row][masked], p[layer, row][masked]
        yield step, [lens.positions[j] for j in masked.nonzero().flatten().tolist()], tokens, p


def alternatives_of_logits(
    logits: Tensor, masked: Tensor, top_k: int, unwritten: int
) -> tuple[list[int], Tensor, Tensor]:
    """The likeliest tokens where a step proposed one: positions, top tokens and probabilities [n k].

    Args:
        logits: Float[pos d_vocab_out] after guidance; 0 where no token was proposed.
        masked: Bool[pos], the masked positions of the step.
        unwritten: Id that is never written, such as that of [MASK]; -1 for none.
    """
    positions = (masked & (logits != 0).any(dim=-1)).nonzero().flatten()
    of_proposed = logits[positions].double()
    p, ranked = of_proposed.softmax(dim=-1), of_proposed.clone()
    if 0 <= unwritten < logits.shape[-1]:
        ranked[:, unwritten] = -torch.inf
    top = ranked.topk(min(top_k, logits.shape[-1]), dim=-1).indices
    return positions.tolist(), top, p.gather(-1, top)


def alternatives_chunk(
    positions: Sequence[int], tokens: Tensor, p: Tensor, words: Words, texts: Mapping[int, str]
) -> bytes:
    """The likeliest tokens at the masked positions of one step."""
    arrays = {
        "positions": Stored.integers(positions),
        "top_tokens": words.stored(tokens, texts),
        "top_probabilities": Stored.shares(p),
    }
    return pack(arrays, **words.header)


def alternatives_entry(k: int, steps: Sequence[int]) -> dict[str, Any]:
    """The manifest's entry of the alternatives."""
    return {"k": k, "steps": list(steps), "chunk": "alternatives/{step}"}


def alternatives_view(
    by_step: Sequence[tuple[int, Sequence[int], Tensor, Tensor]], words: Words, texts: Mapping[int, str]
) -> View:
    """The likeliest tokens of several steps: step, positions, top tokens and probabilities [n k] of each."""
    chunks = {
        f"alternatives/{step}": alternatives_chunk(positions, tokens, p, words, texts)
        for step, positions, tokens, p in by_step
    }
    k = by_step[0][2].shape[-1] if by_step else 0
    return View(alternatives_entry(k, [step for step, *_ in by_step]), chunks)


def attention_chunk(pattern: Tensor, dtype: str = "u1") -> bytes:
    """A pattern [head query key]. In 8 bits it is exact to 0.002, in 16 bits ("u2") to 0.8e-5."""
    return pack({"pattern": Stored.shares(pattern, dtype)})


def attention_entry(layers: Sequence[int], n_heads: int, steps: Sequence[int]) -> dict[str, Any]:
    """The manifest's entry of the attention patterns."""
    return {"layers": list(layers), "n_heads": n_heads, "steps": list(steps), "chunk": "attention/{layer}/{step}"}


def attention_view(patterns: Mapping[tuple[int, int], Tensor]) -> View:
    """Patterns [head query key] by layer and step, of the same steps in every layer."""
    chunks = {f"attention/{layer}/{step}": attention_chunk(x) for (layer, step), x in patterns.items()}
    layers, steps = (sorted({key[i] for key in patterns}) for i in (0, 1))
    n_heads = next(iter(patterns.values())).shape[0]
    return View(attention_entry(layers, n_heads, steps), chunks)


def trace_entry(grids: TraceGrids) -> dict[str, Any]:
    """The manifest's entry of the traces of one kind."""
    return {
        "name": grids.name,
        "kind": grids.kind,
        "subject": list(grids.subject),
        "positions": list(grids.positions),
        "layers": list(grids.layers),
        "steps": list(grids.steps),
        "answer": grids.answer,
        "clean": list(grids.clean),
        "corrupted": list(grids.corrupted),
        "highest": grids.highest,
        "chunk": f"trace/{grids.name}/{{step}}",
    }


def trace_chunk(grids: TraceGrids, index: int) -> bytes:
    """The scores of one step."""
    header = {"clean": grids.clean[index], "corrupted": grids.corrupted[index], "highest": grids.highest}
    return pack({"scores": Stored.numbers(grids.scores[index])}, **header)


def trace_view(grids: TraceGrids) -> View:
    """The traces of one kind at all their steps."""
    chunks = {f"trace/{grids.name}/{step}": trace_chunk(grids, i) for i, step in enumerate(grids.steps)}
    return View(trace_entry(grids), chunks)
