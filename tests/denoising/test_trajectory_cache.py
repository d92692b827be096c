"""Activations by step: what is kept is what an ordinary cache holds on that step's canvas."""

import pytest
import torch
from transformer_lens import ActivationCache

from diffusion_lens.denoising.cache import TrajectoryCache

RESID = "blocks.1.hook_resid_post"
PROMPT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def options(either, **more):
    return dict(length=12, steps=6) | ({"cfg_scale": 0.8} if either.kind == "mdm" else {}) | more


def test_each_step_holds_what_its_canvas_gives(either):
    trajectory, cache = either.model.denoise_with_cache(PROMPT, names_filter=[RESID, "hook_embed"], **options(either))
    assert cache.steps == tuple(range(trajectory.n_steps))
    for step in cache.steps:
        assert isinstance(cache[step], ActivationCache)
        canvas = trajectory.canvases[step]
        _, alone = either.model.run_with_cache(canvas.clamp(min=0), names_filter=RESID)
        torch.testing.assert_close(cache[step, RESID], alone[RESID], rtol=1e-5, atol=1e-5)
        assert torch.equal(cache[step]["resid_post", 1], cache[step, RESID])
    assert torch.equal(cache[-1, RESID], cache[trajectory.n_steps - 1, RESID])


def test_caching_changes_nothing(either):
    plain = either.model.denoise(PROMPT, **options(either, temperature=0.6))
    cached, _ = either.model.denoise_with_cache(PROMPT, names_filter=RESID, **options(either, temperature=0.6))
    assert torch.equal(cached.canvases, plain.canvases)


def test_the_unconditional_branch_has_a_masked_prompt(either):
    if either.kind == "ar":
        with pytest.raises(ValueError, match="needs guidance"):
            either.model.denoise_with_cache(PROMPT, names_filter=RESID, branch="unconditional", **options(either))
        return
    trajectory, cache = either.model.denoise_with_cache(
        PROMPT, names_filter=RESID, branch="unconditional", **options(either)
    )
    canvas = trajectory.canvases[3].clone()
    canvas[:, :4] = either.model.cfg.mask_token_id
    _, alone = either.model.run_with_cache(canvas, names_filter=RESID)
    torch.testing.assert_close(cache[3, RESID], alone[RESID], rtol=1e-5, atol=1e-5)


def test_only_the_steps_asked_for_cost_a_pass(either):
    asked = dict(length=7, steps=30) if either.kind == "mdm" else dict(length=7)
    plain = either.model.denoise(PROMPT, **asked)
    trajectory, cache = either.model.denoise_with_cache(PROMPT, names_filter=RESID, steps_filter=[0, -1], **asked)
    assert cache.steps == (0, trajectory.n_steps - 1)
    assert plain.forward_passes <= trajectory.forward_passes <= plain.forward_passes + 2


def test_the_cache_shows_what_ran_after_the_callers_hooks(either):
    _, cache = either.model.denoise_with_cache(
        PROMPT, names_filter=RESID, fwd_hooks=[(RESID, lambda a, hook: torch.zeros_like(a))], **options(either)
    )
    assert not cache[2, RESID].any()


def test_places_device_and_dtype(either):
    _, whole = either.model.denoise_with_cache(
        PROMPT, names_filter=[RESID, "blocks.0.attn.hook_pattern"], **options(either)
    )
    _, part = either.model.denoise_with_cache(
        PROMPT,
        names_filter=[RESID, "blocks.0.attn.hook_pattern"],
        pos_slice=slice(1, 3),
        dtype=torch.bfloat16,
        device="cpu",
        **options(either),
    )
    assert torch.equal(part[1, RESID], whole[1, RESID][:, 1:3].bfloat16())
    pattern = whole[1, "blocks.0.attn.hook_pattern"]
    assert torch.equal(part[1, "blocks.0.attn.hook_pattern"], pattern[:, :, 1:3].bfloat16())


def test_stack(either):
    trajectory, cache = either.model.denoise_with_cache(PROMPT, names_filter=RESID, **options(either))
    stacked = cache.stack(RESID)
    assert stacked.shape == (trajectory.n_steps, 2, 12, either.model.cfg.d_model)
    for step in cache.steps:
        assert torch.equal(stacked[step], cache[step, RESID])


def test_the_loops_own_hook_points_are_kept_too(either):
    trajectory, cache = either.model.denoise_with_cache(
        PROMPT, names_filter=lambda name: name in ("denoise.hook_reveal", "denoise.hook_tokens"), **options(either)
    )
    for step in cache.steps:
        assert torch.equal(cache[step, "denoise.hook_tokens"], trajectory.canvases[step])
        assert torch.equal(cache[step, "denoise.hook_reveal"], trajectory.revealed_at == step)


def test_save_and_load(either, tmp_path):
    _, cache = either.model.denoise_with_cache(PROMPT, names_filter=[RESID, "hook_embed"], **options(either))
    again = TrajectoryCache.load(cache.save(tmp_path / "cache.safetensors"), either.model)
    assert again.steps == cache.steps
    assert again.n_bytes == cache.n_bytes
    for step in cache.steps:
        for name in (RESID, "hook_embed"):
            assert torch.equal(again[step, name], cache[step, name])


def test_the_estimate_is_what_is_kept(either):
    everything = lambda name: not name.endswith("hook_result")  # noqa: E731
    with pytest.raises(ValueError, match="would take") as refused:
        either.model.denoise_with_cache(PROMPT, names_filter=everything, max_bytes=1000, **options(either))
    estimate = int(str(refused.value).split("take ")[1].split(" bytes")[0].replace(",", ""))
    assert "hook_" in str(refused.value)
    _, cache = either.model.denoise_with_cache(PROMPT, names_filter=everything, max_bytes=estimate, **options(either))
    assert cache.n_bytes == estimate
    assert not either.model.list_hooks()


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (dict(names_filter=None), ValueError, "question about your disk"),
        (dict(names_filter="blocks.1.hook_resid_pots"), KeyError, "nearest are"),
        (dict(names_filter=lambda name: False), ValueError, "matches no hook point"),
        (dict(names_filter=RESID, steps_filter=[99]), ValueError, r"\[99\]"),
        (dict(names_filter=RESID, steps_filter=[]), ValueError, "picks no step"),
        (dict(names_filter=RESID, branch="both"), ValueError, "branch='both'"),
    ],
)
def test_bad_requests(either, asked, error, message):
    with pytest.raises(error, match=message):
        either.model.denoise_with_cache(PROMPT, **asked, **options(either))


def test_a_step_that_is_not_held(either):
    _, cache = either.model.denoise_with_cache(PROMPT, names_filter=RESID, steps_filter=1, **options(either))
    with pytest.raises(KeyError, match="step 0 was not cached"):
        cache[0]
