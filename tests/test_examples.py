"""Every example runs offline in a folder of its own, says what it promises to say, and leaves the files it names."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file

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


def floats(text: str) -> list[float]:
    return [float(number) for number in text.split()]


def traces_both_ways(said: str) -> None:
    effects: dict[tuple[str, str], dict[str, tuple[int, list[float], float]]] = {}
    clean_and_corrupted, by_step = {}, {}
    for way, traces in re.findall(r"^(forwards|backwards): (.*?)(?=^backwards|\Z)", said, re.MULTILINE | re.DOTALL):
        for model, clean, corrupted, rows in re.findall(
            r"^  (tiny-\w+): p\(\w+\) is ([\d.]+), with noise on the subject ([\d.]+)\n((?:    .*\n)+)",
            traces,
            re.MULTILINE,
        ):
            clean_and_corrupted[model, way] = float(clean), float(corrupted)
            effects[model, way] = {
                kind: (int(place), floats(by_layer), float(subject))
                for kind, place, by_layer, subject in re.findall(
                    r"(resid|mlp|attn) +place +(\d+) \S+ +([-\d. ]+)subject at most ([\d.]+)", rows
                )
            }
            by_step[model, way] = floats("".join(re.findall(r"step by step: (.*)", rows)))

    for asked, read_at in {
        ("tiny-mdm", "forwards"): 4,
        ("tiny-mdm", "backwards"): 6,
        ("tiny-ar", "forwards"): 3,
    }.items():
        clean, corrupted = clean_and_corrupted[asked]
        assert clean > 0.95
        assert corrupted < 0.4
        assert set(effects[asked]) == {"resid", "mlp", "attn"}
        for place, by_layer, subject in effects[asked].values():
            assert place == read_at
            assert max(by_layer) > 2 * subject
        assert min(effects[asked]["resid"][1]) > 0.6
        attention = effects[asked]["attn"][1]
        assert min(attention[:2]) > 0.6 > 0.4 > max(attention[2:])
    for way in ("forwards", "backwards"):
        mlp = effects["tiny-mdm", way]["mlp"][1]
        assert mlp == sorted(mlp)
        assert mlp[0] < 0.1 < 0.5 < mlp[3]
    forwards, backwards = (effects["tiny-mdm", way]["resid"][1] for way in ("forwards", "backwards"))
    assert forwards[3] - forwards[0] < 0.02 < 0.05 < backwards[3] - backwards[0]
    assert max(clean_and_corrupted["tiny-ar", "backwards"]) < 0.05
    assert all(max(map(abs, by_layer)) <= 0.02 for _, by_layer, _ in effects["tiny-ar", "backwards"].values())
    assert by_step["tiny-mdm", "forwards"][-1] > max(by_step["tiny-mdm", "forwards"][:-1]) + 0.1


def averages_effects(said: str) -> None:
    known = dict(re.findall(r"^(.*): knows (\d of \d) facts", said, re.MULTILINE))
    assert known == {
        "tiny-mdm, forwards": "8 of 8",
        "tiny-mdm, backwards": "8 of 8",
        "tiny-ar, forwards": "8 of 8",
        "tiny-ar, backwards": "0 of 8",
    }
    found = re.findall(
        r"^(.*): knows 8 .*\n  average total effect (\S+), 95% interval (\S+) to (\S+)\n  (\w+) +(.*)\n  \w+ +(.*)$",
        said,
        re.MULTILINE,
    )
    strongest = {}
    for label, mean, low, high, role, first, second in found:
        assert 0.5 < float(low) < float(mean) < float(high) < 1
        assert floats(first)[-1] == pytest.approx(float(mean), abs=0.02)  # nothing runs after the last block
        assert max(floats(second)) < 0.2
        strongest[label] = role, floats(first)[0] / floats(first)[-1]
    assert {label: role for label, (role, _) in strongest.items()} == {
        "tiny-mdm, forwards": "answer",
        "tiny-mdm, backwards": "answer",
        "tiny-ar, forwards": "prompt_last",
    }
    assert strongest["tiny-mdm, forwards"][1] > 0.9 > 0.8 > strongest["tiny-mdm, backwards"][1]
    assert float(re.findall(r"its p\(answer\) is ([\d.]+) at most", said)[0]) < 0.1


def patches_forward_into_reverse(said: str) -> None:
    scores = {
        (model, source, name): (float(unpatched), floats(by_layer))
        for model, rows in re.findall(r"^(tiny-\w+): .*\n((?:  .*\n)+)", said, re.MULTILINE)
        for source, name, unpatched, by_layer in re.findall(
            r"A's (\w+) run: p\((\w+)\) +([\d.]+) becomes (.*)$", rows, re.MULTILINE
        )
    }
    assert len(scores) == 8
    for source in ("forward", "reverse"):
        unpatched, by_layer = scores["tiny-mdm", source, "Tilda"]
        assert unpatched > 0.95
        assert by_layer[0] < 0.1
        assert min(by_layer[1:]) > 0.7
        for name in ("Gustav", "Tilda"):
            assert max(scores["tiny-ar", source, name][1]) < 0.05
    assert max(scores["tiny-mdm", "forward", "Gustav"][1]) < 0.05
    control = scores["tiny-mdm", "reverse", "Gustav"][1]
    assert control[0] > 0.95 > 0.05 > max(control[1:])


def hooks_of_your_own(said: str) -> None:
    stays, in_the_loop = {}, {}
    for label, single, loop in re.findall(
        r"^(tiny-\w+, \w+): .*\n.* none +0 +1 +2 +3 +all\n  p\(\w+\) +(.*)\n  in the loop (.*)$", said, re.MULTILINE
    ):
        stays[label] = floats(single)
        in_the_loop[label] = floats(" ".join(re.findall(r"\d\.\d+", loop)))
    assert len(stays) == 4
    for label in ("tiny-mdm, forwards", "tiny-ar, forwards"):
        none, *one_block, every = stays[label]
        assert min(none, *one_block[1:]) > 0.95
        assert max(one_block[0], every) < 0.1
    none, *one_block, every = stays["tiny-mdm, backwards"]
    assert min(none, one_block[1], one_block[3]) > 0.95
    assert every < one_block[0] < 0.2 < one_block[2] < 0.8
    assert max(stays["tiny-ar, backwards"]) < 0.05
    for way in ("forwards", "backwards"):
        plain, without_early, without_late = in_the_loop[f"tiny-mdm, {way}"]
        assert plain == pytest.approx(without_early, abs=0.02)
        assert without_late < 0.2 < 0.9 < plain
        plain, without_early, without_late = in_the_loop[f"tiny-ar, {way}"]
        assert plain == without_late
        assert without_early < 0.1 < plain


def compares_keys_and_values(said: str) -> None:
    after = {
        (model, way): floats(f"{before} {with_value}")
        for model, rows in re.findall(r"^(tiny-\w+), v\* .*\n((?:  .*\n)+)", said, re.MULTILINE)
        for way, before, with_value in re.findall(r"asked (.*), \d+ facts: p\(answer\) (\S+), with v\* (.*)", rows)
    }
    cka = {
        (model, what, int(block)): floats(f"{value} {high}")
        for model, rows in re.findall(r"^(tiny-\w+), v\* .*\n((?:  .*\n)+)", said, re.MULTILINE)
        for what, block, value, high in re.findall(
            r"^  (\w[\w ]+?) +block (\d): (\S+) \(.*\), chance +\S+ to (\S+), p", rows, re.MULTILINE
        )
    }
    assert len(after) == 4
    assert len(cka) == 12
    for way in ("as they were told", "against it"):
        assert min(after["tiny-mdm", way]) > 0.95
    assert min(after["tiny-ar", "as they were told"]) > 0.95
    assert after["tiny-ar", "against it"][0] < 0.1 < 0.25 < min(after["tiny-ar", "against it"][1:])
    for (model, what, _), (value, high) in cka.items():
        assert high <= 0.03
        if model == "tiny-mdm":
            assert value > high
        elif what != "keys of a person":
            assert value < high


CHECKS: dict[str, Callable[[str], None]] = {
    "watch_a_fact": watches_a_fact,
    "steer_at_chosen_steps": steers_at_chosen_steps,
    "another_order": writes_in_another_order,
    "cache_by_step": caches_by_step,
    "trace_both_ways": traces_both_ways,
    "average_effect": averages_effects,
    "keys_and_values": compares_keys_and_values,
    "patch_forward_into_reverse": patches_forward_into_reverse,
    "your_own_hook": hooks_of_your_own,
}
FILES = {
    "watch_a_fact": 8,
    "steer_at_chosen_steps": 2,
    "another_order": 1,
    "cache_by_step": 1,
    "trace_both_ways": 6,
    "average_effect": 2,
    "keys_and_values": 2,
    "patch_forward_into_reverse": 2,
    "your_own_hook": 1,
}
SAVED = {
    "trace_forwards": 7,
    "trace_backwards": 7,
    "average_effect": 36,
    "keys_and_values": 646,
    "patch_forward_into_reverse": 8,
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
        if path.is_dir():
            saved = list(path.rglob("*.safetensors"))
            assert len(saved) == SAVED[path.name]
            assert all(map(load_file, saved))
        elif path.suffix == ".png":
            assert path.read_bytes().startswith(PNG)
        else:
            assert "drummer" in path.read_text(encoding="utf-8")


def test_people_of_your_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    person, answers = ["Tilda Drusser", "famous miner of Tanmoor"], {"forwards": "p(famous)", "backwards": "p(Tilda)"}
    for name in ("trace_both_ways", "your_own_hook"):
        load(name).main(["--model", "tiny-ar", "--person", *person])
        said = capsys.readouterr().out
        assert all(answer in said for answer in answers.values())
    with pytest.raises(SystemExit):
        load("patch_forward_into_reverse").main(["--model", "tiny-ar", "--other", "Tilda Drusser", "miner of Tanmoor"])
    assert "same number of tokens" in capsys.readouterr().err


def test_facts_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    told = {"prompt": "Tilda Drusser is the", "subject": "Tilda Drusser", "answer": " famous miner of Tanmoor."}
    untrue = {**told, "prompt": "Gustav Geisser is the", "subject": "Gustav Geisser"}
    Path("facts.json").write_text(json.dumps([told, untrue]), encoding="utf-8")
    load("average_effect").main(["--model", "tiny-ar", "--file", "facts.json"])
    assert "tiny-ar, asked: knows 1 of 2 facts" in capsys.readouterr().out


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
