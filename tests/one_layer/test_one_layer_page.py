"""docs/one_layer.md: every number of its text follows from the results beside it, and so does its figure."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from one_layer.objectives import OBJECTIVES
from one_layer.result import FOLLOWED, PANELS
from one_layer.study import DEPTHS, POSITIONS, SEEDS, STEPS, describe
from one_layer.toy import DATA, INFILL, VARIANTS
from weight_conversion import as_json, from_json

DOCS = Path(__file__).parents[2] / "docs"
PAGE = " ".join((DOCS / "one_layer.md").read_text(encoding="utf-8").split())
SEEDS_FILE, DEFAULT_FILE, LONG_FILE = "one_layer_seeds.json", "one_layer.json", "one_layer_long.json"
RUNS: dict[str, dict[str, Any]] = {
    SEEDS_FILE: dict(positions=POSITIONS, data=["one-way"], depths=[1], seeds=12, steps=STEPS),
    DEFAULT_FILE: dict(positions=POSITIONS, data=DATA, depths=DEPTHS, seeds=SEEDS, steps=STEPS),
    LONG_FILE: dict(positions=["rotary", "standard"], data=["one-way"], depths=[1], seeds=5, steps=3000),
}
WRITTEN = {file: from_json((DOCS / file).read_text(encoding="utf-8")) for file in RUNS}
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def curves(measure: str, positions: str, file: str = SEEDS_FILE, variant: str = "mdm") -> torch.Tensor:
    """[seed, step] of one layer told one way."""
    (found,) = (
        each
        for each in WRITTEN[file]["results"]["curves"]
        if (each["positions"], each["variant"], each["data"], each["depth"]) == (positions, variant, "one-way", 1)
    )
    return torch.tensor(found[measure], dtype=torch.float64)


def last(measure: str, positions: str, file: str = SEEDS_FILE) -> torch.Tensor:
    """[seed] after the last step."""
    return curves(measure, positions, file)[:, -1]


def table(file: str, **wanted: Any) -> list[dict[str, Any]]:
    rows = WRITTEN[file]["results"]["table"]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def percent(share: float | torch.Tensor) -> str:
    return f"{100 * float(share):.0f}%"


def number(value: float | torch.Tensor) -> str:
    return f"{round(float(value), 2) + 0.0:.2f}"


def spread(values: torch.Tensor, form: Any = number) -> tuple[str, str, str]:
    return form(values.mean()), form(values.min()), form(values.max())


def said(*sentences: str) -> None:
    for sentence in sentences:
        assert sentence in PAGE, sentence


@pytest.mark.parametrize("file", RUNS)
def test_the_results_are_those_of_their_command(file: str) -> None:
    written, asked = WRITTEN[file], as_json(RUNS[file])
    assert written["command"] == "one-layer"
    assert {name: written["settings"][name] for name in asked} == asked
    described = as_json(describe(**RUNS[file]))
    for name in ("recipe", "measured_at", "measures"):
        assert written["record"][name] == described[name]
    rows = written["results"]["table"]
    assert len(rows) == 2 * len(asked["positions"]) * len(asked["data"]) * len(asked["depths"])
    for row, of_row in zip(rows, written["results"]["curves"], strict=True):
        assert row["seeds"] == len(of_row["seeds"]) == asked["seeds"]
        for name in FOLLOWED:
            at_the_end = torch.tensor(of_row.get(name, [[math.nan]]), dtype=torch.float64)[:, -1]
            expected = [at_the_end.mean(), at_the_end.min(), at_the_end.max()]
            assert row[name] == pytest.approx(list(map(float, expected)), rel=2e-3, abs=1e-4, nan_ok=True)
        if row["variant"] == "mdm" and row["positions"] in ("none", "alibi"):
            assert row["reverse_accuracy"] == row["same_accuracy"], "reverse questions are mirror images"


def test_what_the_page_says_of_recall() -> None:
    recall = {positions: last("reverse_accuracy", positions) for positions in POSITIONS}
    (rotary, *of_rotary), (learned, *of_learned) = (spread(recall[kind], percent) for kind in ("rotary", "standard"))
    assert all((recall[kind] == 1).all() for kind in ("none", "alibi"))
    sure = {kind: WORDS[int((recall[kind] > 0.98).sum())] for kind in ("rotary", "standard")}
    said(
        f"{rotary} of the questions with rotary positions ({' to '.join(of_rotary)} by seed), "
        f"{learned} with learned ones ({' to '.join(of_learned)}), and all of them without positions",
        f"{sure['rotary'].capitalize()} of twelve rotary networks answer at least 98%, "
        f"and {sure['standard']} of twelve with learned",
    )
    causal = [row for file in RUNS for row in table(file, variant="ar")]
    told_once = [row["reverse_accuracy"][2] for row in causal if row["data"] != "both-ways"]
    assert max(told_once) == pytest.approx(1 / 32, abs=1e-4)
    assert all(row["reverse_accuracy"][1] == 1 for row in causal if row["data"] == "both-ways")
    said("no AR network answers more than 1 in 32, with any kind, depth or seed; those told both ways, all AR")


def test_what_the_page_says_of_forgetting() -> None:
    fewer, worst = {}, {}
    for kind in ("rotary", "standard"):
        recall = curves("reverse_accuracy", kind)
        fallen = recall[:, -2] - recall[:, -1]
        fewer[kind], seed = WORDS[int((fallen > 0).sum())], int(fallen.argmax())
        worst[kind] = f"{percent(recall[seed, -1])} after {percent(recall[seed, -2])}"
    forgot = int(last("reverse_accuracy", "rotary").argmin())
    before, after = curves("reverse_probability", "rotary")[forgot, -2:].tolist()
    longer = last("reverse_accuracy", "rotary", LONG_FILE)
    assert int(longer.argmin()) == forgot
    assert all((last("same_accuracy", kind, LONG_FILE) == 1).all() for kind in ("rotary", "standard"))
    _, low, high = spread(last("reverse_accuracy", "standard", LONG_FILE), percent)
    said(
        f"{fewer['standard']} of twelve networks answer fewer questions in reverse than after 300, "
        f"one of them {worst['standard']}. So do {fewer['rotary']} of twelve rotary ones, "
        f"one of them {worst['rotary']}, with p = {number(after)} after {number(before)}.",
        f"goes on to {percent(longer.min())} and the other four answer at least {percent(longer.sort().values[1])}; "
        f"the five with learned positions answer {low} to {high}. All ten answer 100% as trained.",
    )
    rotary, learned = table(DEFAULT_FILE, variant="mdm", data="mixed", positions="rotary"), {}
    assert all(row["reverse_accuracy"][1] == 1 for row in rotary)
    for row in table(DEFAULT_FILE, variant="mdm", data="mixed", positions="standard"):
        learned[row["depth"]] = [percent(value) for value in row["reverse_accuracy"]]
    mean, low, high = learned.pop(1)
    said(f"learned positions answer only {mean} of them ({low} to {high}); with two or four layers, 100%")
    assert all(each[0] == each[1] == "100%" for each in learned.values())


def test_what_the_page_says_of_learned_positions() -> None:
    head, down, value = (spread(last(f"cosine_{name}", "standard")) for name in ("u", "down", "v"))
    baseline = {name: last(f"shuffled_{name}", "standard") for name in ("u", "down", "v")}
    assert number(baseline["u"].mean()) == number(baseline["down"].mean()) == "0.00"
    routes = curves("routes", "standard")
    (first, *_), (second, *of_second), (end, *of_end) = (spread(routes[:, i]) for i in (2, 3, -1))
    steps = WRITTEN[SEEDS_FILE]["results"]["steps"]
    assert steps[2:5] == [38, 75, 150]
    reuse, percentile = (number(last(name, "standard").mean()) for name in ("reuse", "percentile_reverse"))
    recall = {
        kind: [percent(curves(f"{name}_accuracy", kind)[:, 4].mean()) for name in ("same", "reverse")]
        for kind in ("standard", "rotary")
    }
    together = {
        name: number(torch.corrcoef(torch.stack([last("reverse_accuracy", "standard"), last(name, "standard")]))[0, 1])
        for name in ("cosine_u", "routes")
    }
    said(
        f"The cosine in W_U is {head[0]} ({head[1]} to {head[2]} by seed), against 0.00 for shuffled facts.",
        f"it is {down[0]} ({down[1]} to {down[2]}), against 0.00.",
        f"In W_V it is {value[0]} in the mean, but {value[1]} to {value[2]} by seed, and shuffled facts have at most "
        f"{number(baseline['v'].abs().max())}.",
        f"{first} after 38 steps and {second} after 75 in the mean ({' to '.join(of_second)} by seed), "
        f"and no longer after 600: {end} ({' to '.join(of_end)}).",
        f"The evidence is there (percentile {percentile}) and is reused ({reuse}).",
        f"they answer {recall['standard'][0]} as trained and {recall['standard'][1]} in reverse; rotary networks "
        f"{recall['rotary'][0]} and {recall['rotary'][1]}.",
        f"(correlation {together['cosine_u']}) and not with the routes ({together['routes']})",
    )


def test_what_the_page_says_of_evidence() -> None:
    low = min(float(last("percentile_reverse", kind).min()) for kind in POSITIONS)
    causal = torch.stack([curves("percentile_reverse", kind, variant="ar")[:, -1] for kind in POSITIONS])
    mixed = [row["percentile_reverse"][1:] for row in table(DEFAULT_FILE, variant="ar", data="mixed")]
    assert number(last("percentile_reverse", "standard")[last("reverse_accuracy", "standard").argmin()]) == "1.00"
    said(
        f"at least {number(low)} in each of the 48 MDMs, "
        f"and {number(causal.min())} to {number(causal.max())} in the AR networks.",
        f"it lies between {number(min(each[0] for each in mixed))} and {number(max(each[1] for each in mixed))}.)",
    )
    recall = last("reverse_accuracy", "rotary", LONG_FILE)
    forgot, other = int(recall.argmin()), int(recall.argsort()[1])
    found = {name: last(name, "rotary", LONG_FILE) for name in ("percentile_reverse", "routes", "cosine_u", "cosine_v")}
    assert number(found["percentile_reverse"][forgot]) == "1.00"
    (deep,) = table(DEFAULT_FILE, variant="mdm", data="one-way", positions="rotary", depth=4)
    (slow,) = table(DEFAULT_FILE, variant="mdm", data="mixed", positions="alibi", depth=4)
    assert slow["same_accuracy"] == slow["reverse_accuracy"]
    said(
        f"answers {percent(recall[forgot])} after 3000 steps, while its correlation of routes is "
        f"{number(found['routes'][forgot])} and its cosine in W_U {number(found['cosine_u'][forgot])}.",
        f"answers {percent(recall[other])} after 3000 steps with a cosine of {number(found['cosine_v'][other])}.",
        f"it falls to {number(deep['percentile_reverse'][1])} in a rotary network",
        f"the MDM answers {percent(slow['reverse_accuracy'][0])} in either direction",
    )


def test_baselines_are_those_of_single_networks() -> None:
    rows = [row for file in RUNS for row in table(file, variant="mdm")]
    most = {name: number(max(abs(value) for row in rows for value in row[f"shuffled_{name}"][1:])) for name in "vuq"}
    said(f"in a single MDM of these tables is {most['v']} in W_V and {most['u']} in W_U. In W_Q it is {most['q']}")
    assert most["q"] == number(max(row["shuffled_q"][2] for row in rows if row["positions"] == "none"))


def test_what_the_page_says_of_other_objectives() -> None:
    file = "one_layer_objectives.json"
    written = from_json((DOCS / file).read_text(encoding="utf-8"))
    asked: dict[str, Any] = dict(positions=["rotary"], data=["one-way"], depths=[1], seeds=5, steps=1200)
    variants = [*VARIANTS, *OBJECTIVES]
    assert written["settings"] == as_json({**asked, "variants": variants})
    described = as_json(describe(**asked, variants=variants))
    for name in ("recipe", "measured_at", "measures"):
        assert written["record"][name] == described[name]
    rows = {row["variant"]: row for row in written["results"]["table"]}
    assert list(rows) == variants
    recall = {name: [percent(value) for value in row["reverse_accuracy"]] for name, row in rows.items()}
    filled = {name: row[INFILL] for name, row in rows.items()}
    assert all(row["same_accuracy"][1] == 1 for row in rows.values())
    assert all(each in ([1, 1, 1], [None] * 3) or all(map(math.isnan, each)) for each in filled.values())
    assert {name for name, each in filled.items() if each == [1, 1, 1]} == {*variants} - {"ar", "ar-masked"}
    assert recall["ar-reversed"] == ["100%"] * 3
    (permuted,) = (row for row in written["results"]["curves"] if row["variant"] == "ar-permuted")
    worst = min(permuted["reverse_accuracy"], key=lambda curve: curve[-1])

    def of(name: str) -> str:
        mean, low, high = recall[name]
        return f"{mean} ({low} to {high})"

    said(
        f"fill in the middle {recall['ar-fill'][0]} of the questions ({' to '.join(recall['ar-fill'][1:])} by seed), "
        f"reversed segments {of('ar-segments')} and permuted {of('ar-permuted')}, and the MDM {of('mdm')}.",
        f"Masked input alone gives nothing ({recall['ar-masked'][2]})",
        f"one of them answers {percent(worst[-1])} after {percent(max(worst))}",
    )


def test_the_figure_is_drawn_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from one_layer_tables import panels_of, study

    rows, steps = panels_of(study(SEEDS_FILE))
    assert steps == WRITTEN[SEEDS_FILE]["results"]["steps"]
    for variant, name in (("mdm", "MDM"), ("ar", "AR")):
        for title, measure in PANELS.items():
            for positions in POSITIONS:
                drawn = rows[name][title][positions]
                if variant == "ar" and measure == "routes":
                    assert drawn.isnan().all()
                else:
                    assert torch.equal(drawn, curves(measure, positions, variant=variant).float())
    said("](_made/one_layer.png)", "bands reach from the smallest to the largest value")
