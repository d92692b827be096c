"""Cost estimates for --dry-run, made before a model is downloaded or loaded, by the formulas of `diffusion_lens.cost`.

Canvases are laid out by the model's tokenizer if it is on this machine; otherwise their lengths are guessed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.report import Report

if TYPE_CHECKING:
    from diffusion_lens.analysis.canvas_layout import CanvasLayout
    from diffusion_lens.config import DiffusionConfig
    from diffusion_lens.facts import Fact, Query


def config_of(model: ModelChoice) -> "DiffusionConfig":
    """The config of a model on its device, which need not be one of this machine."""
    from diffusion_lens.config import DiffusionConfig
    from diffusion_lens.cost import kind_of_device

    cfg = DiffusionConfig.from_architecture(model.shape(), device="cpu", dtype=model.dtype)
    cfg.device = kind_of_device(model.device)
    return cfg


def guessed_tokens(text: str) -> int:
    """Number of tokens of a text whose tokenizer is not on this machine: two for each word."""
    return 2 * len(text.split())


def query_of(model: ModelChoice, layout: "CanvasLayout", fact: "Fact") -> "Query":
    """A fact on its canvas; a canvas of guessed lengths where the tokenizer is not here.

    Raises:
        ValueError: The fact does not fit on the canvas.
    """
    query: Query = queries_of(model, [fact], layout.length, layout.first_tokens, layout.query)[0]
    return query


def queries_of(
    model: ModelChoice,
    facts: Sequence[Any],
    length: int | None,
    first_tokens: int | None,
    lay_out: Callable[..., Any],
) -> list[Any]:
    """Facts on their canvases, without those that do not fit; guesses where the tokenizer or the texts are not here.

    Args:
        length: Number of positions of a canvas.
        first_tokens: Number of tokens of the answer that are read.
        lay_out: Function from a model without weights and a fact to a query.

    Raises:
        ValueError: No fact fits.
    """
    from diffusion_lens.analysis.usable_facts import UsableFacts

    outline = model.without_weights() if any(fact.prompt for fact in facts) else None
    if outline is None:
        return [_guessed(model, fact, length, first_tokens) for fact in facts]
    if len(facts) == 1:
        return [lay_out(outline, facts[0])]
    return list(UsableFacts.of(facts, lambda fact: lay_out(outline, fact)).prepared.values())


def prompts_of(model: ModelChoice, facts: Sequence[Any]) -> list[int]:
    """Number of tokens of each fact's prompt; guesses where the tokenizer or the texts are not here."""
    outline = model.without_weights() if any(fact.prompt for fact in facts) else None
    if outline is None:
        return [guessed_tokens(fact.prompt) or 8 for fact in facts]
    return [outline.to_tokens(fact.prompt, truncate=False).shape[1] for fact in facts]


def _guessed(model: ModelChoice, fact: "Fact", length: int | None, first_tokens: int | None) -> "Query":
    """A canvas of guessed lengths; a fact without texts is eight tokens, a subject of four of them, and an answer."""
    import torch

    from diffusion_lens.facts import Query

    cfg = config_of(model)
    n_prompt, n_subject = (guessed_tokens(text) or guess for text, guess in ((fact.prompt, 8), (fact.subject, 4)))
    n_answer = guessed_tokens(fact.answer) or 4
    if length is not None and not cfg.grows:
        n_prompt, n_answer = min(n_prompt, length - 1), max(1, min(n_answer, length - n_prompt))
    answer = tuple(range(n_prompt, n_prompt + min(n_answer, first_tokens or n_answer)))
    total = n_prompt + len(answer) - 1 if cfg.grows else max(length or 0, n_prompt + n_answer)
    tokens = torch.zeros(total, dtype=torch.long)
    if cfg.has_mask:
        tokens[n_prompt:] = cfg.blank
    return Query(tokens, (0, min(n_subject, n_prompt)), answer, (0,) * len(answer))


def show(report: Report, work: Sequence[tuple[ModelChoice, Any]], flops: float | None = None) -> NoReturn:
    """Report the cost of a command, and end it.

    The results are the sums over all models, the positions of the longest row, and the memory of the model that needs
    most, because a command holds one model at a time.

    Args:
        report: Output of the command. Its setting `workers` divides the time.
        work: Models of the command, each with its work.
        flops: Operations per second of the device. `None` takes the device of the model.
    """
    import torch

    from diffusion_lens.analysis.workers.task import torch_threads
    from diffusion_lens.cost import find_device, with_rate

    workers, on_slurm = report.settings.get("workers") or 1, report.settings.get("slurm") is not None
    seconds = 0.0
    for model, cost in work:
        # Processes of this machine share its cores; a job of Slurm has its own.
        with torch_threads(max(1, torch.get_num_threads() // (1 if on_slurm else workers))):
            device = find_device(model.device, cost.cfg) if flops is None else with_rate(flops)
        seconds += cost.seconds(device, workers)
        report.say(
            f"{model.name}: about {cost.forward_passes:,.0f} forward passes of one row of {cost.positions} positions, "
            f"{cost.token_layers:,.0f} token-layers, {cost.flops:.3g} operations"
            + (f"; {cost.backward_passes:,.0f} passes with a backward pass" if cost.backward_passes else "")
        )
    largest, needed = max(work, key=lambda each: each[1].process_bytes)
    results: dict[str, Any] = {
        "forward_passes": round(sum(cost.forward_passes for _, cost in work)),
        "backward_passes": round(sum(cost.backward_passes for _, cost in work)),
        "positions": max(cost.positions for _, cost in work),
        "token_layers": round(sum(cost.token_layers for _, cost in work)),
        "flops": float(sum(cost.flops for _, cost in work)),
        "seconds": round(seconds, 3),
        "workers": workers,
        "priced_for": device.name,
        "weights_bytes": needed.weight_bytes,
        "tensor_bytes": needed.batch_bytes,
        "memory_bytes": needed.process_bytes,
    }
    of_largest = f" of {largest.name}" if len(work) > 1 else ""
    each = f" with {workers} workers" if workers > 1 else ""
    report.say(
        f"time: about {readable(seconds)} on {device.name}{each} ({device.source})",
        f"memory: {needed.weight_bytes / 1e9:.2f} GB of weights{of_largest} ({largest.dtype}), about "
        f"{needed.process_bytes / 1e9:.2f} GB in all, beside Python and its libraries",
    )
    if device.memory is not None and needed.process_bytes > device.memory:
        report.say(f"{device.name} has {device.memory / 1e9:.0f} GB: too little")
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
