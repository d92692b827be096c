"""The table of facts: each number is that of the library's own call, and a saved study fills in what it contains."""

import warnings

import pytest
import torch
from page_reader import PageFile, unpack

from diffusion_lens import Fact
from diffusion_lens.analysis import average_indirect_effect, causal_trace, trace_trajectory
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.explorer import Session, Spec, explore
from diffusion_lens.explorer.spec import PageRequest

LENGTH = toy_facts.SENTENCE_LENGTH
FACTS = toy_facts.load().facts()[: 12 * 67 : 67]
SETTINGS = dict(length=LENGTH, steps=4)
NOTHING = {**dict.fromkeys(("recalled", "p", "commitment", "effect", "run", "error")), "studied": []}
on_mdm = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


@pytest.fixture(scope="module")
def session(tiny):
    return Session([tiny], facts=FACTS, settings=SETTINGS)


def test_nothing_is_known_before_it_is_computed(session):
    entries = Session(session.models, facts=FACTS).manifest["facts"]
    assert [entry["id"] for entry in entries] == list(range(len(FACTS)))
    assert (entries[0]["prompt"], entries[0]["asked"]) == (FACTS[0].prompt, FACTS[0].asked)
    assert all(entry["values"] == {"0": NOTHING} for entry in entries)


@pytest.mark.filterwarnings("ignore:the canvas has 20 positions")
def test_recall_is_that_of_recall_by_steps(tiny):
    # Guidance and a canvas longer than any sentence of the training hurt the MDM: so some answers are wrong.
    settings = dict(length=20, cfg_scale=0.0 if tiny.cfg.is_autoregressive else 3.0)
    session = Session([tiny], facts=FACTS, settings={**settings, "steps": 1})
    recall = recall_by_steps(tiny, FACTS, steps=[1], **settings)
    known = {fact.id: bool(right) for fact, right in zip(recall.facts, recall.contained[:, 0], strict=True)}
    found = [session.fact({"id": index})["recalled"] for index in range(len(FACTS))]
    assert found == [known[fact.id] for fact in FACTS]
    assert set(found) == {True, False}


def test_probability_and_effect_are_those_of_a_trace(tiny, session):
    for index in (0, len(FACTS) - 1):
        fact = FACTS[index]
        n_masks = None if tiny.cfg.is_autoregressive else LENGTH - len(tiny.encode(fact.prompt))
        trace = causal_trace(tiny, fact.to_query(tiny, n_masks=n_masks))
        alone, whole = (session.fact({"id": index, "effect": effect}) for effect in (False, True))
        assert alone["p"] == pytest.approx(trace.clean, abs=1e-6)
        assert whole["p"] == pytest.approx(trace.clean, abs=1e-6)
        assert whole["effect"] == pytest.approx(trace.total_effect, abs=1e-5)
        assert session.manifest["facts"][index]["values"]["0"]["effect"] == whole["effect"]


def decided_at(run, answer):
    """The step from which on no position of the answer has another likeliest token than the written one."""
    decided = []
    for position in answer:
        kept = None
        for row, step in reversed(list(enumerate(run.recorded.steps))):
            if run.recorded.masked[row, 0, position]:
                if run.recorded.tokens[row, 0, position, 0] != run.tokens[0, position]:
                    break
                kept = step
        if kept is None:
            return None
        decided.append(kept)
    return max(decided)


@pytest.mark.filterwarnings("ignore:the canvas has 20 positions")
def test_a_fact_is_decided_when_all_of_its_answer_is(tiny):
    # At this temperature, on a canvas longer than those of the training, the model changes its mind.
    settings = dict(length=20, steps=8, temperature=1.0)
    session = Session([tiny], facts=FACTS, settings=settings)
    decided, of_the_last = [], []
    for fact in FACTS:
        run, start = tiny.denoise(fact.prompt, predictions=2, **settings), len(tiny.encode(fact.prompt))
        answer = range(start, len(tiny.encode(fact.prompt + fact.answer)))
        decided.append(decided_at(run, answer))
        of_the_last.append(decided_at(run, answer[-1:]))
    assert [session.fact({"id": index})["commitment"] for index in range(len(FACTS))] == decided
    assert decided != of_the_last


