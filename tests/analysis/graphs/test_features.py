"""Features as nodes of a graph: the laws of sums, and edges that finite differences confirm."""

import math
from typing import Any

import pytest
import torch
from test_run_graph import graph_of, require_laws


def transcoders(model: Any, layers: Any = (0, 1), conditioned: bool = False, n_features: int = 40) -> list[Any]:
    """Random ones, of which each feature is active at about half of the positions."""
    from diffusion_lens.analysis import SparseDictionary

    generator, d_model = torch.Generator().manual_seed(0), model.cfg.d_model
    found = []
    for layer in layers:
        W_enc, W_dec = (torch.randn(d_model, n_features, generator=generator) / d_model**0.5 for _ in range(2))
        rest = {name: 0.3 * torch.randn(n_features, generator=generator) for name in ("b_enc", "b_noise", "density")}
        found.append(
            SparseDictionary(
                W_enc=W_enc,
                W_dec=W_dec.T.contiguous(),
                b_dec=torch.zeros(d_model),
                threshold=torch.rand(n_features, generator=generator) / 2,
                losses=torch.zeros(1),
                reads=f"blocks.{layer}.ln2.hook_normalized",
                writes=f"blocks.{layer}.hook_mlp_out",
                conditioned=conditioned,
                record={"model": "random"},
                **rest,
            )
        )
    return found


def test_effects_add_up_on_every_family(summed: Any) -> None:
    if summed.has_shared_expert:
        return
    graph = graph_of(summed, features=transcoders(summed.model), nodes_per_step=60)
    require_laws(graph)
    nodes = graph.nodes
    features, errors = nodes[nodes.kind == "feature"], nodes[(nodes.kind == "error") & (nodes.layer >= 0)]
    assert set(features.layer) == set(errors.layer) == {0, 1}
    assert features.inflow.notna().sum() > 5
    assert not nodes.duplicated(["step", "branch", "position", "name"])[nodes.layer >= 0].any()


@pytest.mark.parametrize("canvas", ["forced", "free"])
def test_a_whole_graph_keeps_everything_and_an_empty_one_nothing(either: Any, canvas: str) -> None:
    from diffusion_lens.analysis.graphs.within_step import KINDS

    features = transcoders(either.model)
    graph = graph_of(either, features=features, canvas=canvas)
    given = {"features": features, "n_random": 0}
    whole = graph.faithfulness(either.model, **given)
    assert whole.shares[:, 0].tolist() == pytest.approx([1.0] * len(whole.steps), abs=1e-3)
    assert whole.replaced[0] == pytest.approx(graph.corrupted, abs=1e-3)
    free = graph.faithfulness(either.model, canvas="free", **given)
    if either.kind == "ar" and canvas == "free":  # The order of an MDM may change, and errors stay as they were.
        assert free.wrote == [True]
        assert free.share == pytest.approx(1.0, abs=1e-3)
    alone = graph._of_nodes(graph.kind == KINDS.index("target"), {})
    assert alone.faithfulness(either.model, **given).share == pytest.approx(0.0, abs=1e-6)
    for replace in ("mean", "zero"):
        assert math.isfinite(graph.prune(0.8).faithfulness(either.model, replace, **given).share)
