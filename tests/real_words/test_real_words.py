"""`python -m real_words`, on people that the bundled pair knows: every part, its numbers, and a second call."""

import json
import math
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.data import site_facts
from diffusion_lens.evaluation import chain_rule_nll
from real_words import Questions, Settings, log_odds, real_words_study
from real_words.__main__ import main
from real_words.associations import Rival, agreement, mixed_name, summary
from real_words.questions import SHIPPED
from weight_conversion import sha256_of_file

DOCS = Path(__file__).parents[2] / "docs"

RELATION = dict(name="who", statement="{} is the {}", reverse="the {} is", paraphrases=["today {} is the"])
TINY = dict(
    n_facts=4, n_steps=1, n_vectors=12, n_edits=2, n_pairs=2, n_texts=4, samples=1, every=3, window=1, iterations=2,
    steps=(1, 2), continuation=2, resamples=10,
)  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Any:
    return [HookedDiffusionTransformer.from_pretrained(name, device="cpu") for name in ("site-ar", "site-mdm")]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    people = site_facts.load().facts("description", "both", "p2d")[::5][:13]
    rows = [
        dict(subject=fact.person, attribute=fact.description, template="{} is the", prompt=fact.prompt)
        | dict(relation_id="R", held_out=True)
        for fact in people
    ]
    rows[0]["held_out"] = False
    path = tmp_path_factory.mktemp("facts") / "people.json"
    path.write_text(json.dumps({"relations": {"R": RELATION}, "facts": rows}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def study(pair: Any, file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("study")
    options = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", *words(value))]
    main(["--causal", "site-ar", "--twin", "site-mdm", "--facts", str(file), "--out", str(out), *options])
    return real_words_study(*pair, Settings(str(file), **TINY), out), out


def words(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, tuple) else (value,))]


def test_every_part_is_written_and_a_second_call_computes_nothing(pair: Any, file: Path, study: Any) -> None:
    result, out = study
    assert list(result["results"]) == ["recall", "traces", "by_step", "directions", "vectors", "edits", "signatures"]
    before = {path: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    assert len(before) == 7
    again = real_words_study(*pair, Settings(str(file), **TINY), out)
    assert {path: path.stat().st_mtime_ns for path in (out / "parts").iterdir()} == before
    assert again["results"] == result["results"]
    written = json.loads((out / "real_words.json").read_text(encoding="utf-8"))
    assert written["record"]["twin"]["model"] == "site-mdm"
    with pytest.raises(ValueError, match="other settings"):
        real_words_study(*pair, Settings(str(file), **{**TINY, "samples": 2}), out)


def test_every_part_has_its_facts(study: Any) -> None:
    results = study[0]["results"]
    assert len(results["recall"]["known"]["twin"]["one"]) == 13
    assert len(results["recall"]["held_out"]) == 12
    trace = results["traces"]["twin"]["resid"]
    assert (trace["facts"], trace["layers"]) == (4, [0, 3])
    for name in ("causal", "twin"):
        groups = results["edits"][name]["early"]["groups"]
        assert (groups["neighbourhood"]["probes"], groups["paraphrase"]["probes"]) == (8, 2)
    assert results["vectors"]["causal"]["compared"]["keys"]["random"]["facts"] == 12


def test_log_odds_are_those_of_the_chain_rule(pair: Any, file: Path, tmp_path: Path) -> None:
    questions = Questions.read(file, tmp_path)
    facts, relation = questions.facts[:3], questions.relations["R"]
    for model in pair:
        forms = {"forward": lambda s, a: (f"{s} is the", f" {a}"), "asked": lambda s, a: (f"the {a} is", f" {s}")}
        for form, sentence in forms.items():
            found = log_odds(model, relation, facts, form)
            log_p = [[-float(chain_rule_nll(model, *sentence(s.subject, a.description))) for a in facts] for s in facts]
            table = torch.tensor(log_p)
            odds = table.diagonal()[:, None] - table - table.T + table.diagonal()
            for i, fact in enumerate(facts):
                assert found[fact.id].odds == pytest.approx(float(odds[i].sum() / 2), rel=1e-3, abs=1e-3)
    masked = log_odds(pair[1], relation, facts, "masked")
    assert all(rival.share == 1 for rival in masked.values())


def test_held_out_facts_are_compared_with_held_out_ones(pair: Any, file: Path, study: Any, tmp_path: Path) -> None:
    """The trained fact changes nothing: the same numbers without it, of the other facts alone."""
    found = study[0]["results"]["directions"]["twin"]["asked"]
    questions = Questions.read(file, tmp_path)
    others = [fact for fact in questions.facts if fact.id in questions.held_out]
    assert len(others) == 12 == len(questions.facts) - 1
    alone = log_odds(pair[1], questions.relations["R"], others, "asked", {fact.subject for fact in questions.facts})
    mean, *_, n_facts = summary(list(alone.values()), 1)["odds"]
    assert (found["held_out"]["odds"][0], found["held_out"]["odds"][3]) == (pytest.approx(mean), n_facts)
    n_pairs = sum(len(rival.pairs) for rival in alone.values()) / 2
    assert 0 < found["held_out"]["agreement"][3] == n_pairs
    assert "odds" not in found["other"]  # one fact, which has no rival


def test_a_mixed_name_has_words_of_two_subjects_and_is_none(pair: Any, file: Path, tmp_path: Path) -> None:
    """Names of two words of one token each, two of which share an attribute."""
    model, (fact, *_) = pair[0], Questions.read(file, tmp_path).facts
    words = dict.fromkeys(word for each in Questions.read(file, tmp_path).facts for word in each.subject.split())
    single = [word for word in words if len(model.encode(f" {word}", False)) == 1][:6]
    one, two, three = (
        replace(fact, subject=f"{first} {last}", description=about)
        for first, last, about in zip(single[::2], single[1::2], "aab", strict=True)
    )
    mixed = f"{single[0]} {single[3]}"
    assert mixed_name(model, one, [one, two, three]) == mixed
    assert mixed_name(model, one, [one, two, three], {mixed}) is None
    assert mixed_name(model, three, [one, two, three]) is None


def test_summary_and_agreement_are_those_of_numpy() -> None:
    draw = np.random.default_rng(0)
    first, second = {}, {}
    for group in range(8):
        a, b, c = (f"{group}{letter}" for letter in "abc")
        for forms in (first, second):
            shift = draw.normal() + group * (1 if forms is first else 0.5)
            odds = {(a, b): shift, (b, c): shift + draw.normal()}
            for fact in (a, b, c):
                pairs = {next(iter({*pair} - {fact})): value for pair, value in odds.items() if fact in pair}
                mixed = math.nan if group > 4 else 0.25
                forms[fact] = Rival(str(group), 1.0, 1.0, float(np.mean(list(pairs.values()))), 0.5, mixed, pairs)
    pairs = [(fact, other) for fact, rival in first.items() for other in rival.pairs if fact < other]
    table = np.array([[forms[fact].pairs[other] for forms in (first, second)] for fact, other in pairs])
    r, low, high, n = agreement(first, second)
    assert (r, n) == (pytest.approx(np.corrcoef(table.T)[0, 1], abs=1e-5), 16)
    assert low < r < high
    found = summary(list(first.values()))
    of_mixed = [rival.odds for rival in first.values() if not math.isnan(rival.mixed_odds)]
    assert found["beyond"][3] == len(of_mixed) == 15
    assert found["odds"][3] == 24
    assert found["whole_odds"][0] == pytest.approx(np.mean(of_mixed), abs=1e-5)
    assert found["beyond"][0] == pytest.approx(np.mean(of_mixed) - 0.25, abs=1e-5)


def test_no_paraphrase_is_the_prompt_of_the_edit(pair: Any, file: Path, tmp_path: Path) -> None:
    questions = Questions.read(file, tmp_path)
    requests = questions.edits(pair[0], questions.held_out, 12)
    assert len(requests) == 12
    for request in requests:
        assert [each.prompt for each in request.paraphrases] == [f"today {request.true.subject} is the"]
    shipped = Questions.read(SHIPPED, tmp_path)
    for fact in shipped.facts:
        if relation := shipped.relations.get(shipped.relation_of.get(fact.id, "")):
            sentences = {relation.forward(fact.subject), *(each.format(fact.subject) for each in relation.paraphrases)}
            assert sentences - {fact.prompt}


def test_the_shipped_facts_have_their_relations_and_a_licence(tmp_path: Path) -> None:
    questions = Questions.read(SHIPPED, tmp_path)
    assert (len(questions.facts), len(questions.held_out), len(questions.relation_of)) == (279, 140, 235)
    assert "MIT" in json.loads(SHIPPED.read_text(encoding="utf-8"))["source"]
    for relation in questions.relations.values():
        assert relation.forward("X").count("X") == 1
        assert relation.statement.endswith("{}")
        assert all(each.count("{}") == 1 for each in (relation.reverse, *relation.paraphrases))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return import_module("real_words_tables")


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize("of_page", [True, False])
def test_tables_and_figures_are_made_of_what_was_written(page: Any, study: Any, of_page: bool, tmp_path: Path) -> None:
    file = DOCS / "real_words.json" if of_page else study[1] / "real_words.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    results = written["results"]
    for name, rows_of in page.TABLES.items():
        head, rows = rows_of(results)
        assert all(len(row) == len(head) for row in rows), name
        assert rows or name in ("lost", "vectors")
    for name, draw in page.FIGURES.items():
        draw(results).savefig(tmp_path / f"{name}.png")
    (line,) = page.settings_lines(written)
    assert f"{len(results['recall']['held_out'])} of them held out" in line
    _, (causal, *_) = page.recall_rows(results)
    assert int(causal[2]) + int(causal[3]) == len(results["recall"]["known"]["causal"]["one"])


def test_the_page_names_the_tables_and_figures_that_there_are(page: Any) -> None:
    text = (DOCS / "real_words.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^```\{real-words\} (\w+)$", text, re.MULTILINE)) == {"settings", *page.TABLES}
    assert re.findall(r"\(_made/real_words_(\w+)\.png\)", text) == list(page.FIGURES)
    assert page.study()["settings"]["facts_sha256"] == sha256_of_file(SHIPPED)


def test_the_file_that_the_page_shows_is_one_of_facts(tmp_path: Path) -> None:
    *_, shown = re.findall(r"^```json\n(.*?)^```", (DOCS / "real_words.md").read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "facts.json").write_text(shown, encoding="utf-8")
    read, shipped = (Questions.read(path, tmp_path) for path in (tmp_path / "facts.json", SHIPPED))
    (fact,) = read.facts
    assert fact in shipped.facts
    assert read.held_out == {fact.id} <= shipped.held_out
    asked = [questions.relations[questions.relation_of[fact.id]] for questions in (read, shipped)]
    assert [each.reverse for each in asked] == 2 * ["The continent of {} is home to"]


def test_a_refusal_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--causal", "site-ar", "--twin", "site-mdm", "--facts", "nowhere.json", "--out", str(tmp_path)])
    assert "nowhere.json" in capsys.readouterr().err


def test_a_file_without_relations_or_held_out_facts_is_refused(file: Path, tmp_path: Path) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    rows = content["facts"]
    for wrong, words in (
        (rows, r'has not \{"facts"'),
        ({**content, "relations": {}}, "has not"),
        ({**content, "facts": [{**row, "held_out": False} for row in rows]}, 'no fact of .* has "held_out": true'),
    ):
        path = tmp_path / "wrong.json"
        path.write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            Questions.read(path, tmp_path)
