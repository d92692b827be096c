"""Lines of poems in LLaDA's format, and WikiReversal of GenWiki's: small files of our own in their form."""

import json

import pytest

from diffusion_lens.data import WikiReversal, poem_pairs, pretrained_reversals
from diffusion_lens.data.fact_files import open_source
from diffusion_lens.training.finetune import Completion, entity_spans, read_completions

POEMS = [
    {"first": "山高月小", "second": "水落石出", "source": "苏轼•后赤壁赋"},
    {"first": "春眠不觉晓", "second": "处处闻啼鸟"},
]
ADA = "<ENT_0> ( 1815 , <ENT_1> ) was married to <ENT_2> ."
WIKI = [
    {
        "text": ADA,
        "entities": ["Ada Marsh", "Tanmoor", "Hugo Skolden"],
        "graph": [
            ["Ada Marsh", "birthPlace", "Tanmoor"],
            ["Ada Marsh", "spouse", "Hugo Skolden"],
            ["Hugo Skolden", "spouse", "Ada Marsh"],  # backward
            ["Ada Marsh", "birthPlace", "Oslen"],  # not in the text, so it does not make Tanmoor ambiguous
        ],
        "id_short": "[1]",
    },
    {"text": "<ENT_0> is in <ENT_1> .", "entities": ["Oslen", "Trale"], "graph": [["Oslen", "region", "Trale"]]},
    {"text": "<ENT_0> is near <ENT_1> .", "entities": ["Rurholm", "Trale"], "graph": [["Rurholm", "region", "Trale"]]},
    {"text": "In <ENT_0> lies <ENT_1> .", "entities": ["Trale", "Oslen"], "graph": [["Oslen", "city", "Trale"]]},
    {"text": "<ENT_0> has <ENT_1> .", "entities": ["Oslen", "a harbour"], "graph": [["Oslen", "owner", "a harbour"]]},
]


