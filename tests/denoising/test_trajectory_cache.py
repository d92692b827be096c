"""Activations by step: what is kept is what an ordinary cache holds on that step's canvas."""

import pytest
import torch
from transformer_lens import ActivationCache

from diffusion_lens.denoising.cache import TrajectoryCache

RESID = "blocks.1.hook_resid_post"
PROMPT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def options(every, **more):
    return dict(length=12, steps=6) | ({"cfg_scale": 0.8} if every.kind == "mdm" else {}) | more


def test_each_step_holds_what_its_canvas_gives(every):
    trajectory, cache = every.model.denoise_with_cache(PROMPT, names_filter=[RESID, "hook_embed"], **options(every))
    assert cache.steps == tuple(range(trajectory.n_steps))
    for step in cache.steps:
        assert isinstance(cache[step], ActivationCache)
        canvas = trajectory.canvases[step]
        _, alone = every.model.run_with_cache(canvas.clamp(min=0), names_filter=RESID)
        torch.testing.assert_close(cache[step, RESID], alone[RESID], rtol=1e-5, atol=1e-5)
        assert torch.equal(cache[step]["resid_post", 1], cache[step, RESID])
    assert torch.equal(cache[-1, RESID], cache[trajectory.n_steps - 1, RESID])


def test_caching_changes_nothing(every):
    plain = every.model.denoise(PROMPT, **options(every, temperature=0.6))
    cached, _ = every.model.denoise_with_cache(PROMPT, names_filter=RESID, **options(every, temperature=0.6))
    assert torch.equal(cached.canvases, plain.canvases)


def test_the_unconditional_branch_has_a_masked_prompt(every):
    if every.kind == "ar":
        with pytest.raises(ValueError, match="needs guidance"):
            every.model.denoise_with_cache(PROMPT, names_filter=RESID, branch="unconditional", **options(every))
        return
    trajectory, cache = every.model.denoise_with_cache(
        PROMPT, names_filter=RESID, branch="unconditional", **options(every)
    )
    canvas = trajectory.canvases[3].clone()
    canvas[:, :4] = every.model.cfg.mask_token_id
    _, alone = every.model.run_with_cache(canvas, names_filter=RESID)
    torch.testing.assert_close(cache[3, RESID], alone[RESID], rtol=1e-5, atol=1e-5)


def test_only_the_steps_asked_for_cost_a_pass(every):
    asked = dict(length=7, steps=30) if every.kind == "mdm" else dict(length=7)
    plain = every.model.denoise(PROMPT, **asked)
    trajectory, cache = every.model.denoise_with_cache(PROMPT, names_filter=RESID, steps_filter=[0, -1], **asked)
    assert cache.steps == (0, trajectory.n_steps - 1)
    assert plain.forward_passes <= trajectory.forward_passes <= plain.forward_passes + 2


def test_the_cache_shows_what_ran_after_the_callers_hooks(every):
    _, cache = every.model.denoise_with_cache(
        PROMPT, names_filter=RESID, fwd_hooks=[(RESID, lambda a, hook: torch.zeros_like(a))], **options(every)
    )
    assert not cache[2, RESID].any()


def test_places_device_and_dtype(every):
    _, whole = every.model.denoise_with_cache(
        PROMPT, names_filter=[RESID, "blocks.0.attn.hook_pattern"], **options(every)
    )
    _, part = every.model.denoise_with_cache(
        PROMPT,
        names_filter=[RESID, "blocks.0.attn.hook_pattern"],
        pos_slice=slice(1, 3),
        dtype=torch.bfloat16,
        device="cpu",
        **options(every),
    )
    assert torch.equal(part[1, RESID], whole[1, RESID][:, 1:3].bfloat16())
    pattern = whole[1, "blocks.0.attn.hook_pattern"]
    assert torch.equal(part[1, "blocks.0.attn.hook_pattern"], pattern[:, :, 1:3].bfloat16())


def test_stack(every):
    trajectory, cache = every.model.denoise_with_cache(PROMPT, names_filter=RESID, **options(every))
    stacked = cache.stack(RESID)
    assert stacked.shape == (trajectory.n_steps, 2, 12, every.model.cfg.d_model)
    for step in cache.steps:
        assert torch.equal(stacked[step], cache[step, RESID])


def test_the_loops_own_hook_points_are_kept_too(every):
    trajectory, cache = every.model.denoise_with_cache(
        PROMPT, names_filter=lambda name: name in ("denoise.hook_reveal", "denoise.hook_tokens"), **options(every)
    )
    for step in cache.steps:
        assert torch.equal(cache[step, "denoise.hook_tokens"], trajectory.canvases[step])
        assert torch.equal(cache[step, "denoise.hook_reveal"], trajectory.revealed_at == step)


def test_save_and_load(every, tmp_path):
    _, cache = every.model.denoise_with_cache(PROMPT, names_filter=[RESID, "hook_embed"], **options(every))
    again = TrajectoryCache.load(cache.save(tmp_path / "cache.safetensors"), every.model)
    assert again.steps == cache.steps
    assert again.n_bytes == cache.n_bytes
    for step in cache.steps:
        for name in (RESID, "hook_embed"):
            assert torch.equal(again[step, name], cache[step, name])


def test_the_estimate_is_what_is_kept(every):
    everything = lambda name: not name.endswith("hook_result")  # noqa: E731
    with pytest.raises(ValueError, match="would take") as refused:
        every.model.denoise_with_cache(PROMPT, names_filter=everything, max_bytes=1000, **options(every))
    estimate = int(str(refused.value).split("take ")[1].split(" bytes")[0].replace(",", ""))
    assert "hook_" in str(refused.value)
    _, cache = every.model.denoise_with_cache(PROMPT, names_filter=everything, max_bytes=estimate, **options(every))
    assert cache.n_bytes == estimate
    assert not every.model.list_hooks()


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (dict(names_filter=None), ValueError, "name the activations to keep"),
        (dict(names_filter="blocks.1.hook_resid_pots"), KeyError, "nearest are"),
        (dict(names_filter=lambda name: False), ValueError, "matches no hook point"),
        (dict(names_filter=RESID, steps_filter=[99]), ValueError, r"\[99\]"),
        (dict(names_filter=RESID, steps_filter=[]), ValueError, "selects no step"),
        (dict(names_filter=RESID, branch="both"), ValueError, "branch='both'"),
    ],
)
def test_bad_requests(every, asked, error, message):
    with pytest.raises(error, match=message):
        every.model.denoise_with_cache(PROMPT, **asked, **options(every))


def test_a_step_that_is_not_held(every):
    _, cache = every.model.denoise_with_cache(PROMPT, names_filter=RESID, steps_filter=1, **options(every))
    with pytest.raises(KeyError, match="step 0 was not cached"):
        cache[0]
