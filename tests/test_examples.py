"""Examples run offline in their own folders, print the expected results, and write the files that they name."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from example_checks import CHECKS, FILES, check
from quick_examples import QUICKLY

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer

pytestmark = pytest.mark.usefixtures("undrawn_figures")

# Loaded by path: a module whose name begins with a digit cannot be imported by name.
EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "examples").glob("*.py"))}
# `make docs` runs every example for the gallery and fails where `check` does; these take longest.
RUN_BY_THE_BUILD = {
    "03_another_order",
    "04_steer_at_chosen_steps",
    "05_your_own_hook",
    "06_recall_by_steps",
    "07_trace_both_ways",
    "08_average_effect",
    "09_patch_forward_into_reverse",
    "10_keys_and_values",
    "11_logit_lens_by_step",
    "12_sparse_dictionary",
    "13_probe_of_time",
    "14_attention_sinks",
    "15_circuits",
    "16_three_signatures",
    "17_one_layer",
    "18_two_sites",
    "19_edit_facts",
    "20_kinds_of_diffusion",
    "reproduce_blog",
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES[name])
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_every_example_has_its_check() -> None:
    assert set(EXAMPLES) == set(CHECKS) == set(FILES)
    assert set(EXAMPLES) > RUN_BY_THE_BUILD


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - RUN_BY_THE_BUILD))
def test_the_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    load(name).main(QUICKLY.get(name, []))
    check(name, capsys.readouterr().out)


def test_people_of_your_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    person, answers = ["Mondall Rorrick", "guard of Rurholm"], {"forward": "p(guard)", "reverse": "p(Mondall)"}
    for name, quickly in (
        ("07_trace_both_ways", ["--samples", "1", "--length", "12"]),
        ("05_your_own_hook", []),
    ):
        load(name).main(["--model", "site-ar", "--person", *person, *quickly])
        printed = capsys.readouterr().out
        assert all(answer in printed for answer in answers.values())
    with pytest.raises(SystemExit):
        load("09_patch_forward_into_reverse").main(
            ["--model", "site-ar", "--other", "Mondall Rorrick", "guard Rurholm"]
        )
    assert "same number of tokens" in capsys.readouterr().err


def test_facts_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    known = {"prompt": "Mondall Rorrick is the", "subject": "Mondall Rorrick", "answer": " guard of Rurholm."}
    unknown = {**known, "prompt": "Rorrick Brosser is the", "subject": "Rorrick Brosser"}
    Path("facts.json").write_text(json.dumps([known, unknown]), encoding="utf-8")
    load("08_average_effect").main(["--model", "site-ar", "--file", "facts.json"])
    assert "site-ar, file: knows 1 of 2 facts" in capsys.readouterr().out


def test_the_report_shows_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that knows nothing, taught a little: each part says so, and an interrupted run goes on where it was."""
    monkeypatch.chdir(tmp_path)
    tiny = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    small = replace(tiny.cfg.architecture, n_layers=2, d_model=32, d_head=8, d_mlp=48)
    cfg = DiffusionConfig.from_architecture(small, device="cpu")
    HookedDiffusionTransformer(cfg, tiny.tokenizer, seed=0).save_pretrained("untaught")
    options = ["--model", "untaught", "--data", "toy", "--finetune", "--epochs", "0.006", "--facts", "1"]
    run = [*options, "--samples", "1", "--limit", "2", "--out", "study"]
    example = load("reproduce_blog")
    example.main(run)
    printed = capsys.readouterr().out
    for part in (
        "untaught: 1 updates of 32 texts of toy",
        "untaught recalls 0% as trained, and 0% in reverse",
        "recalled nobody in both directions",
        "mlp   knows 0 of 1",
        "no block is selected and no keys are compared",
    ):
        assert part in printed
    report = Path("study/report.html").read_text(encoding="utf-8")
    shown = re.findall(r'(?:src|href)="([^"]+)"', report)
    assert set(shown) == {"recall.png", "trace_p2d.png", "trace_d2p.png"}
    assert all((Path("study") / file).is_file() for file in shown)
    assert set(re.findall(r"\]\((\S+)\)", Path("study/report.md").read_text(encoding="utf-8"))) == set(shown)

    written = {path: path.stat().st_mtime_ns for path in Path("study").rglob("*.safetensors")}
    Path("study/trace/untaught_d2p.safetensors").unlink()
    example.main(run)
    assert Path("study/report.html").read_text(encoding="utf-8") == report
    again = {path: path.stat().st_mtime_ns for path in Path("study").rglob("*.safetensors")}
    assert [path.name for path in written if again[path] != written[path]] == ["untaught_d2p.safetensors"]
    with pytest.raises(ValueError, match=r"study was made with other settings.* \(limit: 2 there, 3 here"):
        example.main([*options, "--samples", "1", "--limit", "3", "--out", "study"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_says_where_the_real_thing_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = load(name)
    with pytest.raises(SystemExit) as raised:
        example.main(["--help"])
    assert raised.value.code == 0
    assert "smdm-1028m" in capsys.readouterr().out


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_page(name: str) -> None:
    assert load(name).__doc__
    most = 335 if name == "reproduce_blog" else 95
    assert len(EXAMPLES[name].read_text(encoding="utf-8").splitlines()) <= most
