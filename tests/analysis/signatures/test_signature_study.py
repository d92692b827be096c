"""The study of the three signatures: folders, shards, intervals, refusals, and what it leaves behind."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from jaxtyping import config
from oracles.memory import peak_of_tensors
from refusals import unrefused

from diffusion_lens import HookedDiffusionTransformer, interventions
from diffusion_lens.analysis import (
    ReversalSignatures,
    TaughtCanvas,
    TaughtPair,
    evidence,
    gradient_alignment,
    isotropic_route_correlation,
    reversal_signatures,
)
from diffusion_lens.analysis.signatures.evidence import pair_bytes, plan_batches
from diffusion_lens.data import toy_facts
from diffusion_lens.facts.taught_pairs import LaidOutPairs
from weight_conversion import RotaryScaling

TENSORS = ("percentiles", "reuses", "cuts", "routes", "cosines", "transfers", "steps", "probabilities")


@pytest.fixture
def untyped(monkeypatch):
    """No type is checked, as when users call the library."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture
def pairs(tiny):
    return toy_facts.load().taught_pairs(tiny, "p2d")[:6]


@pytest.fixture
def plain(tiny):
    """The study of the pairs, which no test changes."""
    return study_of(tiny)


@cache
def study_of(model):
    return reversal_signatures(model, toy_facts.load().taught_pairs(model, "p2d")[:6])


def same(one, other):
    return one.ids == other.ids and all(
        torch.equal(getattr(one, name).nan_to_num(), getattr(other, name).nan_to_num()) for name in TENSORS
    )


def test_shards_resume_and_files_give_the_same_bits(tiny, pairs, tmp_path):
    whole = reversal_signatures(tiny, pairs, batch_size=2)
    reversal_signatures(tiny, pairs, batch_size=2, out=tmp_path / "parts", shard="1/2")
    assert len(ReversalSignatures.load(tmp_path / "parts").ids) == 2
    reversal_signatures(tiny, pairs, batch_size=2, out=tmp_path / "parts", shard="0/2")
    assert same(whole, ReversalSignatures.merge(tmp_path / "parts"))
    next((tmp_path / "parts").glob("*.safetensors")).unlink()
    assert same(whole, reversal_signatures(tiny, pairs, batch_size=2, out=tmp_path / "parts"))
    assert same(whole, ReversalSignatures.load(whole.save(tmp_path / "whole.safetensors")))
    with pytest.raises(ValueError, match="batch_size: 2 there, 3 here"):
        reversal_signatures(tiny, pairs, batch_size=3, out=tmp_path / "parts")


def test_the_isotropic_correlation_is_of_the_models_own_frequencies(tiny, pairs):

    scaling = RotaryScaling(8.0, 1.0, 4.0, original_max_position_embeddings=32)
    width = tiny.cfg.d_head
    basis = torch.eye(width)[None, :, None]  # the mean over a basis is that over all directions
    found = {}
    for scaled in (None, scaling):
        cfg = replace(tiny.cfg, rotary_scaling=scaled, rotary_dtype=torch.float32)
        model = HookedDiffusionTransformer(cfg, tensors=tiny.state_dict().items())
        found[scaled] = reversal_signatures(model, pairs[:2]).isotropic
        for pair, correlation in zip(pairs[:2], found[scaled], strict=True):
            between = pair.forward.source - pair.forward.row - (pair.reverse.source - pair.reverse.row)
            turned = model.positions.turn(basis, torch.full((1, width), abs(between)))
            assert correlation == pytest.approx(float((turned * basis).sum(-1).mean()), abs=1e-6)
    assert (found[scaling] - found[None]).min() > 0.05  # lower frequencies turn less


