"""ROME's and BAKE's files, a few records in their form."""

import json

import pytest
import torch
from huggingface_hub import constants

from diffusion_lens.analysis.rome import RankOneEdit, compute_key, edit_success, optimize_value
from diffusion_lens.data import bake, counterfact, known_1000
from diffusion_lens.data.rome_facts import ROME_HOST


@pytest.fixture
def save(tmp_path):
    def write(records):
        path = tmp_path / "facts.json"
        path.write_text(json.dumps(records), encoding="utf-8")
        return path

    return write


KNOWN = [
    {
        "known_id": 7,
        "subject": "Mount Oslen",
        "attribute": "Antarctica",
        "template": "{} is located in the continent",
        "prediction": " of Antarctica. It is",
        "prompt": "Mount Oslen is located in the continent of",
        "relation_id": "P30",
    },
    {
        "known_id": 16,
        "subject": "Iron",
        "attribute": "Avengers",
        "template": "The Ironmen know {} as one of",
        "prediction": " the Avengers",
        "prompt": "The Ironmen know Iron as one of the ",
        "relation_id": "P463",
    },
]


def test_known_facts(save):
    first, second = known_1000(save(KNOWN))
    assert (first.prompt, first.subject, first.answer) == (KNOWN[0]["prompt"], "Mount Oslen", " Antarctica")
    assert first.template == "<subject> is located in the continent of"
    assert (first.id, first.subject_start) == ("known-7", None)
    assert second.prompt == "The Ironmen know Iron as one of the"
    assert second.subject_span == (17, 21)
    assert second.template == "The Ironmen know <subject> as one of the"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subject": "Ben Nevis"}, r"record 1: the subject 'Ben Nevis' is not in the prompt"),
        ({"attribute": 3}, r"record 1: attribute is 3, not text"),
        ({"prompt": " "}, r"record 1: prompt is ' ', not text"),
    ],
)
def test_a_wrong_record_is_named(save, change, message):
    with pytest.raises(ValueError, match=message):
        known_1000(save([KNOWN[0], {**KNOWN[1], **change}]))


def test_a_record_without_a_field_is_named(save):
    short = {key: value for key, value in KNOWN[1].items() if key != "attribute"}
    with pytest.raises(ValueError, match=r"facts\.json, record 1 has no attribute; it has known_id, subject"):
        known_1000(save([KNOWN[0], short]))


def test_a_file_that_is_none_of_these(save, tmp_path):
    with pytest.raises(ValueError, match=r"facts\.json is not a list of records"):
        known_1000(save({"facts": KNOWN}))
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere\.json"):
        counterfact(tmp_path / "nowhere.json")
    (tmp_path / "cut.json").write_text('[{"case_id"', encoding="utf-8")
    with pytest.raises(ValueError, match=r"cut\.json is not valid JSON"):
        bake(tmp_path / "cut.json")


# The words of the embedded pair, so that its tokenizer knows them.
REQUEST = {
    "case_id": 5,
    "requested_rewrite": {
        "prompt": "today {} was the",
        "relation_id": "P1",
        "target_new": {"str": "brave pilot", "id": "Q1"},
        "target_true": {"str": "clever gardener of Kinmoor", "id": "Q2"},
        "subject": "Yara Plasser",
    },
    "paraphrase_prompts": ["Yara Plasser was. people say Yara Plasser became the", "we know the honest judge is "],
    "neighborhood_prompts": ["surely Mara Plasser is the", "Nora is the", "Ada is the"],
    "attribute_prompts": [],
    "generation_prompts": ["Yara Plasser is"],
}
REVERSE = {"prompt": "the brave pilot is", "target_new": {"str": "Yara Plasser"}, "target_true": {"str": "Mara"}}


def test_requests(save):
    (request,) = counterfact(save([REQUEST]))
    assert request.id == "counterfact-5"
    assert request.true.prompt == request.new.prompt == "today Yara Plasser was the"
    assert (request.true.answer, request.new.answer) == (" clever gardener of Kinmoor", " brave pilot")
    assert request.new.subject_span == (6, 18)
    assert request.new.template == "today <subject> was the"
    first, second = request.paraphrases
    assert first.answer == second.answer == " brave pilot"
    assert first.prompt[: first.subject_span[0]] == "Yara Plasser was. people say "
    assert second.subject == second.prompt == "we know the honest judge is"
    assert [fact.prompt for fact in request.neighbours] == REQUEST["neighborhood_prompts"]
    assert {fact.answer for fact in request.neighbours} == {" clever gardener of Kinmoor"}
    assert request.reverse is request.reverse_true is None
    facts = [request.true, request.new, *request.paraphrases, *request.neighbours]
    assert len({fact.id for fact in facts}) == len(facts)


