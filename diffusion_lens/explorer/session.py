"""`Session`: one or two models, and the runs that the explorer asks of them."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from typing import Any, TypeVar

from diffusion_lens.denoising import TrajectoryCache
from diffusion_lens.denoising.samplers import fitting_samplers
from diffusion_lens.explorer.as_python import LOGITS
from diffusion_lens.explorer.live_run import LiveRun
from diffusion_lens.explorer.plan import Plan, settings_of
from diffusion_lens.explorer.spec import Intervention, Spec
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.pages.page import FORMAT, Page, PageRun
from diffusion_lens.records.identity import describe_hooks
from diffusion_lens.settings import pick_indices

LARGEST_MEMORY = 2**30
MOST_RUNS = 512
T = TypeVar("T")
Cancelled = Callable[[], bool]
_ATTENTION = 0.1  # seconds after which a request that waits for its turn asks whether it is cancelled


class RequestCancelledError(Exception):
    """Nobody waits for the result of a request any more."""


def never() -> bool:
    """A request that is not cancelled."""
    return False


class Session:
    """Computes runs and their views from specs, one at a time, and keeps them within a bound on memory.

    A run is a function of its spec, so a result that was dropped is computed again when it is needed. Models with hooks
    of their own, or whose weights have changed since the first run, are refused with a `ValueError`.

    Some methods take `cancelled`, which says whether the request still matters. They ask it before the request's turn
    and at every step of a run, and raise a `RequestCancelledError` where it does not.

    Args:
        models: One model, or several to compare, such as those of a pair.
        title: Title of the page.
        max_bytes: Largest size of what is kept, in bytes.
        max_runs: Largest number of specs that are kept, without those from which kept runs take activations.
    """

    def __init__(
        self,
        models: Sequence[HookedDiffusionTransformer],
        title: str | None = None,
        max_bytes: int = LARGEST_MEMORY,
        max_runs: int = MOST_RUNS,
    ) -> None:
        if not models:
            raise ValueError("a session needs a model")
        self.models = list(models)
        self.title = title or " and ".join(model.cfg.name_and_mode for model in models)
        self.max_runs = max_runs
        self._specs: dict[str, Spec] = {}
        self._memory = Memory(max_bytes)
        self._weights: dict[int, str] = {}  # of each model, by its first run
        # Hooks of two requests on one model must not mix, and a request that waits is answered in turn.
        self._lock = RLock()
        self._cancelled: Cancelled = never  # of the request whose turn it is

    @property
    def manifest(self) -> dict[str, Any]:
        """The models, and the last of the runs that were asked for."""
        return self.described()

    def described(self, cancelled: Cancelled = never) -> dict[str, Any]:
        """`manifest`, unless it is cancelled."""
        with self._turn(cancelled):
            runs = [self._entry(spec) for spec in self._specs.values()]
        return {"format": FORMAT, "title": self.title, "models": [model_info(x) for x in self.models], "runs": runs}

    def run(self, given: Spec | Mapping[str, Any], cancelled: Cancelled = never) -> dict[str, Any]:
        """The manifest's entry of a run.

        Raises:
            ValueError, TypeError, KeyError: The spec does not fit the model, or names an unknown run.
        """
        spec = Spec.of(given)
        with self._turn(cancelled):
            for known in (spec.base, *(one.source for one in spec.interventions)):
                if known is not None:
                    self._spec(known)
            entry = self._entry(spec)
            self._specs[spec.id] = spec
            self._drop()
            return entry

    def chunk(self, run_id: str, name: str, cancelled: Cancelled = never) -> bytes:
        """A chunk of a run: "predictions", "lens/{step}", "attention/{layer}/{step}" or "trace/{kind}/{step}".

        Raises:
            KeyError: There is no such run or chunk.
            ValueError: The view does not exist at this step.
        """
        with self._turn(cancelled):
            live = self._live(self._spec(run_id))
            if name == "predictions":
                return live.predictions
            return self._memory.get((run_id, name), lambda: live.compute(name), len)

    def page(self, run_ids: Sequence[str], attention: Sequence[int] = ()) -> Page:
        """Runs as a page that contains all its numbers.

        Args:
            attention: Layers whose attention patterns the page contains, at every step.
        """
        for model in self.models:
            pick_indices("attention", attention or [0], model.cfg.n_layers)
        with self._lock:
            runs = [self._whole(run_id, attention) for run_id in run_ids]
        return Page(self.title, [model_info(model) for model in self.models], runs)

    @contextmanager
    def _turn(self, cancelled: Cancelled) -> Iterator[None]:
        """The turn of a request: no other computes in the meantime."""
        while not self._lock.acquire(timeout=_ATTENTION):
            _require_wanted(cancelled)
        before = self._cancelled
        try:
            self._cancelled = cancelled
            self._go_on()
            yield
        finally:
            self._cancelled = before
            self._lock.release()

    def _go_on(self) -> None:
        """Raise a `RequestCancelledError` if the request whose turn it is was cancelled."""
        _require_wanted(self._cancelled)

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
            live = LiveRun.of(Plan.of(model, spec, self._source, self._cache), self._go_on)
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
        return source

    def _cache(self, plan: Plan, point: str) -> TrajectoryCache:
        """The activations of a run at a hook point, by step."""
        spec = plan.spec

        def compute() -> TrajectoryCache:
            hooks = [*plan.fwd_hooks, (LOGITS, lambda logits, hook: self._go_on())]
            settings = {"names_filter": point, "fwd_hooks": hooks, **settings_of(spec)}
            return self._model(spec).denoise_with_cache(spec.prompt, **settings)[1]

        return self._memory.get((spec.id, point), compute, lambda cache: cache.n_bytes)

    def _whole(self, run_id: str, attention: Sequence[int]) -> PageRun:
        """A run with all chunks of its views, which a file contains."""
        live = self._live(self._spec(run_id))
        entry, steps = live.entry, list(range(live.trajectory.n_steps))
        chunks = {"predictions": live.predictions, **live.lens_chunks(steps)}
        patterns, missing = None, {"attention": "Name layers, attention=[0, 1], to see their patterns."}
        if attention:
            patterns, missing = {**entry["attention"], "layers": sorted(attention)}, {}
            for layer in sorted(attention):
                chunks |= {f"attention/{layer}/{step}": live.attention_chunk(layer, step) for step in steps}
        if not entry["traces"]:
            missing["trace"] = "Give a Fact, or prompt, subject and answer, to see which states carry the answer."
        traced = [live.trace_view(trace["kind"], trace["steps"]) for trace in entry["traces"]]
        chunks |= {name: chunk for view in traced for name, chunk in view.chunks.items()}
        whole = {"spec": None, "attention": patterns, "traces": [view.entry for view in traced]}
        return PageRun({**entry, **whole, "missing": {**entry["missing"], **missing}}, chunks)


def _require_wanted(cancelled: Cancelled) -> None:
    if cancelled():
        raise RequestCancelledError("the request was cancelled")


def model_info(model: HookedDiffusionTransformer) -> dict[str, Any]:
    """The manifest's entry of a model."""
    cfg = model.cfg
    return {
        "name": cfg.name_and_mode,
        "n_layers": cfg.n_layers,
        "n_heads": cfg.n_heads,
        "grows": cfg.is_autoregressive,
        "masks": cfg.has_mask,
        "samplers": fitting_samplers(cfg),
        "length": cfg.trained_length,
    }


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
