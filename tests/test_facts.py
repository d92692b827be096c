"""Facts on a model's canvas: where the subject and the answer are."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens import Fact, Query
from diffusion_lens.data.toy_facts import load

FACT = Fact("people say Gustav Geisser was the", "Gustav Geisser", " brave drummer of Rolsen.")


def test_positions_of_subject_and_answer(tiny):
    query = FACT.to_query(tiny)
    masked = tiny.cfg.model_name == "tiny-mdm"
    assert tiny.to_str_tokens(query.tokens[slice(*query.subject)]) == ["Gustav", "Geisser"]
    assert [tiny.to_single_str_token(token) for token in query.answer_tokens] == [
        "brave",
        "drummer",
        "of",
        "Rolsen",
        ".",
    ]
    assert query.answer_positions == (6, 7, 8, 9, 10)
    after = query.tokens[6:].tolist()
    assert after == ([tiny.cfg.mask_token_id] * 5 if masked else list(query.answer_tokens[:-1]))


def test_one_token_of_the_answer(tiny):
    query = FACT.to_query(tiny, first_tokens=1)
    assert query.answer_positions == (6,)
    assert len(query.answer_tokens) == 1


def test_which_mention_is_meant(tiny):
    twice = Fact("Gustav Geisser is Gustav Geisser", "Gustav Geisser", " the brave pilot.")
    with pytest.raises(ValueError, match=r"2 times.*occurrence=0 to 1"):
        twice.to_query(tiny)
    assert twice.to_query(tiny, occurrence=0).subject == (0, 2)
    assert twice.to_query(tiny, occurrence=1).subject == (3, 5)
    with pytest.raises(ValueError, match="occurrence=2"):
        twice.to_query(tiny, occurrence=2)


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        (Fact("Ada is", "Gustav", " here."), "'Gustav' is not in the prompt 'Ada is'"),
        (Fact("Ada is", " ", " here."), "empty subject"),
        (Fact("Ada is", "Ada", ""), "has no answer"),
        (Fact("Ada is the pi", "Ada", "lot."), "merges the answer"),
        (
            Fact("Gustav Geisser is", "Gustav", "the brave"),
            "reads 'isthe'.*begin the answer with a space, ' the brave'",
        ),
        (Fact("Gustav Geisser is", "Gustav", "Zaphod"), "reads 'isZaphod'.*a space, ' Zaphod'"),
        (Fact("Gustav Geisser is", "Gustav", " Zaphod"), "does not know 'Zaphod'"),
    ],
)
def test_facts_that_cannot_be_queried(tiny, fact, message):
    with pytest.raises(ValueError, match=message):
        fact.to_query(tiny)


def test_too_few_positions(tiny):
    with pytest.raises(ValueError, match="n_masks=2"):
        FACT.to_query(tiny, n_masks=2)
    with pytest.raises(ValueError, match="first_tokens=9"):
        FACT.to_query(tiny, first_tokens=9)


@pytest.mark.parametrize(
    ("subject", "positions", "answers", "message"),
    [
        ((2, 2), (4,), (1,), "subject .* empty or outside"),
        ((3, 9), (4,), (1,), "subject .* empty or outside"),
        ((0, 1), (4, 5), (1,), "2 answer positions for 1 answer tokens"),
        ((0, 1), (-1,), (1,), r"answer positions \[-1\] are negative"),
    ],
)
def test_queries_that_make_no_sense(subject, positions, answers, message):
    with pytest.raises(ValueError, match=message):
        Query(torch.arange(5), subject, positions, answers)


@pytest.mark.parametrize(
    ("trained", "asked", "reverse"), [("p2d", "d2p", True), ("p2d", "p2d", False), ("both", "d2p", False)]
)
def test_which_question_is_the_reverse(trained, asked, reverse):
    assert Fact("a", "a", " b", trained=trained, asked=asked).is_reverse is reverse


def test_the_subject_begins_where_the_fact_says():
    fact = Fact("Ada met Ada in", "Ada", " Oslen", subject_start=8)
    assert fact.subject_span == (8, 11)
    assert replace(fact, prompt="Ada sat in", subject_start=None).subject_span == (0, 3)
    with pytest.raises(ValueError, match=r"subject_start=4, but 'Ada' begins at \[0, 8\]"):
        _ = replace(fact, subject_start=4).subject_span


@pytest.mark.parametrize("direction", ["p2d", "d2p"])
def test_a_toy_facts_template_is_its_prompt_around_the_subject(direction):
    for fact in load().facts("both", direction)[:20]:
        assert fact.template.replace("<subject>", fact.subject) == fact.prompt
        assert {fact.subject, fact.answer.strip(" .")} == {fact.person, fact.description}
