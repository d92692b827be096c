"""One copy of a model's weights for all workers of a machine, where they cannot be mapped from the model's own file.

A weight is used as it is mapped only if the file has it in the dtype and layout of the model and at a multiple of 64
bytes, as files that we write have it. For another file, the first worker that loads the model writes the weights to a
file in the folder for temporary files, and all workers map that. The file has no name from the beginning: workers open
it through the process that has it open (`/proc/PID/fd`), which a small file lists. The system frees the space when the
last worker has ended, however it ended. Only the list stays, with less than a hundred bytes for each worker.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from torch import nn

from diffusion_lens.weights_digest import weights_sha256
from weight_conversion.aligned_file import write_aligned

M = TypeVar("M", bound=nn.Module)
SMALLEST = 1 << 26  # bytes of weights for which this is done
_ROOM = 1.1  # free space, in sizes of the weights
_OPEN: list[int] = []  # number of the file that this process maps, for itself and others to open


def shared_on_machine(load: Callable[[Path | None], M], source: str, sha256: str) -> M:
    """A model whose weights are mapped from a file that all workers of this machine share, if that is possible.

    Processes that find no such file load the model one after another, the first of which writes it.

    Args:
        load: Loads the model; from a file with its parameters, if it is given one.
        source: What names the model, in any form.
        sha256: The hash of its weights. A file with other weights is not used.
    """
    if not _path(os.getpid(), 0).parent.is_dir():  # another system than Linux
        return load(None)
    name = hashlib.sha256((source + sha256).encode()).hexdigest()[:16]
    listed = Path(tempfile.gettempdir()) / f"diffusion-lens-{os.getuid()}-{name}.weights"
    with ExitStack() as until_written:
        try:
            holders = until_written.enter_context(_locked(listed))
        except OSError:
            return load(None)
        number = _opened(holders.read())
        if number is None:
            model = load(None)
            if not _is_worth_writing(model):
                listed.unlink(missing_ok=True)
                return model
            number = _written(model)
            del model
            if number is None:
                listed.unlink(missing_ok=True)
                return load(None)
            holders.truncate(0)
        _OPEN.append(number)
        file = os.fstat(number)
        holders.write(f"{os.getpid()} {number} {file.st_dev} {file.st_ino}\n".encode())
    model = load(_path(os.getpid(), number))
    if weights_sha256(model) == sha256:
        return model
    close_shared()
    return load(None)


def close_shared() -> None:
    """Close the file of this process's last model, whose space is freed with the model unless others have it open."""
    while _OPEN:
        os.close(_OPEN.pop())


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """A list of processes, their open files' numbers, devices and inodes, which one process at a time has open."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW, 0o600), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _opened(holders: bytes) -> int | None:
    """The file that one of these processes has open, if there is one. Their numbers may belong to others by now."""
    for line in reversed(holders.split(b"\n")):
        with suppress(OSError, ValueError):
            process, number, device, inode = map(int, line.split())
            found = _path(process, number)
            here = found.stat()
            if (here.st_dev, here.st_ino) == (device, inode) and found.is_file():
                return os.open(found, os.O_RDONLY)
    return None


def _is_worth_writing(model: nn.Module) -> bool:
    """Whether a large part of the weights is not mapped already, and there is room for a file of all."""
    weights = [*model.parameters()]
    own = sum(weight.nbytes for weight in weights if weight.untyped_storage().resizable())
    size = sum(weight.nbytes for weight in weights)
    return own >= SMALLEST and shutil.disk_usage(tempfile.gettempdir()).free >= _ROOM * size


def _written(model: nn.Module) -> int | None:
    """The number of a file of the weights without a name, or `None` if its room was taken meanwhile.

    The model is emptied as it is written: in a folder in memory (tmpfs), the file takes the place of the weights.
    """
    try:
        with tempfile.TemporaryFile() as file:
            write_aligned(dict(model.named_parameters()), file, emptied=True)
            file.flush()
            return os.open(_path(os.getpid(), file.fileno()), os.O_RDONLY)
    except OSError:
        return None


def _path(process: int, number: int) -> Path:
    return Path("/proc") / str(process) / "fd" / str(number)
