"""Studies on an executor: the same numbers as in one process, and what is lost when something fails."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from executors import Here, Interrupted

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import (
    AverageEffect,
    CanvasLayout,
    EditSettings,
    LoopSettings,
    ValueSettings,
    Workers,
    average_indirect_effect,
    average_run_graph,
    average_trajectory_effect,
    edit_study,
    key_value_study,
    recalled_facts,
    reversal_signatures,
)
from diffusion_lens.analysis.causal_tracing import average
from diffusion_lens.analysis.causal_tracing.average import LoopRuns
from diffusion_lens.analysis.over_facts import executor
from diffusion_lens.analysis.over_facts import study as study_of_facts
from diffusion_lens.analysis.over_facts.executor import packed
from diffusion_lens.analysis.over_facts.folder import FactFolder
from diffusion_lens.data import EditRequest, toy_facts
from diffusion_lens.evaluation import recall_by_steps

PEOPLE = toy_facts.load()
FACTS = PEOPLE.facts()[:5]
REQUESTS = [
    EditRequest(fact, replace(fact, answer=other.answer), (), ())
    for fact, other in zip(FACTS, PEOPLE.facts()[20:25], strict=True)
]
SEARCH = ValueSettings(steps=2)
LOCK = Lock()  # which no pickle can store
SHORT = {"samples": 2, "length": 14}

STUDIES: dict[str, Callable[..., Any]] = {
    "one canvas": lambda model, **more: average_indirect_effect(model, FACTS, **SHORT, known="all", **more),
    "recalled": lambda model, **more: average_indirect_effect(
        model, FACTS, **SHORT, loop=LoopSettings(steps=2, temperature=0.5, batch_size=2), **more
    ),
    "graphs": lambda model, **more: average_run_graph(
        model, PEOPLE.facts()[:40:10], points=2, n_masks=5, loop=LoopSettings(steps=2), **more
    ),
    "trajectories": lambda model, **more: average_trajectory_effect(
        model, FACTS[:3], **SHORT, layers=[1, 3], loop=LoopSettings(steps=3), known="all", **more
    ),
    "keys and values": lambda model, **more: key_value_study(model, FACTS, [0], search=SEARCH, batch_size=2, **more),
    "recall": lambda model, **more: recall_by_steps(model, FACTS, [1, 3], temperature=0.7, batch_size=2, **more),
    "signatures": lambda model, **more: reversal_signatures(
        model, PEOPLE.taught_pairs(model)[:4], batch_size=2, **more
    ),
    "edits": lambda model, **more: edit_study(
        model, REQUESTS, EditSettings(1, SEARCH, layout=CanvasLayout(14), batch_size=2), **more
    ),
}


on_one_model = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


def scaled(factor: float) -> Callable[..., torch.Tensor]:
    return lambda activation, hook: activation * factor


def assert_same(one: Any, other: Any) -> None:
    assert one.ids == other.ids
    assert one.record == other.record
    ours, theirs = one.by_fact(), other.by_fact()
    assert list(ours) == list(theirs)
    assert all(result.equals(theirs[fact_id]) for fact_id, result in ours.items())


@pytest.mark.parametrize(
    ("tiny", "name", "size"),
    [
        *(("tiny-mdm", name, None) for name in STUDIES),
        *(("tiny-ar", name, 1) for name in ("recalled", "keys and values", "signatures")),
        ("tiny-mdm", "recalled", 3),
    ],
    indirect=["tiny"],
)
def test_numbers_are_those_of_one_process(tiny: Any, name: str, size: int | None) -> None:
    pool = Here()
    assert_same(STUDIES[name](tiny, executor=Workers(pool, facts_per_task=size)), STUDIES[name](tiny))
    assert pool.n_tasks > 1


@on_one_model
def test_facts_are_recalled_as_in_one_process(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, pool = LoopSettings(steps=2, temperature=0.5, batch_size=2), Here(deaths=1)
    facts = [*FACTS, replace(FACTS[0], id="untrue", answer=PEOPLE.facts()[20].answer)]
    serial = recalled_facts(tiny, facts, loop, length=14)
    assert 0 < len(serial) < len(facts)
    assert recalled_facts(tiny, facts, loop, length=14, executor=Workers(pool, facts_per_task=1)) == serial
    assert pool.n_tasks > 2
    monkeypatch.setattr(LoopRuns, "recalled", lambda *args: 1 / 0)
    with pytest.raises(RuntimeError, match=r"6 facts failed on the workers; .*ZeroDivisionError"):
        recalled_facts(tiny, facts, loop, length=14, executor=Here())


@on_one_model
def test_threads_of_one_process_take_turns_with_its_model(tiny: Any) -> None:
    with tiny.hooks(fwd_hooks=[("blocks.0.hook_attn_out", scaled(0.5))]), ThreadPoolExecutor(3) as pool:
        one, other = (STUDIES["one canvas"](tiny, executor=each) for each in (None, Workers(pool, facts_per_task=1)))
    assert_same(one, other)


@on_one_model
def test_a_study_is_split_evenly(tiny: Any, tmp_path: Path) -> None:
    pool = Here()
    STUDIES["recall"](tiny, executor=Workers(pool, tasks=2), out=tmp_path)
    assert pool.n_tasks == 2


@on_one_model
def test_the_record_has_the_device_of_the_workers(tiny: Any, tmp_path: Path) -> None:
    class OnAGpu(Here):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            task, copy, threads = pickle.loads(args[0])
            return super().submit(fn, packed((task, replace(copy, device="cpu"), threads)))

    result = STUDIES["recall"](tiny, executor=Workers(OnAGpu(), device="cuda"), out=tmp_path)
    assert result.record["device"] == FactFolder.open(tmp_path).record["device"] == "cuda"


@on_one_model
def test_hooks_travel_and_times_are_told(tiny: Any, in_words: Any, tmp_path: Any) -> None:
    hooks = [("blocks.0.hook_attn_out", scaled(0.5)), ("blocks.1.hook_resid_pre", scaled(1.1))]
    with tiny.hooks(fwd_hooks=hooks):
        one, other = (STUDIES["one canvas"](tiny, executor=executor) for executor in (None, Here()))
    assert one.record["hooks"]
    assert_same(one, other)
    in_words("udlm").save_pretrained(tmp_path)
    told = HookedDiffusionTransformer.from_pretrained(tmp_path, device="cpu")
    with told.at_time(0.4):
        one, other = (STUDIES["one canvas"](told, executor=executor) for executor in (None, Here()))
    assert one.record["time"] == 0.4
    assert_same(one, other)


@on_one_model
def test_a_worker_that_dies_costs_its_task(tiny: Any, tmp_path: Any) -> None:
    undisturbed, pool = Here(), Here(deaths=2)
    STUDIES["recall"](tiny, executor=undisturbed)
    assert_same(STUDIES["recall"](tiny, executor=pool, out=tmp_path), STUDIES["recall"](tiny))
    assert pool.n_tasks == undisturbed.n_tasks + 2
    for again in (None, Here()):
        assert_same(STUDIES["recall"](tiny, executor=again, out=tmp_path), STUDIES["recall"](tiny))
    assert again.n_tasks == 0


@on_one_model
def test_a_task_may_reach_its_time_limit_as_often_as_it_computes_a_batch(tiny: Any, tmp_path: Any) -> None:
    class ShortJobs(Here):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            task, *sent = pickle.loads(args[0])
            left = [batch for batch in task.batches if not FactFolder.open(tmp_path).has(batch[0])]
            self.deaths += len(left) > 1
            if len(left) > 1:
                fn(packed((replace(task, batches=left[:1]), *sent)))
            return super().submit(fn, *args, **kwargs)

    pool = ShortJobs()
    spread = STUDIES["recall"](tiny, executor=Workers(pool, facts_per_task=5, retries=0), out=tmp_path)
    assert_same(spread, STUDIES["recall"](tiny))
    assert pool.n_tasks == 3


@on_one_model
def test_a_task_that_is_given_up_names_the_facts_it_lacks(tiny: Any, tmp_path: Any) -> None:
    class DiesLate(Here):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            task, *sent = pickle.loads(args[0])
            fn(packed((replace(task, batches=task.batches[:1]), *sent)))
            return Here(deaths=1).submit(fn, *args)

    with pytest.raises(RuntimeError, match=r"died 2 times, last with OSError: the node went away") as caught:
        STUDIES["recall"](tiny, executor=Workers(DiesLate(), facts_per_task=5, retries=1), out=tmp_path)
    folder = FactFolder.open(tmp_path)
    assert [repr(fact.id) in str(caught.value) for fact in FACTS] == [not folder.has(fact.id) for fact in FACTS]
    assert 0 < len(list(tmp_path.glob("*.safetensors"))) < len(FACTS)


@on_one_model
def test_the_bar_moves_while_a_task_runs(tiny: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    class Bar(nullcontext[Any]):
        def __init__(self, total: int, **_: Any) -> None:
            super().__init__(self)
            self.total, self.n = total, 0
            bars.append(self)

        def update(self, n: int) -> None:
            self.n += n

    class Polled(Here):
        """Computes a task when it is first asked for it, and says at the second time that it has ended."""

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            self.compute, self.seen = lambda: fn(*args), []
            return self

        def done(self) -> bool:
            self.seen.append(bars[0].n)
            if len(self.seen) == 1:
                self.outcome = self.compute()
            return len(self.seen) > 1

        def result(self) -> Any:
            return self.outcome

    monkeypatch.setattr(study_of_facts, "tqdm", Bar)
    monkeypatch.setattr(executor, "_POLL", 0)
    pool = Polled()
    STUDIES["recall"](tiny, executor=Workers(pool, facts_per_task=5), out=tmp_path, progress=True)
    assert pool.seen == [0, len(FACTS)]
    assert bars[0].n == bars[0].total == len(FACTS)


@on_one_model
def test_a_fact_that_fails_is_set_aside(tiny: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = average.causal_trace

    def failing(model: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        if model.to_string(query.tokens).count(FACTS[2].subject):
            raise MemoryError("no memory for this one")
        return trace(model, query, *args, **kwargs)

    facts = [*FACTS[2:3], *PEOPLE.facts()[20:22]]

    def study(**more: Any) -> AverageEffect:
        return average_indirect_effect(tiny, facts, **SHORT, known="all", **more)

    with monkeypatch.context() as patch:
        patch.setattr(average, "causal_trace", failing)
        with pytest.warns(UserWarning, match=r"1 facts failed on the workers; .*MemoryError: no memory for this one"):
            partial = study(executor=Here(), out=tmp_path)
    assert partial.failed == {FACTS[2].id: "MemoryError: no memory for this one"}
    assert partial.ids == [fact.id for fact in facts[1:]]
    assert_same(study(executor=Here(), out=tmp_path), study())


@on_one_model
def test_all_that_fails_is_an_error(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(average, "causal_trace", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(RuntimeError, match=r"5 facts failed on the workers; .*ZeroDivisionError"):
        STUDIES["one canvas"](tiny, executor=Here())


def test_a_changed_model_is_refused(tmp_path: Any) -> None:
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    with torch.no_grad():
        model.blocks[0].mlp.W_out.mul_(1.5)
    with pytest.raises(ValueError, match=r"gets another network .*weights_sha256.*save_pretrained"):
        STUDIES["recall"](model, executor=Here(), out=tmp_path / "study")
    folder = model.save_pretrained(tmp_path / "model")
    loaded = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    assert_same(STUDIES["recall"](loaded, executor=Here()), STUDIES["recall"](loaded))


@on_one_model
def test_what_cannot_be_sent_is_refused(tiny: Any) -> None:
    with (
        tiny.hooks(fwd_hooks=[("hook_embed", lambda activation, hook: None if LOCK else activation)]),
        pytest.raises(ValueError, match=r"the hook .* at 'hook_embed' cannot be sent to workers"),
    ):
        STUDIES["recall"](tiny, executor=Here())
    built = HookedDiffusionTransformer(tiny.cfg, tiny.tokenizer)
    with pytest.raises(ValueError, match="was not loaded by from_pretrained"):
        STUDIES["recall"](built, executor=Here())
    with pytest.raises(TypeError, match="has no submit"):
        Workers(4)  # type: ignore[arg-type]


@on_one_model
def test_an_interrupted_run_leaves_a_folder_that_resumes(tiny: Any, tmp_path: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        STUDIES["recall"](tiny, executor=Interrupted(), out=tmp_path)
    folder = FactFolder.open(tmp_path)
    assert 0 < sum(folder.has(fact.id) for fact in FACTS) < len(FACTS)
    assert_same(STUDIES["recall"](tiny, out=tmp_path), STUDIES["recall"](tiny))
