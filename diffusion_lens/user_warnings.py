"""Warnings of this library, which point to the line of the user's code that caused them."""

import sys
import warnings

# Frames of torch's decorators are between ours and, if annotations are checked, those of jaxtyping and beartype.
_NOT_THE_USERS = ("diffusion_lens", "torch", "jaxtyping", "beartype")


def warn_user(message: str) -> None:
    """Issue a `UserWarning` at the innermost line that belongs to none of these packages."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
