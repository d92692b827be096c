"""The command line, as somebody types it."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

PNG = b"\x89PNG\r\n\x1a\n"


def invoke(*arguments: str) -> Result:
    from diffusion_lens.cli import app

    return CliRunner(env={"COLUMNS": "400"}).invoke(app, arguments)


def test_the_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="diffusion-lens")
    assert script.value == "diffusion_lens.cli:app"


def test_help_names_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert {"demo", "models"} <= set(result.stdout.split())


def test_the_demo_shows_the_reversal_curse(tmp_path: Path) -> None:
    from matplotlib.image import imread

    result = invoke("demo", "--out", str(tmp_path / "pictures"))
    assert result.exit_code == 0, result.output

    asked = re.findall(r"^(tiny-\w+), asked (\w+):", result.stdout, re.MULTILINE)
    verdicts = re.findall(r"^  -> .*?  (right|wrong)\b", result.stdout, re.MULTILINE)
    assert dict(zip(asked, verdicts, strict=True)) == {
        ("tiny-mdm", "forwards"): "right",
        ("tiny-mdm", "backwards"): "right",
        ("tiny-ar", "forwards"): "right",
        ("tiny-ar", "backwards"): "wrong",
    }
    for name in ("denoising.png", "causal_traces.png"):
        picture = tmp_path / "pictures" / name
        assert picture.read_bytes().startswith(PNG)
        pixels = imread(picture)
        assert min(pixels.shape[:2]) >= 500, f"{name} is only {pixels.shape}"
        assert pixels.std() > 0.05, f"{name} is blank"
        assert str(picture) in result.stdout


def test_the_demo_refuses_a_file_as_folder(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("not a folder")
    result = invoke("demo", "--out", str(taken))
    assert result.exit_code == 2
    complaint = [line for line in result.output.splitlines() if "--out" in line]
    assert len(complaint) == 1
    assert f"{taken} is a file; the pictures need a folder" in complaint[0]
    assert "Traceback" not in result.output
    assert taken.read_text() == "not a folder"


@pytest.mark.parametrize(
    ("name", "sees"), [("tiny-mdm", "bidirectional"), ("tiny-ar", "causal"), ("smdm-1028m", "bidirectional")]
)
def test_models_lists_every_name(name: str, sees: str) -> None:
    result = invoke("models")
    assert result.exit_code == 0
    (row,) = (line for line in result.stdout.splitlines() if line.split()[0] == name)
    assert sees in row.split()
