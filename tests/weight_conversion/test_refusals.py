"""Tensors and files that are refused, and that the error names the culprit and the cure."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusion_lens import HookedDiffusionTransformer
from weight_conversion import export, open_checkpoint, published_architecture, tensor_shapes

MDM = Path(__file__).parents[1] / "golden" / "lit_gpt" / "gqa" / "mdm"
PASS_THE_CONFIG = "Pass the config that belongs to this checkpoint"


@pytest.fixture
def tensors():
    return load_file(MDM / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    """A good checkpoint with its config, to be spoilt."""
    for name in ("model.safetensors", "lit_config.json"):
        shutil.copy(MDM / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "gone",
    ["lm_head.weight", "transformer.wte.weight", "transformer.h.1.attn.attn.weight", "transformer.h.2.norm_1.weight"],
)
@pytest.mark.parametrize("with_config", [True, False])
def test_a_missing_tensor(folder, tensors, gone, with_config, refused, write):
    del tensors[gone]
    path = write(tensors, folder)
    if with_config:
        refused(ValueError, path, f"missing {gone}", PASS_THE_CONFIG, "lit_config.json", path=path)
    else:
        (folder / "lit_config.json").unlink()
        refused(ValueError, "pass config='lit_config.json'", path=path)


@pytest.mark.parametrize(
    "gone", ["lm_head.weight", "transformer.h.0.norm_1.weight", "transformer.h.4.mlp.swiglu.w1.weight"]
)
def test_a_missing_tensor_of_a_published_size_is_named_without_a_config(tmp_path, gone, refused, write):
    shape = published_architecture("6M", "mdm")
    export(
        {name: torch.zeros(()).expand(s) for name, s in tensor_shapes(shape).items()}, shape, tmp_path / "m.safetensors"
    )
    tensors = load_file(tmp_path / "m.safetensors")
    for file in tmp_path.iterdir():
        file.unlink()
    del tensors[gone]
    refused(ValueError, f"missing {gone}", "Diff_LLaMA_6M", PASS_THE_CONFIG, path=write(tensors, tmp_path))


def test_an_unknown_tensor_shows_the_nearest_name(folder, tensors, refused, write):
    tensors["transformer.h.1.attn.attn.bias"] = torch.zeros(128)
    refused(
        ValueError,
        "unknown transformer.h.1.attn.attn.bias (nearest: transformer.h.1.attn.attn.weight)",
        PASS_THE_CONFIG,
        path=write(tensors, folder),
    )


def test_a_misshapen_tensor(folder, tensors, refused, write):
    tensors["transformer.h.0.mlp.swiglu.w3.weight"] = tensors["transformer.h.0.mlp.swiglu.w3.weight"].T.contiguous()
    refused(
        ValueError,
        "transformer.h.0.mlp.swiglu.w3.weight is [160, 64], expected [64, 160]",
        PASS_THE_CONFIG,
        path=write(tensors, folder),
    )


def test_one_error_names_all_problems(folder, tensors, refused, write):
    del tensors["lm_head.weight"]
    tensors["head.weight"] = torch.zeros(3)
    tensors["transformer.ln_f.weight"] = torch.zeros(1, 64)
    refused(
        ValueError,
        "missing lm_head.weight",
        "unknown head.weight",
        "transformer.ln_f.weight is [1, 64]",
        path=write(tensors, folder),
    )


def test_more_tensors_than_can_be_read_are_counted(folder, tensors, refused, write):
    tensors |= {f"transformer.h.{i}.extra": torch.zeros(1) for i in range(9)}
    refused(ValueError, "and 5 more", path=write(tensors, folder))


def test_quantised_numbers(folder, tensors, refused, write):
    name = "transformer.h.0.attn.proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    checkpoint = open_checkpoint(write(tensors, folder))
    refused(
        ValueError, name, "torch.int8", "Convert a quantised checkpoint back", do=lambda: list(checkpoint.tensors())
    )


def test_a_model_left_with_holes_is_refused_by_the_model_too(either, refused):
    cfg, tensors = either.model.cfg, dict(either.model.state_dict())
    build = type(either.model)
    refused(ValueError, "the tensors lack ln_final.weight", do=lambda: build(cfg, tensors=[
        item for item in tensors.items() if item[0] != "ln_final.weight"
    ]))  # fmt: skip
    half = {**tensors, "unembed.weight": tensors["unembed.weight"][:100]}
    refused(ValueError, "unembed.weight", "or some of its rows", do=lambda: build(cfg, tensors=half.items()))
    twice = [*tensors.items(), ("unembed.weight", tensors["unembed.weight"])]
    refused(ValueError, "rows 512:1024 of 'unembed.weight'", "[512, 64]", do=lambda: build(cfg, tensors=twice))
    wide = {**tensors, "unembed.weight": tensors["unembed.weight"][:, :1]}
    refused(ValueError, "'unembed.weight'", "[512, 1]", "[512, 64]", do=lambda: build(cfg, tensors=wide.items()))
    extra = {**tensors, "blocks.9.ln1.weight": torch.ones(64)}
    refused(ValueError, "no weight 'blocks.9.ln1.weight'", do=lambda: build(cfg, tensors=extra.items()))


@pytest.mark.parametrize("n_bytes", [0, 5, 300, 100_000, -1])
def test_a_truncated_file(folder, n_bytes, refused):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])
    refused(ValueError, path, f"{path.stat().st_size:,} bytes on disk", "fetch it again", path=path)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 64, b"<html></html>"])
def test_a_file_that_is_not_safetensors_is_refused(folder, content, refused):
    path = folder / "model.safetensors"
    path.write_bytes(content)
    refused(ValueError, path, "is not a complete safetensors file", "delete it and fetch it again", path=path)


class Malicious:
    """Unpickling this would create a file."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return Path.touch, (self.victim,)


