"""The numbers of an explorer page: an entry of the manifest for each view of a run, and its chunks, most by step.

    predictions               step [n], position [n], entropy [n], top_tokens [n k], top_probabilities [n k]
    lens/{step}               top_tokens [layer pos k], top_probabilities [layer pos k], entropy [layer pos],
                              rank [layer pos], probability [layer pos]
    attention/{layer}/{step}  pattern [head query key]
    trace/{name}/{step}       scores [pos layer]; header: clean, corrupted, highest
    circuit/{step}            nodes [writer], the score of each; writer, reader, score [n], the edges of the largest
                              absolute scores, by the index of their ends; header: clean, corrupted, n_edges
    graph                     step, layer, head, position, branch, token, other, effect [node]; source, target,
                              decision [edge]; header: names, ids and kinds of the nodes, and the document of
                              circuit-tracer, which has the weights and influences
    experts/{step}            experts [layer pos chosen], best first; weights [layer pos chosen], NaN where not known
    conditioning              words [step pos], -1 where a step reads none; streak [step]; finished [step]
    signatures                for each measure [bar 4]: the mean, both ends of its interval, the run's own fact

Tokens are indices into the words of the run. A chunk with further words lists them in its header as `words`; they
follow those of the run. A chunk is binary:

    uint32 n, little endian; n bytes of UTF-8 JSON, the header; zeros up to a multiple of 8; then the arrays, one after
    the other, each followed by zeros up to a multiple of 8

The header lists the arrays, {"arrays": [{"name", "dtype": "u1" | "u2" | "i4" | "f4", "shape", "scale"}, ...], ...}.
With a scale, a value is the stored integer times the scale, and the largest integer stands for NaN. Probabilities are
stored as u2 with the scale 1/65534, which is exact to 0.8e-5.

The view of the same name, a file of `explorer/views/`, shows each.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 8
_DTYPES: dict[str, Any] = {"u1": np.uint8, "u2": np.uint16, "i4": np.int32, "f4": np.float32}
_ABSENT = {"u1": 2**8 - 1, "u2": 2**16 - 1}  # stored for NaN, and for no token


@dataclass(frozen=True, eq=False)
class Stored:
    """An array as a chunk stores it: dtype "u1", "u2", "i4" or "f4", and the factor of stored integers, if any."""

    dtype: str
    values: NDArray[Any]
    scale: float | None = None

    @classmethod
    def integers(cls, x: Any) -> "Stored":
        """Integers, such as positions and ranks, in 32 bits."""
        return cls("i4", _as_array(x).astype(np.int32))

    @classmethod
    def numbers(cls, x: Any) -> "Stored":
        """Numbers in float32; NaN stays NaN."""
        return cls("f4", _as_array(x).astype(np.float32))

    @classmethod
    def shares(cls, x: Any, dtype: str = "u2") -> "Stored":
        """Numbers between 0 and 1, or NaN, as integers of 8 ("u1") or 16 bits ("u2"); others are a `ValueError`."""
        given = _as_array(x).astype(np.float64)
        absent = _ABSENT[dtype]
        known = given[~np.isnan(given)]
        if known.size and (known.min() < 0 or known.max() > 1 + 1e-4):
            raise ValueError(f"shares are between 0 and 1, and these are between {known.min():g} and {known.max():g}")
        stored = np.where(np.isnan(given), absent, np.rint(np.nan_to_num(given.clip(max=1)) * (absent - 1)))
        return cls(dtype, stored.astype(_DTYPES[dtype]), 1 / (absent - 1))


def pack(arrays: Mapping[str, Stored], **extra: Any) -> bytes:
    """The bytes of a chunk; `extra` are further entries of its header."""
    described = []
    for name, stored in arrays.items():
        entry: dict[str, Any] = {"name": name, "dtype": stored.dtype, "shape": list(stored.values.shape)}
        described.append(entry if stored.scale is None else {**entry, "scale": stored.scale})
    header = json.dumps({"arrays": described, **extra}, allow_nan=False, ensure_ascii=False).encode()
    parts = [len(header).to_bytes(4, "little") + header]
    parts += [np.ascontiguousarray(x.values, dtype=_DTYPES[x.dtype]).tobytes() for x in arrays.values()]
    return b"".join(part + bytes(-len(part) % _ALIGNED) for part in parts)


def _as_array(x: Any) -> NDArray[Any]:
    return x.detach().float().cpu().numpy() if isinstance(x, Tensor) and x.is_floating_point() else np.asarray(x)


class Words:
    """Texts of token ids in the order in which they were first asked for.

    Ids below 0 are no tokens; their index is -1. Two ids with the same text are two words.

    With `known`, words that the reader has already, those of this object count on from them, and `texts` are the
    further ones only.
    """

    def __init__(self, known: "Words | None" = None) -> None:
        self._index: dict[int, int] = {} if known is None else dict(known._index)
        self._first = len(self._index)
        self._is_further = known is not None
        self.texts: list[str] = []

    @property
    def header(self) -> dict[str, list[str]]:
        """The entry of a chunk's header with the further words; none if the manifest lists the words."""
        return {"words": self.texts} if self._is_further and self.texts else {}

    def index(self, token: int, texts: Mapping[int, str]) -> int:
        """The index of one token."""
        if token < 0:
            return -1
        if token not in self._index:
            self._index[token] = self._first + len(self.texts)
            self.texts.append(texts[token])
        return self._index[token]

    def indices(self, tokens: Tensor | Iterable[Any], texts: Mapping[int, str]) -> NDArray[np.int32]:
        """The indices of an array of tokens, in its shape."""
        ids = tokens.cpu().numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
        different, inverse = np.unique(ids, return_inverse=True)
        table = np.array([self.index(int(token), texts) for token in different], dtype=np.int32)
        indices: NDArray[np.int32] = table[inverse.reshape(ids.shape)] if ids.size else ids.astype(np.int32)
        return indices

    def stored(self, tokens: Tensor, texts: Mapping[int, str]) -> Stored:
        """The indices as a chunk stores them: u2 with 65535 for none, or i4 with -1 where there are too many words."""
        indices = self.indices(tokens, texts)
        if self._first + len(self.texts) >= _ABSENT["u2"]:
            return Stored("i4", indices)
        return Stored("u2", np.where(indices < 0, _ABSENT["u2"], indices).astype(np.uint16))


