"""What graphs say where there is nothing to share out, where sums are off, and where runs are free."""

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from graphs_of_runs import graph_of


def test_a_target_without_a_difference_is_said_by_all_that_divides_by_it(specimen: Any, configs: Any) -> None:
    """No attention passes anything on, so that the target's position is the same in both runs."""
    one = specimen(configs["llada"])
    for block in one.model.blocks:
        with torch.no_grad():
            block.attn.v.weight.zero_()
    graph = graph_of(one, points=2)
    assert graph.clean == graph.corrupted
    assert all(math.isnan(value) for value in (graph.error, graph.step_error, graph.retained))
    for ask in (
        graph.prune,
        lambda: graph.refine(one.model, 5),
        lambda: graph.faithfulness(one.model),
        lambda: graph.interventions(one.model),
    ):
        with pytest.raises(ValueError, match="no difference to share out"):
            ask()


def test_a_run_without_a_difference_replaces_nothing(either: Any) -> None:
    model, graph = either.model, graph_of(either, nodes_per_step=8, points=4)
    equal = graph.runs["clean"]
    for ask in (
        lambda: graph.faithfulness(model, equal, n_random=0),
        lambda: graph.refine(model, 5, [equal], candidates=4),
    ):
        with pytest.raises(ValueError, match="no difference for a graph to keep"):
            ask()


def test_a_decision_without_a_difference_has_no_share(either: Any) -> None:
    """A run that is the clean one up to the last step has another target alone."""
    model, graph = either.model, graph_of(either, nodes_per_step=8, points=4, metric="margin")
    clean, corrupted = graph.runs["clean"], graph.runs["corrupted"]
    last = graph.record["target_step"] - clean.first_step
    canvases = clean.canvases.clone()
    canvases[last:] = corrupted.canvases[last:]
    late = dataclasses.replace(corrupted, canvases=canvases)
    shares = graph.faithfulness(model, late, n_random=0).shares[:, 0]
    assert math.isfinite(shares[0])
    assert shares[1:].isnan().any()
    refined = graph.refine(model, 5, [late], candidates=4)
    assert len(refined) > 5


def test_a_sum_that_is_off_is_warned_of(either: Any) -> None:
    with pytest.warns(UserWarning, match=r"points=2 .* more than 5% of M - M'.*: give more points=, or .*float32"):
        graph = graph_of(either, points=2)
    assert graph.error > 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graph_of(either).error < 0.05


@pytest.mark.parametrize("every", ["dream", "llama", "mdlm", "sdar", "uniform"], indirect=True)
def test_a_free_run_reads_what_is_proposed_for_the_target(every: Any) -> None:
    """With everything replaced it is the corrupted run, whose proposals a hook reads."""
    graph = graph_of(every, points=2)
    (position, token), step = graph.record["target"], graph.record["target_step"]
    found = graph.faithfulness(every.model, canvas="free", n_random=2)
    corrupted, proposed = graph.runs["corrupted"], {}

    def read(logits: torch.Tensor, hook: Any) -> None:
        proposed[hook.step.index] = logits[0, position]

    corrupted.replay(every.model, fwd_hooks=[("denoise.hook_logits", read)])
    at = step if corrupted.uniform_noise else min(step, int(corrupted.revealed_at[0, position]))
    assert float(found.replaced) == pytest.approx(float(proposed[at][token]), abs=1e-3)
    if every.model.cfg.model_name == "mdlm":
        assert at < step  # where the corrupted run has written the position


def test_a_graph_says_how_its_nodes_were_chosen(either: Any) -> None:
    graph = graph_of(either, canvas="forced", points=4)
    pruned, refined = graph.prune(0.8), graph.refine(either.model, 5, candidates=1)
    assert repr(refined).endswith("steps, refined)")
    assert repr(pruned).endswith("steps)")
    for part in (pruned, refined):
        with pytest.raises(ValueError, match="is pruned"):
            _ = part.error
