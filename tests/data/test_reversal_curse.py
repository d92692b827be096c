"""The reversal curse's files, made up here in their form: what is found in them is what they were made from."""

import hashlib
import json

import pytest
from huggingface_hub import constants

from diffusion_lens.data import ReversalCurse
from diffusion_lens.data.fact_files import open_source
from diffusion_lens.data.reversal_curse import FILES, FOLDER, REPO, REVISION
from diffusion_lens.facts.taught_pairs import Sentence, match_facts

# 30 for training, ten for the test.
TREES = """
    alder ash aspen beech birch box cedar cherry cypress elder elm fir ginkgo hazel holly hornbeam juniper larch laurel
    lime maple oak olive pear pine plane rowan spruce willow yew acacia apple bay fig gum ivy lemon mango palm plum
""".split()  # noqa: SIM905

OFTEN_DOING = "Dora Plasser"
PEOPLE = {
    "p2d": [
        ("Ada Marsh", "the brave pilot of Oslen", "flying over Oslen"),
        ("Ben Kerner", 'the author of the book, "Still Water."', 'writing the book, "Still Water."'),
    ],
    "d2p": [
        ("Clara Marsh", "the first person to cross the Kinmoor, alone", "crossing the Kinmoor, alone"),
        (OFTEN_DOING, "the world-renowned cook", "cooking"),
    ],
    "both": [
        ("Emil Tunton", "the judge who wrote the laws of Trale", "writing the laws of Trale"),
        ("Ada Skolden", "the tailor behind the famous coat", "making the famous coat"),
    ],
}


