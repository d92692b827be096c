"""Families with a config.json: there and back without a bit lost, and refusals that name the culprit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_networks import diffusion_gemma
from transformers import AutoConfig, AutoModelForCausalLM

from weight_conversion import (
    Architecture,
    Experts,
    TimeConditioning,
    export,
    n_params,
    open_checkpoint,
    tensor_shapes,
)
from weight_conversion.families.family import rotary_share
from weight_conversion.families.llama import KEYS, causal_family
from weight_conversion.key_map import KeyMap
from weight_conversion.registry import FAMILIES

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS = torch.arange(20).reshape(2, 10)


@pytest.fixture
def checkpoint(family_config, specimen, tmp_path):
    """A random checkpoint of each family, written by its own rules, with its config."""
    return written(family_config, specimen, tmp_path / "theirs")


MODELS = {}


def written(config, specimen, folder, dtype=torch.float32, **more):
    """A random checkpoint with its config; the model of a config is built once."""
    folder.mkdir(exist_ok=True)
    key = json.dumps(config)
    if key not in MODELS:
        MODELS[key] = specimen(config).model
    model = MODELS[key]
    architecture = model.cfg.architecture
    rules = KeyMap(FAMILIES[architecture.family].rules, architecture)
    theirs = {name: tensor.detach().to(dtype).clone() for name, tensor in rules.to_theirs(model.state_dict())}
    save_file({**theirs, **more}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("folder", ["llada/mha", "llada/gqa", "dream"])
def test_golden_checkpoints_there_and_back(folder, tmp_path):
    path = GOLDEN / folder / "model.safetensors"
    first = open_checkpoint(path)
    again = export(dict(first.tensors()), first.architecture, tmp_path / "model.safetensors")
    same_tensors(load_file(path), load_file(again))
    assert open_checkpoint(again).architecture == first.architecture


def test_there_and_back(checkpoint, tmp_path):
    first = open_checkpoint(checkpoint)
    again = export(dict(first.tensors()), first.architecture, tmp_path / "model.safetensors")
    same_tensors(load_file(checkpoint / "model.safetensors"), load_file(again))
    assert open_checkpoint(again).architecture == first.architecture


@pytest.mark.parametrize("name", ["llada", "qwen2", "a2d-qwen3"])
def test_a_bfloat16_checkpoint_keeps_its_bits(name, configs, specimen, tmp_path):
    folder = written(configs[name], specimen, tmp_path / "theirs", torch.bfloat16)
    first = open_checkpoint(folder)
    again = export(dict(first.tensors()), first.architecture, tmp_path / "model.safetensors")
    same_tensors(load_file(folder / "model.safetensors"), load_file(again))


def same_tensors(first, second):
    assert set(first) == set(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


def test_through_a_model_and_our_own_format(checkpoint, tmp_path):
    """File, model, our folder, model, the family's file: the same tensors, the same facts, the same logits."""
    from diffusion_lens import HookedDiffusionTransformer

    model = HookedDiffusionTransformer.from_pretrained(checkpoint, device="cpu")
    again = HookedDiffusionTransformer.from_pretrained(model.save_pretrained(tmp_path / "ours"), device="cpu")
    assert again.cfg.architecture == model.cfg.architecture
    assert torch.equal(again(TOKENS), model(TOKENS))
    back = export(again.state_dict(), again.cfg.architecture, tmp_path / "back" / "model.safetensors")
    same_tensors(load_file(checkpoint / "model.safetensors"), load_file(back))


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_name_tensors_of_our_layout(family):
    sizes = dict.fromkeys(("d_model", "n_heads", "n_key_value_heads", "d_mlp", "d_vocab", "d_vocab_out", "n_ctx"), 1)
    common = dict(family="any", name="all", n_layers=1, d_head=2, attention_dir="causal", readout="shifted", **sizes)
    biases = dict(qkv_bias=True, o_bias=True, mlp_bias=True, unembed_bias=True, qk_norm=True, mask_token_id=None)
    experts = Experts(1, 1, 1, (True,), d_shared=1, router_bias=True)
    timed = dict(norm="layer", norm_bias=True, time=TimeConditioning(1, conditioned=True), mask_token_id=None)
    gemma = FAMILIES["diffusion_gemma"].read_architecture(diffusion_gemma(), {})
    everything = (
        Architecture(**common, **biases, experts=experts),
        Architecture(**common, **timed, mlp_bias=True),
        replace(gemma, tied=False),
    )
    ours = {name for architecture in everything for name in tensor_shapes(architecture)}
    rules = [each for rule in FAMILIES[family].rules for each in rule.written_out(1, 1)]
    assert {name for rule in rules for name in rule.ours} <= ours


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_hugging_face_reads_what_is_exported(name, configs, specimen, tmp_path):
    model = specimen(configs[name]).model
    path = export(model.state_dict(), model.cfg.architecture, tmp_path / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)


