"""Interventions on nodes: the graph of a linear network predicts them exactly, and the runs are those of hooks."""

from typing import Any

import pytest
import torch
from graphs_of_runs import graph_of, transcoders


def linear_graph(specimen: Any, configs: Any) -> tuple[Any, Any]:
    """A graph of a network without norms and MLPs, under even attention, which is linear in its embeddings."""
    from diffusion_lens.analysis import run_graph

    model = specimen({**configs["llada"], "n_layers": 1}).model
    block = model.blocks[0]
    block.ln1, block.ln2, model.ln_final = (torch.nn.Identity() for _ in range(3))
    with torch.no_grad():
        block.attn.q.weight.zero_()
        block.attn.v.weight *= 20  # so that what is given decides all three words
        next(each for name, each in block.mlp.named_parameters() if each.shape[0] == model.cfg.d_model).zero_()
    clean = torch.arange(5) + 20
    corrupted = torch.where(torch.arange(5) == 3, clean + 9, clean)
    run = model.denoise(clean[None], length=8, sampler="left_to_right")
    return model, run_graph(model, run, 7, corrupted, points=1, metric="margin")


def test_a_linear_network_changes_as_predicted(specimen: Any, configs: Any) -> None:
    """Also in later steps, as long as the words before are those that were predicted."""
    model, graph = linear_graph(specimen, configs)
    found = graph.interventions(model, scales=(0.0, -1.0, 2.0))
    right = (found.predicted_tokens == found.measured_tokens).long()
    before = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1].cumprod(dim=1)], dim=1).bool()
    later = found.steps > found.node_steps[:, None]
    told = before & (later | (found.steps == found.node_steps[:, None]))
    changes = found.predicted - found.clean
    assert (changes[told & ~later].abs() > 0.5).sum() > 40
    assert (changes[told & later].abs() > 0.5).sum() > 5
    assert changes[told].tolist() == pytest.approx((found.measured - found.clean)[told].tolist(), abs=1e-3)


def test_scale_1_is_the_clean_run(summed: Any) -> None:
    """Beside rows that are changed, with default samplers of every family."""
    if summed.has_shared_expert:
        return
    graph = graph_of(summed, points=2)
    found = graph.interventions(summed.model, graph.nodes.index[graph.nodes.kind == "mlp"][:3], scales=(1.0, -3.0))
    same, other = found.scales == 1, found.scales != 1
    assert torch.equal(found.predicted[same], found.clean.expand(3, -1))
    assert found.measured[same].flatten().tolist() == pytest.approx(found.predicted[same].flatten().tolist(), abs=2e-3)
    told = found.predicted_steps[same] >= 0
    for name in ("tokens", "steps"):
        predicted, measured = (getattr(found, f"{of}_{name}")[same] for of in ("predicted", "measured"))
        assert torch.equal(predicted[told], measured[told])
    assert (found.measured_tokens[same] == found.tokens).all()
    later = found.steps >= found.node_steps[other][:, None]
    assert ((found.measured[other] - found.clean)[later].nan_to_num(1.0).abs() > 1e-3).any()


def by_hand(model: Any, graph: Any, node: Any, scale: float) -> tuple[Any, float]:
    """The run with a node scaled by hooks that a user writes, and the target's margin at its step."""
    from diffusion_lens.interventions import at_steps, on_branch

    head = (int(node.head),) if node.kind == "head" else ()
    names = {"head": f"blocks.{node.layer}.attn.hook_z", "mlp": f"blocks.{node.layer}.hook_mlp_out"}
    name = names.get(node.kind, "hook_embed")
    outputs: list[Any] = []

    def keep(activation: Any, hook: Any) -> None:
        outputs.append(activation[0, node.position][head])

    def here(fn: Any) -> Any:
        return at_steps(on_branch(fn, ("conditional", "unconditional")[node.branch]), node.step)

    for run in graph.runs.values():
        run.replay(model, fwd_hooks=[(name, here(keep))])
    wanted = outputs[1] + scale * (outputs[0] - outputs[1])

    def scaled(activation: Any, hook: Any) -> Any:
        activation = activation.clone()
        activation[0, node.position][head] = wanted
        return activation

    (position, token), margins = graph.record["target"], []

    def read(logits: Any, hook: Any) -> None:
        margins.append(float(logits[0, position, token] - logits[0, position, graph.record["other"]]))

    hooks = [(name, here(scaled)), ("denoise.hook_logits", at_steps(read, graph.record["target_step"]))]
    return graph.runs["clean"].replay(model, canvas="free", fwd_hooks=hooks), margins[0]


