"""How far each job is from what the machine and arithmetic allow.

For every job, on a model with 8 layers, d=512 and vocabulary 32000, the benchmark prints in one table

    rate     operations per second in the job's matrix products, over that of the same products alone, with the same
             threads, alternating with it
    network  the time of those products and of the other operations of blocks (norms, rotations, softmax, MLP) and of
             gradients alone, over that of the job: what is missing to 100% is the library's own
    work     token-layers, positions that pass a block summed over rows and blocks, over the least that the job can
             take; `tests/oracles/least_work.py` says for each job why it is the least

Alone, the recorded operations run one after the other in the order of the job: on the model's own weights, in the
layout, precision and order in which the job reads them, so that they come from memory as often as in the job, and on
one activation of each shape. The first pass over all of them is not measured.

Targets: a rate of at least 70 %, and work of at most 1.1. With `--threads 1`, times are those of the process instead of
the clock's, for a machine that others load.

    python benchmarks/floor.py [--rounds 5] [--threads 2] [--jobs trace,denoise]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from diffusion_lens import HookedDiffusionTransformer, Query
from diffusion_lens.analysis import (
    TaughtCanvas,
    TaughtPair,
    answer_probability,
    causal_trace,
    optimize_value,
    patch_grid,
    reversal_signatures,
    second_moment,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.model.block import Block

# tests/oracles holds what tests and benchmarks share.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from oracles import least_work
from oracles.distinct_branches import continued_positions
from oracles.traced_shapes import NOISE, SUBJECT, Shape

SIZES = {"n_layers": 8, "d_model": 512, "d_mlp": 2048, "n_heads": 8, "d_vocab": 32000, "n_pos": 12, "samples": 4}
LAYERS, SAMPLES, N_POS, ANSWER, STEPS = 8, 4, 12, 3, 3
PROMPT = N_POS - ANSWER
LENGTH, LOOP_STEPS = 52, 16
EDITED, ITERATIONS = 3, 10
RATE_TARGET, WORK_TARGET = 0.7, 1.1


@dataclass(frozen=True)
class Job:
    """A job to measure.

    Attributes:
        name: Name in the table.
        run: The job.
        least: The least number of token-layers.
    """

    name: str
    run: Callable[[], object]
    least: Callable[[], int]


class Operations(TorchDispatchMode):
    """Records the operations of a job on tensors: the matrix products, and the other ones of the network.

    Args:
        model: The model of the job.

    Attributes:
        products: Matrix products, in order.
        network: The same with the other operations of blocks and of gradients.
        flops: Operations of all products on single numbers.
        token_layers: Positions that pass a block, summed over rows and blocks.
    """

    def __init__(self, model: HookedDiffusionTransformer) -> None:
        super().__init__()
        self.in_block = False
        self.weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        self.activations: dict[Any, Tensor] = {}
        self.products: list[Callable[[], object]] = []
        self.network: list[Callable[[], object]] = []
        self.flops = self.token_layers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func.overloadpacket.__name__.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm")
        in_network = self.in_block or torch._C._current_graph_task_id() >= 0  # or in a backward pass
        if is_product:
            one, other = args[-2:]
            self.flops += 2 * one.numel() * other.shape[-1]
        if is_product or (in_network and not func.is_view):
            alone = partial(func, *tree_map(self._kept, args), **tree_map(self._kept, kwargs or {}))
            self.network.append(alone)
            if is_product:
                self.products.append(alone)
        return func(*args, **(kwargs or {}))

    def _kept(self, x: Any) -> Any:
        """An argument for the operation alone."""
        if not isinstance(x, Tensor):
            return x
        # Indices remain as they are.
        if x.untyped_storage().data_ptr() in self.weights or not x.is_floating_point() or 0 in x.stride():
            return x.detach()
        kind = x.shape, x.stride(), x.dtype
        if kind not in self.activations:
            self.activations[kind] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).fill_(1)
        return self.activations[kind]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records what happens inside."""
        forward = Block.forward

        def counted(block: Any, resid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.token_layers += resid.shape[0] * resid.shape[1]
            self.in_block = True
            try:
                return forward(block, resid, *args, **kwargs)
            finally:
                self.in_block = False

        Block.forward = counted  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            Block.forward = forward  # type: ignore[method-assign]


@torch.no_grad()
def timed_alone(operations: list[Callable[[], object]]) -> float:
    """Duration of recorded operations."""

    def run() -> None:
        for operation in operations:
            operation()

    return timed(run)


def timed(run: Callable[[], object]) -> float:
    """Duration of a call in seconds: of the process if it has one thread, which other processes do not change."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    run()
    return clock() - started


class Subject:
    """A model with its query and a denoising run of it."""

    def __init__(self, variant: str) -> None:
        self.masked = variant == "masked"
        self.shape = Shape(variant, **SIZES)
        with torch.no_grad():
            self.model: HookedDiffusionTransformer = self.shape.build()
        self.tokens = torch.randint(self.shape.d_vocab - 1, (N_POS,), generator=torch.Generator().manual_seed(0))

    @cached_property
    def query(self) -> Query:
        """An answer of random tokens, which the run does not write."""
        answer = self.tokens[PROMPT:]
        canvas = self.tokens.clone()
        canvas[PROMPT:] = self.shape.d_vocab - 1
        canvas = canvas if self.masked else self.tokens[:-1]
        return Query(canvas, SUBJECT, tuple(range(PROMPT, N_POS)), tuple(answer.tolist()))

    @cached_property
    def run(self) -> Any:
        """The run that fills the answer's positions."""
        prompt = self.query.tokens[None] if self.masked else self.tokens[None, :PROMPT]
        return self.model.denoise(prompt, length=N_POS, **({"steps": STEPS} if self.masked else {}))

    def loop(self, prompt: int) -> Callable[[], Any]:
        """A denoising run of a prompt of this length."""
        tokens = torch.randint(self.shape.d_vocab - 1, (1, prompt), generator=torch.Generator().manual_seed(prompt))
        guided = {"steps": LOOP_STEPS, "cfg_scale": 0.8} if self.masked else {}
        return lambda: self.model.denoise(tokens, length=LENGTH, **guided)

    def jobs(self) -> list[Job]:
        """The jobs of this model."""
        model, query, kind = self.model, self.query, "MDM" if self.masked else "AR"
        noise = {"noise": NOISE, "samples": SAMPLES}
        one_trace = least_work.trace(LAYERS, SAMPLES, N_POS, None)
        along = least_work.traces_along_a_text(LAYERS, SAMPLES, PROMPT, SUBJECT[0], ANSWER)
        last = least_work.trace(LAYERS, SAMPLES, N_POS - 1, SUBJECT[0])
        steps = range(self.run.n_steps)
        # Steps that reveal nothing show the network one canvas, and restoring a state there changes nothing.
        canvases = len(self.run.revealed_at[self.run.revealed_at >= 0].unique())

        looped = least_work.denoising(LAYERS, N_POS, canvases) if self.masked else LAYERS * (N_POS - 1)

        def temporal() -> int:
            traces = canvases * one_trace if self.masked else last
            continued = continued_positions(model, query, self.run, not self.masked, noise)
            return least_work.temporal(traces, LAYERS, SAMPLES, looped // LAYERS, continued)

        jobs = [
            Job(
                f"trace, {kind}",
                lambda: causal_trace(model, query, **noise),
                lambda: one_trace if self.masked else last,
            ),
            Job(
                f"trajectory trace, {kind}",
                lambda: trace_trajectory(model, query, steps, trajectory=self.run, **noise),
                lambda: canvases * one_trace if self.masked else along,
            ),
            Job(
                f"temporal effect, {kind}",
                lambda: temporal_effect(model, query, trajectory=self.run, **noise),
                temporal,
            ),
            Job(f"v*, {kind}", self.value, self.least_of_value),
        ]
        if not self.masked:
            return [Job("denoise, AR", self.loop(20), lambda: least_work.growing(LAYERS, LENGTH)), *jobs]
        batch = self.tokens.repeat(8, 3)
        return [
            Job("forward", lambda: model(batch), lambda: least_work.forward(LAYERS, 8, 3 * N_POS)),
            *[
                Job(f"denoise, prompt {prompt}", loop, lambda loop=loop: self.least_of_loop(loop()))
                for prompt, loop in ((20, self.loop(20)), (34, self.loop(34)))
            ],
            *jobs,
            *[self.patching(site) for site in ("resid_pre", "mlp_out")],
            Job("second moment", lambda: second_moment(model, batch, EDITED), self.least_of_moment),
            Job("signatures", self.signatures, lambda: least_work.signatures(LAYERS, 8, N_POS)),
        ]

    def least_of_loop(self, run: Any) -> int:
        """Steps that reveal nothing need no pass."""
        revealing = len(run.revealed_at[run.revealed_at >= 0].unique())
        return least_work.denoising(LAYERS, LENGTH, revealing, branches=2)

    def patching(self, site: str) -> Job:
        """A grid of one site between prompts that differ at the subject."""
        other = self.query.tokens.clone()
        other[slice(*SUBJECT)] += 1
        metric = answer_probability(self.model, self.query)
        differs = [SUBJECT[1] - SUBJECT[0] if site == "resid_pre" else N_POS, *[N_POS] * (LAYERS - 1)]
        return Job(
            f"patch grid, {site}",
            lambda: patch_grid(self.model, self.query.tokens[None], other[None], metric, site),
            lambda: least_work.patching(LAYERS, N_POS, differs, after=site != "resid_pre"),
        )

    @property
    def request(self) -> Query:
        """A request of one prompt."""
        return self.query

    def value(self) -> object:
        """The search for v*, with an essence prompt of the subject and two tokens."""
        stop = SUBJECT[1] + 2 + self.masked
        tokens = torch.cat([self.tokens[: SUBJECT[1] + 2], torch.tensor([self.shape.d_vocab - 1] * self.masked).long()])
        assert len(tokens) == stop
        essence = Query(tokens, SUBJECT, (), ())
        return optimize_value(self.model, self.request, EDITED, essence=essence, steps=ITERATIONS, stop_below=0.0)

    def least_of_value(self) -> int:
        """On the AR baseline, the vector reaches the positions from the subject's last token on."""
        prompts = [len(self.query.tokens), SUBJECT[1] + 2 + self.masked]
        reached = prompts if self.masked else [n - (SUBJECT[1] - 1) for n in prompts]
        return least_work.search(LAYERS, EDITED, ITERATIONS, sum(reached), sum(prompts))

    def least_of_moment(self) -> int:
        """The corpus is eight texts of one length."""
        return least_work.second_moment(EDITED, 8 * 3 * N_POS)

    def signatures(self) -> object:
        """The signatures of eight pairs."""
        generator, mask = torch.Generator().manual_seed(0), self.shape.d_vocab - 1
        pairs = []
        for _ in range(8):
            canvases = []
            for reader, source in ((1, 9), (9, 1)):
                tokens = torch.randint(mask, (N_POS,), generator=generator)
                answer = int(tokens[reader])
                tokens[reader] = mask
                canvases.append(TaughtCanvas(tokens, reader, answer, source))
            pairs.append(TaughtPair(*canvases))
        return reversal_signatures(self.model, pairs, max_bytes=2**31)


def measure(job: Job, rounds: int, model: HookedDiffusionTransformer) -> tuple[float, float]:
    """Print one line of the table. Returns the rate over that of the products alone, and the work over the least."""
    operations = Operations(model)
    with operations.recorded():
        job.run()
    least = job.least()
    timed_alone(operations.network)
    rounds_of_three = [
        (timed(job.run), timed_alone(operations.products), timed_alone(operations.network)) for _ in range(rounds)
    ]
    own, alone, _ = (statistics.median(column) for column in zip(*rounds_of_three, strict=True))
    share, network = (statistics.median(each[i] / each[0] for each in rounds_of_three) for i in (1, 2))
    work = operations.token_layers / least
    met = [value for value, is_met in (("rate", share >= RATE_TARGET), ("work", work <= WORK_TARGET)) if not is_met]
    print(
        f"{job.name:24} {own:7.2f} s {operations.flops / own / 1e9:7.1f} {operations.flops / alone / 1e9:7.1f} GFLOP/s "
        f"{share:6.0%} {network:8.0%}   {operations.token_layers:9,} {least:9,} {work:6.2f}   "
        f"{'misses ' + ', '.join(met) if met else 'met'}",
        flush=True,
    )
    return share, work


def main(rounds: int = 5, threads: int | None = None, chosen: str = "") -> dict[str, tuple[float, float]]:
    """Print the table. Returns both numbers of each job."""
    if threads:
        torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {rounds} alternating rounds")
    print(f"{SIZES}\n")
    print(
        f"{'job':24} {'time':>9} {'job':>7} {'alone':>7} {'':7} {'rate':>6} {'network':>8}   "
        f"{'work':>9} {'least':>9} {'ratio':>6}"
    )
    results = {}
    for variant in ("masked", "causal"):
        subject = Subject(variant)
        for job in subject.jobs():
            if any(name in job.name for name in chosen.split(",")):
                results[job.name] = measure(job, rounds, subject.model)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--jobs", default="", help="parts of the names of jobs, separated by commas; by default all")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.threads, arguments.jobs)