@dataclass(frozen=True)
class View:
    """One view of a run: its entry of the manifest, and the bytes of each chunk by name."""

    entry: dict[str, Any]
    chunks: dict[str, bytes] = field(default_factory=dict, repr=False)


def steps_of(lens: Any) -> list[int]:
    """The steps that a lens of a trajectory read."""
    return [lens.record["step"]] if lens.steps is None else lens.steps


def lens_chunk(lens: Any, index: int, row: int, words: Words) -> bytes:
    """The readings of one step of a `LogitLens`, by its index among those of the lens."""

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


def lens_view(lens: Any, row: int, words: Words) -> View:
    """All steps of a `LogitLens`; the `targets` are the words whose rank and probability are shown."""
    chunks = {f"lens/{step}": lens_chunk(lens, i, row, words) for i, step in enumerate(steps_of(lens))}
    entry = {
        "labels": lens.labels,
        "layers": lens.layers,
        "positions": lens.positions,
        "steps": steps_of(lens),
        "k": lens.top_tokens.shape[-1],
        "targets": words.indices(lens.targets[row, :, 0], lens.words).tolist(),
        "chunk": "lens/{step}",
    }
    return View(entry, chunks)


def predictions_view(predictions: Any, committed: Sequence[int] | None, words: Words) -> View:
    """`Predictions` of one row, as a single chunk with an entry for each prediction.

    Args:
        committed: Step from which on each position keeps its likeliest token, -1 for none; `None` if this is not known.
    """
    places = predictions.masked[:, 0]
    steps, positions = places.nonzero(as_tuple=True)
    arrays = {
        "step": Stored.integers(np.asarray(predictions.steps)[steps]),
        "position": Stored.integers(positions),
        "entropy": Stored.numbers(predictions.entropy[:, 0][places]),
        "top_tokens": words.stored(predictions.tokens[:, 0][places], predictions.words),
        "top_probabilities": Stored.shares(predictions.probabilities[:, 0][places]),
    }
    entry = {"k": predictions.top_k, "steps": predictions.steps, "committed": committed, "chunk": "predictions"}
    return View(entry, {"predictions": pack(arrays)})


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


def trace_entry(
    name: str,
    kind: str,
    subject: Sequence[int],
    positions: Sequence[int],
    layers: Sequence[int],
    steps: Sequence[int],
    answer: str,
) -> dict[str, Any]:
    """The manifest's entry of the traces of one kind of state, "resid", "mlp" or "attn", before they are computed.

    Args:
        name: Name of the view among the traces of its run.
        subject: First position of the subject, and one past its last.
        positions, layers: Position and layer of each row and column of the scores.
        answer: Text of the answer.
    """
    where = {"subject": list(subject), "positions": list(positions), "layers": list(layers), "steps": list(steps)}
    computed = dict.fromkeys(("clean", "corrupted", "highest"))
    return {"name": name, "kind": kind, **where, "answer": answer, **computed, "chunk": f"trace/{name}/{{step}}"}