def test_the_means_have_intervals_with_their_axes(tiny, plain):
    found = plain
    means = {
        "evidence_percentile": found.evidence_percentile,
        "evidence_reuse": found.evidence_reuse,
        "edge_cut": found.edge_cut,
        "gradient_cosine": torch.tensor([*found.gradient_cosine.values()]),
        "transfer": torch.tensor([*found.transfer.values()]),
        "first_order": torch.tensor(found.first_order),
        "probability": found.probability,
    }
    if found.route_correlation is not None:
        means |= {"route_correlation": found.route_correlation}
        means |= {"counterfactual_correlation": found.counterfactual_correlation}
    for name, mean in means.items():
        low, high = found.interval(name)
        assert low.shape == high.shape == mean.shape
        known = ~mean.isnan()
        assert (low[known] <= mean[known] + 1e-6).all(), name
        assert (mean[known] <= high[known] + 1e-6).all(), name
        assert low[~known].isnan().all()
    assert repr(found) == f"ReversalSignatures({tiny.cfg.model_name}, 6 facts, 4 layers)"


def test_what_the_bundled_models_show():
    """The numbers that a first version, written without this library, gave for the 20 people told name first."""
    from diffusion_lens import HookedDiffusionTransformer

    facts = toy_facts.load()
    found = {}
    for kind in ("tiny-mdm", "tiny-ar"):
        model = HookedDiffusionTransformer.from_pretrained(kind, device="cpu")
        surnames = sorted({model.encode(person.name)[-1] for person in facts.people})
        found[kind] = reversal_signatures(model, facts.taught_pairs(model, template=("", " is")), candidates=surnames)
    mdm, ar = found["tiny-mdm"], found["tiny-ar"]
    rounded = {"atol": 0.0051, "rtol": 0}
    torch.testing.assert_close(mdm.evidence_percentile[1], torch.tensor([0.95, 0.26, 0.81, 0.17]), **rounded)
    torch.testing.assert_close(ar.evidence_percentile[1], torch.tensor([0.42, 0.45, 0.56, 0.46]), **rounded)
    torch.testing.assert_close(mdm.evidence_reuse, torch.tensor([1.0, 1.0, 1.0, 0.88]), **rounded)
    expected = {
        "blocks.0.attn.v.weight": ((0.60, 0.01), 0.04),
        "blocks.0.attn.o.weight": ((0.72, 0.04), 0.03),
        "blocks.3.mlp.down.weight": ((0.84, 0.13), 0.00),
        "unembed.weight": ((0.92, 0.00), 0.00),
    }
    for parameter, (of_mdm, of_ar) in expected.items():
        assert mdm.gradient_cosine[parameter] == pytest.approx(of_mdm, abs=0.0051)
        assert ar.gradient_cosine[parameter][0] == pytest.approx(of_ar, abs=0.0051)
    assert mdm.first_order == pytest.approx((-9.24e-5, -9.23e-5), abs=5e-7)
    steps = mdm.steps.double().T
    assert float(torch.corrcoef(steps)[0, 1]) > 0.999
    assert mdm.isotropic_correlation == pytest.approx(0.6176, abs=1e-4)  # offsets 6 and -5, d_head 32, base 10000
    assert len(mdm.plot(ar)) == 8


def test_pairs_of_one_person_are_resampled_together(tiny, pairs):
    """Each person three times over says no more than once."""
    names = [f"person {i}" for i in range(len(pairs))]
    once = [replace(pair, group=name) for pair, name in zip(pairs, names, strict=True)]
    thrice = [replace(pair, id=f"{pair.id} {i}") for pair in once for i in range(3)]
    one, three = reversal_signatures(tiny, once), reversal_signatures(tiny, thrice)
    for name in ("edge_cut", "probability"):
        for ours, theirs in zip(one.interval(name), three.interval(name), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, equal_nan=True)
    narrow, wide = (torch.stack(one.interval("probability", level)).diff(dim=0) for level in (0.5, 0.99))
    assert (narrow < wide).all()
    assert not torch.equal(one.interval("edge_cut", seed=1)[1], one.interval("edge_cut", seed=2)[1])


