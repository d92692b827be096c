"""Folders: which checkpoint one holds, what an index may say, and that an export leaves other weights readable."""

import json
import shutil
import time
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from diffusion_lens import HookedDiffusionTransformer
from weight_conversion import Architecture, export, open_checkpoint

INDEX = "model.safetensors.index.json"
load = HookedDiffusionTransformer.from_pretrained


@pytest.fixture(scope="module")
def saved_shards(tmp_path_factory):
    """A random model of Hugging Face's in shards, by its own code."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    folder = tmp_path_factory.mktemp("saved") / "shards"
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="4KB")
    assert len([*folder.glob("model-*.safetensors")]) > 2
    return folder


@pytest.fixture
def shards(saved_shards, tmp_path):
    """A copy of the shards that a test may change."""
    return shutil.copytree(saved_shards, tmp_path / "shards")


def unmapped(path):
    """The tensors of a file that is to be rewritten: older releases of safetensors map it while it is read."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- which checkpoint


def test_the_single_file_comes_before_the_index_as_in_transformers(shards, tmp_path):
    model = load(shards, device="cpu")
    other = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    whole = export(other, model.cfg.architecture, tmp_path / "other" / "model.safetensors")
    shutil.copy(whole, shards)
    theirs = LlamaForCausalLM.from_pretrained(shards).state_dict()["model.norm.weight"]
    assert torch.equal(load(shards, device="cpu").ln_final.weight, theirs)
    assert torch.equal(theirs, other["ln_final.weight"])


# --- the index


def rewritten(folder, **where):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= where
    (folder / INDEX).write_text(json.dumps(index))
    return index["weight_map"]


def test_the_index_decides_which_shard_a_tensor_is_read_from(shards):
    first = load(shards, device="cpu").ln_final.weight
    where = rewritten(shards)
    last = max(set(where.values()))
    for stale in {*where.values()} - {where["model.norm.weight"]}:
        save_file({**unmapped(shards / stale), "model.norm.weight": torch.zeros(16)}, shards / stale)
    assert last in where.values()
    assert torch.equal(load(shards, device="cpu").ln_final.weight, first)


def test_an_index_that_names_the_wrong_shard_is_refused(shards, refused):
    where = rewritten(shards)
    other = next(file for file in where.values() if file != where["model.norm.weight"])
    rewritten(shards, **{"model.norm.weight": other})
    refused(ValueError, shards / INDEX, f"no model.norm.weight in {other}", "Fetch the index", path=shards)


@pytest.mark.parametrize("how", ["../{}", "{folder}/{}", "sub/{}", "..\\{}", "{}.bin"])
def test_an_index_names_only_files_beside_it(how, shards, refused):
    name = rewritten(shards)["model.norm.weight"]
    outside = how.format(name, folder=shards.parent)
    (shards / "sub").mkdir()
    for folder in (shards.parent, shards / "sub"):
        shutil.copy(shards / name, folder)
    rewritten(shards, **{"model.norm.weight": outside})
    refused(ValueError, shards / INDEX, "files beside it", repr(outside), path=shards)


@pytest.mark.parametrize("name", [f"{'a' * 300}.safetensors", "folder.safetensors"], ids=["too long", "a folder"])
def test_an_index_that_names_no_file_is_refused(name, shards, refused):
    (shards / "folder.safetensors").mkdir()
    rewritten(shards, **{"model.norm.weight": name})
    refused(FileNotFoundError, shards / INDEX, "names files that are not beside it", name, path=shards)


# --- exports into a folder that holds something


def test_an_export_does_not_hide_shards(shards, refused):
    model, before = load(shards, device="cpu"), files_of(shards)
    edited = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    for do in (
        lambda: export(edited, model.cfg.architecture, shards / "model.safetensors"),
        lambda: model.save_pretrained(shards),
    ):
        refused(ValueError, shards, INDEX, "name another folder", "Nothing was written", do=do)
        assert files_of(shards) == before


def test_an_export_does_not_take_the_name_of_a_shard(shards, refused):
    model, before = load(shards, device="cpu"), files_of(shards)
    for name in sorted({*json.loads((shards / INDEX).read_text())["weight_map"].values()})[::2]:
        do = lambda name=name: export(model.state_dict(), model.cfg.architecture, shards / name)  # noqa: E731
        refused(ValueError, shards, INDEX, f"of which {name} is a part", "another folder", "Nothing was written", do=do)
    absent = "model-00099-of-00099.safetensors"
    rewritten(shards, **{"model.norm.weight": absent})
    do = lambda: export(model.state_dict(), model.cfg.architecture, shards / absent)  # noqa: E731
    refused(ValueError, f"of which {absent} is a part", do=do)
    assert {**files_of(shards), INDEX: before[INDEX]} == before


