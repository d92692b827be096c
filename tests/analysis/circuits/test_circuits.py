"""Circuits, and how faithful they are: exact at both ends, and as TransformerLens's tool between them."""

import pytest
import torch
from torch.testing import assert_close
from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch
from transformer_lens.tools.analysis.attribution_patching import faithfulness as their_faithfulness

from diffusion_lens.analysis.circuits import Circuit, edge_attribution, faithfulness


def logit(logits):
    return logits[0, -1, 7]


@pytest.fixture(scope="module")
def pair(every):
    clean, corrupted = (every.tokens[row : row + 1, :5] % 500 for row in (0, 1))
    return clean, corrupted


@pytest.fixture(scope="module")
def scores(every, pair):
    return edge_attribution(every.model, *pair, logit, ig_steps=3)


def test_the_whole_graph_is_the_clean_run_and_no_edge_the_corrupted_one(every, pair, scores):
    n_edges = int(scores.exists.sum())
    curve = faithfulness(every.model, *pair, logit, scores, [0, 10, n_edges])
    assert curve.sizes == (0, 10, n_edges)
    clean, corrupted = (logit(every.model(tokens)).item() for tokens in pair)
    assert_close(curve.share[[0, 2]].float(), torch.tensor([0.0, 1.0]), rtol=0, atol=1e-4)
    assert (curve.clean, curve.corrupted) == pytest.approx((clean, corrupted), rel=1e-4)


@pytest.mark.parametrize("every", ["llada", "llama"], indirect=True)
def test_a_circuit_recovers_what_transformer_lens_says(every, pair, scores):
    theirs = attribution_patch(every.model, *pair, logit, EdgeAttributionConfig(granularity="edge"))
    kept = {edge for edge in theirs.edge_scores if edge[0].kind in ("embed", "mlp_out")}
    rows = torch.tensor([writer[0] in "em" for writer in scores.writers])  # the embedding and the MLPs
    edges = (scores.exists & rows[:, None]).nonzero().tolist()
    mine = Circuit(frozenset((scores.writers[writer], scores.readers[reader]) for writer, reader in edges))
    ours = faithfulness(every.model, *pair, logit, scores, [mine])
    expected = their_faithfulness(every.model, *pair, logit, kept)
    assert ours.share.item() == pytest.approx(expected.recovered, abs=1e-3)


def test_the_largest_edges_are_selected(scores):
    circuit = scores.top(7)
    kept = scores.scores.abs()[scores.mask(circuit)]
    assert len(circuit) == len(kept) == 7
    assert kept.min() >= scores.scores.abs()[~scores.mask(circuit)].max()
    assert scores.top(0) == Circuit(frozenset())
    with pytest.raises(ValueError, match=r"k=\d+, but the graph has \d+ edges"):
        scores.top(int(scores.exists.sum()) + 1)
    with pytest.raises(ValueError, match=r"no edge from 'm2' to 'm0'"):
        scores.mask(Circuit(frozenset({("m2", "m0")})))


def test_overlap_and_share_by_layer_by_hand():
    left = Circuit(frozenset({("embed", "a0.h0<q>"), ("embed", "m0"), ("m0", "m11"), ("m0", "logits")}))
    right = Circuit(frozenset({("embed", "m0"), ("m0", "logits"), ("a0.h1", "logits")}))
    assert left.jaccard(right) == pytest.approx(2 / 5)
    assert left.jaccard(left) == 1
    assert left.share_by_layer() == {"0": 0.5, "11": 0.25, "logits": 0.25}
    assert torch.tensor(Circuit(frozenset()).jaccard(Circuit(frozenset()))).isnan()


def test_scores_of_another_network_are_refused(specimen, configs, scores, pair):
    model = specimen({**configs["llama"], "num_hidden_layers": 2}).model
    with pytest.raises(ValueError, match="other layers or heads"):
        faithfulness(model, *pair, logit, scores, [1])


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
