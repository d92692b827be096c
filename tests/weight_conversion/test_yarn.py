"""YaRN's frequencies and the queries scaled by position: transformers' numbers, both forms of a config, refusals."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Ministral3Config, Ministral3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.model.positions import Rotary
from weight_conversion import Architecture, QueryScale, YarnScaling, export
from weight_conversion.registry import recognise

NUMBERS = {"factor": 8.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", **NUMBERS}
TOKENS = torch.arange(120).reshape(2, 60)


def read(config):
    return recognise(config, {}, "a config").read_architecture(config, {})


def changed(**changes):
    return {key: value for key, value in {**YARN, **changes}.items() if value is not ...}


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 1.4},
        {"mscale": 0.707},
        {"attention_factor": 1.3},
        {"beta_fast": 8.0, "beta_slow": 2.0},
    ],
)
def test_frequencies_and_attention_factor_are_transformers_own(numbers, truncate):
    for d_head, base, factor, length in (
        (24, 1e6, 16.0, 32),
        (64, 1e4, 1.0, 4096),
        (128, 1e6, 4.0, 32768),
        (16, 500.0, 40.0, 7),
        (128, 1e6, 0.25, 16384),
    ):
        numbers_here = {"factor": factor, "original_max_position_embeddings": length, "truncate": truncate, **numbers}
        theirs = LlamaConfig(head_dim=d_head, rope_parameters={"rope_type": "yarn", "rope_theta": base, **numbers_here})
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        scaling = YarnScaling(**numbers_here)
        assert torch.equal(Rotary(d_head, base, torch.float32, scaling=scaling).frequencies, frequencies)
        assert scaling.table_factor == attention_factor


@pytest.mark.parametrize(
    "changes",
    [
        dict(rope_scaling=YARN),
        dict(rope_scaling=changed(rope_type=..., type="yarn", factor=8)),
        dict(rope_parameters={**YARN, "rope_theta": 1e4}, rope_scaling=None),
    ],
)
def test_the_scaling_is_read_from_either_key(changes, configs):
    assert read({**configs["llama"], **changes}) == replace(
        read(configs["llama"]), rotary_scaling=YarnScaling(**NUMBERS)
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "dream", "nemotron", "nemotron-ar"])
def test_there_and_back_in_the_familys_format_and_our_own(name, configs, specimen, tmp_path):
    config = configs[name] if name.startswith("nemotron") else {**configs[name], "rope_scaling": changed(mscale=0.7)}
    model = specimen(config).model
    architecture = model.cfg.architecture
    assert isinstance(architecture.rotary_scaling, YarnScaling)
    assert Architecture.from_dict(architecture.to_dict()) == architecture
    for family in (architecture.family, "diffusion_lens"):
        path = export(model.state_dict(), architecture, tmp_path / family / "model.safetensors", family)
        again = HookedDiffusionTransformer.from_pretrained(path, device="cpu")
        assert again.cfg.architecture == replace(architecture, family=again.cfg.family)
        assert torch.equal(again(TOKENS), model(TOKENS))


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.7}, {"truncate": False, "beta_fast": 6.0}])
def test_hugging_face_reads_what_is_exported(more, configs, specimen, tmp_path):
    model = specimen({**configs["llama"], "rope_scaling": {**YARN, **more}}).model
    path = export(model.state_dict(), model.cfg.architecture, tmp_path / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_scaled_queries_are_those_of_ministral3(padded, configs, specimen, tmp_path):
    """The network of transformers with the same weights, of texts longer than the original length."""
    model = specimen(configs["nemotron-ar"]).model
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
    )
    theirs = Ministral3ForCausalLM(
        Ministral3Config(tie_word_embeddings=False, **{key: configs["nemotron-ar"][key] for key in keys})
    ).eval()
    path = export(model.state_dict(), model.cfg.architecture, tmp_path / "model.safetensors")
    from safetensors.torch import load_file

    renamed = {
        name.replace("encoder.", "model.").replace("diffusion_head", "lm_head"): tensor
        for name, tensor in load_file(path).items()
    }
    theirs.load_state_dict(renamed)
    real = torch.ones_like(TOKENS)
    real[1, :9] = not padded
    at = (real.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(TOKENS, attention_mask=real, position_ids=at).logits
        ours = model(TOKENS, attention_mask=real if padded else None)
    torch.testing.assert_close(ours[real.bool()], expected[real.bool()], rtol=0, atol=1e-4)


def test_queries_are_scaled_from_the_original_length_on(configs, specimen):
    model = specimen(configs["nemotron"]).model
    plain = specimen(configs["nemotron"]).model
    plain.positions.query_scale = None
    short, long = TOKENS[:, :6], TOKENS[:, :20]
    assert torch.equal(model(short), plain(short))
    assert not torch.allclose(model(long)[:, 6:], plain(long)[:, 6:], atol=1e-3)
    _, cache = model.run_with_cache(long, names_filter=lambda name: name.endswith(("hook_q", "hook_rot_q")))
    at = torch.arange(20)[None]
    turned = model.positions.turn(cache["blocks.1.attn.hook_q"], at)
    scaled = model.positions.scale_queries(turned, at)
    torch.testing.assert_close(scaled, cache["blocks.1.attn.hook_rot_q"])
    assert torch.equal(scaled[:, :6], turned[:, :6])
    torch.testing.assert_close(scaled[:, 12], turned[:, 12] * (1 + 0.1 * torch.tensor(3.0).log()))
    with pytest.raises(ValueError, match="position -1 is negative"):
        model.positions.scale_queries(turned, at - 1)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        (changed(factor=...), "rope_scaling lacks ['factor']; add them"),
        (changed(low_freq_factor=1.0), "rope_scaling has keys that are not understood: ['low_freq_factor']"),
        (changed(factor=0), "factor is 0; it must be a number above 0"),
        (changed(original_max_position_embeddings=0), "original_max_position_embeddings is 0"),
        (changed(beta_fast=1.0), "beta_fast is 1.0; it must be above beta_slow, 1.0"),
        (changed(beta_slow=0), "beta_slow is 0"),
        (changed(mscale=-1.0), "mscale is -1.0"),
        (changed(attention_factor=True), "attention_factor is True"),
        (changed(truncate="no"), "truncate is 'no'; it must be true or false"),
    ],
)
def test_a_scaling_that_does_not_fit_is_refused(scaling, words, configs, refused):
    refused(ValueError, words, do=lambda: read({**configs["llama"], "rope_scaling": scaling}))


def test_a_scale_of_queries_that_does_not_fit_is_refused(configs, refused):
    config = configs["nemotron"]
    for changes, words in [
        ({"llama_4_scaling_beta": -0.1}, "beta is -0.1"),
        ({"original_max_position_embeddings": ...}, "lacks original_max_position_embeddings"),
    ]:
        rotary = {key: value for key, value in {**config["rope_parameters"], **changes}.items() if value is not ...}
        refused(ValueError, words, do=lambda rotary=rotary: read({**config, "rope_parameters": rotary}))
    unscaled = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.1,
    }
    found = read({**config, "rope_parameters": unscaled})
    assert (found.rotary_scaling, found.query_scale) == (None, QueryScale(0.1, 8))
