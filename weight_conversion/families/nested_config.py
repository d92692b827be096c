"""The keys of a config in sections, as a training script wrote it with the checkpoint.

The keys of the sections that describe the network are read, must have a fixed value, are ignored, or are an error. The
sections of the training and of its data are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weight_conversion.families.family import Config, require_count

_OF_TRAINING = {"data", "eval", "gpt_dir", "ngpus", "optim", "outdir", "sampling", "training", "hydra", "work_dir"}


@dataclass(frozen=True)
class NestedKeys:
    """The keys that a family's config may have, those of a section as "section.key".

    Attributes:
        family: Name of the family, for messages.
        counts: Required keys whose values are whole numbers, at least 1.
        read: Other keys that are read if present.
        fixed: Keys with the values that our network supports.
        ignored: Keys that do not affect the network.
    """

    family: str
    counts: tuple[str, ...]
    read: tuple[str, ...] = ()
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def read_values(self, config: Config) -> dict[str, Any]:
        """The values by key; a `ValueError` names keys that are missing, unknown, or not supported."""
        values: dict[str, Any] = {}
        for key, value in config.items():
            if key in _OF_TRAINING:
                continue
            if isinstance(value, Mapping):
                values |= {f"{key}.{name}": inner for name, inner in value.items()}
            else:
                values[key] = value
        if missing := [key for key in self.counts if key not in values]:
            raise ValueError(f"the {self.family} config lacks {missing}; add them")
        known = {*self.counts, *self.read, *self.fixed, *self.ignored}
        if unknown := sorted(map(str, set(values) - known)):
            raise ValueError(
                f"the {self.family} config has keys that are not understood: {unknown}; remove them only if they "
                "change nothing in the network"
            )
        for key in self.counts:
            require_count(key, values[key], self.family)
        for key, allowed in self.fixed.items():
            if key in values and values[key] not in allowed:
                raise ValueError(
                    f"{key}={values[key]!r} is not supported in the {self.family} family: it must be {allowed[0]!r}"
                )
        return values
