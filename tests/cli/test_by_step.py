"""`trace --steps`, `aie --by-step`, `patch` and `lens`: they save what the library computes, and print its summary."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from figures import PNG
from typed_commands import invoke

from diffusion_lens import Fact, HookedDiffusionTransformer
from diffusion_lens.analysis import (
    AverageEffect,
    AverageTrajectoryEffect,
    CausalTrace,
    LogitLens,
    LoopSettings,
    PatchGrid,
    TrajectoryTrace,
    answer_probability,
    average_indirect_effect,
    average_trajectory_effect,
    causal_trace,
    logit_lens,
    noise_scale,
    patch_grid,
    trace_trajectory,
)
from diffusion_lens.cli.report import strongest
from diffusion_lens.data.fact_files import open_source
from diffusion_lens.denoising.trajectory import Trajectory

pytestmark = pytest.mark.usefixtures("undrawn_figures")

FACT = Fact("Plerrick Baupling is the", "Plerrick Baupling", " sailor of Kaurgate")
TRACE = ["--prompt", FACT.prompt, "--subject", FACT.subject, "--answer", FACT.answer]
CLEAN, CORRUPTED, ANSWER, RIVAL = "Plerrick Baupling plays", "Mondall Rorrick plays", " bassoon", " lute"
PATCH = ["--prompt", CLEAN, "--corrupted", CORRUPTED, "--answer", ANSWER]
LENGTH = ["--length", "12"]


@pytest.fixture(scope="module", params=["site-mdm", "site-ar"])
def model(request: pytest.FixtureRequest) -> HookedDiffusionTransformer:
    return HookedDiffusionTransformer.from_pretrained(request.param, device="cpu")


@pytest.fixture(scope="module")
def mdm() -> HookedDiffusionTransformer:
    return HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")


def done(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def asked(model: HookedDiffusionTransformer, fact: Fact, length: int = 12, **loop: Any) -> tuple[Any, Trajectory]:
    """A fact's query on a canvas of this length, and its denoising run."""
    prompt, _ = fact.tokenize(model)
    query = fact.to_query(model, n_masks=length - len(prompt))
    start = query.tokens[: min(query.answer_positions)] if model.cfg.is_autoregressive else query.tokens
    return query, model.denoise(start[None], length=max(len(query.tokens), max(query.answer_positions) + 1), **loop)


def same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def test_a_trace_by_step_is_the_librarys(model: HookedDiffusionTransformer, tmp_path: Path) -> None:
    name = model.cfg.model_name
    said = done("trace", name, *TRACE, *LENGTH, "--steps", "8", "--samples", "1", "--out", str(tmp_path))
    query, run = asked(model, FACT, steps=8)
    noise = noise_scale(model, [query])
    expected = trace_trajectory(model, query, trajectory=run, noise=noise, samples=1)
    saved = TrajectoryTrace.load(tmp_path / "trace.safetensors")
    assert saved.steps == expected.steps
    same(saved.scores, expected.scores)
    same(Trajectory.load(tmp_path / "trajectory.safetensors").canvases, run.canvases)

    told = json.loads((tmp_path / "command.json").read_text())
    assert told["results"]["revealed_at"] == expected.revealed_at
    assert told["results"]["clean"] == expected.clean.tolist()
    assert {*told["files"]} == {"trace", "trajectory", "page", *(f"step_{step}" for step in expected.steps)}
    assert all(Path(path).exists() for path in told["files"].values())
    assert "<html" in (tmp_path / "trace.html").read_text(encoding="utf-8").lower()

    words = ["sailor", "of", "Kaurgate"]
    revealed = [f"{words[token]} at step {expected.revealed_at[token]}" for token in expected.order]
    assert f"the answer's positions are revealed: {', '.join(revealed)}\n" in said
    assert "the run writes the answer: Plerrick Baupling is the sailor of Kaurgate" in said
    for index, step in enumerate(expected.steps):
        row, column = divmod(int(expected.indirect_effect[index].nan_to_num(-9).argmax()), len(expected.layers))
        best = f"  resid at position {row} ({expected.str_canvases[index][row]}), layer {column}: restores"
        head = f"step {step}: p(answer) {expected.clean[index]:.3f}, with the subject corrupted"
        assert re.search(f"^{re.escape(head)} .*\n{re.escape(best)}", said, re.MULTILINE)
    assert expected.chained is not None
    assert f"p(answer) is at most {expected.chained.max():.3f}" in said


