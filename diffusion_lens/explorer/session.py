"""`Session`: one or two models, and the runs that the explorer asks of them.

One request computes at a time, says how far it is, and ends when nobody waits for it. Results are kept within a bound
on memory.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any, TypeVar

from diffusion_lens.analysis.engine.batching import watching
from diffusion_lens.denoising import TrajectoryCache
from diffusion_lens.denoising.samplers import fitting_samplers
from diffusion_lens.explorer.as_python import LOGITS
from diffusion_lens.explorer.facts_table import FactsTable
from diffusion_lens.explorer.live_run import LiveRun
from diffusion_lens.explorer.page_of_run import written_by
from diffusion_lens.explorer.plan import Plan, settings_of
from diffusion_lens.explorer.prompts import answers_of, greedy_spec, subjects_of
from diffusion_lens.explorer.spec import FactRequest, Intervention, PageRequest, Spec, SuggestionRequest, check_state
from diffusion_lens.facts.fact import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.pages.page import FORMAT, LARGEST_PAGE, SHOWN_OF_HASH, Page, PageRun
from diffusion_lens.records.identity import describe_hooks, weights_sha256
from diffusion_lens.settings import pick_indices

Cancelled = Callable[[], bool]
_ATTENTION = 0.1  # seconds after which a request that waits for its turn asks whether it is cancelled


class RequestCancelledError(Exception):
    """Nobody waits for the result of a request any more."""


def never() -> bool:
    """A request that is not cancelled."""
    return False


class Turns:
    """Lets one request compute at a time: hooks of two requests on one model must not mix.

    Attributes:
        progress: What the present request does, how many parts are done, and how many there are: {"what": "denoising",
            "done": 3, "of": 16}; empty where nothing is computed. Other threads may read it.
    """

    def __init__(self) -> None:
        self.progress: dict[str, str | int] = {}
        self._lock = RLock()
        self._cancelled: Cancelled = never  # of the request whose turn it is

    @contextmanager
    def turn(self, cancelled: Cancelled = never) -> Iterator[None]:
        """The turn of a request: no other computes in the meantime.

        Args:
            cancelled: Whether nobody waits for the result any more. It is asked before the turn and at every part.

        Raises:
            RequestCancelledError: The request is cancelled.
        """
        while not self._lock.acquire(timeout=_ATTENTION):
            _require_wanted(cancelled)
        before = self._cancelled, self.progress
        try:
            self._cancelled = cancelled
            self.go_on()
            yield
        finally:
            self._cancelled, self.progress = before
            self._lock.release()

    def go_on(self) -> None:
        """Raise a `RequestCancelledError` if the request whose turn it is was cancelled."""
        _require_wanted(self._cancelled)

    def at(self, what: str, done: int, of: int) -> None:
        """Say how far the present request is; then as `go_on`."""
        self.progress = {"what": what, "done": done, "of": of}
        self.go_on()


def _require_wanted(cancelled: Cancelled) -> None:
    if cancelled():
        raise RequestCancelledError("the request was cancelled")


T = TypeVar("T")


class Memory:
    """Results within a bound on memory, in bytes; those that were not used for longest are dropped first.

    A result that is larger than the bound is computed at every request.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """The result of a key, which is computed if it is not kept."""
        if key not in self._kept:
            result = compute()
            self._kept[key] = (result, size(result))
            self.n_bytes += size(result)
            while self.n_bytes > self.max_bytes:
                _, (_, dropped) = self._kept.popitem(last=False)
                self.n_bytes -= dropped
            return result
        self._kept.move_to_end(key)
        kept: T = self._kept[key][0]
        return kept

    def kept(self, key: Hashable) -> Any:
        """The result of a key if it is kept, else `None`."""
        return self._kept[key][0] if key in self._kept else None


LARGEST_MEMORY = 2**30
MOST_RUNS = 512


