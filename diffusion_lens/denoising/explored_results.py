"""Results on a trajectory as views of its page: whether they are of this run, and the numbers that are shown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from diffusion_lens.denoising.cache import TrajectoryCache
from diffusion_lens.denoising.recording import Recording
from diffusion_lens.denoising.same_network import COMPARED, canvas_provenance
from diffusion_lens.hook_names import loop_hook
from diffusion_lens.pages import views
from diffusion_lens.pages.views import Lens, TraceGrids, View
from diffusion_lens.pages.words import Words
from diffusion_lens.records import differences, network_of

TOP_K = 5
LOGITS, _TOKENS = loop_hook("hook_logits"), loop_hook("hook_tokens")
_PATTERN = ".attn.hook_pattern"
_CLOSE = 0.02  # Largest difference of a confidence from the cached logits, which may be in bfloat16.


@runtime_checkable
class Trace(Protocol):
    """What `CausalTrace` and `TrajectoryTrace` have in common."""

    @property
    def scores(self) -> Tensor: ...

    @property
    def subject(self) -> tuple[int, int]: ...

    @property
    def positions(self) -> list[int]: ...

    @property
    def layers(self) -> list[int]: ...

    @property
    def record(self) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False)
class Results:
    """Results on one row of a trajectory, to be shown beside its canvases.

    Attributes:
        lens: A `LogitLens` of the trajectory, by step or of one step.
        traces: `TrajectoryTrace`s of the trajectory, or `CausalTrace`s of one of its canvases.
        attention: Cache with `blocks.{i}.attn.hook_pattern` of some layers and steps.
        logits: Cache with `denoise.hook_logits` of some steps.
    """

    lens: Lens | None = None
    traces: Sequence[Trace] = ()
    attention: TrajectoryCache | None = None
    logits: TrajectoryCache | None = None

    def named_traces(self) -> dict[str, Trace]:
        """The traces by a name for each: its kind, with a number if several are of one kind."""
        named: dict[str, Trace] = {}
        for trace in self.traces:
            kind, number = trace.record["kind"], 2
            name = kind
            while name in named:
                name, number = f"{kind}-{number}", number + 1
            named[name] = trace
        return named


def check_lens(trajectory: Recording, lens: Lens, row: int) -> None:
    """Raise a `ValueError` unless a lens read this row of this trajectory, under the network that wrote it."""
    again = "give logit_lens(model, trajectory)"
    if lens.steps is None and "step" not in lens.record:
        raise ValueError(f"the lens read an input that is no trajectory, so it has no steps: {again}")
    if lens.record.get("branch", "conditional") != "conditional":
        raise ValueError(
            f"the lens read the {lens.record['branch']} branch, and a page shows the conditional one: {again}"
        )
    _require_network("lens", lens.record, trajectory, again)
    steps = views.steps_of(lens)
    if outside := [step for step in steps if not 0 <= step - trajectory.first_step < trajectory.n_steps]:
        raise ValueError(f"the lens has the steps {outside}, which the trajectory does not have: {again}")
    n_rows, n_pos = trajectory.tokens.shape
    read = lens.tokens if lens.steps is not None else lens.tokens[None]
    if read.shape[1] != n_rows or max(lens.positions) >= n_pos:
        raise ValueError(
            f"the lens has {read.shape[1]} rows and position {max(lens.positions)}, and the trajectory {n_rows} rows "
            f"of {n_pos} positions: {again}"
        )
    indices = [step - trajectory.first_step for step in steps]
    if not torch.equal(read[:, row].cpu(), trajectory.canvases[indices, row].cpu()[:, lens.positions]):
        raise ValueError(f"the lens read other canvases than those of row {row} of the trajectory: {again}")


def alternatives_view(trajectory: Recording, cache: TrajectoryCache, row: int, words: Words) -> View:
    """The likeliest tokens at the masked positions, from the logits of the loop after guidance.

    Raises:
        ValueError: A cache without these logits, or of another run.
    """
    again = f'give the cache of model.denoise_with_cache(prompt, names_filter="{LOGITS}"), with its trajectory'
    steps = [step for step in _steps("logits", cache, trajectory, again) if LOGITS in cache[step]]
    if not steps:
        raise ValueError(f"logits= contains no {LOGITS!r}: {again}")
    by_step: list[tuple[int, list[int], Tensor, Tensor]] = []
    ids: set[int] = set()
    for step in steps:
        logits = cache[step][LOGITS]
        _require_shape("logits", logits.shape[:2], trajectory, again)
        of_row = logits[row].cpu()
        index = step - trajectory.first_step
        masked = trajectory.is_open(trajectory.canvases[index])[row].cpu() & trajectory.real[row].cpu()
        revealed = (trajectory.revealed_at[row] == step).cpu()
        revealed &= (trajectory.n_steps - 1 == index) | (not trajectory.rewrites)
        tokens = trajectory.canvases[index + 1, row].cpu()[revealed]
        p = of_row[revealed].double().softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
        if not torch.allclose(p.float(), trajectory.confidence[row].cpu()[revealed], atol=_CLOSE):
            raise ValueError(
                f"logits= are of another run: at step {step} they give other probabilities than the trajectory's "
                f"confidence: {again}"
            )
        positions, top, p = views.alternatives_of_logits(of_row, masked, TOP_K, trajectory.blank)
        by_step.append((step, positions, top, p))
        ids |= set(top.flatten().tolist())
    return views.alternatives_view(by_step, words, _texts(trajectory, cache, ids))


def attention_view(trajectory: Recording, cache: TrajectoryCache, row: int) -> View:
    """The attention patterns of the layers and steps that a cache contains.

    Raises:
        ValueError: A cache without patterns, or of another run.
    """
    again = (
        'give the cache of model.denoise_with_cache(prompt, names_filter="blocks.0.attn.hook_pattern"), with its '
        "trajectory"
    )
    steps, patterns = _steps("attention", cache, trajectory, again), {}
    n_pos = trajectory.tokens.shape[1]
    for step in steps:
        for name in cache[step].cache_dict:
            if name.endswith(_PATTERN):
                pattern = cache[step][name]
                _require_shape("attention", (pattern.shape[0], pattern.shape[2]), trajectory, again)
                if pattern.shape[3] != n_pos:
                    raise ValueError(f"attention= has {pattern.shape[3]} keys for {n_pos} positions: {again}")
                patterns[int(name.split(".")[1]), step] = pattern[row]
    if not patterns:
        raise ValueError(f"attention= contains no pattern: {again}")
    return views.attention_view(patterns)


def grids_of(trajectory: Recording, trace: Trace, name: str, row: int) -> TraceGrids:
    """The grids of a trace, by the steps of the trajectory.

    Raises:
        ValueError: A trace of another run or of a canvas that the trajectory does not have.
    """
    again = "give trace_trajectory(model, fact, trajectory=trajectory, ...)"
    _require_network("trace", trace.record, trajectory, again)
    canvases = trajectory.str_canvases(row)
    several: Any = trace
    if trace.scores.dim() == 2:  # a CausalTrace, of a single canvas
        if several.str_tokens not in canvases[:-1]:
            raise ValueError(f"the trace's canvas is none of the trajectory's: {again}")
        steps = [trajectory.first_step + canvases.index(several.str_tokens)]
        scores, clean, corrupted = trace.scores[None], [several.clean], [several.corrupted]
    else:
        steps, scores = several.steps, trace.scores
        clean, corrupted = several.clean.tolist(), several.corrupted.tolist()
        for step, canvas in zip(steps, several.str_canvases, strict=True):
            index = step - trajectory.first_step
            if not 0 <= index < trajectory.n_steps or canvases[index] != canvas:
                raise ValueError(f"the trace has another canvas at step {step} than the trajectory: {again}")
    return TraceGrids(
        name=name,
        kind=trace.record["kind"],
        subject=trace.subject,
        positions=trace.positions,
        layers=trace.layers,
        steps=steps,
        answer=" ".join(word.strip() for word in trace.record["answer"]),
        scores=scores,
        clean=clean,
        corrupted=corrupted,
    )


def answer_of(traces: Sequence[Trace], words: Words) -> dict[str, list[int]] | None:
    """The manifest's entry of the answer that the traces follow; `None` for files of earlier versions."""
    query = traces[0].record.get("query")
    if query is None:
        return None
    texts = dict(zip(query["answer_tokens"], traces[0].record["answer"], strict=True))
    indices = words.indices(query["answer_tokens"], texts)
    return {"positions": list(query["answer_positions"]), "words": indices.tolist()}


