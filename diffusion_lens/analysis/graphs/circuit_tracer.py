"""A graph of a run in the JSON of circuit-tracer (`frontend/graph_models.py` of decoderesearch/circuit-tracer).

The format has embeddings at layer "E", features at numbered layers, errors, and logits above the last layer. The steps
of a run are unrolled: of L blocks, step k has the layers k (L + 2) for the embeddings that the run wrote, then one for
each block, and k (L + 2) + L + 1 for its decisions. A given token is one embedding, whatever number of steps read it.
Heads, MLPs, written embeddings and decisions have the type "cross layer transcoder", with their names as labels. So
have features, whose numbers are those of the transcoder (after all of these, in the unconditional branch); the numbers
of the others come after theirs.
"""

from collections.abc import Mapping
from typing import Any

from diffusion_lens.analysis.graphs.within_step import KINDS

SCHEMA_VERSION = 1
_FEATURE = "cross layer transcoder"


def as_graph(graph: Any, slug: str) -> dict[str, Any]:
    """The document of a `RunGraph`."""
    run, record = graph.runs["clean"], graph.record
    n_layers, n_heads = (int(record[name]) for name in ("n_layers", "n_heads"))
    steps = sorted(set(graph.step.tolist()))
    n_features = int(graph.feature.max()) + 1
    ids: list[str] = []
    nodes: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(graph.names):
        kind, position, step = KINDS[int(graph.kind[i])], int(graph.position[i]), int(graph.step[i])
        token, branch = int(graph.token[i]), int(graph.branch[i])
        base = steps.index(step) * (n_layers + 2)
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
        elif kind == "decision":
            layer, number, said = str(base + n_layers + 1), token, f'step {step} writes "{word}"'
        elif kind == "target":
            layer, number, type_ = str(len(steps) * (n_layers + 2)), token, "logit"
            said = f'Output "{word}" (step {step})'
        elif kind == "error":
            number, type_ = 2 * (n_features + n_heads + 1) + i, "mlp reconstruction error"
        elif kind == "mlp":
            number += n_heads + 1
        elif kind == "feature":
            number = n_features * branch + int(graph.feature[i])
        ids.append(f"{layer}_{number}_{position}")
        nodes.setdefault(
            ids[-1],
            {
                "node_id": ids[-1],
                "feature": number,
                "layer": layer,
                "ctx_idx": position,
                "feature_type": type_,
                "token_prob": 0.0,
                "is_target_logit": kind == "target",
                "run_idx": 0,
                "reverse_ctx_idx": 0,
                "jsNodeId": f"{layer}_{number}-{position}",
                "clerp": said,
                "influence": 0.0,
                "activation": None,
            },
        )["influence"] += float(graph.influence[i])
    ends = (graph.source.tolist(), graph.target.tolist(), graph.weight.tolist())
    canvas = run.canvases[int(record["target_step"]) - run.first_step, 0].tolist()
    return {
        "metadata": _metadata(record, slug, [run.words[token] for token in canvas], run.text[0]),
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": list(nodes.values()),
        "links": [{"source": ids[s], "target": ids[t], "weight": w} for s, t, w in zip(*ends, strict=True)],
    }


def _metadata(record: Mapping[str, Any], slug: str, tokens: list[str], text: str) -> dict[str, Any]:
    return {
        "slug": slug,
        "scan": str(record["model"]),
        "transcoder_list": [],
        "prompt_tokens": tokens,
        "prompt": text,
        "node_threshold": record.get("share"),
        "schema_version": SCHEMA_VERSION,
    }