class Session:
    """Computes runs and their views from specs, one at a time, and keeps them within a bound on memory.

    A run is a function of its spec, so a result that was dropped is computed again when it is needed. Models with hooks
    of their own, or whose weights have changed since the first run, are refused with a `ValueError`.

    Some methods take `cancelled`, which says whether the request still matters. They ask it before the request's turn,
    at every step of a run and after every pass of a trace, and raise a `RequestCancelledError` where it does not.
    Meanwhile `progress` says how far the request is.

    Args:
        models: One model, or several to compare, such as those of a pair.
        title: Title of the page.
        facts: Facts for the table beside the canvas (`explorer.facts_table`), which also become suggestions.
        results: Saved results of a study of these facts, `Recall` or `AverageEffect`, that fill in the table.
        settings: Settings of the runs of the facts as in `denoise`: length, steps, sampler, cfg_scale, temperature,
            seed.
        max_bytes: Largest size of what is kept, in bytes.
        max_runs: Largest number of specs that are kept, without those from which kept runs take activations.
    """

    def __init__(
        self,
        models: Sequence[HookedDiffusionTransformer],
        title: str | None = None,
        max_bytes: int = LARGEST_MEMORY,
        max_runs: int = MOST_RUNS,
        *,
        facts: Iterable[Fact] | None = None,
        results: Iterable[Any] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not models:
            raise ValueError("a session needs a model")
        self.models = list(models)
        self.title = title or " and ".join(model.cfg.name_and_mode for model in models)
        self.max_runs = max_runs
        self.table = FactsTable(self.models, facts or (), settings, results)
        self._specs: dict[str, Spec] = {}
        self._memory = Memory(max_bytes)
        self._weights: dict[int, str] = {}  # of each model, by its first run
        self._turns = Turns()

    @property
    def manifest(self) -> dict[str, Any]:
        """The models, the facts, and the last of the runs that were asked for."""
        return self.described()

    @property
    def progress(self) -> dict[str, str | int]:
        """What the session computes now, how many parts are done, and how many there are, as {"what": "denoising",
        "done": 3, "of": 16}; empty where it computes nothing. It waits for nothing."""
        return self._turns.progress

    def described(self, cancelled: Cancelled = never, shown: Collection[str] | None = None) -> dict[str, Any]:
        """`manifest`, unless it is cancelled.

        Args:
            shown: Ids of the runs to describe, with those with which they are compared; if none of them is known, the
                first run of each model. By default all runs are described.
        """
        with self._turns.turn(cancelled):
            specs = list(self._specs.values())
            if shown is not None:
                first = {spec.model: spec for spec in reversed(specs)}
                chosen = [spec for spec in specs if spec.id in shown] or list(first.values())
                wanted = {spec.id for spec in chosen} | {spec.base for spec in chosen}
                specs = [spec for spec in specs if spec.id in wanted]
            return {
                "format": FORMAT,
                "title": self.title,
                "models": self._infos(),
                "runs": [self._entry(spec) for spec in specs],
                "facts": self.table.entries(),
                "state": None,
            }

    def run(self, given: Spec | Mapping[str, Any], cancelled: Cancelled = never) -> dict[str, Any]:
        """The manifest's entry of a run.

        Raises:
            ValueError, TypeError, KeyError: The spec does not fit the model, or names an unknown run.
        """
        spec = Spec.of(given)
        with self._turns.turn(cancelled):
            for known in (spec.base, *(one.source for one in spec.interventions)):
                if known is not None:
                    self._spec(known)
            entry = self._entry(spec)
            self._specs[spec.id] = spec
            self._drop()
            return entry

    def chunk(self, run_id: str, name: str, cancelled: Cancelled = never) -> bytes:
        """A chunk of a run: "predictions", "lens/{step}", "attention/{layer}/{step}", "trace/{kind}/{step}" or
        "graph/{position}/{prompt}".

        Raises:
            KeyError: There is no such run or chunk.
            ValueError: The view does not exist at this step.
        """
        with self._turns.turn(cancelled):
            live = self._live(self._spec(run_id))
            if name == "predictions":
                return live.predictions
            with watching(partial(self._turns.at, "tracing")):
                return self._memory.get((run_id, name), lambda: live.compute(name), len)

    def kept_chunk(self, run_id: str, name: str) -> bytes | None:
        """A chunk of a run if it was computed before and is still kept."""
        if name == "predictions":
            live = self._memory.kept(run_id)
            return None if live is None else live.predictions
        chunk: bytes | None = self._memory.kept((run_id, name))
        return chunk

    def fact(self, given: Mapping[str, Any], cancelled: Cancelled = never) -> dict[str, Any]:
        """The values of a fact of the table on one model, {"id", "model", "run", "spec", "recalled", "p", "commitment",
        "effect", "error", "studied"}; `spec` gives the run. What is known is not computed again.

        Args:
            given: {"id", "model", "effect"}: index of the fact and of the model, and whether to compute the effect of
                noise at the subject.

        Raises:
            ValueError, TypeError: A wrong request, or a fact that the model cannot be queried for.
            KeyError: There is no such fact.
        """
        asked = FactRequest.of(given)
        with self._turns.turn(cancelled), watching(partial(self._turns.at, "tracing")):
            spec = self.table.spec(asked.id, asked.model)
            if self.table.lacks(asked.id, asked.model, asked.effect):
                self.table.measure(asked.id, asked.model, self._live(spec), asked.effect)
            values = self.table.values(asked.id, asked.model)
            return {"id": asked.id, "model": asked.model, "spec": spec.to_json(), **values}

    def suggest(self, prompt: str, cancelled: Cancelled = never) -> dict[str, Any]:
        """Subjects and answers for a prompt: names of the session's facts and capitalised words, and answers of facts
        and what each model wrote (`explorer.prompts`). A model that cannot be asked suggests nothing.

        Returns:
            {"subjects": [{"text", "spans", "why"}, ...], "answers": [{"text", "why"}, ...]}, where spans are the
            position of a subject's first token and one past its last, by the index of each model as text.
        """
        SuggestionRequest.of({"prompt": prompt})
        with self._turns.turn(cancelled):
            written = [
                (model.cfg.name_and_mode, written_by(model, live.trajectory)[1])
                for index, model in enumerate(self.models)
                for live in self._written_for(index, prompt)
            ]
            return {
                "subjects": subjects_of(self.models, prompt, self.table.facts),
                "answers": answers_of(prompt, self.table.facts, written),
            }

    def page(
        self,
        run_ids: Sequence[str],
        attention: Sequence[int] = (),
        state: Mapping[str, Any] | None = None,
        cancelled: Cancelled = never,
        *,
        facts: Sequence[int] | None = None,
    ) -> Page:
        """Runs as a page that contains all their numbers, and facts with those of their runs whose values are known.

        Of a fact's run, the page contains the canvas and the predictions.

        Args:
            facts: Index of each fact in the page's table; by default all of them.
            attention: Layers whose attention patterns the page contains, at every step.
            state: What the page shows at first, as its front end writes it.

        Raises:
            KeyError: There is no such run or fact.
            ValueError, TypeError: There is no such layer, or the state is no plain data.
        """
        state = check_state("state", state)
        for model in self.models:
            pick_indices("attention", attention or [0], model.cfg.n_layers)
        with self._turns.turn(cancelled), watching(partial(self._turns.at, "tracing")):
            runs = [self._whole(run_id, attention, run_ids, state) for run_id in run_ids]
            entries = self.table.entries()
            chosen = range(len(entries)) if facts is None else sorted(set(facts))
            if chosen and chosen[-1] >= len(entries):
                raise KeyError(f"there is no fact {chosen[-1]}: the table has {len(entries)}, counted from 0")
            for index, model_index in self.table.computed():
                if index not in chosen:
                    continue
                live = self._live(self.table.spec(index, model_index))
                if live.plan.spec.id not in run_ids:
                    runs.append(of_fact(live, index))
            return Page(self.title, self._infos(), runs, facts=[entries[index] for index in chosen], state=state)

    def page_to_send(self, asked: PageRequest, cancelled: Cancelled = never) -> str:
        """A page that a browser asks for, as HTML.

        Raises:
            KeyError, ValueError, TypeError: As in `page`, or the page is larger than `LARGEST_PAGE`.
        """
        page = self.page(asked.runs, asked.attention, asked.state, cancelled, facts=asked.facts)
        text = page.html()
        if (size := len(text.encode())) > LARGEST_PAGE:
            rows = "select fewer rows of the table of facts, or close it" if asked.facts else "show one run, not two"
            raise ValueError(
                f"the page would have {size / 2**20:.0f} MB, and a page has at most {LARGEST_PAGE / 2**20:.0f}: "
                f"{rows}, or take a shorter text or fewer steps"
            )
        return text

    def _drop(self) -> None:
        """Forget the oldest specs beyond `max_runs`, but none from which another run takes activations."""
        while len(self._specs) > self.max_runs:
            sources = {one.source for spec in self._specs.values() for one in spec.interventions}
            free = [run_id for run_id in self._specs if run_id not in sources]
            if len(free) == 1:  # The newest run; it is kept with all of its sources.
                return
            del self._specs[free[0]]

    def _spec(self, run_id: str) -> Spec:
        if run_id not in self._specs:
            near = ", ".join(list(self._specs)[-5:])
            raise KeyError(
                f"there is no run {run_id!r} in this session, which keeps the last {self.max_runs}; "
                f"{f'the newest are {near}' if near else 'it has none'}"
            )
        return self._specs[run_id]

    def _written_for(self, index: int, prompt: str) -> list[LiveRun]:
        """The runs without interventions that a model has of a prompt, the newest first; if there is none a greedy one,
        unless the model refuses the prompt."""
        specs = [
            one for one in self._specs.values() if (one.model, one.prompt, one.interventions) == (index, prompt, ())
        ]
        if kept := [live for spec in reversed(specs) if (live := self._memory.kept(spec.id)) is not None]:
            return kept
        try:
            return [self._live(specs[-1] if specs else greedy_spec(self.models, index, prompt, self.table.settings))]
        except (ValueError, TypeError):
            return []

    def _infos(self) -> list[dict[str, Any]]:
        """The manifest's entries of the models."""
        return [model_info(model, self._weights.get(index)) for index, model in enumerate(self.models)]

    def _entry(self, spec: Spec) -> dict[str, Any]:
        """The manifest's entry of a run."""
        return {**self._live(spec).entry, "base": spec.base, "spec": spec.to_json()}

    def _model(self, spec: Spec) -> HookedDiffusionTransformer:
        if spec.model >= len(self.models):
            raise ValueError(f"model={spec.model}, but the session has {len(self.models)} models, counted from 0")
        return self.models[spec.model]

    def _live(self, spec: Spec) -> LiveRun:
        """A computed run, from memory if it is kept."""
        model = self._model(spec)
        if hooks := describe_hooks(model):
            raise ValueError(
                f"hooks are attached to {model.cfg.model_name!r} at {', '.join(hooks)}, which no run of the explorer "
                "names: remove them, model.reset_hooks(), and give interventions; or denoise under the hooks, and "
                "write trajectory.explore(path)"
            )

        def compute() -> LiveRun:
            plan = Plan.of(model, spec, self._source, self._cache)
            live = LiveRun.of(plan, partial(self._turns.at, "denoising"))
            live.require_weights(self._weights.setdefault(spec.model, live.plan.weights))
            return live

        return self._memory.get(spec.id, compute, lambda live: live.n_bytes)

    def _source(self, spec: Spec, one: Intervention) -> Spec:
        """The run from which an intervention takes activations: the one it names, or the same without interventions."""
        if one.source is None:
            return replace(spec, interventions=(), base=None)
        source = self._spec(one.source)
        if source.model != spec.model:
            names = [self.models[index].cfg.name_and_mode for index in (source.model, spec.model)]
            raise ValueError(
                f"the run {one.source} is of {names[0]!r}, whose activations do not fit {names[1]!r}: name a run of "
                "the same model"
            )
        if source.steps != spec.steps and not self._model(spec).cfg.is_autoregressive:
            raise ValueError(
                f"the run {one.source} has {source.steps} steps and this one {spec.steps}, so that a step is another "
                "time in each: run both with the same number of steps"
            )
        return source

    def _cache(self, plan: Plan, point: str) -> TrajectoryCache:
        """The activations of a run at a hook point, by step."""
        spec = plan.spec

        def compute() -> TrajectoryCache:
            hooks = [*plan.fwd_hooks, (LOGITS, lambda logits, hook: self._turns.go_on())]
            settings = {"names_filter": point, "fwd_hooks": hooks, **settings_of(spec)}
            return self._model(spec).denoise_with_cache(spec.prompt, **settings)[1]

        return self._memory.get((spec.id, point), compute, lambda cache: cache.n_bytes)

    def _whole(
        self, run_id: str, attention: Sequence[int], beside: Sequence[str], state: Mapping[str, Any] | None
    ) -> PageRun:
        """A run with all chunks of its views, which a file contains; it is compared with its base if that is beside."""
        spec = self._spec(run_id)
        live, base = self._live(spec), spec.base if spec.base in beside else None
        entry, steps = live.entry, list(range(live.trajectory.n_steps))
        chunks = {"predictions": live.predictions, **live.lens_chunks(steps), **live.learned_chunks(steps)}
        patterns, missing = None, {"attention": "Name layers, attention=[0, 1], to see their patterns."}
        if attention:
            patterns, missing = {**entry["attention"], "layers": sorted(attention)}, {}
            for layer in sorted(attention):
                chunks |= {f"attention/{layer}/{step}": live.attention_chunk(layer, step) for step in steps}
        if not entry["traces"]:
            missing["trace"] = "Give a Fact, or prompt, subject and answer, to see which states carry the answer."
        traced = [live.trace_view(trace["kind"], trace["steps"]) for trace in entry["traces"]]
        chunks |= {name: chunk for view in traced for name, chunk in view.chunks.items()}
        changes = [one.to_json() for one in spec.interventions]
        whole = {"spec": None, "changes": changes, "base": base, "attention": patterns}
        whole["traces"] = [view.entry for view in traced]
        name = _graph_in(state)
        whole["graph"] = {"chunk": name} if (graph := self._memory.kept((run_id, name))) is not None else None
        chunks |= {} if graph is None else {name: graph}
        return PageRun({**entry, **whole, "missing": {**entry["missing"], **missing}}, chunks)


def _graph_in(state: Mapping[str, Any] | None) -> str:
    """Name of the chunk of the graph that a state shows; "" for none."""
    try:
        name = str(json.loads((state or {}).get("graph") or "{}")["chunk"])
    except (ValueError, KeyError, TypeError):
        return ""
    return name if name.startswith("graph/") else ""


def of_fact(live: LiveRun, fact: int) -> PageRun:
    """The run of a fact of the table with its canvas and predictions, which a file contains."""
    missing = dict.fromkeys(("lens", "attention", "trace"), "The page contains the canvas of this fact's run only.")
    left_out: dict[str, Any] = {"spec": None, "lens": None, "attention": None, "graph": None, "traces": []}
    python = {name: live.entry["python"][name] for name in ("run", "canvas", "predictions")}
    entry = {**live.entry, **left_out, "missing": missing, "python": python, "fact": fact}
    return PageRun(entry, {"predictions": live.predictions})


def model_info(model: HookedDiffusionTransformer, weights: str | None = None) -> dict[str, Any]:
    """The manifest's entry of a model, whose `weights` are hashed unless their SHA-256 is given."""
    cfg = model.cfg
    return {
        "name": cfg.name_and_mode,
        "n_layers": cfg.n_layers,
        "n_heads": cfg.n_heads,
        "grows": cfg.is_autoregressive,
        "masks": cfg.has_mask,
        "shift": int(cfg.readout == "shifted"),
        "samplers": fitting_samplers(cfg),
        "length": cfg.trained_length,
        "weights": (weights or weights_sha256(model))[:SHOWN_OF_HASH],
    }
