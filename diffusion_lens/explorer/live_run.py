"""One computed run: its trajectory, the manifest's entry, and the chunks of its views, which are computed on demand.

Every number comes from a call of the library: `denoise`, which records what its steps predict, `logit_lens` and
`trace_trajectory`, with the hooks of the run's interventions. Attention patterns are read by a pass over the canvas of
a step.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.analysis import commitment, logit_lens, run_graph, trace_trajectory
from diffusion_lens.analysis.causal_tracing.trace import TraceSettings
from diffusion_lens.analysis.engine.inputs import Inputs
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory
from diffusion_lens.denoising import DenoiseSettings, Trajectory, lay_out
from diffusion_lens.denoising.denoise import prepare
from diffusion_lens.denoising.loop import run_loop
from diffusion_lens.explorer.as_python import TOP_K, TRACE_SCORES, lens_call, query_statement
from diffusion_lens.explorer.learned import EXPERTS, WEIGHTS, conditioning_view, graph_chunk, layers_of_experts
from diffusion_lens.explorer.page_of_run import canvas_entry, verdict_of, written_by
from diffusion_lens.explorer.plan import Plan, check_position, require_reached
from diffusion_lens.explorer.spec import FORCE, Spec
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.hooks.names import FwdHooks, loop_hook
from diffusion_lens.model.noise import hidden_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.pages import views
from diffusion_lens.pages.views import View, Words
from diffusion_lens.records.identity import identity_of, run_of

KINDS = ("resid", "mlp", "attn")
SAMPLES = 10
NO_TRACE = "Give the answer and the subject's positions (under Settings) to see which states carry the answer."
_SHARE_OF_LAYERS = 10 / 48  # ROME restores 10 of GPT-2 XL's 48 layers.
_ENTRY = 2**14  # bytes of a manifest's entry, about


@dataclass(frozen=True, eq=False)
class Asked:
    """The answer that a spec follows through a run.

    Attributes:
        query: Prompt, subject and answer; `None` if the spec has no answer.
        positions: The positions that the model predicts.
        final: At each position of the canvas the token whose rank is read: the answer's, elsewhere the final one; -1
            for none.
        targets: Int[batch selected], the targets of the lens; `None` where they are its default, the final tokens.
    """

    query: Query | None
    positions: list[int]
    final: list[int]
    targets: Tensor | None

    @classmethod
    def of(cls, model: DiffusionTransformer, spec: Spec, run: Trajectory) -> "Asked":
        """The answer of a spec on the canvas of its run; a `ValueError` if it does not follow or fit."""
        query, tokens = _query(model, spec, run), run.tokens[0].cpu()
        final: list[int] = tokens.masked_fill(~model.cfg.writable(tokens), -1).tolist()
        written = list(final)
        if query is not None:
            for position, token in zip(query.answer_positions, query.answer_tokens, strict=True):
                final[position] = token
        positions = list(range(1 if model.cfg.is_autoregressive else 0, len(final)))
        targets = None if final == written else torch.tensor([[final[position] for position in positions]])
        return cls(query, positions, final, targets)


def _query(model: DiffusionTransformer, spec: Spec, run: Trajectory) -> Query | None:
    """The prompt with the spec's answer on the canvas of the run."""
    if spec.answer is None:
        return None
    prompt, answer = Fact(prompt=spec.prompt, subject="", answer=spec.answer).tokenize(model)
    n_pos = run.tokens.shape[1]
    if len(prompt) + len(answer) > n_pos:
        raise ValueError(
            f"the answer {spec.answer!r} has {len(answer)} tokens and the prompt {len(prompt)}, but the canvas has "
            f"only {n_pos} positions: give length={len(prompt) + len(answer)} or more"
        )
    if spec.subject is not None and spec.subject[1] > len(prompt):
        raise ValueError(f"the subject {list(spec.subject)} is not within the prompt's {len(prompt)} positions")
    rest = answer[:-1] if model.cfg.is_autoregressive else hidden_tokens(model.cfg, n_pos - len(prompt), spec.prompt)
    return Query(
        torch.tensor([*prompt, *rest], device=model.cfg.device),
        subject=spec.subject or (0, 1),
        answer_positions=tuple(range(len(prompt), len(prompt) + len(answer))),
        answer_tokens=tuple(answer),
    )


