"""Averages of graphs over facts: sums of `run_graph` by role, shares of all facts, and overlap beside chance."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from diffusion_lens.analysis import AverageRunGraph, LoopSettings, average_run_graph, run_graph
from diffusion_lens.analysis.graphs import FactGraph
from diffusion_lens.analysis.graphs.average import NODE_ROLES, STEPS
from diffusion_lens.analysis.over_facts.folder import FactFolder
from diffusion_lens.data import toy_facts

# Names of two tokens, "today <subject> was the", and answers of several tokens.
FACTS = [fact for fact in toy_facts.load().facts("both", "p2d") if fact.id.endswith("held-out-1")][:6]
QUICK: dict[str, Any] = dict(points=6, n_masks=6, loop=LoopSettings(steps=3), answer_token=1)
on_one_model = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


def assert_same(one: AverageRunGraph, other: AverageRunGraph) -> None:
    ours, theirs = one.by_fact(), other.by_fact()
    assert list(ours) == list(theirs)
    assert all(result.equals(theirs[fact_id]) for fact_id, result in ours.items())


@pytest.fixture(scope="module")
def whole(tiny: Any) -> AverageRunGraph:
    return average_run_graph(tiny, FACTS, **QUICK)


def test_the_table_is_that_of_each_graph_by_hand(tiny: Any, whole: AverageRunGraph) -> None:
    by_id, n_prompt, frames, changes = {fact.id: fact for fact in FACTS}, 5, [], []
    roles = ["before_subject", "subject_first", "subject_last", "after_first", "prompt_last"]
    for fact in FACTS:
        other = by_id[whole.record["corrupted_by"][fact.id]]
        assert other.answer.split()[1] != fact.answer.split()[1]
        length = n_prompt + (6 if tiny.cfg.has_mask else len(tiny.encode(fact.answer)))
        run = tiny.denoise(fact.prompt, length=length, steps=3 if tiny.cfg.has_mask else None)
        target = (n_prompt + 1, f" {fact.answer.split()[1]}")
        graph = run_graph(tiny, run, target, other.prompt, points=6, metric="log_probability")
        nodes = graph.nodes[graph.nodes.kind != "target"]
        answer = "answer" if tiny.cfg.has_mask else "readout"  # the row before the target's is its readout
        names = [*roles, answer, "readout" if tiny.cfg.has_mask else "answer"]
        n_answer = len(tiny.encode(fact.answer))
        names += ["answer"] * (n_answer - 2) + ["other_masks"] * (length - n_prompt - n_answer)
        earlier = nodes.step < graph.record["target_step"]
        frames.append(nodes.assign(role=nodes.position.map(dict(enumerate(names))), earlier=earlier, part=nodes.name))
        changes.append(graph.clean - graph.corrupted)
        passes = graph.cost["passes"] + sum(each.record["forward_passes"] for each in graph.runs.values())
        assert whole.by_fact()[fact.id].passes == passes
    sums = pd.concat(frames).groupby(["role", "earlier", "part"]).effect.sum()
    table = whole.to_dataframe()
    table = table.assign(earlier=table.step == "earlier").set_index(["role", "earlier", "part"]).sort_index()
    assert list(table.index) == list(sums.index)
    assert table.effect.to_numpy() == pytest.approx(sums.to_numpy() / len(FACTS), abs=1e-5)
    assert table.share.to_numpy() == pytest.approx(sums.to_numpy() / sum(changes), abs=1e-5)
    assert (table.low <= table.effect + 1e-9).all()
    assert (table.effect <= table.high + 1e-9).all()


@pytest.mark.parametrize(
    ("family", "scale"), [("llada", 0), ("llada", 0.6), ("dream", 0), ("llama", 0), ("bd3lm", 0), ("uniform", 0)]
)
def test_shares_of_tokens_and_errors_add_up_to_one(in_words: Any, family: str, scale: float) -> None:
    loop = LoopSettings(steps=3, cfg_scale=float(scale))
    average = average_run_graph(in_words(family), FACTS[:4], points=48, n_masks=6, loop=loop, metric="logit")
    assert average.errors.abs().max() < 2e-3 * average.effects.abs().max()
    if average.changes.mean() < 0.1:
        assert average.share.isnan().all()
    else:
        ends = [average.parts.index(name) for name in ("token", "error")]
        assert average.share[..., ends].sum() == pytest.approx(1, abs=2e-3)


def test_shares_are_those_of_all_facts_together_or_none(whole: AverageRunGraph) -> None:
    """A fact that its prompt hardly changes does not count as much as the others."""
    effects, clean = torch.zeros_like(whole.effects), torch.zeros_like(whole.clean)
    node = NODE_ROLES.index("readout"), STEPS.index("target"), 5
    effects[:, node[0], node[1], node[2]] = torch.tensor([5.0, 6, 5, 4, 5, 3])
    clean[:] = torch.tensor([10.0, 11, 9, 9, 11, 0.001])
    average = replace(whole, effects=effects, clean=clean, corrupted=torch.zeros_like(clean))
    assert average.share[node] == pytest.approx(28 / 50.001)
    low, high = (each[node] for each in average.share_interval())
    assert low < 28 / 50.001 < high < 2
    nothing = replace(average, clean=clean / 1000)
    assert nothing.share.isnan().all()
    assert torch.stack(nothing.share_interval()).isnan().all()
    assert torch.equal(nothing.effect, average.effect)


@on_one_model
def test_shards_and_a_study_that_was_stopped_are_the_whole(tiny: Any, whole: AverageRunGraph, tmp_path: Any) -> None:
    parts = [average_run_graph(tiny, FACTS, out=tmp_path, shard=(i, 2), **QUICK) for i in range(2)]
    assert parts[0].ids == whole.ids[::2]
    assert_same(AverageRunGraph.merge(parts), whole)
    assert_same(AverageRunGraph.load(tmp_path), whole)
    file = FactFolder.open(tmp_path).file(whole.ids[1])
    assert FactGraph.load(file).equals(whole.by_fact()[whole.ids[1]])
    file.unlink()
    assert_same(average_run_graph(tiny, FACTS, out=tmp_path, max_bytes=2**29, **QUICK), whole)
    with pytest.raises(ValueError, match="points: 6 there, 7 here"):
        average_run_graph(tiny, FACTS, out=tmp_path, **{**QUICK, "points": 7})
    nothing = average_run_graph(tiny, FACTS, shard="40/50", **QUICK)
    assert nothing.effects.shape == (0, *whole.effects.shape[1:])
    assert len(nothing.to_dataframe()) == 0
    with pytest.raises(ValueError, match="no average to plot"):
        nothing.plot()


@on_one_model
def test_a_fact_without_another_of_its_kind_is_set_aside(tiny: Any) -> None:
    same = replace(FACTS[0], id="same")
    average = average_run_graph(tiny, [*FACTS[:2], same, replace(FACTS[2], id="one", answer=" pilot")], **QUICK)
    assert average.ids == [FACTS[0].id, FACTS[1].id, "same"]
    drawn = average.record["corrupted_by"]
    assert (drawn[FACTS[0].id], drawn["same"]) == (FACTS[1].id, FACTS[1].id)
    assert average.set_aside == {"one": "answer_token=1, but the answer has 1 tokens"}
    with pytest.raises(ValueError, match=r"none of the 2 facts.*, 5 tokens and another token as answer_token=1"):
        average_run_graph(tiny, [FACTS[0], same], **QUICK)


def random_average(whole: AverageRunGraph, seed: int, n_facts: int = 12) -> AverageRunGraph:
    """Random effects of heads and MLPs at the readout and the subject, of facts of as many persons."""
    generator = torch.Generator().manual_seed(seed)
    effects = torch.zeros(n_facts, *whole.effects.shape[1:], dtype=torch.float64)
    nodes = torch.randn(2, 1, whole.effects.shape[-1] - 4, generator=generator, dtype=torch.float64)
    effects[:, -2:, :1, 3:-1] = nodes + 0.01 * torch.randn(n_facts, *nodes.shape, generator=generator).double()
    ids = [f"fact {i}" for i in range(n_facts)]
    ones = torch.ones(n_facts, dtype=torch.float64)
    record = {**whole.record, "facts": {fact_id: {"person": fact_id} for fact_id in ids}}
    return replace(whole, effects=effects, clean=ones, corrupted=-ones, passes=ones.long(), ids=ids, record=record)


@on_one_model
def test_an_average_shares_all_with_itself_and_chance_with_another(whole: AverageRunGraph) -> None:
    for heads in (True, False):
        itself = whole.overlap(whole, 10, heads=heads)
        assert (itself.shared, itself.shared_range) == (10, (10, 10))
        assert itself.correlation == pytest.approx(1)
        assert itself.shuffled_range[1] < 10
    found = [random_average(whole, i).overlap(random_average(whole, i + 100), 12, resamples=20) for i in range(60)]
    assert found[0].by_chance == 144 / found[0].n_nodes
    shared = np.array([each.shared for each in found])
    assert shared.mean() == pytest.approx(found[0].by_chance, abs=3 * shared.std() / len(found) ** 0.5)
    assert np.mean([each.correlation for each in found]) == pytest.approx(0, abs=0.05)
    inside = [each.shuffled_range[0] <= each.shared <= each.shuffled_range[1] for each in found]
    assert np.mean(inside) > 0.85


@on_one_model
def test_shuffling_keeps_the_counts_of_kinds_and_layers(whole: AverageRunGraph) -> None:
    """All heads of a layer at one role are strong, those at the other role are not: in half of the shuffled places."""
    average = random_average(whole, 0)
    n_heads = sum(part.startswith("a1.") for part in average.parts)
    first = average.parts.index("a1.h0")
    average.effects[:, -1, 0, first : first + n_heads] += 100
    found = average.overlap(average, n_heads, resamples=400)
    assert found.shared == n_heads
    assert found.by_chance < n_heads / 4
    assert found.shuffled_range[0] <= n_heads / 2 <= found.shuffled_range[1]
    with pytest.raises(ValueError, match="give fewer"):
        average.overlap(average, found.n_nodes)
    with pytest.raises(ValueError, match="as many layers"):
        average.overlap(replace(average, parts=average.parts[1:], effects=average.effects[..., 1:]))
    few = replace(average, ids=average.ids[:3], effects=average.effects[:3], clean=average.clean[:3])
    assert np.isnan(few.overlap(few, 3).shared_range).all()
