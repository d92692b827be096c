"""The keys of a config in sections, as a training script wrote it with the checkpoint.

The keys of the sections that describe the network are read, must have a fixed value, are ignored, or are an error. The
sections of the training and of its data are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weight_conversion.families.family import Config, require_count, require_fixed, require_keys

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
        known = {*self.counts, *self.read, *self.fixed, *self.ignored}
        require_keys(values, self.counts, known, self.family)
        for key in self.counts:
            require_count(key, values[key], self.family)
        require_fixed(values, self.fixed, self.family)
        return values
