"""What a page shows of circuits, graphs, experts, conditioning and signatures: the numbers of the results of a run."""

import json

import numpy as np
import pytest
import torch
from page_reader import PageFile, as_selected, ran, unpack
from small_networks import diffusion_gemma

from diffusion_lens.analysis import TaughtPair, edge_attribution, node_attribution, reversal_signatures, run_graph
from diffusion_lens.analysis.graphs.circuit_tracer import as_graph
from diffusion_lens.explorer import Session
from diffusion_lens.interventions import zero_ablate

PROMPT = "Gustav Geisser is the"
SETTINGS = dict(length=12, steps=4, seed=4)
WRITTEN = dict(max_new_tokens=12, steps=6)
WITH_EXPERTS = ("llada_moe", "llada_moe-options", "llada2", "diffusion_gemma")


def metric(logits):
    row = min(5, logits.shape[-2] - 1)
    return logits[..., row, 7].sum() - logits[..., row, 9].sum()


@pytest.fixture(scope="module")
def attributed(tiny):
    """Two runs, and the scores of edges and of nodes between them."""
    run, other = (tiny.denoise(prompt, **SETTINGS) for prompt in (PROMPT, "Wanda Geisser is the"))
    steps = [0, 3]
    return (
        run,
        other,
        [method(tiny, run, other, metric, steps=steps) for method in (edge_attribution, node_attribution)],
    )


def test_circuit_has_the_strongest_edges_of_each_step_and_all_nodes(attributed):
    run, other, (edges, nodes) = attributed
    page = PageFile(run.explore(circuit=edges).html())
    entry = page.run()["circuit"]
    assert (entry["side"], entry["n_rows"], entry["steps"]) == ("clean", 1, [0, 3])
    assert PageFile(other.explore(circuit=edges).html()).run()["circuit"]["side"] == "corrupted"
    frame = edges.to_dataframe()
    for i, step in enumerate(entry["steps"]):
        header, arrays = page.read(f"circuit/{step}")
        assert header == {"clean": float(edges.clean[i]), "corrupted": float(edges.corrupted[i])}
        of_step = frame[frame.step == step]
        assert entry["n_edges"] == len(of_step)
        strongest = of_step.loc[of_step.score.abs().sort_values(ascending=False).index][: len(arrays["score"])]
        assert len(strongest) == 300
        np.testing.assert_allclose(np.abs(arrays["score"]), strongest.score.abs(), rtol=1e-6)
        ends = zip(arrays["writer"], arrays["reader"], arrays["score"], strict=True)
        known = of_step.set_index(["writer", "reader"]).score
        for writer, reader, score in list(ends)[::30]:
            assert known[entry["writers"][writer], entry["readers"][reader]] == pytest.approx(score, rel=1e-6)
        np.testing.assert_allclose(arrays["nodes"], nodes.scores[i], rtol=1e-3, atol=1e-5)
        _, alone = PageFile(run.explore(circuit=nodes).html()).read(f"circuit/{step}")
        np.testing.assert_allclose(alone["nodes"], nodes.scores[i], rtol=1e-6)
        assert set(alone) == {"nodes"}


def test_circuit_of_one_step_or_one_canvas_is_shown_at_its_step(tiny, attributed):
    run, _, (edges, _) = attributed
    assert run.explore(circuit=edges.at_step(3)).manifest["runs"][0]["circuit"]["steps"] == [3]
    if tiny.cfg.is_autoregressive:
        return
    canvases = [each.canvases[0] for each in attributed[:2]]
    of_canvas = edge_attribution(tiny, *canvases, metric)
    assert run.explore(circuit=of_canvas).manifest["runs"][0]["circuit"]["steps"] == [0]


def test_circuits_of_other_runs_and_networks_are_refused(tiny, attributed):
    run, _, (edges, _) = attributed
    third = tiny.denoise("Wanda Larsh is the", **SETTINGS)
    with pytest.raises(
        ValueError, match=r"no canvases of row 0 of the trajectory.*trajectory\.explore\(path, circuit="
    ):
        third.explore(circuit=edges)
    with tiny.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", zero_ablate())]):
        pair = (tiny.denoise(prompt, **SETTINGS) for prompt in (PROMPT, "Wanda Geisser is the"))
        changed = node_attribution(tiny, *pair, metric, steps=[0])
    with pytest.raises(ValueError, match="the circuit is of another network than the one that wrote the trajectory"):
        run.explore(circuit=changed)
    with pytest.raises(TypeError, match=r"circuit= is no such result\. trajectory\.explore\(path, circuit="):
        run.explore(circuit=edges.at_step(0).top(5))


