"""Kinds that are known by sight and refused: nothing loads as another kind than it is."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import save_file

from diffusion_lens import HookedDiffusionTransformer
from weight_conversion import export, open_checkpoint
from weight_conversion.registry import recognise

# What the published configs (and shrunken ones of the authors' own code) say, but for the numbers of the network.
SDAR = {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "block_size": 4, "mask_token_id": 151}
BD3LM = {"model_type": "bd3lm", "architectures": ["BD3LM"], "block_size": 4, "cross_attn": True, "vocab_size": 66}
LLADA_MOE = {
    "model_type": "llada",
    "architectures": ["LLaDAMoEModelLM"],
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "rope_theta": 50000,
    "vocab_size": 140,
}
NEMOTRON = {
    "model_type": "nemotron_labs_diffusion",
    "architectures": ["NemotronLabsDiffusionModel"],
    "dlm_paradigm": "block_diff",
}
MDLM = {"model_type": "mdlm", "architectures": ["MDLM"], "cond_dim": 128, "n_blocks": 12, "time_conditioning": False}
BLOCKS, EXPERTS, DIT = "a block-diffusion model", "a mixture of experts", "a diffusion transformer (DiT)"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SDAR, [BLOCKS, "model_type='sdar'", "never the blocks after them"]),
        ({"model_type": "qwen3", "architectures": ["SDARForCausalLM"]}, [BLOCKS, "['SDARForCausalLM']"]),
        ({"model_type": "a2d-qwen3", "block_size": 32}, [BLOCKS, "block_size=32"]),
        (BD3LM, [BLOCKS, DIT, "model_type='bd3lm'"]),
        (NEMOTRON, [BLOCKS, "model_type='nemotron_labs_diffusion'"]),
        (LLADA_MOE, [EXPERTS, "architectures=['LLaDAMoEModelLM']", "router"]),
        ({**LLADA_MOE, "architectures": None}, [EXPERTS, "num_experts=8"]),
        ({"model_type": "llada2_moe", "num_experts": 256}, [BLOCKS, EXPERTS]),
        ({"model_type": "qwen3_moe", "num_experts": 128}, [EXPERTS, "num_experts=128"]),
        (MDLM, [DIT, "model_type='mdlm'", "LayerNorms"]),
        ({"model_type": "udlm", "architectures": ["UDLM"]}, [DIT]),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_the_config_shows_the_kind_of_a_model(config, words, refused):
    refused(ValueError, "owner/name is", *words, "not supported", do=lambda: recognise(config, {}, "owner/name"))


def test_the_tensors_show_the_kind_of_a_model(tmp_path, refused, write):
    sedd = {"blocks.0.adaLN_modulation.weight": torch.zeros(2, 2), "vocab_embed.embedding": torch.zeros(2, 2)}
    refused(ValueError, DIT, "it contains", path=write(sedd, tmp_path))
    moe = {"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}
    refused(ValueError, EXPERTS, "experts.0.up_proj", path=write(moe, tmp_path))


@pytest.mark.parametrize(
    "name", ["Qwen3-0.6B-diffusion-bd3lm-v0.1", "OPDLM-0.6B", "models--divelab--OPDLM-0.6B/snapshots/0123"]
)
def test_the_name_shows_the_kind_of_a_model_if_its_config_does_not(name, configs, specimen, tmp_path, refused):
    """dllm's block-diffusion models hold the config and the tensors of those that see the whole canvas."""
    folder = a2d(configs, specimen, tmp_path / name)
    for path in (folder, folder / "model.safetensors"):
        refused(ValueError, BLOCKS, "its name is", "another name", '"block_size": null', path=path)
    silent = {key: value for key, value in configs["a2d-qwen3"].items() if key != "block_size"}
    hub = f"huggingface.co/{name.removeprefix('models--').split('/')[0].replace('--', '/')}"
    refused(ValueError, BLOCKS, hub, do=lambda: recognise(silent, {}, hub))
    denied = {**configs["a2d-qwen3"], "block_size": None}
    assert open_checkpoint(folder, denied).architecture.attention_dir == "bidirectional"
    refused(ValueError, BLOCKS, "block_size=4", path=folder, config={**denied, "block_size": 4})


def test_names_further_up_the_path_are_ignored(configs, specimen, tmp_path):
    folder = a2d(configs, specimen, tmp_path / "bd3lm" / "my-mdlm")
    assert open_checkpoint(folder).architecture.family == "qwen3"


def test_diffullama_does_not_load_as_the_causal_model_of_its_config(configs, tmp_path, refused):
    source = "huggingface.co/diffusionfamily/diffullama"
    words = ("causal model's config", "its name is 'diffullama'", "its attention is bidirectional or by blocks")
    refused(ValueError, *words, do=lambda: recognise(configs["llama"], {}, source))


