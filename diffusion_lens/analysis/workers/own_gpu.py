"""A GPU of its own for each worker process on a machine."""

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

import torch

_LOCKS: list[IO[str]] = []  # open for as long as this process lives: the system releases them with it


@cache
def own_device(kind: str) -> str:
    """The device of this process: of several visible GPUs, one that no other worker on this machine has.

    If there are more workers than GPUs, they share GPUs evenly by process number.
    """
    if kind != "cuda" or torch.cuda.device_count() < 2:
        return kind
    for index in range(torch.cuda.device_count()):
        if _lock(str(torch.cuda.get_device_properties(index).uuid)):
            return f"cuda:{index}"
    return f"cuda:{os.getpid() % torch.cuda.device_count()}"


def _lock(gpu: str) -> bool:
    """Whether this process got the lock of a GPU."""
    file = (Path(tempfile.gettempdir()) / f"diffusion-lens-{os.getuid()}-{gpu}.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _LOCKS.append(file)
    return True
