"""Every analysis refuses the same queries: answers that cannot be read from their canvas."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from refusals import unrefused

from diffusion_lens import Query
from diffusion_lens.analysis import (
    answer_probability,
    causal_trace,
    patch_grid,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.analysis.rome import Probe, RankOneEdit, compute_key, edit_success, optimize_value
from diffusion_lens.data import toy_facts

FACT, *_, OTHER = toy_facts.load().facts(trained="p2d", asked="p2d")


def edit_with_probe(model, query):
    edited = replace(FACT, answer=OTHER.answer).to_query(model)
    key, value = compute_key(model, edited, 0), optimize_value(model, edited, 0, steps=1)
    return edit_success(model, RankOneEdit(model, 0, key, value), {"efficacy": [Probe(edited, query)]})


ANALYSES = {
    "causal_trace": lambda model, query: causal_trace(model, query, noise=0.1),
    "trace_trajectory": lambda model, query: trace_trajectory(model, query, noise=0.1),
    "temporal_effect": lambda model, query: temporal_effect(model, query, noise=0.1),
    "patch_grid": lambda model, query: patch_grid(
        model, query, query, answer_probability(model, query), "resid_pre", layers=[0], positions=[0]
    ),
    "optimize_value": lambda model, query: optimize_value(model, query, 0, steps=1),
    "edit_success": edit_with_probe,
}


def shown(query):
    """The canvas with another token than the answer's at its first position."""
    tokens = query.tokens.clone()
    tokens[query.answer_positions[0]] = query.answer_tokens[0] + 1
    return replace(query, tokens=tokens)


BROKEN = {
    "another token at the position of the answer": (
        shown,
        {
            "mdm": r"the answer positions \[{position}\] are not masked",
            "ar": r"the answer positions \[{position}\] have other tokens",
        },
    ),
    "one position for two tokens": (
        lambda query: replace(query, answer_positions=(query.answer_positions[0],) * len(query.answer_positions)),
        r"names the answer positions \[{position}\] twice; give each once, with one token",
    ),
    "a token outside the vocabulary": (
        lambda query: replace(query, answer_tokens=(10**6, *query.answer_tokens[1:])),
        r"cannot write the answer tokens \[1000000\]",
    ),
    "no answer": (lambda query: replace(query, answer_tokens=(), answer_positions=()), "has no answer"),
}


@pytest.mark.parametrize("analysis", ANALYSES)
def test_a_query_that_cannot_be_answered_is_refused_everywhere(small, analysis):
    query, kind = FACT.to_query(small), small.cfg.model_name.removeprefix("small-")
    cases = []
    for spoil, message in BROKEN.values():
        message = message if isinstance(message, str) else message[kind]
        cases.append((dict(query=spoil(query)), message.replace("{position}", str(query.answer_positions[0]))))
    assert unrefused(partial(ANALYSES[analysis], small), cases) == []


def test_the_positions_of_an_answer_may_come_in_any_order(small):
    query = FACT.to_query(small)
    reverse = replace(query, answer_positions=query.answer_positions[::-1], answer_tokens=query.answer_tokens[::-1])
    forth, back = (causal_trace(small, order, noise=0.1, samples=1, layers=[0]) for order in (query, reverse))
    torch.testing.assert_close(back.scores, forth.scores, rtol=1e-4, atol=0)
    torch.testing.assert_close(back.token_scores.flip(2), forth.token_scores, rtol=1e-4, atol=0)


@pytest.mark.parametrize("small", ["ar"], indirect=True)
def test_a_causal_canvas_may_end_before_the_answer_or_continue_with_it(small):
    query = FACT.to_query(small)
    whole = Query(
        torch.cat([query.tokens, torch.tensor(query.answer_tokens[-1:])]),
        query.subject,
        query.answer_positions,
        query.answer_tokens,
    )
    alike = [causal_trace(small, canvas, noise=0.1, samples=1, layers=[0]).clean for canvas in (query, whole)]
    assert alike[0] == pytest.approx(alike[1], rel=1e-4, abs=0)
