"""The three signatures against formulas written out one fact at a time, and the laws that hold for any network."""

import copy
from functools import cache

import pytest
import torch
from oracles.memory import peak_of_tensors
from torch.nn.functional import normalize

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.analysis import (
    TaughtCanvas,
    TaughtPair,
    edge_cut,
    evidence,
    gradient_alignment,
    isotropic_route_correlation,
    reversal_signatures,
    routes,
)
from diffusion_lens.analysis.signatures import pair_bytes
from diffusion_lens.model.noise import HeadAt
from weight_conversion import Architecture

N = 5


def random_pairs(model, n=N, seed=0, lengths=(7, 7)):
    """Random tokens; the reader sees the source, and in a causal model both are where a pair has them."""
    draw = torch.Generator().manual_seed(seed)
    vocabulary = min(500, model.cfg.d_vocab_out - 2)

    def canvas(length, answer_at, source):
        tokens = torch.randint(3, vocabulary, (length,), generator=draw)
        answer = int(tokens[answer_at])
        if model.cfg.has_mask:
            tokens[answer_at] = model.cfg.mask_token_id
        row = int(model.readout.rows(torch.tensor(answer_at)))
        return TaughtCanvas(tokens, row, answer, source)

    pairs = []
    for i in range(n):
        forward = canvas(lengths[i % 2], 4 if model.cfg.is_causal else 1 + model.cfg.causal_first, 4)
        reverse = canvas(lengths[i % 2], 5, 2)
        same_source = reverse.tokens.clone()
        same_source[2] = forward.tokens[4]
        pairs.append(TaughtPair(forward, TaughtCanvas(same_source, reverse.row, reverse.answer_token, 2), f"pair {i}"))
    return pairs


@cache
def alignment_of(model):
    """That of the random pairs, computed once for the tests of its parts."""
    return gradient_alignment(model, random_pairs(model))


@cache
def signatures_of(model):
    return reversal_signatures(model, random_pairs(model))


def loss_of(model, canvas):
    # Log scores under uniform noise are read beside the tokens of the canvas.
    logits = HeadAt.of(model, canvas.tokens[None]).clean_logits(model(canvas.tokens[None]))
    return -logits[0, canvas.row].log_softmax(-1)[canvas.answer_token]


def gradients_of(model, canvas, names):
    weights = [dict(model.named_parameters())[name] for name in names]
    # Those of an expert that no position chooses are not in the graph.
    found = torch.autograd.grad(loss_of(model, canvas), weights, allow_unused=True)
    return {
        name: torch.zeros_like(weight) if gradient is None else gradient
        for name, weight, gradient in zip(names, weights, found, strict=True)
    }


def test_gradients_are_those_of_one_fact_at_a_time(summed):
    model, pairs = summed.model, random_pairs(summed.model)
    found = alignment_of(model)
    forward, reverse = (
        [gradients_of(model, getattr(pair, way), found.parameters) for pair in pairs] for way in ("forward", "reverse")
    )
    for column, name in enumerate(found.parameters):
        f, r = (torch.stack([each[name].flatten() for each in way]) for way in (forward, reverse))
        cosines = normalize(f, dim=1) @ normalize(r, dim=1).T
        torch.testing.assert_close(found.cosines[:, column, 0], cosines.diagonal(), rtol=1e-3, atol=2e-5)
        shuffled = (cosines.sum(dim=1) - cosines.diagonal()) / (N - 1)
        torch.testing.assert_close(found.cosines[:, column, 1], shuffled, rtol=1e-3, atol=2e-5)
        transfer = (f * r).sum(dim=1) / f.square().sum(dim=1).clamp(min=1e-30)
        torch.testing.assert_close(found.transfers[:, column], transfer, rtol=1e-3, atol=1e-5)
    of_time = ("modulation", "time_embed")
    weights = {name: weight for name, weight in model.named_parameters() if not any(part in name for part in of_time)}
    matrices = {name for name, weight in weights.items() if weight.dim() == 2}
    assert set(found.parameters) == matrices


