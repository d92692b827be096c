"""Memory for loading a checkpoint of a published size, as a multiple of the size of its weights.

The benchmark writes a checkpoint of that size with random weights. It then loads it for each dtype in a separate
process, and reads the peak resident memory (Linux: VmHWM). A size of SMDM is one float32 file. "llada-8b" is two
layers with the widths and the full vocabulary of LLaDA-8B, 2.9 GB in bfloat16, in shards as Hugging Face writes them.
Growth is relative to the memory just before `from_pretrained`, after all imports and after one load of a bundled
model. It includes mapped pages of the file. A ratio of 1.00 would be the weights and nothing else.

    python benchmarks/load_memory.py [--size 1028M | llada-8b] [--suffix .safetensors] [--folder /tmp] [--keep]
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from diffusion_lens import HookedDiffusionTransformer
from weight_conversion import Architecture, export, open_checkpoint, published_architecture, tensor_shapes, write_json
from weight_conversion.files import INDEX
from weight_conversion.key_map import KeyMap
from weight_conversion.registry import FAMILIES

DTYPES = ("float32", "bfloat16", "float16")
LLADA_8B = Architecture(
    family="llada",
    name="two layers of LLaDA-8B",
    n_layers=2,
    d_model=4096,
    n_heads=32,
    n_key_value_heads=32,
    d_head=128,
    d_mlp=12288,
    d_vocab=126464,
    d_vocab_out=126464,
    n_ctx=4096,
    attention_dir="bidirectional",
    readout="in_place",
    mask_token_id=126336,
    rotary_base=500000.0,
)


def write_checkpoint(architecture: Architecture, path: Path) -> Path:
    """Write a checkpoint with random weights and its config. A `.pth` file has the weights under "model"."""
    generator = torch.Generator().manual_seed(0)
    plain = path.with_suffix(".safetensors")
    shapes = tensor_shapes(architecture)
    export({name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}, architecture, plain)
    if path.suffix != ".safetensors":
        source = open_checkpoint(plain).source
        torch.save({"model": {name: source.read(name).clone() for name in source.shapes()}}, path)
        plain.unlink()
    return path


def write_shards(architecture: Architecture, folder: Path, most_bytes: int = 10**9) -> Path:
    """Write a checkpoint in bfloat16 in shards of at most `most_bytes` (a tensor is never split), with their index."""
    generator = torch.Generator().manual_seed(0)
    family = FAMILIES[architecture.family]
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    shard_bytes = total = 0
    for name, shape in KeyMap(family.rules, architecture).their_shapes.items():
        size = 2 * torch.Size(shape).numel()
        if shards[-1] and shard_bytes + size > most_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = shape
        shard_bytes, total = shard_bytes + size, total + size
    weight_map: dict[str, str] = {}
    for i, shapes in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shapes, file)
        tensors = {name: torch.rand(shape, generator=generator, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, folder / INDEX)
    write_json(family.write_config(architecture), folder / family.config_file)
    return folder


def peak_bytes() -> int:
    """Peak resident memory of this process in bytes, including file pages."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def measure(path: Path, dtype: str) -> dict[str, float]:
    """Load `path` in this process. Returns the bytes of the weights, the growth of the peak memory, and seconds."""
    HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    with contextlib.suppress(OSError):  # If it is not permitted, the peak of the imports is the reference.
        Path("/proc/self/clear_refs").write_text("5")
    before, started = peak_bytes(), time.perf_counter()
    model = HookedDiffusionTransformer.from_pretrained(path, device="cpu", dtype=getattr(torch, dtype))
    seconds = time.perf_counter() - started
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"weights": weights, "growth": peak_bytes() - before, "seconds": seconds}


def measure_apart(path: Path, dtype: str) -> dict[str, float]:
    """`measure` in a new process, so that no measurement includes the memory of another."""
    command = [sys.executable, __file__, "--measure", str(path), dtype]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(size: str = "1028M", suffix: str = ".safetensors", folder: str | None = None, keep: bool = False) -> None:
    """Write the checkpoint, measure, and print one table. The files are deleted unless `keep`."""
    scratch = Path(tempfile.mkdtemp(dir=folder))
    try:
        if sharded := size.lower() == "llada-8b":
            path = write_shards(LLADA_8B, scratch)
        else:
            path = write_checkpoint(published_architecture(size, "mdm"), scratch / f"mdm-{size}{suffix}")
        files = sorted(scratch.glob("*.safetensors")) or [path]
        n_bytes = sum(file.stat().st_size for file in files)
        print(f"{path}: {n_bytes:,} bytes in {len(files)} files, torch {torch.__version__}, CPU")
        print(f"{'dtype':10} {'weights':>15} {'peak growth':>15} {'ratio':>6} {'seconds':>8}")
        for dtype in ("bfloat16",) if sharded else DTYPES:
            result = measure_apart(path, dtype)
            ratio = result["growth"] / result["weights"]
            print(f"{dtype:10} {result['weights']:15,} {result['growth']:15,} {ratio:6.3f} {result['seconds']:8.1f}")
    finally:
        if not keep:
            shutil.rmtree(scratch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="1028M")
    parser.add_argument("--suffix", default=".safetensors", choices=[".safetensors", ".pth"])
    parser.add_argument("--folder", default=None)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("PATH", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Path(arguments.measure[0]), arguments.measure[1])))
    else:
        main(arguments.size, arguments.suffix, arguments.folder, arguments.keep)
