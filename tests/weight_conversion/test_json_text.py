"""JSON that every reader takes: no NaN, no infinity, and what is no JSON refused with its position."""

import json
import math

import numpy as np
import pytest
import torch

from weight_conversion import as_json, from_json, to_json, write_json


def refuse(word):
    raise AssertionError(f"{word} is no JSON")


def strict(text):
    """As the standard reads it."""
    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_with_their_reason():
    data = {"a/b": [1.5, math.nan], "c": {"d~": -math.inf, "e": np.float32("inf")}, "f": "NaN"}
    text = to_json(data)
    assert strict(text) == {
        "a/b": [1.5, None],
        "c": {"d~": None, "e": None},
        "f": "NaN",
        "not_finite": {"/a~1b/1": "NaN", "/c/d~0": "-Infinity", "/c/e": "Infinity"},
    }
    again = from_json(text)
    assert math.isnan(again["a/b"].pop())
    assert again == {"a/b": [1.5], "c": {"d~": -math.inf, "e": math.inf}, "f": "NaN"}
    with pytest.raises(ValueError, match=r"not finite \(/0\) need a mapping"):
        to_json([math.nan])


def test_finite_documents_are_what_json_writes():
    data = {"a": [1, 2.5, True, None, "ü"], "b": {"c": []}, "3": ()}
    assert to_json(data) == json.dumps(data)
    assert to_json(data, indent=2) == json.dumps(data, indent=2)
    assert to_json({1: 2, None: 3, False: 4, 1.5: 5}) == json.dumps({1: 2, None: 3, False: 4, 1.5: 5})


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (np.int64(3), "3"),
        (np.uint8(3), "3"),
        (np.float32(0.5), "0.5"),
        (np.float64(0.1), "0.1"),
        (np.bool_(True), "true"),
        (np.array(2), "2"),
        (torch.tensor(4), "4"),
        (torch.tensor(0.5), "0.5"),
    ],
)
def test_one_number_of_numpy_or_torch_is_that_number(number, written):
    assert to_json({"n": [number]}) == f'{{"n": [{written}]}}'


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 3), r"/settings/1/noise is a Tensor of shape \[2, 3\], which JSON cannot represent.*tolist"),
        (np.zeros(2), r"/settings/1/noise is a ndarray of shape \[2\]"),
        ({3}, "/settings/1/noise is a set"),
        (1j, "/settings/1/noise is a complex"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_path(value, message):
    with pytest.raises(TypeError, match=message):
        as_json({"settings": [0, {"noise": value}]})


def test_a_file_is_strict_too(tmp_path):
    write_json({"p": math.nan}, tmp_path / "a.json")
    assert strict((tmp_path / "a.json").read_text()) == {"p": None, "not_finite": {"/p": "NaN"}}
