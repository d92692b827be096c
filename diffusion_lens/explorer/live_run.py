"""One computed run: its trajectory, the manifest's entry, and the chunks of its views, which are computed on demand.

Every number comes from a call of the library: `denoise`, `logit_lens` and `trace_trajectory`, with the hooks of the
run's interventions. The likeliest tokens are read by a hook inside the same loop, attention patterns by a pass over the
canvas of a step.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.analysis import logit_lens, noise_scale, trace_trajectory
from diffusion_lens.analysis.inputs import Inputs
from diffusion_lens.denoising import DenoiseSettings, Trajectory, lay_out
from diffusion_lens.denoising.explored import canvas_entry
from diffusion_lens.denoising.explored_results import TOP_K
from diffusion_lens.denoising.loop import run_loop
from diffusion_lens.denoising.prepare import prepare
from diffusion_lens.explorer.asked import NO_TRACE, SAMPLES, Asked, window_of
from diffusion_lens.explorer.edits import check_position, require_reached
from diffusion_lens.explorer.entry import described
from diffusion_lens.explorer.plan import Plan, unwritten
from diffusion_lens.explorer.spec import Spec
from diffusion_lens.hook_names import FwdHooks, loop_hook
from diffusion_lens.identity import identity_of, run_of
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.pages import views
from diffusion_lens.pages.views import TraceGrids, View
from diffusion_lens.pages.words import Words

_ENTRY = 2**14  # bytes of a manifest's entry, about


def watched(model: DiffusionTransformer, spec: Spec, hooks: FwdHooks, watchers: FwdHooks) -> Trajectory:
    """`model.denoise` with the settings and hooks of a run, and further hooks that only read.

    The watchers are attached step by step, after the run's own hooks, as `denoise_with_cache` does.
    """
    settings = DenoiseSettings(spec.steps, spec.sampler, spec.cfg_scale, spec.temperature, spec.seed)
    canvas = lay_out(model, spec.prompt, spec.length)
    with run_of(model, hooks):
        run = prepare(model, canvas, settings)
        n_given = int(canvas.given.sum())
        for one in spec.interventions:
            check_position(model, one, n_given, canvas.tokens.shape[1], len(run.times) - 1)
        record = run_loop(run, fwd_hooks=hooks, around=lambda step: model.hooks(fwd_hooks=list(watchers)))
        return Trajectory.of(run, {**run.describe(), **record})


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warning that a hook of the loop, which wrote a token, is not attached when the canvases are read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@dataclass(frozen=True, eq=False)
class LiveRun:
    """One computed run.

    Attributes:
        plan: Model, spec and hooks.
        trajectory: The run; the canvases of steps with forced tokens contain them.
        words: Words of the entry.
        entry: The manifest's entry.
        alternatives: Chunk of the likeliest tokens, by step.
        asked: The answer that the lens ranks and traces follow.
    """

    plan: Plan
    trajectory: Trajectory
    words: Words
    entry: dict[str, Any]
    alternatives: dict[int, bytes]
    asked: Asked

    @classmethod
    def of(cls, plan: Plan) -> "LiveRun":
        """Compute a run.

        Raises:
            ValueError: Settings, interventions or an answer that do not fit the model or the prompt.
        """
        model, spec = plan.model, plan.spec
        top: dict[int, tuple[list[int], Tensor, Tensor]] = {}

        def read_logits(logits: Tensor, hook: Any) -> None:
            masked, n_top = hook.step.masked[0], min(TOP_K, logits.shape[-1])
            top[hook.step.index] = views.alternatives_of_logits(logits[0], masked, n_top, unwritten(model))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            run = watched(model, spec, plan.fwd_hooks, [(loop_hook("hook_logits"), read_logits)])
        for one, token in plan.forced_tokens:
            require_reached(one, run)
            run.canvases[one.step, 0, one.position] = token
            run.words.setdefault(token, model.words([token])[0])
        plan = replace(plan, weights=run.record["weights_sha256"])
        asked, words = Asked.of(model, spec, run), Words()
        entry = canvas_entry(run, 0, words)
        ids = sorted({token for _, tokens, _ in top.values() for token in tokens.flatten().tolist()})
        texts = dict(zip(ids, model.words(ids), strict=True))
        alternatives = {
            step: views.alternatives_chunk(positions, tokens, p, words, texts)
            for step, (positions, tokens, p) in sorted(top.items())
        }
        entry |= described(plan, run, words, asked, sorted(alternatives))
        entry["warnings"] = list(dict.fromkeys(str(one.message) for one in caught))
        return cls(plan, run, words, entry, alternatives, asked)

    @property
    def weights(self) -> str:
        """SHA-256 of the weights that computed the run."""
        return str(self.trajectory.record["weights_sha256"])

    def require_weights(self, weights: str) -> None:
        """Raise a `ValueError` unless the weights of the model, by their SHA-256, are still those of the run."""
        if weights != self.weights:
            raise ValueError(
                f"the weights of {self.plan.model.cfg.model_name!r} have changed since this explorer began, and it "
                "would show numbers of both: begin another one, explore(model, ...)"
            )

    @property
    def n_bytes(self) -> int:
        """Size of the run in memory, with the caches that its hooks take."""
        tensors = (self.trajectory.canvases, self.trajectory.tokens, self.trajectory.confidence)
        return sum(x.nbytes for x in tensors) + sum(map(len, self.alternatives.values())) + self.plan.n_bytes + _ENTRY

    def lens_chunks(self, steps: Sequence[int]) -> dict[int, bytes]:
        """`logit_lens` at some steps."""
        with quiet():
            lens = logit_lens(
                self.plan.model,
                self.trajectory,
                steps=steps,
                top_k=TOP_K,
                targets=self.asked.targets,
                fwd_hooks=self.plan.network_hooks,
            )
        self.require_weights(lens.record["weights_sha256"])
        return {step: views.lens_chunk(lens, i, 0, Words(self.words)) for i, step in enumerate(steps)}

    @torch.no_grad()
    def attention_chunk(self, layer: int, step: int) -> bytes:
        """The pattern of every head of a layer in the conditional branch, by a pass that ends after the layer."""
        point, hooks = f"blocks.{layer}.attn.hook_pattern", self.plan.network_hooks
        with quiet(), run_of(self.plan.model, hooks):
            self.require_weights(identity_of(self.plan.model).weights_sha256)
            (read,) = Inputs.of(self.plan.model, self.trajectory, fwd_hooks=hooks).at(step)
        return views.attention_chunk(read.states([point], fwd_hooks=hooks)[point][0], "u2")

    def trace_view(self, kind: str, steps: Sequence[int]) -> View:
        """`trace_trajectory` at some steps.

        Raises:
            ValueError: The run has no subject or answer, or the answer is revealed before the step.
        """
        model, query = self.plan.model, self.asked.query
        if query is None or self.plan.spec.subject is None:
            raise ValueError(NO_TRACE)
        with quiet(), model.hooks(fwd_hooks=self.plan.network_hooks):
            trace = trace_trajectory(
                model,
                query,
                steps=steps,
                trajectory=self.trajectory,
                kind=kind,
                window=window_of(model),
                noise=noise_scale(model, [query]),
                samples=SAMPLES,
            )
        self.require_weights(trace.record["weights_sha256"])
        grids = TraceGrids(
            name=kind,
            kind=kind,
            subject=trace.subject,
            positions=trace.positions,
            layers=trace.layers,
            steps=trace.steps,
            answer=str(self.plan.spec.answer).strip(),
            scores=trace.scores,
            clean=trace.clean.tolist(),
            corrupted=trace.corrupted.tolist(),
        )
        return views.trace_view(grids)
