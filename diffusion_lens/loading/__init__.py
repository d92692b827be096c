"""From a name or a path to weights, config and tokenizer, and back to a folder. Nothing of a checkpoint is executed."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.catalogue import (
    EMBEDDED,
    EMBEDDED_LENGTH,
    PUBLISHED,
    REPOSITORIES,
    File,
    Repository,
    embedded_folder,
    unknown_name,
)
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.loading.hub import fetch_file, fetch_repository, fetch_tokenizer
from diffusion_lens.loading.own_config import folded_in, trained_length_in, write_own, write_trained_length
from diffusion_lens.loading.tokenizers import (
    TOKENIZER_FILES,
    check_special_ids,
    has_tokenizer,
    load_tokenizer,
    prepends_bos,
    read_mask,
    save_tokenizer,
)
from weight_conversion import CHECKPOINT_SUFFIXES, Architecture, Checkpoint, export, open_checkpoint, read_json_object
from weight_conversion.families.unsupported import refuse_unsupported

__all__ = [
    "TOKENIZER_FILES",
    "load_tokenizer",
    "open_pretrained",
    "save_pretrained",
    "save_tokenizer",
    "shape_of",
    "trained_length_of",
    "write_trained_length",
]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def open_pretrained(
    name_or_path: str | Path,
    *,
    config: str | Path | Mapping[str, Any] | None,
    tokenizer: Any,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    **hub: Any,
) -> tuple[DiffusionConfig, Checkpoint, Any]:
    """Config, checked checkpoint and tokenizer; the arguments are those of `from_pretrained`."""
    found = _locate(name_or_path, hub)
    if config is None:
        refuse_unsupported(found.config_beside, {}, str(found.path))
    loaded = _open_tokenizer(tokenizer, found, hub)
    if config is None:
        config = _completed_config(found, lambda: loaded)
    checkpoint = open_checkpoint(found.path, config)
    check_special_ids(loaded, checkpoint.architecture.d_vocab)
    read_mask(loaded, checkpoint.architecture.mask_token_id)
    cfg = DiffusionConfig.from_architecture(
        checkpoint.architecture,
        device=device,
        dtype=dtype,
        model_name=found.name,
        default_prepend_bos=loaded is None or prepends_bos(loaded),
        trained_length=found.trained_length or trained_length_in(config, found.folder),
        folded=folded_in(config, found.folder),
    )
    return cfg, checkpoint, loaded


def shape_of(name_or_path: str | Path, config: str | Path | Mapping[str, Any] | None = None) -> Architecture:
    """The architecture of what `from_pretrained` takes, without a download: from the catalogue, or the files' headers.

    Raises:
        ValueError: an unknown name, or no checkpoint.
        FileNotFoundError: nothing there, or the catalogue does not know its shape and it is not in the cache.
    """
    published = None if _exists(_path(name_or_path)) else _published(name_or_path)
    known = published.architecture if published else None
    if known is not None and config is None:
        return known
    found = _locate(name_or_path, {"local_files_only": True})
    if config is None:
        config = _completed_config(found, lambda: _open_tokenizer(None, found, {"local_files_only": True}))
    return open_checkpoint(found.path, config).architecture


def trained_length_of(name_or_path: str | Path, config: str | Path | Mapping[str, Any] | None = None) -> int | None:
    """`DiffusionConfig.trained_length` of what `from_pretrained` takes, without a download; `None` if unknown."""
    here = Path(name_or_path).expanduser()
    if here.exists():
        return trained_length_in(config, here if here.is_dir() else here.parent)
    if str(name_or_path).lower() in EMBEDDED:
        return EMBEDDED_LENGTH
    published = _published(name_or_path)
    return published.trained_length if published else None


def save_pretrained(
    folder: str | Path, tensors: Mapping[str, torch.Tensor], cfg: DiffusionConfig, tokenizer: Any
) -> Path:
    """Weights and config in our own layout, the tokenizer beside them; `from_pretrained(folder)` reads them.

    Raises:
        ValueError: `folder` is a file, holds other weights, or holds the tokenizer of another model while this one has
            none. Nothing is written then.
    """
    target = Path(folder).expanduser()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; save_pretrained needs a folder")
    if tokenizer is None and has_tokenizer(target):
        raise ValueError(
            f"{target} holds a tokenizer, and this model has none: loaded from there, the model would take that one. "
            "Name another folder, or delete the tokenizer's files. Nothing was written"
        )
    export(tensors, cfg.architecture, target / "model.safetensors", family="diffusion_lens")
    write_own(cfg, tensors, target)
    if tokenizer is not None:
        save_tokenizer(tokenizer, target, prepends_bos=cfg.default_prepend_bos)
    return target


@dataclass(frozen=True)
class _Found:
    """A checkpoint on this machine.

    Attributes:
        name: under which results record the model; `None` takes what its config says.
        known: what the catalogue knows of its config.
        tokenizer_elsewhere: whether its tokenizer lies in a repository of its own.
        trained_length: as the catalogue has it.
    """

    path: Path
    name: str | None = None
    known: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_elsewhere: bool = False
    trained_length: int | None = None

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def config_beside(self) -> Mapping[str, Any] | None:
        """Hugging Face's config beside it, if there is one."""
        path = self.folder / "config.json"
        settings = read_json_object(path) if path.exists() else None
        return settings if settings is not None and "model_type" in settings else None


