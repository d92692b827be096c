"""JSON is read strictly: what its author cannot have meant is an error that names the file."""

import json

import pytest

from weight_conversion import read_json, read_json_object

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"n_layers": 2, "d_model": 8, "n_layers": 3}', ["the key 'n_layers' twice", "keep the correct one"]),
        (b'{"a": [{"b": {"c": 1, "c": 1}}]}', ["the key 'c' twice"]),
        (DEEP.encode(), ["nested too deep"]),
        (b'{"a": ["half \\ud800"]}', ["surrogate", "write the whole character"]),
        (b'{"\\uDC80": 1}', ["surrogate"]),
        (b"\xff\xfe", ["not valid JSON", "decode byte"]),
        (b'{"a": }', ["not valid JSON", "line 1"]),
        (b"\xef\xbb\xbf{}", ["not valid JSON", "BOM"]),
        (b"1" * 5000, ["not valid JSON", "digits"]),
        (b"", ["not valid JSON"]),
    ],
    ids=range(10),
)
def test_what_is_refused(text, words, tmp_path, refused):
    path = tmp_path / "some.json"
    path.write_bytes(text)
    refused(ValueError, path, *words, do=lambda: read_json(path))


def test_whole_characters_are_read_however_they_are_written(tmp_path):
    path = tmp_path / "some.json"
    text = {"é": "😀", "path": "C:\\ud800\\new"}
    for escaped in (True, False):
        path.write_text(json.dumps(text, ensure_ascii=escaped), encoding="utf-8")
        assert read_json(path) == text


@pytest.mark.parametrize("text", ["[]", '"a"', "null", "1", "true"])
def test_an_object_is_an_object(text, tmp_path, refused):
    path = tmp_path / "config.json"
    path.write_text(text)
    refused(ValueError, path, "one JSON object", f"contains {json.loads(text)!r}", do=lambda: read_json_object(path))
    path.write_text('{"a": 1}')
    assert read_json_object(path) == {"a": 1}


@pytest.mark.parametrize("text", ['{"model_type": "llama", "model_type": "qwen2"}', DEEP, "[]"])
def test_a_config_beside_a_checkpoint_has_to_be_strict_json(text, tmp_path, refused, write):
    import torch

    path = write({"model.norm.weight": torch.zeros(2)}, tmp_path)
    (tmp_path / "config.json").write_text(text)
    refused(ValueError, tmp_path / "config.json", path=path)