def _texts(trajectory: Recording, cache: TrajectoryCache, tokens: Iterable[int]) -> dict[int, str]:
    """Texts of tokens, by the model that made the cache; a cache that was read from a file may not have it."""
    ids = list(tokens)
    model = cache[cache.steps[0]].model
    if model is not None:
        return dict(zip(ids, model.words(ids), strict=True))
    return {token: trajectory.words.get(token, f"<{token}>") for token in ids}


def _require_network(what: str, record: dict[str, Any], trajectory: Recording, again: str) -> None:
    """Raise a `ValueError` unless a result was made under the network that wrote the trajectory."""
    ours = network_of(record)
    wrote = {name: value for name, value in canvas_provenance(trajectory.record).items() if name in ours}
    # Hooks of the loop change what is written, and a result that reads the canvases does not need them.
    hooks = {point: by for point, by in (wrote.get("hooks") or {}).items() if point != _TOKENS}
    compared = [name for name in COMPARED if wrote.get(name) is not None and ours.get(name) is not None]
    if different := "; ".join(differences({**wrote, "hooks": hooks}, ours, compared)):
        raise ValueError(
            f"the {what} is of another network than the one that wrote the trajectory ({different}), and a page shows "
            f"them as one: {again}"
        )


def _steps(argument: str, cache: TrajectoryCache, trajectory: Recording, again: str) -> tuple[int, ...]:
    """The steps of a cache that the trajectory has, if it is of a run with as many steps."""
    n_steps = len(trajectory.record["times"]) - 1
    if cache.n_steps != n_steps:
        raise ValueError(f"{argument}= is of a run of {cache.n_steps} steps, and the trajectory has {n_steps}: {again}")
    steps = tuple(step for step in cache.steps if step >= trajectory.first_step)
    if (written := cache.canvases) is not None and written.shape[1:] == trajectory.canvases.shape[1:]:
        for step in steps:
            if not torch.equal(written[step].cpu(), trajectory.canvases[step - trajectory.first_step].cpu()):
                raise ValueError(
                    f"{argument}= is of another run: its canvas at step {step} is another one than the trajectory's: "
                    f"{again}"
                )
    return steps


def _require_shape(argument: str, shape: Sequence[int], trajectory: Recording, again: str) -> None:
    if tuple(shape) != tuple(trajectory.tokens.shape):
        raise ValueError(
            f"{argument}= has {shape[0]} rows of {shape[1]} positions, and the trajectory "
            f"{list(trajectory.tokens.shape)} [batch pos]; pos_slice must be left out: {again}"
        )
