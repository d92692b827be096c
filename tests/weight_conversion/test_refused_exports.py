"""Exports that are refused or fail: nothing is left behind, and an old file stays as it was."""

from pathlib import Path

import pytest
import torch

from weight_conversion import Architecture, export, open_checkpoint, write_json, write_safetensors

MDM = Path(__file__).parents[1] / "golden" / "lit_gpt" / "gqa" / "mdm"


@pytest.fixture
def good():
    checkpoint = open_checkpoint(MDM / "model.safetensors")
    return dict(checkpoint.tensors()), checkpoint.architecture


def test_export_to_a_wrong_suffix(good, tmp_path, refused):
    refused(ValueError, "model.pth", "should end in .safetensors", do=lambda: export(*good, tmp_path / "model.pth"))
    assert list(tmp_path.iterdir()) == []


def test_export_to_an_unknown_family(good, tmp_path, refused):
    do = lambda: export(*good, tmp_path / "a.safetensors", family="gguf")  # noqa: E731
    refused(ValueError, "unknown family 'gguf'", "lit_gpt, llada, llada2", do=do)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", ["lit_gpt", "diffusion_lens"])
def test_export_without_a_tensor_leaves_nothing_behind(good, tmp_path, family, refused):
    tensors, architecture = good
    do = lambda: export(tensors, architecture, tmp_path / "a.safetensors", family)  # noqa: E731
    weight = tensors.pop("blocks.1.attn.k.weight")
    refused(ValueError, "cannot export", "'blocks.1.attn.k.weight' is missing", do=do)
    tensors["blocks.1.attn.k.weight"] = weight.T
    refused(ValueError, "cannot export", "'blocks.1.attn.k.weight' is [64, 32], expected [32, 64]", do=do)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("rotary_base", 500000.0, "10000.0"), ("rotary_dtype", "float32", "'bfloat16'"), ("mask_token_id", 3, "512"),
     ("attention_dir", "causal", "'bidirectional'"), ("readout", "shifted", "'in_place'")],
)  # fmt: skip
def test_export_of_what_the_format_cannot_express(good, tmp_path, field, value, expected, refused):
    tensors, architecture = good
    other = Architecture.from_dict({**architecture.to_dict(), field: value})
    do = lambda: export(tensors, other, tmp_path / "a.safetensors")  # noqa: E731
    refused(ValueError, f"{field}={value!r} (would become {expected})", "family='diffusion_lens'", do=do)
    assert list(tmp_path.iterdir()) == []
    written = export(tensors, other, tmp_path / "a.safetensors", family="diffusion_lens")
    assert open_checkpoint(written).architecture == other


@pytest.mark.parametrize("write", ["safetensors", "json"])
@pytest.mark.parametrize("fails", ["at once", "half way"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, write, fails):
    path = tmp_path / "old"
    path.write_bytes(b"old")

    def full_disk(*args, **_):
        temporary = next(tmp_path.glob("*.part"))
        assert temporary.name.startswith(".old.")
        if fails == "half way":
            temporary.write_bytes(b"ne")
        raise OSError("no space left on device")

    if write == "safetensors":
        monkeypatch.setattr("weight_conversion.files.write_aligned", full_disk)
    else:
        monkeypatch.setattr("weight_conversion.files.json.dumps", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_safetensors({"a": torch.zeros(2)}, path) if write == "safetensors" else write_json({}, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_export_that_fails_leaves_the_old_pair(good, tmp_path, monkeypatch):
    tensors, architecture = good
    old = export(tensors, architecture, tmp_path / "model.safetensors")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"model.safetensors", "lit_config.json"}

    def full_disk(*args, **_):
        raise OSError("no space left on device")

    monkeypatch.setattr("weight_conversion.files.write_aligned", full_disk)
    renamed = Architecture.from_dict({**architecture.to_dict(), "name": "another"})
    with pytest.raises(OSError, match="no space left"):
        export({name: tensor + 1 for name, tensor in tensors.items()}, renamed, old)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_open_file_stays_readable_while_it_is_replaced(good, tmp_path):
    tensors, architecture = good
    path = export(tensors, architecture, tmp_path / "model.safetensors")
    mapped = open_checkpoint(path)
    old = path.read_bytes()
    with path.open("rb") as reader:
        tensors_of_file = dict(mapped.tensors())
        export({name: tensor + 1 for name, tensor in tensors_of_file.items()}, architecture, path)
        assert reader.read() == old != path.read_bytes()
    assert all(torch.equal(tensors_of_file[name], tensors[name]) for name in tensors)
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode  # as readable as any new file


def test_saving_a_model_into_a_file(either, tmp_path, refused):
    (tmp_path / "taken").touch()
    refused(
        ValueError, tmp_path / "taken", "needs a folder", do=lambda: either.model.save_pretrained(tmp_path / "taken")
    )
