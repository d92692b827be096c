"""Help texts that name families and samplers take the names from their tables."""

import re
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.cli import app
from diffusion_lens.cli.models import convert
from diffusion_lens.cli.options import with_names
from diffusion_lens.cli.trace import trace
from diffusion_lens.denoising.samplers import PRESETS, SAMPLERS, fitting_samplers
from weight_conversion.registry import FAMILIES


def help_of(command, option):
    return with_names(get_type_hints(command, include_extras=True)[option].__metadata__[0].help)


def names(text):
    return re.findall(r"\w+", text)


def test_formats_are_the_families():
    listed = re.fullmatch(r"Format: (.+)\. Default: the source's\.", help_of(convert, "to"))
    assert names(listed[1]) == list(FAMILIES)


@pytest.mark.parametrize(
    ("sentence", "config"),
    [
        ("For a masked model ", "llada"),
        ("For one that writes block after block ", "sdar"),
        ("For uniform noise ", "udlm"),
        ("A causal model supports only: ", "llama"),
    ],
)
def test_samplers_are_those_that_fit(sentence, config, specimen, configs):
    _, _, listed = help_of(trace, "sampler").partition(sentence)
    named = {name for name in names(listed.partition(".")[0]) if name in {*SAMPLERS, *PRESETS}}
    assert named == set(fitting_samplers(specimen(configs[config]).model.cfg))


@pytest.mark.parametrize("text", [help_of(trace, "sampler"), HookedDiffusionTransformer.denoise.__doc__])
def test_every_sampler_is_listed(text):
    assert {*SAMPLERS, *PRESETS} <= set(names(text))


@pytest.mark.parametrize("command", ["denoise", "trace", "convert"])
def test_the_help_of_a_command_shows_the_names(command):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert ("llada_moe" if command == "convert" else "uniform_posterior") in shown
