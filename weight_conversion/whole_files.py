"""Atomic writing of files, and the hash of a file."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def renamed_when_whole(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write to; it is renamed to `path` unless an exception is raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    try:
        yield Path(name)
        # mkstemp creates private files; a result should have the permissions of any other new file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except OSError as error:
        if type(error) is not OSError or error.filename not in (None, name):
            raise
        # The error of a full disk names no file or the temporary one, so the message here names the target.
        named = OSError(f"{path} was not written: {error.strerror or error}")
        named.errno = error.errno
        raise named from error
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def renamed_together(folder: Path) -> Iterator[Path]:
    """A temporary folder inside `folder`; its files replace those of `folder` unless an exception is raised.

    Each file is replaced atomically. `folder` is made if it does not exist, and its other files stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as temporary:
        yield Path(temporary)
        for file in Path(temporary).iterdir():
            os.replace(file, folder / file.name)


def sha256_of_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
