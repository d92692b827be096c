"""One checkpoint that is several models: the mode in which it is read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffusion_lens import HookedDiffusionTransformer
from weight_conversion import export, open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
NEMOTRON, DIFFULLAMA = GOLDEN / "nemotron", GOLDEN / "diffullama"
PREFIX = {"bidirectional": "bidirectional", "ar": "autoregressive"}


@pytest.mark.parametrize("mode", PREFIX)
def test_activations_and_logits_of_each_mode_are_those_of_the_authors(mode):
    model = HookedDiffusionTransformer.from_pretrained(NEMOTRON, mode=mode, device="cpu")
    golden = load_file(NEMOTRON / "golden.safetensors")
    logits, cache = model.run_with_cache(golden["tokens"])
    close = dict(rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(logits, golden[f"{PREFIX[mode]}.logits"], **close)
    for layer in range(model.cfg.n_layers):
        for name in ("attn_out", "mlp_out", "resid_post"):
            if (key := f"{PREFIX[mode]}.{name}.{layer}") in golden:
                torch.testing.assert_close(cache[f"blocks.{layer}.hook_{name}"], golden[key], **close)


def test_the_causal_mode_writes_as_the_authors_code():
    model = HookedDiffusionTransformer.from_pretrained(NEMOTRON, mode="ar", device="cpu")
    recorded = load_file(NEMOTRON / "trajectories.safetensors")
    run = model.denoise(recorded["prompt"], length=recorded["ar_generate/x_final"].shape[1])
    assert torch.equal(run.tokens, recorded["ar_generate/x_final"])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, ("bidirectional", "in_place", 100, None, "blocks")),
        ({"mode": "bidirectional"}, ("bidirectional", "in_place", 100, None, "blocks")),
        ({"mode": "ar"}, ("causal", "shifted", None, None, "blocks")),
        ({"mode": "block"}, ("block_causal", "in_place", 100, 32, "causal")),
        ({"mode": "block", "block_size": 8}, ("block_causal", "in_place", 100, 8, "causal")),
        ({"mode": "block", "causal_context": True}, ("block_causal", "in_place", 100, 32, "causal")),
        ({"mode": "block", "causal_context": False}, ("block_causal", "in_place", 100, 32, "prompt")),
        ({"mode": "ar", "causal_context": False}, ("causal", "shifted", None, None, "blocks")),
    ],
)
def test_the_mode_says_who_sees_whom_and_which_row_predicts(options, kind, tmp_path):
    config = {**json.loads((NEMOTRON / "config.json").read_text()), **options}
    a = open_checkpoint(NEMOTRON / "model.safetensors", config).architecture
    assert (a.attention_dir, a.readout, a.mask_token_id, a.causal_block, a.block_context) == kind
    tensors = dict(open_checkpoint(NEMOTRON).tensors())
    again = open_checkpoint(export(tensors, a, tmp_path / "model.safetensors"))
    assert again.architecture == a
    theirs = load_file(NEMOTRON / "model.safetensors")
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in theirs.items())


def test_a_causal_config_read_as_a_diffusion_model(tmp_path):
    """DiffuLLaMA's config is Llama's; what is exported says what it is."""
    causal = open_checkpoint(DIFFULLAMA, options={"mode": "ar"}).architecture
    assert causal.attention_dir == "causal"
    checkpoint = open_checkpoint(DIFFULLAMA, options={"mode": "bidirectional", "mask_token_id": 140})
    a = checkpoint.architecture
    assert (a.attention_dir, a.readout, a.mask_token_id) == ("bidirectional", "shifted", 140)
    again = open_checkpoint(export(dict(checkpoint.tensors()), a, tmp_path / "model.safetensors"))
    assert again.architecture == a


def test_modes_that_do_not_fit_are_refused(configs, refused):
    def load(path, **options):
        return lambda: HookedDiffusionTransformer.from_pretrained(path, device="cpu", **options)

    wrong = {"mode": "causal"}
    refused(ValueError, "mode is 'causal'", "'bidirectional', 'block', 'ar'", path=NEMOTRON, options=wrong)
    refused(ValueError, "mode is 'block'", "'ar', 'bidirectional'", do=load(DIFFULLAMA, mode="block"))
    refused(
        ValueError, "causal model's config", "does not say how to read it", "if it is, pass mode=", do=load(DIFFULLAMA)
    )
    refused(ValueError, "mask_token_id is None", "mask_token_id=", do=load(DIFFULLAMA, mode="bidirectional"))
