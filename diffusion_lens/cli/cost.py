"""Cost estimates for --dry-run, made before a model is downloaded or loaded.

A forward pass of one row takes two operations per weight and position, plus those of attention. A backward pass takes
twice as many. The time estimate divides the operations by the peak rate of the device. It is therefore a lower bound:
long rows come close to it, and short rows take several times as long.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from diffusion_lens.cli.load_model import ModelChoice, bytes_per_weight
from diffusion_lens.cli.report import Report
from diffusion_lens.cli.speed import operations_per_second

if TYPE_CHECKING:
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.facts import Fact


@dataclass(frozen=True)
class Cost:
    """Work of a command, in forward passes of one row.

    Attributes:
        passes: Number of forward passes of one row. A pass through part of the network counts in proportion.
        positions: Number of positions of each row.
        rows: Largest number of rows in one batch.
        backward: Number of passes that also have a backward pass.
        copies: Copies of the weights in memory: 1 for inference, 4 for training in float32.
        cached: Whether a pass computes one position only and caches the others (generation of a text that grows).
        batch_bytes: Bytes of one batch in addition to the weights; by default estimated from `rows`.
    """

    passes: int | float
    positions: int
    rows: int
    backward: int | float = 0
    copies: int = 1
    cached: bool = False
    batch_bytes: int | None = None


def denoising(
    model: ModelChoice, steps: Iterable[int], length: int, cfg_scale: float, facts: int = 1, rows: int = 1
) -> Cost:
    """Cost of denoising each fact at each number of steps, in batches of `rows`. A text that grows takes its tokens one
    by one, with a key/value cache."""
    if model.shape().grows:
        return Cost(facts * length, length, rows, cached=True)
    branches = 2 if cfg_scale else 1
    return Cost(facts * sum(steps) * branches, length, rows * branches)


def guessed_tokens(text: str) -> int:
    """Number of tokens of a text whose tokenizer is not on this machine: two for each word."""
    return 2 * len(text.split())


def laid_out(model: ModelChoice, layout: "CanvasLayout", fact: "Fact") -> tuple[int, int]:
    """Number of positions of a fact's canvas, and of tokens of its answer; a guess where the tokenizer is not here.

    Raises:
        ValueError: The fact does not fit on the canvas.
    """
    outline = model.without_weights()
    if outline is None:
        return layout.length or guessed_tokens(f"{fact.prompt}{fact.answer}"), guessed_tokens(fact.answer)
    query = layout.query(outline, fact)
    return len(query.tokens), len(query.answer_tokens)


def trace_grids(model: ModelChoice, n_positions: int, samples: int, grids: int) -> Cost:
    """Cost of full grids. A state restored after block l of L runs the L - l blocks above it for each noise sample."""
    layers = model.shape().n_layers
    return Cost(grids * (1 + samples * (1 + n_positions * (layers - 1) / 2)), n_positions, 1 + samples)


def operations(model: ModelChoice, cost: Cost) -> int | float:
    """Number of operations of a work on a model. A backward pass counts twice."""
    from weight_conversion import n_params

    shape = model.shape()
    computed = 1 if cost.cached else cost.positions
    per_row = computed * (
        2 * n_params(shape, active=True) + 4 * shape.n_layers * cost.positions * shape.n_heads * shape.d_head
    )
    return (cost.passes + 2 * cost.backward) * per_row


def bytes_in_all_and_of_weights(model: ModelChoice, cost: Cost) -> tuple[int, int]:
    """Memory of a work: in all, and of its weights alone."""
    from weight_conversion import n_params

    shape = model.shape()
    weights = cost.copies * n_params(shape) * bytes_per_weight(model.dtype)
    activations = cost.batch_bytes
    if activations is None:
        activations = 4 * cost.rows * cost.positions * max(3 * shape.d_mlp, shape.d_vocab_out)
    return weights + activations, weights


def show(report: Report, work: Sequence[tuple[ModelChoice, Cost]], flops: float | None = None) -> NoReturn:
    """Report the cost of a command, and end it.

    The results are the passes and seconds of all models, the positions of the longest row, and the memory of the model
    that needs most, because a command holds one model at a time.

    Args:
        report: Output of the command.
        work: Models of the command, each with its work.
        flops: Operations per second of the device. `None` uses the built-in table.
    """
    seconds = 0.0
    memory: list[tuple[int, int]] = []  # of each model: in all, and of its weights
    for model, cost in work:
        rate, device = operations_per_second(model.device, model.dtype, model.shape().d_model, flops)
        seconds += operations(model, cost) / rate
        memory.append(bytes_in_all_and_of_weights(model, cost))
        report.say(
            f"{model.name}: at most {cost.passes:,.0f} forward passes of one row of {cost.positions} positions"
            + (f", {cost.backward:,.0f} of them with a backward pass" if cost.backward else "")
        )
    in_all, weights = max(memory)
    results: dict[str, Any] = {
        "forward_passes": round(sum(cost.passes for _, cost in work)),
        "backward_passes": round(sum(cost.backward for _, cost in work)),
        "positions": max(cost.positions for _, cost in work),
        "at_least_seconds": round(seconds, 3),
        "priced_for": device,
        "weights_bytes": weights,
        "memory_bytes": in_all,
    }
    largest = f" of {work[memory.index((in_all, weights))][0].name}" if len(work) > 1 else ""
    report.say(
        f"time: at least {readable(seconds)} on {device}",
        f"memory: {weights / 1e9:.2f} GB of weights{largest} ({model.dtype}), about {in_all / 1e9:.2f} GB in all",
    )
    # A dry run writes no files, so its report has no folder.
    Report(report.command, report.settings, None, report.as_json).finish(results)
    raise typer.Exit


def check_layers(model: ModelChoice, layers: Iterable[int]) -> None:
    """Check layers without loading the model. A model that must be downloaded first is not checked.

    Raises:
        ValueError: The model does not have a layer, or a layer occurs twice.
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
            raise ValueError(f"layer={layer} names a block twice; name each once")
        seen.add(layer % depth)


def readable(seconds: float) -> str:
    """Seconds in a unit of a suitable size."""
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (1.5e5, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"
