"""Activations by step: what is kept is what an ordinary cache holds on that step's canvas."""

import copy

import numpy as np
import pytest
import torch
from transformer_lens import ActivationCache

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.denoising.cache import TrajectoryCache
from diffusion_lens.interventions import at_steps, on_branch, swap

RESID = "blocks.1.hook_resid_post"
PROMPT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


PATTERN = "blocks.0.attn.hook_pattern"
OF_THE_LOOP = ["denoise.hook_reveal", "denoise.hook_tokens"]


def options(several, **more):
    return dict(length=10, steps=4) | ({"cfg_scale": 0.8} if several.kind == "mdm" else {}) | more


@pytest.fixture(scope="module")
def run_and_cache(several):
    """A run with temperature, and its cache of several hook points, those of the loop included."""
    names = [RESID, "hook_embed", PATTERN, *OF_THE_LOOP]
    return several.model.denoise_with_cache(PROMPT, names_filter=names, **options(several, temperature=0.6))


def test_each_step_holds_what_its_canvas_gives(several, run_and_cache):
    trajectory, cache = run_and_cache
    assert cache.steps == tuple(range(trajectory.n_steps))
    for step in cache.steps:
        assert isinstance(cache[step], ActivationCache)
        assert torch.equal(cache[step]["resid_post", 1], cache[step, RESID])
    for step in (0, 2):
        with several.model.clock.at(trajectory.state_at(step)):
            canvas = several.model.cfg.readable(trajectory.canvases[step])
            _, alone = several.model.run_with_cache(canvas, names_filter=RESID)
        torch.testing.assert_close(cache[step, RESID], alone[RESID], rtol=1e-5, atol=3e-5)
    assert torch.equal(cache[-1, RESID], cache[trajectory.n_steps - 1, RESID])


def test_caching_changes_nothing(several, run_and_cache):
    plain = several.model.denoise(PROMPT, **options(several, temperature=0.6))
    assert torch.equal(run_and_cache[0].canvases, plain.canvases)


def test_the_unconditional_branch_has_a_masked_prompt(several):
    if several.kind != "mdm":
        with pytest.raises(ValueError, match="needs guidance"):
            several.model.denoise_with_cache(PROMPT, names_filter=RESID, branch="unconditional", **options(several))
        return
    trajectory, cache = several.model.denoise_with_cache(
        PROMPT, names_filter=RESID, branch="unconditional", **options(several)
    )
    canvas = trajectory.canvases[2].clone()
    canvas[:, :4] = several.model.cfg.mask_token_id
    with several.model.clock.at(trajectory.state_at(2)):
        _, alone = several.model.run_with_cache(several.model.cfg.readable(canvas), names_filter=RESID)
    torch.testing.assert_close(cache[2, RESID], alone[RESID], rtol=1e-5, atol=3e-5)  # of a batch with both branches


def test_only_requested_steps_cost_a_pass(several):
    run_options = dict(length=7, steps=12) if several.kind == "mdm" else dict(length=7)
    plain = several.model.denoise(PROMPT, **run_options)
    trajectory, cache = several.model.denoise_with_cache(
        PROMPT, names_filter=RESID, steps_filter=[0, -1], **run_options
    )
    assert cache.steps == (0, trajectory.n_steps - 1)
    assert plain.forward_passes <= trajectory.forward_passes <= plain.forward_passes + 2


def test_the_cache_shows_what_ran_after_the_callers_hooks(several):
    _, cache = several.model.denoise_with_cache(
        PROMPT, names_filter=RESID, fwd_hooks=[(RESID, lambda a, hook: torch.zeros_like(a))], **options(several)
    )
    assert not cache[2, RESID].any()


def test_positions_device_and_dtype(several, run_and_cache):
    whole = run_and_cache[1]
    _, part = several.model.denoise_with_cache(
        PROMPT,
        names_filter=[RESID, PATTERN],
        pos_slice=slice(1, 3),
        dtype=torch.bfloat16,
        device="cpu",
        **options(several, temperature=0.6),
    )
    assert torch.equal(part[1, RESID], whole[1, RESID][:, 1:3].bfloat16())
    assert torch.equal(part[1, PATTERN], whole[1, PATTERN][:, :, 1:3].bfloat16())


def test_stack(several, run_and_cache):
    trajectory, cache = run_and_cache
    stacked = cache.stack(RESID)
    assert stacked.shape == (trajectory.n_steps, 2, 10, several.model.cfg.d_model)
    for step in cache.steps:
        assert torch.equal(stacked[step], cache[step, RESID])


def test_the_loops_own_hook_points_are_cached_too(run_and_cache):
    trajectory, cache = run_and_cache
    for step in cache.steps:
        assert torch.equal(cache[step, "denoise.hook_tokens"], trajectory.canvases[step])
        written = ~trajectory.given if trajectory.uniform_noise else trajectory.revealed_at == step
        # A sampler that draws transitions may choose a position and draw [MASK] for it.
        still_masked = trajectory.is_masked(trajectory.canvases[step + 1])
        assert torch.equal(cache[step, "denoise.hook_reveal"] & ~still_masked, written)


