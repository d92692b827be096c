"""The bundled models, changed and judged, for the tests of checks."""

import functools
from dataclasses import replace

import pytest

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.checks import Expected

BRIEFLY = ("weights", "page loss", "diagnosis")
only_tiny_mdm = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
only_tiny_ar = pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
on_short_page = pytest.mark.usefixtures("short_page")
without_search_of_parts = pytest.mark.usefixtures("no_search_of_parts")
# The more words a page has, the nearer the first wrong row of the vocabulary is located.
on_eight_sentences = pytest.mark.parametrize("short_page", [8], indirect=True)


@functools.cache
def bundled(name):
    return HookedDiffusionTransformer.from_pretrained(name, device="cpu")


def judged_by_behaviour(name):
    """What is known of a model, except its hash and the numbers of the catalogue."""
    return replace(Expected.of(name), architecture=None, sha256=None)


def with_changes(model, architecture, tensors):
    cfg = DiffusionConfig.from_architecture(architecture, device="cpu", model_name="changed")
    weights = {**model.state_dict(), **tensors}
    return HookedDiffusionTransformer(cfg, model.tokenizer, tensors=weights.items())


def outcomes(report):
    return {finding.check: finding.outcome for finding in report.findings}
