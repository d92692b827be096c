"""Finds the weights, config and tokenizer of a name or path, and saves them. No code of a checkpoint is executed."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.loading.catalogue import (
    BUNDLED,
    DELTAS,
    PUBLISHED,
    REPOSITORIES,
    PublishedFile,
    Repository,
    unknown_name,
)
from diffusion_lens.loading.delta import ABOUT, ADAPTER, Base, Delta, base_sha256
from diffusion_lens.loading.gguf import GGUF, converted, installed_file
from diffusion_lens.loading.hub import fetch_file, fetch_repository, fetch_tokenizer
from diffusion_lens.loading.source import folded_in, trained_length_in, write_own, write_trained_length
from diffusion_lens.loading.tokenizers import (
    TOKENIZER_FILES,
    check_special_ids,
    has_tokenizer,
    load_tokenizer,
    prepends_bos,
    read_mask,
    save_tokenizer,
)
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.text import require_tokenizer
from diffusion_lens.model.transformer import DiffusionTransformer
from weight_conversion import CHECKPOINT_SUFFIXES, Architecture, Checkpoint, export, open_checkpoint, read_json_object
from weight_conversion.families.family import may_lack_mask
from weight_conversion.families.kinds import refuse_unsupported

__all__ = [
    "TOKENIZER_FILES",
    "Delta",
    "base_of",
    "load_tokenizer",
    "open_pretrained",
    "save_pretrained",
    "save_tokenizer",
    "shape_of",
    "trained_length_of",
    "write_trained_length",
]

_LEFT_OUT = ("mask_token_id", "block_size", "mode")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def open_pretrained(
    name_or_path: str | Path,
    *,
    config: str | Path | Mapping[str, Any] | None,
    tokenizer: Any,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    options: Mapping[str, Any] | None = None,
    **hub: Any,
) -> tuple[DiffusionConfig, Checkpoint, Any]:
    """Config, checked checkpoint and tokenizer; the arguments are those of `from_pretrained`.

    `options` are those of `loading.source.given_options`.
    """
    # 1. The files.
    local = _locate(name_or_path, hub, options)
    if local.is_delta:
        return _open_delta(local, {"config": config, **(options or {})}, tokenizer, device, dtype, hub)
    if config is None:
        beside = {**(local.config_beside or {}), **local.known, **(options or {})}
        refuse_unsupported(beside, {}, str(local.path))
    # 2. The tokenizer, which may know the id of [MASK] that the config leaves out.
    loaded_tokenizer = _open_tokenizer(tokenizer, local, hub)
    if config is None:
        config = _completed_config(local, lambda: loaded_tokenizer, options)
    # 3. The checkpoint, and whether the tokenizer fits it.
    checkpoint = open_checkpoint(local.path, config, options)
    check_special_ids(loaded_tokenizer, checkpoint.architecture.d_vocab)
    read_mask(loaded_tokenizer, checkpoint.architecture.mask_token_id)
    # 4. The model's config.
    cfg = DiffusionConfig.from_architecture(
        checkpoint.architecture,
        device=device,
        dtype=dtype,
        model_name=local.name,
        default_prepend_bos=loaded_tokenizer is None or prepends_bos(loaded_tokenizer),
        trained_length=local.trained_length or trained_length_in(config, local.folder),
        folded=folded_in(config, local.folder),
    )
    return cfg, checkpoint, loaded_tokenizer


def shape_of(
    name_or_path: str | Path,
    config: str | Path | Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Architecture:
    """The architecture of a model that `open_pretrained` takes, from the catalogue or the headers of the files.

    Raises:
        ValueError: The name is unknown, or the files are not a checkpoint.
        FileNotFoundError: There is no such file; or the name is not in the catalogue, and the model not in the cache.
    """
    published = None if _exists(_path(name_or_path)) else _published(name_or_path)
    if published is not None and config is None:
        return published.read(options or {})
    local = _locate(name_or_path, {"local_files_only": True}, options)
    if local.is_delta:
        _refuse_options(local, {"config": config, **(options or {})})
        return Delta.load(local.folder).architecture
    if config is None:
        config = _completed_config(local, lambda: _open_tokenizer(None, local, {"local_files_only": True}), options)
    return open_checkpoint(local.path, config, options).architecture


def trained_length_of(name_or_path: str | Path, config: str | Path | Mapping[str, Any] | None = None) -> int | None:
    """`DiffusionConfig.trained_length` of a model that `from_pretrained` takes, without a download."""
    path = Path(name_or_path).expanduser()
    if path.exists():
        return trained_length_in(config, path if path.is_dir() else path.parent)
    if bundled := BUNDLED.get(name := str(name_or_path).lower()) or DELTAS.get(name):
        return bundled.trained_length
    published = _published(name_or_path)
    return published.trained_length if published else None


def save_pretrained(
    folder: str | Path, tensors: Mapping[str, torch.Tensor], cfg: DiffusionConfig, tokenizer: Any
) -> Path:
    """Write weights and config in our own layout, with the tokenizer; `from_pretrained(folder)` reads them.

    Raises:
        ValueError: `folder` is a file, contains other weights, or contains a tokenizer although this model has none.
            Nothing is written then.
    """
    target = Path(folder).expanduser()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; save_pretrained needs a folder")
    if tokenizer is None and has_tokenizer(target):
        raise ValueError(
            f"{target} contains a tokenizer, and this model has none. `from_pretrained` loads the tokenizer that it "
            "finds beside the weights. Name another folder, or delete the tokenizer's files. Nothing was written"
        )
    export(tensors, cfg.architecture, target / "model.safetensors", family="diffusion_lens")
    write_own(cfg, tensors, target)
    if tokenizer is not None:
        save_tokenizer(tokenizer, target, prepends_bos=cfg.default_prepend_bos)
    return target


def base_of(model: DiffusionTransformer) -> Base:
    """The model as the base of a delta; a `ValueError` if its name alone would give another one."""
    n_rows = model.cfg.d_vocab
    sha256 = base_sha256(model.named_parameters(), n_rows)
    if reason := _unlike_its_files(model, sha256):
        raise ValueError(
            f"a delta names its base, and {model.cfg.model_name!r} cannot be named: it {reason}. Save it (with "
            "model.save_pretrained, or for peft model.export_hf) and load it from there, or pass rank=0"
        )
    return Base(str(model.source.anywhere().name_or_path), sha256, n_rows, dict(model.source.options))


def _unlike_its_files(model: DiffusionTransformer, sha256: str) -> str | None:
    """Why `from_pretrained` with the name and the options alone would not give this model again."""
    if model.source is None:
        return "was not loaded from a file"
    source = model.source.anywhere()
    if given := [f"{name}=" for name in ("config", "tokenizer", "revision") if getattr(source, name) is not None]:
        return f"was loaded with {' and '.join(given)}"
    cfg, files, tokenizer = open_pretrained(**{**source.to_open(), "local_files_only": True}, device=model.cfg.device)
    if base_sha256(files.tensors(), cfg.d_vocab) != sha256:
        return "has other weights than its files, because it was changed, or its norms are folded"
    if require_tokenizer(model).get_vocab() != (tokenizer and tokenizer.get_vocab()):
        return "has another tokenizer than its files"
    return None


@dataclass(frozen=True)
class _LocalCheckpoint:
    """A checkpoint on this machine, with what the catalogue says of it.

    Attributes:
        name: Name under which results record the model; `None` for the name in its config.
        tokenizer_elsewhere: Whether its tokenizer is in another repository.
    """

    path: Path
    name: str | None = None
    published_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_elsewhere: bool = False
    trained_length: int | None = None

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def is_delta(self) -> bool:
        """Whether it is the folder of a delta, or the file in it, whose base is another checkpoint."""
        return (self.folder / ABOUT).is_file() and (self.path.is_dir() or self.path.name == ADAPTER)

    @property
    def known(self) -> dict[str, Any]:
        """What the catalogue says of the checkpoint and its config may leave out."""
        return {key: self.published_config[key] for key in _LEFT_OUT if key in self.published_config}

    @property
    def config_beside(self) -> Mapping[str, Any] | None:
        """The Hugging Face config beside the checkpoint, if there is one."""
        path = self.folder / "config.json"
        settings = read_json_object(path) if path.exists() else None
        return settings if settings is not None and "model_type" in settings else None


def _locate(
    name_or_path: str | Path, hub: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> _LocalCheckpoint:
    """The files of a checkpoint, downloaded if necessary.

    Lookup order: local path, bundled model, published name, hub repository.
    """
    path, name = _path(name_or_path), str(name_or_path).lower()
    if _exists(path):
        if path.suffix == GGUF and path.is_file():
            return _LocalCheckpoint(converted(path, hub.get("cache_dir")), path.stem)
        return _LocalCheckpoint(path)
    if bundled := BUNDLED.get(name):
        return _LocalCheckpoint(bundled.path, name, trained_length=bundled.trained_length)
    if delta := DELTAS.get(name):
        return _LocalCheckpoint(delta.folder, name)
    published = _published(name_or_path)
    if isinstance(published, PublishedFile):
        file = fetch_file(published, hub)
        return _LocalCheckpoint(file, published.name, tokenizer_elsewhere=True, trained_length=published.trained_length)
    if isinstance(published, Repository):
        folder = _packaged(published, hub) if name == published.name else None
        folder = folder or fetch_repository(published.repo, published, hub, options)
        return _LocalCheckpoint(folder, published.name, published.known, trained_length=published.trained_length)
    if path.suffix in (*CHECKPOINT_SUFFIXES, GGUF):
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if isinstance(name_or_path, str) and _HUB_ID.fullmatch(name_or_path):
        return _LocalCheckpoint(fetch_repository(name_or_path, None, hub, options), name_or_path)
    raise unknown_name(str(name_or_path))


def _open_delta(
    local: _LocalCheckpoint,
    options: Mapping[str, Any],
    tokenizer: Any,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    hub: Mapping[str, Any],
) -> tuple[DiffusionConfig, Checkpoint, Any]:
    """Config, checkpoint and tokenizer of the model that a delta makes of its base, which is opened too."""
    _refuse_options(local, options)
    delta = Delta.load(local.folder)
    beside = local.folder / delta.base.name
    name = beside if _exists(beside) else delta.base.name
    try:
        own: dict[str, Any] = {"config": None, "device": device, "dtype": dtype, "options": delta.base.options}
        base_cfg, base, loaded_tokenizer = open_pretrained(name, tokenizer=tokenizer, **own, **hub)
        checkpoint = delta.checkpoint(base)
    except (ValueError, FileNotFoundError) as error:
        said = f"{local.folder} changes another model, its base {delta.base.name!r} (named in {ABOUT})"
        elsewhere = f"If the base is elsewhere, write its name or path there, or put it beside as {beside.name}"
        raise type(error)(f"{said}, which cannot be used: {error}. {elsewhere}") from error
    read_mask(loaded_tokenizer, delta.architecture.mask_token_id)
    cfg = DiffusionConfig.from_architecture(
        delta.architecture,
        device=device,
        dtype=dtype,
        model_name=local.name,
        default_prepend_bos=base_cfg.default_prepend_bos,
        trained_length=delta.trained_length,
    )
    return cfg, checkpoint, loaded_tokenizer


def _refuse_options(local: _LocalCheckpoint, options: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for options by which a delta would make another model than the one it was trained as."""
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(
            f"{local.folder} is a delta, which says itself what model it makes of its base: leave out "
            f"{', '.join(f'{name}=' for name in given)}"
        )


