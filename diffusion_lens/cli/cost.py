"""What a command costs, for --dry-run, before a model is downloaded or loaded (`diffusion_lens.analysis.planned_work`).

Texts are laid out by the model's tokenizer if it is on this machine; otherwise their lengths are guessed.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.report import FolderReport

if TYPE_CHECKING:
    from diffusion_lens.analysis.planned_work import PlannedWork
    from diffusion_lens.facts.fact import Fact
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer


def planned(
    model: ModelChoice, job: "Callable[[HookedDiffusionTransformer], object]", texts: Iterable[str] = ()
) -> "PlannedWork":
    """The work of a job on a model, for which it runs on the narrow network.

    Args:
        texts: The texts that the job reads, to guess their tokens without the tokenizer.
    """
    from diffusion_lens.analysis.planned_work import counting

    with counting(model.narrow(texts)) as counter, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what random weights answer
        job(counter.model)
    return counter.work


def some_of(facts: "Sequence[Fact]", model: ModelChoice) -> "list[Fact]":
    """Some of the facts of a study, evenly spread, whose work stands for that of all; one without the tokenizer.

    Those whose texts are not on this machine get invented ones.
    """
    letters = " ".join(letter * 4 for letter in "abcdefgh")
    number = min(4 if model.is_here else 1, len(facts))
    return [
        fact
        if fact.prompt
        else replace(fact, prompt=letters, subject=letters[:19], answer=f" {i:04d} xxxx yyyy zzzz", subject_start=None)
        for i, fact in enumerate(facts[j * len(facts) // number] for j in range(number))
    ]


def texts_of(facts: "Iterable[Fact]") -> list[str]:
    """The texts of facts."""
    return [text for fact in facts for text in (fact.prompt, fact.answer)]


def dry_run(
    report: FolderReport,
    model: ModelChoice,
    job: "Callable[[HookedDiffusionTransformer], object]",
    texts: Iterable[str] = (),
) -> None:
    """For a dry run, report the cost of a job on a model, and end the command."""
    if report.dry_run:
        show(report, [(model, planned(model, job, texts))])


def show(report: FolderReport, work: "Sequence[tuple[ModelChoice, PlannedWork]]") -> NoReturn:
    """Report the cost of a command, and end it.

    The results are the sums over all models, the positions of the longest row, and the memory of the model that needs
    most, because a command holds one model at a time.

    Args:
        report: Output of the command. Its setting `workers` divides the time. Without --flops, a pass is measured
            where the weights are on this machine.
        work: Models of the command, each with its work.
    """
    workers, flops = report.settings.get("workers") or 1, report.flops
    for model, cost in work:
        report.say(
            f"{model.name}: about {cost.forward_passes:,.0f} forward passes of one row of {cost.positions} positions, "
            f"{cost.token_layers:,.0f} token-layers, {cost.operations:.3g} operations"
            + (f"; {cost.backward_passes:,.0f} passes with a backward pass" if cost.backward_passes else "")
        )
    times = [cost.operations / flops if flops else _measured(model, cost) for model, cost in work]
    known = [each for each in times if each is not None]
    seconds = sum(known) / workers if len(known) == len(times) else None
    largest, needed = max(work, key=lambda each: each[1].process_bytes)
    results: dict[str, Any] = {
        "forward_passes": round(sum(cost.forward_passes for _, cost in work)),
        "backward_passes": round(sum(cost.backward_passes for _, cost in work)),
        "positions": max(cost.positions for _, cost in work),
        "token_layers": round(sum(cost.token_layers for _, cost in work)),
        "flops": float(sum(cost.operations for _, cost in work)),
        "seconds": None if seconds is None else round(seconds, 3),
        "workers": workers,
        "weights_bytes": needed.weight_bytes,
        "tensor_bytes": needed.batch_bytes,
        "memory_bytes": needed.process_bytes,
    }
    of_largest = f" of {largest.name}" if len(work) > 1 else ""
    each = f" with {workers} workers" if workers > 1 else ""
    source = f"{flops:.3g} operations per second" if flops else "by the time of one of its passes here"
    report.say(
        "time: unknown, because the weights or the device are not on this machine; give its operations per second with "
        "--flops"
        if seconds is None
        else f"time: about {readable(seconds)}{each} ({source})",
        f"memory: {needed.weight_bytes / 1e9:.2f} GB of weights{of_largest} ({largest.dtype}), about "
        f"{needed.process_bytes / 1e9:.2f} GB in all, beside Python and its libraries",
    )
    # A dry run writes no files, so its report has no folder.
    replace(report, out=None).finish(results)
    raise typer.Exit


def _measured(model: ModelChoice, work: "PlannedWork") -> float | None:
    """Seconds of work at the speed of one pass of its usual size; `None` where that cannot run."""
    import torch

    from diffusion_lens.model.config import kind_of_device

    if not work.calls:
        return 0.0
    if not model.is_here or kind_of_device(model.device) not in (kind_of_device(None), "cpu"):
        return None
    loaded = model.load()
    rows, positions = round(work.row_layers / work.calls), round(work.token_layers / work.row_layers)
    tokens = torch.zeros(max(1, rows), max(1, positions), dtype=torch.long)
    times = []
    with torch.no_grad(), loaded.at_time(0.5) if loaded.cfg.time_conditioning else torch.no_grad():
        for _ in range(3):
            started = time.perf_counter()
            loaded(tokens, logits_at=[-1]).sum().item()
            times.append(time.perf_counter() - started)
    passes = work.calls / loaded.cfg.n_layers * (1 + 2 * work.gradient_layers / work.row_layers)
    return min(times) * passes


def readable(seconds: float) -> str:
    """Seconds in a unit of a suitable size."""
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (1.5e5, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"
