"""`python -m real_words`, on people that the bundled pair knows: every part, its numbers, and a second call."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.data import site_facts
from diffusion_lens.evaluation import chain_rule_nll
from real_words import Questions, Settings, log_odds, real_words_study
from real_words.__main__ import main
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
        dict(subject=fact.person, attribute=fact.description, template="{} is the", prompt=fact.prompt, relation_id="R")
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
        assert (groups["neighbourhood"]["probes"], groups["paraphrase"]["probes"]) == (8, 4)
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


def test_a_refusal_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--causal", "site-ar", "--twin", "site-mdm", "--facts", "nowhere.json", "--out", str(tmp_path)])
    assert "nowhere.json" in capsys.readouterr().err
