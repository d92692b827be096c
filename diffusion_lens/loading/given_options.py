"""What a caller says where the config of a checkpoint leaves it open, checked as far as that needs no checkpoint."""

from typing import Any

from diffusion_lens.settings import at_least

MODES = ("bidirectional", "block", "ar")


def given_options(mode: Any = None, block_size: Any = None, mask_token_id: Any = None) -> dict[str, Any]:
    """The options that are not `None`, by their name.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: A number is too small. Whether the checkpoint has such a mode is checked when it is read.
    """
    if mode is not None and not isinstance(mode, str):
        raise TypeError(f"mode={mode!r} is not the name of a mode; the modes are {', '.join(map(repr, MODES))}")
    given: dict[str, Any] = {} if mode is None else {"mode": mode}
    if block_size is not None:
        given["block_size"] = at_least(1, "block_size", block_size, "a block has at least one position")
    if mask_token_id is not None:
        given["mask_token_id"] = at_least(0, "mask_token_id", mask_token_id, "it is the id of a token")
    return given
