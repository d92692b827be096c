"""The device on which a job will run: one of the table, this machine's GPU, or its CPU, which is measured."""

import functools
import hashlib
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from diffusion_lens.analysis.batching import CPU_TENSOR_BYTES
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.trace import trace_query
from diffusion_lens.analysis.cells import ROWS_OF_A_PASS
from diffusion_lens.analysis.selection import Selection
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.cost.devices import APPLE, DEFAULT_GPU, DEVICES, REPORTED, Device, kind_of_device
from diffusion_lens.cost.grids import trace
from diffusion_lens.cost.loop import denoising
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.facts import Query
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.records import provenance
from weight_conversion import Architecture


def find_device(name: str | None, cfg: DiffusionConfig) -> Device:
    """The device of a name: one of `DEVICES`, or one that torch knows, such as "cpu" and "cuda".

    Args:
        name: Name of the device. `None` takes the best device of this machine.
        cfg: Config of the model, at whose sizes the CPU is measured.

    Raises:
        ValueError: The name is unknown.
    """
    if name is not None and name.lower() in DEVICES:
        return DEVICES[name.lower()]
    kind = kind_of_device(name)
    if kind == "cpu":
        return _this_cpu(cfg.architecture, cfg.dtype)
    if kind == "mps":
        return APPLE
    if kind != "cuda":
        raise ValueError(
            f"the speed of {name!r} is unknown: name one of {', '.join(DEVICES)}, or give it with --flops, in "
            "operations per second"
        )
    return _this_gpu(name)


@functools.lru_cache
def _this_cpu(architecture: Architecture, dtype: torch.dtype) -> Device:
    """The CPU of this machine, measured once for each network of a command."""
    return this_machine(DiffusionConfig.from_architecture(architecture, device="cpu", dtype=dtype), rounds=3)


def _this_gpu(name: str | None) -> Device:
    """The GPU of this machine if its rates are known, otherwise that of `DEFAULT_GPU`."""
    if torch.cuda.is_available():
        reported = torch.cuda.get_device_name(name)
        for pattern, key in REPORTED.items():
            if re.search(rf"\b{pattern}", reported):
                return replace(DEVICES[key], name=f"this machine's {reported}")
    return DEVICES[DEFAULT_GPU]


# Blocks are measured whose weights take at most this many bytes, more than a processor's caches hold. Wider ones than
# `_WIDEST` are made narrower.
_BYTES, _WIDEST = 2**26, 1024
# Numbers of positions at which the rate is measured, in rows of at most `_LENGTH`. From `_MANY` on weights are read
# seldom, so one block suffices.
_POSITIONS, _LENGTH, _MANY = (1, 4, 16, 64, 256), 16, 256
_LOGITS = 2**18


