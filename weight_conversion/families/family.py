"""`Family`, the description of one kind of checkpoint, and what the families share in reading a config.

Each key of a config is read, must have a fixed value, is ignored, or is an error (`ConfigKeys`). The keys with a fixed
value switch on what our network does not do, such as sliding windows. `registry.py` lists the families.
One family is here, that of our own layout, which `HookedDiffusionTransformer.save_pretrained` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from weight_conversion.architecture import (
    SCALINGS,
    Architecture,
    Scaling,
    Shape,
    is_positive,
    scaling_data,
    scaling_from,
)
from weight_conversion.key_map import OUR_NAMES, Rule

Config = Mapping[str, Any]

# Patterns of ignored keys: they concern names, code, files, training or generation, or token ids that the tokenizer
# contains, but not the network.
SILENT = (
    *("*name_or_path", "model_name", "_commit_hash", "architectures", "auto_map", "is_llama_config", "unsloth_*"),
    *("transformers.js_config", "transformers_version", "tokenizer_class", "task_specific_params", "problem_type"),
    *("dtype", "torch_dtype", "torchscript", "use_bfloat16", "tf_legacy_loss", "*attn_implementation*"),
    *("_flash_attn_2_enabled", "use_flash_attention*", "base_model_*_plan", "keys_to_ignore_at_inference"),
    *("*dropout", "*_pdrop", "initializer_range", "gradient_checkpointing*", "use_gradient_checkpointing"),
    *("pretraining_tp", "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict"),
    *(
        "use_cache",
        "cache_implementation",
        "is_decoder",
        "is_encoder_decoder",
        "model_max_length",
        "router_aux_loss_coef",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id"),
    *("decoder_start_token_id", "id2label", "label2id", "num_labels", "finetuning_task", "classifier_dropout_prob"),
    # Settings of generation, which old versions of transformers keep in the config of the model.
    *("max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("*no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate"),
    *("forced_*_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "*suppress_tokens", "prefix"),
    "block_size",  # null: not trained by blocks. `check` refuses any other value unless the family reads it.
)
# Switches of parts that our networks do not have, with the values that leave them off.
OFF: dict[str, Sequence[Any]] = {
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False, None),
    "tie_encoder_decoder": (False, None),
    "use_sliding_window": (False, None),
}
# The option that names further keys as ignored. `open_checkpoint` puts it into the config with the other options.
IGNORED_KEYS = "ignore_config_keys"
# Keys of sizes that the configs of transformers share.
SIZES = {
    "hidden_size": "d_model",
    "max_position_embeddings": "n_ctx",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "vocab_size": "d_vocab",
}
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
# Model types of diffusion models that were made from a causal model begin so.
DIFFUSION = "a2d-"
_NOT_OF_SCALING = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Sections of a nested config that describe the training and its data.
_OF_TRAINING = {"data", "eval", "gpt_dir", "ngpus", "optim", "outdir", "sampling", "training", "hydra", "work_dir"}
# Why a family does not take an option, in the words that follow its name.
_NOT_OPEN = {
    "block_size": "whose config already says which positions see each other",
    "mode": "which is read in one mode only",
    "mask_token_id": "whose config says whether there is a [MASK], and which token it is",
    IGNORED_KEYS: "whose config has no unknown keys",
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
        options: The arguments of `open_checkpoint` that its config may be completed with, of "block_size", "mode",
            "mask_token_id" and "ignore_config_keys"; `read_architecture` finds them under these keys of the config.
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


@dataclass(frozen=True)
class ConfigKeys:
    """The keys that a family's config may have, and the fields of an architecture that they give.

    A mapping is from keys to fields; `None` is a key that the family reads in a way of its own.

    Attributes:
        family: Name of the family, for messages.
        counts: Required keys whose values are whole numbers, at least 1.
        optional: Keys of such numbers that may be absent or null.
        flags: Keys whose values are true, false, absent or null.
        read: Other keys that are read if present.
        fixed: Keys with the values that our network supports; the first one is written on export.
        ignored: Keys that do not affect the network, in addition to `SILENT` and, if they are off, `OFF`.
        name: Key of the model's name.
    """

    family: str
    counts: Mapping[str, str | None]
    optional: Mapping[str, str | None] = field(default_factory=dict)
    flags: Mapping[str, str | None] = field(default_factory=dict)
    read: tuple[str, ...] = ()
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    name: str = "_name_or_path"

    def fields(self, config: Config) -> dict[str, Any]:
        """The fields of an architecture that the keys give, those of one head by default those of all."""
        numbers = {name: config[key] for key, name in {**self.counts, **self.optional}.items() if config.get(key)}
        flags = {name: bool(config.get(key, False)) for key, name in self.flags.items()}
        given = {name: value for name, value in {**numbers, **flags}.items() if name is not None}
        heads = {"n_key_value_heads": given["n_heads"], "d_head": given["d_model"] // given["n_heads"]}
        name = str(config.get(self.name) or config.get("model_type") or self.family)
        return {"name": name, "d_vocab_out": given.get("d_vocab"), **heads, **given}

    def of(self, architecture: Architecture) -> dict[str, Any]:
        """The keys of these fields: the inverse of `fields`."""
        named = {self.name: "name", **self.counts, **self.optional, **self.flags}
        return {key: getattr(architecture, name) for key, name in named.items() if name is not None}

    @property
    def written(self) -> dict[str, Any]:
        """The keys with a fixed value, as they are written on export."""
        return {key: allowed[0] for key, allowed in self.fixed.items()}

    def check(self, config: Config) -> None:
        """Raise a `ValueError` that names keys that are missing, unknown, or have a value that is not supported."""
        fixed = {**OFF, **self.fixed}
        read = {*self.counts, *self.optional, *self.flags, *self.read, *fixed, *self.ignored, IGNORED_KEYS}
        others = [key for key in map(str, config) if key not in read]
        unknown = sorted(key for key in others if not any(fnmatchcase(key, pattern) for pattern in SILENT))
        ignored = config.get(IGNORED_KEYS, ())
        if useless := [key for key in ignored if key not in others]:
            near = get_close_matches(useless[0], unknown, n=1)
            raise ValueError(
                f"{IGNORED_KEYS} names {useless[0]!r}, and "
                + (f"the {self.family} family reads it" if useless[0] in config else "the config has no such key")
                + (f" (nearest: {near[0]!r})" if near else f"; the unknown keys are {unknown}")
            )
        if missing := [key for key in self.counts if key not in config]:
            raise ValueError(f"the {self.family} config lacks {missing}; add them")
        if config.get("quantization_config") and "quantization_config" in set(unknown).difference(ignored):
            raise ValueError(
                f"the {self.family} config has a quantization_config, and the weights of a quantised checkpoint are no "
                "floating-point numbers: convert it back to floating point first; if the file is converted already, "
                f"pass {IGNORED_KEYS}=['quantization_config']"
            )
        if unknown := [key for key in unknown if key not in ignored]:
            raise ValueError(
                f"the {self.family} config has keys that are not understood: {unknown}; only if they change nothing "
                f"in the network, pass {IGNORED_KEYS}={unknown}"
            )
        if config.get("block_size") is not None and "block_size" not in (*self.read, *self.counts):
            raise ValueError(
                f"block_size={config['block_size']!r}: models of the {self.family} family that were trained by blocks "
                "are not supported"
            )
        for key in (*self.counts, *(key for key in self.optional if config.get(key) is not None)):
            count = config[key]
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{key}={count!r} in the {self.family} config must be a whole number, at least 1")
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
        for key, allowed in fixed.items():
            if key in config and config[key] not in allowed:
                raise ValueError(
                    f"{key}={config[key]!r} is not supported in the {self.family} family: it must be {allowed[0]!r}"
                )


def flattened(config: Config) -> dict[str, Any]:
    """The values of a config: of one in sections by "section.key", without those of the training and its data."""
    if "model_type" in config:
        return dict(config)
    values: dict[str, Any] = {}
    for key, value in config.items():
        if key not in _OF_TRAINING:
            inner = isinstance(value, Mapping)
            values |= {f"{key}.{name}": each for name, each in value.items()} if inner else {key: value}
    return values


def by_model_type(
    keys: ConfigKeys,
    rules: tuple[Rule, ...],
    read: Callable[[Config], Architecture],
    write: Callable[[Architecture], dict[str, Any]],
    classes: Mapping[str, str],
    *,
    where: Callable[[Config], bool] | None = None,
    **more: Any,
) -> Family:
    """A family of Hugging Face's `config.json`, recognised by the model types that `classes` has as keys.

    `where` tells families of one model type apart; the other arguments are those of `of_config`.
    """

    def recognises(config: Config) -> bool:
        return config.get("model_type") in classes and (where is None or where(config))

    return of_config(keys, rules, recognises, read, write, classes=classes, **more)


def of_config(
    keys: ConfigKeys,
    rules: tuple[Rule, ...],
    recognises: Callable[[Config], bool],
    read: Callable[[Config], Architecture],
    write: Callable[[Architecture], dict[str, Any]],
    *,
    options: tuple[str, ...] = (),
    values_of: Callable[[Config], Config] | None = None,
    **more: Any,
) -> Family:
    """A family that its config.json shows without the tensors.

    `read` takes the values of the config after the check of its `keys`, those of `values_of`, by default `flattened`;
    `more` are further attributes of the `Family`.
    """
    more["options"] = (*options, IGNORED_KEYS)

    def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
        assert config is not None
        values = (values_of or flattened)(config)
        keys.check(values)
        return read(values)

    def recognised(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
        return config is not None and recognises(config)

    return Family(keys.family, rules, recognised, read_architecture, write, "config.json", **more)


def read_sizes(
    keys: ConfigKeys, config: Config, *, eps: float, base: float | None = None, turns_a_part: bool = False
) -> dict[str, Any]:
    """The fields of an architecture from the keys that the configs of transformers share.

    `eps` and `base` are the epsilon of the norms and the base of the rotary frequencies where the config has none. A
    family that `turns_a_part` of each head reads which one (`rotary_dim`); of another, the config may name no part.
    """
    if not turns_a_part and (share := rotary_share(config)) != 1:
        raise ValueError(
            f"partial_rotary_factor={share!r}: the {keys.family} family rotates all dimensions of a head, and leaving "
            "some as they are is not supported"
        )
    return {
        **keys.fields(config),
        "norm_eps": config.get("rms_norm_eps", eps),
        "rotary_base": rotary_base(config, base),
        "rotary_scaling": rotary_scaling(config),
        "rotation": "activation",
    }


def write_sizes(keys: ConfigKeys, a: Architecture) -> dict[str, Any]:
    """The inverse of `read_sizes`, with the keys of transformers 4, which 5 also reads."""
    scaling = a.rotary_scaling
    scaled = {} if scaling is None else {"rope_scaling": {"rope_type": scaling.rope_type, **scaling_data(scaling)}}
    return {**keys.of(a), "rms_norm_eps": a.norm_eps, "rope_theta": a.rotary_base, **scaled}


def may_lack_mask(config: Config) -> bool:
    """Whether the config is of a masked diffusion model that may leave the id of [MASK] to the tokenizer: one that was
    made from a causal model, or a mixture of experts."""
    from_causal = str(config.get("model_type")).startswith((DIFFUSION, "sdar")) or config.get("mode") == "bidirectional"
    return from_causal or bool(config.get("num_experts"))


def rotary_base(config: Config, default: float | None = None) -> float:
    """The base of the rotary frequencies, in the keys of transformers 4 (`rope_theta`) or 5 (`rope_parameters`)."""
    sections = (config, *_rope_sections(config).values())
    bases = [section["rope_theta"] for section in sections if "rope_theta" in section]
    if any(other != bases[0] for other in bases):
        raise ValueError(f"the config gives several bases of the rotary frequencies, {bases}; keep the correct one")
    base = bases[0] if bases else default
    if base is None or not is_positive(base):
        raise ValueError(f"rope_theta is {base!r}; the config must give the base of the rotary frequencies")
    return float(base)


def rotary_scaling(config: Config) -> Scaling | None:
    """The scaling of the rotary frequencies, under `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    found: dict[str, Scaling | None] = {}
    for name, section in _rope_sections(config).items():
        numbers = {key: value for key, value in section.items() if key not in _NOT_OF_SCALING}
        kind = _rope_type(section)
        found[name] = None if kind == "default" else scaling_from({**numbers, "rope_type": kind}, name)
    if len(set(found.values())) > 1:
        raise ValueError(f"{' and '.join(found)} differ in the scaling of the rotary frequencies; keep the correct one")
    return next(iter(found.values()), None)


def rotary_dim(config: Config, d_head: int, default: float = 1) -> int | None:
    """Dimensions of each head that are rotated, `None` for all; `default` is their share if the config gives none."""
    share = rotary_share(config, default)
    return None if share == 1 else int(d_head * share)


def rotary_share(config: Config, default: float = 1) -> float:
    """The share of each head's dimensions that are rotated, in the keys of transformers 4 or 5 (`rope_parameters`)."""
    key = "partial_rotary_factor"
    sections = (config, *_rope_sections(config).values())
    shares = [section[key] for section in sections if section.get(key) is not None] or [default]
    if wrong := [share for share in shares if not is_positive(share) or share > 1]:
        raise ValueError(f"{key}={wrong[0]!r} must be a number above 0, at most 1")
    if any(share != shares[0] for share in shares):
        raise ValueError(f"the config gives several shares of rotated dimensions, {shares}; keep the correct one")
    return float(shares[0])


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


FORMAT = "diffusion_lens"


def _is_ours(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return (
        config is not None
        and config.get("format") == FORMAT
        and bool({"embed.weight", "ln_final.weight"} & set(shapes))
    )


def _read_ours(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    if config is None or not isinstance(config.get("architecture"), Mapping):
        raise ValueError(f"a {FORMAT} folder needs its config.json with 'architecture', a mapping; save it again")
    return Architecture.from_dict(config["architecture"])


def _write_ours(architecture: Architecture) -> dict[str, Any]:
    return {"format": FORMAT, "architecture": architecture.to_dict()}


FAMILIES = (Family(FORMAT, OUR_NAMES, _is_ours, _read_ours, _write_ours, config_file="config.json"),)
