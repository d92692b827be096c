"""Warnings of this library, shown at the line of the user's code that led to them."""

import sys
import warnings

# torch's decorators stand between our functions, and where annotations are checked those of jaxtyping and beartype.
_NOT_THE_USERS = ("diffusion_lens", "torch", "jaxtyping", "beartype")


def warn_user(message: str) -> None:
    """A `UserWarning` at the innermost line that is neither this library's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
