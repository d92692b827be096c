"""What surrounds the table: the cost of a trace against the sizes of its problem and workers, and the time to start."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from oracles.traced_shapes import NOISE, SUBJECT, Shape
from table.jobs import SIZES
from table.operations import timed

from diffusion_lens import HookedDiffusionTransformer, Query
from diffusion_lens.analysis import (
    AverageSettings,
    LocalWorkers,
    TraceSettings,
    average_indirect_effect,
    causal_trace,
)
from diffusion_lens.data import toy_facts

USUAL = {"n_layers": 4, "n_pos": 24, "samples": 5}
VALUES = {"n_layers": (2, 4, 8, 12), "n_pos": (12, 24, 36, 48), "samples": (1, 5, 10, 20)}
LABELS = {"n_layers": "layers", "n_pos": "positions", "samples": "samples"}
WORKERS, FACTS, SAMPLES, LENGTH, ANSWER = (1, 2), 16, 40, 24, 3
STARTS = {
    "import diffusion_lens": ["-c", "import diffusion_lens"],
    "from diffusion_lens import HookedDiffusionTransformer": [
        "-c",
        "from diffusion_lens import HookedDiffusionTransformer",
    ],
    "diffusion-lens --help": ["-m", "diffusion_lens", "--help"],
}


def by_size(rounds: int) -> Iterator[dict[str, Any]]:
    """The time of a trace against layers, positions and samples."""
    for variant, kind in (("masked", "MDM"), ("causal", "AR")):
        for axis, value in ((axis, value) for axis, values in VALUES.items() for value in values):
            shape = Shape(variant, **{**SIZES["4 layers, d=128"], **USUAL, axis: value})
            with torch.no_grad():
                model = shape.build()
            settings = TraceSettings(noise=NOISE, samples=shape.samples)
            work = partial(causal_trace, model, _query(model, shape.n_pos), settings=settings)
            work()
            seconds = statistics.median(timed(work) for _ in range(rounds))
            yield {"kind": kind, "axis": LABELS[axis], "value": value, "seconds": seconds}


def _query(model: HookedDiffusionTransformer, n_pos: int) -> Query:
    positions, answer = tuple(range(n_pos - ANSWER, n_pos)), tuple(range(40, 40 + ANSWER))
    tokens = torch.arange(3, 3 + n_pos)
    if model.cfg.is_autoregressive:
        tokens = torch.cat([tokens[: positions[0]], torch.tensor(answer[:-1])])
    else:
        tokens[positions[0] :] = model.cfg.blank
    return Query(tokens, SUBJECT, positions, answer)


def by_workers(rounds: int) -> Iterator[dict[str, Any]]:
    """The time of a study of facts on processes of this machine, by the clock on the wall, after a study that starts
    them and loads the model. With one thread in each, two processes take a core each."""
    os.environ["OMP_NUM_THREADS"] = "1"  # which the processes inherit
    facts = toy_facts.load().facts(trained="p2d", asked="p2d")[:FACTS]
    for name, kind in (("tiny-mdm", "MDM"), ("tiny-ar", "AR")):
        model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
        length = None if model.cfg.is_autoregressive else LENGTH
        settings = AverageSettings(noise=NOISE, samples=SAMPLES, length=length, known="all")
        for number in WORKERS:
            with LocalWorkers(number) as executor:
                study = partial(average_indirect_effect, model, facts, settings=settings, executor=executor)
                study()
                times = []
                for _ in range(rounds):
                    started = time.perf_counter()
                    study()
                    times.append(time.perf_counter() - started)
            seconds = statistics.median(times) / len(facts)
            yield {"kind": kind, "axis": "workers", "value": number, "seconds": seconds}


def starts(rounds: int) -> Iterator[tuple[str, float]]:
    """Processor seconds of a new process: of an import, and of the command line's help."""
    for name, arguments in STARTS.items():
        times = []
        for _ in range(rounds):
            before = os.times()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            after = os.times()
            times.append(sum(after[2:4]) - sum(before[2:4]))
        yield name, statistics.median(times)