def test_what_a_study_lacks_is_measured(tiny):
    recall = recall_by_steps(tiny, FACTS[:2], steps=[1], length=LENGTH, cfg_scale=0.0)
    plain, studied = (Session([tiny], facts=FACTS[:2], settings=SETTINGS, results=each) for each in ([], [recall]))
    studied.table._values[0, 0]["recalled"] = not studied.table._values[0, 0]["recalled"]
    told, (own, known) = (
        studied.manifest["facts"][0]["values"]["0"],
        (session.fact({"id": 0, "effect": True}) for session in (plain, studied)),
    )
    assert known.pop("recalled") is told["recalled"] is not own.pop("recalled")
    assert (known.pop("studied"), own.pop("studied")) == (["recalled"], [])
    assert known == own
    assert None not in known.values() or known["error"] is None


def test_a_fact_is_measured_by_as_few_passes_as_possible(tiny, monkeypatch):
    session, rows = Session([tiny], facts=FACTS[:1], settings=SETTINGS), []
    session.run(session.table.spec(0, 0))
    forward = type(tiny).forward
    monkeypatch.setattr(
        type(tiny), "forward", lambda self, x, *a, **k: rows.append(len(x)) or forward(self, x, *a, **k)
    )
    for effect, passes in ((False, [1]), (False, []), (True, [10]), (True, []), (False, [])):
        rows.clear()
        session.fact({"id": 0, "effect": effect})
        assert rows == passes


@on_mdm
@pytest.mark.usefixtures("few_samples")
def test_a_page_contains_the_facts_that_are_asked_for(tiny):
    session = Session([tiny], facts=FACTS[:3], settings=SETTINGS)
    shown, *others = (session.fact({"id": index}) for index in range(3))
    session.run(shown["spec"])
    for facts, ids, runs in (((), [], []), ((2, 0), [0, 2], [others[1]["run"]])):
        text = session.page_to_send(PageRequest((shown["run"],), facts=facts))
        manifest = PageFile(text).manifest
        assert [entry["id"] for entry in manifest["facts"]] == ids
        assert [run["id"] for run in manifest["runs"]] == [shown["run"], *runs]
    with pytest.raises(KeyError, match="no fact 3"):
        session.page_to_send(PageRequest((shown["run"],), facts=(3,)))


@on_mdm
@pytest.mark.usefixtures("annotations_unchecked", "few_samples")
def test_a_page_that_is_too_large_says_what_to_do_in_the_browser(tiny, monkeypatch):
    session = Session([tiny], facts=FACTS[:2], settings=SETTINGS)
    run = session.run(session.fact({"id": 0})["spec"])["id"]
    with pytest.raises(ValueError, match=r"257 facts are measured or selected.* at most 256 .*select fewer rows"):
        PageRequest.of({"runs": [run], "facts": list(range(257))})
    monkeypatch.setattr("diffusion_lens.explorer.session.LARGEST_PAGE", 1000)
    for facts, said in (((0,), "select fewer rows of the table of facts, or close it"), ((), "show one run, not two")):
        with pytest.raises(ValueError, match=f"the page would have 0 MB.*: {said}"):
            session.page_to_send(PageRequest((run,), facts=facts))


def test_a_fact_opens_as_a_run(session):
    answer = session.fact({"id": 2})
    run = session.run(answer["spec"])
    assert run["id"] == answer["run"]
    assert run["verdict"]["right"] is answer["recalled"]
    assert run["verdict"]["answer"] == FACTS[2].answer


@pytest.mark.usefixtures("annotations_unchecked")
def test_wrong_requests_are_refused(tiny, session):
    for given, error, message in (
        ({"id": 999}, KeyError, "no fact 999"),
        ({"id": 0, "model": 1}, ValueError, "counted from 0"),
        ({"id": -1}, ValueError, "id=-1"),
        ({"id": "0"}, TypeError, "whole number"),
        ({"id": 0, "effect": "no"}, TypeError, "effect='no'"),
        ({"id": 0, "effekt": True}, ValueError, "the nearest is 'effect'"),
        ({}, ValueError, "needs the entry 'id'"),
        ([], TypeError, "JSON object"),
    ):
        with pytest.raises(error, match=message):
            session.fact(given)
    with pytest.raises(TypeError, match="which is no Fact"):
        Session([tiny], facts=["a text"])
    with pytest.raises(ValueError, match="at most 2,048"):
        Session([tiny], facts=FACTS[:1] * 3000)


