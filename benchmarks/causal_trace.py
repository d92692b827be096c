"""Speed and memory of causal tracing, compared with a straightforward implementation that computes the same grid.

The straightforward implementation is ROME's `trace_with_patch` (Meng et al. 2022) on Hugging Face's Llama with the
same weights. For every cell it runs the whole network on samples + 1 rows, the first of them clean and the others with
noise. A forward hook copies each restored state from the first row. It computes the logits of the full vocabulary at
every position. For the masked diffusion model, every position attends to every position.

The benchmark then compares the operations in the matrix products of one trace, counted by `torch.utils.flop_counter`,
with the number that a trace needs (`Shape.needed_flops`), and their rate with that of one large product on this
machine. It measures how cost grows with layers, tokens and samples. Finally it measures the memory of a trace in
addition to the weights (on Linux: growth of VmHWM in a separate process), as a share of the budget.

    python benchmarks/causal_trace.py [--rounds 3] [--threads 2]
"""

import argparse
import contextlib
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from load_memory import peak_bytes
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer, Query
from diffusion_lens.analysis import CausalTrace, causal_trace
from weight_conversion import Architecture

SUBJECT, NOISE, SEED, WINDOW = (2, 5), 0.2, 1, 10
BARS = {"masked": 3.5, "causal": 6.0}
WIDE = {"n_layers": 12, "d_model": 768, "d_mlp": 3072, "n_heads": 12, "d_vocab": 32000, "n_pos": 52}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its query. The answer is read in the last row, in place or as the next token."""

    variant: str
    n_layers: int = 8
    d_model: int = 256
    d_mlp: int = 1024
    n_heads: int = 4
    d_vocab: int = 8000
    n_pos: int = 16
    samples: int = 10

    @property
    def masked(self) -> bool:
        """Whether the model is a masked diffusion model."""
        return self.variant == "masked"

    def build(self) -> HookedDiffusionTransformer:
        """A model with random weights, scaled so that its predictions are confident."""
        architecture = Architecture(
            family="lit_gpt",
            name="benchmark",
            n_layers=self.n_layers,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_key_value_heads=self.n_heads,
            d_head=self.d_model // self.n_heads,
            d_mlp=self.d_mlp,
            d_vocab=self.d_vocab,
            d_vocab_out=self.d_vocab,
            n_ctx=2048,
            attention_dir="bidirectional" if self.masked else "causal",
            readout="in_place" if self.masked else "shifted",
            mask_token_id=self.d_vocab - 1 if self.masked else None,
        )
        model = HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"))
        for weight in model.blocks.parameters():
            if weight.dim() == 2:
                weight *= 2
        model.unembed.weight *= 16
        return model

    def query(self, model: HookedDiffusionTransformer) -> Query:
        """A query of random tokens. The answer is the most likely token of the clean run."""
        tokens = torch.randint(self.d_vocab - 1, (self.n_pos,), generator=torch.Generator().manual_seed(0))
        if self.masked:
            tokens[-1] = self.d_vocab - 1
        answer = model(tokens[None], logits_at=[-1])[0, -1].argmax()
        return Query(tokens, SUBJECT, (self.n_pos - self.masked,), (int(answer),))

    def trace(self, model: HookedDiffusionTransformer, query: Query, **options: Any) -> CausalTrace:
        """The trace to measure."""
        return causal_trace(model, query, noise=NOISE, samples=self.samples, seed=SEED, window=WINDOW, **options)

    def needed_flops(self) -> int:
        """Operations of the matrix products that a trace of kind "resid" needs if one position is read.

        A cell at layer l runs the blocks above it at all positions, on the causal model from its own position on. The
        last block needs the keys and values of all these positions and one row of everything else. The fused attention
        kernel is not counted, because `torch.utils.flop_counter` does not count it on the CPU (here 1 % of a block).
        """
        n, d = self.n_pos, self.d_model
        row, head = 4 * d**2 + 6 * d * self.d_mlp, 2 * d * self.d_vocab  # Queries, output and MLP; logits.

        def run(blocks: int, positions: int) -> int:
            return (blocks - 1) * positions * (row + 4 * d**2) + positions * 4 * d**2 + row + head

        runs = [n] * n if self.masked else range(n - SUBJECT[0], 0, -1)
        cells = sum(run(blocks, positions) for positions in runs for blocks in range(1, self.n_layers))
        return (1 + self.samples) * run(self.n_layers, n) + self.samples * (cells + head)


class Plain:
    """The straightforward implementation on Llama with the weights of a model."""

    def __init__(self, model: HookedDiffusionTransformer, shape: Shape) -> None:
        from hf_reference import everything_visible, hugging_face_llama  # Slow to import, and `measure` needs neither.

        self.llama = hugging_face_llama(model)
        self.visible = everything_visible if shape.masked else None
        self.shape = shape
        noise = np.random.RandomState(SEED).randn(shape.samples, SUBJECT[1] - SUBJECT[0], shape.d_model)
        self.noise = torch.from_numpy(NOISE * noise).float()

    def trace(self, query: Query, kind: str) -> Tensor:
        """The grid Float[pos layer] of p(answer)."""
        positions, layers = range(self.shape.n_pos), range(self.shape.n_layers)
        return torch.tensor([[self.cell(query, pos, kind, layer) for layer in layers] for pos in positions])

    def cell(self, query: Query, position: int, kind: str, layer: int) -> float:
        """p(answer) with one state restored, averaged over the noise samples."""

        def add_noise(module: Any, args: Any, out: Tensor) -> None:
            out[1:, slice(*SUBJECT)] += self.noise

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
        return float(logits[1:, -1].softmax(dim=-1).mean(dim=0)[query.answer_tokens[0]])


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
        f"{shape.variant:7} {counted / 1e9:6.1f} GFLOP counted, {counted / shape.needed_flops():.3f} of those needed; "
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
            work = shape.needed_flops()
            line += f"  {value}: {seconds:.2f} s {work / 1e9:.1f} GFLOP"
            if before is not None:
                line += f" (x{seconds / before[0]:.1f}, x{work / before[1]:.1f})"
            before = seconds, work
        print(line)


@torch.no_grad()
def measure(shape: Shape, max_bytes: int, options: dict[str, Any]) -> dict[str, int]:
    """Trace in this process. Returns the bytes of the weights and the growth of the peak memory during the trace."""
    small = replace(shape, n_layers=2, d_model=64, d_mlp=128, n_heads=2, d_vocab=100)
    warm = small.build()
    small.trace(warm, small.query(warm))
    model = shape.build()
    query = shape.query(model)
    with contextlib.suppress(AttributeError, OSError):  # If unsupported, the peak includes building the model.
        ctypes.CDLL(None).malloc_trim(0)  # Free memory that is still resident would hide growth.
        Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    shape.trace(model, query, max_bytes=max_bytes, **options)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"weights": weights, "growth": peak_bytes() - before}


def measure_apart(shape: Shape, max_bytes: int, **options: Any) -> dict[str, int]:
    """`measure` in a new process, so that no measurement includes the memory of another."""
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
        print(json.dumps(measure(Shape(**fields), limit, settings)))
    else:
        main(arguments.rounds, arguments.threads)
