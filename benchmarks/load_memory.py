"""Memory for loading a checkpoint of a published size, as a multiple of the size of its weights.

The benchmark writes a checkpoint of that size with random weights. It then loads it for each dtype in a separate
process, and reads the peak resident memory (Linux: VmHWM). A size of SMDM is one float32 file. "llada-8b" is two
layers with the widths and the full vocabulary of LLaDA-8B, 2.9 GB in bfloat16, in shards as Hugging Face writes them.
Growth is relative to the memory just before `from_pretrained`, after all imports and after one load of a bundled
model. It includes mapped pages of the file. A ratio of 1.00 would be the weights and nothing else.

With `--workers 4` it loads the model in four processes of `LocalWorkers`, from a file of ours, from SMDM's and in
another dtype. It reads their memory together (Linux: Pss, in which a page that several processes map counts once),
relative to the same processes with a bundled model. A ratio of 1.00 would be one copy, and of 4.00 four.

    python benchmarks/load_memory.py [--size 1028M | llada-8b] [--suffix .safetensors] [--folder /tmp] [--keep]
    python benchmarks/load_memory.py --size 48M --workers 4
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import LocalWorkers, Workers
from diffusion_lens.analysis.over_facts.executor import run_tasks
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


@dataclass(frozen=True)
class Load:
    """A task that loads the model, and lasts long enough for every worker to get one."""

    name: str = "of a measurement"
    size: int = 1
    n_kept: int = 0

    def compute(self, model: HookedDiffusionTransformer) -> int:
        """The number of the process."""
        time.sleep(3)
        return os.getpid()


def memory_of_workers(pool: LocalWorkers, model: HookedDiffusionTransformer) -> int:
    """Load the model in all processes. Returns the bytes of their memory, in which shared pages count once."""
    with tqdm(disable=True) as bar:
        pids = {pid for _, pid in run_tasks([Load()] * pool.number, model, Workers(pool), bar)}
    assert len(pids) == pool.number, "a process was given two tasks"
    pages = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(1024 * int(kb) for text in pages for kb in re.findall(r"^Pss: +(\d+)", text, re.M))


def measure_workers(number: int, size: str, folder: str | None) -> None:
    """Load a model of a published size in some processes, and print one table."""
    print(f"{'file':30} {'weights':>15} {'growth':>15} {'ratio':>6}   of {number} workers, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        theirs = write_checkpoint(published_architecture(size, "mdm"), Path(scratch) / f"mdm-{size}.safetensors")
        load = HookedDiffusionTransformer.from_pretrained
        ours = load(theirs, device="cpu").save_pretrained(Path(scratch) / "ours")
        save_file({name: weight.clone() for name, weight in load_file(theirs).items()}, theirs)  # as it was published
        for path, dtype in ((ours, "float32"), (theirs, "float32"), (ours, "bfloat16")):
            with LocalWorkers(number) as pool:
                before = memory_of_workers(pool, load("tiny-mdm", device="cpu"))
                model = load(path, device="cpu", dtype=dtype)
                growth = memory_of_workers(pool, model) - before
            weights = sum(weight.nbytes for weight in model.parameters())
            label = f"{'ours' if path == ours else 'of SMDM'}, used in {dtype}"
            print(f"{label:30} {weights:15,} {growth:15,} {growth / weights:6.3f}")


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
    parser.add_argument("--workers", type=int)
    parser.add_argument("--measure", nargs=2, metavar=("PATH", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(memory_of_loading(Path(arguments.measure[0]), arguments.measure[1])))
    elif arguments.workers:
        measure_workers(arguments.workers, arguments.size, arguments.folder)
    else:
        main(arguments.size, arguments.suffix, arguments.folder, arguments.keep)
