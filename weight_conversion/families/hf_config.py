"""A `config.json` as Hugging Face writes it: a key is read, must say one thing, says nothing for us, or is an error.

What must say one thing are the switches for what our network does not do, such as rotary scaling or sliding windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weight_conversion.architecture import LARGEST
from weight_conversion.families.family import Config, require_count

# They name code, files and habits of training, or ids that the tokenizer holds; the network does not ask them.
SILENT = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "block_size",  # null: not trained by blocks. Any other is refused by the table of what is not supported.
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
)
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class ConfigKeys:
    """What a family's config may say.

    Attributes:
        family: for messages.
        counts: keys that must be there, whole numbers of at least 1.
        optional: keys of such numbers that may be left out, or null.
        flags: keys that are true or false, and may be left out, or null.
        read: other keys that are read where they are there.
        fixed: keys with the values that our network is built for, the one to write first.
        ignored: keys that change nothing in the network, beside `SILENT`.
    """

    family: str
    counts: tuple[str, ...]
    optional: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def check(self, config: Config) -> None:
        """Raise a `ValueError` that names what is missing, not understood, or not what our network does."""
        if missing := [key for key in self.counts if key not in config]:
            raise ValueError(f"the {self.family} config lacks {missing}; add them")
        known = {*self.counts, *self.optional, *self.flags, *self.read, *self.fixed, *self.ignored, *SILENT}
        if unknown := sorted(map(str, set(config) - known)):
            raise ValueError(
                f"the {self.family} config has keys that are not understood: {unknown}; remove them only if they "
                "change nothing in the network"
            )
        for key in (*self.counts, *(key for key in self.optional if config.get(key) is not None)):
            require_count(key, config[key], self.family)
        for key in self.flags:
            if not isinstance(config.get(key), bool | None):
                raise ValueError(f"{key}={config[key]!r} in the {self.family} config must be true or false")
        layer_types = config.get("layer_types") or []
        if not isinstance(layer_types, Sequence) or isinstance(layer_types, str):
            raise ValueError(
                f"layer_types={layer_types!r} in the {self.family} config must be a list, one for each layer"
            )
        if other := sorted({str(each) for each in layer_types} - {"full_attention"}):
            raise ValueError(f"layer_types in the {self.family} config names {other}; only full_attention is supported")
        for key, allowed in self.fixed.items():
            if key in config and config[key] not in allowed:
                raise ValueError(
                    f"{key}={config[key]!r} is not supported in the {self.family} family: it must be {allowed[0]!r}"
                )


def rotary_base(config: Config, default: float | None = None) -> float:
    """The base of the rotary frequencies, as transformers 4 (`rope_theta`) or 5 (`rope_parameters`) keeps it.

    Args:
        default: of a family whose old configs leave it out.

    Raises:
        ValueError: scaled frequencies, which our rotary does not do, a key not understood, several bases or none.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    for name, kind in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        said = kind.get("rope_type", kind.get("type", "default")) if isinstance(kind, Mapping) else kind
        if said != "default":
            raise ValueError(f"{name} says {said!r}: scaled rotary frequencies are not supported")
        if unknown := sorted(map(str, set(kind) - {"rope_type", "type", "rope_theta"})):
            raise ValueError(f"{name} has keys that are not understood: {unknown}")
    bases = [each["rope_theta"] for each in (config, parameters, scaling) if "rope_theta" in each]
    if any(other != bases[0] for other in bases):
        raise ValueError(f"the config gives several bases of the rotary frequencies, {bases}; keep the one that holds")
    base = bases[0] if bases else default
    if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < LARGEST:
        raise ValueError(f"rope_theta is {base!r}; the config must give the base of the rotary frequencies")
    return float(base)


def mask_token_id(config: Config, family: str) -> int:
    """The id of [MASK], which a masked diffusion model cannot do without."""
    mask = config.get("mask_token_id")
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise ValueError(
            f"mask_token_id is {mask!r} in the {family} config; a masked diffusion model needs it: look its token up "
            "in the tokenizer, and pass the config with it as a mapping"
        )
    return mask
