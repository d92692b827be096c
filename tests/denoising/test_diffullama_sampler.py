"""DiffuLLaMA's own sampler, canvas by canvas, with the random numbers that the authors' code drew."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.denoising.sampler import PositionNoise
from diffusion_lens.denoising.samplers import diffullama

GOLDEN = Path(__file__).parents[1] / "golden" / "diffullama"
CASES = json.loads((GOLDEN / "trajectories.json").read_text())
RECORDED = load_file(GOLDEN / "trajectories.safetensors")
MASK = 140


@pytest.fixture(scope="module")
def model():
    return HookedDiffusionTransformer.from_pretrained(GOLDEN, mode="bidirectional", mask_token_id=MASK, device="cpu")


def test_activations_and_logits_are_those_of_the_authors_code(model):
    golden = load_file(GOLDEN / "golden.safetensors")
    logits, cache = model.run_with_cache(golden["tokens"])
    close = dict(rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(logits, golden["logits"], **close)
    torch.testing.assert_close(cache["blocks.0.hook_resid_pre"], golden["resid_pre.0"], **close)
    for layer in range(model.cfg.n_layers):
        for name in ("attn_out", "mlp_out", "resid_post"):
            torch.testing.assert_close(cache[f"blocks.{layer}.hook_{name}"], golden[f"{name}.{layer}"], **close)


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_canvas_of_every_recorded_run(name, as_published, model, monkeypatch):
    case, tokens = CASES[name], RECORDED[f"{name}/input_ids"]
    draws, uniforms = RECORDED[f"{name}/token_draws"].double(), RECORDED[f"{name}/reveal_uniforms"].double()

    def by_token(self, step, positions, n_tokens):
        """-log of our numbers are the exponential variates of their code, which it draws before the shift."""
        row, pos = positions.nonzero(as_tuple=True)
        return torch.exp(-draws[step, row, (pos - 1).clamp(min=0)])

    # A first position that is not given is masked until it is revealed, here in step 0, to the token of the input.
    first_is_given = bool(RECORDED[f"{name}/src_mask"][0, 0])

    def mask_first(canvas, hook):
        return canvas if first_is_given or hook.step.index else torch.cat([torch.full((1, 1), MASK), canvas[:, 1:]], 1)

    def input_token_first(candidates, hook):
        return torch.cat([tokens[:, :1], candidates[:, 1:]], dim=1)

    prompt = tokens.masked_fill(RECORDED[f"{name}/src_mask"] == 0, MASK)
    prompt[:, 0] = tokens[:, 0]
    monkeypatch.setattr(PositionNoise, "by_token", by_token)
    monkeypatch.setattr(PositionNoise, "by_position", lambda self, step, masked: uniforms[step][masked])
    run = model.denoise(
        prompt,
        steps=case["diffusion_steps"],
        sampler=diffullama(case["topp_temp"], as_published=as_published),
        temperature=case["logits_temp"],
        fwd_hooks=[("denoise.hook_tokens", mask_first), ("denoise.hook_candidates", input_token_first)],
    )
    assert torch.equal(run.canvases[1:-1], RECORDED[f"{name}/x_steps"])
    assert torch.equal(run.tokens[:, 1:], RECORDED[f"{name}/x_final"])