def test_curves_are_the_means_and_their_intervals(tiny, pairs, plain):
    found = plain
    curves = found.curves(level=0.9)
    for i, way in enumerate(("forward", "reverse")):
        for name, drawn in (
            ("edge_cut", curves.cuts[way]),
            ("evidence_percentile", curves.evidence[f"percentile, {way}"]),
        ):
            torch.testing.assert_close(drawn.mean, getattr(found, name)[i], equal_nan=True)
            low, high = found.interval(name, 0.9)
            torch.testing.assert_close(
                torch.stack([drawn.low, drawn.high]), torch.stack([low[i], high[i]]), equal_nan=True
            )
    for label in ("attn.v", "attn.o", "mlp.down", "attn.q", "attn.k"):
        own = [found.gradient_cosine[f"blocks.{layer}.{label}.weight"][0] for layer in range(4)]
        torch.testing.assert_close(curves.gradients[label].mean, torch.tensor(own))
    assert curves.embeddings["unembed.weight"] == found.gradient_cosine["unembed.weight"][0]
    if found.route_correlation is None:
        assert curves.routes == {}
    else:
        torch.testing.assert_close(curves.routes["measured"].mean, found.route_correlation)
        assert float(curves.routes["isotropic"].mean[0]) == pytest.approx(found.isotropic_correlation)
    axes = found.plot()
    drawn = {line.get_label(): torch.tensor(line.get_ydata()).float() for line in axes[1].get_lines()}
    torch.testing.assert_close(drawn["reverse"], found.edge_cut[1])
    other = reversal_signatures(tiny, pairs[:3])
    with pytest.raises(ValueError, match="has other facts than"):
        found.plot(other)


@pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-block", "tiny-uniform"], indirect=True)
def test_the_isotropic_prediction_is_a_mean_over_offsets(tiny):
    pair = toy_facts.load().taught_pairs(tiny)[0]
    nearer = TaughtCanvas(pair.reverse.tokens, pair.reverse.row, pair.reverse.answer_token, pair.reverse.source + 1)
    found = reversal_signatures(
        tiny, [pair, TaughtPair(pair.forward, nearer, "nearer")], candidates=[5, 6, pair.reverse.answer_token]
    )
    size = tiny.cfg.block_size
    if size is not None:  # the source is in a later block than the reader of one of the canvases, which does not see it
        assert any(canvas.source // size > canvas.row // size for canvas in (pair.forward, pair.reverse))
        assert found.isotropic_correlation is None
        return
    expected = [
        isotropic_route_correlation(32, pair.forward.source - pair.forward.row, each.source - each.row, 1e4)
        for each in (pair.reverse, nearer)
    ]
    assert found.isotropic_correlation == pytest.approx(sum(expected) / 2, abs=1e-6)


def test_padding_in_the_tokens_of_a_canvas_is_padding(own_pad):
    if not own_pad.cfg.has_mask:
        return
    real = torch.tensor([5, own_pad.cfg.mask_token_id, 7, 8, 9])
    row = int(own_pad.readout.rows(torch.tensor(1)))
    alone = [TaughtPair(TaughtCanvas(real, row, 11 + i, 3), TaughtCanvas(real, row, 11 + i, 4)) for i in range(2)]
    padded = torch.cat([real, torch.full((3,), own_pad.padding.own_id)])
    longer = [TaughtPair(replace(pair.forward, tokens=padded), replace(pair.reverse, tokens=padded)) for pair in alone]
    one, other = reversal_signatures(own_pad, alone), reversal_signatures(own_pad, longer)
    torch.testing.assert_close(one.probabilities, other.probabilities)
    torch.testing.assert_close(one.cuts, other.cuts, rtol=1e-3, atol=1e-5)


def test_hooks_of_the_caller_act_and_no_mode_is_changed(tiny, pairs, plain):
    with tiny.hooks(fwd_hooks=[("blocks.0.attn.hook_v", interventions.zero_ablate())]), torch.no_grad():
        ablated = reversal_signatures(tiny, pairs)
        assert not torch.is_grad_enabled()
    assert (ablated.percentiles[..., 0] == 0.5).all()  # every candidate ties
    assert (ablated.cuts[:, 1, 0].abs() < 1e-5).all()
    assert (plain.cuts[:, 1, 0].abs() > 1e-5).all()
    assert ablated.record["hooks"] != plain.record["hooks"]


def test_a_pair_of_the_other_model_is_refused():
    """Its canvas masks nothing."""
    from diffusion_lens import HookedDiffusionTransformer

    mdm, ar = (HookedDiffusionTransformer.from_pretrained(name, device="cpu") for name in ("tiny-mdm", "tiny-ar"))
    with pytest.raises(ValueError, match=r"has no \[MASK\] where row 6 reads"):
        reversal_signatures(mdm, toy_facts.load().taught_pairs(ar))


def test_inference_mode_changes_nothing(tiny, pairs, plain):
    with torch.inference_mode():
        assert same(plain, reversal_signatures(tiny, pairs))


def test_flags_of_optional_hooks_change_nothing(tiny, pairs, plain):
    flagged = copy.deepcopy(tiny)
    flagged.set_use_attn_result(True)
    flagged.set_use_split_qkv_input(True)
    assert same(plain, reversal_signatures(flagged, pairs))
    assert flagged.cfg.use_attn_result
    assert flagged.cfg.use_split_qkv_input


def test_nothing_is_left_after_an_error(tiny, pairs):
    def fail(activation, hook):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), tiny.hooks(fwd_hooks=[("blocks.3.hook_mlp_out", fail)]):
        gradient_alignment(tiny, pairs)
    assert not any(module._forward_hooks for module in tiny.modules())
    assert all(weight.grad is None for weight in tiny.parameters())


