"""The training of the pair with a planted subject site, in small: its phases, its losses, its files."""

import json
from dataclasses import replace

import pytest
import torch

from bundled_models import site_measures as measures
from bundled_models import site_pair
from bundled_models.site_losses import EarlyExit, PersonLoss, PersonTargets
from bundled_models.site_pair import PHASES, train_phases
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.data import site_facts
from weight_conversion import n_params, open_checkpoint, sha256_of_file

SHORT = tuple(replace(phase, steps=1) for phase in PHASES)


@pytest.fixture(scope="module")
def world():
    return site_facts.load()


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    return train_phases(world, 0, SHORT, tmp_path_factory.mktemp("site.run"), progress=False)


@pytest.fixture(scope="module")
def tokenizer(trained):
    return trained["ar"].model.tokenizer


def test_phases_continue_each_other(world, trained, tmp_path):
    """Without a learning rate, the blocks of every phase are those of the first."""
    still = train_phases(world, 0, [replace(phase, lr=0.0) for phase in SHORT], tmp_path, progress=False)
    first = still["subject"].model.state_dict()
    for name, done in still.items():
        assert done.model.cfg.n_layers == done.phase.n_layers
        assert done.model.cfg.model_name == f"site-{done.phase.kind}"
        weights = done.model.state_dict()
        for label, weight in first.items():
            kept = weights[label][: len(weight)] if label == "embed.weight" else weights[label]
            assert torch.equal(kept, weight), (name, label)
        if name in trained:
            assert not torch.equal(trained[name].model.W_U, weights["unembed.weight"])
    assert {n_params(done.model.cfg.architecture) for done in still.values() if done.phase.n_layers == 6} == {
        n_params(site_pair.architecture("mdm", 304)),
        n_params(site_pair.architecture("ar", 304)),
    }


def test_a_complete_training_is_read(world, trained, tmp_path):
    first = train_phases(world, 0, SHORT[:2], tmp_path, progress=False)
    again = train_phases(world, 0, SHORT[:2], tmp_path, progress=False)
    assert again["ar"].record.record["starts"] == first["ar"].record.record["starts"]
    for name, weight in first["ar"].model.state_dict().items():
        assert torch.equal(weight, again["ar"].model.state_dict()[name])
        assert torch.equal(weight, trained["ar"].model.state_dict()[name])


def test_a_phase_needs_the_one_that_it_starts_from(world, tmp_path):
    with pytest.raises(ValueError, match="phase 'ar' starts from 'subject'; the phases before it are: none"):
        train_phases(world, 0, SHORT[1:], tmp_path, progress=False)


def test_targets_are_the_values_of_each_visible_name(world, tokenizer):
    """Read every row as words, and look the people up by their names."""
    targets = PersonTargets.of(world, tokenizer)
    one, other = world.people[0], world.people[1]
    texts = [f"unlike {one.name}, {other.name} plays flute.", f"the {one.description} was {one.name}."]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    tokens = torch.tensor([row + [0] * (12 - len(row)) for row in rows])
    tokens[0, 2] = len(tokenizer)  # [MASK] hides the second name of the first person
    found = targets(tokens)
    expected = []
    for row, ids in enumerate(tokens.tolist()):
        words = [tokenizer.convert_ids_to_tokens(id) if id < len(tokenizer) else "" for id in ids]
        for position in range(1, 12):
            name = " ".join(words[position - 1 : position + 1]).replace("▁", "")
            for person in world.people:
                if person.name == name:
                    values = [tokenizer(value)["input_ids"][0] for value in person.values]
                    expected.append((row, position, values))
    assert len(expected) == 2
    batch, pos = (axis.tolist() for axis in found.rows)
    assert list(zip(batch, pos, found.tokens.tolist(), strict=True)) == expected


