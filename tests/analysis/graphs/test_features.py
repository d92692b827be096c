"""Features as nodes of a graph: the laws of sums, replacements one by one, and an edge by finite differences."""

import math
from typing import Any

import pytest
import torch
from graphs_of_runs import graph_of, require_laws, transcoders


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


@pytest.mark.parametrize(("family", "points"), [("llada", 32), ("sdar", 32), ("mdlm", 64)])
def test_effects_add_up_under_guidance_with_a_share_for_each_branch(
    family: str, points: int, specimen: Any, configs: Any
) -> None:
    one = specimen(configs[family])
    graph = graph_of(one, points=points, cfg_scale=0.7, features=transcoders(one.model, conditioned=True))
    require_laws(graph)
    assert set(graph.nodes.branch[graph.nodes.kind == "feature"]) == {0, 1}
    whole = graph.faithfulness(one.model, features=transcoders(one.model, conditioned=True), n_random=0)
    assert whole.shares[:, 0].tolist() == pytest.approx([1.0] * len(whole.steps), abs=1e-3)


def test_effects_add_up_with_frozen_norms(either: Any) -> None:
    """What a norm leaves out joins the error of the transcoder that reads it, which is live or not as before."""
    graph = graph_of(either, features=transcoders(either.model), nodes_per_step=60, frozen="patterns and norms")
    require_laws(graph)
    assert not graph.nodes.duplicated(["step", "position", "name"])[graph.nodes.layer >= 0].any()
    whole = graph.faithfulness(either.model, features=transcoders(either.model), n_random=0)
    assert whole.share == pytest.approx(1, abs=1e-3)


def test_what_the_share_of_masks_alone_changes_is_in_the_error(either: Any) -> None:
    """At equal streams with other shares no feature has an effect, and the sum is the MLP's change all the same."""
    from diffusion_lens.analysis.graphs.features import MLPChange

    (one,) = transcoders(either.model, [1], conditioned=True)
    x, change, direction = (torch.randn(5, either.model.cfg.d_model) for _ in range(3))
    parts = MLPChange(one, (x, x), (0.2, 0.9), change).parts(direction, 10)
    assert (one.encode(x, 0.2) != one.encode(x, 0.9)).any()
    assert not parts.written[:, :-1].any()
    assert torch.equal(parts.written[:, -1], change)
    other = torch.randn_like(x)
    for shares in ((0.5, 0.5), (0.2, 0.9)):
        parts = MLPChange(one, (x, other), shares, change).parts(direction, 10)
        assert torch.allclose(parts.written.sum(dim=1), change, atol=1e-5)
        # A direction at x times its change is the effect, of each part.
        passed = torch.einsum("pnd,pd->pn", parts.toward, x - other)
        effects = torch.einsum("pnd,pd->pn", parts.written[:, :-1], direction)
        assert torch.allclose(passed, effects, atol=1e-4)


def test_a_node_writes_the_change_of_its_feature(either: Any) -> None:
    """The rows of the decoder by hand; most features at each position are in the node of the MLP."""
    from diffusion_lens.analysis.graphs.features import MLPChange

    (one,) = transcoders(either.model, [1])
    x, other, change, direction = (torch.randn(5, either.model.cfg.d_model) for _ in range(4))
    parts = MLPChange(one, (x, other), (0.0, 0.0), change).parts(direction, 8)
    by_feature = (one.encode(x) - one.encode(other))[:, :, None] * one.W_dec
    effects = (by_feature @ direction[:, :, None])[..., 0].abs()
    places = (parts.numbers >= 0).nonzero()
    assert len(places) == 8
    found = []
    for position, part in places.tolist():
        feature = int(parts.numbers[position, part])
        assert torch.allclose(parts.written[position, part], by_feature[position, feature], atol=1e-5)
        found.append(float(effects[position, feature]))
    assert sorted(found) == pytest.approx(effects.flatten().topk(8).values.flip(0).tolist(), rel=1e-4)
    assert torch.allclose(parts.written[:, -1], change - by_feature.sum(dim=1), atol=1e-5)


