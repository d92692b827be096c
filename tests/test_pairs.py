"""Pairs: which two models are compared with each other, and why."""

import gc
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer, load_pair
from diffusion_lens.loading import shape_of
from diffusion_lens.loading.catalogue import BUNDLED, PUBLISHED
from diffusion_lens.loading.pairs import PAIRS

ONE_CHECKPOINT = Path(__file__).parent / "golden" / "nemotron"
# Same size, same data, same compute where there is such a model.
TWINS = {
    "smdm-19m": "ar-19m",
    "smdm-170m": "ar-170m",
    "smdm-170m-rsl-0.01": "ar-170m",
    "smdm-717m": "ar-717m",
    "smdm-831m": "ar-831m",
    "smdm-944m": "ar-944m",
    "smdm-1028m": "ar-1028m",
    "smdm-1028m-60e18": "ar-1028m-60e18",
    "smdm-1028m-100e18": "ar-1028m",
    "smdm-1028m-rsl-0.01": "ar-1028m",
    "smdm-1028m-sharegpt": "ar-1028m-sharegpt",
    "smdm-1476m": "ar-1476m",
}


def test_the_bundled_models_are_a_pair():
    mdm, ar = load_pair("Tiny-MDM", device="cpu", dtype=torch.bfloat16)
    assert (mdm.cfg.model_name, ar.cfg.model_name) == ("tiny-mdm", "tiny-ar")
    assert (mdm.cfg.attention_dir, ar.cfg.attention_dir) == ("bidirectional", "causal")
    assert {weight.dtype for model in (mdm, ar) for weight in model.parameters()} == {torch.bfloat16}
    for model in (mdm, ar):
        plain = HookedDiffusionTransformer.from_pretrained(model.cfg.model_name, device="cpu", dtype=torch.bfloat16)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_both_models_are_loaded_with_the_same_settings(monkeypatch, tmp_path):
    calls = []

    def stand_in(name, **settings):
        calls.append((name, settings))
        return HookedDiffusionTransformer.__new__(HookedDiffusionTransformer)

    monkeypatch.setattr(HookedDiffusionTransformer, "from_pretrained", stand_in)
    given = dict(device="cpu", dtype=torch.float16, cache_dir=tmp_path, token="hf_x", local_files_only=True)
    load_pair("dream-7b-base", **given)
    assert calls == [("dream-7b-base", given), ("qwen2.5-7b", given)]


def test_the_baselines_of_smdm():
    assert {name: pair.causal for name, pair in PAIRS.items() if name.startswith("smdm-")} == TWINS
    for name, twin in TWINS.items():
        ours, theirs = shape_of(name), shape_of(twin)
        assert (ours.n_layers, ours.d_model, ours.d_mlp) == (theirs.n_layers, theirs.d_model, theirs.d_mlp)
        # The pair states what differs beside the direction of attention.
        flops = [PUBLISHED[model].stem.split("M-")[1].split("e18")[0] for model in (name, twin)]
        assert (f"against the baseline's {flops[1]}e18" in PAIRS[name].shared) == (flops[0] != flops[1])


def test_every_pair_names_models_that_load_and_states_its_reason():
    for name, pair in PAIRS.items():
        assert name == pair.diffusion
        assert {pair.diffusion, pair.causal} <= {*PUBLISHED, *BUNDLED}
        if pair.diffusion != pair.causal:
            assert (shape_of(name).attention_dir, shape_of(pair.causal).attention_dir) == ("bidirectional", "causal")
        assert pair.shared
        assert pair.source


@pytest.mark.parametrize("name", [name for name, pair in PAIRS.items() if "initial" in pair.shared])
def test_models_initialised_with_the_same_weights_have_the_same_shapes(name):
    left, right = shape_of(name), shape_of(PAIRS[name].causal)
    for fact in ("n_layers", "d_model", "n_heads", "n_key_value_heads", "d_head", "d_mlp", "d_vocab", "rotary_base"):
        assert getattr(left, fact) == getattr(right, fact), fact
    assert (left.qkv_bias, left.qk_norm, left.tied) == (right.qkv_bias, right.qk_norm, right.tied)


def test_lladas_pair_does_not_claim_common_weights():
    assert PAIRS["llada-8b-base"].causal == "llama-3-8b"
    assert "size only" in PAIRS["llada-8b-base"].shared


