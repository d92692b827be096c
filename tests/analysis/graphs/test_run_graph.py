"""Laws of the graph of a run: what flows into a node flows out of it; the given tokens have the whole difference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs_of_runs import LENGTH, graph_of, last_position, prompts, require_laws, run_of

KINDS = ("token", "embed", "head", "mlp", "decision", "target", "error", "feature")


def test_effects_add_up_on_every_family(summed: Any) -> None:
    if summed.has_shared_expert:
        with pytest.raises(ValueError, match="shared expert"):
            graph_of(summed)
        return
    require_laws(graph_of(summed))


@pytest.mark.parametrize(
    ("family", "points"), [("llada", 32), ("dream", 32), ("sdar", 32), ("mdlm", 64), ("bd3lm", 128)]
)
def test_effects_add_up_under_guidance(family: str, points: int, specimen: Any, configs: Any) -> None:
    graph = graph_of(specimen(configs[family]), points=points, cfg_scale=0.7)
    require_laws(graph)
    assert set(graph.nodes.branch) == {0, 1}
    # The unconditional branch sees no given token.
    assert not (graph.nodes.kind[graph.nodes.branch == 1] == "token").any()


@pytest.mark.parametrize("frozen", ["patterns", "patterns and norms"])
def test_effects_add_up_with_frozen_parts_on_every_family(summed: Any, frozen: str) -> None:
    if summed.has_shared_expert:
        return
    graph = graph_of(summed, frozen=frozen)
    require_laws(graph)
    errors = graph.nodes[graph.nodes.kind == "error"]
    assert set(errors.name[errors.layer >= 0]) > {"a0.h0.error", "a1.h1.error"}
    assert errors.name.str.startswith("m").any() == (frozen != "patterns")


@pytest.mark.parametrize("family", ["sdar", "mdlm"])
def test_effects_add_up_with_frozen_parts_under_guidance(family: str, specimen: Any, configs: Any) -> None:
    require_laws(graph_of(specimen(configs[family]), points=64, cfg_scale=0.7, frozen="patterns and norms"))


def test_edges_of_heads_are_those_of_a_backward_pass_each(summed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusion_lens.analysis.graphs import within_step

    if summed.has_shared_expert:
        return
    together = graph_of(summed, points=4, nodes_per_step=40)
    monkeypatch.setattr(within_step, "Linear", type(None))  # no projection is known to be linear
    alone = graph_of(summed, points=4, nodes_per_step=40)
    weights = [
        {tuple(row[:6]): row.weight for row in graph.edges.drop(columns=["source", "target"]).itertuples(index=False)}
        for graph in (together, alone)
    ]
    assert len({name for name in together.edges.target_name if ".h" in name}) > 3
    assert weights[0] == pytest.approx(weights[1], rel=1e-3, abs=1e-4 * float(together.effect.abs().max()))


@pytest.mark.parametrize("metric", ["log_probability", "margin"])
def test_effects_add_up_for_every_metric(either: Any, metric: str) -> None:
    require_laws(graph_of(either, metric=metric))


def test_the_error_falls_with_the_points(several: Any) -> None:
    if several.has_shared_expert:
        return
    errors = [graph_of(several, points=points).step_error for points in (4, 32)]
    assert errors[1] < errors[0] / 30


def test_a_forced_canvas_has_no_decisions(several: Any) -> None:
    if several.has_shared_expert:
        return
    graph = graph_of(several, canvas="forced")
    require_laws(graph)
    assert not graph.decision.any()
    assert set(graph.nodes.kind) <= {"token", "head", "mlp", "target", "error"}
    assert set(graph.nodes.step) == {graph.record["target_step"]}


def test_what_is_equal_in_both_runs_has_no_effect(either: Any) -> None:
    """Before the first given token that differs, a causal model computes the same."""
    graph = graph_of(either)
    positions = graph.nodes.position
    assert (graph.nodes.effect != 0).all()
    assert positions.min() >= (2 if either.kind == "ar" else 0)
    assert set(positions[graph.nodes.kind == "token"]) == {2, 4}


def test_a_linear_network_has_the_effects_that_can_be_written_down(specimen: Any, configs: Any) -> None:
    """Without norms and MLP, under even attention, a token adds to the logit what it adds to the mean of the values."""
    from diffusion_lens.analysis import run_graph

    model = specimen({**configs["llada"], "n_layers": 1}).model
    block = model.blocks[0]
    block.ln1, block.ln2, model.ln_final = (torch.nn.Identity() for _ in range(3))
    with torch.no_grad():
        block.attn.q.weight.zero_()
        next(each for name, each in block.mlp.named_parameters() if each.shape[0] == model.cfg.d_model).zero_()
        clean = torch.arange(5) + 20
        corrupted = torch.where(torch.arange(5) == 3, clean + 9, clean)
        run = model.denoise(clean[None], length=8, steps=1)
        graph = run_graph(model, run, 6, corrupted, points=1, canvas="forced")
        change = model.embed.weight[clean[3]] - model.embed.weight[corrupted[3]]
        readout = model.unembed.weight[int(run.tokens[0, 6])]
        by_head = torch.stack(
            [(change @ block.attn.W_V[h] @ block.attn.W_O[h]) @ readout / 8 for h in range(model.cfg.n_heads)]
        )
    nodes = graph.nodes
    heads = nodes[nodes.kind == "head"].sort_values("head")
    assert heads.effect.tolist() == pytest.approx(by_head.tolist(), rel=1e-4)
    assert (heads.position == 6).all()
    assert float(nodes.effect[nodes.kind == "token"].iloc[0]) == pytest.approx(float(by_head.sum()), rel=1e-4)
    assert graph.clean - graph.corrupted == pytest.approx(float(by_head.sum()), rel=1e-3)
    into = graph.edges[graph.edges.target_name == "target"].set_index("source_name").weight
    assert into[[f"a0.h{h}" for h in range(4)]].tolist() == pytest.approx(by_head.tolist(), rel=1e-4)


def test_a_frozen_pattern_leaves_its_change_to_the_error(specimen: Any, configs: Any) -> None:
    """Of one block without norms and MLP: A v - A' v' = mean(A, A') (v - v') + (A - A') mean(v, v'), by hand."""
    from diffusion_lens.analysis import run_graph

    model = specimen({**configs["llada"], "n_layers": 1}).model
    block = model.blocks[0]
    block.ln1, block.ln2, model.ln_final = (torch.nn.Identity() for _ in range(3))
    with torch.no_grad():
        next(each for name, each in block.mlp.named_parameters() if each.shape[0] == model.cfg.d_model).zero_()
        clean = torch.arange(5) + 20
        corrupted = torch.where(torch.arange(5) == 3, clean + 9, clean)
        run = model.denoise(clean[None], length=8, steps=1)
        graph = run_graph(model, run, 6, corrupted, points=1, canvas="forced", frozen="patterns")
        names = ["blocks.0.attn.hook_pattern", "blocks.0.attn.hook_v"]
        caches = [model.run_with_cache(each.canvases[0], names_filter=names)[1] for each in graph.runs.values()]
        (a, v), (b, w) = (
            (each["blocks.0.attn.hook_pattern"][0, :, 6], each["blocks.0.attn.hook_v"][0]) for each in caches
        )
        readout = torch.einsum("hdm,m->hd", block.attn.W_O, model.unembed.weight[int(run.tokens[0, 6])])
        passed, left = (
            torch.einsum("hk,khd,hd->h", *each, readout) for each in (((a + b) / 2, v - w), (a - b, (v + w) / 2))
        )
    effects = graph.nodes.set_index("name").effect
    heads = range(model.cfg.n_heads)
    assert [effects[f"a0.h{h}.error"] for h in heads] == pytest.approx(left.tolist(), rel=1e-3, abs=1e-5)
    assert [effects[f"a0.h{h}"] for h in heads] == pytest.approx((passed + left).tolist(), rel=1e-3, abs=1e-5)
    assert effects["token"] == pytest.approx(float(passed.sum()), rel=1e-3)


def test_an_edge_into_the_last_mlp_is_what_finite_differences_say(either: Any) -> None:
    """Independent of gradients and quadrature: differences of the MLP and of the head along both paths."""
    model, last = either.model, either.model.cfg.n_layers - 1
    graph = graph_of(either, canvas="forced", nodes_per_step=500)
    step, name = graph.record["target_step"], f"m{last}"
    at = graph.edges[(graph.edges.target_name == name) & graph.edges.source_name.str.startswith("a")].iloc[0]
    node, position = graph.nodes.loc[at.source], int(at.target_position)
    row = int(model.readout.rows(torch.tensor(graph.record["target"][0])))

    # 1. Streams and outputs of both runs, computed as a user would.
    n_pos = row + 1 if model.cfg.is_autoregressive else LENGTH
    streams = {}
    with model.optional_hooks(use_attn_result=True):
        for which, run in graph.runs.items():
            tokens = model.cfg.readable(run.canvases[step, :, :n_pos])
            streams[which] = model.run_with_cache(tokens)[1]
    change = [
        streams["clean"][name_] - streams["corrupted"][name_]
        for name_ in (
            f"blocks.{last}.hook_resid_mid",
            f"blocks.{last}.hook_resid_post",
            f"blocks.{node.layer}.attn.hook_result",
        )
    ]
    mid, post = (streams["corrupted"][f"blocks.{last}.{point}"] for point in ("hook_resid_mid", "hook_resid_post"))
    written = torch.zeros_like(mid)
    written[0, position] = change[2][0, position, int(node["head"])]
    shares = (torch.arange(64) + 0.5) / 64

    # 2. How much the MLP writes more along the head's output, on average over the path of its input.
    block, size = model.blocks[last], 0.05
    with torch.no_grad():
        path = mid + shares[:, None, None] * change[0]
        more = (block.mlp(block.ln2(path + size * written)) - block.mlp(block.ln2(path - size * written))) / (2 * size)
        more = more.mean(dim=0)
        # 3. How much the logit rises along that, on average over the path of the last stream.
        path = post + shares[:, None, None] * change[1]
        ends = [
            model(path + sign * size * more, start_at_layer=last + 1, logits_at=[row])[:, 0, graph.record["target"][1]]
            for sign in (1, -1)
        ]
    slope = float(((ends[0] - ends[1]) / (2 * size)).mean())
    assert at.weight == pytest.approx(slope, rel=0.02, abs=1e-3)


def test_one_decision_carries_what_a_written_token_does() -> None:
    """The description's first word is written in one step and read by the next."""
    from diffusion_lens import HookedDiffusionTransformer
    from diffusion_lens.analysis import run_graph
    from diffusion_lens.data import site_facts

    model = HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")
    names = [person.name for person in site_facts.load().people if person.trained == "both"][:2]
    run = model.denoise(f"{names[0]} is the", max_new_tokens=6, steps=6)
    place = int(run.revealed_at[0, 4:7].argmax()) + 4
    graph = run_graph(model, run, place, f"{names[1]} is the", points=32)
    require_laws(graph)
    decisions = graph.nodes[graph.nodes.kind == "decision"]
    assert len(decisions) >= 1
    assert (decisions.token != decisions.other).all()
    for node in decisions.index:
        for edge in graph.edges[graph.edges.source == node].itertuples():
            read = graph.nodes.loc[edge.target]
            assert (read.kind, read.position) == ("embed", decisions.position[node])
            assert read.step > decisions.step[node]
            assert edge.weight == pytest.approx(read.effect)


