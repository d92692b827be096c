"""Scaled rotary frequencies: read from both forms of a config, there and back, and refused if a number does not fit."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.records.results import provenance
from weight_conversion import Architecture, RotaryScaling, export, open_checkpoint
from weight_conversion.registry import recognise

NUMBERS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SCALED = {"rope_type": "llama3", **NUMBERS}
TOKENS = torch.arange(120).reshape(2, 60)
FAMILIES = ("llama", "qwen2", "qwen3", "dream", "a2d-llama", "a2d-qwen2", "a2d-qwen3")


def read(config):
    return recognise(config, {}, "a config").read_architecture(config, {})


def changed(**changes):
    """The scaling of a config with some keys replaced, or left out where the value is `...`."""
    return {key: value for key, value in {**SCALED, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    "changes",
    [
        dict(rope_scaling=SCALED),
        dict(rope_scaling=changed(rope_type=..., type="llama3")),
        dict(rope_scaling=changed(factor=8)),
        dict(rope_scaling={**SCALED, "rope_theta": 1e4}),
        dict(rope_parameters={**SCALED, "rope_theta": 1e4}, rope_theta=None),
        dict(rope_parameters={**SCALED, "rope_theta": 1e4}, rope_scaling=None),
        dict(rope_parameters=SCALED, rope_scaling=SCALED),
    ],
)
def test_the_scaling_is_read_from_either_key(changes, configs):
    config = {
        key: value for key, value in {**configs["llama"], **changes}.items() if (key, value) != ("rope_theta", None)
    }
    found = read(config)
    assert found.rotary_scaling == RotaryScaling(**NUMBERS)
    assert found == replace(read(configs["llama"]), rotary_scaling=RotaryScaling(**NUMBERS))


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_in_the_familys_format_and_our_own(name, configs, specimen, tmp_path):
    model = specimen({**configs[name], "rope_scaling": SCALED}).model
    architecture = model.cfg.architecture
    assert architecture.rotary_scaling == RotaryScaling(**NUMBERS)
    for family in (architecture.family, "diffusion_lens"):
        path = export(model.state_dict(), architecture, tmp_path / family / "model.safetensors", family)
        again = HookedDiffusionTransformer.from_pretrained(path, device="cpu")
        assert again.cfg.architecture == replace(architecture, family=again.cfg.family)
        assert torch.equal(again(TOKENS), model(TOKENS))
    saved = HookedDiffusionTransformer.from_pretrained(model.save_pretrained(tmp_path / "saved"), device="cpu")
    assert saved.cfg.architecture == architecture


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_hugging_face_reads_what_is_exported(name, configs, specimen, tmp_path):
    model = specimen({**configs[name], "rope_scaling": SCALED}).model
    path = export(model.state_dict(), model.cfg.architecture, tmp_path / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent).eval()
    assert torch.equal(theirs.model.rotary_emb.inv_freq, model.positions.frequencies)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)


def test_only_scaled_models_name_the_scaling_in_records_and_formats(configs, specimen):
    plain, scaled = specimen(configs["llama"]).model, specimen({**configs["llama"], "rope_scaling": SCALED}).model
    assert "rotary_scaling" not in provenance(plain, plain.cfg)["architecture"]
    recorded = json.loads(json.dumps(provenance(scaled, scaled.cfg)["architecture"]))
    assert recorded["rotary_scaling"] == NUMBERS
    assert Architecture.from_dict(recorded) == scaled.cfg.architecture
    assert Architecture.from_dict(plain.cfg.architecture.to_dict()) == plain.cfg.architecture


@pytest.mark.parametrize("family", ["llada", "lit_gpt"])
def test_a_format_without_scaling_is_refused(family, specimen, configs, tmp_path):
    model = specimen(configs["llada"]).model
    architecture = replace(model.cfg.architecture, rotary_scaling=RotaryScaling(**NUMBERS))
    with pytest.raises(ValueError, match=rf"{family} format cannot express .*rotary_scaling={{'factor': 8.0"):
        export(model.state_dict(), architecture, tmp_path / "model.safetensors", family)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        (changed(factor=...), "rope_scaling lacks ['factor']; add them"),
        (changed(original_max_position_embeddings=...), "lacks ['original_max_position_embeddings']"),
        (changed(attention_factor=1.0), "rope_scaling has keys that are not understood: ['attention_factor']"),
        *((changed(factor=wrong), f"factor is {wrong!r}") for wrong in (0.5, 0, -8.0, True, "8", None, float("nan"))),
        *((changed(low_freq_factor=wrong), f"low_freq_factor is {wrong!r}") for wrong in (0, -1.0, None, float("inf"))),
        *((changed(high_freq_factor=wrong), f"high_freq_factor is {wrong!r}") for wrong in (1.0, 0.5, 10**400, "4")),
        *(
            (changed(original_max_position_embeddings=wrong), f"original_max_position_embeddings is {wrong!r}")
            for wrong in (0, 32.0, True, None)
        ),
        *(
            ({**SCALED, "rope_type": kind}, f"rope_scaling says {kind!r}: of the scaled rotary frequencies only")
            for kind in ("linear", "dynamic", "longrope", "proportional", None, ["llama3"])
        ),
        ("llama3", "rope_scaling says 'llama3'"),
        (changed(rope_type="default"), "not understood: ['factor', 'high_freq_factor'"),
        (changed(rope_theta=77.0), "several bases"),
    ],
)
def test_a_scaling_that_does_not_fit_is_refused(scaling, words, configs, refused):
    refused(ValueError, words, do=lambda: read({**configs["llama"], "rope_scaling": scaling}))


@pytest.mark.parametrize("parameters", [changed(factor=4.0), {"rope_type": "default"}, {"rope_theta": 1e4}])
def test_two_scalings_in_one_config_are_refused(parameters, configs, refused):
    config = {**configs["llama"], "rope_scaling": SCALED, "rope_parameters": parameters}
    refused(ValueError, "rope_parameters and rope_scaling differ in the scaling", do=lambda: read(config))


def test_an_architecture_takes_a_scaling_of_rotary_positions(configs, refused):
    architecture = read({**configs["llama"], "rope_scaling": SCALED})
    facts = architecture.to_dict()
    for wrong, words in [
        ({**NUMBERS, "factor": 0.5}, "factor is 0.5"),
        ({"factor": 8.0}, "rotary_scaling lacks"),
        (8.0, "rotary_scaling is 8.0; it must be a mapping"),
    ]:
        refused(ValueError, words, do=lambda wrong=wrong: Architecture.from_dict({**facts, "rotary_scaling": wrong}))
    refused(ValueError, "must be a RotaryScaling", do=lambda: replace(architecture, rotary_scaling=NUMBERS))
    learned = dict(positional_embedding_type="standard")
    refused(ValueError, "rotary_scaling needs rotary positions", do=lambda: replace(architecture, **learned))


def test_a_checkpoint_of_scaled_frequencies_lacks_no_tensor(configs, specimen, tmp_path, refused):
    """The names that our format knows do not depend on the scaling."""
    model = specimen({**configs["llama"], "rope_scaling": SCALED}).model
    folder = model.save_pretrained(tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    config["architecture"]["qkv_bias"] = False
    refused(ValueError, "unknown", "attn.k.bias", path=folder, config=config)
    assert open_checkpoint(folder).architecture == model.cfg.architecture