@dataclass(frozen=True, eq=False)
class LiveRun:
    """One computed run.

    Attributes:
        plan: Model, spec and hooks.
        trajectory: The run.
        words: Words of the entry.
        entry: The manifest's entry.
        predictions: The chunk of what each step predicted.
        asked: The answer that the lens ranks and traces follow.
    """

    plan: Plan
    trajectory: Trajectory
    words: Words
    entry: dict[str, Any]
    predictions: bytes
    asked: Asked

    @classmethod
    def of(cls, plan: Plan, each_step: Callable[[int, int], None] = lambda step, n_steps: None) -> "LiveRun":
        """Compute a run; a `ValueError` if settings, interventions or the answer do not fit the model or the prompt.

        Args:
            each_step: Called at every step with its index and their number; an exception that it raises ends the run.
        """
        model, spec = plan.model, plan.spec
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            run = predicting(model, spec, plan.fwd_hooks, each_step)
        plan = replace(plan, weights=run.record["weights_sha256"])
        asked, words = Asked.of(model, spec, run), Words()
        end, wrote = written_by(model, run)
        entry = {**canvas_entry(run, 0, words), "end": end, "verdict": verdict_of(spec.answer, wrote)}
        assert run.recorded is not None
        committed = commitment(run.recorded).committed_at[0].tolist()
        predictions = views.predictions_view(run.recorded, committed, words)
        entry |= {**_described(plan, run, words, asked), "predictions": predictions.entry}
        entry["warnings"] = list(dict.fromkeys(str(one.message) for one in caught))
        return cls(plan, replace(run, recorded=None), words, entry, predictions.chunks["predictions"], asked)

    def require_weights(self, weights: str) -> None:
        """Raise a `ValueError` unless the weights of the model, by their SHA-256, are still those of the run."""
        if weights != self.plan.weights:
            raise ValueError(
                f"the weights of {self.plan.model.cfg.model_name!r} have changed since this explorer began, and it "
                "would show numbers of both: begin another one, explore(model, ...)"
            )

    @property
    def n_bytes(self) -> int:
        """Size of the run in memory, with the caches that its hooks take."""
        handed = self.trajectory.handed
        tensors = [self.trajectory.canvases, self.trajectory.tokens, self.trajectory.confidence]
        tensors += [] if handed is None else vars(handed).values()
        return sum(x.nbytes for x in tensors) + len(self.predictions) + self.plan.n_bytes + _ENTRY

    def compute(self, name: str) -> bytes:
        """A chunk of the lens, the attention, a trace, a graph, the experts or the self-conditioning.

        Raises:
            KeyError: There is no such chunk.
            ValueError: The trace does not exist at this step, or there is no graph of this token against this prompt.
        """
        n_steps, n_layers = self.trajectory.n_steps, self.plan.model.cfg.n_layers
        match name.split("/", 2):
            case ["lens", step] if _is_index(step, n_steps):
                return self.lens_chunks([int(step)])[name]
            case ["attention", layer, step] if _is_index(layer, n_layers) and _is_index(step, n_steps):
                return self.attention_chunk(int(layer), int(step))
            case ["experts", step] if _is_index(step, n_steps) and self.plan.model.cfg.experts is not None:
                return self.experts_chunk(int(step))
            case ["conditioning"] if self.trajectory.handed is not None:
                return self.conditioning_chunk()
            case ["trace", kind, step] if kind in KINDS and _is_index(step, n_steps):
                return self.trace_view(kind, [int(step)]).chunks[name]
            case ["graph", position, prompt] if _is_index(position, self.trajectory.tokens.shape[1]):
                return self.graph_chunk(int(position), prompt)
        raise KeyError(f"the run {self.plan.spec.id} has no chunk {name!r}")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Under the identity of the network that wrote the run; a `ValueError` if its weights have changed since."""
        with run_of(self.plan.model, self.plan.network_hooks):
            self.require_weights(identity_of(self.plan.model).weights_sha256)
            yield

    def lens_chunks(self, steps: Sequence[int]) -> dict[str, bytes]:
        """`logit_lens` at some steps, by name."""
        with self._reading():
            lens = logit_lens(
                self.plan.model,
                self.trajectory,
                steps=steps,
                top_k=TOP_K,
                targets=self.asked.targets,
                fwd_hooks=self.plan.network_hooks,
            )
        return {f"lens/{step}": views.lens_chunk(lens, i, 0, Words(self.words)) for i, step in enumerate(steps)}

    @torch.no_grad()
    def attention_chunk(self, layer: int, step: int) -> bytes:
        """The pattern of every head of a layer in the conditional branch, by a pass that ends after the layer."""
        point, hooks = f"blocks.{layer}.attn.hook_pattern", self.plan.network_hooks
        with self._reading():
            (read,) = Inputs.of(self.plan.model, self.trajectory, fwd_hooks=hooks).at(step)
        return views.attention_chunk(read.states([point], fwd_hooks=hooks)[point][0], "u2")

    @torch.no_grad()
    def experts_chunk(self, step: int) -> bytes:
        """The experts that every position chose at a step, in the conditional branch, and their weights."""
        layers, hooks = layers_of_experts(self.plan.model.cfg), self.plan.network_hooks
        by_name = [[f"blocks.{layer}.mlp.{name}" for layer in layers] for name in (EXPERTS, WEIGHTS)]
        with self._reading():
            (read,) = Inputs.of(self.plan.model, self.trajectory, fwd_hooks=hooks).at(step)
            states = read.states([point for points in by_name for point in points], fwd_hooks=hooks)
        chosen, weights = ([states[point][0].cpu() for point in points] for points in by_name)
        return views.experts_chunk(chosen, weights)

    def learned_chunks(self, steps: Sequence[int]) -> dict[str, bytes]:
        """The chunks of experts at some steps, and of self-conditioning, by name; none if the model has neither."""
        chunks = {} if self.trajectory.handed is None else {"conditioning": self.conditioning_chunk()}
        if self.plan.model.cfg.experts is not None:
            chunks |= {f"experts/{step}": self.experts_chunk(step) for step in steps}
        return chunks

    def conditioning_chunk(self) -> bytes:
        """What each step read of the prediction before it."""
        view = conditioning_view(self.trajectory, 0, Words(self.words))
        assert view is not None
        return view.chunks["conditioning"]

    def trace_view(self, kind: str, steps: Sequence[int]) -> View:
        """`trace_trajectory` at some steps; a `ValueError` without a subject or answer, or after it is revealed."""
        model, query = self.plan.model, self.asked.query
        if query is None or self.plan.spec.subject is None:
            raise ValueError(NO_TRACE)
        with self._reading(), model.hooks(fwd_hooks=self.plan.network_hooks):
            trace = trace_trajectory(
                model,
                query,
                steps=steps,
                trajectory=self.trajectory,
                kind=kind,
                window=window_of(model),
                samples=SAMPLES,
            )
        return views.view_of_trace(trace, kind, str(self.plan.spec.answer).strip())

    def graph_chunk(self, position: int, prompt: str) -> bytes:
        """`run_graph` of the token at a position, against another prompt; a `ValueError` if there is none."""
        if self.plan.changed:
            raise ValueError(
                "a graph is of two runs without interventions: undo those of this run, and explain it then"
            )
        with self._reading():
            graph = run_graph(self.plan.model, self.trajectory, position, prompt, metric="log_probability")
        return graph_chunk(graph, Words(self.words))

    @torch.no_grad()
    def answer_probability(self, corrupted: bool = False) -> float:
        """Probability of the answer on the first canvas of the run, as a trace of that step reads it, by one pass.

        Args:
            corrupted: Whether to read the mean over samples with noise at the subject, which the spec then has.
        """
        model, query, first = self.plan.model, self.asked.query, self.trajectory.first_step
        if query is None:
            raise ValueError("the run has no answer, so there is no probability of it: give answer=")
        with self._reading(), model.hooks(fwd_hooks=self.plan.network_hooks):
            run, noise = TracedTrajectory.of(model, query, self.trajectory), TraceSettings(samples=SAMPLES)
            canvases = run.canvas(first).expand(noise.rows if corrupted else 1, -1)
            answer, hooks = run.answer(first, canvases), noise.hooks(model, query) if corrupted else []
            with model.clock.at(run.state(first, canvases)), model.hooks(fwd_hooks=hooks):
                read = answer.probabilities(model(run.seen(canvases), logits_at=answer.rows), len(canvases))
            return read.prod(dim=2).mean().item()


def predicting(
    model: DiffusionTransformer, spec: Spec, hooks: FwdHooks, each_step: Callable[[int, int], None]
) -> Trajectory:
    """`model.denoise(..., predictions=TOP_K)` with the settings and hooks of a run, which calls `each_step`."""
    settings = DenoiseSettings(spec.steps, spec.sampler, spec.cfg_scale, spec.temperature, spec.seed)
    canvas = lay_out(model, spec.prompt, spec.length)
    looks = (loop_hook("hook_tokens"), lambda tokens, hook: require_reached(spec, tokens, hook.step.index))

    with run_of(model, hooks):
        run = prepare(model, canvas, settings)
        n_given, n_steps = int(canvas.given.sum()), len(run.times) - 1
        for one in spec.interventions:
            check_position(model, one, n_given, canvas.tokens.shape[1], n_steps)

        def around(step: int) -> AbstractContextManager[None]:
            each_step(step, n_steps)
            return nullcontext()

        run.record_predictions(TOP_K)
        record = run_loop(run, fwd_hooks=[looks, *hooks], around=around)
        return Trajectory.of(run, {**run.describe(), **record})


def _is_index(text: str, size: int) -> bool:
    return text in map(str, range(size))


def _described(plan: Plan, run: Trajectory, words: Words, asked: Asked) -> dict[str, Any]:
    """The part of an entry that depends on the spec and on what can be computed; its words are added to `words`."""
    model, spec = plan.model, plan.spec
    n_layers, steps = model.cfg.n_layers, list(range(run.n_steps))
    texts = dict(zip(asked.final, model.words(asked.final), strict=True))
    targets = words.indices(asked.final, texts)
    traces, answer, learnt = _traces(plan, run, asked, steps), None, dict[str, Any]()
    if model.cfg.experts is not None:
        learnt["experts"] = views.experts_entry(layers_of_experts(model.cfg), model.cfg.experts.n_experts, steps)
    if run.handed is not None:
        learnt["conditioning"] = {"steps": steps}
    else:
        learnt["graph"] = {}
    if (query := asked.query) is not None:
        indices = words.indices(query.answer_tokens, texts).tolist()
        answer = {"positions": list(query.answer_positions), "words": indices}
    return {
        "id": spec.id,
        "model": spec.model,
        "label": ", ".join([model.cfg.name_and_mode, *map(str, spec.interventions)]),
        "prompt": spec.prompt,
        "spec": spec.to_json(),
        "base": spec.base,
        "forced": [[one.step, one.position] for one in spec.interventions if one.what == FORCE and one.token],
        "words": words.texts,
        "answer": answer,
        "lens": {
            "labels": [*(f"{layer}_pre" for layer in range(n_layers)), "final_post"],
            "layers": list(range(n_layers + 1)),
            "positions": asked.positions,
            "steps": steps,
            "k": TOP_K,
            "targets": targets[asked.positions].tolist(),
            "chunk": "lens/{step}",
        },
        "attention": views.attention_entry(list(range(n_layers)), model.cfg.n_heads, steps),
        "traces": traces,
        **learnt,
        "missing": {} if traces else {"trace": NO_TRACE},
        "python": _python(plan, asked, bool(traces)),
    }


def _traces(plan: Plan, run: Trajectory, asked: Asked, steps: Sequence[int]) -> list[dict[str, Any]]:
    """The traces that can be computed: at every step up to the one that reveals the answer's last token."""
    spec = plan.spec
    if asked.query is None or spec.subject is None:
        return []
    where = spec.subject, range(run.tokens.shape[1]), range(plan.model.cfg.n_layers)
    last, answer = run.revealed_at[0, list(asked.query.answer_positions)].max(), str(spec.answer).strip()
    traced = [step for step in steps if step <= last]
    return [{**views.trace_entry(kind, kind, *where, traced, answer), "lazy": True} for kind in KINDS if traced]


