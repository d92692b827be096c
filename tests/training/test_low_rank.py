"""Training of low-rank additions: what it computes, what it changes, and what is left of it."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens.training import TrainingConfig, train
from diffusion_lens.training.distillation import low_rank, trained_row
from weight_conversion.files import SafetensorsFile

CONFIG = TrainingConfig(steps=6, batch_size=8, warmup=2, lr=1e-2, weight_decay=0.1)
RANK, ALPHA = 2, 6.0


def copies(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def trained(model, tokens, config=CONFIG, **settings):
    """The factors after a training."""
    with low_rank(model, RANK, ALPHA, torch.Generator().manual_seed(0)) as factors:
        record = train(model, tokens, config, progress=False, **settings)
        return {name: [part.detach().clone() for part in pair] for name, pair in factors.items()}, record


def test_the_projections_compute_their_weight_with_the_product_added(new_model, tokens):
    model, by_hand = new_model("ar"), new_model("ar")
    with low_rank(model, RANK, ALPHA, torch.Generator().manual_seed(0)) as factors, torch.no_grad():
        assert torch.equal(model(tokens[:3]), by_hand(tokens[:3]))
        for name, (a, b) in factors.items():
            b.normal_(generator=torch.Generator().manual_seed(1))
            by_hand.get_parameter(name).add_(ALPHA / RANK * b @ a)
        assert torch.allclose(model(tokens[:3]), by_hand(tokens[:3]), atol=1e-4)
    assert len(factors) == 7 * model.cfg.n_layers


def test_only_the_additions_are_trained_and_saved(new_model, tokens, tmp_path):
    model = new_model()
    before = copies(model)
    factors, record = trained(model, tokens, folder=tmp_path)
    assert record.losses[-1] < record.losses[0]
    assert all(torch.equal(weight, before[name]) for name, weight in copies(model).items())
    assert all(bool(b.any()) for _, b in factors.values())
    saved = SafetensorsFile(tmp_path / "checkpoint.safetensors").shapes()
    of_additions = [name for name in saved if name.startswith(("weights.", "optimizer."))]
    assert len(of_additions) == 2 * len(factors) * 4  # each with two moments and a count
    assert all(".lora_" in name for name in of_additions)


def test_it_ends_with_the_model_as_it_was_also_after_an_exception(new_model, tokens):
    model = new_model()
    model.embed.weight.requires_grad_(False)
    modules, before = dict(model.named_modules()), copies(model)
    with pytest.raises(ArithmeticError), low_rank(model, RANK, ALPHA, torch.Generator()):
        raise ArithmeticError
    assert dict(model.named_modules()) == modules
    assert copies(model).keys() == before.keys()
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["embed.weight"]


def test_an_interrupted_training_gives_the_same_factors(new_model, tokens, tmp_path):
    whole, _ = trained(new_model(), tokens)
    left = []

    def interrupt(model):
        left.append(model)
        if len(left) == 2:
            raise InterruptedError
        return {}

    every = dict(folder=tmp_path, checkpoint_every=2, evaluate=interrupt, evaluate_every=2)
    with pytest.raises(InterruptedError):
        trained(new_model(), tokens, **every)
    resumed, record = trained(new_model(), tokens, **every)
    assert [start["step"] for start in record.record["starts"]] == [0, 2]
    for name, pair in whole.items():
        assert all(map(torch.equal, pair, resumed[name])), name


def test_a_training_ends_when_its_evaluations_say_so(new_model, tokens, tmp_path):
    def twice(evaluations):
        return len(evaluations) == 2

    every = dict(evaluate=lambda model: {"x": 1.0}, evaluate_every=2, stop=twice, folder=tmp_path, checkpoint_every=2)
    for _ in range(2):  # also one that is resumed
        record = train(new_model(), tokens, replace(CONFIG, steps=20), progress=False, **every)
        assert len(record.losses) == 4
        assert [each["step"] for each in record.evaluations] == [2, 4]


@pytest.mark.parametrize("tied", [False, True])
def test_one_row_of_the_embedding_is_trained_and_nothing_else_of_it(tied, new_model, tokens):
    model, by_hand = (new_model("ar", tied=tied) for _ in range(2))
    mask, before = int(tokens[0, 2]), copies(model)
    with low_rank(model, RANK, ALPHA, torch.Generator().manual_seed(0)), trained_row(model, mask) as embed:
        record = train(model, tokens, CONFIG, progress=False)
        row = embed.row.detach().clone()
        logits = model(tokens[:3]).detach()
    assert len(record.losses) == CONFIG.steps
    assert not torch.equal(row, before["embed.weight"][mask])
    assert all(torch.equal(weight, before[name]) for name, weight in copies(model).items())
    assert dict(model.named_modules()).keys() == dict(by_hand.named_modules()).keys()
    with trained_row(model, mask) as embed, torch.no_grad():
        embed.offset.copy_((row - before["embed.weight"][mask]) / embed.SPEED)
        by_hand.embed.weight[mask] = row
        assert torch.allclose(model(tokens[:3]), by_hand(tokens[:3]), atol=1e-5)
    assert logits.shape == (3, tokens.shape[1], model.cfg.d_vocab_out)