def test_a_step_that_rounding_would_hide_is_not_measured(tiny, pairs):
    half = copy.deepcopy(tiny).to("bfloat16")
    found = gradient_alignment(half, pairs)
    assert found.steps[:, 1].isnan().all()
    own = gradient_alignment(tiny, pairs).cosines[..., 0].mean(dim=0)
    assert (found.cosines[..., 0].mean(dim=0) - own).abs().mean() < 0.05


def test_refusals(tiny, pairs, plain, untyped):
    answer = pairs[0].reverse.answer_token
    twice = [pairs[0], TaughtPair(pairs[1].forward, pairs[1].reverse, pairs[0].id)]
    cases = [
        ({"pairs": []}, "no pairs were given"),
        ({"pairs": twice}, "two pairs are called"),
        ({"pairs": pairs[:1]}, "at least two candidates"),
        ({"pairs": pairs, "candidates": [answer]}, "do not contain the answer"),
        ({"pairs": pairs, "candidates": [answer, answer]}, "twice"),
        ({"pairs": pairs, "candidates": [answer, 10**6]}, "candidates contain 1000000; the model writes tokens 0 to"),
        ({"pairs": pairs, "batch_size": 0}, "batch_size=0; it must be at least 1"),
        ({"pairs": pairs, "batch_size": 1}, "batch_size=1: pairs computed together are each other's baseline"),
        (
            {"pairs": [replace(pairs[0], reverse=replace(pairs[0].reverse, answer_token=10**6))]},
            "has the answer 1000000",
        ),
        (
            {"pairs": [replace(pairs[0], reverse=replace(pairs[0].reverse, tokens=torch.zeros(14)))]},
            "tokens of torch.float",
        ),
        ({"pairs": pairs, "max_bytes": 1000}, "max_bytes=1,000 is too small: 2 pairs take"),
        ({"pairs": pairs, "shard": "3/2"}, "is not a shard"),
    ]
    assert unrefused(lambda **options: reversal_signatures(tiny, **options), cases) == []
    names = [
        ({"parameters": []}, "parameters is empty"),
        ({"parameters": ["ln_final.weight"]}, "is no weight matrix of"),
        ({"parameters": ["embed.weight", "embed.weight"]}, "contain a name twice"),
    ]
    assert unrefused(lambda **options: gradient_alignment(tiny, pairs, **options), names) == []
    with pytest.raises(ValueError, match="it must be one of evidence_percentile"):
        plain.interval("evidence")
    with pytest.raises(ValueError, match="there is nothing to average"):
        ReversalSignatures.of({}, plain.record).interval("edge_cut")
    with pytest.raises(TypeError, match="the nearest is 'candidates'"):
        reversal_signatures(tiny, pairs, candidate=[1])


