"""What the loop refuses to go on with: numbers that are none, ids that are no tokens, whoever made them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask
from diffusion_lens.step_state import StepState


def require_logits(
    logits: Float[Tensor, "selected d_vocab_out"], places: PosMask, state: StepState | None = None
) -> None:
    """Raise a `FloatingPointError` unless every marked place has a finite largest logit; -inf forbids single tokens."""
    # The largest is NaN where any is, +inf where any is, and -inf where all are.
    where = _first(~logits.amax(dim=-1).isfinite(), state, places)
    if where is not None:
        raise FloatingPointError(
            f"the logits are not finite {where}: they tell nothing of tokens. Either the weights hold or overflow "
            f"to such numbers (in {str(logits.dtype).removeprefix('torch.')}; try dtype=torch.float32), or a hook made "
            "them. A hook may forbid tokens with -inf, if it leaves one; to force a token, return it from "
            "denoise.hook_candidates"
        )


def require_open(
    logits: Float[Tensor, "selected d_vocab_out"], tokens: Int[Tensor, "selected"], state: StepState, places: PosMask
) -> None:
    """Raise a `FloatingPointError` where nothing but [MASK], which is not written, has a finite logit."""
    where = _first(~logits.gather(1, tokens[:, None])[:, 0].isfinite(), state, places)
    if where is not None:
        raise FloatingPointError(
            f"every token but [MASK] is forbidden by a logit of -inf {where}: leave one token that can be written, or "
            "allow [MASK] with Proposal(writes_mask=True)"
        )


def require_scores(scores: Float[Tensor, "batch pos"], state: StepState, places: PosMask) -> None:
    """Raise a `FloatingPointError` where what `hook_confidence` returned ranks nothing."""
    where = _first(scores[places].isnan(), state, places)
    if where is not None:
        raise FloatingPointError(
            f"denoise.hook_confidence returned NaN {where}: places cannot be ranked by it; return numbers, or -inf for "
            "places that come last"
        )


def require_choice(reveal: Tensor) -> None:
    """Raise a `TypeError` unless what `hook_reveal` returned marks places."""
    if reveal.dtype != torch.bool:
        raise TypeError(
            f"denoise.hook_reveal returned {reveal.dtype}; it marks the places revealed in this step: return a bool "
            "for each"
        )


def require_ids(name: str, ids: Tensor, state: StepState, places: PosMask, model: DiffusionTransformer) -> None:
    """Raise an error unless a hook returned token ids, or the blank of the canvas, at the marked places."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} returned {ids.dtype}; token ids are integers, as they were handed over")
    blank = model.cfg.blank
    wrong = (((ids < 0) | (ids >= model.cfg.d_vocab)) & (ids != blank))[places]
    where = _first(wrong, state, places)
    if where is not None:
        raise ValueError(
            f"{name} returned the id {int(ids[places][wrong][0])} {where}; {model.cfg.model_name!r} has the tokens 0 "
            f"to {model.cfg.d_vocab - 1}, and {blank} stands for a place that is still blank"
        )


def _first(wrong: Tensor, state: StepState | None, places: PosMask) -> str | None:
    """Where the first of the wrong places is, in words."""
    if not bool(wrong.any()):
        return None
    row, position = places.nonzero()[wrong.nonzero()[0, 0]].tolist()
    step = "" if state is None else f"step {state.index}, "
    return f"at {step}row {row}, position {position} ({int(wrong.sum())} of {len(wrong)} places)"
