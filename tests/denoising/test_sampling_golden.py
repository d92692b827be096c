"""Every canvas of every step equals the authors' sampler."""

import pytest
import torch

from diffusion_lens.denoising.samplers import Confidence, smdm


def chosen_cases(golden):
    """Recorded runs that together have every number of steps, guidance and none, one row and two."""
    cases = golden.cases("sampling")
    if golden.kind == "ar":
        return cases
    numbers = {"gqa": (2, 5, 10, 13, 16, 19, 20, 23), "mha": (7, 9, 18)}[golden.folder.parent.name]
    return [case for case in cases if case["case"] in numbers]


def test_every_canvas(golden):
    recorded = golden.tensors("sampling")
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