def trace_view(entry: Mapping[str, Any], scores: Tensor, clean: Sequence[float], corrupted: Sequence[float]) -> View:
    """The traces of an entry at all its steps.

    Args:
        scores: Float[step pos layer], NaN where nothing was restored. The highest ends the colour scale of all steps.
        clean, corrupted: p(answer) of the two runs at each step.
    """
    chunks, highest = {}, float(scores.nan_to_num().max())
    for step, grid, p_clean, p_corrupted in zip(entry["steps"], scores, clean, corrupted, strict=True):
        header = {"clean": p_clean, "corrupted": p_corrupted, "highest": highest}
        chunks[f"trace/{entry['name']}/{step}"] = pack({"scores": Stored.numbers(grid)}, **header)
    return View({**entry, "clean": list(clean), "corrupted": list(corrupted), "highest": highest}, chunks)


def view_of_trace(trace: Any, name: str, answer: str) -> View:
    """The view of a `TrajectoryTrace`, under a name."""
    where = trace.subject, trace.positions, trace.layers, trace.steps
    entry = trace_entry(name, trace.record["kind"], *where, answer)
    return trace_view(entry, trace.scores, trace.clean.tolist(), trace.corrupted.tolist())


MOST_EDGES = 300  # of a step, so that a page of a large network stays small


