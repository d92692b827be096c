"""The command `signatures`: two models on the facts that both can be given, its table, its record and its folder."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from figures import PNG
from typer.testing import CliRunner, Result

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import ReversalSignatures, reversal_signatures
from diffusion_lens.analysis.signatures.evidence import pair_bytes
from diffusion_lens.cli import app
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.data import toy_facts
from diffusion_lens.data.fact_files import open_source
from diffusion_lens.facts.taught_pairs import lay_out_pairs

pytestmark = pytest.mark.usefixtures("undrawn_figures")
MODELS = ("tiny-mdm", "tiny-ar")
ASKED = ["tiny-mdm", "--against", "tiny-ar"]


def done(*arguments: str) -> Result:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["signatures", *arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the text of a run on both bundled models; its picture is drawn."""
    folder = tmp_path_factory.mktemp("signatures") / "both"
    return folder, done(*ASKED, "--out", str(folder)).stdout


def test_the_command_gives_what_the_library_gives(both: tuple[Path, str]) -> None:
    for name in MODELS:
        model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
        expected = reversal_signatures(model, toy_facts.load().taught_pairs(model))
        saved = ReversalSignatures.load(both[0] / f"{name}.safetensors")
        assert saved.candidates == expected.candidates
        assert saved.gradient_cosine == expected.gradient_cosine
        assert saved.evidence_percentile.equal(expected.evidence_percentile)
        assert ReversalSignatures.load(both[0] / name).ids == saved.ids


def test_the_table_has_a_row_for_each_layer(both: tuple[Path, str]) -> None:
    mdm, ar = re.split(r"^tiny-ar: ", both[1], flags=re.MULTILINE)
    assert mdm.startswith("tiny-mdm: 20 pairs trained p2d, 20 candidates\n")
    saved = ReversalSignatures.load(both[0] / "tiny-mdm.safetensors")
    rows = re.findall(r"^ +(\d)  (.*)$", mdm, re.MULTILINE)
    assert [layer for layer, _ in rows] == ["0", "1", "2", "3"]
    assert saved.route_correlation is not None
    assert saved.counterfactual_correlation is not None
    for layer, row in enumerate(rows):
        shown = [float(number) for number in re.findall(r"-?\+?\d\.\d+", row[1])]
        matrices = [f"blocks.{layer}.{name}.weight" for name in ("attn.v", "attn.o", "mlp.down", "attn.q")]
        expected = [
            *saved.evidence_percentile[:, layer].tolist(),
            float(saved.shuffled_percentile[1, layer]),
            float(saved.evidence_reuse[layer]),
            *saved.edge_cut[:, layer].tolist(),
            float(saved.route_correlation[layer]),
            float(saved.counterfactual_correlation[layer]),
            *(cosine for name in matrices for cosine in saved.gradient_cosine[name]),
        ]
        assert shown == pytest.approx(expected, abs=0.0051)
    assert "isotropic queries and keys: correlation 0.62 in every layer" in mdm
    predicted, measured = re.findall(r"by (\S+) nats as predicted to first order, (\S+) as measured", mdm)[0]
    assert float(predicted) == pytest.approx(float(measured), rel=0.01)
    assert float(predicted) < 0
    assert "undefined: the reader does not see the source" in ar
    assert all(
        row.split()[4] == row.split()[6] == row.split()[7] == "-" for _, row in re.findall(r"^ +(\d)  (.*)$", ar, re.M)
    )
    assert "nan" not in both[1]


def test_one_picture_shows_both_models(both: tuple[Path, str]) -> None:
    from matplotlib.image import imread

    picture = both[0] / "signatures.png"
    assert picture.read_bytes().startswith(PNG)
    pixels = imread(picture)
    assert pixels.shape[0] >= 500
    assert pixels.shape[1] >= 1200
    assert pixels[:, :, :3].std() > 0.05


def test_a_saved_result_is_drawn_again(both: tuple[Path, str], tmp_path: Path) -> None:
    picture = tmp_path / "twin.png"
    ask = ["plot", str(both[0] / "tiny-ar.safetensors"), "--out", str(picture), "--json"]
    told = json.loads(CliRunner().invoke(app, ask).stdout)
    assert told["results"]["kind"] == "reversal signatures"
    assert told["results"]["caption"].startswith("For tiny-ar, the figure shows ")
    assert picture.read_bytes() == PNG


