"""Invalid requests and failures of the program have different errors, each in one line."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typed_commands import invoke
from typer.main import get_command

from diffusion_lens import Fact
from diffusion_lens.cli import app
from diffusion_lens.cli.app import in_options, is_refusal
from diffusion_lens.data.fact_files import read_facts
from diffusion_lens.loading import shape_of
from diffusion_lens.loading.catalogue import find_pretrained
from diffusion_lens.model.inputs import check_tokens

TWICE = ["--prompt", "Ada saw Ada and", "--subject", "Ada", "--answer", " ran"]

ROME = ["rome", "tiny-ar", *TWICE, "--occurrence", "0", "--layer", "0"]


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_what_the_package_refuses_is_a_refusal() -> None:
    import torch

    from diffusion_lens import DiffusionConfig

    cfg = DiffusionConfig.from_architecture(shape_of("tiny-mdm"), device="cpu")
    assert is_refusal(raised(lambda: Fact("a", "b", "c").subject_span))
    assert is_refusal(raised(lambda: check_tokens(torch.ones(1, 2), cfg))), "a TypeError of ours"
    assert is_refusal(raised(lambda: read_facts(Path("nowhere.jsonl")))), "the system's errors"


def test_a_fault_is_no_refusal_whatever_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (lambda: {}["key"], lambda: int("x"), lambda: "a" + 1):  # type: ignore[operator,index]
        assert not is_refusal(raised(fault))

    def broken(*_: object, **__: object) -> object:
        return {"a": 1}["b"]

    monkeypatch.setattr("diffusion_lens.loading.catalogue.find_pretrained", broken)
    result = invoke("models")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: KeyError: 'b' (a failure of the program")


def test_a_lookup_that_fails_inside_the_package_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_lens.loading.catalogue._all_models", lambda: [None])
    error = raised(find_pretrained)
    assert isinstance(error, AttributeError)
    assert not is_refusal(error)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("cfg_scale=-1.0; it must be finite", "--cfg-scale -1.0; it must be finite"),
        ("give length= (places in all) or max_new_tokens=", "give --length (places in all) or --max-new-tokens"),
        ("layer=9 is not one", "--layer 9 is not one"),
        ("d_head=9", "d_head=9"),
        ("(all of them: diffusion_lens.list_pretrained())", "(all of them: diffusion-lens models)"),
    ],
)
def test_python_arguments_become_options(said: str, meant: str) -> None:
    options = {
        "cfg_scale": "--cfg-scale",
        "length": "--length",
        "max_new_tokens": "--max-new-tokens",
        "layers": "--layer",
        "layer": "--layer",
    }
    assert in_options(said, options) == meant


@pytest.mark.parametrize(
    ("command", "said", "meant"),
    [
        ("aie", "loop= requires known='recalled'", "--steps requires --known 'recalled'"),
        (
            "aie",
            "or other settings of the loop (loop=), or average",
            "or other settings of the loop (--steps), or average",
        ),
        ("rome", "steps=0; it must be at least 1", "--iterations 0; it must be at least 1"),
        ("recall", "steps=0; it must be at least 1", "--steps 0; it must be at least 1"),
        ("models", "max_bytes=3", "--largest 3"),
        ("convert", "unknown family 'x'; known are", "unknown --to 'x'; known are"),
        (
            "convert",
            "cannot express this: pass family='diffusion_lens'",
            "cannot express this: pass --to 'diffusion_lens'",
        ),
        ("models", "family='x' is unknown", "--family 'x' is unknown"),
        ("finetune", "cannot be divided; take a larger batch_size", "cannot be divided; take a larger --batch-size"),
        ("finetune", "mixed_precision is 'x'", "--precision is 'x'"),
        (
            "check",
            "nothing in the network, pass ignore_config_keys=['qk_scale', 'softcap'] [config: x]",
            "nothing in the network, pass --ignore-config-keys qk_scale --ignore-config-keys softcap [config: x]",
        ),
        ("denoise", "without cfg_scale there is no such branch.", "without --cfg-scale there is no such branch."),
        ("denoise", "the folder runs/cfg_scale/1 is empty", "the folder runs/cfg_scale/1 is empty"),
        ("denoise", "the config has no field 'cfg_scale'", "the config has no field 'cfg_scale'"),
    ],
)
def test_arguments_that_the_library_calls_otherwise(command: str, said: str, meant: str) -> None:
    options = get_command(app)._options([command])
    assert in_options(said, options) == meant


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trace", "tiny-mdm", *TWICE], r"name one with --occurrence 0 to 1"),
        (["trace", "tiny-mdm", *TWICE, "--occurrence", "2"], r"--occurrence 2, but 'Ada' occurs 2 times"),
        (
            ["denoise", "tiny-mdm", "Gustav", "--length", "3", "--max-new-tokens", "2"],
            r"--length .* or --max-new-tokens",
        ),
        (["denoise", "tiny-mdm", "Gustav Geisser is the", "--length", "4"], r"give --length .* or --max-new-tokens"),
        (["models", "--kind", "mask"], r"--kind 'mask' is unknown; it must be masked or causal"),
        (["models", "--family", "gpt"], r"--family 'gpt' is unknown; the families are .*nearest"),
        (["models", "no such model"], r"fits all of these filters"),
        (["recall", "tiny-mdm", "--limit", "0"], r"--limit 0"),
        ([*ROME, "--iterations", "0"], r"--iterations 0; it must be at least 1"),
        ([*ROME, "--prefixes", "-1"], r"--prefixes -1; it must be at least 0"),
        (["recall", "tiny-mdm", "--limit", "1", "--dry-run", "--flops", "-1"], r"--flops -1"),
        (["recall", "tiny-mdm", "--limit", "1", "--dry-run", "--device", "tpu9"], r"--device 'tpu9'"),
    ],
)
def test_errors_name_the_options_of_the_command(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert re.search(said, line), line
    assert not re.search(r"\w=|\w\(\)", line)


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("matplotlib", "plot", ["recall", "tiny-mdm"]),
        ("matplotlib", "plot", ["denoise", "tiny-mdm", "Gustav is", "--out", "run"]),
        ("matplotlib", "plot", ["trace", "tiny-mdm", *TWICE, "--occurrence", "0", "--out", "run"]),
        ("matplotlib", "plot", ["demo"]),
        ("sacrebleu", "eval", ["recall", "tiny-mdm", "--score", "word_bleu"]),
        ("submitit", "cluster", ["aie", "tiny-mdm", "--slurm", "time=5", "--workers", "2"]),
        ("distributed", "cluster", ["recall", "tiny-mdm", "--dask", "node:8786"]),
    ],
)
def test_a_missing_extra_is_found_before_the_work(
    package: str, extra: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diffusion_lens.cli.load_model.ModelChoice.load", loaded)
    there = {name: object() for name in ("matplotlib", "sacrebleu") if name != package}
    monkeypatch.setattr("diffusion_lens.cli.report.find_spec", there.get)
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert f"{package}, which is not installed: pip install 'diffusion-lens[{extra}]'" in result.stderr
    assert list(tmp_path.iterdir()) == []
