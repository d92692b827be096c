"""The interventions as hooks of `diffusion_lens.interventions`, and as the Python text of the same calls.

    what    function      source of the new value
    force   replace       the token, at `denoise.hook_tokens` of its step
    zero    zero_ablate   zeros
    mean    mean_ablate   the mean over the positions of another run at the same step
    patch   swap          another run at the same step

    site    hook point
    resid   blocks.{layer}.hook_resid_post
    attn    blocks.{layer}.hook_attn_out
    mlp     blocks.{layer}.hook_mlp_out
    head    blocks.{layer}.attn.hook_z, one head

Under guidance, a cache contains the conditional branch, so "mean" and "patch" act in that branch only.
"""

from collections.abc import Callable

import torch

from diffusion_lens.config import reached
from diffusion_lens.denoising.recording import Recording
from diffusion_lens.denoising.step_hooks import at_steps, on_branch
from diffusion_lens.explorer.spec import FORCE, Intervention, Spec
from diffusion_lens.explorer.written import Written, call
from diffusion_lens.hook_names import attn_out, loop_hook, mlp_out, resid_post
from diffusion_lens.interventions import mean_ablate, replace, swap, zero_ablate
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import pick_layer

POINTS: dict[str, Callable[[int], str]] = {
    "resid": resid_post,
    "attn": attn_out,
    "mlp": mlp_out,
    "head": lambda layer: f"blocks.{layer}.attn.hook_z",
}
FROM_ANOTHER_RUN = {"mean": mean_ablate, "patch": swap}


def point_of(model: DiffusionTransformer, one: Intervention) -> str:
    """The hook point of an intervention on an activation.

    Raises:
        ValueError: The model has no such layer or head.
    """
    assert one.site is not None
    assert one.layer is not None
    layer = pick_layer(one.layer, model.cfg.n_layers)
    if one.head is not None and one.head >= model.cfg.n_heads:
        raise ValueError(f"head={one.head} is not one of the heads 0 to {model.cfg.n_heads - 1} of this model")
    return POINTS[one.site](layer)


def token_of(model: DiffusionTransformer, one: Intervention) -> int:
    """The id that a forced position gets.

    Raises:
        ValueError: The text is not a single token, or the model's text grows, so that nothing is masked again.
    """
    if one.token is not None:
        return int(model.to_single_token(one.token))
    if model.cfg.grows:
        raise ValueError(
            f"the text of {model.cfg.model_name!r} grows at its end, so no position is masked again: force another "
            "token"
        )
    if model.cfg.rewrites:
        raise ValueError(f"the noise of {model.cfg.model_name!r} is uniform, so nothing is masked: force another token")
    return model.cfg.blank


def forced(model: DiffusionTransformer, one: Intervention) -> tuple[str, Written]:
    """Hook point and hook that write a token into the canvas which a step reads."""
    assert one.position is not None
    token = torch.tensor(token_of(model, one))
    value = Written(token, f"torch.tensor({token.item()})", frozenset({("torch", "")}))
    return loop_hook("hook_tokens"), call(at_steps, call(replace, value, [one.position]), one.step)


def changed(model: DiffusionTransformer, spec: Spec, one: Intervention, source: Written | None) -> tuple[str, Written]:
    """Hook point and hook that change an activation.

    Args:
        source: Cache by step of the run whose activations are taken; `None` for "zero".
    """
    positions = None if one.positions is None else list(one.positions)
    heads = None if one.head is None else [one.head]
    if source is None:
        hook = call(zero_ablate, positions=positions, heads=heads)
    else:
        hook = call(FROM_ANOTHER_RUN[one.what], source, positions=positions, heads=heads)
        hook = call(on_branch, hook, "conditional") if spec.cfg_scale else hook
    if one.steps is not None:
        hook = call(at_steps, hook, list(one.steps))
    return point_of(model, one), hook


def check_position(model: DiffusionTransformer, one: Intervention, n_given: int, n_pos: int, n_steps: int) -> None:
    """Raise a `ValueError` unless a forced position is on the canvas which its step reads."""
    if one.what != FORCE:
        return
    assert one.position is not None
    assert one.step is not None
    if one.step >= n_steps or one.position >= n_pos:
        raise ValueError(
            f"step={one.step} and position={one.position}; the run has the steps 0 to {n_steps - 1} and the positions "
            f"0 to {n_pos - 1}"
        )
    if model.cfg.grows and one.position >= n_given + one.step:
        raise ValueError(
            f"position {one.position} is not yet written at step {one.step}: the text grows at its end, and has "
            f"{n_given + one.step} tokens there"
        )


def require_reached(one: Intervention, run: Recording) -> None:
    """Raise a `ValueError` if a position is masked again in a block that its step has not opened."""
    if one.token is None and not reached(run.canvases[one.step, 0, one.position]):
        raise ValueError(
            f"position {one.position} is in a block that is not open at step {one.step}, so there is nothing to mask: "
            "choose a later step, or force a token"
        )