def test_a_graph_has_its_nodes_edges_and_document(tiny, tmp_path):
    batch = tiny.denoise([PROMPT, "Wanda Larsh is the"], **SETTINGS)
    run, position = batch.row(1), 7
    graph = run_graph(tiny, run, position, PROMPT, points=4)
    for shown in (graph, graph.prune(most=20)):
        page = PageFile(batch.explore(graph=shown, row=1).html())
        header, arrays = page.read("graph")
        assert page.run()["words"][header["about"]["word"]] == run.words[int(run.tokens[0, position])]
        assert header["document"] == json.loads(shown.to_json(tmp_path / "graph.json").read_text())
        nodes, edges = shown.nodes.sort_index(), shown.edges.sort_index()
        assert header["names"] == nodes.name.tolist()
        assert header["kinds"] == nodes.kind.tolist()
        for name in ("step", "layer", "head", "position", "branch"):
            assert arrays[name].tolist() == nodes[name].tolist()
        np.testing.assert_allclose(arrays["effect"], nodes.effect, rtol=1e-6)
        texts = [page.run()["words"][word] if word >= 0 else None for word in arrays["token"]]
        assert texts == [shown.words[token] if token >= 0 else None for token in nodes.token]
        for end in ("source", "target"):
            ids = [header["ids"][node] for node in arrays[end]]
            assert ids == [link[end] for link in header["document"]["links"]]
            assert arrays[end].tolist() == edges[end].tolist()
        assert (arrays["decision"] == 1).tolist() == (edges.kind == "decision").tolist()


def test_graphs_of_other_runs_and_networks_are_refused(tiny):
    run, other = (tiny.denoise(prompt, **SETTINGS) for prompt in (PROMPT, "Wanda Geisser is the"))
    graph = run_graph(tiny, run, 7, other, points=2)
    with pytest.raises(ValueError, match=r"not of row 0 of the trajectory.*trajectory\.explore\(path, graph=run_graph"):
        other.explore(graph=graph)
    with tiny.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", zero_ablate())]):
        changed = tiny.denoise(PROMPT, **SETTINGS)
    with pytest.raises(ValueError, match="the graph is of another network than the one that wrote the trajectory"):
        changed.explore(graph=graph)
    with pytest.raises(TypeError, match=r"graph= is no such result\. trajectory\.explore\(path, graph="):
        run.explore(graph=graph.nodes)


def test_a_session_computes_graphs_and_a_page_has_the_one_that_is_shown(tiny):
    session, other = Session([tiny]), "Wanda Geisser is the"
    run = session.run({"prompt": PROMPT, "length": 12, "steps": 4, "seed": 4})
    name = f"graph/7/{other}"
    header, arrays = unpack(session.chunk(run["id"], name))
    graph = ran(as_selected(run["python"]["graph"], position=7, name=repr(other)), tiny)[0]["graph"]
    assert header["document"] == as_graph(graph, "graph")[0]
    words = [*run["words"], *header.get("words", [])]
    assert words[header["about"]["word"]] == graph.words[graph.record["target"][1]]
    decided = [words[word] for word, kind in zip(arrays["other"], header["kinds"], strict=True) if kind == "decision"]
    assert decided == [graph.words[token] for token in graph.nodes.sort_index().query("kind == 'decision'").other]
    state = {"graph": json.dumps({"chunk": name})}
    page = session.page([run["id"]], state=state).runs[0]
    assert page.chunks[name] == session.chunk(run["id"], name)
    assert page.entry["graph"] == {"chunk": name}
    for other_state in (None, {"graph": "[1]"}, {"graph": json.dumps({"chunk": "predictions"})}):
        assert session.page([run["id"]], state=other_state).runs[0].entry["graph"] is None

    zero = {"what": "zero", "site": "mlp", "layer": 0}
    changed = session.run({**run["spec"], "base": run["id"], "interventions": [zero]})
    for run_id, asked, message in (
        (run["id"], f"graph/0/{other}", "no position that the run writes"),
        (run["id"], "graph/7/Wanda", "equally many tokens"),
        (changed["id"], name, "undo those of this run"),
    ):
        with pytest.raises(ValueError, match=message):
            session.chunk(run_id, asked)


@pytest.fixture(params=WITH_EXPERTS)
def with_experts(request, specimen, configs):
    return _experts(request.param, specimen, configs)


def _experts(name, specimen, configs, **changes):
    model = specimen(configs[name] if name in configs else diffusion_gemma(**changes)).model
    model.clock.time = model.clock.origins = None
    return model