def test_a_model_made_from_a_causal_one_warns_if_nothing_shows_its_kind(configs, specimen, tmp_path):
    folder = a2d(configs, specimen, tmp_path / "mine")
    with pytest.warns(UserWarning, match=r"mine is read as a model that sees its whole canvas.*\"block_size\": null"):
        model = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    again = export(model.state_dict(), model.cfg.architecture, tmp_path / "again" / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in (again, shutil.copytree(folder, tmp_path / "some-mdlm-v0.1")):
            assert HookedDiffusionTransformer.from_pretrained(path, device="cpu").cfg.family == "qwen3"


def test_the_error_of_an_unknown_family_lists_what_was_read(refused):
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    words = ("no known family", "model_type='gpt_neox'", "['GPTNeoXForCausalLM']", "llada")
    refused(ValueError, *words, do=lambda: recognise(config, {}, "x"))


@pytest.mark.parametrize("passed", ["path", "mapping named in it"])
def test_a_passed_config_shows_the_kind_by_its_own_path(passed, configs, specimen, tmp_path, refused):
    folder = a2d(configs, specimen, tmp_path / "Qwen3-bd3lm")
    (weights := folder / "weights").mkdir()
    (folder / "model.safetensors").rename(weights / "model.safetensors")
    config = folder / "config.json"
    if passed != "path":
        config = {**json.loads(config.read_text()), "_name_or_path": "dllm/Qwen3-bd3lm"}
    load = HookedDiffusionTransformer.from_pretrained
    path = weights / "model.safetensors"
    refused(ValueError, BLOCKS, "its name is", "bd3lm", do=lambda: load(path, config=config, device="cpu"))


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"block_size": 4}, "block_size=4"),
        ({"architectures": "SDARForCausalLM"}, "architectures='SDARForCausalLM'"),
        ({"auto_map": {"AutoModel": "modeling_sdar.SDARForCausalLM"}}, "auto_map="),
    ],
)
def test_a_passed_config_shows_the_kind_as_one_beside_the_checkpoint_does(
    as_mapping, settings, shown, configs, specimen, tmp_path, refused
):
    folder = a2d(configs, specimen, tmp_path / "mine")
    config = {**json.loads((folder / "config.json").read_text()), **settings}
    (path := tmp_path / "passed.json").write_text(json.dumps(config))
    load = HookedDiffusionTransformer.from_pretrained
    passed = config if as_mapping else path
    refused(ValueError, BLOCKS, shown, do=lambda: load(folder, config=passed, device="cpu"))
    shutil.copy(path, folder / "config.json")
    refused(ValueError, BLOCKS, shown, do=lambda: load(folder, device="cpu"))


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_passed_config_does_not_hide_the_kind_that_the_one_beside_shows(
    as_mapping, configs, specimen, tmp_path, refused
):
    folder = a2d(configs, specimen, tmp_path / "mine")
    silent = json.loads((folder / "config.json").read_text())
    (path := tmp_path / "passed.json").write_text(json.dumps(silent))
    (folder / "config.json").write_text(json.dumps({**silent, "block_size": 4}))
    words = (BLOCKS, "config.json beside it says block_size=4", 'the config that you pass say "block_size": null')
    load = HookedDiffusionTransformer.from_pretrained
    passed = silent if as_mapping else path
    refused(ValueError, *words, do=lambda: load(folder, config=passed, device="cpu"))
    denied = {**silent, "block_size": None}
    assert load(folder, config=denied, device="cpu").cfg.attention_dir == "bidirectional"
    (folder / "config.json").write_text("{")  # one that cannot be read is why another is passed
    assert load(folder, config=denied, device="cpu").cfg.attention_dir == "bidirectional"


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_passed_config_that_shows_no_kind_warns(as_mapping, configs, specimen, tmp_path):
    folder = a2d(configs, specimen, tmp_path / "mine")
    config = folder / "config.json"
    with pytest.warns(UserWarning, match="mine is read as a model that sees its whole canvas"):
        HookedDiffusionTransformer.from_pretrained(
            folder, config=json.loads(config.read_text()) if as_mapping else config, device="cpu"
        )


def test_only_the_name_of_the_folder_itself_counts(configs, specimen, tmp_path, refused, monkeypatch):
    """From inside a folder, and through a link, a checkpoint is the same one."""
    folder = a2d(configs, specimen, tmp_path / "Qwen3-bd3lm")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "mine").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "mine" / name).symlink_to(folder / name)
    monkeypatch.chdir(folder)
    for path in (".", "model.safetensors", "./", tmp_path / "link", "../link/model.safetensors"):
        load = lambda path=path: HookedDiffusionTransformer.from_pretrained(path, device="cpu")  # noqa: E731
        refused(ValueError, BLOCKS, "its name is 'Qwen3-bd3lm'", do=load)
    refused(ValueError, BLOCKS, path=tmp_path / "mine" / "model.safetensors")


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
        ("llama", "MyLlamaForCausalLM"),
        ("llama", "LlamaForSequenceClassification"),
        ("llada", "LLaDAModelLM"),
        ("dream", "DreamModel"),
    ],
)
def test_a_class_of_its_own_or_of_no_family_is_accepted(config, name, configs):
    for classes in ([name], name):
        assert recognise({**configs[config], "architectures": classes}, {}, "mine").name in config


def test_an_unknown_config_beside_a_checkpoint_is_reported(tmp_path, refused, write):
    path = write({"gpt_neox.embed_in.weight": torch.zeros(2, 2)}, tmp_path)
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("no known family", "model_type='gpt_neox'", "architectures=['GPTNeoXForCausalLM']")
    refused(ValueError, *words, path=path)
    refused(ValueError, words[2], do=lambda: recognise({"architectures": ["GPTNeoXForCausalLM"]}, {}, "x"))
    for given in (path, tmp_path):
        refused(ValueError, *words, do=lambda given=given: HookedDiffusionTransformer.from_pretrained(given))


def a2d(configs, specimen, folder):
    """A model made from Qwen3, as dllm publishes it."""
    from weight_conversion.key_map import KeyMap
    from weight_conversion.registry import FAMILIES

    model = specimen(configs["a2d-qwen3"]).model
    rules = KeyMap(FAMILIES["qwen3"].rules, model.cfg.architecture)
    folder.mkdir(parents=True)
    theirs = {name: tensor.detach().clone() for name, tensor in rules.to_theirs(model.state_dict())}
    save_file(theirs, folder / "model.safetensors")
    silent = {key: value for key, value in configs["a2d-qwen3"].items() if key != "block_size"}
    (folder / "config.json").write_text(json.dumps(silent))
    return folder
