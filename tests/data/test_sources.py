"""Facts by the name of a data set or a path, and a part of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from diffusion_lens import Fact
from diffusion_lens.data import toy_facts
from diffusion_lens.data.fact_files import OUTLINES, SOURCES, default_source, open_source
from diffusion_lens.facts.fact import Direction
from diffusion_lens.facts.taught_pairs import lay_out_pairs
from diffusion_lens.training.finetune import read_completions


def test_the_toy_facts_by_name() -> None:
    toy = open_source("toy")
    assert list(toy.facts) == toy_facts.load().facts()
    assert (toy.length, toy.cfg_scale) == (toy_facts.SENTENCE_LENGTH, 0.0)
    sentences = Counter(fact.prompt + fact.answer for fact in toy.training)
    assert sentences == Counter(toy_facts.load().sentences())


@pytest.mark.parametrize("trained", ["p2d", "d2p"])
def test_the_pairs_of_the_toy_facts_are_those_in_the_words_of_training(trained: Direction, tiny: Any) -> None:
    laid_out = lay_out_pairs(tiny, open_source("toy").fact_pairs(trained))
    pairs = toy_facts.load().taught_pairs(tiny, trained)
    assert not laid_out.set_aside
    assert len({pair.id for pair in laid_out.pairs}) == len(pairs) == 20
    for one, other in zip(laid_out.pairs, pairs, strict=True):
        for canvas, expected in ((one.forward, other.forward), (one.reverse, other.reverse)):
            assert canvas.tokens.equal(expected.tokens)
            assert (canvas.row, canvas.answer_token, canvas.source) == (
                expected.row,
                expected.answer_token,
                expected.source,
            )


def test_a_part_of_the_facts_is_spread_over_the_cells() -> None:
    picked = open_source("toy").pick(limit=7)
    assert set(Counter((fact.trained, fact.asked) for fact in picked).values()) == {7}
    assert len(picked) == 42
    assert len({fact.person for fact in picked}) > 15
    ids = [fact.id for fact in open_source("toy").facts]
    assert [ids.index(fact.id) for fact in picked] == sorted(ids.index(fact.id) for fact in picked)
    reverse = open_source("toy").pick("p2d", "d2p", limit=1000)
    assert len(reverse) == 100
    assert all(fact.is_reverse for fact in reverse)


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_facts_of_your_own(ending: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": "Ada is the", "subject": "Ada", "answer": " pilot"},
        {"prompt": "the pilot is", "subject": "pilot", "answer": " Ada", "asked": "d2p"},
    ]
    path = tmp_path / f"facts{ending}"
    path.write_text(
        json.dumps(rows) if ending == ".json" else "\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8"
    )
    source = open_source(str(path))
    assert list(source.facts) == [Fact(**row) for row in rows]
    assert source.length is None
    with pytest.raises(
        ValueError, match="has no fact trained both and queried in any direction; it has trained None queried"
    ):
        source.pick(trained="both")


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    row = {"prompt": "Ada\u2028is the", "subject": "Ada", "answer": " pilot"}
    path = tmp_path / "facts.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n  \n", encoding="utf-8")
    assert list(open_source(str(path)).facts) == [Fact(**row)]
    text = {"prompt": row["prompt"], "completion": row["answer"]}
    path.write_text(json.dumps(text, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [each.prompt for each in read_completions(path)] == [row["prompt"]]


def test_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_bytes(b"\xff\xfe")
    for read in (lambda: open_source(str(path)), lambda: read_completions(path)):
        with pytest.raises(ValueError, match=r"facts\.jsonl is not UTF-8 text"):
            read()


def test_what_is_no_source() -> None:
    with pytest.raises(ValueError, match=r"'toys' is not a data set, file or folder; .*nearest: toy"):
        open_source("toys")
    with pytest.raises(ValueError, match="limit=0"):
        open_source("toy").pick(limit=0)
    defaults = {name: default_source(name) for name in ("tiny-mdm", "site-ar", "smdm-1028m")}
    assert defaults == {"tiny-mdm": "toy", "site-ar": "site", "smdm-1028m": "reversal-curse"}
    assert set(defaults.values()) <= set(SOURCES)


@pytest.mark.parametrize("name", sorted(OUTLINES))
def test_an_outline_is_the_data_set_without_words_and_fetches_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*_: object, **__: object) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr("diffusion_lens.data.reversal_curse.fetch_from_hub", fetched)
    for module in ("rome_facts", "celebrities", "pretrained_reversals"):
        monkeypatch.setattr(f"diffusion_lens.data.{module}.fetch_from_web", fetched)
    source = open_source(name, outline_only=True)
    if name == "known-1000":
        assert (len(source.pick()), source.length) == (1209, None)
    elif name == "parent-child":
        assert Counter((fact.trained, fact.asked) for fact in source.pick()) == {
            ("p2d", "p2d"): 1513,
            ("p2d", "d2p"): 1513,
        }
        # 18 pairs of the file occur twice.
        assert [len(source.fact_pairs(per_person=n)) for n in (1, 2)] == [1495, 1513]
        assert source.length is None
    elif name == "poems":
        assert Counter(fact.asked for fact in source.pick()) == {"p2d": 469, "d2p": 469}
        assert (len(source.fact_pairs()), source.length) == (469, None)
    else:
        cells = Counter((fact.trained, fact.asked) for fact in source.pick())
        assert cells == {(trained, queried): 300 for trained in ("p2d", "d2p", "both") for queried in ("p2d", "d2p")}
        assert len(source.training) == 3600
        assert len({fact.person for fact in source.facts}) == 90
        assert source.length == 52
        assert len(source.fact_pairs("p2d")) == len(source.fact_pairs("d2p")) == 30
        assert len(source.fact_pairs("p2d", per_person=11)) == 300
        assert source.fact_pairs("p2d", limit=3) == source.fact_pairs("p2d")[::10]
        with pytest.raises(ValueError, match="limit=0; it must be at least 1"):
            source.fact_pairs("p2d", limit=0)


def test_what_is_not_fetched_has_its_words_in_a_dry_run_too() -> None:
    assert open_source("toy", outline_only=True).facts == open_source("toy").facts


@pytest.mark.parametrize(("name", "kind"), [("facts.txt", "a '.txt' file"), ("facts", "a file without an ending")])
def test_a_file_of_another_kind_is_refused_with_the_kinds_that_are_read(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("Ada is the pilot")
    with pytest.raises(ValueError, match=rf"{name} is {kind}; .* should end in \.json, \.jsonl, \.csv"):
        open_source(str(tmp_path / name))
    with pytest.raises(
        ValueError,
        match=r"line 1 is not valid JSON.*read from \.jsonl files with one object per line, such as {\"prompt\"",
    ):
        read_completions(tmp_path / name)