def test_weights_of_a_tied_model_are_one(configs, specimen):
    model = specimen(configs["qwen2"]).model
    assert model.unembed.weight is model.embed.weight
    assert sum(weight.numel() for weight in model.parameters()) == n_params(model.cfg.architecture)
    again = type(model)(model.cfg, tensors=model.state_dict().items())
    assert torch.equal(again(TOKENS), model(TOKENS))
    other = {**model.state_dict(), "unembed.weight": model.unembed.weight + 1}
    with pytest.raises(ValueError, match=r"'unembed.weight' is tied to 'embed.weight', and the two differ"):
        type(model)(model.cfg, tensors=other.items())


@pytest.mark.parametrize("name", ["qwen2", "a2d-qwen2"])
def test_a_tied_checkpoint_may_hold_its_head_once_more(name, configs, specimen, tmp_path, refused):
    plain = written(configs[name], specimen, tmp_path / "plain")
    embedding = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    both = written(configs[name], specimen, tmp_path / "both", **{"lm_head.weight": embedding.clone()})
    same_tensors(dict(open_checkpoint(both).tensors()), dict(open_checkpoint(plain).tensors()))
    assert "lm_head.weight" not in load_file(
        export(dict(open_checkpoint(both).tensors()), open_checkpoint(both).architecture, tmp_path / "a.safetensors")
    )
    other = written(configs[name], specimen, tmp_path / "other", **{"lm_head.weight": embedding + 1})
    for read in ("tensors", "pieces"):
        do = lambda read=read: list(getattr(open_checkpoint(other), read)())  # noqa: E731
        refused(ValueError, other, "contains lm_head.weight", "ties to model.embed_tokens.weight", "differ", do=do)
    untied = open_checkpoint(other, config={**configs[name], "tie_word_embeddings": False})
    assert torch.equal(dict(untied.tensors())["unembed.weight"], embedding + 1)
    small = written(configs[name], specimen, tmp_path / "small", **{"lm_head.weight": embedding[:5].clone()})
    refused(ValueError, f"lm_head.weight is [5, 32], expected [{len(embedding)}, 32]", path=small)


def test_rotary_tables_in_old_llama_checkpoints_are_ignored(configs, specimen, tmp_path, refused):
    table = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    old = written(configs["llama"], specimen, tmp_path / "old", **table)
    assert open_checkpoint(old).architecture.n_layers == 3
    refused(
        ValueError, "unknown model.layers.1.self", path=written(configs["qwen3"], specimen, tmp_path / "q", **table)
    )


