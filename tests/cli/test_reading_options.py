"""`--mode`, `--block-size` and `--mask-token-id` say what the config of a checkpoint leaves open."""

import json
from pathlib import Path

import pytest
from page_reader import PageFile
from typed_commands import invoke
from typer.main import get_command

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import ReversalSignatures
from diffusion_lens.checks.weights import Expected
from diffusion_lens.cli import app
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.workers import require_model
from diffusion_lens.explorer import Session
from diffusion_lens.explorer.as_python import load_code
from diffusion_lens.loading import shape_of
from diffusion_lens.records.results import provenance, require_same_run
from weight_conversion import export

NEMOTRON = Path(__file__).parents[1] / "golden" / "nemotron"
NAMES = {"mode", "block_size", "mask_token_id"}


@pytest.fixture
def folder(configs: dict, specimen: type, tmp_path: Path) -> Path:
    """A checkpoint of several modes, with a tokenizer."""
    bundled = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    config = {**configs["nemotron"], "vocab_size": bundled.cfg.d_vocab, "mask_token_id": bundled.cfg.mask_token_id}

    model = specimen(config).model
    bundled.tokenizer.save_pretrained(tmp_path / "both")
    export(model.state_dict(), model.cfg.architecture, tmp_path / "both" / "model.safetensors")
    return tmp_path / "both"


def test_every_command_that_takes_a_config_takes_them() -> None:
    commands = get_command(app).commands
    takers = {name for name, command in commands.items() if "config" in {each.name for each in command.params}}
    lacking = {name for name in takers if NAMES - {each.name for each in commands[name].params}}
    assert lacking == {"adapt"}  # which reads a causal model; its --mask-token is that of the twin


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((), ("bidirectional", 100, None)),
        (("--mode", "ar"), ("causal", None, None)),
        (("--mode", "block", "--block-size", "8"), ("block_causal", 100, 8)),
        (("--mask-token-id", "7"), ("bidirectional", 7, None)),
    ],
)
def test_info_describes_the_model_that_is_asked_for(asked: tuple[str, ...], expected: tuple) -> None:
    result = invoke("info", str(NEMOTRON), *asked, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)["results"]
    assert (told["attention_dir"], told["mask_token_id"], told.get("causal_block")) == expected


def test_a_choice_loads_what_it_describes() -> None:
    choice = ModelChoice(str(NEMOTRON), device="cpu", mode="block", block_size=8)
    outline = choice.without_weights()
    assert outline is not None
    assert choice.load().cfg.architecture == outline.cfg.architecture == choice.shape()


def test_published_names_are_read_in_the_same_way() -> None:
    assert shape_of("nemotron-labs-diffusion-3b", options={"mode": "ar"}).attention_dir == "causal"
    for command, message in (
        (["info", "smdm-1028m", "--mode", "ar"], "--mode 'ar' does not apply to a checkpoint of the family 'lit_gpt'"),
        (
            ["info", "tiny-mdm", "--mask-token-id", "4"],
            "the family 'lit_gpt', whose config says whether there is a [MASK]",
        ),
        (["info", str(NEMOTRON), "--mode", "causal"], "'bidirectional', 'block', 'ar': pass one of them as --mode"),
        (["info", "dream-7b-base", "--block-size", "4"], "--block-size 4 does not apply to a checkpoint of the family"),
        (["info", "nemotron-labs-diffusion-3b", "--block-size", "4"], "Leave --block-size out, or pass --mode 'block'"),
        (["info", str(NEMOTRON), "--mode", "ar", "--mask-token-id", "4"], "it is causal and has no [MASK]"),
    ):
        result = invoke(*command)
        assert result.exit_code == 2
        assert message in result.output, result.output


def test_the_explorer_shows_both_modes_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    asked = ["--prompt", "Gustav Geisser is the", "--length", "8", "--steps", "2", "--device", "cpu"]
    result = invoke("explore", str(folder), "--against", "pair", *asked, "--out", str(out))
    assert result.exit_code == 0, result.output
    models = PageFile(out.read_text(encoding="utf-8")).manifest["models"]
    assert [model["grows"] for model in models] == [False, True]
    name = HookedDiffusionTransformer.from_pretrained(folder, device="cpu").cfg.model_name
    assert [model["name"] for model in models] == [f"{name}@bidirectional", f"{name}@ar"]
    assert f"from_pretrained('{name}', mode='ar')" in json.dumps(PageFile(out.read_text(encoding="utf-8")).manifest)