@pytest.mark.parametrize("how", ["torch.save", "before torch 1.6", "plain pickle"])
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt", ".bin"])
def test_a_malicious_pickle_is_not_run(tmp_path, how, suffix, refused):
    victim, path = tmp_path / "harm", tmp_path / f"model{suffix}"
    content = {"transformer.wte.weight": torch.zeros(2), "more": Malicious(victim)}
    if how == "plain pickle":
        path.write_bytes(pickle.dumps(content["more"]))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "torch.save")
    refused(ValueError, path, "which is refused", ".safetensors", "plain state_dict", path=path)
    refused(ValueError, path, "which is refused", do=lambda: HookedDiffusionTransformer.from_pretrained(path))
    assert not victim.exists()
    torch.load(path, weights_only=False) if how != "plain pickle" else pickle.loads(path.read_bytes())
    assert victim.exists()  # it would have


@pytest.mark.parametrize(
    "content",
    [
        {"transformer.wte.weight": [1.0, 2.0]},
        [torch.zeros(2)],
        torch.zeros(2),
        {},
        {0: torch.zeros(2)},
        {"model": {}},
        3,
    ],
    ids=str,
)
def test_a_pth_without_named_tensors(tmp_path, content, refused):
    path = tmp_path / "model.pth"
    torch.save(content, path)
    refused(ValueError, path, "does not contain a mapping of names to tensors", "save the plain state_dict", path=path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"hello", b"\x80\x02}q\x00.", b"\xff" * 50])
def test_a_file_that_is_not_a_pth_is_refused(tmp_path, content, refused):
    path = tmp_path / "model.pth"
    path.write_bytes(content)
    refused(ValueError, path, "truncated", ".safetensors", path=path)


def test_a_truncated_pth(tmp_path, tensors, refused):
    path = tmp_path / "model.pth"
    torch.save(tensors, path)
    path.write_bytes(path.read_bytes()[:-1000])
    refused(ValueError, path, "truncated", ".safetensors", path=path)


def test_an_unknown_suffix(tmp_path, refused):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(ValueError, "model.gguf", ".safetensors, .pth", path=tmp_path / "model.gguf")


def test_a_path_that_does_not_exist(tmp_path, refused):
    refused(FileNotFoundError, tmp_path / "a.safetensors", path=tmp_path / "a.safetensors")


def test_an_empty_folder(tmp_path, refused):
    refused(FileNotFoundError, tmp_path, "it contains none", "Pass the path", path=tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_folder_with_two_checkpoints(tmp_path, suffix, refused):
    for name in ("one", "two"):
        (tmp_path / f"{name}.{suffix}").touch()
    refused(
        FileNotFoundError, tmp_path, f"['one.{suffix}', 'two.{suffix}']", "Pass the path of the file", path=tmp_path
    )


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map(tmp_path, content, refused):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    refused(ValueError, index, "'weight_map'", "fetch it again", path=tmp_path)


def test_a_shard_that_is_not_there(tmp_path, refused):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"lm_head.weight": "model-2.safetensors"}}')
    refused(FileNotFoundError, index, "model-2.safetensors", "fetch them too", path=tmp_path)


def test_a_shard_without_its_tensor(tmp_path, tensors, refused):
    shutil.copy(MDM / "lit_config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "1.safetensors")})
    )
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "1.safetensors")
    words = ("model.safetensors.index.json", "there is no lm_head.weight in 1.safetensors", "Fetch the index")
    refused(ValueError, tmp_path, *words, path=tmp_path)


def test_no_message_repeats_torchs_advice(tmp_path, refused):
    path = tmp_path / "model.pth"
    torch.save({"a": Malicious(tmp_path / "harm")}, path)
    message = refused(ValueError, "(Unsupported global: GLOBAL getattr)", path=path)
    assert len(message.splitlines()) == 1
    assert not re.search(r"\x1b|weights_only|can still be loaded", message)