@on_mdm
def test_a_study_fills_in_what_it_contains(tiny):
    recall = recall_by_steps(tiny, FACTS, steps=[4, 1], length=LENGTH, cfg_scale=0.0)
    average = average_indirect_effect(tiny, FACTS[:3], known="all", layers=[0], length=LENGTH, first_tokens=None)
    entries = Session([tiny], facts=FACTS, results=[recall, average]).manifest["facts"]
    for entry, fact in zip(entries, FACTS, strict=True):
        assert entry["values"]["0"]["recalled"] is bool(recall.contained[recall.ids.index(fact.id), 0])
    for entry, fact in zip(entries[:3], FACTS, strict=False):
        row = average.ids.index(fact.id)
        assert entry["values"]["0"]["effect"] == pytest.approx(float(average.clean[row] - average.corrupted[row]))
    assert entries[3]["values"]["0"]["effect"] is None
    assert [entry["values"]["0"]["studied"] for entry in entries[2:4]] == [["effect", "p", "recalled"], ["recalled"]]

    with pytest.raises(ValueError, match="without any of the 1 facts"):
        Session([tiny], facts=[Fact("a", "a", " b")], results=[recall])
    with pytest.raises(TypeError, match="contains dict"):
        Session([tiny], facts=FACTS, results=[{}])
    first = average_indirect_effect(tiny, FACTS[:3], known="all", layers=[0], length=LENGTH, first_tokens=1)
    with pytest.raises(ValueError, match="first 1 tokens"):
        Session([tiny], facts=FACTS, results=[first])


@on_mdm
def test_a_study_of_another_model_is_refused(tiny, in_words):
    other = in_words("llama")
    recall = recall_by_steps(other, FACTS[:2], steps=[1], length=LENGTH, cfg_scale=0.0)
    with pytest.raises(ValueError, match=f"a result of '{other.cfg.model_name}'"):
        Session([tiny], facts=FACTS, results=[recall])


@pytest.mark.parametrize("family", ["dream", "llama", "sdar", "bd3lm", "mdlm", "sedd", "udlm", "duo", "diffullama"])
def test_every_kind_of_model_has_values(in_words, family):
    model, fact = in_words(family), Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer")
    session = Session([model], facts=[fact], settings=dict(length=12, steps=6))
    values = session.fact({"id": 0})
    assert 0 <= values["p"] <= 1
    # Of the same canvas, read without the corrupted run.
    run = session._live(Spec.of(values["spec"])).trajectory
    query = session._live(Spec.of(values["spec"])).asked.query
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = trace_trajectory(model, query, steps=[0], trajectory=run, layers=[1], samples=2, noise=0.5)
    assert values["p"] == pytest.approx(float(trace.clean[0]), rel=1e-3, abs=1e-7)
    assert session.fact({"id": 0, "effect": True})["effect"] is not None
    assert model.list_hooks() == {}
    assert not torch.is_inference_mode_enabled()


@on_mdm
@pytest.mark.usefixtures("few_samples")
def test_a_file_contains_the_run_of_every_fact(tiny, tmp_path):
    strange = Fact("Xylo is the", "Xylo", " drummer of Rolsen.")
    path = explore(tiny, [*FACTS[:2], strange], tmp_path / "facts.html", state={"step": 2}, **SETTINGS)
    page = PageFile(path.read_text(encoding="utf-8"))
    assert page.manifest["state"] == {"step": 2}
    shown, *others = page.manifest["runs"]
    assert shown["prompt"] == FACTS[0].prompt
    assert [run["fact"] for run in others] == [1]
    assert (others[0]["lens"], others[0]["traces"]) == (None, [])
    values = [entry["values"]["0"] for entry in page.manifest["facts"]]
    assert [value["run"] for value in values] == [shown["id"], others[0]["id"], None]
    assert "does not know" in values[2]["error"]
    assert {name for run, name in page.chunks if run == others[0]["id"]} == {"predictions"}
    assert len(unpack(page.chunks[others[0]["id"], "predictions"])[1]["step"])

    path.unlink()
    with pytest.raises(ValueError, match=r"facts takes .*give fewer of them"):
        explore(tiny, FACTS[:4], path, max_bytes=100_000, **SETTINGS)
    with pytest.raises(ValueError, match="the list is empty"):
        explore(tiny, [], path)