def this_machine(cfg: DiffusionConfig, rounds: int = 5, clock: Callable[[], float] = time.perf_counter) -> Device:
    """The CPU of this machine, measured on blocks of a model's shapes.

    Args:
        cfg: Config of the model. One wider than 1024 is measured at blocks of about that width.
        rounds: Number of measurements, whose median counts.
        clock: Clock in seconds; `time.process_time` leaves out what other processes take.
    """
    # 1. Two blocks with tiny matrices take the time that is not spent on numbers, and so does a pass with its head.
    tiny = _Measured.of(_narrow(cfg.architecture, 2, tiny=True), cfg.dtype, 8 * rounds, clock)
    one, two = (tiny.seconds(1, 1, n_blocks) for n_blocks in (1, 2))
    block = min(max(two - one, one / 2), one)  # a pass of one block begins in little time
    entry = one - block
    whole = max(tiny.of_pass() - 2 * block, 0.0)

    # 2. The blocks of the model give its rate at each number of positions.
    measured = _Measured.of(_narrow(cfg.architecture, cfg.n_layers), cfg.dtype, rounds, clock)
    most = CPU_TENSOR_BYTES // (cfg.dtype.itemsize * measured.width)
    rates = {}
    for n in sorted({*_POSITIONS, min(max(most // _LENGTH * _LENGTH, _MANY), 2048)}):
        n_blocks = measured.n_blocks if n < _MANY else 1
        seconds = measured.seconds(max(1, n // _LENGTH), min(n, _LENGTH), n_blocks) - entry - n_blocks * block
        rates[n] = 2 * measured.weights * n_blocks * n / max(seconds, 1e-9)

    # 3. Longer rows have more pairs of positions, and gradients take more time.
    short, long = (measured.seconds(_MANY // n, n, 1) for n in (_LENGTH, _MANY))
    pairs = 4 * measured.d_attention * _MANY * (_MANY - _LENGTH) / max(long - short, 1e-9)
    graded = measured.seconds(_MANY // _LENGTH, _LENGTH, 1, graded=True)

    # 4. What surrounds passes: on the tiny network, a trace, naming the network, and a step of the loop.
    record, n_bytes = tiny.record(), sum(weight.nbytes for weight in measured.model.parameters())
    comparing = n_bytes / max(measured.record() - record * measured.n_blocks / 2, 1e-9)
    best, dtype = max(rates.values()), str(cfg.dtype).removeprefix("torch.")
    product = max(measured.product(cfg.dtype), best)
    device = Device(
        "this machine's CPU",
        {"float64": measured.product(torch.float64), dtype: product},
        bandwidth=float("inf"),
        memory=None,
        efficiency={"float64": 1.0, dtype: best / product},
        block_seconds=block,
        pass_seconds=whole,
        patch_seconds=0.0,
        step_seconds=max(_of_the_loop(cfg, rounds, clock) - whole - block, 0.0),
        record_seconds=record / 2,
        hashing=_of_hashing(rounds, clock),
        comparing=comparing,
        source="measured on blocks of the model's shapes",
        by_positions=[(n, rate / best) for n, rate in rates.items()],
        pair_rate=min(pairs / best, 1.0),
        gradient=max((graded - entry - block) / max(short - entry - block, 1e-9), 1.0),
        gradient_fixed=max(tiny.seconds(1, 1, 2, graded=True) / two, 1.0),
        logit_seconds=_of_logits(cfg, rounds, clock),
    )
    return replace(device, patch_seconds=_of_patching(cfg, device, rounds, clock))


@dataclass(frozen=True, eq=False)
class _Measured:
    """Blocks whose speed is measured."""

    model: Any
    rounds: int
    clock: Callable[[], float]

    @classmethod
    def of(cls, architecture: Architecture, dtype: torch.dtype, rounds: int, clock: Callable[[], float]) -> "_Measured":
        cfg = DiffusionConfig.from_architecture(architecture, device="cpu", dtype=dtype)
        model = HookedDiffusionTransformer(cfg)
        for weight in model.parameters():
            weight.requires_grad_(False)
        return cls(model, rounds, clock)

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.model.blocks)

    @property
    def weights(self) -> int:
        """Weights of the matrices of a block."""
        return sum(weight.numel() for weight in self.model.blocks[0].parameters() if weight.dim() == 2)

    @property
    def width(self) -> int:
        """Units of the MLP."""
        return int(self.model.cfg.d_mlp)

    @property
    def d_attention(self) -> int:
        """Width of all heads."""
        return int(self.model.cfg.n_heads * self.model.cfg.d_head)

    def seconds(self, rows: int, positions: int, n_blocks: int, graded: bool = False) -> float:
        """Time of some blocks on a stream of these rows and positions, and of its gradient."""
        stream = torch.randn(rows, positions, self.model.cfg.d_model).to(self.model.cfg.dtype).requires_grad_(graded)

        def run() -> None:
            out = self.model(stream, start_at_layer=0, stop_at_layer=n_blocks)
            if graded:
                torch.autograd.grad(out.sum(), [stream])

        with torch.set_grad_enabled(graded):
            return _median(run, self.rounds, self.clock)

    @torch.no_grad()
    def of_pass(self) -> float:
        """Time of a pass from a token to its logits."""
        token = torch.zeros(1, 1, dtype=torch.long)
        return _median(lambda: self.model(token, logits_at=[-1]), self.rounds, self.clock)

    def record(self) -> float:
        """Time of naming the network in a result, after its weights have been hashed."""
        return _median(lambda: provenance(self.model, self.model.cfg), self.rounds, self.clock)

    @torch.no_grad()
    def product(self, dtype: torch.dtype) -> float:
        """Operations per second of a matrix product as wide as the MLP."""
        left, right = (torch.randn(n, _MANY, dtype=dtype) for n in (self.width, self.width))
        return 2 * left.numel() * len(right) / _median(lambda: left @ right.T, self.rounds, self.clock)


def _of_the_loop(cfg: DiffusionConfig, rounds: int, clock: Callable[[], float]) -> float:
    """Time of a step of the denoising loop on a network too small to take any."""
    n_steps = 8
    settings = DenoiseSettings(steps=n_steps)
    return _median(lambda: denoising(cfg, n_steps + 4, 4, settings), rounds, clock) / n_steps


def _of_logits(cfg: DiffusionConfig, rounds: int, clock: Callable[[], float]) -> float:
    """Time in which a logit becomes a probability, which is computed in float64."""
    logits = torch.randn(max(1, _LOGITS // cfg.d_vocab_out), cfg.d_vocab_out)
    return _median(lambda: logits.double().log_softmax(dim=-1), rounds, clock) / logits.numel()


def _of_patching(cfg: DiffusionConfig, device: Device, rounds: int, clock: Callable[[], float]) -> float:
    """Time of writing states into a pass: by how much a trace of several positions takes longer than that of one.

    The network is causal, so that each position has passes of its own.
    """
    tiny = _narrow(cfg.architecture, 2, tiny=True)
    tiny = replace(tiny, attention_dir="causal", readout="shifted", mask_token_id=None)
    model, n_positions = _Measured.of(tiny, cfg.dtype, rounds, clock).model, 8
    query = Query(torch.zeros(n_positions, dtype=torch.long), (0, 1), (n_positions,), (1,))
    settings, n_patched, seconds = (Restoration(), Corruption("gaussian", 0.1, samples=ROWS_OF_A_PASS)), [], []
    for positions in ([0], range(n_positions)):
        chosen = Selection(positions)
        cost = trace(model.cfg, query, *settings, chosen)
        taken = _median(functools.partial(trace_query, model, query, *settings, chosen), rounds, clock)
        seconds.append(taken - cost.seconds(device, hashed=True))
        n_patched.append(sum(times for each, times in cost.passes.items() if each.patched))
    return max(float(seconds[1] - seconds[0]) / (n_patched[1] - n_patched[0]), 0.0)


def _of_hashing(rounds: int, clock: Callable[[], float]) -> float:
    """Bytes per second of SHA-256."""
    data = bytes(2**22)
    return len(data) / _median(lambda: hashlib.sha256(data), rounds, clock)


def _median(work: Callable[[], Any], rounds: int, clock: Callable[[], float]) -> float:
    work()
    times = []
    for _ in range(rounds):
        started = clock()
        work()
        times.append(clock() - started)
    return max(statistics.median(times), 1e-9)


def _narrow(architecture: Architecture, n_blocks: int, tiny: bool = False) -> Architecture:
    """Dense blocks of these proportions, at most about 1024 wide, with a head of few tokens."""
    shrink = max(1, architecture.d_model // (4 if tiny else _WIDEST))
    key_value = max(1, architecture.n_key_value_heads // shrink)
    heads = max(1, architecture.n_heads // shrink)
    d_model, d_mlp = architecture.d_model // shrink, max(1, architecture.d_mlp // shrink)
    return replace(
        architecture,
        name="a few blocks",
        n_layers=min(n_blocks, max(1, _BYTES // (4 * d_model * (4 * d_model + 3 * d_mlp)))),
        d_model=d_model,
        n_heads=max(1, heads // key_value) * key_value,
        n_key_value_heads=key_value,
        d_mlp=d_mlp,
        d_vocab=8,
        d_vocab_out=8,
        n_ctx=_MANY,
        mask_token_id=None if architecture.mask_token_id is None else 7,
        experts=None,
        time=None,
        # Where its open block begins does not matter here.
        attention_dir="causal" if architecture.attention_dir == "causal" else "bidirectional",
        causal_block=None,
        block_context="blocks",
    )
