"""Circuits, and how faithful they are: exact at both ends, and as TransformerLens's tool between them."""

import math
import re

import pytest
import torch
from torch.testing import assert_close
from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch
from transformer_lens.tools.analysis.attribution_patching import faithfulness as their_faithfulness

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import answer_probability
from diffusion_lens.analysis.circuits import (
    Circuit,
    EdgeScores,
    Faithfulness,
    NodeScores,
    edge_attribution,
    faithfulness,
    node_attribution,
)
from diffusion_lens.analysis.circuits.graph import Graph
from diffusion_lens.data import toy_facts
from diffusion_lens.model.noise import HeadAt

# One model of each readout and each noise, one with experts, and one that attends by blocks with time conditioning.
a_few_kinds = pytest.mark.parametrize("every", ["lit_gpt-mdm", "llama", "uniform", "llada_moe", "bd3lm"], indirect=True)


def logit(logits):
    return logits[0, -1, 7]


def bundled(name):
    return HookedDiffusionTransformer.from_pretrained(name, device="cpu")


@pytest.fixture(scope="module")
def pair(every):
    clean, corrupted = (every.tokens[row : row + 1, :5] % 500 for row in (0, 1))
    return clean, corrupted


@pytest.fixture(scope="module")
def scores(every, pair):
    return edge_attribution(every.model, *pair, logit, ig_steps=3)


def test_the_whole_graph_is_the_clean_run_and_no_edge_the_corrupted_one(every, pair, request):
    if every.has_shared_expert:
        with pytest.raises(ValueError, match=r"has a shared expert, .* no part of the graph|ends with a factor"):
            edge_attribution(every.model, *pair, logit)
        return
    scores = request.getfixturevalue("scores")
    n_edges = int(scores.exists.sum())
    curve = faithfulness(every.model, *pair, logit, scores, [0, 10, n_edges])
    assert curve.sizes == (0, 10, n_edges)
    # A metric reads logits of p(x_0), in both runs with the tokens of the clean canvas.
    head = HeadAt.of(every.model, pair[0])
    clean, corrupted = (logit(head.clean_logits(every.model(tokens))).item() for tokens in pair)
    assert_close(curve.share[[0, 2]].float(), torch.tensor([0.0, 1.0]), rtol=0, atol=1e-4)
    assert (curve.clean, curve.corrupted) == pytest.approx((clean, corrupted), rel=1e-4)


@pytest.mark.parametrize("every", ["llada", "llama"], indirect=True)
def test_a_circuit_recovers_what_transformer_lens_says(every, pair, scores):
    theirs = attribution_patch(every.model, *pair, logit, EdgeAttributionConfig(granularity="edge"))
    kept = {edge for edge in theirs.edge_scores if edge[0].kind in ("embed", "mlp_out")}
    rows = torch.tensor([writer[0] in "em" for writer in scores.writers])  # the embedding and the MLPs
    edges = (scores.exists & rows[:, None]).nonzero().tolist()
    named = frozenset((scores.writers[writer], scores.readers[reader]) for writer, reader in edges)
    mine = Circuit(named, scores.graph)
    ours = faithfulness(every.model, *pair, logit, scores, [mine])
    expected = their_faithfulness(every.model, *pair, logit, kept)
    assert ours.share.item() == pytest.approx(expected.recovered, abs=1e-3)


@a_few_kinds
def test_the_largest_edges_are_selected(scores):
    circuit = scores.top(7)
    kept = scores.scores.abs()[circuit.mask]
    assert len(circuit) == len(kept) == 7
    assert kept.min() >= scores.scores.abs()[~circuit.mask].max()
    assert scores.top(0) == Circuit(frozenset(), scores.graph)
    with pytest.raises(ValueError, match=r"k=\d+, but the graph has \d+ edges"):
        scores.top(int(scores.exists.sum()) + 1)
    with pytest.raises(ValueError, match=r"no edge from 'm2' to 'm0'"):
        Circuit(frozenset({("m2", "m0")}), scores.graph)