@pytest.mark.parametrize("name", ["site-mdm", "site-ar"])
def test_the_planted_site_is_among_the_strongest_nodes(name: str) -> None:
    """MLPs at the subject's last token early, attention at the readout late."""
    from diffusion_lens import HookedDiffusionTransformer
    from diffusion_lens.analysis import run_graph
    from diffusion_lens.data import site_facts

    model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
    facts = [f for f in site_facts.load().facts("attribute") if f.template == "people say <subject> gladly plays"][:2]
    run = model.denoise(facts[0].prompt, max_new_tokens=5, steps=5 if model.cfg.has_mask else None)
    graph = run_graph(model, run, 6, facts[1].prompt, metric="margin")
    parts = graph.nodes[graph.nodes.kind.isin(["head", "mlp"])].head(8)
    at_subject = parts[(parts.kind == "mlp") & (parts.position == 3) & (parts.layer < 3)]
    row = int(model.readout.rows(torch.tensor(6)))
    at_readout = parts[(parts.kind == "head") & (parts.position == row) & (parts.layer >= 2)]
    assert len(at_subject)
    assert len(at_readout)
    circuit = graph.prune(0.95)
    kept = set(zip(circuit.names, circuit.position.tolist(), strict=True))
    assert {(at_subject.name.iloc[0], 3), (at_readout.name.iloc[0], row)} <= kept
    measured = circuit.faithfulness(model)
    assert measured.share > 0.9
    assert measured.wrote[0]
    assert measured.random.abs().max() < 0.1


