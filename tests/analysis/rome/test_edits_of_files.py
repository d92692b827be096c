"""Requests in the formats of CounterFact and BAKE through the whole experiment, on both variants."""

import json
from pathlib import Path
from typing import Any

import pytest

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import CanvasLayout, EditSettings, edit_study
from diffusion_lens.analysis.rome import EditStudy, ValueSettings
from diffusion_lens.data import bake, counterfact, site_facts
from diffusion_lens.data.site_edits import edit_requests

SEARCH = ValueSettings(steps=40, lr=0.2, stop_below=0.3, kl_factor=0.0)


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """Edits of three attributes of the bundled world, as CounterFact writes them, with BAKE's reverse question."""
    world = site_facts.load()
    plays = [fact for fact in world.facts("attribute") if fact.template == "we know <subject> plays"]
    found = []
    for case, request in enumerate(edit_requests(world, plays[:3])):
        found.append(
            {
                "case_id": case,
                "requested_rewrite": {
                    "prompt": "we know {} plays",
                    "subject": request.true.subject,
                    "target_true": {"str": request.true.answer.strip()},
                    "target_new": {"str": request.new.answer.strip()},
                },
                "paraphrase_prompts": [fact.prompt for fact in request.paraphrases[:4]],
                "neighborhood_prompts": [fact.prompt for fact in request.neighbours],
                "reverse_qa": {
                    "prompt": f"the {plays[case].description} is",
                    "target_new": {"str": request.true.subject},
                    "target_true": {"str": plays[case + 3].subject},
                },
            }
        )
    return found


@pytest.mark.parametrize(("read", "name"), [(counterfact, "site-mdm"), (bake, "site-ar")])
def test_requests_of_a_file_are_edited_and_probed(
    read: Any, name: str, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
    path = tmp_path / "requests.json"
    asked = ["reverse_qa"] if read is bake else []  # CounterFact has no such question
    fields = [key for key in records[0] if key != "reverse_qa"] + asked
    path.write_text(json.dumps([{key: record[key] for key in fields} for record in records]), encoding="utf-8")
    settings = EditSettings(1, SEARCH, layout=CanvasLayout(16))
    study = edit_study(model, read(path), settings, out=tmp_path / "edits")
    table = study.table()
    assert list(table) == ["efficacy", "paraphrase", "neighbourhood"] + ["reverse"] * len(asked)
    neighbours = sum(len(record["neighborhood_prompts"]) for record in records)
    assert [table[group].probes for group in ("efficacy", "paraphrase", "neighbourhood")] == [3, 12, neighbours]
    assert (table["efficacy"].before, table["efficacy"].after) == (0.0, 1.0)
    assert table["paraphrase"].after == 1.0
    low, high = table["neighbourhood"].after_interval
    assert low <= table["neighbourhood"].after <= high
    assert 0 < study.score().after <= 1
    again = EditStudy.load(tmp_path / "edits")
    assert again.table() == table
