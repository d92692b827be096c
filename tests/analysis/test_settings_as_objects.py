"""Settings may be given as objects or as keywords, and mean the same."""

from functools import partial

import pytest
import torch
from refusals import unrefused

from diffusion_lens.analysis import (
    Corruption,
    Restoration,
    Selection,
    causal_trace,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.data import toy_facts

FACT = toy_facts.load().facts(trained="p2d", asked="p2d")[0]
MLP = Restoration("mlp", window=2)
NOISE = Corruption("uniform", noise=0.5, samples=2, seed=3)
ANALYSES = [causal_trace, trace_trajectory, temporal_effect]


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
@pytest.mark.parametrize("analysis", ANALYSES, ids=lambda analysis: analysis.__name__)
def test_objects_and_keywords_give_the_same_result(tiny, analysis):
    query = FACT.to_query(tiny)
    where = dict(positions=[2, -3], layers=[1, -1])
    if analysis is not causal_trace:
        where |= dict(steps=[0], trajectory=tiny.denoise(query.tokens[None], steps=2))
    by_object = analysis(tiny, query, kind=MLP, corruption=NOISE, **where)
    by_keyword = analysis(
        tiny, query, kind="mlp", window=2, corruption="uniform", noise=0.5, samples=2, seed=3, **where
    )
    assert torch.equal(by_object.scores.nan_to_num(-1), by_keyword.scores.nan_to_num(-1))
    assert {**by_object.record, "seconds": 0} == {**by_keyword.record, "seconds": 0}


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_an_object_beside_its_own_keywords_is_refused(tiny):
    cases = [
        (dict(kind=MLP, window=3, corruption=NOISE), "kind= is a Restoration"),
        (dict(kind=MLP, corruption=NOISE, samples=3), "corruption= is a Corruption"),
        (dict(kind=MLP, corruption=NOISE, noise=0.1), "corruption= is a Corruption"),
    ]
    assert unrefused(partial(causal_trace, tiny, FACT), cases) == []


def test_a_selection_counts_from_the_end_and_is_checked_against_the_model():
    assert Selection.of([0, -1], torch.tensor([-2])).within(5, 4) == ([0, 4], [2])
    assert Selection().within(2, 3) == ([0, 1], [0, 1, 2])
    with pytest.raises(ValueError, match=r"layers=\[4\]"):
        Selection.of(layers=[4]).within(5, 4)
    with pytest.raises(ValueError, match="names one twice"):
        Selection.of(positions=[0, -5]).within(5, 4)
