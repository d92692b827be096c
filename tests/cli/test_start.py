"""What happens before a command has done anything: help, version, the package's face, and Ctrl-C."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
from processes import hears_ctrl_c
from typer.testing import CliRunner

import diffusion_lens
from diffusion_lens.cli import app
from diffusion_lens.cli.app import ORDER

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
HEAVY = ("torch", "transformers", "transformer_lens", "numpy", "scipy", "matplotlib")


def test_help_imports_nothing_heavy() -> None:
    program = "import sys\nfrom diffusion_lens.cli import app\n"
    for arguments in (["--help"], ["--version"], *([name, "--help"] for name in ORDER)):
        program += (
            f"try:\n    app({arguments})\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
            f"assert not set({HEAVY}) & set(sys.modules), {arguments}\n"
        )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "diffusion-lens models" in child.stdout


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == f"diffusion-lens {diffusion_lens.__version__}"
    assert diffusion_lens.__version__ == version("diffusion-lens")


def test_the_face_has_every_name_and_says_so() -> None:
    assert set(diffusion_lens.__all__) <= set(dir(diffusion_lens))
    for name in diffusion_lens.__all__:
        assert getattr(diffusion_lens, name) is not None
    from diffusion_lens import hooked_diffusion_transformer

    assert diffusion_lens.HookedDiffusionTransformer is hooked_diffusion_transformer.HookedDiffusionTransformer
    with pytest.raises(AttributeError, match="has no attribute 'HookedTransformer'"):
        _ = diffusion_lens.HookedTransformer
    with pytest.raises(ImportError, match="cannot import name 'Facts'"):
        from diffusion_lens import Facts  # noqa: F401


def test_rooms_are_attributes_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(diffusion_lens, "catalogue", raising=False)
    monkeypatch.delitem(sys.modules, "diffusion_lens.loading.catalogue", raising=False)
    assert diffusion_lens.loading.catalogue.PUBLISHED


def test_commands_are_listed_in_the_order_of_work() -> None:
    said = CliRunner().invoke(app, ["--help"]).stdout
    shown = [
        line.split()[0]
        for line in said.split("Commands:")[1].splitlines()
        if line.startswith("  ") and line[2:3] != " "
    ]
    named = [name for name in shown if name in ORDER]
    assert named == [name for name in ORDER if name in named]
    assert {"denoise", "recall", "trace"} <= set(named)


def stopped_while_importing(module: str, arguments: Sequence[str], folder: Path) -> tuple[int, str]:
    """Exit code and complaint of a Python that gets Ctrl-C in the middle of an import that takes its time."""
    (folder / f"{module}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    child = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_ctrl_c,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "importing\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, complaint = child.communicate(timeout=60)
    return child.returncode, complaint


def test_ctrl_c_while_the_command_line_is_imported(tmp_path: Path) -> None:
    """Of the installed script, which calls what pyproject.toml names."""
    named = re.search(r'^diffusion-lens = "(.+):(.+)"$', PYPROJECT.read_text(), re.MULTILINE)
    assert named is not None
    module, function = named.groups()
    program = f"import sys\nfrom {module} import {function}\nsys.exit({function}())"
    assert stopped_while_importing("typer", ["-c", program], tmp_path) == (130, "Stopped.\n")


def test_what_comes_before_the_handler_is_next_to_nothing() -> None:
    program = "import sys\nbefore = {*sys.modules}\nimport diffusion_lens.__main__\nprint(*{*sys.modules} - before)"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"diffusion_lens", "diffusion_lens.__main__"} <= set(child.stdout.split())
    assert not {"typer", "importlib.metadata", "email"} & set(child.stdout.split())


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    code, complaint = stopped_while_importing("torch", ["-m", "diffusion_lens", "info", "tiny-mdm"], tmp_path)
    assert code == 130
    assert complaint.splitlines() == ["Stopped."]


def logged(more: Mapping[str, str], folder: Path) -> str:
    """What a short training writes to its log, where standard error is no terminal."""
    asked = ["finetune", "tiny-mdm", "--data", "toy", "--epochs", "0.01", "--batch-size", "4", "--out"]
    child = subprocess.run(
        [sys.executable, "-m", "diffusion_lens", *asked, str(folder / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, **more},
    )
    assert child.returncode == 0, child.stderr
    return child.stderr


def test_a_log_shows_progress_of_long_work_only(tmp_path: Path) -> None:
    rare = logged({}, tmp_path / "rare")
    assert "tiny-mdm" not in rare
    often = logged({f"TQDM_{name}": "0" for name in ("DELAY", "MININTERVAL", "MAXINTERVAL")}, tmp_path / "often")
    assert "tiny-mdm: 100%" in often


@pytest.mark.parametrize("asked", ["--version", "denoise tiny-mdm Gustav --length 14 --steps 2"])
def test_without_a_standard_error_the_command_works(asked: str) -> None:
    command = f"{shlex.join([sys.executable, '-m', 'diffusion_lens', *asked.split()])} 2>&-"
    child = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True)
    assert (child.returncode, bool(child.stdout)) == (0, True)
