"""What can go wrong while a file is fetched: errors of the hub as ours, and damaged files out of its cache.

A file that arrives cut off, or as a page of a proxy that says "log in", would be found in the cache by every later
call. So a fetched file is held against what its name says it is, and taken out of the cache if it is not.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from diffusion_lens.loading.tokenizer_config import CHAT_TEMPLATE, check_template
from weight_conversion.files import INDEX, SafetensorsFile

# The hub's errors descend from those of the HTTP library that its client uses, which has changed from one to another.
TRANSPORT_ERRORS: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, OSError, RuntimeError)


@contextmanager
def hub_errors(asked: str, hub: Mapping[str, Any], hint: str = "") -> Iterator[None]:
    """Say in our words what the hub and the way to it refuse; that a file is not there is left to the caller.

    Args:
        asked: what was to be fetched, with its address.
        hub: settings of the call.
        hint: what else a name that the hub does not know may have meant.
    """
    try:
        yield
    except EntryNotFoundError:
        raise
    except GatedRepoError as error:
        raise PermissionError(
            f"{asked} is open to those who accepted its terms: do so on that page, then pass token='hf_...' or run "
            "`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"there is no {asked}, or it is private (then pass token='hf_...'){hint}") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{asked} has no revision {hub.get('revision')!r}; without one the newest is taken") from error
    except HFValidationError as error:
        raise ValueError(f"{asked} cannot be a repository of the hub: {error}{hint}") from error
    except TRANSPORT_ERRORS as error:
        raise ConnectionError(
            f"{asked} was not fetched: {_reason(error)}. Try again (what has arrived whole is kept), or download its "
            "files on another machine into a folder and pass that: from_pretrained('folder')"
        ) from error


def check_fetched(path: Path) -> Path:
    """Raise a `ValueError` if a file in the hub's cache is not what its name says, and take it out of the cache."""
    try:
        _CHECKS[path.suffix](path)
    except ValueError as error:
        raise ValueError(f"{str(error).removesuffix('.')}. {discard(path)}") from error
    return path


def discard(path: Path) -> str:
    """Take a file out of the hub's cache, where it is a link to its content; returns what to do now."""
    whole = path.resolve()
    try:
        if "snapshots" not in path.parts:  # no cache, so not ours to delete from
            raise PermissionError(path)
        path.unlink()
        whole.unlink(missing_ok=True)
    except OSError:
        return f"Delete {whole} and fetch it again."
    return "It was taken out of the cache: call again to fetch it anew."


def _check_safetensors(path: Path) -> None:
    SafetensorsFile(path).shapes()


def _check_pth(path: Path) -> None:
    if not is_zipfile(path):
        raise ValueError(f"{path} is not a whole .pth file ({path.stat().st_size:,} bytes)")


def _check_json(path: Path) -> None:
    """JSON, and an object, as all that are fetched are."""
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:  # whole, if strange; who reads it says so
        return
    except ValueError as error:
        raise ValueError(f"{path} is not the JSON file that it should be: {error}") from error
    key = _KEYS.get(path.name)
    if not isinstance(content, dict) or (key and key not in content):
        raise ValueError(f"{path} should hold a JSON object{f' with {key!r}' if key else ''}, and does not")


def _check_merges(path: Path) -> None:
    """Two pieces a line, after a line with the version; lines end as the tokenizers library ends them."""
    lines = _text(path).removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.startswith("#version") and not re.fullmatch(r"[^ ]+ [^ ]+", line.removesuffix("\r")):
            raise ValueError(f"{path} should hold two pieces of text a line; its line {number} is {line:.40}")


def _check_template(path: Path) -> None:
    """The usual template writes out a chat, so it holds a Jinja tag; one with a name of its own may be plain text."""
    text = _text(path)
    if _PAGE.match(text):
        raise ValueError(f"{path} is a web page, not a chat template")
    if path.name == CHAT_TEMPLATE and text.strip() and not re.search(r"\{[{%]", text):
        raise ValueError(f"{path} is not a chat template: it holds no Jinja tag")
    check_template(path.stem, text, path)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not the text file that it should be: {error}") from error


_PAGE = re.compile(r"\s*<(!doctype|html|head|body|\?xml)\b", re.IGNORECASE)
_KEYS = {"tokenizer.json": "model", INDEX: "weight_map"}
_CHECKS: dict[str, Callable[[Path], None]] = {
    ".safetensors": _check_safetensors,
    ".pth": _check_pth,
    ".json": _check_json,
    ".txt": _check_merges,
    ".jinja": _check_template,
}


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}{f' {status}' if status else ''}{f' ({said})' if said else ''}"
