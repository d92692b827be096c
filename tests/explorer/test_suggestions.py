"""Suggestions for a prompt: where its subjects stand among the model's tokens, and what may follow."""

import pytest

from diffusion_lens import Fact, load_pair
from diffusion_lens.data import toy_facts
from diffusion_lens.explorer import Session
from diffusion_lens.explorer.suggestions import answers_of, capitalised

FACT = toy_facts.load().facts("p2d", "p2d")[0]


@pytest.fixture(scope="module")
def session():
    return Session(load_pair("tiny-mdm"), facts=[FACT], settings={"length": toy_facts.SENTENCE_LENGTH})


def test_subjects_are_placed_among_the_tokens(session):
    found = session.suggest(FACT.prompt)["subjects"]
    words = session.models[0].to_str_tokens(FACT.prompt)
    first, *others = found
    assert first["text"] == FACT.subject == " ".join(words[first["first"] : first["end"]])
    assert first["why"] == "a subject of the table"
    assert len({(one["first"], one["end"]) for one in found}) == len(found)
    assert all(one["why"] == "capitalised" for one in others)
    (found,) = Session(session.models).suggest(FACT.prompt)["subjects"]
    assert (found["text"], found["why"]) == (FACT.subject, "capitalised")


def test_answers_are_those_of_facts_and_of_the_models(session):
    answers = session.suggest(FACT.prompt)["answers"]
    assert answers[0]["text"] == FACT.answer
    assert answers[0]["why"].startswith("an answer of the table")
    for model in session.models:
        (mine,) = [one["text"] for one in answers if f"{model.cfg.name_and_mode} writes this" in one["why"]]
        run = model.denoise(FACT.prompt, length=toy_facts.SENTENCE_LENGTH, steps=8)
        assert run.completion[0].startswith(mine.strip())
        # The answer continues the prompt as tokens.
        Fact(FACT.prompt, "", mine).tokenize(model)
    assert len({one["text"] for one in answers}) == len(answers)


def test_capitalised_words_are_names():
    def found(prompt):
        return [prompt[start:stop] for start, stop in capitalised(prompt)]

    assert found("The Eiffel Tower is in") == ["Eiffel Tower"]
    assert found("Anne-Marie O'Neill met Åsa, Émile") == ["Anne-Marie O'Neill", "Åsa", "Émile"]
    assert found("nobody, 3 times") == []


def test_an_answer_has_the_space_that_the_prompt_leaves(session):
    assert answers_of("a ", [], [("m", " b")])[0]["text"] == "b"
    assert answers_of("a", [], [("m", "b"), ("n", " b ")]) == [{"text": " b", "why": "m writes this; n writes this"}]
    assert answers_of("a", [], [("m", " .")]) == []


@pytest.mark.usefixtures("annotations_unchecked")
def test_wrong_requests_are_refused(session):
    for given, error, message in (
        ((3,), TypeError, "prompt=3 is no text"),
        (("x" * 10**6,), ValueError, "at most 65,536"),
        ((FACT.prompt, 2), ValueError, "counted from 0"),
        ((FACT.prompt, -1), ValueError, "model=-1"),
    ):
        with pytest.raises(error, match=message):
            session.suggest(*given)
