"""Speed and memory of causal tracing, compared with a straightforward implementation that computes the same grid.

The straightforward implementation is ROME's `trace_with_patch` (Meng et al. 2022) on Hugging Face's Llama with the
same weights. For every cell it runs the whole network on samples + 1 rows, the first of them clean and the others with
noise. A forward hook copies each restored state from the first row. It computes the logits of the full vocabulary at
every position. For the masked diffusion model, every position attends to every position.

The benchmark then compares the operations in the matrix products of one trace, counted by `torch.utils.flop_counter`,
with the number that a trace needs (`needed_flops`), and their rate with that of one large product on this
machine. It measures how cost grows with layers, tokens and samples. Finally it measures the memory of a trace in
addition to the weights (on Linux: growth of VmHWM in a separate process), as a share of the budget.

    python benchmarks/causal_trace.py [--rounds 3] [--threads 2]
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from diffusion_lens import HookedDiffusionTransformer, Query

# tests/oracles holds what tests and benchmarks share.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from oracles.hugging_face import everything_visible, hugging_face_llama
from oracles.memory import memory_of_tracing
from oracles.traced_shapes import NOISE, SEED, SUBJECT, WINDOW, Shape

BARS = {"masked": 3.5, "causal": 6.0}
WIDE = {"n_layers": 12, "d_model": 768, "d_mlp": 3072, "n_heads": 12, "d_vocab": 32000, "n_pos": 52}


def needed_flops(shape: Shape) -> int:
    """Operations of the matrix products that a trace of kind "resid" needs if one position is read.

    A cell at layer l runs the blocks above it at all positions, on the causal model from its own position on. The
    last block needs the keys and values of all these positions and one row of everything else. The fused attention
    kernel is not counted, because `torch.utils.flop_counter` does not count it on the CPU (here 1 % of a block).
    """
    n, d = shape.n_pos, shape.d_model
    row, head = 4 * d**2 + 6 * d * shape.d_mlp, 2 * d * shape.d_vocab  # Queries, output and MLP; logits.

    def run(blocks: int, positions: int) -> int:
        return (blocks - 1) * positions * (row + 4 * d**2) + positions * 4 * d**2 + row + head

    runs = [n] * n if shape.masked else range(n - SUBJECT[0], 0, -1)
    cells = sum(run(blocks, positions) for positions in runs for blocks in range(1, shape.n_layers))
    return (1 + shape.samples) * run(shape.n_layers, n) + shape.samples * (cells + head)


class Plain:
    """The straightforward implementation on Llama with the weights of a model."""

    def __init__(self, model: HookedDiffusionTransformer, shape: Shape) -> None:
        self.llama = hugging_face_llama(model)
        self.visible = everything_visible if shape.masked else None
        self.shape = shape
        self.shift = int(model.cfg.readout == "shifted")

    def trace(self, query: Query, kind: str) -> Tensor:
        """The grid Float[pos layer] of p(answer)."""
        positions, layers = range(self.shape.n_pos), range(self.shape.n_layers)
        return torch.tensor([[self.cell(query, pos, kind, layer) for layer in layers] for pos in positions])

    def cell(self, query: Query, position: int, kind: str, layer: int) -> float:
        """p(answer) with one state restored, averaged over the noise samples."""

        start, stop = query.subject
        drawn = np.random.RandomState(SEED).randn(self.shape.samples, stop - start, self.shape.d_model)
        noise = torch.from_numpy(NOISE * drawn).float()

        def add_noise(module: Any, args: Any, out: Tensor) -> None:
            out[1:, start:stop] += noise

        def restore(module: Any, args: Any, out: Any) -> None:
            state = out[0] if isinstance(out, tuple) else out
            state[1:, position] = state[0, position]

        blocks = self.llama.model.layers
        around = blocks[max(0, layer - WINDOW // 2) : layer + WINDOW // 2]
        restored = {"resid": [blocks[layer]], "mlp": [b.mlp for b in around], "attn": [b.self_attn for b in around]}
        tokens = query.tokens.repeat(self.shape.samples + 1, 1)
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(self.llama.model.embed_tokens.register_forward_hook(add_noise))
            for module in restored[kind]:
                hooks.enter_context(module.register_forward_hook(restore))
            logits = self.llama(tokens, attention_mask=self.visible and self.visible(tokens)).logits
        return float(
            logits[1:, query.answer_positions[0] - self.shift].softmax(dim=-1).mean(dim=0)[query.answer_tokens[0]]
        )


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Duration of a call in seconds, and its result."""
    started = time.perf_counter()
    out = run()
    return time.perf_counter() - started, out


def matmul_rate(size: int = 2048) -> float:
    """Operations per second of one large matrix product."""
    a, b = torch.randn(2, size, size).unbind()
    return 2 * size**3 / timed(lambda: a @ b)[0]


