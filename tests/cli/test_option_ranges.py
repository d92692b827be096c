"""Numbers that cannot be are refused as they are read, and an error names the option that was given."""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from typed_commands import ASK, COMMANDS, annotations_of, complaint

from diffusion_lens.cli import app
from diffusion_lens.cli.app import in_options
from diffusion_lens.model.config import as_device, device_named

NEEDS = {
    "models": [],
    "info": ["tiny-mdm"],
    "check": ["tiny-mdm"],
    "convert": ["one.safetensors", "other.safetensors"],
    "denoise": ["tiny-mdm", "Gustav"],
    "explore": ["tiny-mdm", "--out", "page.html"],
    "recall": ["tiny-mdm"],
    "trace": ["tiny-mdm", *ASK],
    "aie": ["tiny-mdm"],
    "patch": ["tiny-mdm", *ASK[:2], "--corrupted", "Anton Trondall is the", *ASK[4:]],
    "lens": ["tiny-mdm", *ASK[:2]],
    "plot": ["result.safetensors"],
    "rome": ["tiny-mdm", *ASK, "--layer", "0"],
    "compare": ["tiny-mdm"],
    "signatures": ["tiny-mdm"],
    "dictionary-train": ["site-mdm", "--layer", "1", "--out", "features.safetensors"],
    "finetune": ["tiny-mdm", "--out", "out"],
    "adapt": ["tiny-ar", "--rank", "0", "--out", "out"],
}
# What no number of this option can be.
WRONG = {
    (
        "0",
        "-1",
    ): "length max-new-tokens first-tokens limit steps samples window resamples iterations batch-size accumulate "
    "checkpoint-every max-bytes per-person block-size "
    "seeds depth workers n-features k updates n-texts longest-prompt top-k predictions evaluate-every",
    ("-1",): "occurrence prefixes ask at-step step head attention mask-token-id check rank anneal warmup crop patience",
    ("-0.5", "nan", "inf"): "temperature cfg-scale noise weight-decay clamp-norm-factor kl-factor stop-below "
    "lr-end distil states",
    ("-0.5", "1.5", "nan"): "top-p distil-share one-mask",
    ("0", "-1", "nan", "inf"): "lr epochs flops largest alpha clip",
    ("-1", str(2**64)): "seed",
    ("-1", str(2**16)): "port",
    ("0", "2", "73", "nan", "inf"): "font-size",
}
IMPOSSIBLE = {f"--{name}": numbers for numbers, names in WRONG.items() for name in names.split()}
NO_RANGE = {
    "--layer",
    "--position",
    "--head",
    "--neuron",
}  # negative ones count from the end; what the model has is known only with the model


def numbers() -> list[tuple[str, str]]:
    """Every option of every command that takes a number."""
    found = []
    for registered in app.registered_commands:
        name_of_command = registered.callback.__name__.replace("_", "-")
        command = COMMANDS[name_of_command]
        options = {parameter.name: max(parameter.opts, key=len) for parameter in command.params}
        for name, annotation in annotations_of(registered).items():
            kinds = {annotation.__origin__, *get_args(annotation.__origin__)} if name in options else set()
            kinds |= {each for kind in kinds for each in get_args(kind)}  # a list of numbers
            if kinds & {int, float} and options[name].startswith("--"):
                found.append((name_of_command, options[name]))
    return found


@pytest.mark.parametrize(("command", "option"), numbers())
def test_a_number_that_cannot_be_is_refused(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in () if option in NO_RANGE else IMPOSSIBLE[option]:
        said = complaint(command, *NEEDS[command], option, number)
        assert re.match(rf"Error: {option} {number.removesuffix('.0')}", said), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["finetune", *NEEDS["finetune"], "--precision", "x"],
            "--precision 'x' is unknown; it must be one of no, bf16, fp16",
        ),
        (["finetune", *NEEDS["finetune"], "--ask", "-1"], "--ask -1; it must be at least 0"),
        (["models", "--largest", "0.0000001"], "fits all of these filters"),
        (["recall", "tiny-mdm", "--trained", "x"], "has no fact trained x"),
    ],
)
def test_the_error_names_the_option(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = complaint(*arguments)
    assert said in line
    assert not re.search(r"\w=|\w\(\)|mixed_precision|limit", line)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("'t' has no tokenizer: pass tokenizer='folder' to from_pretrained", "'t' has no tokenizer: name one with --"),
        ("device 'foo' is unknown", "--device 'foo' is unknown"),
        ("in the prompt 'the device 'foo''", "in the prompt 'the device 'foo''"),
        ("give it person= and asked=, by which", 'give it the fields "person" and "asked", by which'),
        ("Try a smaller lr (it is 1 in this step) or a lower clip in a new folder,", "Try a smaller --lr (it is 1 "),
    ],
)
def test_advice_of_the_library_in_the_words_of_the_command(said: str, meant: str) -> None:
    options = {name: f"--{name}" for name in ("tokenizer", "device", "prompt", "lr")}
    assert in_options(said, options).startswith(meant)


@pytest.mark.parametrize(("command", "more"), [("check", []), ("denoise", []), ("denoise", ["--dry-run"])])
def test_an_unknown_device_is_refused_in_one_short_line(command: str, more: list[str]) -> None:
    line = complaint(command, *NEEDS.get(command, ["tiny-mdm"]), "--device", "foo", *more)
    assert line == "Error: --device 'foo' is unknown; it must be 'cpu', 'cuda', 'cuda:1' or 'mps'"


def test_a_device_may_be_named_that_is_not_here() -> None:
    assert device_named("cuda:7") == torch.device("cuda:7")
    for name in ("xla", "hpu"):
        with pytest.raises(ValueError, match=f"device '{name}' is not available: torch has no backend for it"):
            as_device(name)
    assert as_device("cpu") == torch.device("cpu")


def test_a_merge_says_what_is_missing_before_it_joins_anything(tmp_path: Path) -> None:
    (tmp_path / "part" / "tiny-mdm").mkdir(parents=True)
    (tmp_path / "part" / "tiny-mdm" / "run.json").write_text("{}")
    line = complaint("compare", "tiny-mdm", "tiny-ar", "--merge", str(tmp_path / "part"), "--out", str(tmp_path / "o"))
    assert "--merge" in line
    assert "contains nothing of tiny-ar to join: give the --out folders" in line
