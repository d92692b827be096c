"""The manifest's entry of a live run: what can be asked for, and the code of every view."""

from collections.abc import Sequence
from typing import Any

from diffusion_lens.denoising import Trajectory
from diffusion_lens.denoising.explored_code import TRACE_SCORES, lens_call, query_statement
from diffusion_lens.denoising.explored_results import TOP_K
from diffusion_lens.explorer.asked import KINDS, NO_TRACE, SAMPLES, Asked, window_of
from diffusion_lens.explorer.plan import Plan
from diffusion_lens.facts import Query
from diffusion_lens.pages import views
from diffusion_lens.pages.words import Words


def described(plan: Plan, run: Trajectory, words: Words, asked: Asked, alternatives: Sequence[int]) -> dict[str, Any]:
    """The part of an entry that depends on the spec and on what can be computed.

    Args:
        words: Words of the run, to which those of the targets are added.
        alternatives: Steps with chunks of alternatives.
    """
    model, spec = plan.model, plan.spec
    n_layers, steps = model.cfg.n_layers, list(range(run.n_steps))
    texts = dict(zip(asked.final, model.words(asked.final), strict=True))
    targets = words.indices(asked.final, texts)
    traces = _traces(plan, run, asked, steps)
    return {
        "id": spec.id,
        "model": spec.model,
        "label": ", ".join([model.cfg.name_and_mode, *map(str, spec.interventions)]),
        "prompt": spec.prompt,
        "spec": spec.to_json(),
        "base": spec.base,
        "words": words.texts,
        "answer": None
        if asked.query is None
        else {
            "positions": list(asked.query.answer_positions),
            "words": words.indices(asked.query.answer_tokens, texts).tolist(),
        },
        "alternatives": views.alternatives_entry(TOP_K, alternatives),
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
        "missing": {} if traces else {"trace": NO_TRACE},
        "python": _python(plan, asked, bool(traces)),
    }


def _traces(plan: Plan, run: Trajectory, asked: Asked, steps: Sequence[int]) -> list[dict[str, Any]]:
    """The traces that can be computed: at every step up to the one that reveals the answer's last token."""
    spec = plan.spec
    if asked.query is None or spec.subject is None:
        return []
    positions = list(asked.query.answer_positions)
    if bool(run.is_masked(run.canvases[1:, 0, positions]).all()):
        return []
    common = {
        "subject": list(spec.subject),
        "positions": list(range(run.tokens.shape[1])),
        "layers": list(range(plan.model.cfg.n_layers)),
        "steps": [step for step in steps if step <= int(run.revealed_at[0, positions].max())],
        "answer": str(spec.answer).strip(),
        "clean": None,
        "corrupted": None,
        "highest": None,
        "lazy": True,
    }
    return [{"name": kind, "kind": kind, **common, "chunk": f"trace/{kind}/{{step}}"} for kind in KINDS]


def _python(plan: Plan, asked: Asked, has_traces: bool) -> dict[str, str]:
    """The code of every view."""
    targets = [] if asked.targets is None else [f"targets=torch.tensor({asked.targets.tolist()})"]
    hooks = ["fwd_hooks=hooks"] if plan.changed else []
    python = {**plan.views(), "lens": f"{plan.run}\n\n{lens_call([*targets, *hooks], top_k=TOP_K)}"}
    if has_traces and asked.query is not None:
        python["trace"] = f"{plan.run}\n\n{_trace_statements(plan, asked.query)}"
    return python


def _trace_statements(plan: Plan, query: Query) -> str:
    """Statements that trace `trajectory` at a step, under the run's hooks inside the network."""
    hooked, inside = ("with model.hooks(fwd_hooks=hooks):\n", "    ") if plan.changed else ("", "")
    return (
        "from diffusion_lens import Query\nfrom diffusion_lens.analysis import noise_scale, trace_trajectory\n\n"
        f"{query_statement(**query.describe())}{hooked}"
        f"{inside}trace = trace_trajectory(\n{inside}    model, query, steps=[{{step}}], trajectory=trajectory, "
        f'kind="{{name}}", window={window_of(plan.model)},\n'
        f"{inside}    noise=noise_scale(model, [query]), samples={SAMPLES}\n{inside})\n"
        f"{TRACE_SCORES}"
    )
