"""A dry run fetches nothing, whatever the cache holds: it estimates from what is known of models and data sets."""

import json
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
from huggingface_hub import constants
from typed_commands import complaint
from typer.testing import CliRunner

from diffusion_lens.cli import app
from diffusion_lens.loading import shape_of

ASK = ["--prompt", "Ada is the", "--subject", "Ada", "--answer", " pilot"]
SHORT = ["--length", "16"]  # the narrow networks run briefly
# Models and data that are nowhere on this machine.
ASKED = {
    "denoise": ["smdm-1028m", "Ada is the", "--steps", "2"],
    "trace": ["smdm-1028m", *ASK],
    "patch": ["smdm-1028m", *ASK[:2], "--corrupted", "Bob is the", *ASK[4:]],
    "lens": ["smdm-1028m", *ASK[:2]],
    "rome": ["smdm-1028m", *ASK, "--layer", "0", "--iterations", "2"],
    "recall": ["smdm-1028m-reverse", "--steps", "1", "--steps", "4", *SHORT],
    "aie": ["llada-8b-base", "--data", "known-1000", "--layer", "-1", "--samples", "1"],
    "compare": ["smdm-1028m", "ar-1028m", "--limit", "4", "--rank", "2", "--layer", "0", *SHORT],
    "signatures": ["smdm-1028m", "--against", "ar-1028m", "--limit", "5", *SHORT],
    "finetune": ["smdm-1028m", "--out", "out", "--batch-size", "4"],
    "adapt": ["llama-3.2-1b", "--out", "out", "--batch-size", "2"],
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
    if command == "recall":  # 1800 questions in 5 steps in all, with guidance
        assert told["settings"]["facts"] == 1800
        assert told["results"]["forward_passes"] == 1800 * 5 * 2
    if command == "aie":
        assert told["settings"]["facts"] == 1209
    if command == "signatures":  # 5 people, two models, each of its depth
        depths = [shape_of(model).n_layers for model in ("smdm-1028m", "ar-1028m")]
        assert told["results"]["forward_passes"] == 5 * sum(depth + 4 for depth in depths)
        assert told["results"]["backward_passes"] == 5 * 2 * 2
    if command == "finetune":
        assert told["settings"]["rows"] == 3600
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["denoise", "recall"])
def test_a_dry_run_refuses_a_sampler_that_is_none(command: str) -> None:
    asked = ["tiny-ar", *(["Ada"] if command == "denoise" else [])]
    result = CliRunner().invoke(app, [command, *asked, "--sampler", "confidence", "--dry-run"])
    assert result.exit_code == 2
    assert "grows at its end only. Samplers that fit: left_to_right" in result.stderr


def test_a_layer_may_be_counted_from_the_end() -> None:
    def passes(layer: str) -> int:
        asked = ["rome", "tiny-mdm", *ASK, "--layer", layer, "--dry-run", "--json"]
        return int(json.loads(CliRunner().invoke(app, asked).stdout)["results"]["forward_passes"])

    assert passes("-4") == passes("0") > passes("-2") == passes("2")


def test_a_comparison_prices_each_model_by_its_own_size() -> None:
    def priced(*models: str) -> dict[str, Any]:
        data = ["--data", "toy", "--limit", "4", "--rank", "2", "--layer", "-1"]
        asked = ["compare", *models, *data, "--dry-run", "--flops", "1e12", "--json"]
        results: dict[str, Any] = json.loads(CliRunner().invoke(app, asked).stdout)["results"]
        return results

    small, large = priced("tiny-mdm"), priced("smdm-1028m")
    for told in (priced("tiny-mdm", "smdm-1028m"), priced("smdm-1028m", "tiny-mdm")):
        for name in ("forward_passes", "token_layers", "seconds"):
            assert told[name] == pytest.approx(small[name] + large[name], rel=1e-3)
        assert (told["weights_bytes"], told["memory_bytes"]) == (large["weights_bytes"], large["memory_bytes"])


def test_layers_of_a_model_that_is_still_to_be_fetched_are_not_refused() -> None:
    ask = ["compare", "--data", "toy", "--limit", "4", "--dry-run", "--layer", "40"]
    assert "--layers" in complaint(*ask, "tiny-mdm")
    assert "--layers" not in CliRunner().invoke(app, [*ask, "owner/nowhere"]).stderr


@pytest.mark.parametrize(("device", "reserve"), [("cpu", 3.0), ("cuda", 1.5)])
def test_the_memory_is_what_an_allocator_takes(device: str, reserve: float) -> None:
    ask = ["recall", "site-mdm", "--length", "16", "--limit", "10", "--dry-run", "--flops", "1e12", "--device", device]
    told = json.loads(CliRunner().invoke(app, [*ask, "--json"]).stdout)["results"]
    needed = told["memory_bytes"]
    assert needed == told["weights_bytes"] + reserve * told["tensor_bytes"] > told["weights_bytes"]
    assert f"about {needed / 1e9:.2f} GB in all" in CliRunner().invoke(app, ask).stdout


def test_the_time_is_that_of_a_pass_here_or_unknown() -> None:
    ask = ["recall", "--data", "toy", "--limit", "1", "--length", "14", "--device", "cpu", "--dry-run"]
    here, elsewhere = (CliRunner().invoke(app, [*ask, model]).stdout for model in ("tiny-mdm", "smdm-1028m"))
    assert "(by the time of one of its passes here)" in here
    assert "time: unknown, because the weights or the device are not on this machine; give" in elsewhere
    assert "(1e+12 operations per second)" in CliRunner().invoke(app, [*ask, "smdm-1028m", "--flops", "1e12"]).stdout


FACT = ["--prompt", "Gustav Geisser is the", "--subject", "Gustav Geisser", "--answer", " brave drummer of Rolsen."]
CANVAS = ["--length", "14"]
FACTS = ["--data", "toy", *CANVAS, "--limit", "1"]
EXACT = {
    "denoise": ["denoise", "Gustav Geisser is the", *CANVAS, "--steps", "5"],
    "trace": ["trace", *FACT, *CANVAS, "--samples", "2"],
    "trace of a step": ["trace", *FACT, *CANVAS, "--samples", "2", "--steps", "4", "--at-step", "0"],
    "patch": ["patch", *FACT[:2], "--corrupted", "Anton Trondall is the", *FACT[4:], *CANVAS],
    "lens": ["lens", *FACT[:2], *FACT[4:], *CANVAS],
    "recall": ["recall", *FACTS, "--trained", "p2d", "--steps", "4"],
    "aie": ["aie", *FACTS, "--trained", "p2d", "--samples", "2", "--known", "all"],
    "rome": ["rome", *FACT, *CANVAS, "--layer", "1", "--iterations", "2"],
    "signatures": ["signatures", "--data", "toy", "--limit", "3"],
}


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize(
    ("job", "model"),
    [*((job, "tiny-mdm") for job in EXACT), *((job, "tiny-ar") for job in ("trace of a step", "recall", "signatures"))],
)
def test_a_command_does_the_work_of_its_dry_run(job: str, model: str, tmp_path: Path, token_layers: Any) -> None:
    command, *options = EXACT[job]
    asked = [command, model, *options, "--device", "cpu", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*asked, "--dry-run", "--json", "--flops", "1e12"])
    assert result.exit_code == 0, result.output
    with token_layers() as counted:
        done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    planned = json.loads(result.stdout)["results"]["token_layers"]
    # A search stops when the answer is likely enough, which random weights do not reach.
    assert planned >= counted[0] if command == "rome" else planned == counted[0]
