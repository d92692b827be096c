"""What a graph takes for a decision between steps, and which runs it compares."""

from functools import partial
from typing import Any

import pytest
from graphs_of_runs import last_position, prompts, require_laws, run_of

from diffusion_lens.analysis import run_graph
from diffusion_lens.denoising.samplers import Confidence, Proposal, ReMDM, llada

pytestmark = pytest.mark.parametrize("either", ["mdm"], indirect=True)


@pytest.mark.parametrize("setting", [{"cfg_scale": 2.0}, {"temperature": 1.0}, {"sampler": "blocks"}])
def test_a_corrupted_run_of_other_settings_is_refused(either: Any, setting: Any) -> None:
    clean, same = (run_of(either.model, prompt, seed=i) for i, prompt in enumerate(prompts(either)))
    other = run_of(either.model, prompts(either)[1], **setting)
    ((name, value),) = setting.items()
    graph = run_graph(either.model, clean, last_position(clean), same, points=2, nodes_per_step=2)
    for refused in (
        partial(run_graph, either.model, clean, last_position(clean)),
        partial(graph.faithfulness, either.model),
    ):
        with pytest.raises(ValueError, match=f"{name}=.*{value}.*the same {name}"):
            refused(other)


def test_what_is_masked_again_is_no_decision(either: Any) -> None:
    """Between a decision and each step that reads its word, both runs leave the position as it was written."""
    n_passed = n_left = 0
    for seed in range(4):
        clean, corrupted = (
            run_of(either.model, prompt, steps=10, sampler=ReMDM("rescale", eta=0.9), seed=seed + 10 * i)
            for i, prompt in enumerate(prompts(either))
        )
        graph = run_graph(either.model, clean, last_position(clean), corrupted, points=32, nodes_per_step=30)
        require_laws(graph)
        nodes = graph.nodes
        for edge in graph.edges[graph.edges.kind == "decision"].itertuples():
            source, (read, position) = nodes.loc[edge.source], (edge.target_step, edge.target_position)
            histories = [
                "".join("_" if masked else "w" for masked in run.is_masked(run.canvases[: read + 1, 0, position]))
                for run in graph.runs.values()
            ]
            together = max(step for step in range(read) if histories[0][step] == histories[1][step] == "_")
            again = any("w_" in history[together:] for history in histories)
            if source.kind == "decision":
                assert (source.step, again) == (together, False)
                n_passed += 1
            n_left += source.kind == "error" and again
    assert n_passed
    assert n_left


@pytest.mark.parametrize(
    ("loop", "is_ranked"),
    [
        ({}, True),
        ({"temperature": 1.0}, False),
        ({"sampler": "ancestral"}, False),
        ({"sampler": llada(remasking="random")}, False),
        ({"sampler": Confidence(choice_temperature=1.0)}, False),
        ({"sampler": Confidence(proposal=Proposal(score="entropy"))}, False),
        ({"sampler": llada()}, True),
    ],
)
def test_only_an_order_by_probability_is_a_decision(either: Any, loop: Any, is_ranked: bool) -> None:
    by_order = 0
    for seed in range(4):
        clean, corrupted = (
            run_of(either.model, prompt, seed=seed + i, **loop) for i, prompt in enumerate(prompts(either))
        )
        graph = run_graph(either.model, clean, last_position(clean), corrupted, points=4, nodes_per_step=4)
        by_order += int(((graph.nodes.kind == "decision") & (graph.nodes.other < 0)).sum())
    assert (by_order > 0) == is_ranked
