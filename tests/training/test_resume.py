"""A run that is interrupted, and goes on: the same bits as one that never stopped."""

import signal
from dataclasses import replace

import pytest
import torch
from processes import Stuck, forked

from diffusion_lens.training import TrainingConfig, finetune, train
from weight_conversion import sha256_of_file

CONFIG = TrainingConfig(steps=8, batch_size=16, warmup=3)

LONG = replace(CONFIG, steps=24)


def weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, weight in left.items():
        assert torch.equal(weight, right[name]), name


def test_the_training_of_a_killed_process_resumes(new_model, toy, tmp_path):
    checkpoint = tmp_path / "killed" / "training" / "checkpoint.safetensors"
    model, stuck = new_model(), Stuck()

    def train_until_killed():
        every = dict(checkpoint_every=7, evaluate=lambda model: stuck.wait_forever(), evaluate_every=9)
        finetune(model, toy.facts()[:90], LONG, tmp_path / "killed", **every, progress=False)

    with forked(train_until_killed) as child:
        assert stuck.reached()
    assert child.exitcode == -signal.SIGKILL
    assert checkpoint.exists()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    whole = finetune(new_model(), toy.facts()[:90], LONG, tmp_path / "whole", progress=False)
    resumed = finetune(new_model(), toy.facts()[:90], LONG, tmp_path / "killed", progress=False)
    (begun, gone_on) = resumed.record["starts"]
    assert begun["step"] == 0
    assert gone_on["step"] == 7
    assert torch.equal(resumed.losses, whole.losses)
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "killed")]
    assert sha256_of_file(files[0]) == sha256_of_file(files[1])
    assert {file.name for file in checkpoint.parent.iterdir()} == {"run.json", "record.safetensors"}


class Stop(Exception):
    pass


@pytest.mark.parametrize(("kind", "precision"), [("mdm", "bf16"), ("ar", "no")])
def test_a_stopped_training_gives_the_same_weights(kind, precision, new_model, tokens, tmp_path):
    config = replace(CONFIG, accumulate=2, mixed_precision=precision)
    calls = []

    def norm(model):
        return {"norm": model.W_U.norm().item()}

    def stopping_norm(model):
        calls.append(model)
        if len(calls) in (2, 4, 5, 9):
            raise Stop
        return norm(model)

    whole = new_model(kind)
    never_stopped = train(whole, tokens, config, evaluate=norm, evaluate_every=1, progress=False)
    n_stops = 0
    while True:
        model = new_model(kind)
        try:
            every = dict(checkpoint_every=2, evaluate_every=1)
            record = train(model, tokens, config, folder=tmp_path, evaluate=stopping_norm, **every, progress=False)
            break
        except Stop:
            n_stops += 1
            assert all(weight.grad is None for weight in model.parameters())
            assert not model.training
            assert "forward" not in vars(model)
    assert n_stops == 4
    assert torch.equal(record.losses, never_stopped.losses)
    assert record.evaluations == never_stopped.evaluations
    assert_same(weights(model), weights(whole))


@pytest.mark.parametrize("noise", ["uniform", "conditioned"])
def test_fine_tuning_under_other_noise_lowers_the_loss_and_resumes(noise, tokens, tokenizer, tmp_path):
    from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
    from weight_conversion import Architecture, NoiseSchedule, TimeConditioning

    n = len(tokenizer) + (noise == "conditioned")
    sizes = dict(n_layers=1, d_model=16, n_heads=4, n_key_value_heads=4, d_head=4, d_mlp=24, n_ctx=64)
    architecture = Architecture(
        family="diffusion_lens",
        name=noise,
        **sizes,
        d_vocab=n,
        d_vocab_out=n,
        attention_dir="bidirectional",
        readout="in_place",
        mask_token_id=None if noise == "uniform" else n - 1,
        head="logits" if noise == "uniform" else "subs",
        norm="layer",
        mlp="plain",
        act_fn="gelu_new",
        time=TimeConditioning(8, conditioned=True),
        schedule=NoiseSchedule(),
    )

    def make():
        cfg = DiffusionConfig.from_architecture(architecture, device="cpu", default_prepend_bos=False)
        return HookedDiffusionTransformer(cfg, tokenizer, seed=1)

    def loss(model):
        with torch.no_grad():
            return float(model(tokens[:64], return_type="loss"))

    config, calls = replace(CONFIG, steps=24, lr=0.01), []

    def stop_once(model):
        calls.append(model)
        if len(calls) == 3:
            raise Stop
        return {}

    whole = make()
    before = loss(whole)
    train(whole, tokens, config, progress=False)
    assert loss(whole) < 0.95 * before
    every = dict(checkpoint_every=4, evaluate_every=5, progress=False)
    with pytest.raises(Stop):
        train(make(), tokens, config, folder=tmp_path, evaluate=stop_once, **every)
    resumed = make()
    train(resumed, tokens, config, folder=tmp_path, evaluate=stop_once, **every)
    assert_same(weights(resumed), weights(whole))


def test_a_complete_training_is_read_not_repeated(new_model, toy, tmp_path):
    model, again = new_model("ar"), new_model("ar")
    first = finetune(model, toy.facts()[:20], CONFIG, tmp_path, progress=False)
    stamp = (tmp_path / "model.safetensors").stat().st_mtime_ns
    second = finetune(again, toy.facts()[:20], CONFIG, tmp_path, progress=False)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == stamp
    assert (second.config, second.record) == (first.config, first.record)
    assert torch.equal(second.losses, first.losses)
    assert_same(weights(again), weights(model))


def test_files_of_a_killed_writer_are_deleted(new_model, tokens, tmp_path):
    train(new_model(), tokens, replace(CONFIG, steps=2), folder=tmp_path, progress=False)
    (tmp_path / ".checkpoint.safetensors.abc.part").write_bytes(b"half")
    train(new_model(), tokens, replace(CONFIG, steps=2), folder=tmp_path, progress=False)
    assert {file.name for file in tmp_path.iterdir()} == {"run.json", "checkpoint.safetensors"}


def test_another_training_is_refused(new_model, tokens, tmp_path):
    train(new_model(), tokens, CONFIG, folder=tmp_path, progress=False)
    calls = {
        r"config\.lr: 0\.003 there, 0\.1 here": dict(config=replace(CONFIG, lr=0.1)),
        "data_sha256: .* there": dict(tokens=tokens.flip(0)),
        "weights_sha256: .* there": dict(model=train_a_little(new_model(), tokens)),
        "objective: 'own' there, .*": dict(objective=lambda model, batch, generator: model(batch).mean()),
    }
    for message, changed in calls.items():
        call = dict(model=new_model(), tokens=tokens, config=CONFIG, folder=tmp_path, progress=False) | changed
        with pytest.raises(ValueError, match=f"was made with other settings.*{message}"):
            train(**call)


def train_a_little(model, tokens):
    train(model, tokens, replace(CONFIG, steps=1), progress=False)
    return model


def test_a_training_resumes_under_other_versions(new_model, tokens, tmp_path):
    first = train(new_model(), tokens, CONFIG, folder=tmp_path, progress=False)
    run = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(run.replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    assert torch.equal(train(new_model(), tokens, CONFIG, folder=tmp_path, progress=False).losses, first.losses)