@pytest.mark.parametrize("mode", ["bidirectional", "block"])
def test_one_checkpoint_in_two_modes_shares_every_weight(mode):
    diffusion, causal = load_pair(ONE_CHECKPOINT, mode=mode, device="cpu")
    assert (diffusion.cfg.has_mask, diffusion.cfg.readout) == (True, "in_place")
    assert (causal.cfg.attention_dir, causal.cfg.readout, causal.cfg.mask_token_id) == ("causal", "shifted", None)
    assert [id(weight) for weight in diffusion.parameters()] == [id(weight) for weight in causal.parameters()]
    alone = HookedDiffusionTransformer.from_pretrained(ONE_CHECKPOINT, mode="ar", device="cpu")
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(causal(tokens), alone(tokens))
    tokens[:, 8:] = diffusion.cfg.mask_token_id
    assert not torch.allclose(diffusion(tokens), causal(tokens), atol=1e-2)


def test_a_move_of_one_mode_moves_the_other_and_folding_is_refused():
    diffusion, causal = load_pair(ONE_CHECKPOINT, device="cpu")
    tokens = torch.arange(24).reshape(2, 12)
    causal.to("bfloat16")
    assert diffusion.cfg.dtype is diffusion.W_E.dtype is torch.bfloat16
    assert diffusion(tokens).isfinite().all()
    causal.to("float32")
    with pytest.raises(ValueError, match="folding the norms rewrites weights that are also those of another model"):
        causal.enable_compatibility_mode()
    before = diffusion(tokens)
    own = deepcopy(causal)
    own.enable_compatibility_mode()
    assert torch.equal(diffusion(tokens), before)
    del diffusion
    gc.collect()
    causal.enable_compatibility_mode()


def test_a_state_of_one_mode_is_patched_into_the_other():
    """The last position of a causal model sees every position, and so does that of a bidirectional one."""
    diffusion, causal = load_pair(ONE_CHECKPOINT, device="cpu")
    tokens = torch.arange(24).reshape(2, 12)
    last = f"blocks.{causal.cfg.n_layers - 1}.hook_resid_post"
    logits, cache = causal.run_with_cache(tokens, names_filter=last)
    patched = diffusion.run_with_hooks(tokens, fwd_hooks=[(last, lambda resid, hook: cache[last])])
    assert torch.equal(patched, logits)
    first = "blocks.0.attn.hook_v"
    seen = [model.run_with_cache(tokens, names_filter=first)[1][first] for model in (diffusion, causal)]
    assert torch.equal(*seen)


def test_a_checkpoint_with_one_mode_is_no_pair():
    with pytest.raises(ValueError, match=r"has one mode only, .* 'lit_gpt', .* Load both models by from_pretrained"):
        load_pair(BUNDLED["tiny-mdm"].path, device="cpu")


def test_the_block_size_of_a_pair_is_that_of_its_diffusion_model():
    diffusion, causal = load_pair(ONE_CHECKPOINT, mode="block", block_size=8, device="cpu")
    assert (diffusion.cfg.block_size, causal.cfg.block_size) == (8, 1)
    with pytest.raises(ValueError, match=r"block_size=8 is not used: .* bidirectional .* pass mode='block'"):
        load_pair(ONE_CHECKPOINT, block_size=8, device="cpu")


@pytest.mark.usefixtures("annotations_unchecked")
def test_the_mode_of_a_pair_is_one_of_diffusion():
    with pytest.raises(ValueError, match="load_pair: mode='ar'; it must be 'bidirectional' or 'block'"):
        load_pair(ONE_CHECKPOINT, mode="ar", device="cpu")
    for given, words in (({"mode": "block"}, "mode='block'"), ({"block_size": 4}, "block_size=4")):
        with pytest.raises(ValueError, match=f"{words} does not apply to a pair of two checkpoints, 'tiny-mdm'"):
            load_pair("tiny-mdm", **given, device="cpu")


@pytest.mark.parametrize("name", ["smdm-336m", "smdm-1028m-reverse", "dream-coder-7b-instruct"])
def test_a_model_without_a_baseline_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' has no published AR baseline") as caught:
        load_pair(name)
    for other in ("smdm-19m", "smdm-1476m", "dream-7b-base"):
        assert other in str(caught.value)
    assert "smdm-336m," not in str(caught.value)


def test_the_name_is_the_diffusion_models():
    with pytest.raises(ValueError, match=r"'tiny-ar' is causal; load_pair takes the diffusion model: tiny-mdm$"):
        load_pair("tiny-ar")
    with pytest.raises(ValueError, match=r"smdm-1028m, smdm-1028m-100e18, smdm-1028m-rsl-0\.01$"):
        load_pair("ar-1028m")


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(ValueError, match="'smdm-1028' is not the name of a pair; nearest are smdm-1028m"):
        load_pair("smdm-1028")