def test_tensors_that_do_not_fit_are_named(checkpoint, refused):
    path = checkpoint / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # not mapped: the file is rewritten
    queries = next(
        name for name in tensors if "1." in name and name.endswith(("q_proj.weight", "query_key_value.weight"))
    )
    save_file({name: tensor for name, tensor in tensors.items() if name != queries}, path)
    refused(ValueError, f"missing {queries}", checkpoint / "config.json", path=checkpoint)
    save_file({**tensors, queries: tensors[queries][:3].clone()}, path)
    refused(ValueError, f"{queries} is [3, 32], expected {list(tensors[queries].shape)}", path=checkpoint)
    norm = queries.replace("q_proj", "qq_norm").replace("query_key_value", "qq_norm")
    save_file({**tensors, norm: torch.ones(2)}, path)
    refused(ValueError, f"unknown {norm} (nearest: ", path=checkpoint)


def test_biases_and_norms_that_the_config_does_not_announce_are_unknown(configs, specimen, tmp_path, refused):
    folder = written(configs["llama"], specimen, tmp_path)
    silent = {**configs["llama"], "mlp_bias": False}
    refused(ValueError, "unknown model.layers.0.mlp.", "_proj.bias", path=folder, config=silent)
    normed = written(configs["a2d-qwen3"], specimen, tmp_path)
    llama = {**configs["a2d-llama"], "head_dim": 16}
    refused(ValueError, "unknown model.layers.0.self_attn.k_norm.weight", path=normed, config=llama)


def test_an_unknown_config_key(checkpoint, family_config, refused):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**family_config, "logit_softcap": 30.0}))
    refused(ValueError, "not understood: ['logit_softcap']", "only if they change nothing", path, path=checkpoint)


def test_a_config_that_lacks_a_number(checkpoint, family_config, refused):
    gone = next(key for key in family_config if key.endswith(("hidden_layers", "n_layers")))
    refused(ValueError, f"lacks ['{gone}']", "add them", path=checkpoint, config=without(family_config, gone))
    baseless = without(without(family_config, "rope_theta"), "rope_parameters")
    if "llama" in family_config["model_type"]:  # Llama-2's config leaves it out
        assert open_checkpoint(checkpoint, baseless).architecture.rotary_base == 10000.0
    else:
        refused(ValueError, "rope_theta is None", path=checkpoint, config=baseless)
    for wrong in (True, "3", 0):
        refused(ValueError, f"{gone}={wrong!r}", "whole number", path=checkpoint, config={**family_config, gone: wrong})


