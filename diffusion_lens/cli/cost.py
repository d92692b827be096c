"""What a command will cost: --dry-run, before anything is downloaded or loaded.

A row's pass through the network takes two operations a weight and place, and attention on top; a backward pass twice
that of a forward one. The time is what this machine takes for so many operations in one matrix product of the model's
own width: a lower bound, which long rows come near and short ones exceed by some times.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer

from diffusion_lens.cli.report import Report
from diffusion_lens.loading import shape_of
from weight_conversion import Architecture

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Cost:
    """Work, counted in rows that pass the whole network.

    Attributes:
        passes: rows, a part of the network counted as a part of a pass.
        places: of each row.
        rows: most rows at once.
        backward: passes that are also differentiated.
        copies: of the weights, in memory: 1 to read them, 4 to train in float32.
        cached: whether a pass computes one place only, those before it being kept (a causal model that writes).
    """

    passes: int | float
    places: int
    rows: int
    backward: int | float = 0
    copies: int = 1
    cached: bool = False


def architecture_of(name_or_path: str, config: str | Path | None = None) -> Architecture:
    """The shape of a model, from its name or from the header of its checkpoint; nothing is downloaded.

    Raises:
        ValueError: an unknown name, or a file that is no checkpoint.
        FileNotFoundError: nothing there, or a shape that is known only after a download.
    """
    return shape_of(name_or_path, config)


def denoising(model: str, steps: Iterable[int], length: int, cfg_scale: float, facts: int = 1, rows: int = 1) -> Cost:
    """Facts asked in runs of so many steps, `rows` of them together; a causal model writes token by token."""
    if architecture_of(model).attention_dir == "causal":
        return Cost(facts * length, length, rows, cached=True)
    branches = 2 if cfg_scale else 1
    return Cost(facts * sum(steps) * branches, length, rows * branches)


def show(report: Report, model: str, dtype: str, cost: Cost) -> NoReturn:
    """Say what a command would cost, and end it."""
    shape = architecture_of(model)
    size = bytes_per_weight(dtype)
    computed = 1 if cost.cached else cost.places
    per_row = computed * (2 * shape.n_params + 4 * shape.n_layers * cost.places * shape.n_heads * shape.d_head)
    seconds = (cost.passes + 2 * cost.backward) * per_row / _operations_per_second(shape.d_model)
    weights = cost.copies * shape.n_params * size
    widest = 4 * cost.rows * cost.places * max(3 * shape.d_mlp, shape.d_vocab_out)
    results: dict[str, Any] = {
        "forward_passes": round(cost.passes),
        "backward_passes": round(cost.backward),
        "places": cost.places,
        "at_least_seconds": round(seconds, 3),
        "weights_bytes": weights,
        "memory_bytes": weights + widest,
    }
    report.say(
        f"{model}: at most {cost.passes:,.0f} forward passes of one row of {cost.places} places"
        + (f", {cost.backward:,.0f} of them also backward" if cost.backward else ""),
        f"time: at least {_readable(seconds)} on this machine's CPU (work divided by the speed of one matrix product)",
        f"memory: {weights / 1e9:.2f} GB of weights ({dtype}), about {(weights + widest) / 1e9:.2f} GB in all",
    )
    # A dry run leaves nothing behind, so its report has no folder.
    Report(report.command, report.settings, None, report.as_json).finish(results)
    raise typer.Exit


def check_layers(model: str, layers: Iterable[int]) -> None:
    """Refuse blocks that the model does not have.

    Raises:
        ValueError: one of them.
    """
    depth = architecture_of(model).n_layers
    if outside := [layer for layer in layers if not -depth <= layer < depth]:
        raise ValueError(f"layer={outside[0]}; the blocks of {model} are 0 to {depth - 1}, or negative from the end")


def bytes_per_weight(dtype: str) -> int:
    """Of a dtype by its name.

    Raises:
        ValueError: another name.
    """
    if dtype not in BYTES:
        raise ValueError(f"dtype {dtype!r} is unknown; it is one of {', '.join(BYTES)}")
    return BYTES[dtype]


def _operations_per_second(width: int) -> float:
    """Speed of a matrix product of this width, the best of three."""
    left, right = torch.ones(512, width), torch.ones(width, 4 * width)
    left @ right
    best = min(_timed(left, right) for _ in range(3))
    return 2.0 * 512 * width * 4 * width / best


def _timed(left: Any, right: Any) -> float:
    begun = time.perf_counter()
    left @ right
    return time.perf_counter() - begun


def _readable(seconds: float) -> str:
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (1.5e5, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"
