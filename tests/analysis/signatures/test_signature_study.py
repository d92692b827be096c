"""The study of the three signatures: folders, shards, intervals, refusals, and what it leaves behind."""

import copy
from dataclasses import replace

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
    gradient_alignment,
    reversal_signatures,
)
from diffusion_lens.analysis.signatures import signature_passes
from diffusion_lens.analysis.signatures.batches import pair_bytes, plan_batches
from diffusion_lens.data import toy_facts
from diffusion_lens.taught_pairs import LaidOutPairs
from weight_conversion import RotaryScaling

TENSORS = ("percentiles", "reuses", "cuts", "routes", "cosines", "transfers", "steps", "probabilities")


@pytest.fixture
def untyped(monkeypatch):
    """No type is checked, as when users call the library."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture
def pairs(tiny):
    return toy_facts.load().taught_pairs(tiny, "p2d")[:6]


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
    from diffusion_lens.model.rotary import rotate

    scaling = RotaryScaling(8.0, 1.0, 4.0, original_max_position_embeddings=32)
    width = tiny.cfg.d_head
    basis = torch.eye(width)[None, :, None]  # the mean over a basis is that over all directions
    found = {}
    for scaled in (None, scaling):
        cfg = replace(tiny.cfg, rotary_scaling=scaled, rotary_dtype=torch.float32)
        model = HookedDiffusionTransformer(cfg, tensors=tiny.state_dict().items())
        found[scaled] = reversal_signatures(model, pairs).isotropic
        for pair, correlation in zip(pairs, found[scaled], strict=True):
            between = pair.forward.source - pair.forward.row - (pair.reverse.source - pair.reverse.row)
            tables = model.positions.tables(abs(between) + 1, torch.device("cpu"), torch.full((1, width), abs(between)))
            assert correlation == pytest.approx(float((rotate(basis, tables) * basis).sum(-1).mean()), abs=1e-6)
    assert (found[scaling] - found[None]).min() > 0.05  # lower frequencies turn less


def test_the_means_have_intervals_with_their_axes(tiny, pairs):
    found = reversal_signatures(tiny, pairs)
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


def test_hooks_of_the_caller_act_and_no_mode_is_changed(tiny, pairs):
    plain = reversal_signatures(tiny, pairs)
    with tiny.hooks(fwd_hooks=[("blocks.0.attn.hook_v", interventions.zero_ablate())]), torch.no_grad():
        ablated = reversal_signatures(tiny, pairs)
        assert not torch.is_grad_enabled()
    assert (ablated.percentiles[:, :, 0] == 0.5).all()  # every candidate ties
    assert (ablated.cuts[:, 1, 0].abs() < 1e-5).all()
    assert (plain.cuts[:, 1, 0].abs() > 1e-5).all()
    assert ablated.record["hooks"] != plain.record["hooks"]


def test_flags_of_optional_hooks_change_nothing(tiny, pairs):
    plain = reversal_signatures(tiny, pairs)
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


def test_refusals(tiny, pairs, untyped):
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
        ({"pairs": pairs, "max_bytes": 1000}, "max_bytes=1,000 is too small: 2 pairs take"),
        ({"pairs": pairs, "shard": "3/2"}, "is not a shard"),
    ]
    assert unrefused(lambda **options: reversal_signatures(tiny, **options), cases) == []
    names = [
        ({"parameters": []}, "parameters is empty"),
        ({"parameters": ["ln_final.weight"]}, "is no weight matrix of"),
    ]
    assert unrefused(lambda **options: gradient_alignment(tiny, pairs, **options), names) == []
    with pytest.raises(ValueError, match="it must be one of evidence_percentile"):
        reversal_signatures(tiny, pairs).interval("evidence")
    with pytest.raises(TypeError, match="the nearest is 'candidates'"):
        reversal_signatures(tiny, pairs, candidate=[1])


def test_gradients_of_other_modules_are_refused(tiny, pairs):
    changed = copy.deepcopy(tiny)
    changed.blocks[1].mlp.up = torch.nn.Sequential(changed.blocks[1].mlp.up)
    with pytest.raises(ValueError, match=r"'blocks.1.mlp.up' is a module Sequential"):
        reversal_signatures(changed, pairs)
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
    # The type checks of these tests keep arguments alive; without them 0.92 of the bytes reserved are used.
    assert 0.5 * reserved < used < 1.2 * reserved


def test_a_canvas_of_one_token(tiny):
    """A reader that sees nothing but the source has no other position to attend to."""
    mask = tiny.cfg.mask_token_id
    if mask is None:
        return
    canvas = TaughtCanvas(torch.tensor([mask]), 0, 5, 0)
    other = TaughtCanvas(torch.tensor([mask]), 0, 6, 0)
    found = reversal_signatures(tiny, [TaughtPair(canvas, canvas), TaughtPair(other, other)])
    assert found.cuts.isnan().all()
    torch.testing.assert_close(found.cosines[:, :, 0], torch.ones_like(found.cosines[:, :, 0]))


def test_a_pair_costs_what_the_plan_says(tiny, pairs, token_layers):
    forward, backward = signature_passes(tiny.cfg.n_layers)
    positions = len(pairs[0].forward.tokens)
    with token_layers() as counted:
        reversal_signatures(tiny, pairs)
    assert counted[0] == forward * len(pairs) * positions * tiny.cfg.n_layers
    with token_layers() as counted:
        gradient_alignment(tiny, pairs)  # those with a backward pass, and the small step
    assert counted[0] == (backward + 1) * len(pairs) * positions * tiny.cfg.n_layers


def test_pairs_that_were_set_aside_are_on_record(tiny, pairs, tmp_path):
    laid_out = LaidOutPairs(pairs, {"Ada": "A is too long"})
    found = reversal_signatures(tiny, laid_out, out=tmp_path)
    assert found.set_aside == ReversalSignatures.load(tmp_path).set_aside == {"Ada": "A is too long"}
    assert same(found, reversal_signatures(tiny, pairs))
    with pytest.raises(ValueError, match="set_aside"):
        reversal_signatures(tiny, pairs, out=tmp_path)
