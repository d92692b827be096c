"""Data files: downloads from the Hugging Face hub or the web into a cache, and the lines of a file.

Importing this module downloads nothing. A file is downloaded once, and never if HF_HUB_OFFLINE is set. The cache never
contains partial files. If the published SHA-256 of a file is known, it is verified. If a download fails, the error
names the file, its address, the reason, and the way to use a copy that was downloaded by hand.
"""

import json
import shutil
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from huggingface_hub import cached_assets_path, constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

from diffusion_lens.loading.hub import TRANSPORT_ERRORS, discard
from weight_conversion import JsonError, parse_json, renamed_when_whole, sha256_of_file

TIMEOUT = 30.0  # Seconds to wait for a response.
OFFLINE = "HF_HUB_OFFLINE is set"


def fetch_from_hub(repo: str, file: str, *, revision: str, by_hand: str, sha256: str | None = None) -> Path:
    """Path of a data set's file, from the cache of the hub or downloaded into it.

    Args:
        repo, file: "owner/name" of the data set, and path in its repository.
        revision: Commit of the repository. (The content of a branch may change.)
        by_hand: Advice for the error message on how to use a copy downloaded by hand, such as "pass folder='...'".
        sha256: Expected SHA-256 of the file.

    Raises:
        FileNotFoundError: The file is not in the cache, and the hub is unreachable, disabled or lacks the file.
        ValueError: The file is not the published one.
    """
    url = f"{constants.ENDPOINT}/datasets/{repo}/resolve/{revision}/{file}"
    try:
        path = Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    except LocalEntryNotFoundError:
        reason = OFFLINE if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise _out_of_reach(url, reason, by_hand) from None
    except (EntryNotFoundError, HfHubHTTPError) as error:
        raise _out_of_reach(url, f"the hub refuses it ({type(error).__name__})", by_hand) from None
    except TRANSPORT_ERRORS as error:
        raise _out_of_reach(url, f"{type(error).__name__}: {error}", by_hand) from None
    if problem := _problem(path, url, sha256):
        raise ValueError(f"{path} is not the published {url}: {problem}. {discard(path)}")
    return path


def fetch_from_web(url: str, *, by_hand: str, sha256: str | None = None) -> Path:
    """Path of a file of the web, from the `diffusion_lens` folder of the Hugging Face assets cache or downloaded there.

    Args:
        url: Address of the file.
        by_hand, sha256: As in `fetch_from_hub`.

    Raises:
        FileNotFoundError: The file is not in the cache, and its host is unreachable, disabled or lacks the file.
        ValueError: The file is not the published one.
    """
    host, file = urlsplit(url).netloc, PurePosixPath(urlsplit(url).path)
    assets = constants.HF_ASSETS_CACHE
    target = cached_assets_path("diffusion_lens", host, str(file.parent).strip("/"), assets_dir=assets) / file.name
    problem = _problem(target, url, sha256) if target.exists() and sha256 else None
    if problem and constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"{target} is not the published {url}: {problem}. Fetch it again on a connected machine and {by_hand}"
        )
    if target.exists() and not problem:
        return target
    if constants.HF_HUB_OFFLINE:
        raise _out_of_reach(url, OFFLINE, by_hand)
    try:
        _download(url, target, sha256, by_hand)
    except HTTPError as error:
        error.close()
        raise _out_of_reach(url, f"its host refuses it ({error.code} {error.reason})", by_hand) from None
    except (OSError, HTTPException) as error:
        raise _out_of_reach(url, f"{getattr(error, 'reason', '') or error}", by_hand) from None
    return target


def read_text(path: Path) -> str:
    """The text of a file; a `ValueError` unless it is UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error


def read_json_lines(path: Path, shape: str) -> Iterator[tuple[int, Any]]:
    """The values of a JSON Lines file, each with the number of its line. Empty lines are skipped.

    Args:
        path: Path of the file. Only line feeds end a line, because JSON texts may contain the other separators.
        shape: What the file should contain, for the error message.

    Raises:
        ValueError: The file is not UTF-8 text, or a line is not JSON; the message names the line.
    """
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except JsonError as error:
                raise ValueError(f"{path}, line {number} {error.reason}. {shape}") from None


def _download(url: str, target: Path, sha256: str | None, by_hand: str) -> None:
    """Write to a temporary file, check it, then rename it."""
    request = Request(url, headers={"User-Agent": "diffusion-lens"})
    with urlopen(request, timeout=TIMEOUT) as response, renamed_when_whole(target) as part:
        length = int(response.headers.get("Content-Length") or 0)
        with part.open("wb") as file:
            shutil.copyfileobj(response, file)
        if length and length != part.stat().st_size:
            raise OSError(f"the connection broke after {part.stat().st_size:,} of {length:,} bytes")
        if problem := _problem(part, url, sha256):
            raise ValueError(
                f"{url} answers with another file than the published one: {problem}. Nothing was kept. Fetch it on a "
                f"connected machine and {by_hand}"
            )


def _problem(path: Path, url: str, sha256: str | None) -> str | None:
    """The reason why a file is not the one published at `url`, or `None` if it is.

    The SHA-256 decides. If it is unknown, a JSON file must be valid JSON.
    """
    if sha256 is not None:
        actual = sha256_of_file(path)
        return None if actual == sha256 else f"its SHA-256 is {actual}, expected {sha256}"
    if url.endswith((".json", ".jsonl")):
        text = path.read_bytes()
        try:
            for part in text.splitlines() if url.endswith(".jsonl") else [text]:
                json.loads(part)
        except ValueError as error:
            return f"it is not JSON ({error})"
    return None


def _out_of_reach(url: str, reason: str, by_hand: str) -> FileNotFoundError:
    name = PurePosixPath(urlsplit(url).path).name
    return FileNotFoundError(
        f"{name} is not in the cache and was not fetched: {reason}. Fetch {url} on a connected machine and {by_hand}"
    )