def test_the_small_step_is_a_step_of_the_weights(summed):
    model, pairs = summed.model, random_pairs(summed.model)
    found = alignment_of(model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for row, pair in enumerate(pairs[:1]):
        moved = copy.deepcopy(model).double()
        moved.clock.time = model.clock.time
        gradients = gradients_of(moved, pair.forward, found.parameters)
        size = 0.001 * loss_of(moved, pair.forward) / sum(g.square().sum() for g in gradients.values())
        asked = loss_of(moved, pair.reverse)
        with torch.no_grad():
            for name, weight in moved.named_parameters():
                if name in gradients:
                    weight -= size * gradients[name]
        measured = loss_of(moved, pair.reverse) - asked
        assert found.steps[row, 1] == pytest.approx(measured.item(), rel=2e-2, abs=4e-6)
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_some_parameters_only_and_frozen_ones(several):
    model, pairs = several.model, random_pairs(several.model)
    whole, names = alignment_of(model), ["blocks.1.attn.k.weight", "embed.weight"]
    copied = copy.deepcopy(model).requires_grad_(False)
    copied.clock.time = model.clock.time
    some = gradient_alignment(copied, pairs, names)
    assert some.parameters == names
    columns = [whole.parameters.index(name) for name in names]
    torch.testing.assert_close(some.cosines, whole.cosines[:, columns])
    assert not any(weight.requires_grad for weight in copied.parameters())
    assert all(weight.grad is None for weight in copied.parameters())


def test_evidence_is_written_by_values(summed):
    model, pairs = summed.model, random_pairs(summed.model)
    candidates = sorted({pair.reverse.answer_token for pair in pairs})
    found = evidence(model, pairs)
    assert found.shape == (N, 2, model.cfg.n_layers, model.cfg.n_heads, len(candidates))
    shared = model.cfg.n_heads // (model.cfg.n_key_value_heads or model.cfg.n_heads)
    for row, canvas in ((0, pairs[0].forward), (1, pairs[0].reverse)):
        _, cache = model.run_with_cache(canvas.tokens[None])
        for layer in range(model.cfg.n_layers):
            for head in range(model.cfg.n_heads):
                v = cache[f"blocks.{layer}.attn.hook_v"][0, canvas.source, head // shared]
                written = v @ model.W_O[layer, head] * model.time.gates(layer)[0] * model.time.final_weight()
                expected = torch.stack([written @ model.W_U[:, token] for token in candidates])
                torch.testing.assert_close(found[0, row, layer, head], expected, rtol=1e-3, atol=1e-5)


def test_percentiles_count_the_other_candidates_by_own_and_all_sources(several):
    model, pairs = several.model, random_pairs(several.model)
    found = reversal_signatures(model, pairs)
    by_candidate = evidence(model, pairs).sum(dim=3)

    def share(source, canvas, layer, right):
        scores = by_candidate[source, canvas, layer].tolist()
        others = scores[:right] + scores[right + 1 :]
        return sum(score < scores[right] for score in others) / len(others)

    for row, pair in enumerate(pairs):
        right = found.candidates.index(pair.reverse.answer_token)
        for canvas in range(2):
            for layer in range(model.cfg.n_layers):
                assert found.percentiles[row, canvas, 0, layer] == pytest.approx(share(row, canvas, layer, right))
                baseline = sum(share(source, canvas, layer, right) for source in range(N)) / N
                assert found.percentiles[row, canvas, 1, layer] == pytest.approx(baseline, abs=1e-6)
    torch.testing.assert_close(found.evidence_percentile, found.percentiles[:, :, 0].mean(dim=0))
    torch.testing.assert_close(found.shuffled_percentile, found.percentiles[:, :, 1].mean(dim=0))
    # Every candidate is the answer of one pair, so the baseline is chance, whatever the evidence is.
    assert sorted(pair.reverse.answer_token for pair in pairs) == sorted(found.candidates)
    torch.testing.assert_close(found.shuffled_percentile, torch.full_like(found.shuffled_percentile, 0.5))


def test_another_wording_about_a_person_is_no_shuffled_pair():
    model = one_layer("mdm")
    pairs = toy_pairs(model, 6)
    names = ["blocks.0.attn.v.weight", "unembed.weight"]
    once, twice = gradient_alignment(model, pairs, names), gradient_alignment(model, [*pairs, *pairs], names)
    torch.testing.assert_close(twice.cosines[:6], once.cosines)
    assert gradient_alignment(model, pairs[:1] * 2, names).cosines[..., 1].isnan().all()


@pytest.mark.parametrize("summed", ["sdar"], indirect=True)
def test_a_reader_sees_the_sources_of_its_block_and_of_earlier_ones(summed):
    model, block = summed.model, summed.model.cfg.block_size
    tokens = torch.randint(3, 500, (11,), generator=torch.Generator().manual_seed(0))
    canvases = [
        TaughtCanvas(tokens.index_fill(0, torch.tensor([row]), model.cfg.mask_token_id), row, int(tokens[row]), source)
        for row in range(11)
        for source in range(11)
        if row != source
    ]
    pairs = [TaughtPair(canvas, canvas) for canvas in canvases]
    unseen = torch.tensor([canvas.source // block > canvas.row // block for canvas in canvases])
    assert unseen.any()
    for found in (edge_cut(model, pairs)[:, 0], routes(model, pairs)[:, 0]):
        assert torch.equal(found.isnan().flatten(1).all(dim=1), unseen)
        assert torch.equal(found.isnan().flatten(1).any(dim=1), unseen)


def test_values_of_the_first_layer_know_no_position(summed):
    found = signatures_of(summed.model)
    torch.testing.assert_close(found.reuses[:, 0], torch.ones(N), rtol=0, atol=1e-6)
    assert (found.reuses[:, 1:] < 0.9999).all()


def assert_cuts_are_those_of_whole_blocks(model, pairs):
    """A hook that only looks makes cuts run whole blocks, and scores are read from their hook point."""
    cuts, scores = edge_cut(model, pairs), routes(model, pairs)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", lambda looked_at, hook: None)]):
        torch.testing.assert_close(edge_cut(model, pairs), cuts, rtol=1e-3, atol=5e-5, equal_nan=True)
        torch.testing.assert_close(routes(model, pairs), scores, equal_nan=True)
    assert cuts.nan_to_num().abs().max() > 1e-3


def test_a_hook_that_only_looks_changes_no_cut_and_no_route(several):
    assert_cuts_are_those_of_whole_blocks(several.model, random_pairs(several.model, n=2, lengths=(6, 9)))


def test_nor_on_canvases_without_padding(several):
    assert_cuts_are_those_of_whole_blocks(several.model, random_pairs(several.model, n=2))


def test_nor_on_canvases_with_padding_on_the_left(own_pad):
    model, pairs = own_pad, random_pairs(own_pad, n=2, lengths=(6, 9))

    def shifted(canvas):
        padding = torch.full((3,), model.padding.own_id)
        return TaughtCanvas(torch.cat([padding, canvas.tokens]), canvas.row + 3, canvas.answer_token, canvas.source + 3)

    padded = [TaughtPair(shifted(pair.forward), shifted(pair.reverse)) for pair in pairs]
    assert_cuts_are_those_of_whole_blocks(model, padded)
    torch.testing.assert_close(edge_cut(model, padded), edge_cut(model, pairs), rtol=1e-3, atol=5e-5, equal_nan=True)


def test_a_cut_edge_is_a_pattern_without_it(several):
    """Instead of a score of -inf: the entry of the pattern is 0, and the others are scaled up to 1."""
    model, pairs = several.model, random_pairs(several.model)
    by_head, together = edge_cut(model, pairs), signatures_of(model).cuts
    for row, canvas in ((0, pairs[1].forward), (1, pairs[1].reverse)):
        size = model.cfg.block_size
        if size is not None and canvas.source // size > canvas.row // size:
            assert by_head[1, row].isnan().all()
            assert together[1, row].isnan().all()
            continue
        with torch.no_grad():
            whole = loss_of(model, canvas)
        for layer in range(model.cfg.n_layers):
            for heads in ([0], list(range(model.cfg.n_heads))):

                def without(pattern, hook, heads=heads, canvas=canvas):
                    pattern[:, heads, canvas.row, canvas.source] = 0
                    pattern[:, heads, canvas.row] /= pattern[:, heads, canvas.row].sum(-1, keepdim=True)
                    return pattern

                with torch.no_grad(), model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_pattern", without)]):
                    lost = loss_of(model, canvas) - whole
                measured = by_head[1, row, layer, 0] if len(heads) == 1 else together[1, row, layer]
                assert measured == pytest.approx(float(lost), rel=1e-3, abs=2e-5)


def test_routes_are_scores_and_the_counterfactual_moves_positions_only(summed):
    model, pairs = summed.model, random_pairs(summed.model)
    found = routes(model, pairs)
    size = None if model.cfg.counts_from_prompt else model.cfg.block_size
    if size is not None and pairs[0].forward.source // size > pairs[0].forward.row // size:
        assert found.isnan().all()
        signatures = signatures_of(model)
        assert signatures.route_correlation is signatures.isotropic_correlation is None
        assert signatures.counterfactual_correlation is None
        return
    for way, column in (("forward", 0), ("reverse", 1)):
        canvas = getattr(pairs[0], way)
        _, cache = model.run_with_cache(canvas.tokens[None])
        for layer in range(model.cfg.n_layers):
            scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][0, :, canvas.row, canvas.source]
            torch.testing.assert_close(found[0, column, layer], scores)
    signatures = signatures_of(model)
    for layer in range(model.cfg.n_layers):
        over_heads = [torch.corrcoef(found[row, :2, layer])[0, 1] for row in range(N)]
        # A row that does not see its source has no score, and its correlation is NaN.
        torch.testing.assert_close(signatures.route_correlation[layer], torch.stack(over_heads).mean(), equal_nan=True)
    # At its own positions a query and a key have the score they had.
    unmoved = [TaughtPair(pair.forward, pair.forward) for pair in pairs]
    at_home = routes(model, unmoved)
    seen = at_home[:, 0].isfinite()  # all of them, unless finished tokens see earlier ones only
    assert bool(seen.all()) or model.cfg.block_context == "causal"
    torch.testing.assert_close(at_home[:, 2][seen], at_home[:, 0][seen], rtol=1e-4, atol=1e-4)
    # In the first layer queries and keys are those of the tokens, so that moving them is asking in reverse.
    readers = [pair.forward.tokens[pair.forward.row] == pair.reverse.tokens[pair.reverse.row] for pair in pairs]
    same = torch.stack(readers)
    seen = found[same][:, 1, 0].isfinite()
    torch.testing.assert_close(found[same][:, 2, 0][seen], found[same][:, 1, 0][seen], rtol=1e-4, atol=1e-4)
    # Every masked position has one token; under uniform noise readers stand on different ones.
    assert bool(same.any()) == (model.cfg.readout == "in_place" and model.cfg.has_mask)


@pytest.mark.parametrize(("d_head", "offsets", "base"), [(64, (1, -1), 1e4), (16, (2, -6), 5e5), (8, (3, 3), 1e4)])
def test_isotropic_correlation_against_draws(d_head, offsets, base):
    from diffusion_lens.model.positions import Rotary

    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 100_000, 1, 1, d_head, generator=draw).unbind()
    rotary = Rotary(d_head, base, torch.float32)
    at = [rotary.turn(k, torch.tensor([[10 + offset]])) for offset in offsets]
    q = rotary.turn(q, torch.tensor([[10]]))
    scores = torch.stack([(q * each).sum(-1).flatten() for each in at])
    expected = float(torch.corrcoef(scores)[0, 1])
    assert isotropic_route_correlation(d_head, *offsets, base) == pytest.approx(expected, abs=0.01)


def one_layer(kind, **options):
    """The one-layer network of the theory, before training."""
    masked = kind == "mdm"
    shape = dict(
        n_layers=1,
        d_model=64,
        n_heads=4,
        n_key_value_heads=4,
        d_head=16,
        d_mlp=128,
        d_vocab=129 + masked,
        d_vocab_out=129,
        n_ctx=8,
        attention_dir="bidirectional" if masked else "causal",
        readout="in_place" if masked else "shifted",
        mask_token_id=129 if masked else None,
    )
    architecture = Architecture(family="lit_gpt", name=f"fresh-{kind}", **{**shape, **options})
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"))


def toy_pairs(model, n=32, shuffle=0):
    """ "A is B" and "B is A" with one token each; with `shuffle` the reverse question is about another fact."""
    pairs = []
    for i in range(n):
        a, b = 1 + i, 65 + i
        a_asked, b_asked = 1 + (i + shuffle) % n, 65 + (i + shuffle) % n
        if model.cfg.has_mask:
            mask = model.cfg.mask_token_id
            forward = TaughtCanvas(torch.tensor([mask, 0, b]), 0, a, 2)
            reverse = TaughtCanvas(torch.tensor([b_asked, 0, mask]), 2, a_asked, 0)
        else:
            forward = TaughtCanvas(torch.tensor([a, 0, b]), 1, b, 2)
            reverse = TaughtCanvas(torch.tensor([b_asked, 0, a_asked]), 1, a_asked, 0)
        pairs.append(TaughtPair(forward, reverse))
    return pairs


def test_fresh_storage_gradients_are_aligned_in_an_mdm_only():
    for kind in ("mdm", "ar"):
        model = one_layer(kind)
        found = reversal_signatures(model, toy_pairs(model))
        for name in ("blocks.0.attn.v.weight", "blocks.0.attn.o.weight", "unembed.weight"):
            own, shuffled = found.gradient_cosine[name]
            assert own > 0.98 if kind == "mdm" else abs(own) < 0.02
            assert abs(shuffled) < (0.05 if kind == "mdm" else 0.02)
        predicted, measured = reversal_signatures(model.double(), toy_pairs(model)).first_order
        assert measured == pytest.approx(predicted, rel=0.01)


def test_pairs_of_two_facts_are_a_baseline():
    """Asking about another fact is what shuffled pairs do."""
    model = one_layer("mdm")
    found = gradient_alignment(model, toy_pairs(model, shuffle=1), ["blocks.0.attn.v.weight", "unembed.weight"])
    assert found.cosines.mean(dim=0).abs().max() < 0.05


def test_a_source_that_one_reader_does_not_see_has_no_route():
    """On a causal model, a sentence that states B first on one side only."""
    model = one_layer("ar")
    seen = TaughtCanvas(torch.tensor([70, 0, 5]), 1, 5, 0)
    unseen = TaughtCanvas(torch.tensor([5, 0, 70]), 1, 70, 2)
    pairs = [TaughtPair(seen, unseen), TaughtPair(unseen, seen), TaughtPair(seen, seen)]
    assert routes(model, pairs).isnan().flatten(1).all(dim=1).tolist() == [True, True, False]
    assert edge_cut(model, pairs).isnan().flatten(2).all(dim=2).tolist() == [[False, True], [True, False], [False] * 2]


def test_a_large_vocabulary_is_reserved_for():
    model = one_layer("mdm", d_vocab=20_001, d_vocab_out=20_000, mask_token_id=20_000)
    pairs = toy_pairs(model, 8)
    used = peak_of_tensors(lambda: reversal_signatures(model, pairs))
    assert used < 8 * pair_bytes(model.cfg, 3, 8)


@pytest.mark.parametrize("kind", ["standard", "none", "alibi"])
def test_kinds_of_positions_other_than_rotary(kind):
    model = one_layer("mdm", positional_embedding_type=kind)
    pairs = toy_pairs(model, 4)
    found = reversal_signatures(model, pairs)
    forward, reverse, counterfactual = found.routes.unbind(dim=1)
    assert found.isotropic_correlation is None
    if kind == "standard":
        assert found.counterfactual_correlation is None
        assert (found.reuses < 0.9999).all()  # values contain the position
        assert not torch.allclose(forward, reverse)
    else:  # the distance is 2 both ways
        torch.testing.assert_close(forward, reverse)
        torch.testing.assert_close(counterfactual, reverse)
        torch.testing.assert_close(found.reuses, torch.ones(4, 1))
    own = gradients_of(model, pairs[0].forward, ["blocks.0.attn.q.weight"])["blocks.0.attn.q.weight"]
    other = gradients_of(model, pairs[0].reverse, ["blocks.0.attn.q.weight"])["blocks.0.attn.q.weight"]
    cosine = (own * other).sum() / own.norm() / other.norm()
    column = found.parameters.index("blocks.0.attn.q.weight")
    assert found.cosines[0, column, 0] == pytest.approx(cosine.item(), abs=1e-4)
    assert "isotropic" not in found.curves().routes


def test_a_pair_is_the_same_alone_and_beside_longer_ones(several):
    model, pairs = several.model, random_pairs(several.model, lengths=(7, 9))
    candidates = sorted({pair.reverse.answer_token for pair in pairs})
    together = reversal_signatures(model, pairs, candidates=candidates)
    alone = reversal_signatures(model, pairs[:1], candidates=candidates)
    for name in ("percentiles", "reuses", "cuts", "routes", "isotropic", "transfers", "probabilities"):
        one, other = (getattr(each, name)[0] for each in (together, alone))
        if name == "percentiles":
            assert torch.equal(other[:, 1], other[:, 0])  # its source is the only one
            one, other = one[:, 0], other[:, 0]
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(together.cosines[0, :, 0], alone.cosines[0, :, 0], rtol=2e-3, atol=2e-5)
    assert alone.cosines[0, :, 1].isnan().all()
