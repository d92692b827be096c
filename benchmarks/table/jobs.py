"""The jobs of the table of `floor.py`, on random models, each with its least work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from oracles import least_work
from oracles.distinct_branches import continued_positions
from oracles.traced_shapes import NOISE, SUBJECT, Shape

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

# The first is the model of the targets; on the second, what surrounds matrix products takes as long as they do.
SIZES = {
    "8 layers, d=512": {"n_layers": 8, "d_model": 512, "d_mlp": 2048, "n_heads": 8, "d_vocab": 32000, "n_pos": 12},
    "4 layers, d=128": {"n_layers": 4, "d_model": 128, "d_mlp": 512, "n_heads": 4, "d_vocab": 512, "n_pos": 24},
}
SAMPLES, ANSWER, STEPS = 4, 3, 3
LENGTH, LOOP_STEPS = 52, 16
ROWS, PAIRS, ITERATIONS = 8, 8, 10


@dataclass(frozen=True)
class Job:
    """A job to measure.

    Attributes:
        name: Name in the table.
        run: The job.
        least: The least number of token-layers; `None` where the job draws its positions.
        rate: Target of the rate.
        plain: A straightforward procedure for the same numbers on transformers' network, or an equal part of it.
        times: Number of these parts.
        difference: The largest difference between what `run` and `plain` return.
        ratio: Target of the time of the procedure, over that of the job.
    """

    name: str
    run: Callable[[], Any]
    least: Callable[[], int] | None = None
    rate: float = 0.7
    plain: Callable[[], Any] | None = None
    times: int = 1
    difference: Callable[[Any, Any], float] | None = None
    ratio: float = 0.0


def denoising(
    name: str,
    model: HookedDiffusionTransformer,
    tokens: torch.Tensor,
    length: int,
    *,
    rate: float = Job.rate,
    **settings: Any,
) -> Job:
    """A denoising run of a prompt, with the settings of the loop; an AR baseline has none."""
    layers = model.cfg.n_layers

    def run() -> Any:
        return model.denoise(tokens, length=length, **settings)

    def least() -> int:
        if not settings:
            return least_work.growing(layers, length)
        # Steps that reveal nothing need no pass.
        at = run().revealed_at
        branches = 2 if settings.get("cfg_scale") else 1
        return least_work.denoising(layers, length, len(at[at >= 0].unique()), branches=branches)

    return Job(name, run, least, rate)


class Subject:
    """A model with its query and a denoising run of it."""

    def __init__(self, variant: str, size: str) -> None:
        self.masked = variant == "masked"
        self.kind = "MDM" if self.masked else "AR"
        self.name = f"{self.kind}, {size}"
        self.shape = Shape(variant, samples=SAMPLES, **SIZES[size])
        with torch.no_grad():
            self.model: HookedDiffusionTransformer = self.shape.build()
        self.layers, self.n_pos, self.prompt = self.shape.n_layers, self.shape.n_pos, self.shape.n_pos - ANSWER
        self.mask = self.shape.d_vocab - 1
        self.edited = self.layers // 2 - 1
        self.tokens = torch.randint(self.mask, (self.n_pos,), generator=torch.Generator().manual_seed(0))

    def query_of(self, answer: Sequence[int]) -> Query:
        """A query for these tokens behind the prompt."""
        canvas = self.tokens.clone()
        canvas[self.prompt :] = self.mask
        if not self.masked:
            canvas = torch.cat([self.tokens[: self.prompt], torch.tensor(answer[:-1])])
        return Query(canvas, SUBJECT, tuple(range(self.prompt, self.n_pos)), tuple(answer))

    @cached_property
    def query(self) -> Query:
        """An answer of random tokens, which the run does not write."""
        return self.query_of(self.tokens[self.prompt :].tolist())

    @cached_property
    def run(self) -> Any:
        """The run that fills the answer's positions."""
        prompt = self.query.tokens[None] if self.masked else self.tokens[None, : self.prompt]
        return self.model.denoise(prompt, length=self.n_pos, **({"steps": STEPS} if self.masked else {}))

    def jobs(self) -> list[Job]:
        """The jobs of this model."""
        own = [*self.tracing(), self.searching()]
        if not self.masked:
            return [self.denoising(20), *own]
        batch = self.tokens.repeat(ROWS, 3)
        n_pos = batch.shape[1]
        return [
            Job(
                "forward",
                torch.no_grad()(lambda: self.model(batch)),
                lambda: least_work.forward(self.layers, ROWS, n_pos),
            ),
            *[self.denoising(prompt) for prompt in (20, 34)],
            *own,
            *[self.patching(site) for site in ("resid_pre", "mlp_out")],
            Job(
                "second moment",
                lambda: second_moment(self.model, batch, self.edited),
                lambda: least_work.second_moment(self.edited, ROWS * n_pos),
            ),
            Job(
                "signatures",
                self.signatures,
                lambda: least_work.signatures(self.layers, PAIRS, self.n_pos),
            ),
        ]

    def denoising(self, prompt: int) -> Job:
        """A denoising run of a prompt of this length, with guidance on a masked diffusion model."""
        tokens = torch.randint(self.mask, (1, prompt), generator=torch.Generator().manual_seed(prompt))
        guided = {"steps": LOOP_STEPS, "cfg_scale": 0.8} if self.masked else {}
        name = f"denoise, prompt {prompt}" if self.masked else "denoise, AR"
        return denoising(name, self.model, tokens, LENGTH, **guided)

    def tracing(self) -> list[Job]:
        """Traces of a canvas, along a run, and of its final text."""
        model, query = self.model, self.query
        noise = {"noise": NOISE, "samples": SAMPLES}
        one_trace = least_work.trace(self.layers, SAMPLES, self.n_pos, None)
        last = least_work.trace(self.layers, SAMPLES, self.n_pos - 1, SUBJECT[0])
        along = least_work.traces_along_a_text(self.layers, SAMPLES, self.prompt, SUBJECT[0], ANSWER)
        steps = range(self.run.n_steps)
        # Steps that reveal nothing show the network one canvas, and restoring a state there changes nothing.
        canvases = len(self.run.revealed_at[self.run.revealed_at >= 0].unique())
        written = self.query_of(self.run.tokens[0, self.prompt :].tolist())
        looped = least_work.denoising(self.layers, self.n_pos, canvases)
        looped = looped if self.masked else self.layers * (self.n_pos - 1)

        def temporal() -> int:
            traces = canvases * one_trace if self.masked else last
            continued = continued_positions(model, query, self.run, not self.masked, noise)
            return least_work.temporal(traces, self.layers, SAMPLES, looped // self.layers, continued)

        jobs = [
            Job(
                f"trace, {self.kind}",
                lambda: causal_trace(model, query, **noise),
                lambda: one_trace if self.masked else last,
            ),
            Job(
                f"trajectory trace, {self.kind}",
                lambda: trace_trajectory(model, written, steps, trajectory=self.run, **noise),
                lambda: canvases * one_trace if self.masked else last,
            ),
            Job(
                f"temporal effect, {self.kind}",
                lambda: temporal_effect(model, query, trajectory=self.run, **noise),
                temporal,
            ),
        ]
        if not self.masked:
            # The canvases of a run that does not write the answer differ behind the prompt.
            other = Job(
                "other answer traced, AR",
                lambda: trace_trajectory(model, query, steps, trajectory=self.run, **noise),
                lambda: along,
            )
            jobs.insert(2, other)
        return jobs

    def patching(self, site: str) -> Job:
        """A grid of one site between prompts that differ at the subject."""
        other = self.query.tokens.clone()
        other[slice(*SUBJECT)] += 1
        metric = answer_probability(self.model, self.query)
        first = SUBJECT[1] - SUBJECT[0] if site == "resid_pre" else self.n_pos
        differs = [first, *[self.n_pos] * (self.layers - 1)]
        return Job(
            f"patch grid, {site}",
            lambda: patch_grid(self.model, self.query.tokens[None], other[None], metric, site),
            lambda: least_work.patching(self.layers, self.n_pos, differs, after=site != "resid_pre"),
        )

    def searching(self) -> Job:
        """The search for v*, with an essence prompt of the subject and two tokens."""
        end = torch.tensor([self.mask] * self.masked, dtype=torch.long)
        essence = Query(torch.cat([self.tokens[: SUBJECT[1] + 2], end]), SUBJECT, (), ())
        prompts = [len(self.query.tokens), len(essence.tokens)]
        # On the AR baseline, the vector reaches the positions from the subject's last token on.
        reached = prompts if self.masked else [n - (SUBJECT[1] - 1) for n in prompts]
        return Job(
            f"v*, {self.kind}",
            lambda: optimize_value(
                self.model, self.query, self.edited, essence=essence, steps=ITERATIONS, stop_below=0.0
            ),
            lambda: least_work.search(self.layers, self.edited, ITERATIONS, sum(reached), sum(prompts)),
        )

    def signatures(self) -> object:
        """The signatures of several pairs."""
        generator, pairs = torch.Generator().manual_seed(0), []
        for _ in range(PAIRS):
            canvases = []
            for reader, source in ((1, 9), (9, 1)):
                tokens = torch.randint(self.mask, (self.n_pos,), generator=generator)
                answer = int(tokens[reader])
                tokens[reader] = self.mask
                canvases.append(TaughtCanvas(tokens, reader, answer, source))
            pairs.append(TaughtPair(*canvases))
        return reversal_signatures(self.model, pairs, max_bytes=2**31)
