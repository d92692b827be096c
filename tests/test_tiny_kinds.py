"""The bundled models of other kinds of diffusion: what they know, and that their files are those that were measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bundled_models import tiny_kinds, tiny_pair
from bundled_models.rows_and_blocks import toy_rows, toy_tokenizer
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.data import toy_facts
from diffusion_lens.loading.catalogue import BUNDLED
from weight_conversion import read_json, sha256_of_file

NAMES = ("tiny-block", "tiny-uniform")


@pytest.fixture(scope="module", params=NAMES)
def shipped(request):
    model = HookedDiffusionTransformer.from_pretrained(request.param, device="cpu")
    recorded = read_json(BUNDLED[request.param].folder / "results.json")
    assert (recorded["corpus_seed"], recorded["seed"]) == (toy_facts.SHIPPED_SEED, tiny_pair.SHIPPED_SEED)
    return model, recorded["models"][request.param]


def test_recall_is_what_was_measured(shipped):
    """Queried for every third person."""
    model, recorded = shipped
    toy = toy_facts.load()
    cells = tiny_pair.measure(model, replace(toy, people=toy.people[::3]))
    for cell, expected in zip(cells, recorded["recall"], strict=True):
        # A third of the people, and another machine may round differently.
        assert cell == {**expected, "accuracy": pytest.approx(expected["accuracy"], abs=0.15)}
        if cell["trained"] == cell["asked"]:
            assert cell["accuracy"] >= 0.9


def test_the_files_are_those_measured(shipped):
    model, recorded = shipped
    assert sha256_of_file(BUNDLED[model.cfg.model_name].path) == recorded["sha256"]
    assert recorded["training"]["steps"] == tiny_kinds.STEPS[model.cfg.model_name.removeprefix("tiny-")]


def test_the_card_shows_the_table_measured(shipped):
    model, recorded = shipped
    cells = {(cell["trained"], cell["asked"]): cell["accuracy"] for cell in recorded["recall"]}
    order = (("p2d", "p2d"), ("p2d", "d2p"), ("d2p", "d2p"), ("d2p", "p2d"))
    card = (BUNDLED["tiny-uniform"].folder / "README.md").read_text()
    assert f"| `{model.cfg.model_name}` | {' | '.join(f'{cells[cell]:.2f}' for cell in order)} |" in card


def test_the_networks_differ_in_noise_and_attention_only():
    masked = tiny_pair.architecture("mdm", 435)
    block, uniform = (tiny_kinds.architecture(kind, 435) for kind in ("block", "uniform"))
    assert (block.noise, block.block_size) == ("absorbing", tiny_kinds.BLOCK_SIZE)
    assert (uniform.noise, uniform.block_size) == ("uniform", None)
    for other in (block, uniform):
        named = {"name": masked.name, "family": masked.family}
        sees = {"attention_dir": masked.attention_dir, "causal_block": None}
        vocabulary = {"mask_token_id": masked.mask_token_id, "d_vocab": masked.d_vocab}
        assert replace(other, **named, **sees, **vocabulary) == masked


def test_a_training_of_a_few_steps_writes_a_model_that_loads(tmp_path: Path, monkeypatch):
    toy = toy_facts.load()
    few = replace(toy, people=toy.people[::20])
    monkeypatch.setattr(toy_facts, "load", lambda seed=1: few)
    results = tiny_kinds.make("uniform", tmp_path / "tiny-uniform", steps=2, progress=False)
    assert sorted(path.name for path in (tmp_path / "tiny-uniform").iterdir()) == [
        "config.json",
        "results.json",
        "tiny-uniform.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    model = HookedDiffusionTransformer.from_pretrained(tmp_path / "tiny-uniform", device="cpu", dtype=torch.bfloat16)
    assert len(results["models"]["tiny-uniform"]["recall"]) == 4
    assert model.cfg.noise == "uniform"


def test_the_denoising_loss_is_the_cross_entropy_of_the_clean_tokens():
    """On a model whose logits are the same everywhere, whatever the noise."""
    facts = toy_facts.load()
    tokenizer = toy_tokenizer(facts)
    tokens = toy_rows(facts.sentences()[:64], tokenizer)
    model = HookedDiffusionTransformer.from_pretrained("tiny-uniform", device="cpu")
    with torch.no_grad():
        model.unembed.weight.zero_()
    loss = tiny_kinds.denoising_loss(model, tokens, torch.Generator().manual_seed(0))
    assert loss.item() == pytest.approx(torch.tensor(float(model.cfg.d_vocab)).log().item(), abs=1e-4)