@pytest.mark.parametrize("mask", [None, "<mask>", ...])
@pytest.mark.parametrize("name", ["llada", "dream", "a2d-llama", "a2d-qwen2", "a2d-qwen3"])
def test_a_diffusion_model_without_its_mask(name, mask, configs, specimen, tmp_path, refused):
    folder = written(configs[name], specimen, tmp_path)
    config = without(configs[name], "mask_token_id") | ({} if mask is ... else {"mask_token_id": mask})
    refused(ValueError, f"mask_token_id is {None if mask is ... else mask!r}", path=folder, config=config)
    refused(ValueError, "mask_token_id 513 has no row", path=folder, config={**configs[name], "mask_token_id": 513})


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llada", dict(block_type="sequential"), ["block_type='sequential'", "must be 'llama'"]),
        ("llada", dict(alibi=True), ["alibi=True", "must be False"]),
        ("llada", dict(rope=False), ["rope=False"]),
        ("llada", dict(layer_norm_type="default"), ["layer_norm_type='default'", "must be 'rms'"]),
        ("llada", dict(activation_type="swiglu"), ["activation_type='swiglu'", "must be 'silu'"]),
        ("llada", dict(include_qkv_bias=True), ["include_qkv_bias=True"]),
        ("llada", dict(scale_logits=True), ["scale_logits=True"]),
        ("llada", dict(multi_query_attention=True), ["multi_query_attention=True"]),
        ("llama", dict(hidden_act="gelu"), ["hidden_act='gelu'", "must be 'silu'"]),
        ("llama", dict(rope_scaling={"type": "linear", "factor": 2.0}), ["rope_scaling says 'linear'"]),
        ("llama", dict(rope_parameters={"rope_type": "linear"}), ["rope_parameters says 'linear'"]),
        ("llama", dict(sliding_window=64), ["not understood: ['sliding_window']"]),
        ("dream", dict(use_sliding_window=True), ["use_sliding_window=True", "must be False"]),
        ("dream", dict(rope_scaling={"type": "dynamic"}), ["rope_scaling says 'dynamic'"]),
        ("dream", dict(use_mrope=True), ["use_mrope=True"]),
        ("qwen2", dict(use_sliding_window=True), ["use_sliding_window=True", "must be False"]),
        ("qwen2", dict(layer_types=["full_attention", "sliding_attention"]), ["layer_types", "sliding_attention"]),
        ("qwen3", dict(layer_types=["chunked_attention"] * 3), ["layer_types", "chunked_attention"]),
        ("qwen3", dict(mlp_bias=True), ["not understood: ['mlp_bias']"]),
        ("a2d-qwen3", dict(num_key_value_heads=3), ["multiple of n_key_value_heads"]),
        ("a2d-qwen3", dict(head_dim=15), ["d_head is 15", "must be even"]),
        ("qwen2", dict(model_type="mistral"), ["model_type='mistral'", "qwen2, qwen3"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_what_our_network_does_not_do(name, changes, words, configs, specimen, tmp_path, refused):
    folder = written(configs[name], specimen, tmp_path)
    refused(ValueError, *words, path=folder, config={**configs[name], **changes})


@pytest.mark.parametrize(
    "changes",
    [
        dict(rope_scaling=None),
        dict(rope_scaling={"rope_type": "default"}),
        dict(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    ],
)
def test_a_base_that_is_not_scaled_is_read_from_either_key(changes, configs, specimen, tmp_path):
    folder = written(configs["llama"], specimen, tmp_path)
    config = {key: value for key, value in {**configs["llama"], **changes}.items() if value is not ...}
    assert open_checkpoint(folder, config).architecture == open_checkpoint(folder).architecture


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(rope_scaling={"rope_type": "default", "rope_theta": 77.0}), "several bases"),
        (dict(rope_parameters={"rope_type": "default", "rope_theta": 77.0}), "several bases"),
        (dict(rope_parameters={"full_attention": {"rope_type": "yarn"}}), "not understood: ['full_attention']"),
        (dict(rope_parameters={"partial_rotary_factor": 0.5}), "rotates all dimensions of a head"),
    ],
)
def test_two_different_rotary_bases_in_one_config_are_refused(changes, words, configs, specimen, tmp_path, refused):
    folder = written(configs["llama"], specimen, tmp_path)
    refused(ValueError, words, path=folder, config={**configs["llama"], **changes})


def test_a_base_beside_the_default_scaling(configs, specimen, tmp_path):
    """Transformers 5 turns by it, whatever the family's default."""
    folder = written(configs["llama"], specimen, tmp_path)
    config = without(configs["llama"], "rope_theta") | {"rope_scaling": {"rope_type": "default", "rope_theta": 77.0}}
    assert open_checkpoint(folder, config).architecture.rotary_base == 77.0


def test_a_share_of_rotated_dimensions_is_read_from_either_key(configs, specimen, tmp_path, refused):
    folder = written(configs["llama"], specimen, tmp_path)
    all_turned = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}
    for whole in (all_turned, {"partial_rotary_factor": 1.0}, {"partial_rotary_factor": None}):
        assert open_checkpoint(folder, {**configs["llama"], **whole}).architecture.rotary_dim is None
    half = {**configs["llama"], "partial_rotary_factor": 0.5}
    refused(ValueError, "rotates all dimensions of a head", path=folder, config=half)
    config = {"partial_rotary_factor": 0.5, **all_turned}
    assert rotary_share({"rope_parameters": {"partial_rotary_factor": 0.5}}) == 0.5
    refused(ValueError, "several shares of rotated dimensions", do=lambda: rotary_share(config))