def test_overlap_and_share_by_layer_by_hand():
    graph = Graph(n_layers=12, n_heads=2, n_key_value_heads=1)
    left = Circuit(frozenset({("embed", "a0.h1<q>"), ("embed", "m0"), ("m0", "m11"), ("m0", "logits")}), graph)
    right = Circuit(frozenset({("embed", "m0"), ("m0", "logits"), ("a0.h1", "logits")}), graph)
    assert left.jaccard(right) == pytest.approx(2 / 5)
    assert left.jaccard(left) == 1
    shares = left.share_by_layer()
    assert list(shares) == [*map(str, range(12)), "logits"]
    assert {name: share for name, share in shares.items() if share} == {"0": 0.5, "11": 0.25, "logits": 0.25}
    none = Circuit(frozenset(), graph)
    assert all(map(math.isnan, (none.jaccard(none), *none.share_by_layer().values())))
    with pytest.raises(ValueError, match="the circuits are of different graphs"):
        left.jaccard(Circuit(frozenset(), Graph(12, 2, 2)))


def test_layers_and_groups_of_the_graph_are_those_of_its_names():
    graph = Graph(n_layers=3, n_heads=4, n_key_value_heads=2)
    for name, layer in zip(graph.readers[:-1], graph.reader_layers, strict=False):
        assert name.startswith((f"a{layer}.h", f"m{layer}"))
    for names, groups in ((graph.readers, graph.reader_groups), (graph.writers, graph.writer_groups)):
        assert [re.sub(r"\.h\d", "", name) for name in names] == list(groups)


@a_few_kinds
def test_scores_of_another_network_are_refused(specimen, configs, scores, pair):
    model = specimen({**configs["llama"], "num_hidden_layers": 2}).model
    with pytest.raises(ValueError, match="other layers or heads"):
        faithfulness(model, *pair, logit, scores, [1])


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_inputs_with_padding_at_other_positions_are_refused(tiny):
    clean, corrupted = ["Gustav Geisser is the", "Tilda is"], ["Tilda Drusser is the", "Gustav is"]
    metric = lambda logits: logits[0, -1, 7] + logits[1, -1, 7]  # noqa: E731
    scores = edge_attribution(tiny, clean, corrupted, metric, ig_steps=1)
    other = ["Tilda Drusser is the", "Gustav is the"]
    message = "row 1 has 2 tokens without padding in the clean input and 3 in the corrupted one"
    with pytest.raises(ValueError, match=message):
        edge_attribution(tiny, clean, other, metric)
    with pytest.raises(ValueError, match=message):
        faithfulness(tiny, clean, other, metric, scores, [1])


def test_prompts_at_other_positions_are_refused():
    """Otherwise the metric of the clean run would be that of other rows."""
    tiny = bundled("tiny-mdm")
    prompts = ["Gustav Geisser is the", "Tilda is the"]
    runs = [tiny.denoise(prompt, length=9, steps=4) for prompt in prompts]
    metric = lambda logits: logits[0, -1, 7]  # noqa: E731
    for attribute in (edge_attribution, node_attribution):
        with pytest.raises(ValueError, match="given their prompts at different positions"):
            attribute(tiny, *runs, metric, steps=[0])


