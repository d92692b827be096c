"""Configs that are refused: unknown keys, values that do not fit, another checkpoint's, none at all."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from weight_conversion import published_architecture
from weight_conversion.registry import recognise

MDM = Path(__file__).parents[1] / "golden" / "lit_gpt" / "gqa" / "mdm"
CONFIG = json.loads((MDM / "lit_config.json").read_text())
PASS_THE_CONFIG = "Pass the config that belongs to this checkpoint"


@pytest.fixture
def folder(tmp_path):
    """A good checkpoint with its config, to be spoilt."""
    for name in ("model.safetensors", "lit_config.json"):
        shutil.copy(MDM / name, tmp_path / name)
    return tmp_path


def spoilt(**changes):
    return {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}


@pytest.mark.parametrize("given", ["mapping", "path", "beside"])
def test_an_unknown_config_key(folder, given, refused):
    config, path = spoilt(sliding_window=64), folder / "model.safetensors"
    beside = folder / ("lit_config.json" if given == "beside" else "other.json")
    beside.write_text(json.dumps(config))
    source = {"mapping": "the mapping that was passed", "path": beside, "beside": beside}[given]
    refused(
        ValueError,
        "not understood: ['sliding_window']",
        "only if they change nothing",
        f"[config: {source}]",
        path=path,
        config={"mapping": config, "path": beside, "beside": None}[given],
    )


@pytest.mark.parametrize(
    ("key", "value", "cure"),
    [
        ("rotary_percentage", 0.25, "must be 1.0"),
        ("parallel_residual", True, "must be False"),
        ("bias", True, "must be False"),
        ("shared_attention_norm", True, "must be False"),
        ("_norm_class", "LayerNorm", "must be 'FusedRMSNorm'"),
        ("_mlp_class", "GptNeoxMLP", "must be 'LLaMAMLP'"),
        ("condense_ratio", 2, "must be 1"),
        ("n_layer", "3", "whole number"),
        ("n_layer", 0, "whole number"),
        ("n_head", 0, "whole number"),
        ("n_embd", 64.5, "whole number"),
        ("block_size", None, "whole number"),
        ("n_query_groups", -1, "whole number"),
        ("n_query_groups", 3, "multiple of n_key_value_heads"),
        ("n_head", 5, "not a multiple of n_head 5"),
    ],
)
def test_a_config_value_that_does_not_fit(key, value, cure, refused):
    culprit = str(value) if "multiple" in cure else f"{key}={value!r}"
    refused(ValueError, culprit, cure, path=MDM / "model.safetensors", config=spoilt(**{key: value}))


@pytest.mark.parametrize("key", ["n_layer", "n_head", "n_embd", "intermediate_size", "block_size"])
def test_a_config_that_lacks_a_key(key, refused):
    refused(ValueError, f"lacks ['{key}']", "add", path=MDM / "model.safetensors", config=spoilt(**{key: ...}))


def test_a_config_that_lacks_the_vocabulary(refused):
    config = spoilt(vocab_size=..., padded_vocab_size=...)
    refused(ValueError, "'padded_vocab_size' (or 'vocab_size')", path=MDM / "model.safetensors", config=config)


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"n_layer": 2}, "unknown transformer.h.2."),
        ({"n_layer": 4}, "missing transformer.h.3."),
        ({"n_query_groups": 4}, "transformer.h.0.attn.attn.weight is [128, 64], expected [192, 64]"),
        ({"intermediate_size": 128}, "transformer.h.0.mlp.swiglu.w1.weight is [160, 64], expected [128, 64]"),
        ({"padded_vocab_size": 500}, "lm_head.weight is [512, 64], expected [500, 64]"),
    ],
)
def test_the_config_of_another_checkpoint(changes, culprit, refused):
    refused(ValueError, culprit, PASS_THE_CONFIG, path=MDM / "model.safetensors", config=spoilt(**changes))


def test_a_size_that_was_never_published(tmp_path, refused):
    shutil.copy(MDM / "model.safetensors", tmp_path / "model.safetensors")
    refused(
        ValueError,
        "no published size has 3 layers with an MLP of [160, 64]",
        "pass config='lit_config.json'",
        path=tmp_path / "model.safetensors",
    )


def test_a_published_size_that_does_not_exist(refused):
    message = refused(ValueError, "'1029M' is not a published size", do=lambda: published_architecture("1029M", "mdm"))
    assert "1028M" in message.split("nearest are")[1]


def test_no_family(tmp_path, refused, write):
    path = write({"model.layers.0.mlp.weight": torch.zeros(2), "gpt.wte": torch.zeros(2)}, tmp_path)
    words = ("no known family", "lit_gpt, llada", "['gpt.wte', 'model.layers.0.mlp.weight']")
    refused(ValueError, path, *words, "converted to one of these first", path=path)


def test_our_own_folder_without_its_config(either, tmp_path, refused):
    folder = either.model.save_pretrained(tmp_path / "saved")
    (folder / "config.json").unlink()
    refused(ValueError, folder, "no known family", "need their config.json", path=folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: c["architecture"].update(colour=1),
            ["the architecture has keys that are not understood: ['colour']"],
        ),
        (lambda c: c["architecture"].pop("d_head"), ["lacks ['d_head']"]),
        (lambda c: c["architecture"].update(d_head=5), ["d_head is 5", "must be even"]),
        (lambda c: c["architecture"].update(n_layers="3"), ["n_layers is '3'", "whole number"]),
        (lambda c: c["architecture"].update(mask_token_id=10**6), ["mask_token_id 1000000 has no row"]),
        (lambda c: c["architecture"].update(readout="sideways"), ["readout is 'sideways'", "in_place, shifted"]),
        (lambda c: c["architecture"].update(attention_dir="up"), ["attention_dir is 'up'", "bidirectional, causal"]),
        (lambda c: c["architecture"].update(rotary_dtype="int8"), ["rotary_dtype is 'int8'", "float32, bfloat16"]),
        (lambda c: c.update(architecture=[]), ["'architecture'", "save it again"]),
        (lambda c: c.pop("architecture"), ["'architecture'", "save it again"]),
    ],
)
def test_damaged_configs_of_our_own_format(either, tmp_path, change, words, refused):
    folder = either.model.save_pretrained(tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    refused(ValueError, *words, folder / "config.json", path=folder)


@pytest.mark.parametrize("content", [b"{'single': 1}", b'{"cut": ', b"\xff\xfe\x00"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_config_that_is_no_json(folder, content, beside, refused):
    path = folder / ("lit_config.json" if beside else "other.json")
    path.write_bytes(content)
    refused(ValueError, f"{path} is not valid JSON", path=folder / "model.safetensors", config=None if beside else path)


def test_a_config_that_is_no_object(folder, refused):
    path = folder / "lit_config.json"
    path.write_text("[1, 2]")
    refused(ValueError, path, "one JSON object", path=folder)


def test_a_config_that_is_not_there(folder, refused):
    refused(FileNotFoundError, folder / "no.json", "pass the path", path=folder, config=folder / "no.json")


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3", "Qwen3BlockDiffusionForCausalLM"),
        ("qwen3", "WeDLMForCausalLM"),
        ("qwen3", "Qwen3ForMaskedLM"),
        ("llama", "LlamaForDiffusionLM"),
        ("qwen2", "TraDoForCausalLM"),
    ],
)
def test_a_diffusion_class_with_a_causal_model_type_is_refused(model_type, name, configs):
    config = {
        **next(config for config in configs.values() if config["model_type"] == model_type),
        "architectures": [name],
    }
    with pytest.raises(
        ValueError, match=f"a diffusion model under a causal model's config .its config says architectures=.*{name}"
    ):
        recognise(config, {}, "the config")