def test_gradients_of_other_modules_are_refused(tiny, pairs):
    changed = copy.deepcopy(tiny)
    changed.blocks[1].mlp.up = torch.nn.Sequential(changed.blocks[1].mlp.up)
    with pytest.raises(ValueError, match=r"'blocks.1.mlp.up' is a module Sequential"):
        reversal_signatures(changed, pairs)
    changed.blocks[1].attn.o = torch.nn.Sequential(changed.blocks[1].attn.o)
    with pytest.raises(ValueError, match=r"'blocks.1.attn.o' is a module Sequential"):
        evidence(changed, pairs)
    hooked = copy.deepcopy(tiny)
    hooked.blocks[1].mlp.register_forward_hook(lambda module, given, output: None)
    with pytest.raises(ValueError, match="a hook of torch is attached"):
        reversal_signatures(hooked, pairs)


def test_batches_are_even_and_fit_the_budget(tiny):
    pairs = toy_facts.load().taught_pairs(tiny, "p2d")
    n_pos = len(pairs[0].forward.tokens)
    found = reversal_signatures(tiny, pairs, max_bytes=6 * pair_bytes(tiny.cfg, n_pos, 6))
    assert found.record["batch_size"] == 5  # 20 pairs in batches of at most 6
    assert not found.cosines.isnan().any()
    for n_pairs in range(2, 40):
        sizes = [len(batch) for batch in plan_batches(tiny.cfg, n_pos, n_pairs, 2, 2**30)]
        assert sum(sizes) == n_pairs
        assert set(sizes) <= {2, 3}
        assert n_pairs % 2 or set(sizes) == {2}


def test_a_batch_takes_what_is_reserved_for_it(tiny):
    pairs = toy_facts.load().taught_pairs(tiny, "p2d")
    reserved = 20 * pair_bytes(tiny.cfg, len(pairs[0].forward.tokens), 20)
    used = peak_of_tensors(lambda: reversal_signatures(tiny, pairs, max_bytes=reserved))
    # A batch takes 0.55 of the bytes reserved; the type checks of these tests change when arguments are freed.
    assert 0.4 * reserved < used < 1.2 * reserved


def test_a_canvas_of_one_token(tiny):
    """A reader that sees nothing but the source has no other position to attend to."""
    mask = tiny.cfg.mask_token_id
    if mask is None:
        return
    canvas = TaughtCanvas(torch.tensor([mask]), 0, 5, 0)
    other = TaughtCanvas(torch.tensor([mask]), 0, 6, 0)
    found = reversal_signatures(tiny, [TaughtPair(canvas, canvas), TaughtPair(other, other)])
    assert found.cuts.isnan().all()
    # The one weight of the pattern is 1 whatever the scores are: gradients of queries and keys are zero, or rounding.
    of_scores = [name.endswith((".attn.q.weight", ".attn.k.weight")) for name in found.parameters]
    cosines = found.cosines[:, ~torch.tensor(of_scores), 0]
    assert any(of_scores)
    torch.testing.assert_close(cosines, torch.ones_like(cosines))


def test_a_pair_costs_two_passes_more_than_there_are_layers(tiny, pairs, token_layers):
    positions = len(pairs[0].forward.tokens)
    with token_layers() as counted:
        reversal_signatures(tiny, pairs)
    assert counted[0] == ((tiny.cfg.n_layers + 2) * positions + 2) * len(pairs) * tiny.cfg.n_layers
    with token_layers() as counted:
        gradient_alignment(tiny, pairs)  # two passes with a backward pass, and the small step
    assert counted[0] == 3 * len(pairs) * positions * tiny.cfg.n_layers


def test_pairs_that_were_set_aside_are_on_record(tiny, pairs, plain, tmp_path):
    laid_out = LaidOutPairs(pairs, {"Ada": "A is too long"})
    found = reversal_signatures(tiny, laid_out, out=tmp_path)
    assert found.set_aside == ReversalSignatures.load(tmp_path).set_aside == {"Ada": "A is too long"}
    assert same(found, plain)
    with pytest.raises(ValueError, match="set_aside"):
        reversal_signatures(tiny, pairs, out=tmp_path)
