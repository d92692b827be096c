"""The device on which a job will run: one of the table, this machine's GPU, or its CPU, which is measured."""

import hashlib
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.cost.devices import APPLE, DEFAULT_GPU, DEVICES, REPORTED, Device, kind_of_device
from diffusion_lens.cost.loop import denoising
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
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
        return this_machine(cfg)
    if kind == "mps":
        return APPLE
    if kind != "cuda":
        raise ValueError(
            f"the speed of {name!r} is unknown: name one of {', '.join(DEVICES)}, or give it with --flops, in "
            "operations per second"
        )
    return _this_gpu(name)


def _this_gpu(name: str | None) -> Device:
    """The GPU of this machine if its rates are known, otherwise that of `DEFAULT_GPU`."""
    if torch.cuda.is_available():
        reported = torch.cuda.get_device_name(name)
        for pattern, key in REPORTED.items():
            if re.search(rf"\b{pattern}", reported):
                return replace(DEVICES[key], name=f"this machine's {reported}")
    return DEVICES[DEFAULT_GPU]


# Number of positions at which the rate is measured, and the width to which wider blocks are made narrower.
_MANY, _WIDEST = 256, 1024


def this_machine(cfg: DiffusionConfig, rounds: int = 5, clock: Callable[[], float] = time.perf_counter) -> Device:
    """The CPU of this machine, measured in a fraction of a second on a matrix product and a block of a model's shapes.

    Args:
        cfg: Config of the model. Wider ones than 1024 are measured at a block of about that width.
        rounds: Number of measurements, whose median counts.
        clock: Clock in seconds; `time.process_time` leaves out what other processes take.
    """
    # A block with tiny matrices takes the time that is not spent on numbers.
    tiny = _Measured.of(_one_block(cfg.architecture, tiny=True), cfg.dtype, clock)
    overhead, whole = tiny.seconds(1, 1, rounds), tiny.of_pass(rounds)
    measured = _Measured.of(_one_block(cfg.architecture), cfg.dtype, clock)
    # A single position gives the time in which the weights are read, and many more give the rate that is reached.
    single = max(measured.seconds(1, 1, rounds) - overhead, 1e-9)
    many = max(measured.seconds(_MANY // 16, 16, rounds) - overhead - single, 1e-9)
    dtype = str(cfg.dtype).removeprefix("torch.")
    reached, product = 2 * measured.weights * _MANY / many, measured.product(rounds)
    return Device(
        "this machine's CPU",
        {"float64": product / 2, dtype: max(product, reached)},
        bandwidth=measured.weights * cfg.dtype.itemsize / single,
        memory=None,
        efficiency={"float64": 1.0, dtype: min(1.0, reached / product)},
        block_seconds=overhead,
        pass_seconds=max(whole - overhead, 0.0),
        step_seconds=max(_of_the_loop(cfg, rounds, clock) - whole, 0.0),
        hashing=_of_hashing(rounds, clock),
        source="measured on one matrix product and one block",
    )


@dataclass(frozen=True, eq=False)
class _Measured:
    """One block whose speed is measured."""

    model: Any
    clock: Callable[[], float]

    @classmethod
    def of(cls, architecture: Architecture, dtype: torch.dtype, clock: Callable[[], float]) -> "_Measured":
        cfg = DiffusionConfig.from_architecture(architecture, device="cpu", dtype=dtype)
        return cls(HookedDiffusionTransformer(cfg), clock)

    @property
    def weights(self) -> int:
        """Weights of the matrices of the block."""
        return sum(weight.numel() for weight in self.model.blocks.parameters() if weight.dim() == 2)

    @torch.no_grad()
    def seconds(self, rows: int, positions: int, rounds: int) -> float:
        """Time of the block on a stream of these rows and positions."""
        stream = torch.randn(rows, positions, self.model.cfg.d_model).to(self.model.cfg.dtype)
        return _median(lambda: self.model(stream, start_at_layer=0, stop_at_layer=1), rounds, self.clock)

    @torch.no_grad()
    def of_pass(self, rounds: int) -> float:
        """Time of a pass from a token to its logits."""
        token = torch.zeros(1, 1, dtype=torch.long)
        return _median(lambda: self.model(token, logits_at=[-1]), rounds, self.clock)

    @torch.no_grad()
    def product(self, rounds: int) -> float:
        """Operations per second of a matrix product as wide as the MLP."""
        cfg = self.model.cfg
        left, right = (torch.randn(n, cfg.d_model).to(cfg.dtype) for n in (_MANY, cfg.d_mlp))
        return 2 * left.numel() * len(right) / _median(lambda: left @ right.T, rounds, self.clock)


def _of_the_loop(cfg: DiffusionConfig, rounds: int, clock: Callable[[], float]) -> float:
    """Time of a step of the denoising loop on a network too small to take any."""
    n_steps = 8
    settings = DenoiseSettings(steps=n_steps)
    return _median(lambda: denoising(cfg, n_steps + 4, 4, settings), rounds, clock) / n_steps


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


def _one_block(architecture: Architecture, tiny: bool = False) -> Architecture:
    """One dense block of these proportions, at most about 1024 wide, with a head of few tokens."""
    shrink = max(1, architecture.d_model // (4 if tiny else _WIDEST))
    key_value = max(1, architecture.n_key_value_heads // shrink)
    heads = max(1, architecture.n_heads // shrink)
    return replace(
        architecture,
        name="one block",
        n_layers=1,
        d_model=architecture.d_model // shrink,
        n_heads=max(1, heads // key_value) * key_value,
        n_key_value_heads=key_value,
        d_mlp=max(1, architecture.d_mlp // shrink),
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
