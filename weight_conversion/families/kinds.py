"""What a checkpoint is where its model type or tensor names do not say: refused kinds, and the size of blocks.

Several kinds of checkpoints for which our network would compute something else have the model type or the tensor names
of a supported family. Every checkpoint is therefore compared with `KINDS` before a family reads it, by model type,
class names, keys of the config, tensors, and, if the config does not decide, the name under which it was published.

A model trained by blocks has the tensors of one whose positions see the whole canvas, and often its config too. Read
with another number of positions in a block, it computes something else without an error, so the number is never
guessed: it is in the config ("block_size"), in the published name, or the caller gives it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import PurePath
from typing import Any

from weight_conversion.architecture import Shape
from weight_conversion.families.family import DIFFUSION, Config

_HUGGING_FACE = {"model_type", "architectures"}
FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".json")


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint that no family here supports.

    Attributes:
        what: Name of the kind, such as "a block-diffusion model".
        difference: How it differs from the network built here.
        model_types: Values of `model_type`.
        classes: Pattern of the names in `architectures`.
        keys: Keys of the config that only this kind sets. A config with one of them as null, 0 or false rules the kind
            out.
        tensors: Patterns of tensor names.
        published: Pattern of the published names of checkpoints whose config does not show the kind.
        supported: Values of `model_type` of the checkpoints of this kind that a family supports.
        settled_by: Keys of the config, or arguments of `from_pretrained`, that say what the checkpoint is.
        supported_names: Pattern of the published names of checkpoints that a family supports.
    """

    what: str
    difference: str
    model_types: tuple[str, ...] = ()
    classes: str = r"(?!)"
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    published: str = r"(?!)"
    supported: tuple[str, ...] = ()
    settled_by: tuple[str, ...] = ()
    supported_names: str = r"(?!)"

    def evidence(self, config: Config, shapes: Mapping[str, Shape], names: Sequence[str], beside: Config) -> str | None:
        """The evidence that a checkpoint is of this kind, or `None`.

        The tensors and the config decide first. If they neither show the kind nor rule it out, the config.json beside
        the checkpoint decides, then the checkpoint's names.
        """
        if config.get("model_type") in self.supported or any(key in config for key in self.settled_by):
            return None
        if any(re.search(self.supported_names, name, re.IGNORECASE) for name in names):
            return None
        for tensor in shapes:
            if any(fnmatchcase(tensor, pattern) for pattern in self.tensors):
                return f"it contains {tensor}"
        if not _HUGGING_FACE & set(config):  # not a config of Hugging Face's: its keys have other meanings
            return None
        if setting := self._setting_in(config):
            return f"its config says {setting}"
        if any(key in config for key in self.keys):
            return None
        if setting := self._setting_in(beside):
            return f"the config.json beside it says {setting}"
        matching = [name for name in names if re.search(self.published, name, re.IGNORECASE)]
        return f"its name is {matching[0]!r}" if matching else None

    def _setting_in(self, config: Config) -> str | None:
        """The setting of a Hugging Face config that shows the kind, as text."""
        if not _HUGGING_FACE & set(config):
            return None
        if config.get("model_type") in self.model_types:
            return f"model_type={config['model_type']!r}"
        for key in ("architectures", "auto_map"):  # class names, and the classes of custom code
            if re.search(self.classes, str(config.get(key))):
                return f"{key}={config[key]!r}"
        return next((f"{key}={config[key]!r}" for key in self.keys if config.get(key)), None)