def _locate(name_or_path: str | Path, hub: Mapping[str, Any]) -> _Found:
    """Find a checkpoint: what lies here, then the embedded pair, then the hub."""
    here, name = _path(name_or_path), str(name_or_path).lower()
    if _exists(here):
        return _Found(here)
    if name in EMBEDDED:
        return _Found(embedded_folder() / f"{name}.safetensors", name, trained_length=EMBEDDED_LENGTH)
    published = _published(name_or_path)
    if isinstance(published, File):
        path = fetch_file(published, hub)
        return _Found(path, published.name, tokenizer_elsewhere=True, trained_length=published.trained_length)
    if isinstance(published, Repository):
        path = fetch_repository(published.repo, published, hub)
        return _Found(path, published.name, published.config, trained_length=published.trained_length)
    if here.suffix in CHECKPOINT_SUFFIXES:
        raise FileNotFoundError(f"there is no checkpoint at {here}")
    if isinstance(name_or_path, str) and _HUB_ID.fullmatch(name_or_path):
        return _Found(fetch_repository(name_or_path, None, hub), name_or_path)
    raise unknown_name(str(name_or_path))


def _path(given: str | Path) -> Path:
    """The path that a caller means; a `ValueError` if its name is one that no file can have."""
    try:
        os.fsencode(given)
        return Path(given).expanduser()
    except (UnicodeEncodeError, RuntimeError) as error:
        raise ValueError(
            f"{str(given)!r} is no path of a file or folder: {error}; write the path out in full"
        ) from None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a zero byte: nothing of that name is here
        return False


def _published(name_or_path: str | Path) -> File | Repository | None:
    """The catalogue's entry of a name, or of a repository that it lists."""
    by_repo = {entry.repo: entry for entry in REPOSITORIES}
    return PUBLISHED.get(str(name_or_path).lower()) or by_repo.get(str(name_or_path))


def _completed_config(found: _Found, tokenizer: Callable[[], Any]) -> dict[str, Any] | None:
    """The config beside a checkpoint with the id of [MASK], or `None` if it has it, or needs none.

    Diffusion models that dllm made of causal ones leave it out; their tokenizer knows it.
    """
    settings = found.config_beside
    if settings is None:
        return None
    if settings.get("mask_token_id") is not None:
        return None
    mask = found.known.get("mask_token_id")
    if str(settings["model_type"]).startswith("a2d-"):
        mask = getattr(tokenizer(), "mask_token_id", None) or mask
    return None if mask is None else {**settings, "mask_token_id": mask}


def _open_tokenizer(tokenizer: Any, found: _Found, hub: Mapping[str, Any]) -> Any:
    """The tokenizer asked for, the one beside the checkpoint, the published one, or none."""
    if tokenizer is not None:
        return load_tokenizer(_path(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer
    if has_tokenizer(found.folder):
        return load_tokenizer(found.folder)
    return load_tokenizer(fetch_tokenizer(hub, found.folder)) if found.tokenizer_elsewhere else None
