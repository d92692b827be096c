"""Mixtures of experts give the numbers of the authors' code: activations, choices and trajectories."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.denoising.samplers import llada
from weight_conversion import export, n_params, open_checkpoint
from weight_conversion.key_map import KeyMap
from weight_conversion.registry import FAMILIES

GOLDEN = Path(__file__).parents[1] / "golden" / "llada_moe"
SEEDS = {"hub": 11008, "options": 11343}
MASK = 133
CLOSE = dict(rtol=1e-5, atol=3e-5)


def drawn_weights(folder, seed):
    """The weights of the authors' model, by the rule of the golden data's README.md."""
    config = {**json.loads((folder / "config.json").read_text()), "mask_token_id": MASK}
    family = FAMILIES["llada_moe"]
    shapes = KeyMap(family.rules, family.read_architecture(config, {})).their_shapes
    scales = {"embed_tokens": 0.3, "expert_bias": 0.1}
    gains = {"lm_head": 1.3, "mlp.gate.": 1.2, "mlp.experts": 1.4, "q_proj": 1.1, "k_proj": 1.1, "": 0.9}
    torch.manual_seed(seed)
    tensors = {}
    for name in sorted(shapes):
        if name.endswith("norm.weight"):
            tensors[name] = torch.rand(shapes[name]) + 0.5
            continue
        fixed = [scale for part, scale in scales.items() if part in name]
        gain = next(gain for part, gain in gains.items() if part in name)
        tensors[name] = torch.randn(shapes[name]) * (fixed or [gain / shapes[name][-1] ** 0.5])[0]
    tensors["lm_head.weight"][MASK] *= 0.1
    return tensors


@pytest.fixture(scope="module", params=SEEDS)
def checkpoint(request, tmp_path_factory):
    """A folder as the authors' code writes it, and its golden numbers."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copy(GOLDEN / request.param / "config.json", folder)
    save_file(drawn_weights(GOLDEN / request.param, SEEDS[request.param]), folder / "model.safetensors")
    return folder, load_file(GOLDEN / request.param / "golden.safetensors")


@pytest.fixture(scope="module")
def loaded(checkpoint):
    folder, golden = checkpoint
    return HookedDiffusionTransformer.from_pretrained(folder, mask_token_id=MASK, device="cpu"), golden


def test_activations(loaded):
    model, golden = loaded
    logits, cache = model.run_with_cache(golden["tokens"])
    names = {
        "resid_pre": "hook_resid_pre",
        "attn_out": "hook_attn_out",
        "mlp_out": "hook_mlp_out",
        "shared_expert_out": "hook_shared_out",
        "resid_post": "hook_resid_post",
        "router_logits": "mlp.hook_router_logits",
        "expert_out": "mlp.hook_expert_out",
    }
    compared = 0
    for key, expected in golden.items():
        what, _, layer = key.rpartition(".")
        if what in names:
            torch.testing.assert_close(cache[f"blocks.{layer}.{names[what]}"], expected, **CLOSE)
            compared += 1
        if what == "router_choice":
            choice = cache[f"blocks.{layer}.mlp.hook_experts"]
            assert torch.equal(choice, expected.long())
            weights = cache[f"blocks.{layer}.mlp.hook_router_weights"]
            torch.testing.assert_close(weights.gather(-1, choice), golden[f"router_weights.{layer}"], **CLOSE)
            assert int((weights != 0).sum(-1).max()) == choice.shape[-1]
    assert compared >= 11
    torch.testing.assert_close(logits, golden["logits"], **CLOSE)
    padded = model(golden["tokens"], attention_mask=golden["pad.attention_mask"])
    real = golden["pad.attention_mask"].bool()
    torch.testing.assert_close(padded[real], golden["pad.logits"][real], **CLOSE)


def test_trajectories(loaded, checkpoint):
    model, _ = loaded
    folder = GOLDEN / checkpoint[0].name.rstrip("0123456789")
    runs = load_file(folder / "trajectories.safetensors")
    for name, case in json.loads((folder / "trajectories.json").read_text()).items():
        prompt, steps = runs[f"{name}/prompt"], runs[f"{name}/x_steps"]
        sampler = llada(block_length=case["block_length"])
        found = model.denoise(prompt, length=steps.shape[-1], steps=case["steps"], sampler=sampler, temperature=0.0)
        assert torch.equal(found.canvases[1:], steps.long())


def test_there_and_back(checkpoint, tmp_path):
    folder, _ = checkpoint
    first = open_checkpoint(folder, options={"mask_token_id": MASK})
    again = export(dict(first.tensors()), first.architecture, tmp_path / "model.safetensors")
    theirs, ours = (load_file(path) for path in (folder / "model.safetensors", again))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert open_checkpoint(again).architecture == first.architecture


def test_the_id_of_the_mask_is_asked_for(checkpoint):
    with pytest.raises(ValueError, match="mask_token_id is None in the llada_moe config"):
        open_checkpoint(checkpoint[0])


def test_the_published_model_has_as_many_weights_as_its_card_says():
    config = {
        **json.loads((GOLDEN / "hub" / "config.json").read_text()),
        **dict(hidden_size=2048, num_hidden_layers=16, moe_layer_freq=[1] * 16, dense_intermediate_size=8192),
        **dict(expert_intermediate_size=1024, num_experts=64, num_experts_per_tok=8, vocab_size=157184),
        **dict(num_attention_heads=16, num_key_value_heads=16, mask_token_id=156895),
    }
    architecture = FAMILIES["llada_moe"].read_architecture(config, {})
    assert n_params(architecture) == 7_356_880_896
    assert n_params(architecture, active=True) == 7_356_880_896 - 16 * 56 * 3 * 1024 * 2048


def test_the_tokenizer_may_know_the_mask(checkpoint, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(MASK)} | {"<|mask|>": MASK}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), mask_token="<|mask|>"
    )
    model = HookedDiffusionTransformer.from_pretrained(checkpoint[0], tokenizer=tokenizer, device="cpu")
    assert model.cfg.mask_token_id == MASK