def test_steps_and_canvases_of_a_trace_may_be_chosen(mdm: HookedDiffusionTransformer, tmp_path: Path) -> None:
    more = ["--steps", "8", "--at-step", "3", "--at-step", "0", "--canvas", "free", "--cfg-scale", "0.5"]
    done("trace", "site-mdm", *TRACE, *LENGTH, *more, "--noise", "0.3", "--samples", "1", "--out", str(tmp_path))
    query, run = asked(mdm, FACT, steps=8, cfg_scale=0.5)
    expected = trace_trajectory(mdm, query, [3, 0], "free", trajectory=run, noise=0.3, samples=1)
    saved = TrajectoryTrace.load(tmp_path / "trace.safetensors")
    assert saved.steps == [3, 0]
    assert saved.record["canvas"] == "free"
    same(saved.scores, expected.scores)


SETTINGS: list[tuple[list[str], dict[str, Any]]] = [
    (["--severed", "mlp", "--layers", "0,-1", "--positions", "1,2", "--noise", "0.3"], {"severed": "mlp"}),
    (["--corruption", "replace", "--layer", "0", "--layer", "-1", "--position", "1,2", "--noise", "0.3"], {}),
    (["--corruption", "swap", "--swap", "Mondall Rorrick", "--layers", "0,-1", "--positions", "1,2"], {}),
]


@pytest.mark.parametrize(
    ("options", "more", "steps"),
    [(*SETTINGS[0], ["--steps", "4"]), (*SETTINGS[1], []), (*SETTINGS[2], ["--steps", "4"])],
    ids=["severed", "replace", "swap"],
)
def test_settings_of_a_trace_mean_the_same_on_the_command_line(
    mdm: HookedDiffusionTransformer, options: list[str], more: dict[str, Any], steps: list[str], tmp_path: Path
) -> None:
    done("trace", "site-mdm", *TRACE, *LENGTH, *steps, *options, "--samples", "2", "--out", str(tmp_path))
    query, run = asked(mdm, FACT, steps=4)
    corruption = options[options.index("--corruption") + 1] if "--corruption" in options else "gaussian"
    own = {"swap": "Mondall Rorrick"} if corruption == "swap" else {"noise": 0.3}
    chosen = {"corruption": corruption, "layers": [0, -1], "positions": [1, 2], "samples": 2, **own, **more}
    file = tmp_path / "trace.safetensors"
    if steps:
        same(TrajectoryTrace.load(file).scores, trace_trajectory(mdm, query, trajectory=run, **chosen).scores)
    else:
        same(CausalTrace.load(file).scores, causal_trace(mdm, query, **chosen).scores)
    settings = json.loads((tmp_path / "command.json").read_text())["settings"]
    assert (settings["corruption"], settings["layers"]) == (corruption, [0, -1])


def test_settings_of_an_average_mean_the_same_on_the_command_line(
    mdm: HookedDiffusionTransformer, tmp_path: Path
) -> None:
    more = ["--data", "site", "--trained", "p2d", "--asked", "p2d", "--limit", "2", "--length", "16", "--known", "all"]
    chosen = ["--severed", "mlp", "--corruption", "uniform", "--noise", "0.5", "--samples", "1"]
    done("aie", "site-mdm", *more, *chosen, "--layers", "0,-1", "--roles", "subject_last", "--out", str(tmp_path))
    facts = open_source("site").pick("p2d", "p2d", 2)
    expected = average_indirect_effect(
        mdm,
        facts,
        severed="mlp",
        corruption="uniform",
        noise=0.5,
        samples=1,
        layers=[0, -1],
        roles=["subject_last"],
        length=16,
        first_tokens=1,
        known="all",
    )
    same(AverageEffect.load(tmp_path / "average.safetensors").effects, expected.effects)


def test_a_step_after_the_answer_is_refused() -> None:
    for command, more in (("trace", TRACE), ("patch", PATCH)):
        result = invoke(command, "site-mdm", *more, *LENGTH, "--steps", "8", "--at-step", "7")
        assert result.exit_code == 2
        assert re.match(r"Error: --at-step 7: the run reveals the answer's last token at step \d, after", result.stderr)


