"""The keys of a Hugging Face `config.json`: each is read, must have a fixed value, is ignored, or is an error.

The keys with a fixed value switch on what our network does not do, such as sliding windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weight_conversion.architecture import Architecture
from weight_conversion.checks import LARGEST
from weight_conversion.families.family import Config, require_count, require_fixed, require_keys
from weight_conversion.rotary_scaling import SCALINGS, Scaling, scaling_data, scaling_from

# Ignored keys: they concern code, files and training, or token ids that the tokenizer contains, but not the network.
SILENT = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "block_size",  # null: not trained by blocks. `check` refuses any other value unless the family reads it.
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
# Model types of diffusion models that were made from a causal model begin so.
DIFFUSION = "a2d-"
_NOT_OF_SCALING = {"rope_type", "type", "rope_theta"}


@dataclass(frozen=True)
class ConfigKeys:
    """The keys that a family's config may have.

    Attributes:
        family: Name of the family, for messages.
        counts: Required keys whose values are whole numbers, at least 1.
        optional: Keys of such numbers that may be absent or null.
        flags: Keys whose values are true, false, absent or null.
        read: Other keys that are read if present.
        fixed: Keys with the values that our network supports; the first one is written on export.
        ignored: Keys that do not affect the network, in addition to `SILENT`.
    """

    family: str
    counts: tuple[str, ...]
    optional: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def check(self, config: Config) -> None:
        """Raise a `ValueError` that names keys that are missing, unknown, or have a value that is not supported."""
        known = {*self.counts, *self.optional, *self.flags, *self.read, *self.fixed, *self.ignored, *SILENT}
        require_keys(config, self.counts, known, self.family)
        if config.get("block_size") is not None and "block_size" not in self.read:
            raise ValueError(
                f"block_size={config['block_size']!r}: models of the {self.family} family that were trained by blocks "
                "are not supported"
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
        if other := sorted({str(layer_type) for layer_type in layer_types} - {"full_attention"}):
            raise ValueError(f"layer_types in the {self.family} config names {other}; only full_attention is supported")
        require_fixed(config, self.fixed, self.family)


def may_lack_mask(config: Config) -> bool:
    """Whether the config is of a masked diffusion model that may leave the id of [MASK] to the tokenizer: one that was
    made from a causal model, or a mixture of experts."""
    from_causal = str(config.get("model_type")).startswith((DIFFUSION, "sdar")) or config.get("mode") == "bidirectional"
    return from_causal or bool(config.get("num_experts"))


def rotary_base(config: Config, default: float | None = None) -> float:
    """The base of the rotary frequencies, in the keys of transformers 4 (`rope_theta`) or 5 (`rope_parameters`).

    Args:
        default: Base of a family whose old configs do not give it.

    Raises:
        ValueError: The config gives several bases or none; or as in `rotary_scaling`.
    """
    sections = (config, *_rope_sections(config).values())
    bases = [section["rope_theta"] for section in sections if "rope_theta" in section]
    if any(other != bases[0] for other in bases):
        raise ValueError(f"the config gives several bases of the rotary frequencies, {bases}; keep the correct one")
    base = bases[0] if bases else default
    if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < LARGEST:
        raise ValueError(f"rope_theta is {base!r}; the config must give the base of the rotary frequencies")
    return float(base)


def rotary_scaling(config: Config) -> Scaling | None:
    """The scaling of the rotary frequencies, in the keys of transformers 4 (`rope_scaling`) or 5 (`rope_parameters`).

    Raises:
        ValueError: The scaling is of a type that our network does not support, a key is unknown or missing, a number
            does not fit, or the config gives several scalings.
    """
    found: dict[str, Scaling | None] = {}
    for name, section in _rope_sections(config).items():
        numbers = {key: value for key, value in section.items() if key not in _NOT_OF_SCALING}
        kind = _rope_type(section)
        found[name] = None if kind == "default" else scaling_from({**numbers, "rope_type": kind}, name)
    if len(set(found.values())) > 1:
        raise ValueError(f"{' and '.join(found)} differ in the scaling of the rotary frequencies; keep the correct one")
    return next(iter(found.values()), None)


def rotary_dim(config: Config, d_head: int, default: float = 1) -> int | None:
    """Dimensions of each head that are rotated; `None` for all.

    Args:
        default: Their share in all dimensions where the config does not give it.
    """
    share = config.get("partial_rotary_factor", default)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor={share!r} must be a number above 0, at most 1")
    return None if share == 1 else int(d_head * share)


def write_rotary(architecture: Architecture) -> dict[str, Any]:
    """The inverse of `rotary_base` and `rotary_scaling`, with the keys of transformers 4, which 5 also reads."""
    scaling = architecture.rotary_scaling
    scaled = {} if scaling is None else {"rope_scaling": {"rope_type": scaling.rope_type, **scaling_data(scaling)}}
    return {"rope_theta": architecture.rotary_base, **scaled}


def _rope_sections(config: Config) -> dict[str, Mapping[str, Any]]:
    """The mappings with rotary settings by their keys, each of a type that is supported."""
    sections = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    for name, section in sections.items():
        kind = _rope_type(section) if isinstance(section, Mapping) else section
        if not isinstance(section, Mapping) or kind not in ("default", *SCALINGS):
            raise ValueError(
                f"{name} says {kind!r}: of the scaled rotary frequencies only those of the types "
                f"{', '.join(SCALINGS)} are supported"
            )
        if kind == "default" and (unknown := sorted(map(str, set(section) - _NOT_OF_SCALING))):
            raise ValueError(f"{name} has keys that are not understood: {unknown}")
    return sections


def _rope_type(section: Mapping[str, Any]) -> Any:
    return section.get("rope_type", section.get("type", "default"))


def mask_token_id(config: Config, family: str) -> int:
    """The id of [MASK], which the config of a masked diffusion model must give."""
    mask = config.get("mask_token_id")
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise ValueError(
            f"mask_token_id is {mask!r} in the {family} config; a masked diffusion model needs it: look up the id of "
            "its [MASK] token in the tokenizer, and pass mask_token_id=, or pass the config with that id as a mapping"
        )
    return mask


def mode_of(config: Config, family: str, modes: Sequence[str], default: str | None) -> str:
    """The mode in which a checkpoint that is several models is read: of `mode=`, which its config may also name."""
    mode = config.get("mode", default)
    if mode not in modes:
        raise ValueError(
            f"mode is {mode!r}, and a checkpoint of the family {family!r} is read in one of the modes "
            f"{', '.join(map(repr, modes))}: pass one of them as mode="
        )
    return str(mode)