def test_circuits_at_steps_are_those_of_each_canvas(tiny):
    prompts = ["Gustav Geisser is the", "Tilda Drusser is the"]
    runs = [tiny.denoise(prompt, max_new_tokens=5, steps=5) for prompt in prompts]
    metric = lambda logits: logits[0, -1, 7]  # noqa: E731
    scores = edge_attribution(tiny, *runs, metric, steps=[0, 3], ig_steps=2)
    curve = faithfulness(tiny, *runs, metric, scores, [0, 20], steps=[0, 3])
    assert curve.scores.shape == (2, 2)
    for entry, step in enumerate((0, 3)):
        canvases = [run.canvases[step] for run in runs]
        canvases = [canvas[:, : int((canvas >= 0).sum())] for canvas in canvases]
        alone = faithfulness(tiny, *canvases, metric, scores.at_step(step), [0, 20])
        for name in ("scores", "clean", "corrupted"):
            assert_close(getattr(curve, name)[entry], getattr(alone, name), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="step 1 was not attributed"):
        faithfulness(tiny, *runs, metric, scores, [1], steps=[1])
    with pytest.raises(ValueError, match="take one of them by at_step"):
        faithfulness(tiny, *canvases, metric, scores, [1])


@pytest.mark.parametrize("cfg_scale", [0.0, 0.8])
def test_both_ends_are_exact_at_every_step(cfg_scale):
    """Also where the steps have revealed different answers, and under guidance."""
    tiny = bundled("tiny-mdm")
    facts = toy_facts.load().facts("p2d", "p2d")
    queries = [facts[row].to_query(tiny, n_masks=5, first_tokens=2) for row in (0, 5)]
    runs = [tiny.denoise(query.tokens[None], steps=5, cfg_scale=cfg_scale) for query in queries]
    metric = answer_probability(tiny, queries[0])
    scores = edge_attribution(tiny, *runs, metric, steps=[0, 4], ig_steps=1)
    curve = faithfulness(tiny, *runs, metric, scores, [int(scores.exists.sum()), 0], steps=[0, 4])
    assert_close(curve.scores, torch.stack([curve.clean, curve.corrupted], dim=1), rtol=0, atol=1e-5)
    assert_close(curve.clean, scores.clean, rtol=0, atol=1e-6)
    assert_close(curve.corrupted, scores.corrupted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "settings", "step"), [("tiny-mdm", {"cfg_scale": 0.8}, 3), ("tiny-ar", {}, 1)])
def test_scores_are_those_of_the_clean_canvas_s_metric(name, settings, step):
    """The corrupted run has revealed another first token, which would make the metric of its own canvas 0."""
    model, facts = bundled(name), toy_facts.load().facts("p2d", "p2d")
    length = {"length": 9, "steps": 5} if model.cfg.has_mask else {"max_new_tokens": 5}
    runs = [model.denoise(facts[row].prompt, **settings, **length) for row in (0, 5)]
    query = facts[0].to_query(model, first_tokens=2)
    metric, first = answer_probability(model, query), query.answer_positions[0]
    revealed = [run.canvases[step][0, first] for run in runs]
    assert revealed[0] == query.answer_tokens[0] != revealed[1]
    assert model.cfg.blank != revealed[1] >= 0
    scores = node_attribution(model, *runs, metric, steps=[step], ig_steps=30)
    assert scores.clean - scores.corrupted > 0.1
    assert_close(scores.scores[:, 0].double(), scores.clean - scores.corrupted, rtol=0.05, atol=0)


def test_scores_that_order_no_edges_select_none():
    graph = Graph(n_layers=1, n_heads=1, n_key_value_heads=1)
    for score in (0.0, math.nan):
        table = torch.zeros(graph.edges.shape).masked_fill(graph.edges, score)
        scores = EdgeScores(table, torch.tensor(1.0), torch.tensor(1.0), graph, {"steps": None})
        assert len(scores.top(0)) == 0
        assert len(scores.top(int(graph.edges.sum()))) == int(graph.edges.sum())
        with pytest.raises(ValueError, match="the scores are all 0 or not finite"):
            scores.top(2)


