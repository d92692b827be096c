"""Every canvas of every step equals the authors' sampler."""

import pytest
import torch

from diffusion_lens.denoising.samplers import Confidence, smdm
from diffusion_lens.records.identity import run_of


def chosen_cases(golden):
    """All recorded runs; of those with many steps, each checkpoint repeats the guided or the unguided ones."""
    guided = golden.folder.parent.name == "gqa"
    return [case for case in golden.cases("sampling") if case.get("steps", 0) < 16 or (case["cfg_scale"] > 0) == guided]


def test_every_canvas_of_the_recorded_runs(golden):
    recorded = golden.tensors("sampling")
    with run_of(golden.model):  # identified once
        for case in chosen_cases(golden):
            prompt = recorded[f"case{case['case']:02d}.prompt"]
            if golden.kind == "ar":
                written = golden.model.denoise(prompt, length=case["length"]).tokens
                assert torch.equal(written, recorded[f"case{case['case']:02d}.output"]), case
                continue
            trajectory = golden.model.denoise(
                prompt, length=case["length"], steps=case["steps"], cfg_scale=case["cfg_scale"], sampler=smdm()
            )
            assert torch.equal(trajectory.canvases, recorded[f"case{case['case']:02d}.trajectory"]), case


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_rows_ranked_by_themselves_equal_rows_alone(either):
    recorded = either.tensors("sampling")
    for case in (case for case in either.cases("sampling") if case.get("batch") == 2 and case["steps"] in (2, 4)):
        prompt = recorded[f"case{case['case']:02d}.prompt"]
        settings = dict(length=case["length"], steps=case["steps"], cfg_scale=case["cfg_scale"])
        together = either.model.denoise(prompt, sampler=Confidence(), **settings).canvases
        alone = [either.model.denoise(row[None], sampler=Confidence(), **settings).canvases for row in prompt]
        assert torch.equal(together, torch.cat(alone, dim=1))
