"""Settings that a function and a command share: a field is declared once, with its default, its help and its check."""

from inspect import signature
from typing import Any, get_args

import pytest
from typed_commands import COMMANDS

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import (
    average_indirect_effect,
    causal_trace,
    compare,
    key_value_study,
    logit_lens,
    optimize_value,
    patch_grid,
    reversal_signatures,
)
from diffusion_lens.analysis.engine.layout import CanvasLayout
from diffusion_lens.analysis.patching.grid import PatchSettings
from diffusion_lens.analysis.rome import query_with_prefixes
from diffusion_lens.analysis.rome.key_value_study import KeyValueSettings
from diffusion_lens.denoising import DenoiseSettings
from diffusion_lens.evaluation import RecallSettings, recall_by_steps
from diffusion_lens.loading import shape_of
from diffusion_lens.settings import fields_of
from diffusion_lens.settings.shared import (
    ACCUMULATE,
    MIXED_PRECISION,
    CanvasFields,
    CompareSettings,
    DenoiseFields,
    LensSettings,
    PatchFields,
    RecallFields,
    SignatureSettings,
    ValueSettings,
    VectorFields,
)
from diffusion_lens.training import TrainingConfig

# Fields, the function that has them as keywords, and the command that has them as options.
SHARED = [
    (RecallFields, recall_by_steps, "recall"),
    (CanvasFields, query_with_prefixes, "trace"),
    (CanvasFields, query_with_prefixes, "rome"),
    (CanvasFields, key_value_study, "compare"),
    (ValueSettings, optimize_value, "rome"),
    (VectorFields, key_value_study, "compare"),
    (PatchFields, patch_grid, "patch"),
    (DenoiseFields, HookedDiffusionTransformer.denoise, "denoise"),
    (DenoiseFields, HookedDiffusionTransformer.denoise_with_cache, "explore"),
    (LensSettings, logit_lens, "lens"),
    (SignatureSettings, reversal_signatures, "signatures"),
    (CompareSettings, compare, "compare"),
]
# Fields that a command does not offer, and those whose help it words for its data.
OWN_DEFAULT = {("explore", "steps"), ("compare", "first_tokens")}  # a page shows each step; ROME scores one token
LEFT_OUT = {"n_masks", "occurrence"}
OWN_HELP = {
    ("lens", "positions"),
    ("explore", "steps"),
    ("recall", "length"),
    ("compare", "length"),
    ("compare", "first_tokens"),
}


def unquoted(text: str) -> str:
    return text.replace('"', "")


def option_of(command: str, name: str) -> Any:
    options = [each for each in COMMANDS[command].params if each.name == name]
    return options[0] if options else None


@pytest.mark.parametrize(("kind", "function", "command"), SHARED, ids=lambda each: getattr(each, "__name__", each))
def test_a_field_is_a_keyword_and_an_option_with_one_default_and_one_help(
    kind: Any, function: Any, command: str
) -> None:
    offered = 0
    for name, field in fields_of(kind).items():
        own = (command, name) in OWN_DEFAULT
        assert own or signature(function).parameters[name].default is field.default
        assert f"    {name}: {field.metadata['help'][:25]}" in function.__doc__
        option = option_of(command, name)
        if option is None:
            assert name in LEFT_OUT or not field.metadata["option"], name
            continue
        offered += 1
        assert own or option.default is field.default
        if (command, name) not in OWN_HELP:
            assert unquoted(option.help).startswith(unquoted(field.metadata["help"]))
    assert offered >= 2


def test_the_settings_objects_have_the_fields_themselves() -> None:
    for kind, fields in (
        (RecallSettings, RecallFields),
        (CanvasLayout, CanvasFields),
        (KeyValueSettings, VectorFields),
        (PatchSettings, PatchFields),
        (DenoiseSettings, DenoiseFields),
    ):
        for name, field in fields_of(fields).items():
            own = fields_of(kind)[name]
            assert (own.default, own.metadata) == (field.default, field.metadata), name


def test_a_field_of_a_study_is_in_its_record() -> None:
    shape = shape_of("tiny-mdm")
    assert fields_of(RecallFields).keys() <= RecallSettings((1,), 14).describe_on(shape).keys()
    recorded = KeyValueSettings(n_masks=3).describe_on(shape)
    assert fields_of(KeyValueSettings).keys() - recorded.keys() == {"search"}
    assert fields_of(ValueSettings).keys() <= recorded["settings"].keys()


def test_a_signature_has_the_types_that_a_setting_takes() -> None:
    for function, name, accepted in (
        (HookedDiffusionTransformer.denoise, "sampler", "Sampler"),
        (HookedDiffusionTransformer.denoise, "seed", "Generator"),
        (recall_by_steps, "sampler", "Sampler"),
        (causal_trace, "swap", "Query"),
        (average_indirect_effect, "swap", "Query"),
        (average_indirect_effect, "known", "Known"),
    ):
        kinds = get_args(signature(function).parameters[name].annotation)
        assert accepted in {kind.__name__ for kind in kinds}, name
        assert Any not in kinds


def test_training_and_finetune_share_two_settings() -> None:
    for name, field in (("accumulate", ACCUMULATE), ("mixed_precision", MIXED_PRECISION)):
        assert unquoted(fields_of(TrainingConfig)[name].metadata["help"]) == option_of("finetune", name).help
        assert fields_of(TrainingConfig)[name].default is option_of("finetune", name).default is field.default
    assert option_of("finetune", "mixed_precision").opts == ["--precision"]


def test_a_setting_may_have_another_name_as_an_option() -> None:
    assert option_of("rome", "steps").opts == ["--iterations"]
