"""Analyses of one fact take a Fact, a Query, or several, and a bare text is an error that shows how to write a Fact."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from diffusion_lens import Fact, Query
from diffusion_lens.analysis import (
    answer_probability,
    causal_trace,
    compute_key,
    edge_attribution,
    faithfulness,
    memit,
    node_attribution,
    optimize_value,
    patch_grid,
)
from diffusion_lens.analysis.rome import ValueSettings

TILDA = Fact("Tilda Drusser is the", "Tilda Drusser", " famous miner of Tanmoor.")
GUSTAV = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")


FACTS = [TILDA, GUSTAV]


@pytest.fixture
def queries(small):
    """The facts on the canvases of `causal_trace`."""
    made = []
    for fact in FACTS:
        laid_out = causal_trace(small, fact, noise=0.1, samples=1, layers=[0], positions=[0]).record["query"]
        spans = (tuple(laid_out[name]) for name in ("subject", "answer_positions", "answer_tokens"))
        made.append(Query(torch.tensor(laid_out["tokens"]), *spans))
    return made


def test_a_fact_is_its_query_on_the_canvas_of_causal_trace(small, queries):
    (tilda, gustav), metric = queries, answer_probability(small, queries[0])
    same = [
        (lambda one, _: compute_key(small, one, 1).vector, True),
        (lambda one, _: optimize_value(small, one, 1, steps=1).vector, True),
        (lambda one, _: memit(small, [one], [1], settings=ValueSettings(steps=1)).update(), True),
        (
            lambda one, other: patch_grid(small, one, other, metric, "resid_post", positions=[1], layers=[0]).scores,
            False,
        ),
        (lambda one, other: edge_attribution(small, one, other, metric, ig_steps=1).scores, False),
        (lambda one, other: node_attribution(small, one, other, metric, ig_steps=1).scores, False),
        (lambda one, _: answer_probability(small, one).rows, False),
    ]
    for compute, in_a_list in same:
        expected = compute(tilda, gustav)
        assert torch.equal(compute(TILDA, GUSTAV), expected)
        assert not in_a_list or torch.equal(compute([TILDA], [GUSTAV]), expected)


def test_several_facts_are_each_alone(small):
    keys = compute_key(small, FACTS, 1).keys
    torch.testing.assert_close(keys, torch.stack([compute_key(small, fact, 1).vector for fact in FACTS]))
    one_answer = [TILDA, replace(TILDA, prompt="today Tilda Drusser is the")]
    assert len(optimize_value(small, one_answer, 1, steps=1).record["prompts"]) == 2


@pytest.mark.parametrize("longer", [False, True])
def test_a_metric_of_several_facts_is_the_mean_over_them(small, longer):
    """The answers differ, and where the second pair is longer the first is padded."""
    before = "today " if longer and small.cfg.is_autoregressive else ""
    clean = [TILDA, replace(GUSTAV, prompt=f"{before}{GUSTAV.prompt}")]
    corrupted = [
        Fact("Gustav Geisser is the", "Gustav Geisser", TILDA.answer),
        Fact(f"{before}Tilda Drusser is the", "Tilda Drusser", GUSTAV.answer),
    ]
    metric = answer_probability(small, clean)
    pairs = list(zip(clean, corrupted, strict=True))
    patch = partial(patch_grid, small, sites="resid_post", positions=[0, 1, 3])
    alone = torch.stack([patch(*pair, answer_probability(small, pair[0])).scores for pair in pairs])
    torch.testing.assert_close(patch(clean, corrupted, metric).scores, alone.mean(0), rtol=1e-4, atol=1e-9)
    attribute = partial(edge_attribution, small, ig_steps=2)
    alone = torch.stack([attribute(*pair, answer_probability(small, pair[0])).scores for pair in pairs])
    together = attribute(clean, corrupted, metric)
    torch.testing.assert_close(together.scores, alone.mean(0), rtol=1e-3, atol=1e-9)
    assert faithfulness(small, clean, corrupted, metric, together, [1]).sizes == (1,)


def test_a_metric_of_several_facts_needs_one_row_each_and_no_steps(small):
    metric = answer_probability(small, FACTS)
    with pytest.raises(ValueError, match="1 rows are patched, and the metric has 2 answers"):
        patch_grid(small, TILDA, GUSTAV, metric, "resid_post")
    run = small.denoise(TILDA.prompt, steps=2, max_new_tokens=5)
    with pytest.raises(ValueError, match=r"with steps=, p\(answer\) is read of one fact, and the metric has 2"):
        patch_grid(small, run, run, metric, "resid_post", steps=[0])


def test_a_metric_of_another_fact_is_refused(small):
    same = [TILDA, GUSTAV], [TILDA, GUSTAV]
    for facts in (TILDA, [GUSTAV, TILDA]):
        for analysis in (partial(patch_grid, sites="resid_post"), partial(edge_attribution, ig_steps=1)):
            with pytest.raises(ValueError, match=r"row \d has neither the canvas nor the answer of the metric's"):
                analysis(small, *same, metric=answer_probability(small, facts))
    # Another answer on the same canvas may be asked for.
    fish = replace(TILDA, answer=GUSTAV.answer)
    patch_grid(small, TILDA, GUSTAV, answer_probability(small, fish), "resid_post", positions=[1], layers=[0])


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_bare_text_is_refused_with_the_fact_to_write(small):
    text, message = (
        "Tilda Drusser is the",
        r"='Tilda Drusser is the' is a str; it must be .* Fact\(prompt='Tilda Drusser is the', subject=",
    )
    doors = [
        partial(causal_trace, small, text),
        *(partial(compute_key, small, given, 1) for given in (text, [text], [TILDA, text])),
        *(partial(optimize_value, small, given, 1) for given in (text, [TILDA, text])),
        partial(memit, small, [text], [1]),
        partial(answer_probability, small, text),
        partial(patch_grid, small, [TILDA, text], FACTS, answer_probability(small, FACTS), "resid_post"),
        partial(edge_attribution, small, FACTS, [TILDA, text], answer_probability(small, FACTS)),
    ]
    for door in doors:
        with pytest.raises(TypeError, match=message):
            door()
    with pytest.raises(
        TypeError, match=r"queries\[0\]=3 is an int; it must be .* Fact\(prompt='The Eiffel Tower is in', subject="
    ):
        compute_key(small, [3], 1)
    with pytest.raises(ValueError, match="there is no query: give a Fact or a Query"):
        answer_probability(small, [])