def compare(shape: Shape, kind: str, rounds: int) -> float:
    """Print one line. Returns the median of the paired ratios theirs/ours."""
    model = shape.build()
    query, plain = shape.query(model), Plain(model, shape)
    ours = shape.trace(model, query, kind=kind)
    plain.cell(query, 0, kind, 0)
    pairs, difference = [], 0.0
    for _ in range(rounds):
        own, trace = timed(lambda: shape.trace(model, query, kind=kind))
        other, grid = timed(lambda: plain.trace(query, kind))
        pairs.append((own, other))
        difference = max(difference, float((trace.scores - grid).abs().max()))
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(other / own for own, other in pairs)
    bar = f" (bar {BARS[shape.variant]})" if kind == "resid" else ""
    effect = float(ours.indirect_effect.abs().max())
    print(
        f"{shape.variant:7} {kind:6} ours {mine:6.2f} s   plain {theirs:6.2f} s   ratio {ratio:5.2f}{bar:11} "
        f"clean {ours.clean:.2f} corrupted {ours.corrupted:.2f} largest effect {effect:.2f} difference {difference:.0e}"
    )
    if difference > 1e-4:
        raise SystemExit(f"the grids differ by {difference:.1e}, more than 1e-4")
    return ratio


def efficiency(shape: Shape) -> None:
    """Print the rate of a trace next to that of one large product, measured alternately."""
    model = shape.build()
    query = shape.query(model)
    with FlopCounterMode(display=False) as counter:
        shape.trace(model, query)
    counted = counter.get_total_flops()
    rates = [(counted / timed(lambda: shape.trace(model, query))[0], matmul_rate()) for _ in range(5)]
    useful, peak = (statistics.median(column) for column in zip(*rates, strict=True))
    share = statistics.median(own / whole for own, whole in rates)
    print(
        f"{shape.variant:7} {counted / 1e9:6.1f} GFLOP counted, {counted / needed_flops(shape):.3f} of those needed; "
        f"{useful / 1e9:5.1f} GFLOP/s of {peak / 1e9:5.1f} in one large product: {share:.0%}"
    )


def growth(base: Shape) -> None:
    """Print seconds (the better of two) and operations as one size doubles, with their growth factors."""
    for field, values in (("n_layers", (4, 8, 16)), ("n_pos", (8, 16, 32)), ("samples", (4, 8, 16))):
        line, before = f"{base.variant:7} {field:8}", None
        for value in values:
            shape = replace(base, **{field: value})
            model = shape.build()
            query = shape.query(model)
            shape.trace(model, query, positions=[-1])  # The first trace of a model also hashes its weights.
            seconds = min(timed(partial(shape.trace, model, query))[0] for _ in range(2))
            work = needed_flops(shape)
            line += f"  {value}: {seconds:.2f} s {work / 1e9:.1f} GFLOP"
            if before is not None:
                line += f" (x{seconds / before[0]:.1f}, x{work / before[1]:.1f})"
            before = seconds, work
        print(line)


def measure_apart(shape: Shape, max_bytes: int, **options: Any) -> dict[str, int]:
    """`memory_of_tracing` in a new process, so that no measurement includes the memory of another."""
    command = [sys.executable, __file__, "--measure", json.dumps([vars(shape), max_bytes, options])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


def memory(shape: Shape) -> None:
    """Print the growth of the peak memory as a share of two budgets."""
    for budget in (192, 512):
        positions, layer = list(range(0, shape.n_pos, 4)), shape.n_layers - 3
        measured = measure_apart(shape, budget * 2**20, positions=positions, layers=[layer])
        weights, growth = (measured[name] / 2**20 for name in ("weights", "growth"))
        print(
            f"{shape.variant:7} {weights:4.0f} MiB of weights, budget {budget:4} MiB: peak growth {growth:4.0f} MiB, "
            f"{growth / budget:.0%} of the budget"
        )


@torch.no_grad()
def main(rounds: int = 3, threads: int | None = None) -> dict[str, float]:
    """Run all measurements. Returns the ratio for each variant and kind."""
    if threads:
        torch.set_num_threads(threads)
    shapes = [Shape(variant) for variant in BARS]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {rounds} alternating rounds")
    print(f"{shapes[0]}, window {WINDOW}\n")
    ratios = {
        f"{shape.variant} {kind}": compare(shape, kind, rounds if kind == "resid" else 1)
        for shape in shapes
        for kind in ("resid", "mlp", "attn")
    }
    print("\nefficiency of a trace of kind resid")
    for shape in shapes:
        efficiency(shape)
    print("\ngrowth of kind resid; work: on the masked model about layers² tokens² samples / 2 blocks")
    for shape in shapes:
        growth(replace(shape, samples=4))
    print(f"\nmemory: {WIDE}")
    for shape in shapes if sys.platform == "linux" else []:  # Only Linux reports the peak resident memory in /proc.
        memory(replace(shape, **WIDE))
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--measure", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        fields, limit, settings = json.loads(arguments.measure)
        print(json.dumps(memory_of_tracing(Shape(**fields), limit, settings)))
    else:
        main(arguments.rounds, arguments.threads)
