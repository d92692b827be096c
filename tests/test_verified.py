"""What the catalogue says was verified is backed: by golden data that a test reads, or by modules that one compares."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from diffusion_lens.loading.catalogue import COMPARED, NOT_OFFERED, NUMBERS, SEEN, STATES, find_pretrained
from weight_conversion.families.kinds import KINDS, refuse_unsupported
from weight_conversion.registry import FAMILIES, recognise

TESTS = Path(__file__).parent
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)}
DOCS = TESTS.parent / "docs"


def golden_of_families() -> dict[str, set[str]]:
    """Folders of golden data, by the family that their configs have."""
    found: dict[str, set[str]] = {"lit_gpt": {"lit_gpt"}}
    for path in sorted((TESTS / "golden").rglob("config.json")):
        config = {**json.loads(path.read_text(encoding="utf-8")), "mode": "bidirectional"}
        folder = path.relative_to(TESTS / "golden").parts[0]
        found.setdefault(recognise(config, {}, "checkpoint").name, set()).add(folder)
    return found


def test_there_are_three_states_and_every_family_has_one_of_two() -> None:
    assert list(STATES) == [NUMBERS, SEEN, NOT_OFFERED]
    assert COMPARED.keys() == FAMILIES.keys()
    assert {state for state, _ in COMPARED.values()} == {NUMBERS, SEEN}
    for model in find_pretrained():
        assert model.evidence == COMPARED[model.family][0]


def test_numbers_that_equal_the_authors_are_compared_by_a_test() -> None:
    golden = golden_of_families()
    modules = SOURCES[TESTS / "model" / "test_family_forward.py"]
    of_hugging_face = set(re.findall(r'"(\w+)": \(\w+Config, \w+ForCausalLM\)', modules))
    of_hugging_face |= set(re.findall(r"small_networks import (diffusion_gemma) as", "".join(SOURCES.values())))
    assert {"llama", "qwen2", "qwen3", "diffusion_gemma"} <= of_hugging_face
    for family, (state, _) in COMPARED.items():
        if state == NUMBERS:
            assert family in golden or family in of_hugging_face, family
    for folder in {folder for folders in golden.values() for folder in folders}:
        assert any(f'"{folder}"' in text for text in SOURCES.values()), f"no test reads golden/{folder}"


def test_what_is_not_offered_is_refused_with_its_reason() -> None:
    for kind in KINDS:
        for model_type in kind.model_types:
            with pytest.raises(ValueError, match="would give wrong numbers") as caught:
                refuse_unsupported({"model_type": model_type}, {}, "checkpoint")
            assert kind.difference in str(caught.value)


def test_the_tables_of_the_site_are_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    tables = import_module("family_tables")
    rows = tables.verified_rows()
    states = [state for _, state, _ in rows]
    assert states == sorted(states, key=list(STATES).index)
    families = {name.strip("`"): (state, said) for name, state, said in rows if state != NOT_OFFERED}
    assert families == COMPARED
    refused = [name for name, state, _ in rows if state == NOT_OFFERED]
    assert all(name.startswith(kind.what) for name, kind in zip(refused, KINDS, strict=True))
    assert {family.strip("`") for family, *_ in tables.family_rows()} == FAMILIES.keys()
    page = (DOCS / "verified.md").read_text(encoding="utf-8")
    assert "{state-table}" in page
    assert "{verified-table}" in page