def test_the_record_repeats_the_run(both: tuple[Path, str]) -> None:
    told = json.loads((both[0] / "command.json").read_text())
    assert told["settings"]["facts"] == 20
    assert told["settings"]["lengths"] == [14, 14]
    assert told["record"]["model"] == "tiny-mdm"
    assert told["record"]["against"]["model"] == "tiny-ar"
    assert {*told["files"]} == {*MODELS, "picture"}
    mdm, ar = (told["results"][name] for name in MODELS)
    assert ar["route_correlation"] is None
    assert ar["isotropic_correlation"] is None
    percentile = mdm["evidence_percentile"]
    assert percentile["low"][0][0] <= percentile["mean"][0][0] <= percentile["high"][0][0]
    predicted, measured = (mdm["first_order"][name]["mean"] for name in ("predicted", "measured"))
    assert predicted == pytest.approx(measured, rel=0.01)
    assert not mdm["set_aside"]


def test_every_mean_of_the_record_has_the_ends_of_its_interval(both: tuple[Path, str]) -> None:
    numbers = json.loads((both[0] / "command.json").read_text())["results"]["tiny-mdm"]
    study = ReversalSignatures.load(both[0] / "tiny-mdm.safetensors")
    for name in ("gradient_cosine", "transfer", "first_order"):
        low, high = study.interval(name)
        assert [each["low"] for each in numbers[name].values()] == low.tolist()
        assert [each["high"] for each in numbers[name].values()] == high.tolist()
    own, shuffled = numbers["gradient_cosine"]["unembed.weight"]["low"]
    assert own > 0.8 > 0.1 > shuffled
    assert [*numbers["transfer"]] == [*numbers["gradient_cosine"]] == study.parameters
    percentile, other = (numbers[name]["mean"][1][0] for name in ("evidence_percentile", "shuffled_percentile"))
    assert percentile > 0.9 > 0.6 > other
    undefined = {name for name, value in numbers.items() if value is None}
    assert not undefined


def test_pairs_that_cannot_be_laid_out_are_told_and_recorded(tmp_path: Path) -> None:
    facts = toy_facts.load().facts(trained="p2d", held_out=False)
    people = sorted({fact.person for fact in facts})[:3]
    rows = [
        {name: value for name, value in vars(fact).items() if value is not None}
        for fact in facts
        if fact.person in people
    ]
    for row in rows:
        if row["person"] == people[0]:
            row["answer"] = f" xyzzy{row['answer']}"
    own = tmp_path / "own.json"
    own.write_text(json.dumps(rows))
    told = done("tiny-mdm", "--data", str(own), "--out", str(tmp_path / "out"))
    assert told.stdout.startswith("1 fact is set aside")
    assert "does not know 'xyzzy'" in told.stdout
    assert "tiny-mdm: 2 pairs trained p2d, 2 candidates" in told.stdout
    (reason,) = ReversalSignatures.load(tmp_path / "out" / "tiny-mdm").set_aside.values()
    assert "xyzzy" in reason


def test_an_interrupted_run_computes_only_what_is_missing(both: tuple[Path, str], tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(both[0], folder)
    lost = sorted((folder / "tiny-ar").glob("*.safetensors"))[3]
    lost.unlink()
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("tiny-*/*.safetensors")}
    assert done(*ASKED, "--out", str(folder)).stdout == both[1].replace(str(both[0]), str(folder))
    assert lost.exists()
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())


def test_what_half_precision_cannot_measure_is_said(tmp_path: Path) -> None:
    ask = ["tiny-mdm", "--limit", "2", "--trained", "d2p", "--dtype", "bfloat16", "--out", str(tmp_path)]
    said = done(*ask).stdout
    assert "tiny-mdm: 2 pairs trained d2p" in said
    assert "as predicted to first order, not measured in bfloat16" in said
    assert "nan" not in said


def test_a_dry_run_prices_the_canvases_and_the_batch() -> None:
    told = json.loads(done(*ASKED, "--dry-run", "--json", "--flops", "1e12").stdout)["results"]
    cfg = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu").cfg
    assert (told["forward_passes"], told["backward_passes"]) == (2 * 20 * (6 + 2), 2 * 20 * 2)
    assert told["positions"] == 14
    assert told["tensor_bytes"] == 20 * pair_bytes(cfg, 14, 20, 20)
    little = ["--max-bytes", str(5 * pair_bytes(cfg, 14, 5, 20))]
    told = json.loads(done(*ASKED, *little, "--dry-run", "--json", "--flops", "1e12").stdout)["results"]
    assert told["tensor_bytes"] == 5 * pair_bytes(cfg, 14, 5, 20)
    uneven = ["--limit", "5", "--batch-size", "4"]  # in batches of two and of three
    told = json.loads(done(*ASKED, *uneven, "--dry-run", "--json", "--flops", "1e12").stdout)["results"]
    assert told["tensor_bytes"] == 3 * pair_bytes(cfg, 14, 3, 5)


