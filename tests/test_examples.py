"""Every example runs offline in a folder of its own, says what it promises to say, and leaves the files it names."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "examples").glob("*.py"))}
PNG = b"\x89PNG\r\n\x1a\n"


def watches_a_fact(said: str) -> None:
    verdicts = re.findall(r"^(\S+), (\w+): .*?probability [\d.]+: (\w+)$", said, re.MULTILINE | re.DOTALL)
    assert {(model, way): verdict for model, way, verdict in verdicts} == {
        ("tiny-mdm", "forwards"): "right",
        ("tiny-mdm", "backwards"): "right",
        ("tiny-ar", "forwards"): "right",
        ("tiny-ar", "backwards"): "wrong",
    }
    assert all(float(p) > 0.9 for p in re.findall(r"probability ([\d.]+): right", said))


def steers_at_chosen_steps(said: str) -> None:
    for model, decisive, idle in (
        ("tiny-mdm", "from step 5 on", "the first 5 steps"),
        ("tiny-ar", "the first 5 steps", "from step 5 on"),
    ):
        table = said[said.index(f"{model}, guidance") :].split("wrote")[0]
        rows = re.findall(r"^  (.{22}) .*?(Gustav.*)$", table, re.MULTILINE)
        wrote = {label.strip(): text for label, text in rows}
        assert len(wrote) == 7
        assert "brave drummer" in wrote["none"]
        assert wrote[idle] == wrote["none"]
        assert "famous miner" in wrote[decisive]
        assert wrote[decisive] == wrote["every step"]


def writes_in_another_order(said: str) -> None:
    orders = {
        label: ([int(step) for step in steps.split()], float(along), float(chain))
        for label, steps, along, chain in re.findall(
            r"^([\w ]+): .*\n  revealed in step ([\d ]+)\n  probability ([\d.]+) in this order, ([\d.]+) from left",
            said,
            re.MULTILINE,
        )
    }
    assert set(orders) == {"its own", "left to right", "right to left", "least sure first"}
    steps, along, chain = orders["left to right"]
    assert steps == list(range(11))
    assert along == pytest.approx(chain, abs=2e-4)
    assert orders["right to left"][0] == steps[::-1]
    assert len({tuple(steps) for steps, _, _ in orders.values()}) == 4
    assert all(0 < p < 1 for _, *both in orders.values() for p in both)


def caches_by_step(said: str) -> None:
    moved = {
        model: [[float(x) for x in line.split()[2:]] for line in table.splitlines() if line.startswith("  block")]
        for model, table in re.findall(r"^(tiny-\w+): (.*?)(?=^tiny|^wrote)", said, re.MULTILINE | re.DOTALL)
    }
    assert {model: (len(rows), len(rows[0])) for model, rows in moved.items()} == {
        "tiny-mdm": (4, 9),
        "tiny-ar": (4, 9),
    }
    assert max(map(max, moved["tiny-mdm"])) > 0.2
    assert max(map(max, moved["tiny-ar"])) == 0


CHECKS: dict[str, Callable[[str], None]] = {
    "watch_a_fact": watches_a_fact,
    "steer_at_chosen_steps": steers_at_chosen_steps,
    "another_order": writes_in_another_order,
    "cache_by_step": caches_by_step,
}
FILES = {"watch_a_fact": 8, "steer_at_chosen_steps": 2, "another_order": 1, "cache_by_step": 1}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES[name])
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_every_example_has_its_check() -> None:
    assert set(EXAMPLES) == set(CHECKS) == set(FILES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example = load(name)
    assert example.__doc__
    example.main([])
    said = capsys.readouterr().out
    CHECKS[name](said)
    named = [Path(path) for path in re.findall(r"wrote (out/\S+)$", said, re.MULTILINE)]
    assert len(named) == FILES[name]
    assert set(named) == {path.relative_to(tmp_path) for path in (tmp_path / "out").iterdir()}
    for path in named:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(PNG)
        else:
            assert "drummer" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_says_where_the_real_thing_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = load(name)
    with pytest.raises(SystemExit) as left:
        example.main(["--help"])
    assert left.value.code == 0
    assert "smdm-1028m" in capsys.readouterr().out


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_page(name: str) -> None:
    assert len(EXAMPLES[name].read_text(encoding="utf-8").splitlines()) <= 90
