"""A misspelt keyword of a public function is refused, and the error names the nearest."""

import inspect

import pytest

import diffusion_lens
from diffusion_lens import Fact, HookedDiffusionTransformer, analysis, evaluation
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.settings import takes_any_keyword

METHODS = {
    HookedDiffusionTransformer: [
        *("canvas", "denoise", "denoise_with_cache", "loss_fn", "hide"),
        *("from_pretrained", "enable_compatibility_mode"),
    ],
    Trajectory: ["replay"],
    Fact: ["to_query"],
}
FUNCTIONS = [
    *(getattr(module, name) for module in (diffusion_lens, analysis, evaluation) for name in module.__all__),
    *(getattr(owner, name) for owner, names in METHODS.items() for name in names),
]


def keywords_of(function):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind in kinds and one.default is not one.empty]


# Functions that take settings as `**settings` check them when they are called.
WITH_SETTINGS = {
    function.__qualname__: function
    for function in FUNCTIONS
    if inspect.isroutine(function) and len(keywords_of(function)) > 1 and not takes_any_keyword(function)
}


def test_most_functions_have_settings():
    assert {"causal_trace", "edge_attribution", "compare", "load_pair", "Trajectory.replay"} <= WITH_SETTINGS.keys()


@pytest.mark.parametrize("function", WITH_SETTINGS.values(), ids=WITH_SETTINGS)
def test_a_misspelt_keyword_names_the_nearest(function):
    keyword = max(keywords_of(function), key=len)
    misspelt = f"{keyword[:-2]}{keyword[-1]}_"
    required = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{misspelt}'; the nearest is '{keyword}'"):
        function(*[None] * len(required), **{misspelt: None})


def test_a_misspelt_keyword_of_a_forward_pass_names_the_nearest(tiny):
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'attention_mak_'; the nearest is 'attention_mask'"
    ):
        tiny(tiny.to_tokens("the"), attention_mak_=None)
