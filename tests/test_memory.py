"""Loading takes the memory of the weights in the requested dtype, and hardly more."""

import ctypes
import json
import sys
from dataclasses import replace

import pytest
from benchmark_scripts import benchmark
from processes import forked

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
    """The file, which is deleted after both measurements."""
    path = load_memory.write_checkpoint(ARCHITECTURE, tmp_path_factory.mktemp("large") / "model.safetensors")
    yield path
    path.unlink()


def measure_forked(path, dtype, scratch):
    """The memory for loading `path` in a copy of this process that has returned all freed memory to the system."""

    def measure():
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        (scratch / "memory.json").write_text(json.dumps(load_memory.measure(path, dtype)))

    with forked(measure) as child:
        child.join(timeout=120)
    assert child.exitcode == 0
    return json.loads((scratch / "memory.json").read_text())


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_loading_takes_little_more_than_the_weights(checkpoint, dtype, width, tmp_path):
    assert checkpoint.stat().st_size == export_size(ARCHITECTURE) > 360e6
    if sys.platform != "linux":  # only Linux publishes its count of resident pages
        assert open_checkpoint(checkpoint).architecture == ARCHITECTURE
        return
    measured = measure_forked(checkpoint, dtype, tmp_path)
    assert measured["weights"] == ARCHITECTURE.n_params * width
    assert measured["weights"] <= measured["growth"] <= MOST * measured["weights"], measured


def test_shards_in_half_precision_take_as_little(tmp_path):
    folder = load_memory.write_shards(SHARDED, tmp_path, most_bytes=50_000_000)
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 3
    assert open_checkpoint(folder).architecture == SHARDED
    if sys.platform == "linux":
        measured = measure_forked(folder, "bfloat16", tmp_path)
        assert measured["weights"] == SHARDED.n_params * 2 > 180e6
        assert measured["weights"] <= measured["growth"] <= MOST * measured["weights"], measured
    for file in files:
        file.unlink()
