"""Diffusion transformers: there and back without a bit lost, and configs of which every key is understood."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from weight_conversion import Architecture, NoiseSchedule, TimeConditioning, export, open_checkpoint, tensor_shapes
from weight_conversion.key_map import KeyMap
from weight_conversion.registry import FAMILIES, recognise

NAMES = ("mdlm", "bd3lm", "udlm", "sedd", "sedd-uniform", "radd")
TOKENS = torch.arange(20).reshape(2, 10)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def architecture_of(config):
    return recognise(config, {}, "the config").read_architecture(config, {})


def written(config, folder, **more):
    """A random checkpoint with its config, as its authors would write it: with the buffer of the rotary frequencies."""
    folder.mkdir(exist_ok=True)
    architecture, generator = architecture_of(config), torch.Generator().manual_seed(1)
    ours = {key: 0.2 * torch.randn(shape, generator=generator) for key, shape in tensor_shapes(architecture).items()}
    theirs = dict(KeyMap(FAMILIES[architecture.family].rules, architecture).to_theirs(ours))
    prefix = "backbone." if "model_type" in config else ""
    buffers = {f"{prefix}rotary_emb.inv_freq": torch.ones(4)}
    save_file({**theirs, **buffers, **more}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(config, key, value):
    """A copy with another value at "key" or "section.key"; without the key if the value is `...`."""
    result = copy.deepcopy(config)
    *sections, last = key.split(".")
    inner = result
    for section in sections:
        inner = inner[section]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return result


def test_there_and_back(name, configs, tmp_path):
    folder = written(configs[name], tmp_path / "theirs")
    first = open_checkpoint(folder)
    again = export(dict(first.tensors()), first.architecture, tmp_path / "model.safetensors")
    theirs, back = load_file(folder / "model.safetensors"), load_file(again)
    assert set(theirs) - set(back) == {key for key in theirs if key.endswith("inv_freq")}
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in back.items())
    assert open_checkpoint(again).architecture == first.architecture


def test_through_a_model_and_our_own_format(name, configs, tmp_path):
    from diffusion_lens import HookedDiffusionTransformer

    folder = written(configs[name], tmp_path / "theirs")
    model = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    again = HookedDiffusionTransformer.from_pretrained(model.save_pretrained(tmp_path / "ours"), device="cpu")
    time = {"time": 0.4} if model.cfg.time_conditioning else {}
    assert again.cfg.architecture == model.cfg.architecture
    assert torch.equal(again(TOKENS, **time), model(TOKENS, **time))
    back = load_file(export(again.state_dict(), again.cfg.architecture, tmp_path / "back" / "model.safetensors"))
    theirs = load_file(folder / "model.safetensors")
    exact = model.cfg.time is None or model.cfg.time.conditioned
    for key, tensor in back.items():
        assert_close(tensor, theirs[key], rtol=0 if exact else 2.4e-7, atol=0, msg=key)


def test_the_earlier_name_of_time_conditioning_is_read_and_written(configs):
    architecture = architecture_of(configs["udlm"])
    assert architecture.to_dict()["time"] == {"d_cond": 8, "told": True, "folded": False}  # as files of any version
    assert Architecture.from_dict(architecture.to_dict()) == architecture
    with pytest.warns(DeprecationWarning, match="told= is now called conditioned="):
        earlier = TimeConditioning(8, told=True)
    assert earlier == architecture.time
    with pytest.warns(DeprecationWarning, match="told is now called conditioned"):
        assert earlier.told


def test_what_the_configs_say(configs):
    mdlm, bd3lm, udlm, sedd, uniform, radd = (architecture_of(configs[name]) for name in NAMES)
    assert [a.mask_token_id for a in (mdlm, bd3lm, udlm, sedd, uniform, radd)] == [512, 512, None, 512, None, 512]
    assert [a.noise for a in (udlm, uniform)] == ["uniform", "uniform"]
    assert (mdlm.time, udlm.time) == (TimeConditioning(8, conditioned=False), TimeConditioning(8, conditioned=True))
    assert radd.time is None
    assert (radd.norm_bias, mdlm.norm_bias) == (True, False)
    assert (sedd.head, uniform.head, radd.head) == ("log_scores", "log_scores", "subs")
    assert [a.schedule.kind for a in (mdlm, bd3lm, sedd, uniform)] == [
        "log_linear",
        "linear",
        "log_linear",
        "geometric",
    ]
    assert uniform.schedule == NoiseSchedule("geometric", sigma_min=1e-4, sigma_max=20.0)
    assert (bd3lm.attention_dir, bd3lm.causal_block) == ("block_causal", 4)
    whole = architecture_of(changed(configs["bd3lm"], "block_size", 128))
    assert (whole.attention_dir, whole.causal_block) == ("bidirectional", None)
    named = {**configs["mdlm"], "mask_token_id": 103}
    assert architecture_of(named).mask_token_id == 103
    assert FAMILIES["mdlm"].write_config(architecture_of(named))["mask_token_id"] == 103


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("mdlm", "hidden_dim", ..., ["lacks ['hidden_dim']", "add them"]),
        ("mdlm", "cond_dim", 0, ["cond_dim=0", "whole number"]),
        ("mdlm", "time_conditioning", "yes", ["time_conditioning='yes'", "true or false"]),
        ("mdlm", "n_heads", 5, ["width 32", "5 heads"]),
        ("mdlm", "logit_softcap", 30.0, ["not understood: ['logit_softcap']"]),
        ("bd3lm", "block_size", ..., ["lacks ['block_size']"]),
        ("bd3lm", "causal", True, ["causal=True"]),
        ("udlm", "cfg", True, ["cfg=True", "must be False"]),
        ("sedd", "tokens", ..., ["lacks ['tokens']"]),
        ("sedd", "model.length", True, ["model.length=True", "whole number"]),
        ("sedd", "model.scale_by_sigma", False, ["scale_by_sigma is False", "must be True"]),
        ("sedd-uniform", "model.scale_by_sigma", True, ["scale_by_sigma is True", "must be False"]),
        ("sedd", "graph.type", "roulette", ["graph.type is 'roulette'", "absorb, uniform"]),
        ("sedd", "noise.type", "cosine", ["noise.type is 'cosine'", "loglinear, geometric"]),
        ("sedd-uniform", "noise.sigma_max", ..., ["noise.sigma_max"]),
        ("sedd", "model.depth_scale", 2, ["not understood: ['model.depth_scale']"]),
        ("radd", "model.n_blocks", ..., ["lacks ['model.n_blocks']"]),
        ("radd", "model.width_scale", 2, ["not understood: ['model.width_scale']"]),
    ],
)  # fmt: skip
def test_configs_that_are_refused(name, key, value, words, configs, refused):
    config = changed(configs[name], key, value)
    refused(ValueError, *words, do=lambda: architecture_of(config))


def test_tensors_that_do_not_fit_are_named(configs, tmp_path, refused):
    folder = written(configs["mdlm"], tmp_path / "more", **{"backbone.blocks.0.norm1.bias": torch.zeros(32)})
    refused(ValueError, "unknown backbone.blocks.0.norm1.bias", path=folder)
    folder = written(configs["mdlm"], tmp_path / "one")
    wider = {**configs["mdlm"], "vocab_size": 600}
    refused(ValueError, "backbone.vocab_embed.embedding is [513, 32], expected [600, 32]", path=folder, config=wider)


def test_a_format_that_cannot_express_the_time_is_refused(configs, tmp_path):
    checkpoint = open_checkpoint(written(configs["sedd"], tmp_path / "theirs"))
    with pytest.raises(ValueError, match=r"does not match our layout|cannot express"):
        export(dict(checkpoint.tensors()), checkpoint.architecture, tmp_path / "model.safetensors", family="llada")
