"""A name that is unknown, or does not fit the model, is refused with the names of the table."""

import pytest
import torch
from typer.testing import CliRunner

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.cli import app
from diffusion_lens.denoising.samplers import PRESETS, SAMPLERS, fitting_samplers
from weight_conversion.registry import FAMILIES


def refused(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code != 0
    return " ".join(result.output.split())


def test_an_unknown_format_is_refused_with_all_families(tmp_path):
    HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu").save_pretrained(tmp_path / "ours")
    message = refused("convert", str(tmp_path / "ours"), str(tmp_path / "theirs.safetensors"), "--to", "nonsense")
    assert all(name in message for name in FAMILIES)


def test_an_unknown_sampler_is_refused_with_all_names():
    message = refused("denoise", "tiny-mdm", "Gustav Geisser is the", "--sampler", "nonsense")
    assert all(name in message for name in {*SAMPLERS, *PRESETS})


@pytest.mark.parametrize("config", ["llada", "sdar", "udlm", "llama"])
def test_a_sampler_that_does_not_fit_is_refused_with_those_that_do(config, specimen, configs):
    model = specimen(configs[config]).model
    fitting = fitting_samplers(model.cfg)
    for name in {*SAMPLERS, *PRESETS} - {*fitting}:
        with pytest.raises(ValueError, match=f"Samplers that fit: {', '.join(fitting)}$"):
            model.denoise(torch.arange(3)[None], max_new_tokens=4, sampler=name)
