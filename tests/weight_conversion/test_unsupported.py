"""Kinds that are known by sight and refused: nothing loads as another kind than it is."""

import json

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer, load_pair
from weight_conversion import export, open_checkpoint
from weight_conversion.registry import recognise

# What the published configs (and shrunken ones of the authors' own code) say, but for the numbers of the network.
FAST = {"model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 32}
QWEN_MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}
EFFICIENT_DLM = {"model_type": "diff_encoder", "architectures": ["DiffEncoderModel"], "dlm_paradigm": "block_diff"}
BLOCKS, EXPERTS, DIT, EDITS = (
    "a block-diffusion model of another kind",
    "a mixture of experts",
    "a diffusion transformer (DiT)",
    "a model that inserts and deletes tokens",
)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen2", "architectures": ["Fast_dLLM_QwenForCausalLM"]}, [BLOCKS, "['Fast_dLLM_Qwen"]),
        (EFFICIENT_DLM, [BLOCKS, "architectures=['DiffEncoderModel']"]),
        (QWEN_MOE, [EXPERTS, "architectures=['Qwen3MoeForCausalLM']", "router"]),
        ({"model_type": "llada2_moe_veomni", "architectures": ["LLaDA2MoeModelLM"]}, [BLOCKS, "LLaDA2MoeModelLM"]),
        ({"model_type": "llada2_moe", "delete_token_id": 156930}, [EDITS, "delete_token_id=156930"]),
        ({"model_type": "llada2_moe", "_name_or_path": "inclusionAI/LLaDA2.2-flash"}, [EDITS, "its name is"]),
        ({"model_type": "qwen3_moe", "num_experts": 128}, [EXPERTS, "num_experts=128"]),
        ({"model_type": "gidd", "architectures": ["GiddForDiffusionLM"]}, [DIT, "model_type='gidd'", "noise"]),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_the_config_shows_the_kind_of_a_model(config, words, refused):
    refused(ValueError, "owner/name is", *words, "not supported", do=lambda: recognise(config, {}, "owner/name"))


def test_the_tensors_show_the_kind_of_a_model(tmp_path, refused, write):
    moe = {"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}
    refused(ValueError, EXPERTS, "experts.0.up_proj", path=write(moe, tmp_path))


def test_diffullama_does_not_load_as_the_causal_model_of_its_config(configs, tmp_path, refused):
    source = "huggingface.co/diffusionfamily/diffullama"
    words = ("causal model's config", "its name is 'diffullama'", "its attention is bidirectional or by blocks")
    refused(ValueError, *words, do=lambda: recognise(configs["llama"], {}, source))


def test_the_error_of_an_unknown_family_lists_what_was_read(refused):
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    words = ("no known family", "model_type='gpt_neox'", "['GPTNeoXForCausalLM']", "llada")
    refused(ValueError, *words, do=lambda: recognise(config, {}, "x"))


@pytest.mark.parametrize(
    ("config", "name", "owner"),
    [
        ("qwen3", "A2DQwen3LMHeadModel", "a2d-qwen3"),
        ("llama", "LLaDAModelLM", "llada"),
        ("qwen2", "DreamModel", "Dream"),
        ("llama", "Qwen2ForCausalLM", "qwen2"),
        ("llada", "LlamaForCausalLM", "llama"),
    ],
)
def test_a_class_of_another_model_type_is_refused(config, name, owner, configs, refused):
    settings = {**configs[config], "architectures": [name]}
    words = ("contradicts itself", f"model_type={settings['model_type']!r}", f"['{name}']", f"model_type='{owner}'")
    refused(ValueError, *words, do=lambda: recognise(settings, {}, "mine"))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("qwen3", "Qwen3ForCausalLM"),
        ("a2d-qwen3", "A2DQwen3LMHeadModel"),
        ("a2d-qwen3", "Qwen3ForCausalLM"),
        ("llama", "LlamaForCausalLM"),
        ("llada", "LLaDAModelLM"),
        ("dream", "DreamModel"),
    ],
)
def test_a_class_of_its_own_is_accepted(config, name, configs):
    for classes in ([name], name):
        assert recognise({**configs[config], "architectures": classes}, {}, "mine").name in config


