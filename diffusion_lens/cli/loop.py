"""The denoising run of commands that read one canvas and, with `--steps`, the canvases of a run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.report import progress

if TYPE_CHECKING:
    from diffusion_lens.denoising.canvas import Canvas
    from diffusion_lens.denoising.denoise_settings import DenoiseSettings
    from diffusion_lens.denoising.trajectory import Trajectory
    from diffusion_lens.facts import Fact, Query
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer


def run_settings(
    model: ModelChoice,
    steps: int | None,
    at_steps: Sequence[int] | None,
    *,
    sampler: str | None,
    cfg_scale: float | None,
    seed: int,
    **needing_steps: Any,
) -> "DenoiseSettings | None":
    """Settings of the run, checked before the model is loaded; `None` without `--steps`.

    Args:
        at_steps: Steps of the run to read.
        needing_steps: Other options that have a meaning only with `--steps`.

    Raises:
        ValueError: A setting is out of range or does not fit the model, a step does not exist or is named twice, or an
            option needs `--steps`.
    """
    from diffusion_lens.analysis.selection import unique_indices
    from diffusion_lens.denoising.denoise_settings import DenoiseSettings
    from diffusion_lens.denoising.samplers import LeftToRight

    settings = DenoiseSettings(steps, sampler, cfg_scale or 0.0, seed=seed)
    if (shape := model.known_shape()) is not None:
        settings = settings.on(shape, model.name)
    if steps is None:
        given = {"at_step": at_steps, "sampler": sampler, "cfg_scale": cfg_scale, **needing_steps}
        for name, value in given.items():
            if value is not None:
                option = name.replace("_", "-")
                raise ValueError(
                    f"--{option} is a setting of a denoising run: give the number of its steps with --steps"
                )
        return None
    has_these_steps = settings.sampler is not None and not isinstance(settings.sampler, LeftToRight)
    if beyond := [step for step in unique_indices("at_step", at_steps) or () if has_these_steps and step >= steps]:
        raise ValueError(f"--at-step {beyond[0]}, but the steps of this run are 0 to {steps - 1}")
    return settings


def canvas_of(model: "HookedDiffusionTransformer", prompt: "str | Query", length: int | None = None) -> "Canvas":
    """The canvas from which a run begins: that of a query, or a text followed by masked positions up to `length`."""
    from diffusion_lens.analysis.traced_trajectory import loop_prompt
    from diffusion_lens.denoising import lay_out

    if isinstance(prompt, str):
        return lay_out(model, prompt, length)
    given, n_positions = loop_prompt(model, prompt)
    return lay_out(model, given[None], n_positions)


def denoised(model: "HookedDiffusionTransformer", canvas: "Canvas", settings: "DenoiseSettings") -> "Trajectory":
    """The denoising run from a canvas."""
    from diffusion_lens.denoising import denoise

    return denoise(model, canvas, settings, progress=progress())


def unnamed_subject(prompt: str, answer: str) -> "Fact":
    """A fact for commands that do not ask for its subject, with the whole prompt as the subject.

    Raises:
        ValueError: An empty prompt.
    """
    from diffusion_lens.facts import Fact

    if not prompt.strip():
        raise ValueError(f"the prompt {prompt!r} is empty: there is no token to predict from")
    return Fact(prompt, prompt, answer)


def check_masked(at_steps: Sequence[int] | None, last: int) -> None:
    """Check that a part of the answer is still masked at these steps.

    Args:
        last: Step that reveals the last token of the answer.

    Raises:
        ValueError: The answer is revealed before one of the steps.
    """
    if late := [step for step in at_steps or () if step > last]:
        raise ValueError(
            f"--at-step {late[0]}: the run reveals the answer's last token at step {last}, after which there is "
            "nothing to read"
        )


def steps_read(model: ModelChoice, steps: int, at_steps: Sequence[int] | None, n_positions: int, n_answer: int) -> int:
    """Largest number of canvases that a command reads; a text that grows has one for each token of the answer."""
    if at_steps:
        return len(at_steps)
    return n_answer if model.shape().grows else min(steps, n_positions)
