"""Loading takes hardly more memory than the weights in the requested dtype; a trace takes at most its budget."""

import sys
from dataclasses import replace
from functools import partial

import pytest
from oracles.large_checkpoints import LLADA_8B, LLADA_MOE, write_checkpoint, write_shards
from oracles.memory import memory_of_loading, memory_of_tracing
from oracles.traced_shapes import Shape
from processes import measured_afresh, measured_apart

from weight_conversion import (
    Architecture,
    NoiseSchedule,
    TimeConditioning,
    export_size,
    folded_architecture,
    n_params,
    open_checkpoint,
)

# Half of the 170M model's layers, an eighth of its words: 364 MB in float32.
ARCHITECTURE = Architecture(
    family="lit_gpt",
    name="half of 170M",
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
# Two layers of MDLM at its own width and vocabulary, whose conditioning is folded: 187 MB in bfloat16.
FOLDED = Architecture(
    family="mdlm",
    name="two layers",
    n_layers=2,
    d_model=768,
    n_heads=12,
    n_key_value_heads=12,
    d_head=64,
    d_mlp=3072,
    d_vocab=50258,
    d_vocab_out=50258,
    n_ctx=1024,
    attention_dir="bidirectional",
    readout="in_place",
    mask_token_id=50257,
    mlp_bias=True,
    norm="layer",
    mlp="plain",
    act_fn="gelu_new",
    unembed_bias=True,
    time=TimeConditioning(128, told=False),
    schedule=NoiseSchedule(),
)
# Of the weights. The copied process may still have a little free memory to use again.
LEAST, MOST = 0.8, 1.15
BUDGET = 24 * 2**20


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One file, and folders of shards: dense, of experts, and with constants to fold; deleted after measuring."""
    scratch = tmp_path_factory.mktemp("large")
    file = write_checkpoint(ARCHITECTURE, scratch / "model.safetensors")
    for name in ("shards", "experts", "folded"):
        (scratch / name).mkdir()
    shards = write_shards(SHARDED, scratch / "shards", most_bytes=50_000_000)
    experts = write_shards(LLADA_MOE, scratch / "experts")
    folded = write_shards(FOLDED, scratch / "folded")
    yield file, shards, experts, folded
    for path in (file, *(path for folder in (shards, experts, folded) for path in folder.glob("*.safetensors"))):
        path.unlink()


def test_loading_takes_little_more_than_the_weights(checkpoints):
    file, shards, experts, folded = checkpoints
    assert file.stat().st_size == export_size(ARCHITECTURE) > 360e6
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
        (folded, "bfloat16"): n_params(folded_architecture(FOLDED)) * 2,
    }
    loads = measured_apart(*(partial(memory_of_loading, *arguments) for arguments in expected))
    for measured, weights in zip(loads, expected.values(), strict=True):
        assert measured["weights"] == weights > 180e6
        assert LEAST * weights <= measured["growth"] <= MOST * weights, measured


def test_a_trace_takes_at_most_its_budget():
    if sys.platform != "linux":
        return
    cells = dict(positions=range(2, 20, 3), layers=[2, 4])
    shapes = [Shape(variant, n_pos=24) for variant in ("masked", "causal")]
    for measured in (measured_afresh(partial(memory_of_tracing, shape, BUDGET, cells)) for shape in shapes):
        assert measured["weights"] > 1.5 * BUDGET
        assert BUDGET / 8 < measured["growth"] <= BUDGET, measured
