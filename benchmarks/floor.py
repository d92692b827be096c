"""One table: how far each job is from what the machine and arithmetic allow.

Of every job on four random models, a masked diffusion model and an AR baseline of two sizes, the benchmark prints

    time     of the job
    rate     operations per second in the job's matrix products, over that of the same products alone, with the same
             threads, alternating with it
    network  the time of those products and of the other operations of blocks (norms, rotations, softmax, MLP) and of
             gradients alone, over that of the job: what is missing to 100% is the library's own
    work     token-layers, positions that pass a block summed over rows and blocks, over the least that the job can
             take; `tests/oracles/least_work.py` says for each job why it is the least
    memory   the most bytes of tensors that the job has at once, with the weights, over the weights and `max_bytes`

Alone, the recorded operations run one after the other in the order of the job: on the model's own weights, in the
layout, precision and order in which the job reads them, so that they come from memory as often as in the job, and on
one activation of each shape. The first pass over all of them is not measured.

Targets, of the models with 8 layers: a rate of at least 70 %, and work of at most 1.1. On one thread times are those of
the process, for a machine that others load; with `--threads 2` they are the clock's. Below the table are the time to
start, the search for v* beside ROME's (`rome.py`), and the time of a study on one and two worker processes.
`--out floor.json` writes all numbers, for which a trace is also measured at several sizes.

With `--model`, the jobs are those of a pretrained causal model, and of the same weights read in both directions
(`table/real_jobs.py`). Some lines then have two more columns:

    ratio    the time of a straightforward procedure on transformers' network, over that of the job
    differs  the largest difference between the numbers of both

The targets are a rate of at least 85 %, in an update of the weights 70 %, work of at most 1.1, and a forward pass that
takes at most 1.02 times as long as transformers'. A job of more than 10 seconds is measured once, without the first
pass. Below the table is the memory of the traces.

    python benchmarks/floor.py [--rounds 5] [--threads 1] [--jobs trace,denoise] [--out floor.json]
    python benchmarks/floor.py --model smollm2-135m-instruct --rounds 3 --threads 2 [--jobs trace] [--out real.json]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rome
import torch

# tests/oracles holds what tests and benchmarks share.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from oracles.memory import peak_of_tensors
from table.jobs import SIZES, Job, Subject
from table.operations import Operations, clock, timed, timed_alone
from table.real_jobs import RealSubject
from table.scaling import by_size, by_workers, starts

WORK_TARGET, MAX_BYTES, LONG = 1.1, 2**30, 10.0


def measure(job: Job, rounds: int, subject: Subject | RealSubject) -> dict[str, Any]:
    """Measure one job. Returns its line of the table."""
    row: dict[str, Any] = {"model": subject.name, "job": job.name}
    operations, started = Operations(subject.model), clock()
    with operations.recorded():
        result = job.run()
    if clock() - started > LONG:
        rounds = 1
    else:
        timed_alone(operations.network)
    if job.plain is not None and job.difference is not None:
        row["differs"] = job.difference(result, job.plain())
    del result
    times = [
        (
            timed(job.run),
            timed_alone(operations.products),
            timed_alone(operations.network),
            0.0 if job.plain is None else job.times * timed(job.plain),
        )
        for _ in range(rounds)
    ]
    row["seconds"] = statistics.median(each[0] for each in times)
    row["rate"], row["network"], row["ratio"] = (
        statistics.median(each[i] / each[0] for each in times) for i in (1, 2, 3)
    )
    row["gflops"] = operations.flops / row["seconds"] / 1e9
    row["work"] = None if job.least is None else operations.token_layers / job.least()
    row["weights"] = sum(weight.nbytes for weight in subject.model.parameters())
    row["peak"] = peak_of_tensors(job.run)
    row["memory"] = (row["weights"] + row["peak"]) / (row["weights"] + MAX_BYTES)
    met = {
        "rate": row["rate"] >= job.rate,
        "work": (row["work"] or 0) <= WORK_TARGET,
        "ratio": row["ratio"] >= job.ratio,
    }
    row["misses"] = [name for name, is_met in met.items() if not is_met]
    return row


def show(row: dict[str, Any], targets: bool) -> None:
    """Print a line of the table."""
    verdict = ("misses " + ", ".join(row["misses"]) if row["misses"] else "met") if targets else ""
    work = "" if row["work"] is None else f"{row['work']:.2f}"
    beside = f"{row['ratio']:6.2f} {row['differs']:8.0e}" if "differs" in row else ""
    print(
        f"{row['model']:26} {row['job']:22} {1e3 * row['seconds']:8.0f} {row['gflops']:8.1f} {row['rate']:6.0%} "
        f"{row['network']:8.0%} {work:>6} {row['memory']:7.0%} {beside:15}  {verdict}",
        flush=True,
    )


def lines(subject: Subject | RealSubject, rounds: int, chosen: str, targets: bool) -> Iterator[dict[str, Any]]:
    """Measure and print the lines of a model."""
    for job in subject.jobs():
        if any(name in job.name for name in chosen.split(",")):
            row = measure(job, rounds, subject)
            show(row, targets)
            yield row


def main(
    rounds: int = 5, threads: int = 1, chosen: str = "", out: Path | None = None, model: str | None = None
) -> dict[str, Any]:
    """Print the table and the lines below it. Returns their numbers."""
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {threads} threads, float32, median of {rounds} alternating rounds\n")
    print(
        f"{'model':26} {'job':22} {'time, ms':>8} {'GFLOP/s':>8} {'rate':>6} {'network':>8} {'work':>6} {'memory':>7}"
        + ("" if model is None else f" {'ratio':>6} {'differs':>8}")
    )
    table: dict[str, Any] = {"torch": torch.__version__, "threads": threads, "rounds": rounds, "rows": []}
    if model is not None:
        for masked in (False, True):
            table["rows"] += lines(RealSubject(model, masked), rounds, chosen, targets=True)
        print()
        for row in (row for row in table["rows"] if row["job"].startswith("trace")):
            print(
                f"{row['model']}, {row['job']}: {row['peak'] / 1e6:.0f} MB of tensors, beside "
                f"{row['weights'] / 1e6:.0f} MB of weights; max_bytes allows {MAX_BYTES / 1e6:.0f} MB"
            )
    else:
        table |= of_random_models(rounds, threads, chosen, sizes=out is not None)
    if out is not None:
        out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return table


def of_random_models(rounds: int, threads: int, chosen: str, sizes: bool) -> dict[str, Any]:
    """The lines of the random models, and those below them; with `sizes` also the cost of a trace at several sizes."""
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        for variant in ("masked", "causal"):
            rows += lines(Subject(variant, size), rounds, chosen, targets=size == next(iter(SIZES)))
    print()
    started = dict(starts(rounds))
    for name, seconds in started.items():
        print(f"{name}: {seconds:.2f} s of processor time")
    print()
    searches = rome.main(rounds, threads)
    print()
    scaling = list(by_size(rounds)) if sizes else []
    scaling += list(by_workers(rounds))
    for each in scaling:
        print(f"{each['kind']}, {each['value']} {each['axis']}: {1e3 * each['seconds']:.1f} ms a fact")
    return {"rows": rows, "scaling": scaling, "starts": started, "searches": searches}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", default="", help="parts of the names of jobs, separated by commas; by default all")
    parser.add_argument("--out", type=Path, help="JSON file of the numbers, with the cost of a trace at several sizes")
    parser.add_argument("--model", help="name or path of a pretrained causal Llama, instead of random models")
    arguments = parser.parse_args()
    if arguments.jobs and arguments.out and arguments.model is None:
        parser.error("--out writes what a page shows of all jobs, so it goes without --jobs")
    main(arguments.rounds, arguments.threads, arguments.jobs, arguments.out, arguments.model)