def test_the_persons_loss_masks_by_kind_of_token():
    loss = PersonLoss(EarlyExit(1, lambda tokens: None), values=(1,), names=(2,))
    tokens = torch.tensor([[1] * 40 + [2] * 40 + [3] * 40]).repeat(2000, 1)
    noisy = loss.hide(tokens, 9, torch.Generator().manual_seed(0))
    masked = (noisy == 9).double()
    assert torch.equal(noisy[noisy != 9], tokens[noisy != 9])
    values, names, others = (masked[:, start : start + 40].mean(dim=1) for start in (0, 40, 80))
    assert values.mean() == pytest.approx(0.9, abs=0.01)
    assert names.mean() == pytest.approx(0.075, abs=0.01)
    assert others.mean() == pytest.approx(0.5, abs=0.02)
    assert torch.corrcoef(torch.stack([names, others]))[0, 1] > 0.4  # both follow the row's t


def test_the_pair_is_written_with_its_files(tmp_path, monkeypatch):
    measured = {"recall": {"attribute": 0.5}}  # what is measured has tests of its own
    monkeypatch.setattr(measures, "measure", lambda model, world: measured)
    (tmp_path / "README.md").write_text("stays")
    site_pair.make_pair(tmp_path, phases=SHORT, progress=False)
    weights = {"site-mdm.safetensors", "site-ar.safetensors"}
    beside = {"lit_config.json", "tokenizer.json", "tokenizer_config.json", "results.json", "README.md"}
    assert {file.name for file in tmp_path.iterdir()} == weights | beside
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["phases"]) == [phase.name for phase in PHASES]
    assert (results["world_seed"], results["seed"]) == (site_facts.SHIPPED_SEED, site_pair.SHIPPED_SEED)
    for kind in ("mdm", "ar"):
        path = tmp_path / f"site-{kind}.safetensors"
        assert results["models"][f"site-{kind}"]["sha256"] == sha256_of_file(path)
        assert results["models"][f"site-{kind}"]["recall"] == measured["recall"]
        assert open_checkpoint(path).architecture == site_pair.architecture(kind, 304)
        model = HookedDiffusionTransformer.from_pretrained(path, device="cpu")
        assert (
            model.to_string(model.to_tokens("we know Plerrick still owns doves.")[0])
            == "we know Plerrick still owns doves."
        )


def test_known_attributes_are_of_different_people(world, trained, monkeypatch):
    known = {person.name for person in world.people[::2]}
    monkeypatch.setattr(measures, "_share", lambda model, facts: float(facts[0].person in known))
    facts = measures.known_attributes(trained["ar"].model, world, 30)
    assert [fact.person for fact in facts] == [person.name for person in world.people[:60:2]]
    assert len({fact.template for fact in facts}) > 20


def test_measures_of_a_model_that_knows_nothing(world, trained):
    model = trained["ar"].model
    shares = measures.recall(model, replace(world, people=world.people[:35:12]))
    assert list(shares) == ["p2d p2d", "p2d d2p", "d2p p2d", "d2p d2p", "attribute"]
    assert max(shares.values()) < 0.2
    facts = world.facts("attribute")[:1]
    table = measures.effects(model, facts)
    assert table["facts"] == 1
    assert set(table["resid"]) == set(measures.ROLES) - {"answer"}  # an AR model has no such position
    assert all(len(row) == 6 for row in table["mlp"].values())
    found = measures.recovered(model, facts, 1)
    assert 0 <= found["share"] <= 1
    assert not model.list_hooks()


@pytest.mark.parametrize("name", site_pair.ABLATIONS)
def test_ablations_train_as_long_as_the_recipe(world, tmp_path, name):
    recipe = site_pair.ABLATIONS[name]
    whole = [phase.steps for phase in recipe if phase.kind == "mdm" and phase.n_layers == site_pair.BLOCKS]
    assert sum(whole) == PHASES[-1].steps + PHASES[-2].steps
    done = train_phases(world, 0, [replace(phase, steps=1) for phase in recipe], tmp_path, progress=False)
    model = list(done.values())[-1].model
    assert replace(model.cfg.architecture, name="site") == site_pair.architecture("mdm", 304)
