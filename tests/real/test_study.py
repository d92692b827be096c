"""The study on real facts at its smallest, of SmolLM2 and its twin, and what it would cost."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.cli import app
from real_words import real_words_study
from real_words.__main__ import SMALL


def test_every_part_of_the_study_runs(smollm, tmp_path):
    twin = HookedDiffusionTransformer.from_pretrained("smollm2-135m-mdm", device="cpu")
    settings = replace(SMALL, limit=8, n_facts=2, n_steps=1, steps=(1,), every=29)
    results = real_words_study(smollm.model, twin, settings, tmp_path)["results"]
    known = results["recall"]["known"]
    assert len(known["causal"]["one"]) == 8
    assert len(known["twin"]["one"]) >= 4
    for model in ("causal", "twin"):
        trace = results["traces"][model]["resid"]
        assert trace["facts"] >= 1
        assert trace["effects"]["subject_last"]["mean"][0] > 0
        assert trace["effects"]["prompt_last"]["mean"][-1] > 0


@pytest.mark.usefixtures("smollm")
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "SmolLM2-135M-mdm"])
def test_a_dry_run_times_a_pass_of_weights_in_an_installed_package(name):
    said = CliRunner().invoke(app, ["denoise", name, "The capital of France is", "--max-new-tokens", "2", "--dry-run"])
    assert "by the time of one of its passes here" in said.stdout, said.output
