"""Speed of the forward pass without hooks, compared with Hugging Face's Llama with the same weights.

The benchmark measures both alternately in one process, on three shapes. In the wide shape, matrix products dominate. In
the narrow, deep shapes, the fixed cost of a layer dominates, which a denoising loop pays hundreds of times. It prints
medians and the median of the paired ratios; a ratio below 1 is faster than Llama. It also counts the
Python functions that a pass calls, which no other process on the machine changes.

    python benchmarks/forward.py [--rounds 40] [--threads 2]
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

# tests/oracles holds what tests and benchmarks share.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from oracles.hugging_face import hugging_face_llama
from oracles.traced_shapes import Shape
from table.operations import alternately

SHAPES = {
    "8 layers, d=512, vocab 32000, 4x52": (8, 512, 8, 2048, 32000, 4, 52),
    "16 layers, d=32, vocab 512, 4x52": (16, 32, 2, 64, 512, 4, 52),
    "16 layers, d=32, vocab 512, 1x4": (16, 32, 2, 64, 512, 1, 4),
}


def n_calls(job: Callable[[], object]) -> int:
    """Number of Python functions that a job calls."""
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    try:
        job()
    finally:
        sys.setprofile(None)
    return len(calls)


@torch.no_grad()
def main(rounds: int = 40, threads: int | None = None) -> dict[str, float]:
    """Run all measurements. Returns the ratio of each shape."""
    if threads:
        torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {rounds} alternating rounds")
    ratios = {}
    for name, (n_layers, d_model, n_heads, d_mlp, d_vocab, batch, pos) in SHAPES.items():
        model = Shape("causal", n_layers, d_model, d_mlp, n_heads, d_vocab).build()
        llama = hugging_face_llama(model)
        tokens = torch.randint(d_vocab, (batch, pos), generator=torch.Generator().manual_seed(0))
        error = (model(tokens) - llama(tokens).logits).abs().max().item()
        theirs, ours, ratios[name] = alternately(partial(llama, tokens), partial(model, tokens), rounds)
        print(
            f"{name:38} ours {1e3 * ours:7.2f} ms   Llama {1e3 * theirs:7.2f} ms   ratio {ratios[name]:.3f}   "
            f"calls {n_calls(partial(model, tokens))} and {n_calls(partial(llama, tokens))}   "
            f"max logit difference {error:.1e}"
        )
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.threads)
