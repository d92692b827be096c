"""The numbers of what analyses have learned about a run, packed as `diffusion_lens/pages/views.py` describes.

- circuit/{step}: nodes [writer], the score of each writer; writer, reader, score [n], the edges of the largest absolute
  scores, by the index of their ends; header: clean, corrupted, n_edges.
- graph: step, layer, head, position, branch, token, other, effect [node]; source, target, decision [edge]; header:
  names, ids and kinds of the nodes, and the document of circuit-tracer, which has the weights and influences.
- experts/{step}: experts [layer pos chosen], best first; weights [layer pos chosen], NaN where they are not known.
- conditioning: words [step pos], -1 where a step reads none; streak [step]; finished [step].
- signatures: for each measure [bar 4], the mean, both ends of its interval, and the value of the run's own fact.

The view of the same name, a file of `explorer/views/`, shows each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.pages.views import Stored, View, Words, pack

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


def graph_view(graph: Any, document: Mapping[str, Any], ids: Sequence[str], kinds: Sequence[str], words: Words) -> View:
    """A `RunGraph`, and what circuit-tracer reads of it.

    Args:
        document: The graph in the JSON of circuit-tracer.
        ids, kinds: Id in the document, and kind, of each node.
    """
    columns = ("step", "layer", "head", "position", "branch", "source", "target", "decision")
    arrays = {name: Stored.integers(getattr(graph, name)) for name in columns}
    arrays |= {name: Stored.integers(words.indices(getattr(graph, name), graph.words)) for name in ("token", "other")}
    arrays["effect"] = Stored.numbers(graph.effect)
    position, token = graph.record["target"]
    entry = {
        "step": graph.record["target_step"],
        "position": position,
        "word": words.index(token, graph.words),
        "metric": graph.record["metric"].replace("_", " "),
        "clean": graph.clean,
        "corrupted": graph.corrupted,
        "text": graph.runs["corrupted"].text[0],
    }
    return View(entry, {"graph": pack(arrays, document=document, ids=list(ids), names=graph.names, kinds=list(kinds))})


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
