"""Loading takes hardly more memory than the weights in the requested dtype; a trace takes at most its budget."""

import sys
from dataclasses import replace
from functools import partial

import pytest
from oracles.large_checkpoints import LLADA_8B, LLADA_MOE, write_checkpoint, write_shards
from oracles.memory import memory_of_loading, memory_of_tracing
from oracles.traced_shapes import Shape
from processes import measured_afresh, measured_apart
from small_networks import diffusion_gemma

from diffusion_lens.loading.catalogue import LLADA2_MINI, MDLM, NEMOTRON_LABS_3B, SDAR_4B
from weight_conversion import (
    Architecture,
    export_size,
    folded_architecture,
    n_params,
    open_checkpoint,
)
from weight_conversion.registry import FAMILIES, recognise

# Nine of the 170M model's 18 layers, an eighth of its words: 365 MB in float32.
ARCHITECTURE = Architecture(
    family="lit_gpt",
    name="part of 170M",
    n_layers=9,
    d_model=768,
    n_heads=12,
    n_key_value_heads=12,
    d_head=64,
    d_mlp=3072,
    d_vocab=4001,
    d_vocab_out=4000,
    n_ctx=2048,
    attention_dir="bidirectional",
    readout="in_place",
    mask_token_id=4000,
    rotary_dtype="bfloat16",
)
# A quarter of LLaDA-8B's width and vocabulary: 184 MB in bfloat16.
SHARDED = replace(
    LLADA_8B,
    d_model=1024,
    n_heads=8,
    n_key_value_heads=8,
    d_mlp=3072,
    d_vocab=32000,
    d_vocab_out=32000,
    mask_token_id=31999,
)


def narrower(config, **changes):
    """Two layers of a published config, at a quarter of its width: 95 to 115 MB in bfloat16."""
    fewer = dict(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, vocab_size=32000)
    widths = {key: config[key] // 4 for key in ("hidden_size", "intermediate_size")}
    return {**config, **fewer, **widths, **changes}


WIDTHS = {"hidden_size": 768, "n_blocks": 2, "n_heads": 12, "length": 1024}
# The families that came after LLaDA. Diffusion transformers have their own width, and those whose conditioning is
# folded their own vocabulary, beside which the matrices that are folded are small: 187 MB.
LATER = {
    "sdar": narrower(SDAR_4B, block_size=4, mask_token_id=31999),
    "nemotron_labs": narrower(NEMOTRON_LABS_3B),
    "llada2": narrower(LLADA2_MINI, num_experts=24, block_size=32, mask_token_id=31999),
    "diffusion_gemma": diffusion_gemma(
        hidden_size=768,
        intermediate_size=1536,
        moe_intermediate_size=512,
        num_experts=8,
        vocab_size=32000,
    ),
    "mdlm": {**MDLM, "n_blocks": 2},
    "bd3lm": {**MDLM, "n_blocks": 2, "model_type": "bd3lm", "block_size": 4},
    "udlm": {**MDLM, "n_blocks": 2, "model_type": "udlm", "time_conditioning": True, "vocab_size": 32000},
    "sedd": {
        "tokens": 32000,
        "graph": {"type": "absorb"},
        "noise": {"type": "loglinear"},
        "model": {**WIDTHS, "type": "ddit", "cond_dim": 128, "scale_by_sigma": True},
    },
    "radd": {"tokens": 32000, "model": {**WIDTHS, "type": "ddit_wot"}},
}
# Of the weights. The copied process may still have a little free memory to use again.
LEAST, MOST = 0.8, 1.15
BUDGET = 24 * 2**20


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One file, and folders of shards, dense and of experts; deleted after measuring."""
    scratch = tmp_path_factory.mktemp("large")
    file = write_checkpoint(ARCHITECTURE, scratch / "model.safetensors")
    for name in ("shards", "experts"):
        (scratch / name).mkdir()
    shards = write_shards(SHARDED, scratch / "shards", most_bytes=50_000_000)
    experts = write_shards(LLADA_MOE, scratch / "experts")
    yield file, shards, experts
    for path in (file, *(path for folder in (shards, experts) for path in folder.glob("*.safetensors"))):
        path.unlink()


def test_loading_takes_little_more_than_the_weights(checkpoints):
    file, shards, experts = checkpoints
    assert file.stat().st_size == pytest.approx(export_size(ARCHITECTURE), rel=1e-4)
    assert len(list(shards.glob("model-*.safetensors"))) > 3
    assert open_checkpoint(file).architecture == ARCHITECTURE
    assert open_checkpoint(shards).architecture == SHARDED
    if sys.platform != "linux":  # only Linux publishes its count of resident pages
        return
    expected = {
        (file, "float32"): n_params(ARCHITECTURE) * 4,
        (file, "bfloat16"): n_params(ARCHITECTURE) * 2,
        (shards, "bfloat16"): n_params(SHARDED) * 2,
        (experts, "bfloat16"): n_params(LLADA_MOE) * 2,
    }
    loads = measured_apart(*(partial(memory_of_loading, *arguments) for arguments in expected))
    for measured, weights in zip(loads, expected.values(), strict=True):
        assert measured["weights"] == weights > 140e6
        assert LEAST * weights <= measured["growth"] <= MOST * weights, measured


@pytest.mark.parametrize("name", LATER)
def test_families_load_in_little_more_than_the_weights(name, tmp_path):
    config = LATER[name]
    architecture = recognise(config, {}, name).read_architecture(config, {})
    folder = write_shards(architecture, tmp_path)
    assert architecture.family == name
    if sys.platform == "linux":
        (measured,) = measured_apart(partial(memory_of_loading, folder, "bfloat16"))
        constant = architecture.time is not None and not architecture.time.conditioned
        weights = 2 * n_params(folded_architecture(architecture) if constant else architecture)
        assert measured["weights"] == weights > 80e6
        assert LEAST * weights <= measured["growth"] <= MOST * weights, measured
    for path in folder.glob("*.safetensors"):
        path.unlink()


def test_every_family_is_measured():
    """The others have no code of their own for tensors: llama, qwen2, qwen3 and dream are read as sdar is, and others
    have the table of another family."""
    others = ("lit_gpt", "llada", "llada_moe", "diffusion_lens", "dream", "llama", "qwen2", "qwen3")
    measured = {FAMILIES[name].rules for name in (*LATER, *others)}
    assert {family.rules for family in FAMILIES.values()} <= measured


def test_a_trace_takes_at_most_its_budget():
    if sys.platform != "linux":
        return
    cells = dict(positions=range(2, 20, 3), layers=[2, 4])
    shapes = [Shape(variant, n_pos=24) for variant in ("masked", "causal")]
    traces = [partial(memory_of_tracing, shape, BUDGET, cells) for shape in shapes]
    for measured in measured_afresh(partial(measured_apart, *traces)):
        assert measured["weights"] > 1.5 * BUDGET
        # Beside other processes, the heap takes up to 3 MB more pages.
        assert BUDGET / 8 < measured["growth"] <= 1.2 * BUDGET, measured
