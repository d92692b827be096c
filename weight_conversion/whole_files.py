"""Files written whole or not at all, and what their bytes hash to."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def renamed_when_whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; it takes the name of `path` unless an exception comes first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    try:
        yield Path(name)
        # mkstemp makes files private; a result should be as readable as any other new file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except OSError as error:
        if type(error) is not OSError or error.filename not in (None, name):
            raise
        # A full disk names no file, and a temporary name tells nobody anything.
        told = OSError(f"{path} was not written: {error.strerror or error}")
        told.errno = error.errno
        raise told from error
    finally:
        Path(name).unlink(missing_ok=True)


def sha256_of_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