@pytest.mark.parametrize("options", [{"mode": "ar"}, {"mode": "block", "block_size": 8}])
def test_code_loads_the_model_as_it_was_loaded(options: dict, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "my_note": "trained on a Tuesday"}))
    model = HookedDiffusionTransformer.from_pretrained(folder, device="cpu", ignore_config_keys=["my_note"], **options)
    session = Session([model])
    run = session.run({"prompt": "Gustav Geisser is the", "length": 8})
    for code in (load_code(provenance(model, model.cfg)), run["python"]["run"]):
        names: dict = {}
        exec(code.replace(repr(model.cfg.model_name), repr(str(folder))), names)
        assert names["model"].cfg.architecture == model.cfg.architecture


def test_how_a_model_was_loaded_is_no_other_study(folder: Path) -> None:
    records = [
        provenance(model, model.cfg)
        for options in ({}, {"mode": "bidirectional"})
        for model in [HookedDiffusionTransformer.from_pretrained(folder, device="cpu", **options)]
    ]
    assert records[0].get("loaded_with") != records[1]["loaded_with"]
    require_same_run(*records, "this folder")


def test_two_modes_of_a_checkpoint_are_two_models_of_a_study(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["signatures", f"{folder}@block", "--block-size", "4", "--against", f"{folder}@ar", "--limit", "2"]
    facts = ["--data", "toy", "--length", "14", "--device", "cpu", "--out", str(out)]
    result = invoke(*asked, *facts)
    assert result.exit_code == 0, result.output
    studies = {mode: ReversalSignatures.load(out / f"both@{mode}.safetensors") for mode in ("block", "ar")}
    name = studies["ar"].record["model"]
    for mode, direction in (("block", "block_causal"), ("ar", "causal")):
        record = studies[mode].record
        assert (record["model"], record["mode"], record["architecture"]["attention_dir"]) == (name, mode, direction)
        assert repr(studies[mode]).startswith(f"ReversalSignatures({name}@{mode}, ")
    record = json.loads((out / "command.json").read_text())["record"]
    assert (record["mode"], record["against"]["mode"]) == ("block", "ar")
    require_model(ModelChoice(f"{folder}@ar"), studies["ar"].record)
    with pytest.raises(ValueError, match=f"made by '{name}@block', not by '.*both@ar'"):
        require_model(ModelChoice(f"{folder}@ar"), studies["block"].record)


def test_compare_takes_two_modes_of_a_checkpoint(folder: Path) -> None:
    modes = [f"{folder}@block", f"{folder}@ar"]
    asked = ["--data", "toy", "--length", "14", "--limit", "20", "--block-size", "4", "--dry-run"]
    result = invoke("compare", *modes, *asked)
    assert result.exit_code == 0, result.output
    result = invoke("compare", modes[1], modes[1], *asked[:4], "--dry-run")
    assert result.exit_code == 2
    assert "the names must differ. Two modes of one checkpoint are NAME@block and NAME@ar" in result.output
    result = invoke("info", f"{folder}@causal")
    assert "'causal' is not a mode; the modes are bidirectional, block, ar" in result.output
    result = invoke("info", modes[0], "--mode", "ar")
    assert "names the mode 'block', and --mode is 'ar': give one of them" in result.output


def test_a_folder_whose_name_ends_like_a_mode_is_that_folder(folder: Path) -> None:
    other = folder.rename(folder.with_name("both@ar"))
    choice = ModelChoice(str(other))
    assert (choice.name, choice.mode, choice.shape().attention_dir) == (str(other), None, "bidirectional")


def test_the_check_reads_the_checkpoint_in_a_mode(tmp_path: Path) -> None:
    for asked in (("--mode", "ar"), ()):
        result = invoke("check", f"{NEMOTRON}{'' if asked else '@ar'}", *asked, "--device", "cpu", "--json")
        findings = {each["check"]: each for each in json.loads(result.stdout)["findings"]}
        assert findings["config"]["numbers"]["architecture"]["attention_dir"] == "causal"
    assert Expected.of("nemotron-labs-diffusion-3b", "ar").architecture.attention_dir == "causal"
    with pytest.raises(ValueError, match="mode='ar' does not apply"):
        Expected.of("tiny-mdm", "ar")


def test_a_dry_run_counts_the_model_that_is_asked_for(folder: Path) -> None:
    asked = ["denoise", str(folder), "Gustav Geisser is the", "--length", "8", "--steps", "2", "--dry-run", "--json"]
    passes = {}
    for mode in ("bidirectional", "ar"):
        result = invoke(*asked, "--mode", mode)
        assert result.exit_code == 0, result.output
        passes[mode] = json.loads(result.stdout)["results"]["forward_passes"]
    assert passes["ar"] > passes["bidirectional"] == 2
