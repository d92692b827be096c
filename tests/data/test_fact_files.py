"""Facts in files: every format gives the same facts, and an error names its line."""

import csv
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from diffusion_lens import Fact
from diffusion_lens.data.fact_files import open_source

ROWS = [
    {"prompt": "Ada, they say, is the", "subject": "Ada", "answer": " pilot"},
    {"prompt": 'the "pilot" is', "subject": "pilot", "answer": " Ada", "asked": "d2p", "person": "Ada"},
]
FACTS = [Fact(**row) for row in ROWS]
CSV = (
    "prompt,subject,answer,asked,person,subject_start\n"
    '"Ada, they say, is the",Ada, pilot,,,\n'
    '\n"the ""pilot"" is",pilot, Ada,d2p,Ada,\n'
)
KNOWN = [
    {
        "known_id": 7,
        "subject": "Vinson Massif",
        "attribute": "Antarctica",
        "template": "{} is located in the continent of",
        "prompt": "Vinson Massif is located in the continent of",
        "relation_id": "P30",
    }
]
REWRITE = {
    "case_id": 3,
    "requested_rewrite": {
        "prompt": "The mother tongue of {} is",
        "subject": "Danielle Darrieux",
        "target_new": {"str": "English"},
        "target_true": {"str": "French"},
    },
    "paraphrase_prompts": [],
    "neighborhood_prompts": [],
}


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def facts_of(path: Path) -> list[Fact]:
    return list(open_source(str(path)).facts)


def test_a_table_gives_the_facts_of_the_same_json(tmp_path: Path) -> None:
    assert facts_of(written(tmp_path / "facts.csv", CSV)) == FACTS
    # As a spreadsheet writes it.
    assert facts_of(written(tmp_path / "facts.csv", "\ufeff" + CSV.replace("\n", "\r\n"))) == FACTS
    assert facts_of(written(tmp_path / "facts.json", json.dumps(ROWS, indent=2))) == FACTS


def test_the_subject_may_be_pointed_at_in_a_table(tmp_path: Path) -> None:
    path = written(tmp_path / "facts.csv", "prompt,subject,answer,subject_start\nAda saw Ada and,Ada, ran,8\n")
    (fact,) = facts_of(path)
    assert fact.subject_span == (8, 11)


def test_a_folder_of_files_is_their_facts_by_name(tmp_path: Path) -> None:
    other = {**ROWS[0], "answer": " painter"}
    written(tmp_path / "b.jsonl", json.dumps(other) + "\n")
    written(tmp_path / "a.csv", CSV)
    written(tmp_path / "notes.txt", "not facts")
    assert facts_of(tmp_path) == [*FACTS, Fact(**other)]


def test_a_fact_that_is_there_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    written(tmp_path / "a.csv", CSV)
    written(tmp_path / "b.jsonl", "\n" + json.dumps(ROWS[0]) + "\n")
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: the fact 'Ada, they .* repeats that of .*a\.csv, line 2;"):
        open_source(str(tmp_path))
    again = written(tmp_path / "again.json", json.dumps([ROWS[0], ROWS[1], ROWS[0]], indent=1))
    with pytest.raises(
        ValueError, match=r"again\.json, record 3: the fact .* repeats that of .*again\.json, record 1;"
    ):
        open_source(str(again))
    rows = [{**row, "id": "one"} for row in ROWS]
    named = written(tmp_path / "named.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"named\.jsonl, line 2: the fact has the id 'one', as that of .*, line 1;"):
        open_source(str(named))
    apart = [{**ROWS[0], "id": name} for name in "ab"]
    assert len(facts_of(written(tmp_path / "apart.json", json.dumps(apart)))) == 2, "queried twice on purpose"


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_table_may_be_separated_as_spreadsheets_do(mark: str, tmp_path: Path) -> None:
    rows = list(csv.reader(CSV.splitlines()))
    with (tmp_path / "facts.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=mark).writerows(rows)
    assert facts_of(tmp_path / "facts.csv") == FACTS


def test_a_folder_without_facts_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'contains no \.json, \.jsonl, \.csv file of facts.*"prompt":'):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    ("records", "fact"),
    [
        (KNOWN, ("Vinson Massif is located in the continent of", "Vinson Massif", " Antarctica", "known-7")),
        (
            [REWRITE],
            ("The mother tongue of Danielle Darrieux is", "Danielle Darrieux", " French", "counterfact-3-true"),
        ),
        (
            [{**REWRITE, "reverse_qa": {"prompt": "English is spoken by", "target_new": {"str": "Danielle Darrieux"}}}],
            ("The mother tongue of Danielle Darrieux is", "Danielle Darrieux", " French", "bake-3-true"),
        ),
    ],
    ids=["known_1000", "counterfact", "bake"],
)
def test_files_of_rome_are_read_by_their_path(records: object, fact: tuple[str, ...], tmp_path: Path) -> None:
    (found,) = facts_of(written(tmp_path / "downloaded.json", json.dumps(records)))
    assert (found.prompt, found.subject, found.answer, found.id) == fact


