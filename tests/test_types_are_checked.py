"""Annotations hold while the tests run: shapes, plain types, those of dataclasses and of functions inside functions."""

import importlib
import inspect
import pkgutil
import sys
import traceback
from typing import Any

import pytest
import torch
import type_checks
from beartype.roar import BeartypeException
from jaxtyping import TypeCheckError, config

import diffusion_lens
from diffusion_lens.model.loss import autoregressive_loss

MODULE = """
from typing import TYPE_CHECKING
from collections.abc import Iterator
from dataclasses import dataclass
from jaxtyping import Float
from torch import Tensor

def first(x: Float[Tensor, "row d"], y: Float[Tensor, "row d"]) -> Float[Tensor, "d"]:
    return x[0]

def wrong() -> Float[Tensor, "d"]:
    return Tensor(2, 3)

def rows(x: Float[Tensor, "row d"], y: Float[Tensor, "row d"]) -> Iterator[Float[Tensor, "d"]]:
    yield from x

def whole(number: int) -> str:
    return "one" if number == 1 else number

@dataclass
class Setting:
    share: float
    def twice(self) -> "Setting":
        return Setting(2 * self.share) if self.share else "nothing"

class Base:
    def __init__(self, share: float) -> None:
        self.share = share

class Derived(Base):
    def __init__(self, share: str) -> None:
        super().__init__(share)

if TYPE_CHECKING:
    from somewhere import Known

def for_type_checkers(x: "Known") -> str:
    return "fine"

def misspelt(x: "Knwon") -> str:
    return "fine"

def made(base: str):
    def inner(times: int) -> str:
        return base * times
    return inner
"""


@pytest.fixture(scope="module")
def specimen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checked")
    (folder / "checked_specimen.py").write_text(MODULE)
    finders = list(sys.meta_path)
    sys.path.insert(0, str(folder))
    type_checks.check_package("checked_specimen")
    yield importlib.import_module("checked_specimen")
    sys.meta_path[:] = finders
    sys.path.remove(str(folder))


@pytest.fixture(autouse=True)
def first_calls():
    """Checks the next call of every function in every test, whatever its parameters."""
    type_checks.begin_test()


def x(*shape):
    return torch.zeros(shape)


def test_what_fits_passes(specimen):
    assert specimen.first(x(2, 3), y=x(2, 3)).shape == (3,)
    assert specimen.first(x(4, 5), x(4, 5)).shape == (5,)
    assert len(list(specimen.rows(x(2, 3), x(2, 3)))) == 2
    assert specimen.whole(1) == "one"
    assert specimen.Setting(0.5).twice() == specimen.Setting(1.0)
    assert [specimen.made(base)(2) for base in "ab"] == ["aa", "bb"]


@pytest.mark.parametrize(
    "call",
    [
        lambda module: module.first(x(3), x(3)),
        lambda module: module.first(x(2, 3).long(), x(2, 3)),
        lambda module: module.first(x(2, 3), x(2, 4)),
        lambda module: module.wrong(),
        lambda module: module.rows(x(2, 3), x(2, 4)),
        lambda module: module.whole("1"),
        lambda module: module.whole(2),
        lambda module: module.Setting("half"),
        lambda module: module.Setting(0.0).twice(),
        lambda module: module.made("a")("b"),
    ],
)
def test_what_does_not_fit_is_refused(specimen, call):
    with pytest.raises(TypeCheckError):
        call(specimen)


def test_the_first_call_after_begin_test_is_checked_anew(specimen):
    specimen.whole(1)
    assert specimen.whole(2) == 2
    type_checks.begin_test()
    with pytest.raises(TypeCheckError):
        specimen.whole(2)


def test_the_frames_of_a_refused_call_can_be_shown(specimen):
    with pytest.raises(TypeCheckError) as raised:
        specimen.Derived("half")
    assert {"self", "share"} <= {name for frame, _ in traceback.walk_tb(raised.tb) for name in frame.f_locals}


def test_only_names_for_type_checkers_may_be_unknown(specimen):
    assert specimen.for_type_checkers(1) == "fine"
    with pytest.raises(BeartypeException, match="Knwon"):
        specimen.misspelt(1)


def test_the_checks_can_be_switched_off(specimen):
    config.update("jaxtyping_disable", True)
    try:
        assert specimen.whole("1") == "1"
        assert specimen.first(x(2, 3), x(2, 4)).shape == (3,)
    finally:
        config.update("jaxtyping_disable", False)


def test_a_shape_is_refused_by_the_package(either):
    shape = r"tokens=<torch.int64 \[3\]> is a Tensor; it must be an Int\[batch pos\]"
    with pytest.raises(TypeError, match=shape):
        autoregressive_loss(either.model, torch.zeros(3, dtype=torch.long))


def test_every_function_of_the_package_is_checked():
    unchecked = set()
    for found in pkgutil.walk_packages(diffusion_lens.__path__, "diffusion_lens."):
        if found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        owners = [module, *(held for held in vars(module).values() if inspect.isclass(held))]
        for held in (held for owner in owners for held in vars(owner).values()):
            held = getattr(held, "fget", getattr(held, "__func__", held))
            if inspect.isfunction(held) and held.__module__ == module.__name__ and is_unchecked(held):
                unchecked.add(f"{found.name}.{held.__qualname__}")
    assert unchecked == set()


def is_unchecked(function):
    says_something = any(annotation not in (Any, object) for annotation in function.__annotations__.values())
    return says_something and not hasattr(function, "__wrapped__")