def test_experts_are_those_that_the_routers_chose(with_experts):
    model = with_experts
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])

    def of_experts(name):
        return name.endswith(("hook_experts", "hook_router_weights"))

    run, cache = model.denoise_with_cache(prompt, of_experts, steps_filter=[0, 2], **WRITTEN)
    page = PageFile(run.explore(experts=cache, row=1).html())
    entry = page.run()["experts"]
    layers = [layer for layer, has in enumerate(model.cfg.experts.layers) if has]
    assert (entry["layers"], entry["steps"], entry["n_experts"]) == (layers, [0, 2], model.cfg.experts.n_experts)
    for step in (0, 2):
        _, arrays = page.read(f"experts/{step}")
        for i, layer in enumerate(layers):
            chosen, table = (cache[step][f"blocks.{layer}.mlp.{x}"][1] for x in ("hook_experts", "hook_router_weights"))
            assert arrays["experts"][i].tolist() == chosen.tolist()
            # The chosen experts have all of the weight.
            np.testing.assert_allclose(arrays["weights"][i].sum(-1), table.float().sum(-1), rtol=1e-5)
            assert np.all(arrays["weights"][i] > 0)
    # Of the same steps, because a pass with hooks may round otherwise, and random weights enlarge that in every step.
    given = dict(steps_filter=[0, 2], **WRITTEN)
    alone = model.denoise_with_cache(prompt, lambda name: name.endswith("hook_experts"), **given)[1]
    _, arrays = PageFile(run.explore(experts=alone).html()).read("experts/2")
    assert np.isnan(arrays["weights"]).all()


def test_experts_of_another_run_or_without_a_choice_are_refused(with_experts):
    model, settings = with_experts, WRITTEN
    run = model.denoise(torch.tensor([[5, 6, 7]]), **settings)
    of_other = model.denoise_with_cache(
        torch.tensor([[8, 9, 10]]), lambda name: name.endswith("hook_experts"), **settings
    )
    with pytest.raises(ValueError, match="experts= is of another run"):
        run.explore(experts=of_other[1])
    run, without = model.denoise_with_cache(torch.tensor([[5, 6, 7]]), "hook_embed", **settings)
    with pytest.raises(ValueError, match="experts= contains no choice of experts"):
        run.explore(experts=without)


def test_live_views_of_a_model_that_has_both_are_those_of_its_run(specimen, configs, tiny):
    model = _experts("diffusion_gemma", specimen, configs, vocab_size=len(tiny.tokenizer))
    model.set_tokenizer(tiny.tokenizer, default_prepend_bos=False)
    settings = dict(length=16, steps=4, seed=1)
    session = Session([model])
    run = session.run(dict(settings, prompt=PROMPT))
    trajectory, cache = model.denoise_with_cache(
        PROMPT, lambda name: name.endswith(("hook_experts", "hook_router_weights")), **settings
    )
    page = PageFile(trajectory.explore(experts=cache).html())
    assert run["experts"] == page.run()["experts"]
    assert run["conditioning"] == page.run()["conditioning"]
    for step in (0, 3, 7):
        _, live = unpack(session.chunk(run["id"], f"experts/{step}"))
        _, given = page.read(f"experts/{step}")
        assert live["experts"].tolist() == given["experts"].tolist()
        np.testing.assert_allclose(live["weights"], given["weights"], rtol=1e-4)
    header, live = unpack(session.chunk(run["id"], "conditioning"))
    words = [*run["words"], *header.get("words", [])]
    shown = [[words[index] if index >= 0 else None for index in row] for row in live["words"].tolist()]
    assert shown == page.texts(page.read("conditioning")[1]["words"])
    whole = PageFile(session.page([run["id"]]).html())
    assert whole.chunks[run["id"], "conditioning"] == session.chunk(run["id"], "conditioning")


@pytest.mark.parametrize("name", ["llada_moe", "llada2"])
def test_live_experts_are_those_of_the_cache(in_words, name):
    model = in_words(name)
    session = Session([model])
    run = session.run(dict(SETTINGS, prompt=PROMPT))
    assert "experts" not in run["missing"]
    variables, _ = ran(
        as_selected(run["python"]["experts"], step=2, layer=run["experts"]["layers"][0], position=6), model
    )
    _, arrays = unpack(session.chunk(run["id"], "experts/2"))
    assert arrays["experts"][0, 6].tolist() == variables["experts"].tolist()
    weights = model.denoise_with_cache(PROMPT, lambda name: name.endswith("hook_router_weights"), **SETTINGS)[1][2]
    table = weights[f"blocks.{run['experts']['layers'][0]}.mlp.hook_router_weights"][0]
    np.testing.assert_allclose(arrays["weights"][0].sum(-1), table.sum(-1), rtol=1e-4)
    page = PageFile(session.page([run["id"]]).html())
    assert page.chunks[run["id"], "experts/2"] == session.chunk(run["id"], "experts/2")


