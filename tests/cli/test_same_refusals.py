"""A dry run refuses what the run itself would refuse before it loads a model, and in the same words."""

import json
from pathlib import Path
from typing import Any, NoReturn, get_args

import pytest
from typed_commands import ASK, COMMANDS, annotations_of, complaint
from typer.testing import CliRunner

from diffusion_lens.cli import app
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.loading.catalogue import BUNDLED

TINY = str(BUNDLED["tiny-mdm"].path)
NEEDS = {
    "denoise": ["{model}", "Gustav"],
    "recall": ["{model}", "--limit", "1"],
    "trace": ["{model}", *ASK],
    "aie": ["{model}", "--limit", "1"],
    "patch": ["{model}", *ASK[:2], "--corrupted", "Anton Trondall is the", *ASK[4:]],
    "lens": ["{model}", *ASK[:2]],
    "rome": ["{model}", *ASK, "--layer", "0"],
    "compare": ["{model}", "--limit", "7"],
    "signatures": ["{model}", "--limit", "3"],
    "finetune": ["{model}", "--out", "out"],
    "adapt": ["{model}", "--rank", "0", "--out", "out"],
    "convert": [TINY, "new.safetensors"],
}
# What no text of an option may be, with what stands here beside it (see `beside`).
WRONG = {
    "--kind": "foo",
    "--corruption": "foo",
    "--known": "foo",
    "--canvas": "foo",
    "--severed": "foo",
    "--controls": "foo",
    "--layers": "foo",
    "--heads": "foo",
    "--neurons": "foo",
    "--steps": "foo",
    "--positions": "foo",
    "--roles": "foo",
    "--site": "foo",
    "--method": "foo",
    "--sampler": "foo",
    "--score": "foo",
    "--over-states": "foo",
    "--essence-at": "foo",
    "--at": "foo",
    "--vectors": "foo",
    "--against": "foo",
    "--statistic": "foo",
    "--precision": "foo",
    "--to": "foo",
    "--device": "foo",
    "--dtype": "foo",
    "--mode": "foo",
    "--ignore-config-keys": "foo",
    "--data": "nowhere",
    "--trained": "foo",
    "--asked": "foo",
    "--shard": "4/3",
    "--merge": "nowhere",
    "--facts": "nowhere",
    "--held-out": "nowhere",
    "--prompts": "nowhere",
    "--texts": "nowhere",
    "--corpus": "file",
    "--readout": "foo",
    "--dask": "nowhere.json",
    "--slurm": "foo",
    "--config": "nowhere.json",
    "--tokenizer": "nowhere",
    "--out": "file",
    "--export": "file",
}
FREE = {
    "--swap",
    "--prompt",
    "--subject",
    "--answer",
    "--target",
    "--corrupted",
    "--rival",
    "--mask-token",
}  # any text may be meant
# Options that fit alone and not together, or not with this model.
TOGETHER: list[tuple[str, str, list[str], str]] = [
    ("denoise", "tiny-mdm", ["--length", "9", "--max-new-tokens", "3"], "--length"),
    ("denoise", "tiny-mdm", ["--max-new-tokens", "9000"], "do not fit into the context of 'tiny-mdm'"),
    ("denoise", "tiny-ar", ["--cfg-scale", "1"], "--cfg-scale 1.0 masks the prompt, and 'tiny-ar' has no [MASK]"),
    ("denoise", "tiny-ar", ["--sampler", "confidence"], "grows at its end only. Samplers that fit: left_to_right"),
    ("recall", "tiny-ar", ["--sampler", "confidence"], "grows at its end only. Samplers that fit: left_to_right"),
    ("recall", "tiny-mdm", ["--steps", "2", "--steps", "2"], "--steps [2, 2]"),
    ("trace", "tiny-ar", ["--corruption", "mask"], "--corruption 'mask' replaces the subject by [MASK]"),
    ("trace", "tiny-mdm", ["--corruption", "swap"], "--corruption 'swap' requires --swap"),
    ("trace", "tiny-mdm", ["--layers", "0,9"], "--layers [0, 9]; give numbers from 0 to 3"),
    ("trace", "tiny-mdm", ["--kind", "mlp", "--severed", "attn"], "--severed 'attn' requires --kind 'resid'"),
    ("aie", "tiny-mdm", ["--layers", "9"], "--layers [9]; give numbers from 0 to 3"),
    ("aie", "tiny-mdm", ["--positions", "1"], "choose --roles instead"),
    ("aie", "tiny-mdm", ["--known", "all", "--steps", "4"], "--steps requires --known 'recalled'"),
    ("aie", "tiny-mdm", ["--shard", "0/2", "--merge", "part"], "--shard"),
    ("aie", "tiny-mdm", ["--slurm", "time=5"], "--slurm needs --workers, the largest number of jobs"),
    ("recall", "tiny-mdm", ["--workers", "2", "--merge", "part"], "leave out --workers"),
    ("compare", "tiny-mdm", ["--workers", "2", "--dask", "node:8786"], "give one of them"),
    ("recall", "tiny-mdm", ["--slurm", "time=5", "--dask", "node:8786"], "--dask and --slurm are two clusters"),
    ("trace", "tiny-mdm", ["--at-step", "1"], "--at-step is a setting of a denoising run: give the number of its"),
    ("trace", "tiny-mdm", ["--canvas", "free"], "--canvas is a setting of a denoising run"),
    ("trace", "tiny-mdm", ["--steps", "4", "--at-step", "4"], "--at-step 4, but the steps of this run are 0 to 3"),
    ("trace", "tiny-ar", ["--steps", "4", "--cfg-scale", "1"], "--cfg-scale 1.0 masks the prompt, and 'tiny-ar'"),
    ("aie", "tiny-mdm", ["--canvas", "free"], "--canvas is a setting of --by-step"),
    ("lens", "tiny-mdm", ["--sampler", "ancestral"], "--sampler is a setting of a denoising run"),
    ("lens", "tiny-mdm", ["--steps", "4", "--at-step", "1", "--at-step", "1"], "--at-step [1, 1] contains duplicates"),
    ("lens", "tiny-ar", ["--length", "9"], "--length 9: without --steps 'tiny-ar', which is causal, reads the prompt"),
    ("lens", "tiny-mdm", ["--layer", "5"], "--layers [5]; give numbers from 0 to 4"),
    ("lens", "tiny-mdm", ["--position", "3", "--position", "3"], "--positions [3, 3] contains duplicates"),
    ("patch", "tiny-mdm", ["--layer", "4"], "--layers [4]; give numbers from 0 to 3"),
    ("patch", "tiny-mdm", ["--head", "0"], "--heads [0], but resid_pre has no heads"),
    ("patch", "tiny-mdm", ["--site", "z", "--head", "9"], "z --heads [9]; give numbers from 0 to"),
    ("patch", "tiny-mdm", ["--prompt", " "], "the prompt ' ' is empty"),
    ("rome", "tiny-mdm", ["--export", "new"], "without it nothing is edited"),
    ("rome", "tiny-mdm", ["--layer", "4"], "--layer 4"),
    ("compare", "tiny-mdm", ["--layer", "1", "--layer", "-3"], "--layers [1, -3] contains duplicates"),
    ("signatures", "tiny-mdm", ["--against", "tiny-mdm"], "the names must differ"),
    ("signatures", "tiny-mdm", ["--trained", "both"], "--trained 'both'; it must be p2d or d2p"),
    ("signatures", "tiny-mdm", ["--max-bytes", "99"], "--max-bytes 99 is too small: 3 pairs take"),
    ("signatures", "tiny-mdm", ["--limit", "1"], "at least two candidates"),
    ("finetune", "tiny-mdm", ["--accumulate", "64"], "--accumulate 64"),
    ("finetune", "tiny-mdm", ["--precision", "fp16", "--device", "cpu"], "--precision 'fp16' needs a GPU"),
    ("finetune", "tiny-mdm", ["--out", "others"], "contains other.safetensors"),
    ("adapt", "tiny-ar", ["--out", "others"], "contains other.safetensors"),
    ("adapt", "tiny-ar", ["--rank", "4"], "deltas are of models of the families llama, qwen2, qwen3"),
    ("adapt", "tiny-mdm", [], "'tiny-mdm' is no causal model"),
    (
        "adapt",
        "tiny-ar",
        ["--length", "24", "--longest-prompt", "24"],
        "--longest-prompt 24 leaves nothing to write of --length 24 tokens",
    ),
    *(
        (command, "tiny-mdm", ["--length", "9000"], "do not fit into the context")
        for command in ("denoise", "recall", "trace", "aie", "patch", "lens", "rome", "compare", "signatures")
    ),
    *(
        (command, "tiny-mdm", ["--flops", "1e12", "--device", "meta"], "meta")
        for command in NEEDS
        if command != "convert"
    ),
]


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with files in the way; loading a model there fails the test."""

    def loaded(*_: Any) -> NoReturn:
        pytest.fail("a model was loaded")

    (tmp_path / "file").write_text("in the way")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "other.safetensors").write_text("of somebody else")
    monkeypatch.setattr("diffusion_lens.cli.load_model.ModelChoice.load", loaded)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(command: str, model: str, *more: str) -> str:
    return complaint(command, *(each.format(model=model) for each in NEEDS[command]), *more)


def texts() -> list[tuple[str, str]]:
    """Every option of every command with a dry run that takes a text or a path."""
    found = []
    for registered in app.registered_commands:
        name = registered.callback.__name__.replace("_", "-")
        options = {parameter.name: max(parameter.opts, key=len) for parameter in COMMANDS[name].params}
        for argument, annotation in annotations_of(registered).items():
            if "dry_run" not in options or not options.get(argument, "").startswith("--"):
                continue
            kinds = {annotation.__origin__, *get_args(annotation.__origin__)}
            if (kinds | {each for kind in kinds for each in get_args(kind)}) & {str, Path}:
                found.append((name, options[argument]))
    return found


def test_every_command_with_a_dry_run_is_tested() -> None:
    assert {name for name, _ in texts()} == set(NEEDS)
    assert {option for _, option in texts()} == set(WRONG) | FREE


@pytest.mark.parametrize(("command", "option"), [each for each in texts() if each[1] not in FREE])
def test_a_text_that_cannot_be_is_refused_alike(command: str, option: str, beside: Path) -> None:
    asked = [option, WRONG[option], *(["--target", " x"] if option == "--export" else [])]
    said = refused(command, "tiny-mdm", *asked)
    assert refused(command, "tiny-mdm", *asked, "--dry-run") == said
    assert WRONG[option] in said
    assert {path.name for path in beside.iterdir()} == {"file", "others"}


@pytest.mark.parametrize(("command", "model", "asked", "said"), TOGETHER)
def test_conflicting_options_are_refused_alike(
    command: str, model: str, asked: list[str], said: str, beside: Path
) -> None:
    line = refused(command, model, *asked)
    assert said in line
    assert refused(command, model, *asked, "--dry-run") == line


@pytest.mark.parametrize("target", [["file"], ["new.pth"], ["others/new.safetensors", "--to", "llada"]])
def test_a_dry_conversion_refuses_its_target(target: list[str], beside: Path) -> None:
    def complaint_of(*more: str) -> str:
        result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["convert", TINY, *target, *more])
        assert result.exit_code == 2, result.output
        return str(result.stderr)

    (beside / "others" / "config.json").write_text(json.dumps({"model_type": "llada"}))
    assert complaint_of("--dry-run") == complaint_of()


# What the tokenizer tells; the embedded pair's lies beside its weights.
LAID_OUT: list[tuple[str, str, list[str], str]] = [
    ("denoise", "tiny-mdm", ["--max-new-tokens", "64"], "do not fit into the context of 'tiny-mdm'"),
    ("denoise", "tiny-ar", ["--max-new-tokens", "64"], "do not fit into the context of 'tiny-ar'"),
    ("denoise", "tiny-mdm", ["--length", "1"], "there is nothing to fill: give --length"),
    ("trace", "tiny-mdm", ["--length", "6"], "--length 6 counts the prompt too"),
    ("trace", "tiny-mdm", ["--first-tokens", "9"], "--first-tokens 9, but"),
    ("trace", "tiny-ar", ["--answer", " xyzzy"], "does not know 'xyzzy'"),
    ("lens", "tiny-mdm", ["--length", "4"], "there is nothing to fill: give --length"),
    ("lens", "tiny-mdm", ["--length", "6", "--answer", ASK[-1]], "--length 6 counts the prompt too"),
    ("patch", "tiny-mdm", ["--length", "6"], "--length 6 counts the prompt too"),
    (
        "patch",
        "tiny-mdm",
        ["--corrupted", "today Anton Trondall is the"],
        "the prompt has 4 tokens and the corrupted one 5",
    ),
    ("patch", "tiny-mdm", ["--rival", " brave pilot"], "begin with the same token"),
    ("patch", "tiny-mdm", ["--position", "14"], "give numbers from 0 to 13"),
    ("rome", "tiny-mdm", ["--length", "6"], "--length 6 counts the prompt too"),
    ("rome", "tiny-mdm", ["--target", " xyzzy"], "does not know 'xyzzy'"),
    ("rome", "tiny-ar", ["--answer", " brave", "--target", " brave"], "the answer and its rival have the same tokens"),
    ("recall", "tiny-mdm", ["--length", "3", "--limit", "1"], "--length 3 counts the prompt too"),
    ("aie", "tiny-mdm", ["--length", "3", "--limit", "1"], "--length 3 counts the prompt too"),
    ("aie", "tiny-mdm", ["--first-tokens", "20", "--limit", "1"], "--first-tokens 20, but"),
    ("compare", "tiny-mdm", ["--length", "3", "--limit", "7"], "--length 3 counts the prompt too"),
    ("signatures", "tiny-mdm", ["--length", "3", "--limit", "3"], "more than --length 3; give --length 9 or more"),
]


@pytest.mark.parametrize(("command", "model", "asked", "said"), LAID_OUT)
def test_what_the_tokenizer_tells_is_refused_alike(
    command: str, model: str, asked: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(command, model, *asked)
    assert said in line
    assert refused(command, model, *asked, "--dry-run") == line


# Of each command that goes on in a folder: a quick run, and one that is another in the same folder.
KEPT = {
    "recall": (
        ["--limit", "1", "--steps", "2", "--length", "14"],
        [
            (["--steps", "1"], "steps: [2] there, [2, 1] here"),
            (["--temperature", "0.5"], "temperature: 0.0 there, 0.5 here"),
            (["--cfg-scale", "2"], "--cfg-scale: 0.0 there, 2.0 here"),
            (["--sampler", "ancestral"], "sampler.name: 'confidence' there, 'ancestral' here"),
            (["--length", "13"], "length: 14 there, 13 here"),
            (["--seed", "3"], "seed: 1234 there, 3 here"),
            (["--limit", "2"], "facts: "),
        ],
    ),
    "aie": (
        ["--limit", "1", "--samples", "1", "--noise", "1", "--known", "recalled", "--steps", "2"],
        [
            (["--samples", "2"], "samples: 1 there, 2 here"),
            (["--noise", "2"], "noise: 1.0 there, 2.0 here"),
            (["--kind", "mlp"], "kind: 'resid' there, 'mlp' here"),
            (["--first-tokens", "2"], "--first-tokens: 1 there, 2 here"),
            (["--steps", "3"], "loop.steps: 2 there, 3 here"),
            (["--by-step", "--first-tokens", "1"], "canvas: "),
            (["--limit", "2"], "facts: "),
        ],
    ),
    "compare": (
        ["--limit", "7", "--layer", "1", "--resamples", "9"],
        [
            (["--layer", "0"], "layers: [1] there, [1, 0] here"),
            (["--first-tokens", "2"], "--first-tokens: 1 there, 2 here"),
            (["--length", "13"], "length: 14 there, 13 here"),
            (["--limit", "8"], "facts: "),
        ],
    ),
    "signatures": (
        ["--limit", "4"],
        [
            (["--batch-size", "2"], "--batch-size: 4 there, 2 here"),
            (["--length", "13"], "facts: 4 differ"),
            (["--limit", "3"], "candidates: "),
            (["--trained", "d2p"], "facts: 8 differ"),
        ],
    ),
    "finetune": (["--data", "rows.jsonl", "--epochs", "1", "--batch-size", "2"], [(["--lr", "1e-3"], "config.lr: ")]),
    "adapt": (
        ["--rank", "0", "--n-texts", "8", "--temperature", "3", "--length", "12", "--steps", "1"],
        [(["--lr", "1e-3"], "settings.lr: "), (["--steps", "2"], "settings.steps: ")],
    ),
}


@pytest.mark.parametrize("command", KEPT)
def test_a_folder_of_another_run_is_refused_alike(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "Gustav Geisser is", "completion": " the brave drummer of Rolsen."}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    first, others = KEPT[command]
    model = "tiny-ar" if command == "adapt" else "tiny-mdm"
    begun = [model, *first, "--out", "out"]
    nothing = [] if command in ("adapt", "finetune") else ["--shard", "98/99"]  # the folder is begun, and its work left
    CliRunner().invoke(app, [command, *begun, *nothing])
    assert list(Path("out").rglob("run.json"))
    dry = CliRunner().invoke(app, [command, *begun, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    for other, said in others:
        asked = [*first, "--out", "out", *other]
        line = refused(command, model, *asked)
        assert "was made with other settings" in line
        assert said in line
        assert refused(command, model, *asked, "--dry-run") == line


@pytest.mark.parametrize("known", ["one-canvas", "one_canvas"])
def test_a_rule_of_averages_is_named_as_its_option_is_typed(known: str, beside: Path) -> None:
    assert "--known 'one-canvas' does not" in complaint("aie", "tiny-mdm", "--known", known, "--steps", "4")
    line = complaint("aie", "tiny-mdm", "--known", "two-canvases")
    assert "'two-canvases'" in line
    assert "recalled, one-canvas, all" in line


@pytest.mark.parametrize(
    ("options", "positions"), [(["--max-new-tokens", "6"], 10), (["--length", "14"], 14), ([], 14)]
)
def test_a_dry_run_prices_the_canvas_that_the_run_lays_out(options: list[str], positions: int) -> None:
    result = CliRunner().invoke(app, ["denoise", "tiny-mdm", "Gustav Geisser is the", *options, "--dry-run", "--json"])
    assert json.loads(result.stdout)["results"]["positions"] == positions


def test_a_model_without_weights_is_one_that_lies_on_this_machine() -> None:
    assert ModelChoice("smdm-1028m").without_weights() is None
    blank = ModelChoice("tiny-ar").without_weights()
    assert blank is not None
    assert {parameter.device.type for parameter in blank.parameters()} == {"meta"}
    assert blank.to_tokens("Gustav").device.type == "cpu"