def test_an_average_by_step_is_the_librarys(mdm: HookedDiffusionTransformer, tmp_path: Path) -> None:
    more = ["--data", "site", "--trained", "p2d", "--asked", "p2d", "--limit", "1", "--length", "16"]
    loop = ["--by-step", "--steps", "3", "--samples", "1", "--noise", "0.5"]
    said = done("aie", "site-mdm", *more, *loop, "--out", str(tmp_path))
    facts = open_source("site").pick("p2d", "p2d", 1)
    expected = average_trajectory_effect(mdm, facts, noise=0.5, samples=1, length=16, loop=LoopSettings(steps=3))
    saved = AverageTrajectoryEffect.load(tmp_path / "average.safetensors")
    same(saved.effects, expected.effects)
    results = json.loads((tmp_path / "command.json").read_text())["results"]
    assert results["offsets"] == expected.offsets
    assert results["n_facts"] == expected.n_facts
    assert results["aie"]["subject_last"] == expected.aie[:, expected.roles.index("subject_last")].tolist()
    assert re.findall(r"^(.*), n = 1: average", said, re.MULTILINE)[-2:] == ["1 step before it", "last token revealed"]
    assert (tmp_path / "average.png").exists()
    command = json.loads((tmp_path / "command.json").read_text())
    assert command["settings"]["first_tokens"] is None, "the whole answer"


def test_a_patch_grid_is_the_librarys(model: HookedDiffusionTransformer, tmp_path: Path) -> None:
    name = model.cfg.model_name
    said = done("patch", name, *PATCH, *LENGTH, "--layer", "1", "--layer", "3", "--out", str(tmp_path))
    clean, corrupted = (asked(model, Fact(prompt, prompt, ANSWER))[0] for prompt in (CLEAN, CORRUPTED))
    metric = answer_probability(model, corrupted)
    expected = patch_grid(model, clean, corrupted, metric, "resid_pre", layers=[1, 3])
    saved = PatchGrid.load(tmp_path / "resid_pre.safetensors")
    same(saved.scores, expected.scores)
    layer, position = divmod(int(expected.effect.argmax()), len(expected.coordinates["pos"]))
    best = f"layer {[1, 3][layer]}, position {position} ({expected.labels[0][position]}): {expected.effect.max():+.3f}"
    assert f"largest effects of resid_pre:\n  {best}\n" in said
    assert f"p(answer) {expected.clean:.3f} in the clean run, {expected.corrupted:.3f} in the corrupted one" in said
    together = done("patch", name, *PATCH, *LENGTH, "--layer", "1", "--position", "0", "--position", "1", "--together")
    assert "  layer 1, positions 0, 1 (Plerrick → Mondall … Baupling → Rorrick): +" in together


def test_heads_are_patched_at_all_positions_and_measured_by_a_rival(
    model: HookedDiffusionTransformer, tmp_path: Path
) -> None:
    name = model.cfg.model_name
    more = ["--site", "z", "--site", "mlp_out", "--together", "--rival", RIVAL]
    said = done("patch", name, *PATCH, *LENGTH, *more, "--out", str(tmp_path))
    clean, corrupted = (asked(model, Fact(prompt, prompt, ANSWER))[0] for prompt in (CLEAN, CORRUPTED))
    row = corrupted.answer_positions[0] - (1 if model.cfg.is_causal else 0)
    answer, rival = model.to_single_token(ANSWER), model.to_single_token(RIVAL)

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, row, answer] - logits[0, row, rival]

    expected = patch_grid(model, clean, corrupted, metric, ["z", "mlp_out"], positions="all")
    for site, grid in expected.items():
        saved = PatchGrid.load(tmp_path / f"{site}.safetensors")
        assert saved.axes == grid.axes
        torch.testing.assert_close(saved.scores, grid.scores)
        assert (tmp_path / f"{site}.png").exists()
    assert "logit difference" in said
    assert re.search(r"largest effects of z:\n  layer \d, head \d: \+", said)
    assert re.search(r"largest effects of mlp_out:\n  layer \d: \+", said)


