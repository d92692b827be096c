"""Memory of loading a checkpoint and of a trace: growth of the peak of this process, which only Linux publishes.

`peak_of_tensors` counts tensors only, on any system.
"""

import contextlib
import ctypes
import gc
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from diffusion_lens import HookedDiffusionTransformer
from oracles.traced_shapes import Shape


def peak_bytes() -> int:
    """Peak resident memory of this process in bytes, including file pages."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def resident_bytes() -> int:
    """Resident memory of this process in bytes, without what is free."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    match = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def memory_of_loading(path: Path, dtype: str) -> dict[str, float]:
    """Load `path` in this process. Returns the bytes of the weights, the growth of the peak memory, and seconds."""
    HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    with contextlib.suppress(AttributeError, OSError):  # Otherwise the peak of the imports is the reference.
        ctypes.CDLL(None).malloc_trim(0)  # Free memory that is still resident would hide growth.
        Path("/proc/self/clear_refs").write_text("5")
    before, started = peak_bytes(), time.perf_counter()
    model = HookedDiffusionTransformer.from_pretrained(path, device="cpu", dtype=getattr(torch, dtype))
    seconds = time.perf_counter() - started
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"weights": weights, "growth": peak_bytes() - before, "seconds": seconds}


@torch.no_grad()
def memory_of_tracing(shape: Shape, max_bytes: int, options: dict[str, Any]) -> dict[str, int]:
    """Trace in this process. Returns the bytes of the weights and the growth of the peak memory during the trace."""
    small = replace(shape, n_layers=2, d_model=64, d_mlp=128, n_heads=2, d_vocab=100)
    warm = small.build()
    small.trace(warm, small.query(warm))
    model = shape.build()
    query = shape.query(model)
    with contextlib.suppress(AttributeError, OSError):  # If unsupported, the peak includes building the model.
        ctypes.CDLL(None).malloc_trim(0)  # Free memory that is still resident would hide growth.
        Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    shape.trace(model, query, max_bytes=max_bytes, **options)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"weights": weights, "growth": peak_bytes() - before}


def peak_of_tensors(run: Callable[[], object]) -> int:
    """The most bytes of tensors that live at once while `run` runs, beside those that were there."""
    gc.collect()  # Otherwise tensors of earlier work, freed meanwhile, would be subtracted.
    gc.freeze()  # What is left stays until its last reference goes; the next collection need not look at it again.
    with profile(profile_memory=True) as watched:
        run()
    events = [event for event in watched.kineto_results.events() if event.name() == "[memory]"]
    sizes = torch.tensor([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(sizes.cumsum(0).max())