GOOD = json.dumps(ROWS[0])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.json", "[", r"line 1 is not valid JSON"),
        ("f.json", '{"prompt": "a"}', r"line 1: there is no list"),
        ("f.json", f"[\n{GOOD},\n1]", r"record 2: 1 is not a fact"),
        ("f.json", f"[{GOOD}\n{GOOD}]", "line 2 is not valid JSON: Expecting ',' delimiter"),
        ("f.json", f"[{GOOD},\n\n {{'prompt': 1}}]", r"line 3 is not valid JSON"),
        ("f.json", f"[{GOOD}]\n]", "line 2 is not valid JSON: text follows the end of the value"),
        ("f.json", f'[{GOOD},\n{{"prompt": "a"}}]', "record 2: the fact has no subject and no answer"),
        ("f.json", f'[{GOOD},\n{{"prompt": "a", "prompt": "b"}}]', "line 1 gives the key 'prompt' twice in one object"),
        ("f.jsonl", f'{GOOD}\n{{"prompt": "a", "prompt": "b"}}', "line 2 gives the key 'prompt' twice in one object"),
        ("f.json", "[]", "contains no facts"),
        ("f.jsonl", f"{GOOD}\n\n{{", "line 3 is not valid JSON"),
        ("f.jsonl", f'{GOOD}\n{{"prompt": 5, "subject": "a", "answer": " b"}}', "line 2: prompt is 5, not text"),
        ("f.jsonl", GOOD.replace(' pilot"', ' pilot", "aksed": "d2p"'), "line 1: .*'aksed' .nearest: asked"),
        (
            "f.jsonl",
            GOOD.replace(' pilot"', ' pilot", "asked": "x"'),
            "line 1: asked is 'x'; it must be one of p2d, d2p",
        ),
        ("f.jsonl", GOOD.replace(" pilot", " "), "line 1: answer is empty"),
        ("f.csv", "prompt,answer\na,b\n", "line 1: the header lacks subject"),
        ("f.csv", f'{CSV}"two\nlines",,x\n', "line 5: subject is empty"),
        ("f.csv", "prompt,subject,answer\nAda, they say,Ada,x\n", "line 2: 4 cells in a row with 3 columns"),
        ("f.csv", "prompt,subject,answer,subject_start\na,a,b,first\n", "line 2: subject_start is 'first'"),
        ("f.csv", f'{CSV}"a\nb",b, "c"\n', "line 6: a cell has a space before its quotation mark"),
        ("f.csv", "prompt,subject,answer,notes\na,a,b,c\n", "line 2: a fact has no field 'notes': leave it out"),
        ("f.csv", "", "line 1: the header lacks prompt"),
        ("f.csv", "prompt;answer\na;b\n", "line 1: the header lacks subject. "),
        ("f.csv", "prompt,prompt,subject,answer\na,a,a,b\n", "line 1: the header names the column 'prompt' twice"),
        ("f.jsonl", f'{GOOD}\n{{"prompt": "\\ud800"}}', "line 2 contains '.*', half of a surrogate pair"),
        ("f.json", "[" * 100_000, "line 1 is not valid JSON .* nested too deep"),
        ("f.json", '[{"known_id": 1,\n "known_id": 2, "attribute": "a"}]', "line 1 gives the key 'known_id' twice"),
        ("f.txt", GOOD, r"should end in \.json, \.jsonl, \.csv"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_source(str(written(tmp_path / name, text)))
    assert " Paris" in str(caught.value), "the error shows what a fact looks like"


def characters_scanned(read: Callable[[], object]) -> int:
    """Characters and items that the methods of texts and lists pass over while `read` runs, and its calls."""
    work = 0

    def count(frame: object, event: str, function: object) -> None:
        nonlocal work
        scanned = getattr(function, "__self__", None)
        appends = getattr(function, "__name__", None) == "append"
        work += 1 + (len(scanned) if isinstance(scanned, str | list) and not appends else 0)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        read()
    finally:
        sys.setprofile(before)
    return work


@pytest.mark.parametrize("name", ["f.json", "f.jsonl", "f.csv", "repeated.json"])
def test_the_work_of_reading_grows_as_the_file_does(name: str, tmp_path: Path) -> None:
    work = []
    for n in (10, 200, 400):  # the first call imports what it needs
        rows = [{**ROWS[0], "prompt": f"Ada {i}"} for i in range(n)]
        text = {
            "f.json": json.dumps(rows, indent=1),
            "f.jsonl": "\n".join(map(json.dumps, rows)),
            "f.csv": "\n".join(["prompt,subject,answer", *(f"Ada {i},Ada, pilot" for i in range(n))]),
            "repeated.json": f"[{{{', '.join(f'{json.dumps(str(min(i, n - 2)))}: 1' for i in range(n))}}}]",
        }[name]
        path = written(tmp_path / name, text)

        def read(path: Path = path) -> None:
            with pytest.raises(ValueError, match=r"the key '\d+' twice") if "repeated" in name else nullcontext():
                open_source(str(path))

        work.append(characters_scanned(read))
    assert 1.5 < work[2] / work[1] < 2.5


def test_an_index_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "f.csv", f"prompt,subject,answer,subject_start\na,a,b,{'9' * 5000}\n")
    with pytest.raises(ValueError, match=r"line 2: subject_start is '9+, not the index of a character"):
        open_source(str(path))