def priced(*models: str) -> dict[str, Any]:
    ask = [models[0], *(each for name in models[1:] for each in ("--against", name))]
    asked = [*ask, "--data", "toy", "--limit", "2", "--length", "20", "--dry-run", "--json", "--flops", "1e12"]
    results: dict[str, Any] = json.loads(done(*asked).stdout)["results"]
    return results


def test_a_dry_run_prices_each_model_by_its_own_size() -> None:
    small, large, told = priced("tiny-mdm"), priced("smdm-1028m"), priced("tiny-mdm", "smdm-1028m")
    assert told["seconds"] == pytest.approx(small["seconds"] + large["seconds"], abs=2e-3)
    assert told["forward_passes"] == small["forward_passes"] + large["forward_passes"]
    assert (told["weights_bytes"], told["memory_bytes"]) == (large["weights_bytes"], large["memory_bytes"])
    few = ["--data", "toy", "--limit", "2"]
    said = done("tiny-mdm", "--against", "smdm-1028m", *few, "--dry-run", "--flops", "1e12").stdout
    assert "4.57 GB of weights of smdm-1028m" in said
    assert "2 pairs at most: those that a tokenizer does not allow are set aside later" in said
    assert re.search(r"^tiny-mdm: .* 14 positions.*\nsmdm-1028m: .* 32 positions", said, re.MULTILINE)
    assert "at most: those" not in done(*ASKED, "--dry-run", "--flops", "1e12").stdout


def test_a_dry_run_assumes_32_positions_where_no_length_is_known() -> None:
    few = ["--data", "reversal-curse", "--limit", "2"]
    told = json.loads(done("smdm-1028m", *few, "--dry-run", "--json", "--flops", "1e12").stdout)
    assert told["settings"]["lengths"] == [None]
    assert told["results"]["positions"] == 32


def test_the_canvases_are_those_of_the_data_set(tmp_path: Path) -> None:
    """16 positions for a model trained on 32, unless another length is asked for."""
    asked = ["site-mdm", "--against", "site-ar", "--limit", "2"]
    done(*asked, "--out", str(tmp_path))
    assert json.loads((tmp_path / "command.json").read_text())["settings"]["lengths"] == [16, 16]
    fact_pairs = open_source("site").fact_pairs("p2d", limit=2)
    model = HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")
    expected = reversal_signatures(model, lay_out_pairs(model, fact_pairs, length=16))
    saved = ReversalSignatures.load(tmp_path / "site-mdm.safetensors")
    assert saved.gradient_cosine == expected.gradient_cosine
    assert saved.edge_cut[1].equal(expected.edge_cut[1])
    for requested, positions in ([], 16), (["--length", "20"], 20):
        told = json.loads(done(*asked, *requested, "--dry-run", "--json", "--flops", "1e12").stdout)
        assert told["results"]["positions"] == positions


def test_the_number_of_pairs_of_a_person() -> None:
    ask = ["tiny-mdm", "--per-person", "3", "--dry-run", "--json", "--flops", "1e12"]
    assert json.loads(done(*ask).stdout)["settings"]["facts"] == 60


def test_both_models_are_loaded_with_the_same_device_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, str | None, str]] = []
    load = ModelChoice.load

    def noted(choice: ModelChoice, on: str | None) -> HookedDiffusionTransformer:
        loaded.append((choice.name, on, choice.dtype))
        return load(choice, on=on)

    monkeypatch.setattr(ModelChoice, "load", noted)
    done(*ASKED, "--limit", "2", "--device", "cpu", "--dtype", "bfloat16", "--out", str(tmp_path))
    assert loaded == [(name, "cpu", "bfloat16") for name in MODELS]


def test_parts_of_another_model_are_not_joined(both: tuple[Path, str], tmp_path: Path) -> None:
    for name in MODELS:
        shutil.copytree(both[0] / "tiny-mdm", tmp_path / "part" / name)
    asked = ["signatures", *ASKED, "--merge", str(tmp_path / "part"), "--out", str(tmp_path / "whole")]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert "the parts to merge were made by 'tiny-mdm', not by 'tiny-ar'" in result.stderr


def test_a_batch_of_one_pair_has_no_baseline() -> None:
    for more in ([], ["--dry-run"]):
        result = CliRunner().invoke(app, ["signatures", "tiny-mdm", "--batch-size", "1", *more])
        assert result.exit_code == 2
        assert "--batch-size" in result.stderr
