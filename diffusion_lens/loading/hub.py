"""Files of the Hugging Face hub, through its cache. Safetensors and text only: no pickle, no code of a repository.

A whole repository comes in two steps: first the small files, so that a family that nobody knows is refused before
gigabytes are fetched; then the weights that the index names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from diffusion_lens.catalogue import REPO, TOKENIZER_REPO, File, Repository
from diffusion_lens.loading.fetching import check_fetched, discard, hub_errors
from diffusion_lens.loading.tokenizers import EVERY_FILE, TOKENIZER_FILES
from weight_conversion import read_json, sha256_of_file
from weight_conversion.files import INDEX, WHOLE, files_not_in, indexed_files
from weight_conversion.registry import FAMILIES, recognise

Hub = Mapping[str, Any]
CONFIGS = tuple(sorted({family.config_file for family in FAMILIES.values()}))
SMALL_FILES = (*CONFIGS, INDEX, *EVERY_FILE)


def fetch_file(entry: File, hub: Hub) -> Path:
    """Download one checkpoint of many, or find it in the cache; verify its hash where one is known."""
    out_of_reach: Exception | None = None
    for file in entry.files:
        try:
            with hub_errors(f"{entry.name!r} (huggingface.co/{entry.repo}/{file})", hub):
                path = check_fetched(Path(hf_hub_download(entry.repo, file, **hub)))
        except LocalEntryNotFoundError as error:
            # The .pth may be in the cache all the same; one round of retries against a dead network is enough.
            out_of_reach, hub = error, {**hub, "local_files_only": True}
            continue
        except EntryNotFoundError:
            continue
        if entry.sha256 and path.suffix == ".safetensors" and (found := sha256_of_file(path)) != entry.sha256:
            raise ValueError(
                f"{path} is not the published {entry.name!r}: its SHA-256 is {found}, expected {entry.sha256}. "
                f"{discard(path)}"
            )
        return path
    if out_of_reach is None:
        raise FileNotFoundError(
            f"huggingface.co/{entry.repo} holds neither {' nor '.join(entry.files)}, the files of {entry.name!r}; "
            "look for its file there and pass the path of a downloaded copy"
        )
    raise FileNotFoundError(
        f"{entry.name!r} is not in the Hugging Face cache, and the hub cannot be reached (or must not be). "
        f"Download {entry.files[0]} ({entry.n_bytes:,} bytes) from huggingface.co/{entry.repo} on a connected "
        f"machine and pass its path: from_pretrained('{Path(entry.files[0]).name}', tokenizer='folder')"
    ) from out_of_reach


def fetch_repository(repo: str, entry: Repository | None, hub: Hub) -> Path:
    """The folder of the cache with a repository's config, weights and tokenizer, downloaded if need be.

    Raises:
        FileNotFoundError: not in the cache while the hub is out of reach, no such repository, no safetensors in it.
        ConnectionError: the hub or the way to it failed.
        PermissionError: its owner's terms have not been accepted.
        ValueError: of no known family, no such revision, or a file that arrived damaged.
    """
    if repo == REPO:
        raise ValueError(f"huggingface.co/{repo} holds many checkpoints: pass the name of one, such as 'smdm-1028m'")
    asked = f"{entry.name!r} (huggingface.co/{repo})" if entry else f"huggingface.co/{repo}"
    nothing_here = "" if entry else f", and no file or folder {repo!r} lies here"
    try:
        with hub_errors(asked, hub, nothing_here):
            folder = _snapshot(repo, SMALL_FILES, hub)
            for pattern in SMALL_FILES:
                for path in folder.glob(pattern):
                    check_fetched(path)
            has_config = _check_family(folder, asked)
            weights = _weights(folder)
            # The same commit, should the repository change in between. The single file comes before the shards, as in
            # transformers.
            for files in ([WHOLE], weights):
                if has_config and files_not_in(folder, weights):
                    _snapshot(repo, files, {**hub, "revision": folder.name})
                    weights = _weights(folder)
            for name in weights:
                if not files_not_in(folder, [name]):
                    check_fetched(folder / name)
        if (files_not_in(folder, weights) or not has_config) and (HF_HUB_OFFLINE or hub.get("local_files_only")):
            raise LocalEntryNotFoundError(f"{folder} holds a part of it")
    except LocalEntryNotFoundError as error:
        size = f" ({entry.n_bytes / 1e9:.1f} GB)" if entry and entry.n_bytes else ""
        raise FileNotFoundError(
            f"{asked} is not whole in the Hugging Face cache{nothing_here}, and the hub cannot be reached (or must not "
            f"be). On a connected machine download its config.json, its *.safetensors{size} with their index, and its "
            "tokenizer files into a folder, and pass that: from_pretrained('folder')"
        ) from error
    if not has_config:
        raise FileNotFoundError(f"{asked} has no {' or '.join(CONFIGS)} at its top (nor has its copy {folder})")
    if missing := files_not_in(folder, weights):
        raise FileNotFoundError(
            f"{asked} has no {', '.join(missing)} at its top (nor has its copy {folder}). Of weights only safetensors "
            "are fetched, no pickles: convert them to one model.safetensors, and pass the folder"
        )
    return folder


def fetch_tokenizer(hub: Hub, beside: Path) -> Path:
    """The folder with SMDM's tokenizer, which lies in a repository of its own."""
    settings = {key: value for key, value in hub.items() if key != "revision"}
    try:
        with hub_errors(f"the tokenizer (huggingface.co/{TOKENIZER_REPO})", settings):
            paths = [check_fetched(Path(hf_hub_download(TOKENIZER_REPO, name, **settings))) for name in TOKENIZER_FILES]
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            "the tokenizer is neither in the Hugging Face cache nor can the hub be reached. Put "
            f"{TOKENIZER_FILES[0]} and {TOKENIZER_FILES[1]} of huggingface.co/{TOKENIZER_REPO} into a folder and pass "
            f"tokenizer='that folder', or put both beside the checkpoint, into {beside}"
        ) from error
    return paths[0].parent


def _snapshot(repo: str, patterns: Sequence[str], hub: Hub) -> Path:
    # Said outright: not every version of the hub's library takes the environment for a no before it asks.
    kept = HF_HUB_OFFLINE or bool(hub.get("local_files_only"))
    return Path(snapshot_download(repo, allow_patterns=list(patterns), **{**hub, "local_files_only": kept}))


def _check_family(folder: Path, asked: str) -> bool:
    """Whether there is a config; one that no family can read is refused."""
    if (folder / "config.json").exists():
        config = read_json(folder / "config.json")
        if isinstance(config, Mapping) and "model_type" in config:
            recognise(config, {}, asked)
    return any((folder / name).exists() for name in CONFIGS)


def _weights(folder: Path) -> list[str]:
    """The files with the weights: the single one if it is there, those that the index names, or the single one."""
    if (folder / WHOLE).exists() or not (folder / INDEX).exists():
        return [WHOLE]
    return sorted(set(indexed_files(folder / INDEX).values()))
