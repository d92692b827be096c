"""Loading takes the memory of the weights in the dtype that was asked for, and hardly more."""

import sys
from dataclasses import replace

import pytest
from benchmark_scripts import benchmark

from weight_conversion import Architecture, export_size, open_checkpoint

load_memory = benchmark("load_memory")
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
    load_memory.LLADA_8B,
    d_model=1024,
    n_heads=8,
    n_key_value_heads=8,
    d_mlp=3072,
    d_vocab=32000,
    d_vocab_out=32000,
    mask_token_id=31999,
)
MOST = 1.15


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The file, deleted again when all is measured."""
    path = load_memory.write_checkpoint(ARCHITECTURE, tmp_path_factory.mktemp("large") / "model.safetensors")
    yield path
    path.unlink()


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_loading_takes_little_more_than_the_weights(checkpoint, dtype, width, monkeypatch):
    assert checkpoint.stat().st_size == export_size(ARCHITECTURE) > 360e6
    if sys.platform != "linux":  # only Linux publishes its count of resident pages
        assert open_checkpoint(checkpoint).architecture == ARCHITECTURE
        return
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # on a busy machine threads wait for each other, and we for them
    found = load_memory.measure_apart(checkpoint, dtype)
    assert found["weights"] == ARCHITECTURE.n_params * width
    assert found["weights"] <= found["growth"] <= MOST * found["weights"], found


def test_shards_of_half_precision_load_as_cheaply(tmp_path, monkeypatch):
    folder = load_memory.write_shards(SHARDED, tmp_path, most_bytes=50_000_000)
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 3
    assert open_checkpoint(folder).architecture == SHARDED
    if sys.platform == "linux":
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        found = load_memory.measure_apart(folder, "bfloat16")
        assert found["weights"] == SHARDED.n_params * 2 > 180e6
        assert found["weights"] <= found["growth"] <= MOST * found["weights"], found
    for file in files:
        file.unlink()
