"""What a command will cost: --dry-run, before anything is downloaded or loaded.

A row's pass through the network takes two operations a weight and place, and attention on top; a backward pass twice
that of a forward one. The time is that of so many operations at the fastest rate of the device: a lower bound, which
long rows come near and short ones exceed by some times.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import typer

from diffusion_lens.cli.load_model import ModelChoice, bytes_per_weight
from diffusion_lens.cli.report import Report
from diffusion_lens.cli.speed import operations_per_second


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


def denoising(
    model: ModelChoice, steps: Iterable[int], length: int, cfg_scale: float, facts: int = 1, rows: int = 1
) -> Cost:
    """Facts asked in runs of so many steps, `rows` of them together; a causal model writes token by token."""
    if model.shape().is_causal:
        return Cost(facts * length, length, rows, cached=True)
    branches = 2 if cfg_scale else 1
    return Cost(facts * sum(steps) * branches, length, rows * branches)


def show(report: Report, model: ModelChoice, cost: Cost, flops: float | None = None) -> NoReturn:
    """Say what a command would cost, and end it.

    Args:
        flops: operations a second of the device, if its table's are not meant.
    """
    shape = model.shape()
    size = bytes_per_weight(model.dtype)
    rate, where = operations_per_second(model.device, model.dtype, shape.d_model, flops)
    computed = 1 if cost.cached else cost.places
    per_row = computed * (2 * shape.n_params + 4 * shape.n_layers * cost.places * shape.n_heads * shape.d_head)
    seconds = (cost.passes + 2 * cost.backward) * per_row / rate
    weights = cost.copies * shape.n_params * size
    widest = 4 * cost.rows * cost.places * max(3 * shape.d_mlp, shape.d_vocab_out)
    results: dict[str, Any] = {
        "forward_passes": round(cost.passes),
        "backward_passes": round(cost.backward),
        "places": cost.places,
        "at_least_seconds": round(seconds, 3),
        "priced_for": where,
        "weights_bytes": weights,
        "memory_bytes": weights + widest,
    }
    report.say(
        f"{model.name}: at most {cost.passes:,.0f} forward passes of one row of {cost.places} places"
        + (f", {cost.backward:,.0f} of them also backward" if cost.backward else ""),
        f"time: at least {_readable(seconds)} on {where}",
        f"memory: {weights / 1e9:.2f} GB of weights ({model.dtype}), about {(weights + widest) / 1e9:.2f} GB in all",
    )
    # A dry run leaves nothing behind, so its report has no folder.
    Report(report.command, report.settings, None, report.as_json).finish(results)
    raise typer.Exit


def check_layers(model: ModelChoice, layers: Iterable[int]) -> None:
    """Refuse blocks that are named twice or that a model does not have, if it need not be fetched to know that.

    Raises:
        ValueError: one of them.
    """
    shape = model.known_shape()
    if shape is None:
        return
    depth, seen = shape.n_layers, set()
    for layer in layers:
        if not -depth <= layer < depth:
            raise ValueError(
                f"layer={layer}; the blocks of {model.name} are 0 to {depth - 1}, or negative from the end"
            )
        if layer % depth in seen:
            raise ValueError(f"layer={layer} names a block twice; give each once")
        seen.add(layer % depth)


def _readable(seconds: float) -> str:
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (1.5e5, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"