@pytest.fixture
def save(tmp_path):
    def write(content, name="data.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        return path

    return write


def test_a_pair_of_lines_is_two_questions(save):
    path = save(POEMS)
    following, before, *others = poem_pairs(path)
    assert (following.prompt, following.answer) == ("山高月小的下一句是什么？ 直接输出句子即可。", "水落石出")
    assert (before.prompt, before.answer) == ("水落石出的上一句是什么？ 直接输出句子即可。", "山高月小")
    assert (following.id, before.id, others[1].id) == ("poem-0000-p2d", "poem-0000-d2p", "poem-0001-d2p")
    assert (following.is_reverse, before.is_reverse) == (False, True)
    for fact in (following, before, *others):
        assert fact.template.replace("<subject>", fact.subject) == fact.prompt
        assert fact.prompt[slice(*fact.subject_span)] == fact.subject
    source = open_source(str(path))
    assert list(source.facts) == poem_pairs(path)
    assert source.fact_pairs() == [(following, before), tuple(others)]


def test_the_authors_file_is_fetched_at_its_commit(monkeypatch, save):
    fetched = []
    file = save(POEMS)
    monkeypatch.setattr(pretrained_reversals, "fetch_from_web", lambda url, **more: fetched.append((url, more)) or file)
    assert open_source("poems").facts == poem_pairs(file)
    [(url, more)] = fetched
    assert url.startswith("https://raw.githubusercontent.com/ML-GSAI/LLaDA/b7e6c356")
    assert len(more["sha256"]) == 64


def test_triples_become_questions_by_both_entities(save):
    path = save(WIKI)
    data = WikiReversal.load(path)
    assert [(fact.prompt, fact.answer) for fact in data.facts] == [
        ("Where was Ada Marsh born?", " Tanmoor"),
        ("Who was born in Tanmoor?", " Ada Marsh"),
        ("Who is Ada Marsh's spouse?", " Hugo Skolden"),
        ("Who is married to Hugo Skolden?", " Ada Marsh"),
    ]
    assert [fact.id for fact in data.facts][::3] == ["wikireversal-00000-p2d", "wikireversal-00001-d2p"]
    assert [fact.is_reverse for fact in data.facts] == [False, True] * 2
    assert data.relations == ("birthPlace", "spouse")
    # Two places are in the region of Trale, so that its question has no one answer; "owner" has no question.
    assert data.without_questions == {"owner": 1}
    for fact in data.facts:
        assert fact.prompt[slice(*fact.subject_span)] == fact.subject
    source = open_source(str(path))
    assert tuple(source.facts) == data.facts
    assert len(source.fact_pairs()) == 2
    more = WikiReversal.load(path, {"owner": ("What does {} own?", "Who owns {}?")})
    assert [fact.prompt for fact in more.facts] == ["What does Oslen own?", "Who owns a harbour?"]


def test_passages_are_rows_to_train_on(save):
    data = WikiReversal.load(save(WIKI))
    [row] = data.rows()
    assert row["completion"] == "Ada Marsh (1815, Tanmoor) was married to Hugo Skolden."
    [text] = read_completions([row])
    assert isinstance(text, Completion)
    named = [row["completion"][start:stop] for start, stop in entity_spans(text)]
    assert named == ["Ada Marsh", "Tanmoor", "Hugo Skolden"]
    assert data.passages[0] == data.passages[1]


def test_what_one_part_leaves_open_the_whole_may_not(save):
    save(WIKI, "parts/part_1.json")
    other = {"text": "<ENT_0> , of <ENT_1>", "entities": ["Ada Marsh", "Oslen"]}
    path = save([{**other, "graph": [["Ada Marsh", "birthPlace", "Oslen"]]}, WIKI[0]], "parts/part_2.json").parent
    for data in (WikiReversal.load(path), open_source(str(path))):
        assert [fact.answer for fact in data.facts] == [" Hugo Skolden", " Ada Marsh"]


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (poem_pairs, [POEMS[0], {"first": "a"}], r"record 1, has first; it should have first, second"),
        (poem_pairs, [{"first": "a", "second": " "}], r"record 0, first is 'a' and second ' '; each should be a line"),
        (poem_pairs, {}, "is not a list of records with the fields first, second"),
        (
            WikiReversal.load,
            [{"text": "", "graph": []}],
            "record 0, has text, graph; it should have text, entities, gr",
        ),
        (WikiReversal.load, [{**WIKI[0], "entities": ["Ada"]}], "record 0, is not one of GenWiki: text is '<ENT_0>"),
        (WikiReversal.load, [{**WIKI[0], "graph": [["a", "b"]]}], "record 0, is not one of GenWiki"),
        (WikiReversal.load, WIKI[4:], r"its relations are owner \(1\), and there are questions of birthPlace, spouse"),
        (WikiReversal.load, WIKI[1:3], r"its relations are all ambiguous"),
    ],
)
def test_files_of_another_form_are_named(read, content, message, save):
    with pytest.raises(ValueError, match=rf"data\.json.*{message}"):
        read(save(content))


def test_what_cannot_be_read(save, tmp_path):
    for read in (poem_pairs, WikiReversal.load):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            read(tmp_path / "nowhere.json")
        (tmp_path / "broken.json").write_text("[{")
        with pytest.raises(ValueError, match=r"broken\.json is not valid JSON"):
            read(tmp_path / "broken.json")
    with pytest.raises(ValueError, match=r"'Who\?' has no {} in the place of its entity"):
        WikiReversal.load(save(WIKI), {"spouse": ("Who?", "{}?")})
    for pair in (("{}?",), ("{}?", "{}?", "{}?")):
        with pytest.raises(ValueError, match=r"a relation has two questions, by its first .* got \('{}\?',"):
            WikiReversal.load(save(WIKI), {"spouse": pair})
    with pytest.raises(ValueError, match="the fact has no prompt"):
        open_source(str(save([{"first": "a"}])))