def _packaged(entry: Repository, hub: Mapping[str, Any]) -> Path | None:
    """The folder with the weights of the installed package, unless a commit of the repository is asked for."""
    packaged = None if hub.get("revision") else entry.packaged
    file = None if packaged is None else installed_file(packaged)
    return converted(file, hub.get("cache_dir"), packaged.sha256) if packaged and file else None


def _path(name_or_path: str | Path) -> Path:
    """The argument as a path; a `ValueError` if no file can have this name."""
    try:
        os.fsencode(name_or_path)
        return Path(name_or_path).expanduser()
    except (UnicodeEncodeError, RuntimeError) as error:
        raise ValueError(
            f"{str(name_or_path)!r} is not a path to a file or folder: {error}; write the path out in full"
        ) from None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # the name is too long or contains a zero byte, so there is no such file
        return False


def _published(name_or_path: str | Path) -> PublishedFile | Repository | None:
    """The catalogue's entry for a published name, or for the repository "owner/name" of one."""
    by_repo = {entry.repo: entry for entry in REPOSITORIES}
    return PUBLISHED.get(str(name_or_path).lower()) or by_repo.get(str(name_or_path))


def _completed_config(
    local: _LocalCheckpoint, tokenizer: Callable[[], Any], options: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The config beside a checkpoint with what the catalogue and the tokenizer know; `None` if nothing is added.

    Some configs of diffusion models do not give the id of [MASK] (`may_lack_mask`); their tokenizers do.
    """
    settings = local.config_beside
    if settings is None:
        return None
    added = local.known
    if settings.get("mask_token_id") is None and may_lack_mask({**settings, **added, **(options or {})}):
        mask = getattr(tokenizer(), "mask_token_id", None)
        added |= {} if mask is None else {"mask_token_id": mask}
    added = {key: value for key, value in added.items() if settings.get(key) is None}
    return {**settings, **added} if added else None


def _open_tokenizer(tokenizer: Any, local: _LocalCheckpoint, hub: Mapping[str, Any]) -> Any:
    """The caller's tokenizer, else the one beside the checkpoint, else the published one, or `None`."""
    if tokenizer is not None:
        return load_tokenizer(_path(tokenizer)) if isinstance(tokenizer, str | Path) else tokenizer
    if has_tokenizer(local.folder):
        return load_tokenizer(local.folder)
    return load_tokenizer(fetch_tokenizer(hub, local.folder)) if local.tokenizer_elsewhere else None
