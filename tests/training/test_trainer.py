"""The trainer: it learns, it repeats, and it leaves no traces."""

import json
from dataclasses import replace

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.data import toy_facts
from diffusion_lens.training import TrainingConfig, TrainingRecord, tiny, train
from diffusion_lens.training.trainer import _batches
from weight_conversion import open_checkpoint, sha256_of_file

N_WORDS = 438
CONFIG = TrainingConfig(steps=12, batch_size=16, warmup=3)


@pytest.fixture(scope="module")
def tokens():
    toy = toy_facts.load()
    return toy_facts.encode(toy.sentences()[:200], toy_facts.build_tokenizer(toy))


def small(kind="mdm"):
    shape = replace(tiny.architecture(kind, N_WORDS), n_layers=1, d_model=16, d_head=4, d_mlp=24)
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(shape, device="cpu"), seed=1)


@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_the_loss_falls(kind, tokens):
    record = train(small(kind), tokens, replace(CONFIG, steps=60, lr=1e-2), progress=False)
    assert record.losses.shape == (60,)
    assert record.losses[-10:].mean() < 0.8 * record.losses[:10].mean()


@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_the_same_seed_gives_the_same_weights(kind, tokens):
    first, again, other = small(kind), small(kind), small(kind)
    train(first, tokens, CONFIG, progress=False)
    torch.rand(5)
    train(again, tokens, CONFIG, progress=False)
    train(other, tokens, replace(CONFIG, seed=1), progress=False)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(first.W_E, other.W_E)


def test_global_random_numbers_stay(tokens):
    before = torch.get_rng_state()
    train(small(), tokens, CONFIG, progress=False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("training", [False, True])
def test_mode_and_gradients_are_put_back(training, tokens):
    model = small()
    model.train(training)
    seen = []

    def failing(model, batch, generator):
        seen.append(model.training)
        if len(seen) == 2:
            raise RuntimeError("stop here")
        return model(batch).square().mean()

    with pytest.raises(RuntimeError, match="stop here"):
        train(model, tokens, CONFIG, objective=failing, progress=False)
    assert seen == [True, True]
    assert model.training is training
    train(model, tokens, CONFIG, progress=False)
    assert model.training is training
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_it_trains_where_gradients_are_off(tokens):
    model = small()
    before = model.W_E.clone()
    with torch.no_grad():
        train(model, tokens, CONFIG, progress=False)
        assert not torch.is_grad_enabled()
    assert not torch.equal(model.W_E, before)


def test_norms_do_not_decay(tokens):
    model = small()

    def indifferent(model, batch, generator):
        return 0 * model(batch).sum()

    norm, matrix = model.ln_final.w.clone(), model.W_U.clone()
    train(model, tokens, CONFIG, objective=indifferent, progress=False)
    assert torch.equal(model.ln_final.w, norm)
    assert model.W_U.norm() < matrix.norm()


def test_a_pass_sees_every_row_once():
    rows = torch.arange(10)[:, None]
    batches = _batches(rows, 4, torch.Generator().manual_seed(0))
    seen = torch.cat([next(batches) for _ in range(5)]).flatten()
    assert sorted(seen[:10].tolist()) == sorted(seen[10:].tolist()) == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()


def test_learning_rate():
    config = TrainingConfig(steps=1100, lr=1.0, warmup=100)
    assert [config.lr_at(step) for step in (0, 49, 99, 100)] == [0.01, 0.5, 1.0, 1.0]
    assert config.lr_at(600) == pytest.approx(0.5)
    assert config.lr_at(1100) == pytest.approx(0)


@pytest.mark.parametrize(("setting", "message"), [({"steps": 0}, "steps is 0"), ({"warmup": -1}, "warmup is -1")])
def test_impossible_recipes_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**{"steps": 1, **setting})


def test_a_record_comes_back_from_its_file(tokens, tmp_path):
    record = train(small(), tokens, CONFIG, progress=False)
    again = TrainingRecord.load(record.save(tmp_path / "record.safetensors"))
    assert (again.config, again.record) == (record.config, record.record)
    assert torch.equal(again.losses, record.losses)


def test_the_tiny_pair_is_made_whole(tmp_path):
    (tmp_path / "README.md").write_text("stays")
    tiny.make_pair(tmp_path, steps={"mdm": 2, "ar": 2}, progress=False)
    made = {"tiny-mdm.safetensors", "tiny-ar.safetensors", "lit_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in tmp_path.iterdir()} == {*made, "results.json", "README.md"}
    results = json.loads((tmp_path / "results.json").read_text())
    for kind in ("mdm", "ar"):
        path = tmp_path / f"tiny-{kind}.safetensors"
        assert results["twins"][f"tiny-{kind}"]["sha256"] == sha256_of_file(path)
        assert open_checkpoint(path).architecture == tiny.architecture(kind, N_WORDS)
        model = HookedDiffusionTransformer.from_pretrained(path, device="cpu")
        assert model.to_string(model.to_tokens("today Ada is the brave pilot.")[0]) == "today Ada is the brave pilot."
