"""Errors of fetching: the hub's errors in our words, and the removal of damaged files from its cache.

A file that arrives truncated, or as the login page of a proxy, would stay in the cache for all later calls. Therefore
the content of every fetched file is compared with the type that its name promises, and removed from the cache if it
differs.
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

# The hub's errors are subclasses of those of the HTTP library of its client, which differs between versions.
TRANSPORT_ERRORS: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, OSError, RuntimeError)


@contextmanager
def hub_errors(target: str, hub: Mapping[str, Any], hint: str = "") -> Iterator[None]:
    """Turn errors of the hub and of the network into ours; a missing file (`EntryNotFoundError`) is left to the caller.

    Args:
        target: Name and address of what is fetched, for messages.
        hub: Settings of the call to the hub.
        hint: End of the message for a name that the hub does not know.
    """
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


def _check_safetensors(path: Path) -> None:
    SafetensorsFile(path).shapes()


def _check_pth(path: Path) -> None:
    if not is_zipfile(path):
        raise ValueError(f"{path} is not a whole .pth file ({path.stat().st_size:,} bytes)")


def _check_json(path: Path) -> None:
    """Raises a ValueError unless the JSON file contains an object, with the key that its reader needs."""
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
    """Raises a ValueError unless each line after the version contains two pieces of text.

    Line ends are those of the tokenizers library.
    """
    lines = _text(path).removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.startswith("#version") and not re.fullmatch(r"[^ ]+ [^ ]+", line.removesuffix("\r")):
            raise ValueError(f"{path} has to contain two pieces of text per line; its line {number} is {line:.40}")


def _check_template(path: Path) -> None:
    """Raises a ValueError unless the file is a chat template.

    The default template writes out a chat, so it contains a Jinja tag. Additional templates may be plain text.
    """
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
_CHECKS: dict[str, Callable[[Path], None]] = {
    ".safetensors": _check_safetensors,
    ".pth": _check_pth,
    ".json": _check_json,
    ".txt": _check_merges,
    ".jinja": _check_template,
}


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}{f' {status}' if status else ''}{f' ({first_line})' if first_line else ''}"