KINDS = (
    Kind(
        "a block-diffusion model of another kind",
        "its blocks or the way in which they are seen differ from those of the families here",
        classes=r"Fast_?dLLM|LLaDA2|DiffEncoderModel",
        keys=("bd_size", "block_length", "dlm_paradigm"),
        published=r"(?<![a-z])fast[-_]?dllm(?![a-z])",
        supported=("nemotron_labs_diffusion", "llada2_moe", "Fast_dLLM_Qwen"),
    ),
    Kind(
        "a model that inserts and deletes tokens (LLaDA2.2)",
        "the length of its canvas changes, and ours has one length",
        keys=("delete_token_id", "split_token_id"),
        published=r"(?<![a-z])llada-?2\.2(?!\d)",
    ),
    Kind(
        "a mixture of experts",
        "its router, or which positions see each other, is another than in the mixtures of experts that are supported",
        classes=r"(?<!LLaDA)(MoE|Moe)",
        keys=("num_experts", "n_routed_experts", "num_local_experts"),
        tensors=("model.*.mlp.experts.*",),
        supported=("llada", "lladamoe", "llada2_moe", "rnd1", "sdar_moe"),
    ),
    Kind(
        "a diffusion transformer (DiT) of another kind",
        "its noise mixes [MASK] with other tokens",
        model_types=("gidd",),
        classes=r"\bGidd",
    ),
    Kind(
        "a diffusion model under a causal model's config",
        "its attention is bidirectional or by blocks, and its config describes a causal model",
        classes=r"(?<!A2D)Diffusion|(?<!OP)DLM|MaskedLM|TraDo",
        published=r"diffullama|diffugpt|open-?dcoder",
        supported=(
            *("nemotron_labs_diffusion", "diffusion_gemma", "Fast_dLLM_Qwen", "mdlm", "udlm", "duo", "DUO", "bd3lm"),
            "rnd1",
        ),
        settled_by=("mode",),
    ),
    Kind(
        "an introspective diffusion model (I-DLM)",
        "its attention is causal and its logits are shifted by one, unlike those of SDAR, whose model type it has",
        classes=r"(?i:i_?dlm|introspective)",
        published=r"(?<![a-z])i-?dlm(?![a-z])|introspective",
    ),
    Kind(
        "a model with residual context (RCD)",
        "it also reads what the step before predicted, unlike SDAR, whose model type it has",
        classes=r"(?i:rcd|residual)",
        published=r"(?<![a-z])rcd(?![a-z])|residual[-_]?context",
    ),
    Kind(
        "one of several networks of one model type",
        "SDAR attends by blocks and predicts in place, I-DLM is causal and shifted, and RCD reads the step before; if "
        "it is SDAR, pass mode='block'",
        model_types=("sdar",),
        settled_by=("mode", "fuse_cross_entropy"),  # a key that the authors' own configs of SDAR have
        supported_names=r"(?<![a-z])sdar(?![a-z])",
    ),
)


BY_BLOCKS = Kind(
    "a block-diffusion model",
    "its positions see finished blocks and their own, never the blocks after them",
    model_types=("sdar", "sdar_moe", "llada2_moe"),
    classes=r"SDAR|BD3LM|OPDLM|StableDiffcoder",
    keys=("block_size",),
    published=r"(?<![a-z])(bd3-?lm|opdlm|sdar|stable-?diffcoder|block[-_]?diffusion)(?![a-z])",
)
# Published names that say the number of positions in a block. JetLM/SDAR writes other sizes than 4 into the name
# ("SDAR-4B-Chat-b16"); that of the names without one is in the training code's configs. All of LLaDA2 have one size.
_NAMED = (
    (r"(?<![a-z])sdar-.*-b(\d+)(?![\w.])", None),
    (r"(?<![a-z])sdar-(1\.7b|4b|8b|30b-a3b)-(chat|sci)$", 4),
    (r"(?<![a-z])opdlm(?![a-z])", 4),
    (r"(?<![a-z])stable-diffcoder-8b-(base|instruct)(?![a-z])", 4),
    (r"(?<![a-z])llada2\.[01]-(mini|flash)(?![a-z])", 32),
)