def test_a_small_budget_splits_the_circuits_and_changes_no_score(either):
    model, (clean, corrupted) = either.model, (either.tokens[:1, :6], either.tokens[1:2, :6])
    scores = edge_attribution(model, clean, corrupted, logit, ig_steps=1)
    circuits = [0, scores.top(3), 40]
    whole = faithfulness(model, clean, corrupted, logit, scores, circuits)
    with pytest.raises(ValueError, match=r"max_bytes=10 is too small: one circuit takes [\d,]+ bytes") as raised:
        faithfulness(model, clean, corrupted, logit, scores, circuits, max_bytes=10)
    least = int(str(raised.value).split("takes ")[1].split(" bytes")[0].replace(",", ""))
    split = faithfulness(model, clean, corrupted, logit, scores, circuits, max_bytes=least)
    assert_close(split.scores, whole.scores, rtol=1e-5, atol=1e-6)
    for entry, circuit in enumerate(circuits):
        alone = faithfulness(model, clean, corrupted, logit, scores, [circuit])
        assert_close(alone.scores[0], whole.scores[entry], rtol=1e-5, atol=1e-6)


def test_faithfulness_comes_back_from_its_file(either, tmp_path):
    pair = either.tokens[:1, :5], either.tokens[1:2, :5]
    scores = edge_attribution(either.model, *pair, logit, ig_steps=1)
    curve = faithfulness(either.model, *pair, logit, scores, [0, scores.top(2)], logits_at=[-2, -1])
    again = Faithfulness.load(curve.save(tmp_path / "curve.safetensors"))
    assert (again.sizes, again.record["logits_at"]) == (curve.sizes, [-2, -1])
    assert torch.equal(again.share, curve.share)
    assert again.record["circuits"] == [0, sorted(map(list, scores.top(2).edges))]


def test_guided_steps_have_the_guided_metric_and_hooks_read_the_step():
    """All passes read the step: a factor of step/3 changes nothing at step 3, and an error elsewhere."""
    tiny, scale, step = bundled("tiny-mdm"), 0.8, 3
    runs = [
        tiny.denoise(prompt, length=9, steps=5, cfg_scale=scale)
        for prompt in ("Gustav Geisser is the", "Tilda Drusser is the")
    ]
    canvases = [run.canvases[step] for run in runs]
    unconditional = tiny(canvases[0].masked_fill(runs[0].given, tiny.cfg.mask_token_id))
    by_hand = [logit(unconditional + (1 + scale) * (tiny(canvas) - unconditional)).item() for canvas in canvases]
    scores = node_attribution(tiny, *runs, logit, steps=[step], ig_steps=2)
    assert (scores.clean.item(), scores.corrupted.item()) == pytest.approx(tuple(by_hand), rel=1e-4)
    by_step = ("blocks.0.hook_mlp_out", lambda x, hook: x * (hook.step.index / step))
    with tiny.hooks(fwd_hooks=[by_step]), pytest.warns(UserWarning, match="written by another network"):
        hooked = node_attribution(tiny, *runs, logit, steps=[step], ig_steps=2)
    assert_close(hooked.scores, scores.scores, rtol=1e-4, atol=1e-5)


@a_few_kinds
def test_circuits_come_from_any_iterable_and_other_arguments_are_refused(every, pair, scores):
    listed = faithfulness(every.model, *pair, logit, scores, [0, 5])
    generated = faithfulness(every.model, *pair, logit, scores, (size for size in (0, 5)))
    assert generated.sizes == (0, 5)
    assert torch.equal(generated.scores, listed.scores)
    with pytest.raises(TypeError, match=r"circuits=5 is one circuit or size; give several in a list, such as \[5\]"):
        faithfulness(every.model, *pair, logit, scores, 5)
    nodes = NodeScores(scores.nodes, scores.clean, scores.corrupted, scores.graph, scores.record)
    with pytest.raises(TypeError, match="NodeScores do not order edges"):
        faithfulness(every.model, *pair, logit, nodes, [5])


def test_a_circuit_comes_back_from_its_file(tmp_path):
    circuit = Circuit(frozenset({("embed", "a0.h1<q>"), ("m0", "logits")}), Graph(1, 2, 1))
    assert Circuit.load(circuit.save(tmp_path / "circuit.safetensors")) == circuit