def test_an_edge_into_a_feature_is_what_finite_differences_say(either: Any) -> None:
    """The feature's slope times what its pre-activation gains from the embedding, along the path of the stream."""
    model = either.model
    (one,) = transcoders(model, [0])
    graph = graph_of(either, canvas="forced", nodes_per_step=500, features=[one])
    edges = graph.edges[graph.edges.source_name.isin(["token", "embed"])]
    edge = edges[edges.target_name.str.startswith("m0.f")].iloc[0]
    node, position = graph.nodes.loc[edge.target], int(edge.target_position)
    mids, embedded, pre = [], [], []
    step = graph.record["target_step"]
    for run in graph.runs.values():
        cache = model.run_with_cache(model.cfg.readable(run.canvases[step]))[1]
        mids.append(cache["blocks.0.hook_resid_mid"][0, position].detach())
        embedded.append(cache["blocks.0.hook_resid_pre"][0, position].detach())
        pre.append(one.pre(cache[one.reads][0, position].detach())[node.feature])
    features = [float(value * (value > one.threshold[node.feature])) for value in pre]
    slope = (features[0] - features[1]) / float(pre[0] - pre[1])
    size, norm = 0.05, model.blocks[0].ln2

    def read(stream: torch.Tensor) -> torch.Tensor:
        return (norm(stream) / norm.weight).detach()

    shares = (torch.arange(64) + 0.5)[:, None] / 64
    path, change = mids[1] + shares * (mids[0] - mids[1]), embedded[0] - embedded[1]
    gain = (read(path + size * change) - read(path - size * change)) / (2 * size) @ one.W_enc[:, node.feature]
    through = node.effect / (features[0] - features[1])  # effect of a unit of the feature
    assert edge.weight == pytest.approx(through * slope * float(gain.mean()), rel=0.02)


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


@torch.no_grad()
def test_a_feature_outside_the_graph_is_replaced_alone(either: Any) -> None:
    """What its removal does is what a hook does that takes the change of this feature out of the MLP's output."""
    (one,) = transcoders(either.model, [2])
    graph = graph_of(either, canvas="forced", features=[one])
    of_features = (graph.feature >= 0).nonzero().flatten()
    node = int(of_features[graph.effect[of_features].abs().argmax()])
    position, feature = int(graph.position[node]), int(graph.feature[node])
    kept = torch.arange(len(graph)) != node
    found = graph._of_nodes(kept, {}).faithfulness(either.model, features=[one], n_random=3)

    step, (place, token) = graph.record["target_step"], graph.record["target"]
    row = int(either.model.readout.rows(torch.tensor(place)))
    canvases = [either.model.cfg.readable(run.canvases[step]) for run in graph.runs.values()]
    clean, corrupted = (
        float(one.encode(either.model.run_with_cache(canvas)[1][one.reads])[0, position, feature])
        for canvas in canvases
    )

    def without(activation: torch.Tensor, hook: Any) -> torch.Tensor:
        changed = activation.clone()
        changed[0, position] -= (clean - corrupted) * one.W_dec[feature]
        return changed

    logits = either.model.run_with_hooks(canvases[0], fwd_hooks=[(one.writes, without)])
    assert float(found.values[0, 0]) == pytest.approx(float(logits[0, row, token]), abs=1e-4)
    assert found.n_nodes == int(((graph.layer >= 0) | (graph.kind == 0)).sum()) - 1


def test_a_graph_with_features_is_named_drawn_saved_and_written(either: Any, tmp_path: Any) -> None:
    import json

    import diffusion_lens

    features = transcoders(either.model)
    graph = graph_of(either, points=4, features=features)
    assert any(".f" in name for name in graph.names)
    loaded = diffusion_lens.load(graph.save(tmp_path / "graph.safetensors"))
    assert loaded.nodes.equals(graph.nodes)
    values = [each.faithfulness(either.model, features=features, n_random=2).values for each in (loaded, graph)]
    assert torch.equal(*values)
    with pytest.raises(ValueError, match="the graph has"):
        graph.faithfulness(either.model)
    graph.plot()
    document = json.loads(graph.to_json(tmp_path / "graph.json").read_text())
    ids = [node["node_id"] for node in document["nodes"]]
    assert len(set(ids)) == len(ids)
    types = {node["feature_type"] for node in document["nodes"]}
    assert types >= {"cross layer transcoder", "mlp reconstruction error", "logit"}
    # Cantor's pairing of layer and number, by which the viewers look a feature up.
    name = next(name for name in graph.names if ".f" in name)
    number, node = int(name.split(".f")[1]), next(node for node in document["nodes"] if node["clerp"].endswith(name))
    assert node["feature"] == sum(range(int(node["layer"]) + number + 1)) + number


def test_what_is_no_transcoder_of_the_model_is_refused(either: Any) -> None:
    model = either.model
    for given, message in (
        (transcoders(model, [1], reads="blocks.1.hook_mlp_out"), "transcoders of MLPs"),
        (transcoders(model, [1], reads="blocks.0.ln2.hook_normalized"), "transcoders of MLPs"),
        (transcoders(model, [9]), "transcoders of MLPs"),
        (transcoders(model, [1]) * 2, "two transcoders"),
    ):
        with pytest.raises(ValueError, match=message):
            graph_of(either, features=given)
    (one,) = transcoders(model, [1])
    one.record["weights_sha256"] = "of another model"
    with pytest.warns(UserWarning, match="at 'blocks.1.hook_mlp_out' was trained on 'random', with other weights"):
        graph_of(either, points=2, features=[one])
