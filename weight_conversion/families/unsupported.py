"""Kinds of checkpoints that are known by sight and refused, because our network would compute something else.

Several of them carry the model type or the tensor names of a supported family: a block-diffusion model made from Qwen3
holds the very tensors of one that sees its whole canvas. So a checkpoint is held against this table before any family
reads it, by everything that tells the kind: model type, class names, keys of the config, tensors, and, where the config
is silent, the name under which it is published.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath

from weight_conversion.architecture import Shape
from weight_conversion.families.family import Config

_HUGGING_FACE = {"model_type", "architectures"}
FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".json")


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint that no family here reads.

    Attributes:
        what: the kind, as "a block-diffusion model".
        lacks: what the network built here would need.
        model_types: values of `model_type`.
        classes: pattern of a name in `architectures`.
        keys: keys of the config that only this kind sets. A config that gives one as null, 0 or false denies the kind.
        tensors: patterns of tensor names.
        published: pattern of the names of checkpoints whose config does not tell.
    """

    what: str
    lacks: str
    model_types: tuple[str, ...] = ()
    classes: str = r"(?!)"
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    published: str = r"(?!)"

    def evidence(self, config: Config, shapes: Mapping[str, Shape], names: Sequence[str], beside: Config) -> str | None:
        """What shows that a checkpoint is of this kind, or `None`.

        Its config speaks first; where that neither says nor denies the kind, the one beside the checkpoint and its
        names do.
        """
        for tensor in shapes:
            if any(fnmatchcase(tensor, pattern) for pattern in self.tensors):
                return f"it holds {tensor}"
        if not _HUGGING_FACE & set(config):  # its keys mean other things
            return None
        if said := self._said(config):
            return f"its config says {said}"
        if any(key in config for key in self.keys):
            return None
        if said := self._said(beside):
            return f"the config.json beside it says {said}"
        told = [name for name in names if re.search(self.published, name, re.IGNORECASE)]
        return f"its name is {told[0]!r}" if told else None

    def _said(self, config: Config) -> str | None:
        """The setting of a config of Hugging Face's that tells the kind."""
        if not _HUGGING_FACE & set(config):
            return None
        if config.get("model_type") in self.model_types:
            return f"model_type={config['model_type']!r}"
        for key in ("architectures", "auto_map"):  # a list of classes, or one; the files and classes of its own code
            if re.search(self.classes, str(config.get(key))):
                return f"{key}={config[key]!r}"
        return next((f"{key}={config[key]!r}" for key in self.keys if config.get(key)), None)


KINDS = (
    Kind(
        "a block-diffusion model",
        "it sees finished blocks and its own, never the blocks after it, and our masked diffusion models see the whole "
        "canvas",
        model_types=(
            "sdar",
            "sdar_moe",
            "bd3lm",
            "Fast_dLLM_Qwen",
            "llada2_moe",
            "nemotron_labs_diffusion",
        ),
        classes=r"SDAR|BD3LM|OPDLM|Fast_?dLLM|LLaDA2|NemotronLabsDiffusion|DiffEncoderModel",
        keys=("block_size", "bd_size", "block_length", "dlm_paradigm"),
        published=r"(?<![a-z])(bd3-?lm|opdlm|sdar|fast[-_]?dllm|block[-_]?diffusion)(?![a-z])",
    ),
    Kind(
        "a mixture of experts",
        "its MLPs are chosen by a router, and our MLPs are dense",
        model_types=("lladamoe", "llada2_moe", "sdar_moe"),
        classes=r"MoE|Moe",
        keys=("num_experts", "n_routed_experts", "num_local_experts", "expert_intermediate_size"),
        tensors=("*.mlp.experts.0.*", "*.mlp.experts.*.weight"),
    ),
    Kind(
        "a diffusion transformer (DiT)",
        "its blocks have LayerNorms that the time modulates, and our blocks have RMSNorms and know no time",
        model_types=("mdlm", "udlm", "duo", "gidd", "bd3lm"),
        classes=r"\b(MDLM|UDLM|BD3LM|DUO|SEDD|RADD|Gidd)",
        tensors=("*blocks.0.adaLN_modulation.weight", "*vocab_embed.embedding"),
    ),
    Kind(
        "a model with uniform noise and self-conditioning",
        "it has no [MASK], and our masked diffusion models have one",
        model_types=("diffusion_gemma",),
        classes=r"DiffusionGemma",
    ),
    Kind(
        "a diffusion model under a causal model's config",
        "it sees both ways or by blocks, and its config describes a causal model",
        classes=r"(?<!A2D)Diffusion(?!Gemma)|DLM|MaskedLM|TraDo",
        published=r"diffullama|diffugpt",
    ),
)