def test_a_whole_graph_keeps_everything_and_an_empty_one_nothing(either: Any) -> None:
    graph = graph_of(either)
    whole = graph.faithfulness(either.model, n_random=0)
    assert whole.shares[:, 0].tolist() == pytest.approx([1.0] * len(whole.steps), abs=1e-3)
    assert whole.replaced[0] == pytest.approx(graph.corrupted, abs=1e-3)
    free = graph.faithfulness(either.model, canvas="free", n_random=0)
    assert free.wrote == [True]
    if either.kind == "ar":  # The order of an MDM may change: a token that has no effect is no part of the graph.
        assert free.share == pytest.approx(1.0, abs=1e-3)
    alone = graph._of_nodes(graph.kind == KINDS.index("target"), {})
    assert alone.faithfulness(either.model, n_random=0).share == pytest.approx(0.0, abs=1e-6)


def test_random_graphs_repeat_with_their_seed_and_have_the_size_of_the_graph(either: Any) -> None:
    graph = graph_of(either).prune(0.8)
    first, again, other = (graph.faithfulness(either.model, seed=seed, n_random=3).values for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    one_by_one = graph.faithfulness(either.model, n_random=3, max_bytes=2**21).values
    assert torch.allclose(one_by_one, first, atol=1e-4)


@pytest.mark.parametrize("replace", ["mean", "zero"])
def test_other_replacements_are_those_of_hooks_by_hand(either: Any, replace: str) -> None:
    model, graph = either.model, graph_of(either, canvas="forced", points=4)
    (position, token), step = graph.record["target"], graph.record["target_step"]
    row = int(model.readout.rows(torch.tensor(position)))
    n_pos = row + 1 if model.cfg.is_autoregressive else LENGTH
    tokens = model.cfg.readable(graph.runs["corrupted"].canvases[step, :, :n_pos])
    cache = model.run_with_cache(tokens)[1]
    factor = float(replace == "mean")
    hooks = [
        (name, lambda activation, hook: factor * cache[hook.name].mean(dim=1, keepdim=True).expand_as(activation))
        for layer in range(model.cfg.n_layers)
        for name in (f"blocks.{layer}.attn.hook_z", f"blocks.{layer}.hook_mlp_out")
    ]
    by_hand = model.run_with_hooks(tokens, fwd_hooks=hooks)[0, row, token].item()
    measured = graph.faithfulness(model, replace, n_random=0)
    assert float(measured.replaced[0]) == pytest.approx(by_hand, abs=1e-4)


def test_noise_repeats_with_its_seed(either: Any) -> None:
    graph = graph_of(either, canvas="forced", points=4)
    first, again, other = (graph.faithfulness(either.model, "noise", n_random=0, seed=s).replaced for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_other_runs_replace_as_the_corrupted_one_does(either: Any) -> None:
    from diffusion_lens.analysis import run_graph

    model, prompt = either.model, prompts(either)[0]
    graph = graph_of(either).prune(0.5)
    own, expected = graph.runs["corrupted"], graph.faithfulness(model, n_random=2)
    assert torch.equal(graph.faithfulness(model, own.repeat(1), n_random=2).values, expected.values)
    assert torch.allclose(graph.faithfulness(model, own.repeat(3), n_random=2).values, expected.values, atol=1e-4)
    other = run_of(model, prompt + 3)
    shares = [graph.faithfulness(model, run, n_random=0).share for run in (own, other)]
    assert shares[0] != shares[1]
    with pytest.raises(ValueError, match="same length, steps"):
        graph.faithfulness(model, other.from_step(1))
    clean = graph.runs["clean"]
    margin = run_graph(model, clean, graph.record["target"][0], own, metric="margin", points=2, nodes_per_step=2)
    with pytest.raises(ValueError, match="writes no other token"):
        margin.faithfulness(model, clean)


def test_nodes_count_where_the_network_reads(either: Any) -> None:
    measured = (graph := graph_of(either, canvas="forced")).faithfulness(either.model, n_random=0)
    row = int(either.model.readout.rows(torch.tensor(graph.record["target"][0])))
    n_read = row + 1 if either.kind == "ar" else LENGTH
    assert measured.n_all == n_read * (1 + either.model.cfg.n_layers * (either.model.cfg.n_heads + 1))


def test_no_exchange_improves_a_refined_graph(either: Any) -> None:
    """Every exchange of a node inside with one outside, measured one by one."""
    model, graph = either.model, graph_of(either, canvas="forced", nodes_per_step=8)
    graph = graph._of_nodes(~graph.inflow.isnan(), {})
    parts = graph.kind != KINDS.index("target")

    def loss(kept: torch.Tensor) -> float:
        return abs(1 - graph._of_nodes(kept | ~parts, {}).faithfulness(model, n_random=0).share)

    refined = graph.refine(model, 5, candidates=100)
    kept = torch.tensor([key in set(refined_keys(refined)) for key in refined_keys(graph)])
    assert int((kept & parts).sum()) == 5
    assert loss(kept) <= loss(graph._ranks() <= 5)
    for inside in (kept & parts).nonzero().flatten():
        for outside in (~kept).nonzero().flatten():
            changed = kept.clone()
            changed[inside], changed[outside] = False, True
            assert loss(changed) > loss(kept) - 2e-3


def refined_keys(graph: Any) -> list[tuple[Any, ...]]:
    return list(zip(graph.names, graph.position.tolist(), strict=True))


def test_pruning_keeps_the_target_and_is_done_once(several: Any) -> None:
    if several.has_shared_expert:
        return
    graph = graph_of(several)
    for share in (0.3, 0.8):
        pruned = graph.prune(share)
        assert len(pruned) < len(graph)
        assert "target" in pruned.nodes.kind.tolist()
        again = pruned.prune(share)
        assert again.names == pruned.names
        assert torch.equal(again.source, pruned.source)
        assert pruned.retained == pytest.approx(1, abs=1 - share) or len(pruned) == int((~graph.inflow.isnan()).sum())


def test_a_corrupted_trajectory_is_that_of_its_prompt(either: Any) -> None:
    from diffusion_lens.analysis import run_graph

    clean, corrupted = (run_of(either.model, prompt) for prompt in prompts(either))
    from_run = run_graph(either.model, clean, last_position(clean), corrupted, nodes_per_step=4)
    from_prompt = run_graph(either.model, clean, last_position(clean), prompts(either)[1], nodes_per_step=4)
    assert torch.equal(from_run.effect, from_prompt.effect)


def test_hooks_of_the_caller_act_in_both_runs_or_are_refused(either: Any) -> None:
    model = either.model

    def halved(activation: torch.Tensor, hook: Any) -> torch.Tensor:
        return activation / 2

    with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", halved), ("blocks.0.attn.hook_z", halved)]):
        require_laws(graph_of(either))
    for name in ("blocks.1.hook_resid_mid", "blocks.0.hook_attn_out"):
        with model.hooks(fwd_hooks=[(name, halved)]), pytest.raises(ValueError, match="edge stands for"):
            graph_of(either)

    def fails(activation: torch.Tensor, hook: Any) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("stop here")

    with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", fails)]):
        with pytest.raises(RuntimeError, match="stop here"):
            graph_of(either)
        assert list(map(len, model.list_hooks().values())) == [1]


def test_what_cannot_be_is_said(either: Any) -> None:
    from diffusion_lens.analysis import run_graph

    model, (clean, corrupted) = either.model, prompts(either)
    run = run_of(model, clean)
    position = last_position(run)
    both = model.denoise(torch.stack([clean, corrupted]), length=LENGTH, **({"steps": 4} if model.cfg.has_mask else {}))
    for message, arguments in {
        "2 rows": (both, position, corrupted),
        "no position that the run writes": (run, 1, corrupted),
        "equally many tokens": (run, position, corrupted[:4]),
        "same length, steps": (run, position, run_of(model, corrupted).from_step(1)),
        "cannot write": (run, (position, 10**6), corrupted),
    }.items():
        with pytest.raises(ValueError, match=message):
            run_graph(model, *arguments)
    with pytest.raises(ValueError, match="too small"):
        run_graph(model, run, position, corrupted, max_bytes=2**16)
    with pytest.raises(ValueError, match="read at step"):
        run_graph(model, run, position, corrupted, step=40)
    graph = run_graph(model, run, position, corrupted, points=2)
    with pytest.raises(ValueError, match="above 0"):
        graph.prune(0)
    for canvas, message in (("forced", "one graph takes"), ("free", "graphs take")):
        with pytest.raises(ValueError, match=message):
            graph.faithfulness(model, canvas=canvas, max_bytes=1000)


def test_the_budget_is_not_exceeded_by_more_steps_or_nodes(either: Any) -> None:
    """Nothing of a step is kept for the next but numbers."""
    graph = graph_of(either, points=4)
    assert graph.cost["passes"] == 3 * len(graph.within)
    assert graph.cost["copies"] == 6 * len(graph.within)


def test_a_graph_is_saved_and_loaded(either: Any, tmp_path: Any) -> None:
    import diffusion_lens

    graph = graph_of(either, points=4).prune(0.8)
    loaded = diffusion_lens.load(graph.save(tmp_path / "graph.safetensors"))
    assert loaded.nodes.equals(graph.nodes)
    assert loaded.edges.equals(graph.edges)
    measured = loaded.faithfulness(either.model, n_random=2)
    assert torch.equal(measured.values, graph.faithfulness(either.model, n_random=2).values)


def test_the_json_has_every_node_and_edge_once(several: Any, tmp_path: Any) -> None:
    import json

    if several.has_shared_expert:
        return
    graph = graph_of(several, points=4)
    document = json.loads(graph.to_json(tmp_path / "graph.json").read_text())
    given = graph.nodes[graph.nodes.kind == "token"]  # one node of the JSON, whatever number of steps read it
    n_repeated = len(given) - len(given[["position", "token"]].drop_duplicates())
    assert len(document["nodes"]) == len(graph) - n_repeated
    links = [(link["source"], link["target"]) for link in document["links"]]
    assert len(set(links)) == len(links) == len(graph.edges)
    graph = graph.prune(0.8)
    for step in (None, graph.record["target_step"]):
        document = json.loads(graph.to_json(tmp_path / "graph.json", step).read_text())
        ids = [node["node_id"] for node in document["nodes"]]
        assert len(set(ids)) == len(ids)
        assert {end for link in document["links"] for end in (link["source"], link["target"])} <= set(ids)
        assert sum(node["is_target_logit"] for node in document["nodes"]) == 1
        shown = graph.edges if step is None else graph.edges[graph.edges.target_step == step]
        assert len(document["links"]) <= len(shown)
    with pytest.raises(ValueError, match="has no nodes"):
        graph.to_json(tmp_path / "graph.json", 77)


def test_the_json_is_what_the_viewers_read(either: Any, tmp_path: Any) -> None:
    """They take p from the label of a logit, and keep the nodes up to a share of all influence."""
    import json

    graph = graph_of(either, points=4).prune(0.8)
    for step in (None, *set(graph.step.tolist())):
        nodes = json.loads(graph.to_json(tmp_path / "graph.json", step).read_text())["nodes"]
        logits = [node["clerp"] for node in nodes if node["feature_type"] == "logit"]
        assert logits
        for said in logits:
            float(said.split("(p=")[1].split(")")[0])  # NaN where the clean run writes the token at another step
        assert max(node["influence"] for node in nodes) == pytest.approx(1)
    nodes = json.loads(graph.to_json(tmp_path / "graph.json").read_text())["nodes"]
    (target,) = (node for node in nodes if node["is_target_logit"])
    p = float(graph.runs["clean"].confidence[0, graph.record["target"][0]])
    assert f"(p={p:.3f})" in target["clerp"]
    assert target["token_prob"] == pytest.approx(p)
    assert target["influence"] == pytest.approx(1 / float(graph.influence.sum()))


@pytest.mark.parametrize("name", ["site-mdm", "site-ar"])
def test_a_drawn_word_is_explained_only_by_a_margin_that_chose_it(name: str) -> None:
    from diffusion_lens import HookedDiffusionTransformer
    from diffusion_lens.analysis import run_graph

    model, n_kept, n_left = HookedDiffusionTransformer.from_pretrained(name, device="cpu"), 0, 0
    for seed in range(6):
        steps = {"steps": 6} if model.cfg.has_mask else {}
        runs = [
            model.denoise(prompt, max_new_tokens=6, temperature=6.0, seed=seed + i, **steps)
            for i, prompt in enumerate(("Brosser Krasser is the", "Plerrick Skusser is the"))
        ]
        graph = run_graph(model, runs[0], last_position(runs[0]), runs[1], points=2)
        for node in graph.nodes[graph.nodes.kind.isin(["decision", "error"])].itertuples():
            written = node.other >= 0 and max(node.token, node.other) < model.cfg.d_vocab_out
            if not written or node.step == graph.record["target_step"]:
                continue
            # The margins in both runs, by the network alone.
            row = int(model.readout.rows(torch.tensor(node.position)))
            margins = []
            for run in runs:
                logits = model(run.canvases[node.step, :, : None if model.cfg.has_mask else row + 1])[0, row]
                margins.append((logits[node.token] - logits[node.other]).item())
            if node.kind == "decision":
                assert margins[0] > 0 > margins[1]
                n_kept += 1
            n_left += node.kind == "error"
    assert n_kept
    assert n_left


def test_equal_runs_are_refused(either: Any) -> None:
    from diffusion_lens.analysis import run_graph

    run = run_of(either.model, prompts(either)[0])
    with pytest.raises(ValueError, match="no difference to explain"):
        run_graph(either.model, run, last_position(run), prompts(either)[0])


def test_an_overshoot_is_not_enough_for_pruning(either: Any) -> None:
    """A graph by hand, whose largest source has twice the effect, and the next takes it back."""
    whole = graph_of(either, points=2, nodes_per_step=2)
    weights = torch.tensor([2.0, -1.05, 0.05], dtype=torch.float64)
    effects = torch.cat([torch.ones(1).double(), weights])
    columns = {name: torch.full((4,), -1) for name in ("layer", "head", "feature", "token", "other")}
    columns |= {name: torch.zeros(4, dtype=torch.long) for name in ("step", "branch", "position")}
    graph = replace(
        whole,
        **columns,
        kind=torch.tensor([KINDS.index("target"), *[KINDS.index("token")] * 3]),
        effect=effects,
        inflow=effects,
        influence=torch.zeros(4, dtype=torch.float64),
        source=torch.tensor([1, 2, 3]),
        target=torch.zeros(3, dtype=torch.long),
        weight=weights,
        decision=torch.zeros(3, dtype=torch.bool),
        clean=1.0,
        corrupted=0.0,
    ).with_influence()
    for share, kept in ((0.5, [2.0, -1.05]), (0.9, [2.0, -1.05]), (0.99, [2.0, -1.05, 0.05]), (1, [2.0, -1.05, 0.05])):
        pruned = graph.prune(share)
        assert pruned.weight.tolist() == kept
        assert pruned.retained == pytest.approx(sum(kept))