def test_an_export_beside_other_weights_leaves_their_config(shards):
    """In the same format the two share it, as a converted copy beside its original does."""
    model, before = load(shards, device="cpu"), files_of(shards)
    edited = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    written = export(edited, model.cfg.architecture, shards / "edited.safetensors")
    assert files_of(shards) == {**before, "edited.safetensors": written.read_bytes()}
    assert torch.equal(load(shards, device="cpu").ln_final.weight, model.ln_final.weight)
    assert torch.equal(load(written, device="cpu").ln_final.weight, edited["ln_final.weight"])


def test_an_export_does_not_take_the_config_from_other_weights(tmp_path, specimen, configs, refused):
    one, two = specimen(configs["llama"]).model, specimen(configs["qwen3"]).model
    export(one.state_dict(), one.cfg.architecture, tmp_path / "one.safetensors")
    before = files_of(tmp_path)
    for family in ("qwen3", "diffusion_lens"):
        do = lambda family=family: export(  # noqa: E731
            two.state_dict(), two.cfg.architecture, tmp_path / "two.safetensors", family
        )
        refused(ValueError, "other weights (one.safetensors)", "config.json", "another folder", do=do)
    refused(ValueError, "other weights (one.safetensors)", do=lambda: two.save_pretrained(tmp_path))
    assert files_of(tmp_path) == before


def test_an_export_replaces_the_config_of_its_own_folder(tmp_path, specimen, configs):
    one, two = specimen(configs["llama"]).model, specimen(configs["qwen3"]).model
    export(one.state_dict(), one.cfg.architecture, tmp_path / "model.safetensors")
    two.save_pretrained(tmp_path)
    assert load(tmp_path, device="cpu").cfg.architecture == two.cfg.architecture
    export(one.state_dict(), one.cfg.architecture, tmp_path / "model.safetensors")
    assert load(tmp_path, device="cpu").cfg.architecture == one.cfg.architecture


# --- counts


@pytest.mark.parametrize("count", [10**9, 10**30, 12])
@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "max_position_embeddings", "num_attention_heads"])
def test_a_count_is_compared_with_the_file_before_it_is_expanded(key, count, shards, refused):
    config = json.loads((shards / "config.json").read_text())
    begun = time.perf_counter()
    if (key, count) in (("max_position_embeddings", 12), ("max_position_embeddings", 10**9)):
        assert open_checkpoint(shards, {**config, key: count}).architecture.n_ctx == count
    else:
        refused(ValueError, path=shards, config={**config, key: count})
    assert time.perf_counter() - begun < 2


def test_too_few_tensors_for_the_layers_are_refused(shards, refused):
    config = json.loads((shards / "config.json").read_text())
    words = ("contains 21 tensors", "too few for the 5000 layers")
    refused(ValueError, *words, path=shards, config={**config, "num_hidden_layers": 5000})


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        *((key, wrong) for key in ("num_hidden_layers", "num_key_value_heads", "head_dim") for wrong in (True, 0, "2")),
        *(("mask_token_id", wrong) for wrong in (True, 2.0, "2", -1, 10**30)),
        *((key, wrong) for key in ("tie_word_embeddings", "attention_bias") for wrong in ("false", 0, [])),
        *((key, wrong) for key in ("rope_theta", "rms_norm_eps") for wrong in (True, "1", -1.0, 10**400)),
        ("layer_types", 2),
        ("num_hidden_layers", 2.0),
    ],
)
def test_a_count_is_a_whole_number_and_a_flag_is_a_flag(key, wrong, shards, refused):
    config = json.loads((shards / "config.json").read_text())
    masked = {"model_type": "a2d-llama", "block_size": None} if key == "mask_token_id" else {}
    changed = {**config, **masked, "rope_parameters": None, "rope_theta": 1e4, key: wrong}
    refused(
        ValueError, "" if key in ("rms_norm_eps", "head_dim") else key.removeprefix("num_"), path=shards, config=changed
    )


@pytest.mark.parametrize("wrong", [True, 2.0, "2", 10**30, -3])
@pytest.mark.parametrize("name", ["n_layers", "d_vocab", "n_ctx", "mask_token_id"])
def test_an_architecture_takes_whole_numbers(name, wrong, specimen, configs, refused):
    facts = specimen(configs["llada"]).model.cfg.architecture.to_dict()
    refused(ValueError, name, do=lambda: Architecture.from_dict({**facts, name: wrong}))


# --- weights that are no numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_that_is_not_finite_warns_with_the_tensors_names(value, dtype, shards):
    where = rewritten(shards)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {key: tensor.to(dtype) for key, tensor in unmapped(shards / where[name]).items()}
    tensors[name][5, 3] = value
    save_file(tensors, shards / where[name])
    with pytest.warns(
        UserWarning, match=r"weights that are NaN or infinite, in model\.layers\.1\.mlp\.up_proj\.weight:"
    ):
        load(shards, device="cpu")


def test_large_weights_whose_sum_overflows_are_finite(shards):
    where = rewritten(shards)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = unmapped(shards / where[name])
    tensors[name] = torch.full_like(tensors[name], 3e38)
    save_file(tensors, shards / where[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(shards, device="cpu").blocks[1].mlp.up.weight.isfinite().all()