def require_runs_of_hooks(one: Any, **more: Any) -> Any:
    graph = graph_of(one, metric="margin", points=2, nodes_per_step=2, **more)
    nodes = graph.nodes[graph.nodes.kind.isin(["token", "head", "mlp"])]
    nodes = nodes.groupby(["kind", "branch"]).head(1)
    found = graph.interventions(one.model, nodes.index, scales=(0.0, 2.0))
    places = list(zip(found.steps.tolist(), found.positions.tolist(), strict=True))
    objective = places.index((graph.record["target_step"], graph.record["target"][0]))
    for row, node in enumerate(node for node in nodes.itertuples() for _ in range(2)):
        again, margin = by_hand(one.model, graph, node, float(found.scales[row]))
        assert found.measured_tokens[row].tolist() == again.tokens[0, found.positions].tolist()
        assert found.measured_steps[row].tolist() == again.revealed_at[0, found.positions].tolist()
        wanted = margin or float("nan")  # logits are 0 where a word was written before
        assert float(found.measured[row, objective]) == pytest.approx(wanted, abs=1e-3, nan_ok=True)
    return found


def test_the_runs_are_those_of_hooks_by_hand(either: Any) -> None:
    require_runs_of_hooks(either)


@pytest.mark.parametrize(("family", "cfg_scale"), [("llada", 0.7), ("sdar", 0.7), ("sdar", 0.0)])
def test_guided_and_block_runs_are_those_of_hooks_by_hand(
    family: str, cfg_scale: float, specimen: Any, configs: Any
) -> None:
    found = require_runs_of_hooks(specimen(configs[family]), cfg_scale=cfg_scale)
    assert set(found.branches.tolist()) == ({0, 1} if cfg_scale else {0})


def test_flows_from_a_node_add_up_to_its_effect(several: Any) -> None:
    """Also from nodes without computed edges, and where a step decides several words."""
    from diffusion_lens.analysis.graphs.interventions import _Interventions

    if several.has_shared_expert:
        return
    graph = graph_of(several, points=4, nodes_per_step=8)
    made = _Interventions(
        graph, several.model, [(int(graph.nodes.index[graph.nodes.kind == "mlp"][0]), 0.0)], {}, 2**30
    )
    flows = made.shares() * graph.effect[made.ends]
    parts = graph.nodes[graph.nodes.kind.isin(["token", "embed", "head", "mlp"])].index.tolist()
    assert flows[parts].sum(dim=1).tolist() == pytest.approx(graph.effect[parts].tolist(), rel=1e-6, abs=1e-9)
    assert (flows[:, made.steps != graph.step[parts[0]]][parts[0]] == 0).all()


