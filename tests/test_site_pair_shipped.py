"""The shipped models with a planted subject site: what they must show, measured and as `results.json` records it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from bundled_models import site_measures as measures
from bundled_models import site_pair
from bundled_models.rows_and_blocks import site_tokenizer
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.data import site_facts
from diffusion_lens.loading.catalogue import BUNDLED
from weight_conversion import read_json, sha256_of_file

FOLDER = BUNDLED["site-mdm"].folder
SAME, REVERSE = ("p2d p2d", "d2p d2p"), ("p2d d2p", "d2p p2d")
CELLS = ("p2d p2d", "p2d d2p", "d2p d2p", "d2p p2d", "attribute")
EDITED = ("efficacy", "paraphrase", "neighbourhood", "shared_name", "other_relations")


@pytest.fixture(scope="module")
def world() -> site_facts.SiteFacts:
    return site_facts.load()


@pytest.fixture(scope="module", params=["site-mdm", "site-ar"])
def shipped(request: pytest.FixtureRequest) -> HookedDiffusionTransformer:
    return HookedDiffusionTransformer.from_pretrained(request.param, device="cpu")


@pytest.fixture(scope="module")
def recorded(shipped: HookedDiffusionTransformer) -> dict[str, Any]:
    model: dict[str, Any] = read_json(FOLDER / "results.json")["models"][shipped.cfg.model_name]
    return model


@pytest.fixture(scope="module")
def facts(shipped: HookedDiffusionTransformer, world: site_facts.SiteFacts) -> Any:
    return measures.known_attributes(shipped, world, 3)


def require_recall(recall: Mapping[str, float], name: str) -> None:
    assert min(recall[cell] for cell in SAME) >= 0.95
    assert recall["attribute"] >= 0.98
    if name == "site-mdm":
        assert min(recall[cell] for cell in REVERSE) >= 0.90
    else:
        assert max(recall[cell] for cell in REVERSE) <= 0.02


def require_two_sites(effects: Mapping[str, Any], name: str) -> None:
    """The lookup stands at the subject's last token in low blocks, and attention reads it later."""
    readout = "answer" if name == "site-mdm" else "prompt_last"
    total = effects["clean"] - effects["corrupted"]
    assert max(effects["resid"]["subject_last"][1:]) >= total / 2
    mlp, attn = effects["mlp"], effects["attn"]
    elsewhere = [row[:3] for role, row in mlp.items() if role != "subject_last" and row[0] is not None]
    assert max(mlp["subject_last"][:3]) > max(map(max, elsewhere))
    # Attention at the read-out acts in a later block than the MLPs at the subject's last token.
    late = max(range(6), key=lambda layer: attn[readout][layer])
    early = max(range(6), key=lambda layer: mlp["subject_last"][layer])
    assert late > early
    assert attn[readout][late] >= total / 2


def test_recall_shows_the_reversal_curse(
    shipped: HookedDiffusionTransformer, recorded: dict[str, Any], world: site_facts.SiteFacts
) -> None:
    require_recall(recorded["recall"], shipped.cfg.model_name)
    some = measures.recall(shipped, replace(world, people=world.people[::12]))
    for cell, share in some.items():
        # Another machine rounds differently, and a twelfth of the people differs from all.
        assert share == pytest.approx(recorded["recall"][cell], abs=0.08), cell


def test_traces_show_two_sites(shipped: HookedDiffusionTransformer, recorded: dict[str, Any], facts: Any) -> None:
    assert recorded["effects"]["facts"] == measures.N_TRACED
    require_two_sites(recorded["effects"], shipped.cfg.model_name)
    require_two_sites(measures.effects(shipped, facts[:2]), shipped.cfg.model_name)


def test_v_star_brings_a_corrupted_fact_back(
    shipped: HookedDiffusionTransformer, recorded: dict[str, Any], facts: Any
) -> None:
    assert recorded["v_star"]["block 1"]["facts"] == measures.N_VALUES
    assert recorded["v_star"]["block 1"]["share"] >= 0.9
    assert measures.recovered(shipped, facts[:2], 1)["share"] >= 0.9


def test_the_shipped_files_are_those_measured(world: site_facts.SiteFacts) -> None:
    results = read_json(FOLDER / "results.json")
    assert (results["world_seed"], results["seed"]) == (world.seed, site_pair.SHIPPED_SEED)
    for name, model in results["models"].items():
        assert sha256_of_file(BUNDLED[name].path) == model["sha256"]


def test_the_shipped_tokenizer_is_the_worlds(shipped: HookedDiffusionTransformer, world: site_facts.SiteFacts) -> None:
    fresh = site_tokenizer(world)
    for fact in world.facts("attribute")[::97] + world.facts("description")[::97]:
        assert shipped.to_tokens(fact.prompt)[0].tolist() == fresh(fact.prompt)["input_ids"]


def cells(values: Iterable[float]) -> str:
    """Numbers as a row of the card's tables."""
    return " | ".join(f"{value:.2f}".replace("-0.00", "0.00") for value in values)


def test_the_card_shows_what_was_measured() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, model in read_json(FOLDER / "results.json")["models"].items():
        assert f"| `{name}` | {cells(model['recall'][cell] for cell in CELLS)} |" in card
        readout = "answer" if name == "site-mdm" else "prompt_last"
        for label, kind in (("residual stream", "resid"), ("MLP", "mlp"), ("attention", "attn")):
            for place, role in (("subject's last token", "subject_last"), ("read-out", readout)):
                assert f"| `{name}` | {label}, {place} | {cells(model['effects'][kind][role])} |" in card
        after = [model["edits"][group]["after"] for group in EDITED]
        assert f"| `{name}` | {cells(after)} |" in card


def test_the_card_shows_every_recipe_world_and_seed_that_was_trained() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    runs = read_json(FOLDER / "recipes.json")
    assert {run["recipe"] for run in runs} == {"ar", "pair", *site_pair.ABLATIONS}
    assert {(run["world_seed"], run["seed"]) for run in runs} == {(1, 0), (1, 8), (5, 0), (5, 8)}
    for run in runs:
        recall = cells(run["recall"][cell] for cell in CELLS)
        device = {"cpu": "CPU", "cuda": "GPU"}[run["device"]]
        beginning = f"| {run['recipe']} | {run['world_seed']}, {run['seed']}, {device} | {run['steps']:,} | {recall} |"
        (row,) = [line for line in card.splitlines() if line.startswith(beginning)]
        if run.get("facts_traced", 0) >= 20:
            traced = (run["clean"] - run["corrupted"], max(run["resid subject_last"][1:]), run["v_star"]["block 1"])
            assert row.endswith(f" {cells(traced)} |")


def test_an_edit_changes_one_fact(
    shipped: HookedDiffusionTransformer, recorded: dict[str, Any], world: site_facts.SiteFacts, facts: Any
) -> None:
    for edits in (recorded["edits"], measures.edits(shipped, world, facts)):
        after = {group: score["after"] for group, score in edits.items()}
        assert min(after[group] for group in ("efficacy", "paraphrase", "neighbourhood", "shared_name")) >= 0.95