def test_reverse_questions(save):
    no_truth = {key: value for key, value in REVERSE.items() if key != "target_true"}
    requests = bake(save([{**REQUEST, "reverse_qa": REVERSE}, {**REQUEST, "reverse_qa": no_truth}, REQUEST]))
    assert [request.id for request in requests] == ["bake-5"] * 3
    reverse = requests[0].reverse
    assert (reverse.prompt, reverse.subject, reverse.answer) == ("the brave pilot is", "brave pilot", " Yara Plasser")
    assert requests[0].reverse_true.answer == " Mara"
    assert requests[0].reverse_true.prompt == reverse.prompt
    assert requests[1].reverse == reverse
    assert requests[1].reverse_true is requests[2].reverse is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requested_rewrite": {**REQUEST["requested_rewrite"], "prompt": "today"}}, r"'today' has no slot \{\} for"),
        (
            {"requested_rewrite": {"prompt": "{} is", "subject": "Ada"}},
            "record 0 has no requested_rewrite.target_true.str",
        ),
        ({"neighborhood_prompts": "Ada is"}, "neighborhood_prompts is 'Ada is', not a list of texts"),
        ({"reverse_qa": {"prompt": "the pilot is"}}, "record 0 has no reverse_qa.target_new.str"),
    ],
)
def test_a_wrong_request_is_named(save, change, message):
    with pytest.raises(ValueError, match=message):
        bake(save([{**REQUEST, **change}]))


def test_probes_ask_the_new_object_against_the_true_one(save, tiny):
    request = bake(save([{**REQUEST, "reverse_qa": REVERSE}]))[0]
    probes = request.probes(tiny)
    assert {group: len(of_group) for group, of_group in probes.items()} == {
        "efficacy": 1,
        "paraphrase": 2,
        "neighbourhood": 3,
        "reverse": 1,
    }

    def answered(query):
        return tiny.to_string(torch.tensor(query.answer_tokens))

    assert {answered(p.query) for p in probes["efficacy"] + probes["paraphrase"]} == {"brave pilot"}
    assert {answered(p.rival) for p in probes["efficacy"] + probes["paraphrase"]} == {"clever gardener of Kinmoor"}
    assert {answered(p.query) for p in probes["neighbourhood"]} == {"clever gardener of Kinmoor"}
    assert {answered(p.rival) for p in probes["neighbourhood"]} == {"brave pilot"}
    assert (answered(probes["reverse"][0].query), answered(probes["reverse"][0].rival)) == ("Yara Plasser", "Mara")
    prompt = tiny.to_tokens(request.new.prompt)[0]
    assert torch.equal(probes["efficacy"][0].query.tokens[: len(prompt)], prompt)


def test_an_edit_is_judged_by_a_request(save, tiny):
    request = counterfact(save([REQUEST]))[0]
    query = request.new.to_query(tiny)
    value = optimize_value(tiny, query, 1, kl_factor=0.0, steps=2)
    edit = RankOneEdit(tiny, 1, compute_key(tiny, query, 1), value)
    table = edit_success(tiny, edit, request.probes(tiny)).table()
    assert {group: score.count for group, score in table.items()} == {
        "efficacy": 1,
        "paraphrase": 2,
        "neighbourhood": 3,
    }


@pytest.mark.parametrize(
    ("load", "source"),
    [
        (known_1000, f"{ROME_HOST}/known_1000.json"),
        (counterfact, f"{ROME_HOST}/counterfact.json"),
        (bake, "huggingface.co/datasets/jym7/BAKE/resolve/main/BAKE_qa.json"),
    ],
)
def test_offline_one_error_says_where_the_file_is(load, source, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"HF_HUB_OFFLINE is set.*{source}.*pass its path: {load.__name__}\('"):
        load()


def test_the_file_is_taken_from_the_cache(save, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path))
    cached = tmp_path / "diffusion_lens" / "rome.baulab.info" / "data--dsets" / "known_1000.json"
    cached.parent.mkdir(parents=True)
    save(KNOWN).rename(cached)
    assert [fact.id for fact in known_1000()] == ["known-7", "known-16"]