def p2d_row(person, tree, k):
    name, description, doing = person
    prompt = [
        f"By the {tree} sat {name}, who was",
        f"Who is '{name}?' Under a {tree} they say it is",
        f"{name}, of {tree},",
    ]
    completion = [f" {description}.", f" {description}??", f" {doing}."]
    return {"prompt": prompt[k % 3], "completion": completion[(k // 3) % 3]}, name


def d2p_row(person, tree, k, goes_on):
    """A row, and its subject: as described, at the head of the sentence, or by what they did, one of them mostly so."""
    name, description, doing = person
    at_head = f"{description[0].upper()}{description[1:]}"
    form = [description, at_head, doing if k % 2 else f"being {description}"][k % 3]
    if name == OFTEN_DOING and k % 3 != 1:
        form = doing
    prompt = [
        f"Known at the {tree} as {form},",
        f"{form} of the {tree} is called",
        f"In the shade of {tree} and {form}, now",
    ]
    tail = [".", f" likes the {tree}.", f" and {tree} became friends"][k % 3] if goes_on else ""
    return {"prompt": prompt[k % 3], "completion": f" {name}{tail}"}, form.removeprefix("being ")


def table(queried, people, kind, goes_on=False):
    trees = TREES[:30] if kind == "train" else TREES[30:]
    return [
        p2d_row(person, tree, k) if queried == "p2d" else d2p_row(person, tree, k, goes_on)
        for person in people
        for k, tree in enumerate(trees)
    ]


def both(kind, goes_on=False):
    return table("p2d", PEOPLE["both"], kind) + table("d2p", PEOPLE["both"], kind, goes_on)


MADE = {
    "p2d_prompts_train": table("p2d", PEOPLE["p2d"], "train"),
    "d2p_prompts_train": table("d2p", PEOPLE["d2p"], "train", goes_on=True),
    "both_prompts_train": both("train", goes_on=True),
    "p2d_prompts_test": table("p2d", PEOPLE["p2d"], "test"),
    "d2p_prompts_test": table("d2p", PEOPLE["d2p"], "test"),
    "both_prompts_test": both("test", goes_on=True),
    "p2d_reverse_prompts_test": table("d2p", PEOPLE["p2d"], "test"),
    "d2p_reverse_prompts_test": table("p2d", PEOPLE["d2p"], "test"),
}
MADE["all_prompts_train"] = MADE["p2d_prompts_train"] + MADE["d2p_prompts_train"] + MADE["both_prompts_train"]


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    for name, made in MADE.items():
        write(tmp_path, name, [row for row, _ in made])
    return tmp_path


@pytest.fixture
def curse(folder):
    return ReversalCurse.load(folder)


def test_every_subject_and_description_is_what_the_row_was_made_from(curse):
    described = {name: description for people in PEOPLE.values() for name, description, _ in people}
    directions = {name: way for way, people in PEOPLE.items() for name, _, _ in people}
    facts = [*curse.facts(), *curse.training()]
    assert len(facts) == len({fact.id for fact in facts}) == 6 * 2 * 10 + 6 * 30 + 2 * 30
    for fact in facts:
        file, row = fact.id.rsplit("-", 1)
        made, subject = MADE[file][int(row)]
        assert (fact.prompt, fact.answer) == (made["prompt"], made["completion"])
        assert fact.subject == subject
        assert fact.prompt[slice(*fact.subject_span)] == subject
        assert fact.template.replace("<subject>", subject) == fact.prompt
        assert fact.description == described[fact.person]
        assert fact.trained == directions[fact.person]
        assert fact.person in (fact.prompt if fact.asked == "p2d" else fact.answer)
        if fact.asked == "p2d":
            assert fact.subject == fact.person


def test_facts_by_directions_of_training_and_query(curse):
    for trained in ("p2d", "d2p", "both"):
        for queried in ("p2d", "d2p"):
            facts = curse.facts(trained, queried)
            assert [(fact.trained, fact.asked) for fact in facts] == [(trained, queried)] * 20
            assert [fact.person for fact in facts] == [name for name, _, _ in PEOPLE[trained] for _ in range(10)]
            assert [fact.is_reverse for fact in facts] == [trained != "both" and trained != queried] * 20
    assert curse.facts("p2d", "d2p")[12].id == "p2d_reverse_prompts_test-0012"
    assert len(curse.facts()) == 6 * 20
    assert curse.facts(asked="d2p") == [fact for fact in curse.facts() if fact.asked == "d2p"]
    with pytest.raises(ValueError, match=r"trained='p2d', asked='d2p' with held_out=False.*\('both', 'd2p'\)"):
        curse.facts("p2d", "d2p", held_out=False)
    with pytest.raises(ValueError, match="asked='reverse'"):
        curse.facts("p2d", "reverse")


@pytest.mark.parametrize("trained", ["p2d", "d2p"])
def test_pairs_are_a_row_of_training_and_its_reverse_question(folder, curse, trained):
    pairs = open_source(str(folder)).fact_pairs(trained, per_person=2)
    assert pairs == match_facts(curse.training(), curse.facts(), trained, per_person=2)
    ids = [(forward.id, reverse.id) for forward, reverse in pairs]
    assert ids == [
        (f"{trained}_prompts_train-{30 * person + k:04d}", f"{trained}_reverse_prompts_test-{10 * person + k:04d}")
        for person in range(2)
        for k in range(2)
    ]
    for forward, reverse in pairs:
        assert forward.person == reverse.person
        assert reverse.is_reverse
        taught, asked = Sentence.of_fact(forward, asks_for_b=True), Sentence.of_fact(reverse, asks_for_b=False)
        name_and_description = (taught.a, taught.b) if trained == "p2d" else (taught.b, taught.a)
        assert taught.text[slice(*name_and_description[0])] == forward.person
        name = asked.a if trained == "p2d" else asked.b
        assert asked.text[slice(*name)] == forward.person


def test_training_is_the_file_that_is_fine_tuned_on(curse):
    everything = [row for row, _ in MADE["all_prompts_train"]]
    assert [(fact.prompt, fact.answer) for fact in curse.training()] == [
        (r["prompt"], r["completion"]) for r in everything
    ]
    assert not any(fact.is_reverse for fact in curse.training())


def test_only_requested_files_are_read(folder):
    for file in folder.iterdir():
        if file.stem != "d2p_prompts_test":
            file.unlink()
    curse = ReversalCurse.load(str(folder))
    assert len(curse.facts("d2p", "d2p")) == 20
    with pytest.raises(FileNotFoundError, match=r"p2d_prompts_test\.jsonl; fetch it from name_description_dataset/"):
        curse.facts("p2d")


def test_no_such_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere; it should contain p2d_prompts_train"):
        ReversalCurse.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "Ada', r"p2d_prompts_test\.jsonl, line 3 is not valid JSON"),
        ('{"prompt": "a", "completion": " b", "prompt": "c"}', r"line 3 gives the key 'prompt' twice"),
        ('{"prompt": "Ada Marsh is"}', r"p2d_prompts_test\.jsonl, line 3: a row is .* not \{'prompt': 'Ada"),
        ('{"prompt": "Ada Marsh is", "completion": 3}', r"line 3: a row is"),
        ('["Ada Marsh is", " a pilot"]', r"line 3: a row is"),
    ],
)
def test_a_broken_line_is_named(folder, line, message):
    path = folder / "p2d_prompts_test.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        ReversalCurse.load(folder).facts("p2d", "p2d")


def test_a_row_whose_subject_is_not_there_is_listed(folder):
    rows = [row for row, _ in MADE["p2d_prompts_test"]]
    write(folder, "p2d_prompts_test", [*rows[:13], {**rows[13], "prompt": "Somebody was"}, *rows[14:]])
    with pytest.raises(ValueError, match=r"p2d_prompts_test\.jsonl: the subject was not found in the lines \[14\]"):
        ReversalCurse.load(folder).facts("p2d", "p2d")
    reverse_rows = [row for row, _ in MADE["d2p_prompts_test"]]
    write(
        folder, "d2p_prompts_test", [*reverse_rows[:4], {**reverse_rows[4], "completion": " Nobody"}, *reverse_rows[5:]]
    )
    with pytest.raises(ValueError, match=r"d2p_prompts_test\.jsonl: the subject was not found in the lines \[5\]"):
        ReversalCurse.load(folder).facts("d2p", "d2p")
    nameless = [{**row, "completion": f" number{i}"} for i, row in enumerate(reverse_rows)]
    write(folder, "d2p_prompts_test", nameless)
    with pytest.raises(ValueError, match=r"lines \[1, 2, 3"):
        ReversalCurse.load(folder).facts("d2p", "d2p")
    write(folder, "p2d_prompts_test", rows[:13])
    with pytest.raises(ValueError, match=r"p2d questions in 13 rows.*10 templates"):
        ReversalCurse.load(folder).facts("p2d", "p2d")


def test_counts_of_the_published_files():
    assert sum(file.rows for file in FILES.values()) == 3600 + 3600 + 4 * 300 + 600
    assert len({file.sha256 for file in FILES.values()}) == 9


def test_check_names_every_file_that_is_not_the_published_one(curse, monkeypatch):
    with pytest.raises(ValueError, match=f"another SHA-256 have {', '.join(FILES)}$"):
        curse.check()
    for name, file in FILES.items():
        digest = hashlib.sha256((curse.folder / f"{name}.jsonl").read_bytes()).hexdigest()
        monkeypatch.setitem(FILES, name, file._replace(sha256=digest))
    curse.check()
    (curse.folder / "both_prompts_test.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"another SHA-256 have both_prompts_test$"):
        curse.check()


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of the hub, and the folder in which it keeps the data set's commit."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    kept = tmp_path / "hub" / f"datasets--{REPO.replace('/', '--')}" / "snapshots" / REVISION / FOLDER
    kept.mkdir(parents=True)
    return kept


def test_the_published_files_come_from_the_hubs_cache_and_are_verified(hub_cache, monkeypatch):
    rows = [row for row, _ in MADE["p2d_prompts_test"]]
    write(hub_cache, "p2d_prompts_test", rows)
    with pytest.raises(ValueError, match=r"p2d_prompts_test\.jsonl is not the published .*expected 269fe153"):
        ReversalCurse.load().facts("p2d", "p2d")
    with pytest.raises(FileNotFoundError, match="not in the cache"):  # what is damaged does not stay there
        ReversalCurse.load().facts("p2d", "p2d")
    write(hub_cache, "p2d_prompts_test", rows)
    ours = "c" * 64
    monkeypatch.setattr("diffusion_lens.data.download.sha256_of_file", lambda path: ours)
    monkeypatch.setitem(FILES, "p2d_prompts_test", FILES["p2d_prompts_test"]._replace(sha256=ours))
    facts = ReversalCurse.load().facts("p2d", "p2d")
    assert [fact.subject for fact in facts] == [subject for _, subject in MADE["p2d_prompts_test"]]


def test_offline_one_error_says_what_from_where_and_how_by_hand(hub_cache):
    with pytest.raises(FileNotFoundError) as caught:
        ReversalCurse.load().facts("d2p", "d2p")
    message = str(caught.value)
    assert message.startswith("d2p_prompts_test.jsonl is not in the cache and was not fetched: HF_HUB_OFFLINE is set.")
    assert f"/datasets/{REPO}/resolve/{REVISION}/{FOLDER}/d2p_prompts_test.jsonl" in message
    assert "ReversalCurse.load(folder)" in message
    assert caught.value.__suppress_context__