def refuse_unsupported(
    config: Config | None,
    shapes: Mapping[str, Shape],
    source: str,
    config_path: str | None = None,
    beside: Config | None = None,
) -> None:
    """Raise a `ValueError` if a checkpoint is of a kind that no family here supports; the message says which.

    Args:
        source: Path of the checkpoint, or its repository.
        config_path: Path of its config, if the caller passed one.
        beside: The config.json beside the checkpoint, if `config` is another one.
    """
    config = config or {}
    names = names_of(config, source, config_path)
    matches = [(kind, evidence) for kind in KINDS if (evidence := kind.evidence(config, shapes, names, beside or {}))]
    if not matches:
        return
    kinds = ", and ".join(f"{kind.what} ({evidence})" for kind, evidence in matches)
    differences = "; ".join(f"as {kind.what}, {kind.difference}" for kind, _ in matches)
    undecided = all(
        kind.settled_by and evidence.startswith(("its name", "its config says model_type"))
        for kind, evidence in matches
    )
    verdict = "Its config does not say how to read it" if undecided else "This is not supported"
    raise ValueError(
        f"{source} is {kinds}. {verdict}, and read as another kind it would give wrong numbers: {differences}"
        f"{_remedy(matches)}"
    )


def with_block_size(
    config: Config, source: str, config_path: str | None = None, beside: Config | None = None
) -> Config:
    """A config, with the number of positions in a block from the checkpoint's published name if it does not say it.

    The arguments are those of `refuse_unsupported`. A `ValueError` is raised if the checkpoint is a block-diffusion
    model, and nothing says how many positions a block has.
    """
    if config.get("block_size") is not None:
        return config
    names = names_of(config, source, config_path)
    evidence = BY_BLOCKS.evidence(config, {}, names, beside or {})
    if evidence is None:
        return config
    for name, (pattern, size) in product(names, _NAMED):
        if match := re.search(pattern, name, re.IGNORECASE):
            return {**config, "block_size": int(match[1]) if size is None else size}
    raise ValueError(
        f"{source} is {BY_BLOCKS.what} ({evidence}), and its config does not say how many positions a block has. Pass "
        "block_size=, the number with which it was trained. With any other number it would give wrong numbers: "
        f"{BY_BLOCKS.difference}{_remedy([(BY_BLOCKS, evidence)])}"
    )


def block_size(config: Config, *, required: bool = False) -> dict[str, Any]:
    """The fields of an architecture that say who sees whom in a masked diffusion model.

    A `ValueError` is raised if a block size is `required`, and the config does not say it.
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


def names_of(config: Config, source: str, config_path: str | None) -> list[str]:
    """The names of a checkpoint: of its files and folders, of its repository in a cache, and in its config."""
    given = [*dict.fromkeys(name for path in (source, config_path) if path for name in _names_in(path))]
    own_name = config.get("_name_or_path")
    # An export of a model without a name repeats the model type.
    return [*given, own_name] if isinstance(own_name, str) and own_name != config.get("model_type") else given


def _remedy(matches: Sequence[tuple[Kind, str]]) -> str:
    """What to do if a checkpoint is not of the kinds that its name, or the config beside it, shows it to be."""
    if any(evidence.startswith("its name") for _, evidence in matches):
        remedy = ". If it is not of this kind, give its folder another name"
        remedy += "".join(f', or let its config.json say "{kind.keys[0]}": null' for kind, _ in matches if kind.keys)
        return remedy + "".join(f"; if it is, pass {kind.settled_by[0]}=" for kind, _ in matches if kind.settled_by)
    keys = [kind.keys[0] for kind, evidence in matches if kind.keys and evidence.startswith("the config.json")]
    return f'. If it is not of this kind, let the config that you pass say "{keys[0]}": null' if keys else ""


def _names_in(path: str) -> list[str]:
    """The last parts of a path as it was given and, if it exists, of its absolute form and with links resolved."""
    spellings = [path, os.path.abspath(path), os.path.realpath(path)] if os.path.exists(path) else [path]
    names = []
    for spelling in spellings:
        parts = PurePath(spelling.rstrip("()'")).parts
        names += [part for part in parts if part.startswith("models--")]
        names += parts[-2:] if PurePath(spelling).suffix in FILE_SUFFIXES else parts[-1:]
    return names
