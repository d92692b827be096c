"""The trainer: it learns, it repeats, and it leaves no traces."""

import json
import math
from dataclasses import replace

import pytest
import torch

from bundled_models import tiny_pair
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.records.identity import describe_modules
from diffusion_lens.training import (
    TrainingConfig,
    TrainingRecord,
    autoregressive_loss,
    masked_diffusion_loss,
    train,
)
from diffusion_lens.training.trainer import RowOrder, evaluation_steps
from weight_conversion import open_checkpoint, sha256_of_file

N_WORDS = 438
CONFIG = TrainingConfig(steps=6, batch_size=16, warmup=2)


@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_the_loss_falls(kind, new_model, tokens):
    record = train(new_model(kind), tokens, replace(CONFIG, steps=16, lr=3e-2), progress=False)
    assert record.losses.shape == (16,)
    assert record.losses[-4:].mean() < 0.8 * record.losses[:4].mean()


@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_the_same_seed_gives_the_same_weights(kind, new_model, tokens):
    first, again, other = new_model(kind), new_model(kind), new_model(kind)
    config = replace(CONFIG, steps=3)
    train(first, tokens, config, progress=False)
    torch.rand(5)
    train(again, tokens, config, progress=False)
    train(other, tokens, replace(config, seed=1), progress=False)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(first.W_E, other.W_E)


@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_training_is_the_plain_loop_to_the_last_bit(kind, new_model, tokens):
    model, plain = new_model(kind), new_model(kind)
    record = train(model, tokens, CONFIG, progress=False)
    matrices = [weight for weight in plain.parameters() if weight.dim() == 2]
    norms = [weight for weight in plain.parameters() if weight.dim() == 1]
    decays = [{"params": matrices, "weight_decay": 0.3}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decays, betas=(0.9, 0.98), fused=True)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(200, generator=generator)
    for step in range(6):
        lr = [0.0015, 0.003][step] if step < 2 else 3e-3 * (1 + math.cos(math.pi * (step - 2) / 4)) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = tokens[order[step * 16 : (step + 1) * 16]]
        if kind == "mdm":
            loss = masked_diffusion_loss(plain, batch, generator=generator)
        else:
            loss = autoregressive_loss(plain, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        assert record.losses[step] == loss.detach()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


def test_global_random_numbers_stay(new_model, tokens):
    before = torch.get_rng_state()
    train(new_model(), tokens, replace(CONFIG, steps=2, warmup=1), progress=False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@pytest.mark.parametrize("training", [False, True])
def test_mode_and_gradients_are_restored(training, new_model, tokens):
    model = new_model()
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


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_training_leaves_nothing_on_the_model_but_its_weights(precision, new_model, tokens):
    """A run on a model just trained is the run on the same weights, read from the folder."""
    model = new_model()
    attributes, modules = set(vars(model)), describe_modules(model)
    train(model, tokens, replace(CONFIG, steps=1, warmup=0, mixed_precision=precision), progress=False)
    assert set(vars(model)) - {"_weight_digests"} == attributes
    assert describe_modules(model) == modules


def test_training_works_where_gradients_are_off(new_model, tokens):
    model = new_model()
    before = model.W_E.clone()
    with torch.no_grad():
        train(model, tokens, CONFIG, progress=False)
        assert not torch.is_grad_enabled()
    assert not torch.equal(model.W_E, before)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_norms_do_not_decay(new_model, tokens):
    model = new_model()

    def indifferent(model, batch, generator):
        return 0 * model(batch).sum()

    norm, matrix = model.ln_final.w.clone(), model.W_U.clone()
    train(model, tokens, CONFIG, objective=indifferent, progress=False)
    assert torch.equal(model.ln_final.w, norm)
    assert model.W_U.norm() < matrix.norm()


def test_a_pass_sees_every_row_once():
    order = RowOrder(10, torch.Generator().manual_seed(0))
    seen = torch.cat([order.take(4) for _ in range(5)])
    assert sorted(seen[:10].tolist()) == sorted(seen[10:].tolist()) == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()


def test_a_record_comes_back_from_its_file(new_model, tokens, tmp_path):
    record = train(
        new_model(), tokens, CONFIG, evaluate=lambda model: {"recall": 1 / 3}, evaluate_every=4, progress=False
    )
    again = TrainingRecord.load(record.save(tmp_path / "record.safetensors"))
    assert (again.config, again.record, again.evaluations) == (record.config, record.record, record.evaluations)
    assert again.evaluations == tuple({"step": step, "recall": 1 / 3} for step in (4, 6))
    assert torch.equal(again.losses, record.losses)


@pytest.mark.parametrize(
    ("named", "steps"), [([1, 3], [1, 3, 6]), ((6,), [6]), ({5, 2}, [2, 5, 6]), ((), [6]), (9, [6]), (4, [4, 6])]
)
def test_a_model_is_evaluated_after_the_steps_that_are_named(new_model, tokens, named, steps):
    options = dict(evaluate=lambda model: {"recall": 1.0}, evaluate_every=named, progress=False)
    assert [each["step"] for each in train(new_model(), tokens, CONFIG, **options).evaluations] == steps


@pytest.mark.parametrize(
    ("named", "entry"),
    [([1.5], "1.5"), ((9,), "9"), ("ab", "'a'"), ([0, 1], "0"), ([-1], "-1"), ([True], "True"), ([None], "None")],
)
def test_steps_that_a_training_does_not_have_are_refused(named, entry):
    with pytest.raises(ValueError, match=f"evaluate_every contains {entry}; give whole numbers from 1 to 6"):
        evaluation_steps(named, 6)


def test_such_steps_are_refused_before_the_first_step(new_model, tokens):
    model = new_model()
    with pytest.raises(ValueError, match="evaluate_every contains 7"):
        train(model, tokens, CONFIG, evaluate_every=(1, 7), progress=False)
    assert all(map(torch.equal, model.parameters(), new_model().parameters()))


def test_the_bundled_models_are_written_with_their_files(tmp_path, monkeypatch):
    recall = [{"trained": "p2d", "asked": "d2p", "accuracy": 0.25}]  # what is measured is tested on the shipped models
    monkeypatch.setattr(tiny_pair, "measure", lambda model, facts: recall)
    (tmp_path / "README.md").write_text("stays")
    tiny_pair.make_pair(tmp_path, steps={"mdm": 1, "ar": 1}, progress=False)
    weights = {"tiny-mdm.safetensors", "tiny-ar.safetensors"}
    beside = {"lit_config.json", "tokenizer.json", "tokenizer_config.json", "results.json", "README.md"}
    assert {file.name for file in tmp_path.iterdir()} == weights | beside
    results = json.loads((tmp_path / "results.json").read_text())
    for kind in ("mdm", "ar"):
        path = tmp_path / f"tiny-{kind}.safetensors"
        assert results["models"][f"tiny-{kind}"]["sha256"] == sha256_of_file(path)
        assert results["models"][f"tiny-{kind}"]["recall"] == recall
        assert open_checkpoint(path).architecture == tiny_pair.architecture(kind, N_WORDS)
        model = HookedDiffusionTransformer.from_pretrained(path, device="cpu")
        assert model.to_string(model.to_tokens("today Ada is the brave pilot.")[0]) == "today Ada is the brave pilot."