def _python(plan: Plan, asked: Asked, has_traces: bool) -> dict[str, str]:
    """The code of every view."""
    targets = [] if asked.targets is None else [f"targets=torch.tensor({asked.targets.tolist()})"]
    hooks = ["fwd_hooks=hooks"] if plan.changed else []
    graph = (
        f"{plan.run}\n\nfrom diffusion_lens.analysis import run_graph\n\n"
        'graph = run_graph(model, trajectory, {position}, {name}, metric="log_probability")\n'
        "print(graph.nodes.head(20))"
    )
    python = {**plan.views(), "graph": graph, "lens": f"{plan.run}\n\n{lens_call([*targets, *hooks], top_k=TOP_K)}"}
    if has_traces and asked.query is not None:
        # Under the run's hooks inside the network.
        hooked, inside = ("with model.hooks(fwd_hooks=hooks):\n", "    ") if plan.changed else ("", "")
        python["trace"] = (
            f"{plan.run}\n\n"
            "from diffusion_lens import Query\nfrom diffusion_lens.analysis import trace_trajectory\n\n"
            f"{query_statement(**asked.query.describe())}{hooked}"
            f"{inside}trace = trace_trajectory(\n{inside}    model, query, steps=[{{step}}], trajectory=trajectory, "
            f'kind="{{name}}", window={window_of(plan.model)}, '
            f"samples={SAMPLES}\n{inside})\n"
            f"{TRACE_SCORES}"
        )
    return python


def window_of(model: DiffusionTransformer) -> int:
    """Number of blocks whose outputs a trace restores together."""
    return max(1, round(_SHARE_OF_LAYERS * model.cfg.n_layers))