def test_features_are_scaled_in_what_their_mlp_writes(either: Any) -> None:
    """A feature is its row of the decoder; the node of the MLP is all that are no nodes."""
    from diffusion_lens.analysis.graphs.features import transcoders_of
    from diffusion_lens.analysis.graphs.interventions import _Interventions
    from diffusion_lens.interventions import at_steps

    model, features = either.model, transcoders(either.model)
    graph = graph_of(either, points=2, nodes_per_step=20, features=features)
    nodes = graph.nodes
    feature = nodes[nodes.kind == "feature"].iloc[0]
    axes = ["step", "layer", "position", "branch"]
    here = nodes.index[(nodes[axes] == feature[axes]).all(axis=1) & nodes.kind.isin(["mlp", "feature"])]
    changes = _Interventions(graph, model, [(i, 0.0) for i in here], transcoders_of(model, features), 2**30).changes
    read: list[Any] = []

    def keep(activation: Any, hook: Any) -> None:
        read.append(activation[0, feature.position])

    transcoder = features[feature.layer]
    for run in graph.runs.values():
        run.replay(model, fwd_hooks=[(transcoder.reads, at_steps(keep, feature.step))])
    by_feature = (transcoder.encode(read[0]) - transcoder.encode(read[1]))[:, None] * transcoder.W_dec
    assert torch.allclose(changes[feature.name], by_feature[feature.feature], atol=1e-4)
    assert len(changes) > 1
    assert torch.allclose(torch.stack([*changes.values()]).sum(dim=0), by_feature.sum(dim=0), atol=1e-4)
    found = graph.interventions(model, here, scales=(1.0, -20.0), features=features)
    change = (found.measured - found.clean).nan_to_num()
    assert change[::2].abs().max() < 1e-3
    assert change[1::2].abs().max() > 1e-2
    with pytest.raises(ValueError, match="by block, and these"):
        graph.interventions(model)


def test_batches_give_the_numbers_of_one(either: Any) -> None:
    graph = graph_of(either, points=4)
    whole = graph.interventions(either.model)
    parts = graph.interventions(either.model, max_bytes=2**21)
    assert torch.equal(whole.predicted, parts.predicted)
    assert torch.allclose(whole.measured, parts.measured, atol=1e-4, equal_nan=True)
    assert torch.equal(whole.measured_tokens, parts.measured_tokens)


def test_what_cannot_be_scaled_is_said(either: Any, specimen: Any, configs: Any) -> None:
    graph, model = graph_of(either, points=2), either.model
    target = int(graph.nodes.index[graph.nodes.kind == "target"][0])
    for message, nodes in {"kind target": [target], "none of": [len(graph)], "at least one": []}.items():
        with pytest.raises(ValueError, match=message):
            graph.interventions(model, nodes)
    with pytest.raises(ValueError, match="pruned"):
        graph.prune(0.5).interventions(model)
    with pytest.raises(ValueError, match="one intervention takes"):
        graph.interventions(model, max_bytes=1000)
    with pytest.raises(ValueError, match="architecture"):
        graph.interventions(specimen({**configs["llada"], "n_layers": 2}).model)
    assert not any(model.list_hooks().values())


@pytest.mark.parametrize(("name", "by_name", "least"), [("site-mdm", False, 7), ("site-ar", True, 2)])
def test_margins_and_some_words_are_predicted_on_trained_models(name: str, by_name: bool, least: int) -> None:
    """In a fixed order, for nodes that write what they do in the corrupted run. Of the words that are changed, by the
    prediction or in the run, it says whether that of the clean run is kept."""
    from diffusion_lens import HookedDiffusionTransformer
    from diffusion_lens.analysis import run_graph
    from diffusion_lens.data import site_facts

    told = [person for person in site_facts.load().people if person.trained == "p2d"]
    model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
    hits = {"graph": 0.0, "nothing changes": 0.0}
    for one, two in zip(told[0:8:2], told[1:8:2], strict=True):
        clean, corrupted = (f"{p.name} is the" if by_name else f"the {p.description} is" for p in (one, two))
        run = model.denoise(clean, max_new_tokens=6, sampler="left_to_right")
        position = int(run.given.sum()) + (2 if by_name else 1)
        graph = run_graph(model, run, position, corrupted, metric="margin", nodes_per_step=0)
        of_step = graph.nodes[graph.nodes.step == graph.record["target_step"]]
        nodes = of_step.index[of_step.kind.isin(["token", "head", "mlp"])][:16]
        found = graph.interventions(model, nodes, scales=(0.0,))
        # Where a step decides nothing else, the whole effect of a node is that on the target.
        change = found.predicted[:, -1] - found.clean[-1]
        assert change.tolist() == pytest.approx((-graph.effect[list(nodes)]).tolist(), abs=1e-4)
        assert found.explained > 0.5
        of_words = found.hits.loc["word"]
        for by in hits:
            hits[by] += of_words.loc[by, "n"] * of_words.loc[by, "kept"]
    assert hits["graph"] >= least > hits["nothing changes"]