def test_canvases_of_a_run_are_patched(mdm: HookedDiffusionTransformer, tmp_path: Path) -> None:
    more = ["--steps", "6", "--method", "attribution", "--position", "1", "--position", "3", "--head", "2"]
    said = done("patch", "site-mdm", *PATCH, *LENGTH, *more, "--site", "z", "--out", str(tmp_path))
    (clean, clean_run), (corrupted, run) = (
        asked(mdm, Fact(prompt, prompt, ANSWER), steps=6) for prompt in (CLEAN, CORRUPTED)
    )
    (position,) = corrupted.answer_positions
    steps = list(range(int(run.revealed_at[0, position]) + 1))
    metric = answer_probability(mdm, corrupted)
    kind = {"method": "attribution", "positions": [1, 3], "heads": [2]}
    expected = patch_grid(mdm, clean_run, run, metric, "z", steps, **kind)
    saved = PatchGrid.load(tmp_path / "z.safetensors")
    assert saved.coordinates == {"step": steps, "layer": list(range(6)), "pos": [1, 3], "head": [2]}
    same(saved.scores, expected.scores)
    assert said.count("in the clean run") == len(steps)
    assert "cells were also patched exactly, and differ by at most" in said
    assert len(clean.tokens) == 12


def test_the_lens_of_an_answer_is_the_librarys(model: HookedDiffusionTransformer, tmp_path: Path) -> None:
    said = done("lens", model.cfg.model_name, *PATCH[:2], *PATCH[4:], *LENGTH, "--out", str(tmp_path))
    query, _ = asked(model, Fact(CLEAN, CLEAN, ANSWER))
    expected = logit_lens(model, query, positions=query.answer_positions)
    saved = LogitLens.load(tmp_path / "lens.safetensors")
    same(saved.top_probabilities, expected.top_probabilities)
    same(saved.target_probabilities, expected.target_probabilities)
    rows = re.findall(r"^  (\w+_p\w+) +(\S+) (\d\.\d\d)$", said, re.MULTILINE)
    assert [row[0] for row in rows] == expected.labels
    assert [row[2] for row in rows] == [f"{p:.2f}" for p in expected.top_probabilities[:, 0, 0, 0].tolist()]
    assert rows[-1][1] == "bassoon"
    since = expected.labels[int(expected.first_layer()[0, 0, 0])]
    assert f"position 3 bassoon: the likeliest from {since} on" in said


def test_the_lens_of_a_run_follows_what_it_writes(model: HookedDiffusionTransformer, tmp_path: Path) -> None:
    name = model.cfg.model_name
    said = done("lens", name, "--prompt", FACT.prompt, "--length", "8", "--steps", "4", "--out", str(tmp_path))
    run = model.denoise(FACT.prompt, length=8, steps=4)
    expected = logit_lens(model, run, positions=[4, 5, 6, 7])
    saved = LogitLens.load(tmp_path / "lens.safetensors")
    same(saved.entropy, expected.entropy)
    assert f"the run writes: {run.text[0]}\n" in said
    for place, row in enumerate(re.findall(r"^  \d+ \S+ +(.*)$", said, re.MULTILINE)):
        cells = row.split()
        for step in range(4):
            layer = int(expected.first_layer()[step, 0, place, 0])
            is_read = bool(expected.masked[step, 0, place]) and not expected.entropy[step, 0, 0, place].isnan()
            label = "never" if layer < 0 else expected.labels[layer]
            assert cells[step] == (label if is_read else "-")
    told = json.loads((tmp_path / "command.json").read_text())
    assert {*told["files"]} == {"lens", "trajectory", "page", *(f"step_{step}" for step in range(4))}
    assert told["results"]["likeliest"][3][-1][3] == run.str_canvases()[-1][7]


def test_the_lens_of_one_position_has_the_answer_as_target(mdm: HookedDiffusionTransformer, tmp_path: Path) -> None:
    other = [*PATCH[:2], "--answer", RIVAL, *LENGTH]
    more = ["--steps", "4", "--at-step", "0", "--layer", "2", "--layer", "6", "--out", str(tmp_path)]
    said = done("lens", "site-mdm", *other, *more)
    saved = LogitLens.load(tmp_path / "lens.safetensors")
    run = mdm.denoise(CLEAN, length=12, steps=4)
    expected = logit_lens(mdm, run, steps=[0], positions=[3], layers=[2, 6], targets=RIVAL)
    same(saved.target_probabilities, expected.target_probabilities)
    assert saved.labels == ["2_pre", "final_post"]
    assert "site-mdm, position 3 lute: the likeliest token and its probability, by state and step" in said
    assert (tmp_path / "lens.png").exists()


def test_a_text_of_a_causal_model_is_continued_by_one_token() -> None:
    told = json.loads(done("lens", "site-ar", "--prompt", FACT.prompt, "--json"))
    assert told["results"]["positions"] == [4]
    assert told["results"]["likeliest"][-1] == ["sailor"]
    assert told["settings"]["length"] is None


