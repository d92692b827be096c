"""A graph of a run in the JSON of circuit-tracer (`frontend/graph_models.py` of decoderesearch/circuit-tracer).

The format has embeddings at layer "E", features at numbered layers, errors, and logits above the last layer. The steps
of a run are unrolled: of L blocks, step k has the layers k (L + 2) for the embeddings that the run wrote, then one for
each block, and k (L + 2) + L + 1 for its decisions, which are the logits of the last step. A given token is one
embedding, whatever number of steps read it. Heads, MLPs, written embeddings and earlier decisions have the type "cross
layer transcoder", with their names as labels. So have features, whose numbers are those of the transcoder (after all of
these, in the unconditional branch); the numbers of the others come after theirs.

The viewers keep the nodes whose `influence` is at most a threshold: the share of all influence that this node and those
with a larger one have. They read the probability of the target from its label.
"""

import math
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1
_FEATURE = "cross layer transcoder"


def as_graph(graph: Any, slug: str) -> tuple[dict[str, Any], list[str]]:
    """The document of a `RunGraph`, and the id in it of each node; a given token has one id at all steps."""
    run, record = graph.runs["clean"], graph.record
    n_layers, n_heads = (int(record[name]) for name in ("n_layers", "n_heads"))
    steps = sorted(set(graph.step.tolist()))
    n_features = int(graph.feature.max()) + 1
    ids: list[str] = []
    nodes: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(graph.names):
        kind, position, step = graph.kinds[i], int(graph.position[i]), int(graph.step[i])
        token, branch = int(graph.token[i]), int(graph.branch[i])
        base, p = steps.index(step) * (n_layers + 2), 0.0
        word = graph.words.get(token, "")
        said = f"step {step}: {name}{' (unconditional)' if branch else ''}"
        layer, number, type_ = (
            str(base + 1 + int(graph.layer[i])),
            2 * n_features + (n_heads + 1) * branch + int(graph.head[i]) + 1,
            _FEATURE,
        )
        if kind == "token":
            layer, number, type_, said = "E", token, "embedding", f'given "{word}"'
        elif kind == "embed":
            layer, number, said = str(base), branch, f'step {step} reads "{word}"'
        elif kind in ("decision", "target"):
            layer, number, said = str(base + n_layers + 1), token, f'step {step} writes "{word}"'
            if step == steps[-1]:
                p = _probability(graph, i)
                type_, said = "logit", f'Output "{word}" (p={p:.3f}), step {step}'
        elif kind == "error":
            number, type_ = 2 * (n_features + n_heads + 1) + i, "mlp reconstruction error"
        elif kind == "mlp":
            number += n_heads + 1
        elif kind == "feature":
            number = n_features * branch + int(graph.feature[i])
        while kind == "decision" and f"{layer}_{number}_{position}" in nodes:  # one token, decided against several
            number += int(graph.token.max()) + 1
        ids.append(f"{layer}_{number}_{position}")
        both = int(layer) + number if type_ == _FEATURE else 0
        nodes.setdefault(
            ids[-1],
            {
                "node_id": ids[-1],
                "feature": both * (both + 1) // 2 + number,  # the viewers tell layer and number from this
                "layer": layer,
                "ctx_idx": position,
                "feature_type": type_,
                "token_prob": 0.0 if math.isnan(p) else p,
                "is_target_logit": kind == "target",
                "run_idx": 0,
                "reverse_ctx_idx": 0,
                "jsNodeId": f"{layer}_{number}-{position}",
                "clerp": said,
                "influence": 0.0,
                "activation": None,
            },
        )["influence"] += float(graph.influence[i])
    total = sum(node["influence"] for node in nodes.values()) or 1.0
    above = 0.0
    for node in sorted(nodes.values(), key=lambda node: -node["influence"]):
        above = node["influence"] = min(1.0, above + node["influence"] / total)
    ends = (graph.source.tolist(), graph.target.tolist(), graph.weight.tolist())
    canvas = run.canvases[int(record["target_step"]) - run.first_step, 0].tolist()
    document = {
        "metadata": _metadata(record, slug, [run.words[token] for token in canvas], run.text[0]),
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": list(nodes.values()),
        "links": [{"source": ids[s], "target": ids[t], "weight": w} for s, t, w in zip(*ends, strict=True)],
    }
    return document, ids


def _probability(graph: Any, node: int) -> float:
    """Probability of the token of a node in the clean run; NaN where the run has not recorded it."""
    run, position, step = graph.runs["clean"], int(graph.position[node]), int(graph.step[node])
    if step == graph.record["target_step"] and graph.record["metric"] == "log_probability":
        return math.exp(graph.clean)
    wrote = int(run.tokens[0, position]) == int(graph.token[node]) and int(run.revealed_at[0, position]) == step
    return float(run.confidence[0, position]) if wrote else math.nan


def _metadata(record: Mapping[str, Any], slug: str, tokens: list[str], text: str) -> dict[str, Any]:
    return {
        "slug": slug,
        "scan": str(record["model"]),
        "transcoder_list": [],
        "prompt_tokens": tokens,
        "prompt": text,
        "node_threshold": 1.0,
        "schema_version": SCHEMA_VERSION,
    }
