"""Every canvas of every step equals the authors' sampler."""

import torch

from diffusion_lens.denoising.samplers import Confidence, smdm


def test_every_canvas(golden):
    recorded = golden.tensors("sampling")
    for case in golden.cases("sampling"):
        prompt = recorded[f"case{case['case']:02d}.prompt"]
        if golden.kind == "ar":
            written = golden.model.denoise(prompt, length=case["length"]).tokens
            assert torch.equal(written, recorded[f"case{case['case']:02d}.output"]), case
            continue
        trajectory = golden.model.denoise(
            prompt, length=case["length"], steps=case["steps"], cfg_scale=case["cfg_scale"], sampler=smdm()
        )
        assert torch.equal(trajectory.canvases, recorded[f"case{case['case']:02d}.trajectory"]), case


def test_rows_ranked_by_themselves_equal_rows_alone(golden):
    recorded = golden.tensors("sampling")
    pairs = [case for case in golden.cases("sampling") if case.get("batch") == 2]
    assert bool(pairs) == (golden.kind == "mdm")
    for case in pairs:
        prompt = recorded[f"case{case['case']:02d}.prompt"]
        settings = dict(length=case["length"], steps=case["steps"], cfg_scale=case["cfg_scale"])
        together = golden.model.denoise(prompt, sampler=Confidence(), **settings).canvases
        alone = [golden.model.denoise(row[None], sampler=Confidence(), **settings).canvases for row in prompt]
        assert torch.equal(together, torch.cat(alone, dim=1))
