"""Parts, processes and precisions: what may change a number, and what may not."""

import os
import socket
from dataclasses import replace

import pytest
import torch
from processes import forked
from safetensors.torch import load_file

from diffusion_lens.training import TrainingConfig, TrainingRecord, finetune, train
from diffusion_lens.training.trainer import TrainingRows

CONFIG = TrainingConfig(steps=4, batch_size=15, warmup=2)


@pytest.fixture
def ragged(tokens):
    """Rows of their own lengths: the end token (0) and all before it."""
    return TrainingRows(tokens, (tokens != 0).sum(dim=1) + 1)


@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_the_losses_of_parts_sum_to_the_loss_of_the_whole(kind, new_model, ragged):
    model = new_model(kind)
    batch = ragged.pick(torch.arange(7), "cpu").question(model, torch.Generator().manual_seed(0))
    whole = batch.loss(model(batch.tokens, logits_at=batch.rows))
    whole.backward()
    gradient = model.W_E.grad.clone()
    model.zero_grad()
    losses = []
    for start, stop in ((0, 1), (1, 4), (4, 7)):
        part = batch.part(start, stop)
        losses.append(part.loss(model(part.tokens, logits_at=part.rows)))
        losses[-1].backward()
    torch.testing.assert_close(sum(losses), whole)
    torch.testing.assert_close(model.W_E.grad, gradient)
    model.zero_grad()


@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_accumulated_parts_train_as_the_whole_batch(kind, new_model, ragged):
    whole = new_model(kind)
    record = train(whole, ragged, CONFIG, progress=False)
    model = new_model(kind)
    parts = train(model, ragged, replace(CONFIG, accumulate=4), progress=False)  # of 4, 4, 4 and 3 rows
    torch.testing.assert_close(parts.losses, record.losses)
    assert_close(model.state_dict(), whole.state_dict())


def assert_close(weights, expected):
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=2e-5, msg=name)


def test_two_processes_train_as_one(new_model, toy, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    kinds = ("mdm", "ar")

    def train_as(rank):
        os.environ.update(world, RANK=rank, LOCAL_RANK=rank)
        config = replace(CONFIG, accumulate=2)
        for kind in kinds:
            record = finetune(new_model(kind), toy.facts()[:40], config, tmp_path / "two" / kind, progress=False)
            assert record.record["processes"] == 2, record.record
        torch.distributed.destroy_process_group()

    with forked(lambda: train_as("0")) as first, forked(lambda: train_as("1")) as second:
        for kind in kinds:
            finetune(new_model(kind), toy.facts()[:40], CONFIG, tmp_path / "one" / kind, progress=False)
        for child in (first, second):
            child.join(timeout=100)
    assert (first.exitcode, second.exitcode) == (0, 0)
    for kind in kinds:
        one, two = (load_file(tmp_path / folder / kind / "model.safetensors") for folder in ("one", "two"))
        assert_close(two, one)
        records = [tmp_path / folder / kind / "training" / "record.safetensors" for folder in ("two", "one")]
        torch.testing.assert_close(*[TrainingRecord.load(record).losses for record in records])


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_bfloat16_computes_in_bfloat16_on_float32_weights(new_model, tokens):
    plain, half = new_model(), new_model()
    dtypes, evaluations = set(), []
    half.blocks[0].mlp.hook_post.add_hook(lambda value, hook: dtypes.add(value.dtype))

    def evaluate(model):
        dtypes.clear()
        evaluations.append((model(tokens[:2]).dtype, set(dtypes), model.training, torch.is_grad_enabled()))
        return {}

    config = replace(CONFIG, mixed_precision="bf16")
    record = train(half, tokens, config, evaluate=evaluate, evaluate_every=3, progress=False)
    assert evaluations == [(torch.float32, {torch.float32}, False, False)] * 2
    half.reset_hooks()
    exact = train(plain, tokens, CONFIG, progress=False)
    assert record.losses.isfinite().all()
    assert not torch.equal(record.losses, exact.losses)
    torch.testing.assert_close(record.losses, exact.losses, rtol=0.02, atol=0)
    assert all(weight.dtype == torch.float32 for weight in half.parameters())
    assert not {"forward", "_original_forward"} & set(vars(half))


def test_the_network_computes_in_bfloat16_while_it_trains(new_model, tokens):
    model, dtypes = new_model(), []
    model.blocks[0].mlp.hook_post.add_hook(lambda value, hook: dtypes.append(value.dtype))
    train(model, tokens, replace(CONFIG, steps=2, mixed_precision="bf16"), progress=False)
    model.reset_hooks()
    assert dtypes == [torch.bfloat16] * 2


def test_the_state_of_accelerate_is_restored(new_model, tokens):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    mine = Accelerator(cpu=True)
    try:
        for precision in ("bf16", "no"):
            train(new_model(), tokens, replace(CONFIG, steps=1, mixed_precision=precision), progress=False)
        assert mine.mixed_precision == "no"
        assert mine.device.type == "cpu"
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    train(new_model(), tokens, replace(CONFIG, steps=1), progress=False)
    assert not PartialState._shared_state


def test_settings_that_do_not_fit_are_refused(new_model, tokens):
    def mean(model, batch, generator):
        return model(batch).mean()

    with pytest.raises(ValueError, match="cannot be divided into 3 parts: take one process and accumulate=1"):
        train(new_model(), tokens, replace(CONFIG, accumulate=3), objective=mean, progress=False)
    with pytest.raises(ValueError, match="'fp16' needs a GPU; on a CPU use 'no' or 'bf16'"):
        train(new_model(), tokens, replace(CONFIG, mixed_precision="fp16"), progress=False)
    with pytest.raises(ValueError, match=r"those of 'tiny' are torch\.bfloat16: load it with dtype=torch\.float32"):
        train(new_model().to(torch.bfloat16), tokens, replace(CONFIG, mixed_precision="bf16"), progress=False)
    for name in ("checkpoint_every", "evaluate_every"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            train(new_model(), tokens, CONFIG, progress=False, **{name: 0})
