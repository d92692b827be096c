"""A dry run fetches nothing, whatever the cache holds: it estimates from what is known of models and data sets."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from diffusion_lens import cost
from diffusion_lens.cli import app
from diffusion_lens.cli.cost import check_layers
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.loading import shape_of

ASK = ["--prompt", "Ada is the", "--subject", "Ada", "--answer", " pilot"]
# Models and data that are nowhere on this machine.
ASKED = {
    "denoise": ["smdm-1028m", "Ada is the"],
    "trace": ["smdm-1028m", *ASK],
    "patch": ["smdm-1028m", *ASK[:2], "--corrupted", "Bob is the", *ASK[4:]],
    "lens": ["smdm-1028m", *ASK[:2]],
    "rome": ["smdm-1028m", *ASK, "--layer", "0"],
    "recall": ["smdm-1028m-reverse"],
    "aie": ["llada-8b-base", "--data", "known-1000"],
    "compare": ["smdm-1028m", "ar-1028m", "--limit", "20"],
    "signatures": ["smdm-1028m", "--against", "ar-1028m"],
    "finetune": ["smdm-1028m", "--out", "out"],
}


@pytest.fixture
def online_with_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr(socket, "getaddrinfo", reached)
    monkeypatch.setattr(socket.socket, "connect", reached)


@pytest.mark.usefixtures("online_with_an_empty_cache")
@pytest.mark.parametrize("command", ASKED)
def test_a_dry_run_asks_no_network(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [command, *ASKED[command], "--dry-run", "--flops", "1e12", "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["results"]["forward_passes"] > 0
    if command == "recall":  # 1800 questions in 6 numbers of steps, 63 in all, with guidance
        assert told["settings"]["facts"] == 1800
        assert told["results"]["forward_passes"] == 1800 * 63 * 2
    if command == "aie":
        assert told["settings"]["facts"] == 1209
    if command == "signatures":  # 30 people trained p2d, two models, each of its depth
        depths = [shape_of(model).n_layers for model in ("smdm-1028m", "ar-1028m")]
        assert told["results"]["forward_passes"] == 30 * sum(depth + 4 for depth in depths)
        assert told["results"]["backward_passes"] == 30 * 2 * 2
    if command == "finetune":
        assert told["settings"]["rows"] == 3600
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["denoise", "recall"])
def test_a_dry_run_refuses_a_sampler_that_is_none(command: str) -> None:
    asked = ["tiny-ar", *(["Ada"] if command == "denoise" else [])]
    result = CliRunner().invoke(app, [command, *asked, "--sampler", "confidence", "--dry-run"])
    assert result.exit_code == 2
    assert "grows at its end only; use 'left_to_right'" in result.stderr


def test_a_layer_may_be_counted_from_the_end() -> None:
    def passes(layer: str) -> int:
        asked = ["rome", "tiny-mdm", *ASK, "--layer", layer, "--dry-run", "--json"]
        return int(json.loads(CliRunner().invoke(app, asked).stdout)["results"]["forward_passes"])

    assert passes("-4") == passes("0") > passes("-2") == passes("2")


def test_a_comparison_prices_each_model_by_its_own_size() -> None:
    def priced(*models: str) -> dict[str, Any]:
        asked = ["compare", *models, "--data", "toy", "--limit", "20", "--dry-run", "--flops", "1e12", "--json"]
        results: dict[str, Any] = json.loads(CliRunner().invoke(app, asked).stdout)["results"]
        return results

    small, large = priced("tiny-mdm"), priced("smdm-1028m")
    for told in (priced("tiny-mdm", "smdm-1028m"), priced("smdm-1028m", "tiny-mdm")):
        for name in ("forward_passes", "token_layers", "seconds"):
            assert told[name] == pytest.approx(small[name] + large[name], rel=1e-3)
        assert (told["weights_bytes"], told["memory_bytes"]) == (large["weights_bytes"], large["memory_bytes"])


def test_layers_of_a_model_that_is_still_to_be_fetched_are_not_refused() -> None:
    check_layers(ModelChoice("owner/nowhere"), [40])
    with pytest.raises(ValueError, match="layer=40"):
        check_layers(ModelChoice("tiny-mdm"), [40])


@pytest.mark.parametrize(("device", "reserve"), [("cpu", 3.0), ("h100", 1.5)])
def test_the_memory_is_what_an_allocator_takes(device: str, reserve: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ["recall", "site-mdm", "--length", "16", "--limit", "10", "--dry-run", "--device", device]

    def said(memory: int, *more: str) -> str:
        known = replace(cost.DEVICES["h100"], memory=memory)
        monkeypatch.setattr(cost, "find_device", lambda *given: known)
        return CliRunner().invoke(app, [*ask, *more]).stdout

    told = json.loads(said(10**12, "--json"))["results"]
    needed = told["memory_bytes"]
    assert needed == told["weights_bytes"] + reserve * told["tensor_bytes"] > told["weights_bytes"]
    assert f"about {needed / 1e9:.2f} GB in all" in said(needed)
    assert "too little" not in said(needed)
    assert "too little" in said(needed - 1)
