"""`Family`, the description of one kind of checkpoint; `registry.py` lists the families."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.key_map import Rule

Config = Mapping[str, Any]

# Why a family does not take an option, in the words that follow its name.
_NOT_OPEN = {
    "block_size": "whose config already says which positions see each other",
    "mode": "which is read in one mode only",
    "mask_token_id": "whose config says whether there is a [MASK], and which token it is",
}


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint.

    Attributes:
        name: Name of the family.
        rules: Table of its tensors.
        recognises: Function (config, shapes) that tells whether a checkpoint is of this family.
        read_architecture: Function (config, shapes) that returns the architecture; without a config (`None`), from the
            tensors alone.
        write_config: Inverse of `read_architecture`, for export.
        config_file: File name of the config beside the checkpoint.
        ignored: Patterns of the names of tensors that are not needed.
        options: The arguments of `open_checkpoint` that its config may be completed with, of "block_size", "mode" and
            "mask_token_id"; `read_architecture` finds them under these keys of the config.
        modes: The names of its modes by direction of attention, where each of its checkpoints is several models.
        classes: Model types of the family, each with a pattern of the class names that its configs list under
            `architectures`.
    """

    name: str
    rules: tuple[Rule, ...]
    recognises: Callable[[Config | None, Mapping[str, Shape]], bool]
    read_architecture: Callable[[Config | None, Mapping[str, Shape]], Architecture]
    write_config: Callable[[Architecture], dict[str, Any]]
    config_file: str
    ignored: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    modes: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise a `ValueError` that names the options that models of this family do not have, and why."""
        if unknown := sorted(set(options) - set(self.options)):
            given = ", ".join(f"{name}={options[name]!r}" for name in unknown)
            reasons = " and ".join(_NOT_OPEN[name] for name in unknown)
            raise ValueError(
                f"{given} does not apply to a checkpoint of the family {self.name!r}, {reasons}. Leave out "
                f"{', '.join(f'{name}=' for name in unknown)}"
            )

    def check_used(self, options: Mapping[str, Any], architecture: Architecture) -> None:
        """Raise a `ValueError` that names an option that the model does not have in the mode in which it is read."""
        size = options.get("block_size")
        if size is not None and size < architecture.n_ctx and architecture.causal_block != size:
            raise ValueError(
                f"block_size={size} is not used: in the mode in which this checkpoint is read, it is "
                f"{architecture.attention_dir} and has no blocks. Leave block_size= out, or pass mode='block'"
            )
        mask = options.get("mask_token_id")
        if mask is not None and architecture.mask_token_id != mask:
            raise ValueError(
                f"mask_token_id={mask} is not used: in the mode in which this checkpoint is read, it is causal and has "
                "no [MASK]. Leave mask_token_id= out, or pass another mode="
            )


def require_count(key: str, count: object, family: str) -> None:
    """Raise a `ValueError` unless `count` is an int, at least 1; a bool is refused."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{key}={count!r} in the {family} config must be a whole number, at least 1")


def require_keys(config: Config, required: Sequence[str], known: Collection[str], family: str) -> None:
    """Raise a `ValueError` that names the required keys that a config lacks, or its keys that are not known."""
    if missing := [key for key in required if key not in config]:
        raise ValueError(f"the {family} config lacks {missing}; add them")
    if unknown := sorted(map(str, set(config) - set(known))):
        raise ValueError(
            f"the {family} config has keys that are not understood: {unknown}; remove them only if they change nothing "
            "in the network"
        )


def require_fixed(config: Config, fixed: Mapping[str, Sequence[Any]], family: str) -> None:
    """Raise a `ValueError` that names a key whose value is not one of those that our network supports."""
    for key, allowed in fixed.items():
        if key in config and config[key] not in allowed:
            raise ValueError(
                f"{key}={config[key]!r} is not supported in the {family} family: it must be {allowed[0]!r}"
            )
