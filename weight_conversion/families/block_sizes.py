"""The number of positions in a block, of models that were trained by blocks.

A model trained by blocks has the tensors of one whose positions see the whole canvas, and often its config too. Read
with another number of positions in a block, it computes something else without an error, so the number is never
guessed: it is in the config ("block_size"), in the name under which the checkpoint was published, or the caller gives
it.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from weight_conversion.families.family import Config
from weight_conversion.families.hf_config import DIFFUSION
from weight_conversion.families.unsupported import Kind, names_of

BY_BLOCKS = Kind(
    "a block-diffusion model",
    "its positions see finished blocks and their own, never the blocks after them",
    model_types=("sdar", "llada2_moe"),
    classes=r"SDAR|BD3LM|OPDLM",
    keys=("block_size",),
    published=r"(?<![a-z])(bd3-?lm|opdlm|sdar|block[-_]?diffusion)(?![a-z])",
)
# Published names that say the number of positions in a block. JetLM/SDAR writes other sizes than 4 into the name
# ("SDAR-4B-Chat-b16"); that of the names without one is in the training code's configs. All of LLaDA2 have one size.
_NAMED = (
    (r"(?<![a-z])sdar-.*-b(\d+)(?![\w.])", None),
    (r"(?<![a-z])sdar-(1\.7b|4b|8b)-chat$", 4),
    (r"(?<![a-z])opdlm(?![a-z])", 4),
    (r"(?<![a-z])llada2\.[01]-(mini|flash)(?![a-z])", 32),
)


def with_block_size(
    config: Config, source: str, config_path: str | None = None, beside: Config | None = None
) -> Config:
    """A config, with the number of positions in a block from the checkpoint's published name if it does not say it.

    Args:
        config: The checkpoint's config.
        source: Path of the checkpoint, or its repository.
        config_path: Path of its config, if the caller passed one.
        beside: The config.json beside the checkpoint, if `config` is another one.

    Raises:
        ValueError: The checkpoint is a block-diffusion model, and nothing says how many positions a block has.
    """
    if config.get("block_size") is not None:
        return config
    names = names_of(config, source, config_path)
    evidence = BY_BLOCKS.evidence(config, {}, names, beside or {})
    if evidence is None:
        return config
    if (size := _named_size(names)) is not None:
        return {**config, "block_size": size}
    raise ValueError(
        f"{source} is {BY_BLOCKS.what} ({evidence}), and its config does not say how many positions a block has. Pass "
        "block_size=, the number with which it was trained. With any other number it would give wrong numbers: "
        f"{BY_BLOCKS.difference}{_remedy(evidence)}"
    )


def block_size(config: Config, *, required: bool = False) -> dict[str, Any]:
    """The fields of an architecture that say who sees whom in a masked diffusion model.

    Args:
        required: Whether the model was trained by blocks for certain.

    Raises:
        ValueError: It was, and the config does not say how many positions a block has.
    """
    size = config.get("block_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(
            f"block_size is {size!r}; it must be a whole number, at least 1, because a block has at least one "
            "position, or null for a model that sees its whole canvas"
        )
    if size is None and required:
        raise ValueError(
            f"model_type={config['model_type']!r} is {BY_BLOCKS.what}, and its config does not say how many positions "
            "a block has: pass block_size=, the number with which it was trained"
        )
    return {"attention_dir": "bidirectional" if size is None else "block_causal", "causal_block": size}


def _named_size(names: list[str]) -> int | None:
    for name in names:
        for pattern, size in _NAMED:
            if match := re.search(pattern, name, re.IGNORECASE):
                return int(match[1]) if size is None else size
    return None


def _remedy(evidence: str) -> str:
    if evidence.startswith("its name"):
        return (
            '. If it is not of this kind, give its folder another name, or let its config.json say "block_size": null'
        )
    if evidence.startswith("the config.json"):
        return '. If it is not of this kind, let the config that you pass say "block_size": null'
    return ""


def warn_if_silent(config: Config, source: str, config_path: str | None = None) -> None:
    """Warn if neither config nor name says whether a model made from a causal one was trained by blocks."""
    if not str(config.get("model_type")).startswith(DIFFUSION) or "block_size" in config:
        return
    if any(re.search("mdlm", name, re.IGNORECASE) for name in names_of(config, source, config_path)):
        return
    warnings.warn(
        f"{source} is read as a model that sees its whole canvas. Its config does not say so, and models trained by "
        "blocks have the same config: if it is one of those, its numbers will be wrong, so pass block_size=. If it is "
        'not, add "block_size": null to its config.json to end this warning',
        stacklevel=4,
    )