def test_a_model_without_experts_or_conditioning_has_no_such_chunk(tiny):
    session = Session([tiny])
    run = session.run(dict(SETTINGS, prompt=PROMPT))
    assert not {"experts", "conditioning"} & {*run, *run["missing"]}
    page = tiny.denoise(PROMPT, **SETTINGS).explore().manifest["runs"][0]
    # A tab without numbers that this page can never have would be in the way.
    assert not {"circuit", "signatures", "experts", "conditioning"} & {*page, *page["missing"]}
    for name in ("experts/0", "conditioning", "circuit/0"):
        with pytest.raises(KeyError, match="has no chunk"):
            session.chunk(run["id"], name)


def test_conditioning_is_what_each_step_reads_of_the_one_before(specimen, configs):
    model = _experts("diffusion_gemma", specimen, configs)
    run = model.denoise(torch.tensor([[5, 6, 7], [8, 9, 10]]), max_new_tokens=12, steps=4)
    page = PageFile(run.explore(row=1).html())
    header, arrays = page.read("conditioning")
    assert header == {}
    words = page.texts(arrays["words"])
    seen = 0
    for step in range(8):
        start = int(run.state_at(step).block.start[1])
        known = run.handed[step].likeliest[1].tolist()
        shown = words[step][start : start + 6]
        assert shown == [None if token < 0 else run.words[token] for token in known]
        assert [word for i, word in enumerate(words[step]) if not start <= i < start + 6] == [None] * 9
        assert arrays["streak"][step] == run.handed[step].streak[1]
        assert bool(arrays["finished"][step]) is bool(run.handed[step].finished[1])
        seen += sum(word is not None for word in shown)
    assert words[0] == [None] * 15
    assert seen >= 6
    variables, _ = ran(as_selected(page.run()["python"]["conditioning"], step=3), model)
    assert torch.equal(variables["tokens"], run.handed[3].likeliest[1])


PEOPLE = {
    "Gustav Geisser": "brave drummer of Rolsen",
    "Nora Larsh": "kind baker of Relsen",
    "Hugo Darsh": "famous judge of Turgate",
}


@pytest.fixture(scope="module")
def signed(tiny):
    """The signatures of three facts."""
    pairs = [
        TaughtPair.of(tiny, (f"{a} is the {b}.", f"the {b} is {a}."), a, b, id=a.split()[0]) for a, b in PEOPLE.items()
    ]
    return reversal_signatures(tiny, pairs)


@pytest.mark.parametrize("prompt", ["Gustav Geisser is the", "the brave drummer of Rolsen is"])
def test_signatures_are_means_intervals_and_the_value_of_the_fact(tiny, signed, prompt):
    page = PageFile(tiny.denoise(prompt, **SETTINGS).explore(signatures=signed).html())
    entry, (_, arrays) = page.run()["signatures"], page.read("signatures")
    assert (entry["facts"], entry["n_facts"]) == (["Gustav"], 3)
    by_name = {measure["name"]: measure for measure in entry["measures"]}
    assert by_name.keys() == arrays.keys()
    n_layers = tiny.cfg.n_layers

    def bars(name, mean, own, pick=slice(None)):
        low, high = (each[pick].flatten() for each in signed.interval(name))
        return np.stack([mean.flatten(), low, high, own.flatten()], axis=-1)

    near = dict(rtol=1e-5, atol=1e-6)
    expected = bars("evidence_percentile", signed.evidence_percentile, signed.percentiles[0, :, 0])
    np.testing.assert_allclose(arrays["evidence_percentile"], expected, **near)
    expected = bars("edge_cut", signed.edge_cut, signed.cuts[0])
    np.testing.assert_allclose(arrays["edge_cut"], expected, **near)
    assert by_name["edge_cut"]["labels"][n_layers] == "block 0, reverse"
    expected = bars("probability", signed.probability, signed.probabilities[0])
    np.testing.assert_allclose(arrays["probability"], expected, **near)
    name = f"blocks.{n_layers - 1}.attn.o.weight"
    bar = arrays["gradient_cosine"][by_name["gradient_cosine"]["labels"].index(f"block {n_layers - 1}, attn.o")]
    index = signed.parameters.index(name)
    assert bar[0] == pytest.approx(signed.gradient_cosine[name][0], rel=1e-4)
    assert bar[3] == pytest.approx(float(signed.cosines[0, index, 0]), rel=1e-4)


def test_signatures_of_other_facts_and_networks_are_refused(tiny, signed):
    other = tiny.denoise("the brave drummer of Relsen is", **SETTINGS)
    with pytest.raises(ValueError, match="of 3 facts, and the prompt of row 0 is the beginning of none of their"):
        other.explore(signatures=signed)
    with tiny.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", zero_ablate())]):
        changed = tiny.denoise(PROMPT, **SETTINGS)
    with pytest.raises(ValueError, match="the study of signatures is of another network"):
        changed.explore(signatures=signed)