def test_save_and_load(several, run_and_cache, tmp_path):
    cache = run_and_cache[1]
    again = TrajectoryCache.load(cache.save(tmp_path / "cache.safetensors"), several.model)
    assert again.steps == cache.steps
    assert again.n_bytes == cache.n_bytes
    for step in cache.steps:
        for name in (RESID, "hook_embed", PATTERN, *OF_THE_LOOP):
            assert torch.equal(again[step, name], cache[step, name])


def test_a_cache_knows_its_model_positions_and_branch(several, run_and_cache, tmp_path):
    trajectory, cache = run_and_cache
    assert cache.record["weights_sha256"] == trajectory.record["weights_sha256"]
    assert cache.record["positions"] is None
    assert cache.record["branch"] == "conditional"
    _, part = several.model.denoise_with_cache(PROMPT, RESID, pos_slice=slice(-3, None), **options(several))
    again = TrajectoryCache.load(part.save(tmp_path / "part.safetensors"))
    assert again.record == part.record
    assert again.record["positions"] == [7, 8, 9]
    with pytest.raises(ValueError, match="whose architecture differs"):
        TrajectoryCache.load(tmp_path / "part.safetensors", HookedDiffusionTransformer.from_pretrained("tiny-mdm"))


def test_a_cache_of_other_weights_is_warned_of(several, run_and_cache, tmp_path):
    path = run_and_cache[1].save(tmp_path / "cache.safetensors")
    other = copy.deepcopy(several.model)
    with torch.no_grad():
        other.embed.weight += 1
    with pytest.warns(UserWarning, match="activations of another network"):
        TrajectoryCache.load(path, other)


def test_a_cache_is_taken_at_its_own_steps_positions_and_branch(several):
    model, more = several.model, options(several)
    _, cache = model.denoise_with_cache(PROMPT, RESID, **more)
    _, part = model.denoise_with_cache(PROMPT, RESID, pos_slice=slice(3, 6), **more)
    with pytest.raises(ValueError, match="has 3 positions alone, from 3 to 5: say which"):
        swap(part, 3)
    one, other = swap(cache, [4, 5]), swap(part, [4, 5], source_positions=[1, 2])
    runs = [model.denoise(PROMPT, fwd_hooks=[(RESID, on_branch(hook, "conditional"))], **more) for hook in (one, other)]
    torch.testing.assert_close(runs[0].confidence, runs[1].confidence, rtol=0, atol=0, equal_nan=True)
    if several.kind == "mdm":
        with pytest.raises(ValueError, match=r"of the conditional branch, .* on_branch\(hook, 'conditional'\)"):
            model.denoise(PROMPT, fwd_hooks=[(RESID, swap(cache))], **more)
    longer = more | {"length": 12, "steps": cache.n_steps + 2}
    there = on_branch(at_steps(swap(cache, 4), range(cache.n_steps)), "conditional")
    if model.cfg.is_autoregressive:  # step i writes token i, whatever the number of tokens
        model.denoise(PROMPT, fwd_hooks=[(RESID, there)], **longer)
        return
    with pytest.raises(ValueError, match=f"is of a run of {cache.n_steps} steps, and this run has {cache.n_steps + 2}"):
        model.denoise(PROMPT, fwd_hooks=[(RESID, there)], **longer)


def test_errors_of_keys_name_what_there_is(run_and_cache):
    cache = run_and_cache[1]
    assert torch.equal(cache[np.int64(1), RESID], cache[1, RESID])
    with pytest.raises(KeyError, match="names no step"):
        cache["resid_post", 3]
    with pytest.raises(KeyError, match=f"nearest are: {RESID}"):
        cache[0]["resid_post", 2]


def test_the_estimate_is_what_is_kept(several):
    everything = lambda name: not name.endswith("hook_result")  # noqa: E731
    with pytest.raises(ValueError, match="this cache needs") as refused:
        several.model.denoise_with_cache(PROMPT, names_filter=everything, max_bytes=1000, **options(several))
    estimate = int(str(refused.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert "hook_" in str(refused.value)
    _, cache = several.model.denoise_with_cache(PROMPT, names_filter=everything, max_bytes=estimate, **options(several))
    assert cache.n_bytes == estimate
    assert not several.model.list_hooks()


@pytest.mark.parametrize(
    ("requested", "error", "message"),
    [
        (dict(names_filter=None), ValueError, "name the activations to keep"),
        (dict(names_filter="blocks.1.hook_resid_pots"), KeyError, "nearest are"),
        (dict(names_filter=lambda name: False), ValueError, "matches no hook point"),
        (dict(names_filter=RESID, steps_filter=[99]), ValueError, r"\[99\]"),
        (dict(names_filter=RESID, steps_filter=[]), ValueError, "selects no step"),
        (dict(names_filter=RESID, branch="both"), ValueError, "branch='both'"),
    ],
)
def test_bad_requests(several, requested, error, message):
    with pytest.raises(error, match=message):
        several.model.denoise_with_cache(PROMPT, **requested, **options(several))


def test_a_step_that_is_not_cached(several):
    _, cache = several.model.denoise_with_cache(PROMPT, names_filter=RESID, steps_filter=1, **options(several))
    with pytest.raises(KeyError, match="step 0 was not cached"):
        cache[0]
