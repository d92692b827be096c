"""Fixtures. jaxtyping and beartype check every annotation of the package while the tests run."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from jaxtyping import install_import_hook

install_import_hook("diffusion_lens", "beartype.beartype")

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

# Two workers share the machine, and the models are small: more threads only wait for one another.
torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"
LIT_GPT = [(variant, kind) for variant in ("gqa", "mha") for kind in ("mdm", "ar")]


class Golden:
    """One golden checkpoint: the authors' numbers beside the model loaded from its file."""

    def __init__(self, variant: str, kind: str) -> None:
        from diffusion_lens import HookedDiffusionTransformer

        self.folder = GOLDEN / "lit_gpt" / variant / kind
        self.kind = kind
        self.checkpoint = self.folder / "model.safetensors"
        self.config = self.folder / "lit_config.json"
        self.model = HookedDiffusionTransformer.from_pretrained(self.checkpoint, config=self.config, device="cpu")

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")

    def cases(self, name: str) -> list[dict[str, Any]]:
        cases: list[dict[str, Any]] = json.loads((self.folder / f"{name}.json").read_text())
        return cases


@pytest.fixture(scope="session", params=LIT_GPT, ids=lambda pair: "-".join(pair))
def golden(request: pytest.FixtureRequest) -> Golden:
    """Every golden lit-gpt checkpoint in turn."""
    return Golden(*request.param)


@pytest.fixture(scope="session", params=["mdm", "ar"])
def either(request: pytest.FixtureRequest) -> Golden:
    """Both variants with grouped heads: for laws that hold whatever the numbers."""
    return Golden("gqa", request.param)


@pytest.fixture(scope="session", params=["tiny-mdm", "tiny-ar"])
def tiny(request: pytest.FixtureRequest) -> Any:
    """Both models of the embedded pair in turn."""
    from diffusion_lens import HookedDiffusionTransformer

    return HookedDiffusionTransformer.from_pretrained(request.param, device="cpu")


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Any:
    """After every test: no hook on a shared model, no step lent, no parameter frozen, the grad mode as before."""
    yield
    assert torch.is_grad_enabled()
    for name in ("golden", "either", "tiny"):
        if name in request.fixturenames:
            held = request.getfixturevalue(name)
            model = getattr(held, "model", held)
            assert not model.list_hooks()
            assert model.clock.step is None
            assert all(parameter.requires_grad for parameter in model.parameters())
