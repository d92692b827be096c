"""From a name or a path to weights, config and tokenizer, and back to a folder. Nothing of a checkpoint is executed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import PreTrainedTokenizerFast

from diffusion_lens.catalogue import (
    EMBEDDED,
    PUBLISHED,
    REPO,
    TOKENIZER_FILES,
    TOKENIZER_REPO,
    Published,
    embedded_folder,
    unknown_name,
)
from diffusion_lens.config import DiffusionConfig
from weight_conversion import (
    CHECKPOINT_SUFFIXES,
    Checkpoint,
    export,
    open_checkpoint,
    read_json,
    sha256_of_file,
    write_json,
)

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token")


def open_pretrained(
    name_or_path: str | Path,
    *,
    config: str | Path | Mapping[str, Any] | None,
    tokenizer: Any,
    device: str | torch.device | None,
    dtype: torch.dtype,
    **hub: Any,
) -> tuple[DiffusionConfig, Checkpoint, Any]:
    """Config, checked checkpoint and tokenizer; the arguments are those of `from_pretrained`."""
    here = Path(name_or_path).expanduser()
    name = str(name_or_path).lower()
    published = None if here.exists() else PUBLISHED.get(name)
    embedded = name in EMBEDDED and not here.exists()
    path = _fetch(published, hub) if published else _embedded(name) if embedded else _existing(here)
    checkpoint = open_checkpoint(path, config)
    loaded = _open_tokenizer(tokenizer, path, hub if published else None)
    cfg = DiffusionConfig.from_architecture(
        checkpoint.architecture,
        device=device,
        dtype=dtype,
        model_name=published.name if published else name if embedded else None,
        default_prepend_bos=loaded is None or _prepends_bos(loaded),
    )
    return cfg, checkpoint, loaded


def save_pretrained(
    folder: str | Path, tensors: Mapping[str, torch.Tensor], cfg: DiffusionConfig, tokenizer: Any
) -> Path:
    """Weights and config in our own layout, the tokenizer beside them; `from_pretrained(folder)` reads them."""
    target = Path(folder).expanduser()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; save_pretrained needs a folder")
    export(tensors, cfg.architecture, target / "model.safetensors", family="diffusion_lens")
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
        settings = read_json(target / TOKENIZER_FILES[1])
        write_json({**settings, "add_bos_token": cfg.default_prepend_bos}, target / TOKENIZER_FILES[1])
    return target


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A fast tokenizer from `tokenizer.json`, its special tokens from `tokenizer_config.json`."""
    if missing := [name for name in TOKENIZER_FILES if not (folder / name).exists()]:
        raise FileNotFoundError(f"the tokenizer folder {folder} lacks {' and '.join(missing)}; put it there")
    settings = read_json(folder / "tokenizer_config.json")
    special = {key: _text_of(settings[key]) for key in _SPECIAL_TOKENS if settings.get(key)}
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"{folder / 'tokenizer.json'} is not a fast tokenizer: {error}; fetch it again") from error
    tokenizer.init_kwargs["add_bos_token"] = settings.get("add_bos_token", True)
    return tokenizer


def _prepends_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and bool(tokenizer.init_kwargs.get("add_bos_token", True))


def _text_of(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _embedded(name: str) -> Path:
    return embedded_folder() / f"{name}.safetensors"


def _existing(path: Path) -> Path:
    if path.exists():
        return path
    if path.suffix in CHECKPOINT_SUFFIXES:
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    raise unknown_name(str(path))


def _fetch(published: Published, hub: Mapping[str, Any]) -> Path:
    """Download a published checkpoint, or find it in the cache; verify its hash where one is known."""
    out_of_reach: Exception | None = None
    for file in published.files:
        try:
            path = Path(hf_hub_download(REPO, file, **hub))
        except LocalEntryNotFoundError as error:
            # The .pth may be in the cache all the same; one round of retries against a dead network is enough.
            out_of_reach, hub = error, {**hub, "local_files_only": True}
            continue
        except EntryNotFoundError:
            continue
        if published.sha256 and path.suffix == ".safetensors" and (found := sha256_of_file(path)) != published.sha256:
            raise ValueError(
                f"{path} is not the published {published.name!r}: its SHA-256 is {found}, expected {published.sha256}. "
                f"Delete {path.resolve()} and fetch it again."
            )
        return path
    if out_of_reach is None:
        raise FileNotFoundError(
            f"huggingface.co/{REPO} holds neither {' nor '.join(published.files)}, the files of {published.name!r}; "
            "look for its file there and pass the path of a downloaded copy"
        )
    raise FileNotFoundError(
        f"{published.name!r} is not in the Hugging Face cache, and the hub cannot be reached (or must not be). "
        f"Download {published.files[0]} ({published.n_bytes:,} bytes) from huggingface.co/{REPO} on a connected "
        f"machine and pass its path: from_pretrained('{Path(published.files[0]).name}', tokenizer='folder')"
    ) from out_of_reach


def _open_tokenizer(tokenizer: Any, checkpoint: Path, hub: Mapping[str, Any] | None) -> Any:
    """The tokenizer asked for, the one beside the checkpoint, the published one (`hub` given), or none."""
    if tokenizer is not None:
        return load_tokenizer(Path(tokenizer).expanduser()) if isinstance(tokenizer, str | Path) else tokenizer
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    if (folder / TOKENIZER_FILES[0]).exists():
        return load_tokenizer(folder)
    if hub is None:
        return None
    settings = {key: value for key, value in hub.items() if key != "revision"}
    try:
        paths = [Path(hf_hub_download(TOKENIZER_REPO, name, **settings)) for name in TOKENIZER_FILES]
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            "the tokenizer is neither in the Hugging Face cache nor can the hub be reached. Put "
            f"{TOKENIZER_FILES[0]} and {TOKENIZER_FILES[1]} of huggingface.co/{TOKENIZER_REPO} into a folder and pass "
            f"tokenizer='that folder', or put both beside the checkpoint, into {folder}"
        ) from error
    return load_tokenizer(paths[0].parent)
