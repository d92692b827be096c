"""Values that the loop refuses from network and hooks: logits that are not finite, ids that are no tokens."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.config import UNREACHED, reached
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask
from diffusion_lens.step_state import StepState


def require_logits(
    logits: Float[Tensor, "selected d_vocab_out"], positions: PosMask, state: StepState | None = None
) -> None:
    """Raise a `FloatingPointError` unless the largest logit of every row is finite; -inf forbids single tokens."""
    # The largest is NaN where any logit is, +inf where any logit is, and -inf where all logits are.
    where = _first(~logits.amax(dim=-1).isfinite(), state, positions)
    if where is not None:
        raise FloatingPointError(
            f"the logits are not finite {where}, so no token can be chosen. Either the weights contain such numbers or "
            f"overflow to them (in {str(logits.dtype).removeprefix('torch.')}; try dtype=torch.float32), or a hook "
            "returned them. A hook may forbid tokens with -inf if it leaves one; to force a token, return it from "
            "denoise.hook_candidates"
        )


def require_open(
    logits: Float[Tensor, "selected d_vocab_out"], tokens: Int[Tensor, "selected"], state: StepState, positions: PosMask
) -> None:
    """Raise a `FloatingPointError` if only [MASK], which is not written, has a finite logit."""
    where = _first(~logits.gather(1, tokens[:, None])[:, 0].isfinite(), state, positions)
    if where is not None:
        raise FloatingPointError(
            f"every token but [MASK] is forbidden by a logit of -inf {where}: leave one token that can be written, or "
            "allow [MASK] with Proposal(writes_mask=True)"
        )


def require_distribution(p: Float[Tensor, "selected d_vocab"], state: StepState, positions: PosMask) -> None:
    """Raise a `FloatingPointError` unless some token or [MASK] can be drawn at every position."""
    largest = p.amax(dim=-1)
    where = _first(~(largest.isfinite() & (largest > 0)), state, positions)
    if where is not None:
        raise FloatingPointError(
            f"the sampler gives no token a probability {where}: the logits there forbid all of them, or the noise of "
            "the step is out of the range of floating-point numbers"
        )


def require_scores(scores: Float[Tensor, "batch pos"], state: StepState, positions: PosMask) -> None:
    """Raise a `FloatingPointError` if `hook_confidence` returned NaN, by which positions cannot be ranked."""
    where = _first(scores[positions].isnan(), state, positions)
    if where is not None:
        raise FloatingPointError(
            f"denoise.hook_confidence returned NaN {where}: positions cannot be ranked by it; return numbers, or -inf "
            "for positions that come last"
        )


def require_choice(reveal: Tensor) -> None:
    """Raise a `TypeError` unless `hook_reveal` returned a mask of positions."""
    if reveal.dtype != torch.bool:
        raise TypeError(
            f"denoise.hook_reveal returned {reveal.dtype}; return a bool for each position, true where the step "
            "reveals a token"
        )


def require_ids(name: str, ids: Tensor, state: StepState, positions: PosMask, model: DiffusionTransformer) -> None:
    """Raise an error unless a hook returned token ids, or the canvas's blank, at these positions."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(
            f"{name} returned {ids.dtype}; token ids are integers: return a tensor of the dtype that it received"
        )
    wrong = (ids < 0) | (ids >= model.cfg.d_vocab)
    blank = ""
    if not model.cfg.rewrites:
        # A position that no block has reached stays so.
        wrong &= (ids != model.cfg.blank) & ~((ids == UNREACHED) & ~reached(state.tokens))
        blank = f", and {model.cfg.blank} for a position that is still to be written"
    wrong = wrong[positions]
    where = _first(wrong, state, positions)
    if where is not None:
        raise ValueError(
            f"{name} returned the id {int(ids[positions][wrong][0])} {where}; {model.cfg.model_name!r} has the tokens "
            f"0 to {model.cfg.d_vocab - 1}{blank}"
        )


def _first(wrong: Tensor, state: StepState | None, positions: PosMask) -> str | None:
    """Description of the first wrong position, or `None` where none is wrong."""
    if not bool(wrong.any()):
        return None
    row, position = positions.nonzero()[wrong.nonzero()[0, 0]].tolist()
    step = "" if state is None else f"step {state.index}, "
    return f"at {step}row {row}, position {position} ({int(wrong.sum())} of {len(wrong)} positions)"