@pytest.mark.parametrize("name", ["MyLlamaForCausalLM", "LlamaBiForMNTP", "LlamaForSequenceClassification"])
def test_an_unknown_class_is_warned_of(name, configs, specimen, tmp_path):
    path = tmp_path / "model.safetensors"
    one = specimen(configs["llama"]).model
    export(one.state_dict(), one.cfg.architecture, path)
    config = {**configs["llama"], "architectures": [name]}
    with pytest.warns(UserWarning, match=f"unknown class, '{name}', whose code is not run"):
        assert open_checkpoint(path, config).architecture.family == "llama"
    open_checkpoint(path, config, options={"ignore_config_keys": ["architectures"]})


def test_an_unknown_config_beside_a_checkpoint_is_reported(tmp_path, refused, write):
    path = write({"gpt_neox.embed_in.weight": torch.zeros(2, 2)}, tmp_path)
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("no known family", "model_type='gpt_neox'", "architectures=['GPTNeoXForCausalLM']")
    refused(ValueError, *words, path=path)
    refused(ValueError, words[2], do=lambda: recognise({"architectures": ["GPTNeoXForCausalLM"]}, {}, "x"))
    for given in (path, tmp_path):
        refused(ValueError, *words, do=lambda given=given: HookedDiffusionTransformer.from_pretrained(given))


SDAR = {"model_type": "sdar", "architectures": ["SDARForCausalLM"]}
SEVERAL, I_DLM, RCD = "one of several networks of one model type", "(I-DLM)", "(RCD)"


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize(
    ("config", "source", "words"),
    [
        (SDAR, "checkpoint-500", [SEVERAL, "model_type='sdar'", "I-DLM", "RCD", "pass mode='block'"]),
        ({"model_type": "sdar"}, "out/model.safetensors", [SEVERAL, "does not say how to read it"]),
        (SDAR, "owner/I-DLM-8B", [I_DLM, "its name is 'I-DLM-8B'", "causal"]),
        ({**SDAR, "_name_or_path": "owner/i-dlm-32b"}, "mine", [I_DLM, "owner/i-dlm-32b"]),
        ({**SDAR, "architectures": ["IDLMForCausalLM"]}, "my-sdar", [I_DLM, "['IDLMForCausalLM']"]),
        ({**SDAR, "auto_map": {"AutoModel": "modeling_rcd.SDARModel"}}, "my-sdar", [RCD, "modeling_rcd"]),
        ({**SDAR, "architectures": ["SDARResidualForCausalLM"], "mode": "block"}, "my-sdar", [RCD, "SDARResidual"]),
        (SDAR, "owner/RCD-SDAR-4B", [RCD, "its name is 'RCD-SDAR-4B'", "step before"]),
        ({**SDAR, "mode": "block"}, "residual-context-diffusion-4b", [RCD, "its name is"]),
    ],
)
def test_networks_that_share_a_model_type_are_not_told_by_a_block_size(config, source, words, block_size, refused):
    config = config if block_size is None else {**config, "block_size": block_size}
    refused(ValueError, *words, "wrong numbers", do=lambda: recognise(config, {}, source))


@pytest.mark.parametrize(
    ("config", "source"),
    [
        (SDAR, "huggingface.co/JetLM/SDAR-4B-Chat-b16"),
        ({**SDAR, "_name_or_path": "JetLM/SDAR-1.7B-Chat"}, "checkpoint-500"),
        ({**SDAR, "mode": "block"}, "checkpoint-500"),
        ({**SDAR, "fuse_cross_entropy": True}, "checkpoint-500"),  # a key of the authors' own class
    ],
)
def test_sdar_is_told_by_its_name_its_own_key_or_the_mode(config, source):
    assert recognise(config, {}, source).name == "sdar"


def test_an_unnamed_sdar_is_read_by_blocks_and_in_no_other_mode(configs, specimen, tmp_path, refused):
    model = specimen(configs["sdar"]).model
    folder = tmp_path / "mine"
    path = export(model.state_dict(), model.cfg.architecture, folder / "model.safetensors")
    assert open_checkpoint(path).architecture == model.cfg.architecture  # an export says what it is
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "mode"}))
    load = HookedDiffusionTransformer.from_pretrained
    refused(ValueError, SEVERAL, "mode='block'", do=lambda: load(path, block_size=4, device="cpu"))
    read = load(path, block_size=4, mode="block", device="cpu")
    assert (read.cfg.attention_dir, read.cfg.block_size, read.cfg.architecture.readout) == (
        "block_causal",
        4,
        "in_place",
    )
    for mode in ("ar", "bidirectional"):
        refused(ValueError, f"mode={mode!r}", "'block'", do=lambda mode=mode: load(path, mode=mode, device="cpu"))
    with pytest.raises(ValueError, match="has one mode only"):
        load_pair(folder)