def test_a_table_of_many_columns_counts_those_that_it_leaves_out() -> None:
    said = done("lens", "site-mdm", "--prompt", FACT.prompt, "--length", "16")
    assert "  (4 more columns are in the saved lens and in --json)\n" in said


def test_the_strongest_cells_leave_out_what_is_absent() -> None:
    effects = torch.tensor([[0.1, float("nan")], [-0.4, 0.3]])
    assert strongest(effects, 9) == [(1, 1), (0, 0), (1, 0)]
    assert strongest(effects, 1) == [(1, 1)]


def test_saved_results_by_step_are_drawn(tmp_path: Path) -> None:
    trace, lens, patch = (["--out", str(tmp_path / name)] for name in ("trace", "lens", "z"))
    done("trace", "site-mdm", *TRACE, *LENGTH, "--steps", "4", "--samples", "1", *trace)
    done("lens", "site-mdm", "--prompt", FACT.prompt, *LENGTH, "--steps", "2", *lens)
    done("patch", "site-mdm", *PATCH, *LENGTH, "--site", "z", "--layer", "3", "--position", "1", *patch)
    step = str(TrajectoryTrace.load(tmp_path / "trace" / "trace.safetensors").steps[0])
    for result, chosen in (
        ("trace", ["--step", step]),
        ("lens", ["--step", "1"]),
        ("lens", ["--position", "5"]),
        ("z", ["--head", "1"]),
    ):
        picture = tmp_path / "drawn.png"
        done("plot", str(tmp_path / result / f"{result}.safetensors"), *chosen, "--out", str(picture))
        assert picture.read_bytes().startswith(PNG)
        picture.unlink()
    for result, chosen, said in (
        ("trace", [], "--step: say which step to draw, one of ["),
        ("trace", ["--step", "99"], "step 99 was not traced"),
        ("trace", ["--head", "1"], "contains a trajectory trace, whose figure does not depend on a head"),
        ("lens", [], "give either --step, or --position to draw it at every step"),
        ("z", [], "--head: say which head to draw, one of [0, 1"),
    ):
        refused = invoke(
            "plot", str(tmp_path / result / f"{result}.safetensors"), *chosen, "--out", str(tmp_path / "no.png")
        )
        assert refused.exit_code == 2, refused.output
        assert said in refused.stderr
        assert not (tmp_path / "no.png").exists()


def test_an_unknown_training_length_is_taken_for_52() -> None:
    told = json.loads(done("lens", "smdm-1028m", "--prompt", "Ada is the", "--dry-run", "--json", "--flops", "1e12"))
    assert told["settings"]["length"] == told["results"]["positions"] == 52


def test_dry_runs_count_the_run_and_its_canvases() -> None:
    def passes(*arguments: str) -> int:
        told = json.loads(done(*arguments, *LENGTH, "--dry-run", "--json", "--flops", "1e12"))
        return int(told["results"]["forward_passes"])

    one, by_step = ["trace", "site-mdm", *TRACE, "--samples", "2"], ["--steps", "4"]
    at = ["--at-step", "1"]
    assert passes(*one, *by_step, *at) == passes(*one) + 4
    assert passes(*one, *by_step, *at, "--at-step", "2") == 2 * passes(*one) + 4
    assert passes(*one, *by_step, *at, "--canvas", "free") == passes(*one) + 3 * 4
    assert passes(*one) + 4 <= passes(*one, *by_step) <= 4 * passes(*one) + 4
    lens = ["lens", "site-mdm", "--prompt", CLEAN]
    assert passes(*lens) == 1
    assert passes(*lens, *by_step, "--cfg-scale", "1") == 2 * 4 + 4
    patch = ["patch", "site-mdm", *PATCH]
    grid = passes(*patch, "--layer", "1")
    assert passes(*patch, "--layer", "1", *by_step, *at) == grid + 2 * 4
    assert 2 < passes(*patch, "--layer", "1", "--site", "z", "--together") < grid
    # Each head has cells of its own.
    z = [passes(*patch, "--layer", "1", "--site", "z", "--head", "0", *more) for more in ([], ["--head", "1"])]
    assert z[1] - 2 == pytest.approx(2 * (z[0] - 2), abs=1)
    assert 2 < passes(*patch, "--method", "attribution") <= 2 + 8  # two runs and eight cells