def refuse_unsupported(
    config: Config | None,
    shapes: Mapping[str, Shape],
    source: str,
    config_path: str | None = None,
    beside: Config | None = None,
) -> None:
    """Raise a `ValueError` that says what a checkpoint is, if it is of a kind that no family here reads.

    Args:
        source: the checkpoint's path, or the repository it comes from.
        config_path: where its config was read, if that was a file of the caller's choice.
        beside: the config.json beside the checkpoint, if `config` is another one.
    """
    said = config or {}
    names = _names(said, source, config_path)
    found = [(kind, evidence) for kind in KINDS if (evidence := kind.evidence(said, shapes, names, beside or {}))]
    if not found:
        return
    kinds = ", and ".join(f"{kind.what} ({evidence})" for kind, evidence in found)
    lacks = "; ".join(f"as {kind.what}, {kind.lacks}" for kind, _ in found)
    cure = ""
    if any(evidence.startswith("its name") for _, evidence in found):
        cure = ". If it is not of this kind, give its folder another name"
        cure += "".join(f', or let its config.json say "{kind.keys[0]}": null' for kind, _ in found if kind.keys)
    elif denied := [kind.keys[0] for kind, evidence in found if kind.keys and evidence.startswith("the config.json")]:
        cure = f'. If it is not of this kind, let the config that you pass say "{denied[0]}": null'
    raise ValueError(
        f"{source} is {kinds}. This is not supported, and read as another kind it would give wrong numbers: "
        f"{lacks}{cure}"
    )


def warn_if_silent(config: Config, source: str, config_path: str | None = None) -> None:
    """Warn where neither config nor name tells whether a model made from a causal one was trained by blocks."""
    made_from_causal = str(config.get("model_type")).startswith("a2d-")
    if not made_from_causal or set(KINDS[0].keys) & set(config):
        return
    if not any(re.search("mdlm", name, re.IGNORECASE) for name in _names(config, source, config_path)):
        warnings.warn(
            f"{source} is read as a model that sees its whole canvas. Its config does not say so, and models trained "
            "by blocks have the same one: if it is one of those, its numbers will be wrong. If it is not, add "
            '"block_size": null to its config.json, and this warning ends',
            stacklevel=4,
        )


def _names(config: Config, source: str, config_path: str | None) -> list[str]:
    """The names a checkpoint goes by: of its files and folders, of its repository in a cache, and in its config."""
    said = [config["_name_or_path"]] if isinstance(config.get("_name_or_path"), str) else []
    return [*dict.fromkeys(name for path in (source, config_path) if path for name in _names_in(path)), *said]


def _names_in(path: str) -> list[str]:
    """The last names of a path, as it is given and, where something lies there, in full and with its links followed."""
    spellings = [path, os.path.abspath(path), os.path.realpath(path)] if os.path.exists(path) else [path]
    names = []
    for spelling in spellings:
        parts = PurePath(spelling.rstrip("()'")).parts
        names += [part for part in parts if part.startswith("models--")]
        names += parts[-2:] if PurePath(spelling).suffix in FILE_SUFFIXES else parts[-1:]
    return names
