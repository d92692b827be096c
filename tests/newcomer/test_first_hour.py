"""A new user's first hour: a clone, the demo, a sentence, a fact and a hook of one's own, and a notebook.

All commands and all code are those that README.md and the pages show, read from the clone. They run in an environment
without the tools of the developers: NEWCOMER_BIN names its folder of programs. `.ci/run` makes one, installs the wheel
there, and runs these tests in order.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN_SENTENCE, ITS_ANSWER = "the guard of Rurholm is", "Mondall Rorrick"
OWN_FACT = "z,we know Plerrick Skusser plays,Plerrick Skusser, zither"
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone of what is committed."""
    folder = tmp_path_factory.mktemp("newcomer") / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of programs of the user's environment."""
    assert "NEWCOMER_BIN" in os.environ, "set NEWCOMER_BIN to the bin folder of an environment with pip"
    return Path(os.environ["NEWCOMER_BIN"]).resolve()


def run(command: str, folder: Path, programs: Path) -> str:
    """What a command prints in a folder, in the activated environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment = {**kept, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\nends with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def follow(page: Path, folder: Path, programs: Path, **replaced: str) -> str:
    """Run the Python of a page as one script. Returns what it prints.

    Args:
        replaced: The first occurrence of each name is replaced by the value.
    """
    script = "\n".join(blocks(page, "python"))
    for old, new in replaced.items():
        assert old in script, f"{page.name} no longer shows {old}"
        script = script.replace(old, new, 1)
    (folder / "script.py").write_text(script, encoding="utf-8")
    return run("python script.py", folder, programs)


def test_the_readme_installs_it(clone: Path, programs: Path) -> None:
    install = next(text for text in blocks(clone / "README.md", "sh") if text.startswith("pip install"))
    run(install, clone, programs)
    assert "site-packages" in run(
        "python -c 'import diffusion_lens; print(diffusion_lens.__file__)'", programs, programs
    )


def test_the_demo_of_the_readme(clone: Path, programs: Path) -> None:
    """`make demo`, with this environment in the place of the one that it would make."""
    assert ["make demo"] in [text.splitlines() for text in blocks(clone / "README.md", "sh")]
    (programs.parent / ".ready").touch()
    run(f"make demo VENV={shlex.quote(str(programs.parent))}", clone, programs)
    figures = list((clone / "demo").glob("*.png"))
    assert figures
    assert all(figure.read_bytes().startswith(PNG) for figure in figures)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_code_prints_what_the_page_says(page: str, clone: Path, programs: Path, tmp_path: Path) -> None:
    assert follow(clone / page, tmp_path, programs) == "".join(blocks(clone / page, "output"))


def test_a_sentence_of_ones_own(clone: Path, programs: Path, tmp_path: Path) -> None:
    """The command of the page with another sentence, in the terminal, and the code of the home page with it."""
    text = (clone / "docs" / "command_line.md").read_text(encoding="utf-8")
    command = re.search(r'^\$ (diffusion-lens denoise site-mdm) "[^"]+"(.*)$', text, re.MULTILINE)
    assert command
    assert f"{OWN_SENTENCE} {ITS_ANSWER}" in run(f'{command[1]} "{OWN_SENTENCE}"{command[2]}', tmp_path, programs)
    assert (tmp_path / "run" / "denoising.png").read_bytes().startswith(PNG)
    sentence = {"the sailor of Kaurgate is": OWN_SENTENCE}
    assert f"{OWN_SENTENCE} {ITS_ANSWER}" in follow(clone / "docs" / "index.md", tmp_path, programs, **sentence)


def test_a_fact_of_ones_own(clone: Path, programs: Path, tmp_path: Path) -> None:
    """The page's files, its facts with one more line, and its code."""
    page = clone / "docs" / "your_own_facts.md"
    shown = [re.fullmatch(r"\$ cat (\S+)\n(.*)", text, re.DOTALL) for text in blocks(page, "console")]
    files = {match[1]: match[2] for match in shown if match}
    files["facts.csv"] += OWN_FACT + "\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    said = follow(page, tmp_path, programs)
    assert re.search(r"^z \['zither'\] \[0\]", said, re.MULTILINE)
    assert (tmp_path / "trace.png").read_bytes().startswith(PNG)


def test_a_hook_of_ones_own(clone: Path, programs: Path, tmp_path: Path) -> None:
    """The hook of the page, and one that silences another head of the same block, which matters little."""
    page = clone / "docs" / "write_a_hook.md"
    said = follow(page, tmp_path, programs)
    assert said == "".join(blocks(page, "output"))
    own = follow(page, tmp_path, programs, **{"z[:, position, 0] = 0": "z[:, position, 1] = 0"})
    (intact, without_head_0), (_, without_head_1) = (
        [float(number) for number in re.findall(r"\d\.\d+", text)[:2]] for text in (said, own)
    )
    assert abs(intact - without_head_1) < 0.1 < intact - without_head_0


@pytest.mark.parametrize("name", ["start", "your_own"])
def test_a_notebook(name: str, clone: Path, programs: Path) -> None:
    """The commands at its top, but for the window: the notebook runs in the kernel that they install."""
    notebook = clone / "docs" / "notebooks" / f"{name}.py"
    commands = re.search(
        r"^# ```sh\n# (pip install .*)\n# (jupyter lab (.*))\n# ```$", notebook.read_text("utf-8"), re.M
    )
    assert commands
    run(commands[1], clone, programs)
    run("jupyter lab --version", clone, programs)
    run(f"jupyter execute --inplace {commands[3]}", clone, programs)
    stored = (clone / commands[3]).read_text(encoding="utf-8")
    assert stored.count('"image/png"') >= 2
    shutil.rmtree(clone / "docs" / "notebooks" / "my-llada", ignore_errors=True)
