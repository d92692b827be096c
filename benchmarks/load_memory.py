"""Memory for loading a checkpoint of a published size, as a multiple of the size of its weights.

The benchmark writes a checkpoint of that size with random weights. It then loads it for each dtype in a separate
process, and reads the peak resident memory (Linux: VmHWM). A size of SMDM is one float32 file. "llada-8b" is two
layers with the widths and the full vocabulary of LLaDA-8B, 2.9 GB in bfloat16, in shards as Hugging Face writes them.
Growth is relative to the memory just before `from_pretrained`, after all imports and after one load of a bundled
model. It includes mapped pages of the file. A ratio of 1.00 would be the weights and nothing else.

    python benchmarks/load_memory.py [--size 1028M | llada-8b] [--suffix .safetensors] [--folder /tmp] [--keep]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from weight_conversion import published_architecture

# tests/oracles holds what tests and benchmarks share.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from oracles.large_checkpoints import LLADA_8B, write_checkpoint, write_shards
from oracles.memory import memory_of_loading

DTYPES = ("float32", "bfloat16", "float16")


def measure_apart(path: Path, dtype: str) -> dict[str, float]:
    """`memory_of_loading` in a new process, so that no measurement includes the memory of another."""
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
        print(json.dumps(memory_of_loading(Path(arguments.measure[0]), arguments.measure[1])))
    else:
        main(arguments.size, arguments.suffix, arguments.folder, arguments.keep)
