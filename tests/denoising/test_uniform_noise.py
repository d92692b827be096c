"""The loop under uniform noise: no position is masked, and every one that was not given may change in every step."""

from typing import Any

import pytest
import torch
from small_networks import small_architecture

SAMPLERS = ["uniform_posterior", "score", "sedd"]


@pytest.fixture(scope="module")
def uniform() -> Any:
    """A small random model whose noise is other tokens."""
    from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer

    return HookedDiffusionTransformer(
        DiffusionConfig.from_architecture(small_architecture(name="small-uniform"), device="cpu")
    )


PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


def run(model: Any, prompt: torch.Tensor = PROMPT, **settings: Any) -> Any:
    return model.denoise(prompt, length=10, **{"steps": 6, "temperature": 1.0, **settings})


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_prompt_stays_and_every_other_position_is_open_at_every_step(uniform: Any, sampler: str) -> None:
    states: list[Any] = []
    written = run(
        uniform, sampler=sampler, fwd_hooks=[("denoise.hook_tokens", lambda x, hook: states.append(hook.step))]
    )
    assert torch.equal(written.canvases[:, :, :3], PROMPT.expand(len(written.canvases), -1, -1))
    assert all(torch.equal(state.masked, ~written.given) for state in states)
    assert bool((written.canvases >= 0).all())
    assert written.blank == -1
    assert bool((written.canvases[1:] != written.canvases[:-1]).any(dim=0)[:, 3:].float().mean() > 0.5)


def test_first_canvas_is_drawn_from_the_seed_of_each_row(uniform: Any) -> None:
    first = run(uniform, seed=[3, 4]).canvases[0]
    assert torch.equal(first, run(uniform, seed=[3, 4], sampler="score").canvases[0])
    assert torch.equal(first[:1], run(uniform, PROMPT[:1], seed=[3]).canvases[0])
    assert not torch.equal(first, run(uniform, seed=[3, 5]).canvases[0])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_is_the_same_alone_under_hooks_and_when_repeated(uniform: Any, sampler: str, temperature: float) -> None:
    settings = {"sampler": sampler, "temperature": temperature}
    both = run(uniform, **settings)
    assert torch.equal(both.canvases, run(uniform, fwd_hooks=[("hook_embed", lambda x, hook: x)], **settings).canvases)
    alone = run(uniform, PROMPT[1:], seed=both.record["seeds"][1:], **settings)
    assert torch.equal(alone.canvases[:, 0], both.canvases[:, 1])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_replay_is_the_same_run(uniform: Any, sampler: str) -> None:
    written = run(uniform, sampler=sampler)
    for canvas in ("forced", "free"):
        again = written.replay(uniform, canvas=canvas)
        assert torch.equal(again.canvases, written.canvases)
        assert torch.equal(again.revealed_at, written.revealed_at)
        torch.testing.assert_close(again.confidence, written.confidence)
        assert torch.equal(written.from_step(3).replay(uniform, canvas=canvas).canvases, written.canvases[3:])


def test_a_position_is_written_at_the_last_step_that_changed_it(uniform: Any) -> None:
    written = run(uniform)
    changed = written.canvases[1:] != written.canvases[:-1]
    steps = torch.arange(len(changed))[:, None, None]
    expected = torch.where(changed, steps, 0).amax(dim=0).masked_fill(written.given, -1)
    assert torch.equal(written.revealed_at, expected)


def test_confidence_is_p_of_the_final_token_at_the_last_step(uniform: Any) -> None:
    written = run(uniform)
    p = uniform(written.canvases[-2]).double().softmax(dim=-1).gather(-1, written.tokens[..., None])[..., 0]
    torch.testing.assert_close(written.confidence.double()[~written.given], p[~written.given], rtol=1e-5, atol=1e-6)
    assert bool((written.confidence[written.given] == 1).all())


def test_position_that_a_hook_does_not_reveal_keeps_its_token(uniform: Any) -> None:
    def all_but_four(reveal: torch.Tensor, hook: Any) -> torch.Tensor:
        return reveal & (torch.arange(reveal.shape[1]) != 4)

    written = run(uniform, fwd_hooks=[("denoise.hook_reveal", all_but_four)])
    assert bool((written.canvases[:, :, 4] == written.canvases[0, :, 4]).all())
    assert written.revealed_at[:, 4].tolist() == [0, 0]


def test_kept_prediction_is_told_the_time_of_the_last_change(uniform: Any) -> None:
    from diffusion_lens.denoising.samplers import udlm

    def nothing(reveal: torch.Tensor, hook: Any) -> torch.Tensor:
        return reveal & (hook.step.index not in (2, 3))

    held = run(uniform, sampler=udlm(), fwd_hooks=[("denoise.hook_reveal", nothing)]).record["sigmas"]
    moved = run(uniform, sampler=udlm(use_cache=False), fwd_hooks=[("denoise.hook_reveal", nothing)]).record["sigmas"]
    assert held == [*moved[:3], moved[2], moved[2], moved[5]]


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_branch_after_a_step_that_changed_nothing_is_told_the_kept_time(uniform: Any, step: int) -> None:
    from diffusion_lens.denoising.samplers import udlm

    def nothing(reveal: torch.Tensor, hook: Any) -> torch.Tensor:
        return reveal & (hook.step.index not in (2, 3))

    hooks = [("denoise.hook_reveal", nothing)]
    held = run(uniform, sampler=udlm(), fwd_hooks=hooks)
    branch = held.from_step(step).replay(uniform, canvas="free", fwd_hooks=hooks)
    assert torch.equal(branch.canvases, held.canvases[step:])
    assert branch.record["sigmas"][step:] == held.record["sigmas"][step:]


def test_state_of_a_step_is_that_of_the_loop(uniform: Any, tmp_path: Any) -> None:
    from diffusion_lens.denoising.trajectory import Trajectory

    states: list[Any] = []
    written = run(uniform, fwd_hooks=[("hook_embed", lambda x, hook: states.append(hook.step))])
    loaded = Trajectory.load(written.save(tmp_path / "run.safetensors"))
    for state in states:
        again = loaded.state_at(state.index)
        assert (again.sigma, again.t, again.s) == (state.sigma, state.t, state.s)
        assert torch.equal(again.masked, state.masked)
        assert torch.equal(again.tokens, state.tokens)


@pytest.mark.parametrize("sampler", ["confidence", "ancestral", "blocks", "posterior", "mdlm", "left_to_right"])
def test_samplers_of_masks_are_refused(uniform: Any, sampler: str) -> None:
    with pytest.raises(
        ValueError, match=r"noise of this model is uniform.*that fit: uniform_posterior, score, sedd, udlm, duo$"
    ):
        run(uniform, sampler=sampler)


def test_guidance_is_refused(uniform: Any) -> None:
    with pytest.raises(ValueError, match=r"masks the prompt, and 'small-uniform' has no \[MASK\]"):
        run(uniform, cfg_scale=1.0)


def test_only_removal_of_the_rest_is_refused(uniform: Any) -> None:
    with pytest.raises(ValueError, match=r"steps=1: the last step removes what noise remains.*steps=2"):
        run(uniform, sampler="score", steps=1)


def test_page_of_a_run_can_be_written(uniform: Any, tmp_path: Any) -> None:
    assert run(uniform).explore(tmp_path / "run.html").exists()