def circuit_view(scores: Any, steps: Sequence[int], side: str, n_rows: int) -> View:
    """`EdgeScores` or `NodeScores`: nodes, and the edges with the largest absolute scores of each step.

    Args:
        steps: The steps of the scores, in order.
        side: Which of both inputs the run is, "clean" or "corrupted".
        n_rows: Number of rows over which the scores are summed.
    """
    graph, has_edges, chunks = scores.graph, hasattr(scores, "exists"), {}
    for i, step in enumerate(steps):
        table, *metrics = (x[i] if scores.clean.dim() else x for x in (scores.scores, scores.clean, scores.corrupted))
        arrays = {"nodes": Stored.numbers(table.sum(dim=-1) if has_edges else table)}
        if has_edges:
            strongest = table.abs().masked_fill(~scores.exists, -1).flatten()
            kept = strongest.topk(min(MOST_EDGES, int(scores.exists.sum()))).indices
            ends = {"writer": kept // graph.n_readers, "reader": kept % graph.n_readers}
            arrays |= {name: Stored.integers(x) for name, x in ends.items()}
            arrays["score"] = Stored.numbers(table.flatten()[kept])
        clean, corrupted = map(float, metrics)
        chunks[f"circuit/{step}"] = pack(arrays, clean=clean, corrupted=corrupted)
    entry = {
        "steps": list(steps),
        "writers": list(graph.writers),
        "readers": list(graph.readers) if has_edges else [],
        "n_key_value_heads": graph.n_key_value_heads,
        "n_edges": int(graph.edges.sum()) if has_edges else 0,
        "side": side,
        "n_rows": n_rows,
    }
    return View(entry, chunks)


def graph_chunk(
    graph: Any, document: Mapping[str, Any], ids: Sequence[str], kinds: Sequence[str], words: Words
) -> bytes:
    """A `RunGraph`, and what circuit-tracer reads of it.

    Args:
        document: The graph in the JSON of circuit-tracer.
        ids, kinds: Id in the document, and kind, of each node.
    """
    columns = ("step", "layer", "head", "position", "branch", "source", "target", "decision")
    arrays = {name: Stored.integers(getattr(graph, name)) for name in columns}
    arrays |= {name: Stored.integers(words.indices(getattr(graph, name), graph.words)) for name in ("token", "other")}
    arrays["effect"] = Stored.numbers(graph.effect)
    about = {
        "step": graph.record["target_step"],
        "word": words.index(graph.record["target"][1], graph.words),
        "metric": graph.record["metric"].replace("_", " "),
        "clean": graph.clean,
        "corrupted": graph.corrupted,
        "text": graph.runs["corrupted"].text[0],
    }
    named = {"ids": list(ids), "names": graph.names, "kinds": list(kinds)}
    return pack(arrays, document=document, about=about, **named, **words.header)


def experts_entry(layers: Sequence[int], n_experts: int, steps: Sequence[int]) -> dict[str, Any]:
    """The manifest's entry of the experts' choices."""
    return {"layers": list(layers), "n_experts": n_experts, "steps": list(steps)}


def experts_chunk(chosen: Sequence[Tensor], weights: Sequence[Tensor | None]) -> bytes:
    """The choices of one step.

    Args:
        chosen: For each layer Int[pos chosen], the experts that a router chose, best first.
        weights: For each layer Float[pos expert], what multiplies each expert's output; `None` where this is not known.
    """
    of_chosen = [
        torch.full(experts.shape, torch.nan) if table is None else table.float().gather(-1, experts)
        for experts, table in zip(chosen, weights, strict=True)
    ]
    return pack(
        {"experts": Stored.integers(torch.stack(list(chosen))), "weights": Stored.numbers(torch.stack(of_chosen))}
    )


def conditioning_view(
    likeliest: Tensor, streak: Tensor, finished: Tensor, steps: Sequence[int], texts: Mapping[int, str], words: Words
) -> View:
    """What each step reads of the prediction of the step before it, beside the canvas.

    Args:
        likeliest: Int[step pos], the likeliest token of that prediction; -1 where a step reads none.
        streak: Int[step], number of consecutive steps that predicted the same tokens.
        finished: Bool[step], whether the block is written, and waits for those of other rows.
    """
    arrays = {
        "words": Stored.integers(words.indices(likeliest, texts)),
        "streak": Stored.integers(streak),
        "finished": Stored.integers(finished.int()),
    }
    return View({"steps": list(steps)}, {"conditioning": pack(arrays, **words.header)})


# Name of a mean of `ReversalSignatures`, title, what a bar is, value that says nothing, ends of its scale if known.
_MEASURES: tuple[tuple[str, str, str, float, tuple[float, float] | None], ...] = (
    (
        "evidence_percentile",
        "Evidence",
        "the share of other answers that the right one exceeds by the evidence of its source",
        0.5,
        (0, 1),
    ),
    ("evidence_reuse", "Reuse of evidence", "the cosine of the evidence on both canvases", 0, (-1, 1)),
    ("edge_cut", "Edge cut", "the nats of log p(answer) that are lost without the edge from reader to source", 0, None),
    ("route_correlation", "Routes", "the correlation over heads of the scores of both directions", 0, (-1, 1)),
    ("gradient_cosine", "Gradients", "the cosine of the gradients of both losses", 0, (-1, 1)),
    ("first_order", "A small step", "the change of the reverse loss, in nats, by a step on the forward one", 0, None),
    ("probability", "p(answer)", "the probability of the right answer", 0, (0, 1)),
)
_MATRICES = ("attn.v", "attn.o", "mlp.down")


def signatures_view(signatures: Any, own: Sequence[int]) -> View:
    """`ReversalSignatures`: means with their intervals, and the fact that the run is about.

    Args:
        own: Rows of the facts that the run is about; where there are several, their mean is shown.
    """
    measures, arrays = [], {}
    for name, title, sentence, zero, ends in _MEASURES:
        values = signatures.values(name)
        if bool(values.isnan().all()):
            continue
        bars = torch.stack([values.mean(dim=0), *signatures.interval(name), values[list(own)].mean(dim=0)], dim=-1)
        labels = _labels(name, signatures)
        if name == "gradient_cosine":
            rows = [i for i, parameter in enumerate(signatures.parameters) if _place(parameter) is not None]
            bars = bars[rows, 0]  # the first estimate is that of the pair itself
        measures.append(
            {"name": name, "title": title, "sentence": sentence, "labels": labels, "zero": zero, "ends": ends}
        )
        arrays[name] = Stored.numbers(bars.flatten(0, -2))
    entry = {"measures": measures, "facts": [signatures.ids[i] for i in own], "n_facts": len(signatures.ids)}
    return View(entry, {"signatures": pack(arrays)})


def _labels(name: str, signatures: Any) -> list[str]:
    """Text of each bar of a measure, in the order of its axes."""
    layers, canvases = range(signatures.reuses.shape[1]), ("forward", "reverse")
    if name == "gradient_cosine":
        return [place for parameter in signatures.parameters if (place := _place(parameter)) is not None]
    if name == "first_order":
        return ["predicted", "measured"]
    if name == "probability":
        return list(canvases)
    if name in ("evidence_percentile", "edge_cut"):
        return [f"block {layer}, {canvas}" for canvas in canvases for layer in layers]
    return [f"block {layer}" for layer in layers]


def _place(parameter: str) -> str | None:
    """Block and matrix of a parameter through which the source writes or the facts are stored; `None` for others."""
    matrix = next((matrix for matrix in _MATRICES if parameter.endswith(f".{matrix}.weight")), None)
    return None if matrix is None else f"block {parameter.split('.')[1]}, {matrix}"