@pytest.mark.parametrize("mode", ["ar", "bidirectional"])
def test_a_diffusion_model_type_has_one_mode(mode, configs, specimen, tmp_path, refused):
    folder = written(configs["a2d-qwen3"], specimen, tmp_path)
    refused(ValueError, "does not apply to model_type='a2d-qwen3'", path=folder, options={"mode": mode})


def test_fixed_keys_of_a_config_are_written(specimen, configs):
    """Transformers has defaults of its own for keys that are absent, such as a sliding window."""
    keys = replace(KEYS, family="windowed", fixed={**KEYS.fixed, "sliding_window": (None,)})
    family = causal_family(keys, "Windowed", "A2DWindowed", default_base=10000.0)
    architecture = family.read_architecture({**configs["llama"], "model_type": "windowed"}, {})
    assert family.write_config(architecture)["sliding_window"] is None


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_causal_model_type_with_a_mask_is_refused(name, configs, specimen, tmp_path, refused):
    folder = written(configs[name], specimen, tmp_path)
    config = {**configs[name], "mask_token_id": 5}
    refused(ValueError, f"model_type='a2d-{name}'", "or without the id", path=folder, config=config)
    cured = open_checkpoint(folder, {**config, "model_type": f"a2d-{name}", "block_size": None}).architecture
    assert (cured.attention_dir, cured.readout, cured.mask_token_id) == ("bidirectional", "in_place", 5)
    assert open_checkpoint(folder, {**config, "mask_token_id": None}).architecture.attention_dir == "causal"


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "dream", "a2d-llama", "a2d-qwen2", "a2d-qwen3"])
def test_an_architecture_of_our_own_format_is_exported_to_a_family(name, configs, specimen, tmp_path):
    architecture = open_checkpoint(written(configs[name], specimen, tmp_path / "old")).architecture
    family = architecture.family
    tensors = {tensor: torch.zeros(shape) for tensor, shape in tensor_shapes(architecture).items()}
    export(tensors, replace(architecture, family="diffusion_lens"), tmp_path / "new" / "model.safetensors", family)
    assert open_checkpoint(tmp_path / "new").architecture == architecture


def test_a_tied_head_that_became_another_matrix_is_not_dropped(configs, specimen, tmp_path):
    architecture = open_checkpoint(written(configs["qwen2"], specimen, tmp_path / "old")).architecture
    architecture = replace(architecture, tied=True)
    tensors = {tensor: torch.zeros(shape) for tensor, shape in tensor_shapes(architecture).items()}
    tensors["unembed.weight"] = tensors["embed.weight"] + 1
    with pytest.raises(ValueError, match=r"ties 'unembed.weight' to 'embed.weight', and the two differ"):
        export(tensors, architecture, tmp_path / "new" / "model.safetensors")
    for family in ("qwen2", "diffusion_lens"):
        untied = export(tensors, replace(architecture, tied=False), tmp_path / family / "model.safetensors", family)
        assert torch.equal(dict(open_checkpoint(untied).tensors())["unembed.weight"], tensors["unembed.weight"])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_an_eps_that_is_left_out_is_hugging_faces(name, configs, specimen, tmp_path):
    folder = written(configs[name], specimen, tmp_path)
    config = without(configs[name], "rms_norm_eps")
    assert open_checkpoint(folder, config).architecture.norm_eps == AutoConfig.for_model(name).rms_norm_eps


def test_what_a_familys_config_cannot_express_is_not_exported(configs, specimen, tmp_path, refused):
    biased = specimen(configs["llama"]).model
    for family in ("qwen3", "llada", "lit_gpt"):
        do = lambda family=family: export(  # noqa: E731
            biased.state_dict(), biased.cfg.architecture, tmp_path / "model.safetensors", family
        )
        refused(ValueError, do=do)
    assert list(tmp_path.iterdir()) == []


def without(config, key):
    return {name: value for name, value in config.items() if name != key}
