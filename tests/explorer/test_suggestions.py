"""Suggestions for a prompt: where its subjects stand among the model's tokens, and what may follow."""

import re

import pytest

from diffusion_lens import Fact, load_pair
from diffusion_lens.data import toy_facts
from diffusion_lens.explorer import Session
from diffusion_lens.explorer.prompts import answers_of, capitalised, subjects_of

FACT = toy_facts.load().facts("p2d", "p2d")[0]


@pytest.fixture(scope="module")
def session():
    return Session(load_pair("tiny-mdm"), facts=[FACT], settings={"length": toy_facts.SENTENCE_LENGTH})


def test_subjects_are_placed_among_the_tokens(session):
    found = session.suggest(FACT.prompt)["subjects"]
    words = session.models[0].to_str_tokens(FACT.prompt)
    first, *others = found
    assert first["text"] == FACT.subject == " ".join(words[slice(*first["spans"]["0"])])
    assert first["why"] == "a subject of the table"
    assert len({str(one["spans"]) for one in found}) == len(found)
    assert all(one["why"] == "capitalised" for one in others)
    (found,) = Session(session.models).suggest(FACT.prompt)["subjects"]
    assert (found["text"], found["why"]) == (FACT.subject, "capitalised")


def test_each_model_places_a_subject_among_its_own_tokens(session, monkeypatch):
    words, letters = session.models
    by_word = [(word.start(), word.end()) for word in re.finditer(r"\S+", FACT.prompt)]
    spans = {id(words): by_word, id(letters): [(i, i + 1) for i in range(len(FACT.prompt))]}
    monkeypatch.setattr("diffusion_lens.explorer.prompts.token_spans", lambda model, prompt: spans[id(model)])
    found = subjects_of(session.models, FACT.prompt, [FACT])[0]
    start = FACT.prompt.index(FACT.subject)
    n_before, n_words = len(FACT.prompt[:start].split()), len(FACT.subject.split())
    assert found["spans"] == {"0": [n_before, n_before + n_words], "1": [start, start + len(FACT.subject)]}


def test_a_model_that_refuses_a_prompt_suggests_nothing_and_the_other_does(session):
    session = Session(session.models, facts=[FACT])
    model = session.models[0]
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: None)
    try:
        found = session.suggest(FACT.prompt)
    finally:
        model.reset_hooks()
    whys = " ".join(one["why"] for one in found["answers"])
    assert found["subjects"]
    assert f"{session.models[1].cfg.name_and_mode} wrote this" in whys
    assert f"{model.cfg.name_and_mode} wrote this" not in whys


def test_answers_are_what_the_runs_of_the_session_wrote(session):
    session = Session(session.models)
    settings = dict(length=toy_facts.SENTENCE_LENGTH, steps=2, temperature=3.0, seed=4)
    session.run({"prompt": FACT.prompt, **settings})
    mine = f"{session.models[0].cfg.name_and_mode} wrote this"
    run = session.models[0].denoise(FACT.prompt, **settings)
    words = run.str_canvases()[-1][int(run.given.sum()) :]
    (text,) = [one["text"] for one in session.suggest(FACT.prompt)["answers"] if mine in one["why"]]
    assert text.replace(" ", "") == "".join(words[: [*words, "<eos>"].index("<eos>")])


def test_a_prompt_that_is_longer_than_the_runs_of_the_table_has_suggestions(session):
    prompt = f"{FACT.prompt} {FACT.answer.strip()} {FACT.prompt}"
    session = Session(session.models, facts=[FACT], settings={"length": 8})
    assert any("wrote this" in one["why"] for one in session.suggest(prompt)["answers"])


def test_answers_are_those_of_facts_and_of_the_models(session):
    answers = session.suggest(FACT.prompt)["answers"]
    assert answers[0]["text"] == FACT.answer
    assert answers[0]["why"].startswith("an answer of the table")
    for model in session.models:
        (mine,) = [one["text"] for one in answers if f"{model.cfg.name_and_mode} wrote this" in one["why"]]
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
    assert answers_of("a", [], [("m", "b"), ("n", " b ")]) == [{"text": " b", "why": "m wrote this; n wrote this"}]
    assert answers_of("a", [], [("m", " .")]) == []


@pytest.mark.usefixtures("annotations_unchecked")
def test_wrong_requests_are_refused(session):
    for given, error, message in (
        ((3,), TypeError, "prompt=3 is no text"),
        (("x" * 10**6,), ValueError, "at most 65,536"),
    ):
        with pytest.raises(error, match=message):
            session.suggest(*given)


def test_what_two_models_wrote_names_both_however_often():
    written = [("a", " tin."), ("b", " tin."), ("b", " tin."), ("a", " ore.")]
    assert answers_of("x is", [], written) == [
        {"text": " tin.", "why": "a wrote this; b wrote this"},
        {"text": " ore.", "why": "a wrote this"},
    ]
