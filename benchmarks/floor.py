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

    python benchmarks/floor.py [--rounds 5] [--threads 1] [--jobs trace,denoise] [--out floor.json]
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import rome
import torch

# tests/oracles holds what tests and benchmarks share.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from oracles.memory import peak_of_tensors
from table.jobs import SIZES, Job, Subject
from table.operations import Operations, timed, timed_alone
from table.scaling import by_size, by_workers, starts

RATE_TARGET, WORK_TARGET, MAX_BYTES = 0.7, 1.1, 2**30


def measure(job: Job, rounds: int, subject: Subject) -> dict[str, Any]:
    """Measure one job. Returns its line of the table."""
    operations = Operations(subject.model)
    with operations.recorded():
        job.run()
    timed_alone(operations.network)
    rounds_of_three = [
        (timed(job.run), timed_alone(operations.products), timed_alone(operations.network)) for _ in range(rounds)
    ]
    seconds = statistics.median(each[0] for each in rounds_of_three)
    row: dict[str, Any] = {"model": subject.name, "job": job.name, "seconds": seconds}
    row["rate"], row["network"] = (statistics.median(each[i] / each[0] for each in rounds_of_three) for i in (1, 2))
    row["gflops"] = operations.flops / seconds / 1e9
    row["work"] = operations.token_layers / job.least()
    weights = sum(weight.nbytes for weight in subject.model.parameters())
    row["memory"] = (weights + peak_of_tensors(job.run)) / (weights + MAX_BYTES)
    return row


def show(row: dict[str, Any], targets: bool) -> None:
    """Print a line of the table."""
    misses = [
        name for name, met in (("rate", row["rate"] >= RATE_TARGET), ("work", row["work"] <= WORK_TARGET)) if not met
    ]
    verdict = ("misses " + ", ".join(misses) if misses else "met") if targets else ""
    print(
        f"{row['model']:20} {row['job']:24} {1e3 * row['seconds']:8.0f} {row['gflops']:8.1f} {row['rate']:6.0%} "
        f"{row['network']:8.0%} {row['work']:6.2f} {row['memory']:7.0%}  {verdict}",
        flush=True,
    )


def main(rounds: int = 5, threads: int = 1, chosen: str = "", out: Path | None = None) -> dict[str, Any]:
    """Print the table and the lines below it. Returns their numbers."""
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {threads} threads, float32, median of {rounds} alternating rounds\n")
    print(
        f"{'model':20} {'job':24} {'time, ms':>8} {'GFLOP/s':>8} {'rate':>6} {'network':>8} {'work':>6} {'memory':>7}"
    )
    rows = []
    for size in SIZES:
        for variant in ("masked", "causal"):
            subject = Subject(variant, size)
            for job in subject.jobs():
                if any(name in job.name for name in chosen.split(",")):
                    row = measure(job, rounds, subject)
                    show(row, targets=size == next(iter(SIZES)))
                    rows.append(row)
    print()
    started = dict(starts(rounds))
    for name, seconds in started.items():
        print(f"{name}: {seconds:.2f} s of processor time")
    print()
    searches = rome.main(rounds, threads)
    print()
    scaling = list(by_size(rounds)) if out is not None else []
    scaling += list(by_workers(rounds))
    for each in scaling:
        print(f"{each['kind']}, {each['value']} {each['axis']}: {1e3 * each['seconds']:.1f} ms a fact")
    table = {"torch": torch.__version__, "threads": threads, "rounds": rounds, "rows": rows, "scaling": scaling}
    table |= {"starts": started, "searches": searches}
    if out is not None:
        out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", default="", help="parts of the names of jobs, separated by commas; by default all")
    parser.add_argument("--out", type=Path, help="JSON file of the numbers, with the cost of a trace at several sizes")
    arguments = parser.parse_args()
    if arguments.jobs and arguments.out:
        parser.error("--out writes what a page shows of all jobs, so it goes without --jobs")
    main(arguments.rounds, arguments.threads, arguments.jobs, arguments.out)
