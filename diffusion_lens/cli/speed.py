"""How fast a device computes at most: what --dry-run divides the work by.

A CPU is measured: one matrix product of the model's own width. Of a GPU the maker's number is taken, for dense matrices
and float32 accumulation; the machine that asks may not be the one that has it. Torch computes float32 in float32 unless
told otherwise, so no TensorFloat-32 here.
"""

import re
import time
from typing import Any, NamedTuple


class Peak(NamedTuple):
    """Operations a second of a device.

    Attributes:
        name: words of the name that the device gives itself.
        float32: in float32, without tensor cores.
        half: in bfloat16 or float16, with them.
    """

    name: str
    float32: float
    half: float


# NVIDIA's data sheets of each. The first is taken where nobody says which GPU is meant.
GPUS = (
    Peak("A100", 19.5e12, 312e12),
    Peak("H100", 67e12, 989e12),
    Peak("H200", 67e12, 989e12),
    Peak("V100", 15.7e12, 125e12),
    Peak("L4", 30.3e12, 121e12),
    Peak("T4", 8.1e12, 65e12),
    Peak("RTX 3090", 35.6e12, 71e12),
    Peak("RTX 4090", 82.6e12, 165e12),
)
# Apple names its GPUs by their cores: of the smallest, M1 with 8 cores, 2.6e12 (Apple's announcement of 2020).
APPLE = Peak("M1", 2.6e12, 2.6e12)


def operations_per_second(device: str | None, dtype: str, width: int, flops: float | None) -> tuple[float, str]:
    """The rate of a device, and in words which one and why.

    Args:
        device: as for `torch.device`; by default the best of this machine.
        width: of the matrices to measure a CPU by.
        flops: the rate, if it is known.

    Raises:
        ValueError: no such device, or a rate that is none.
    """
    if flops is not None:
        if not 0 < flops < float("inf"):
            raise ValueError(f"flops={flops}; it is a number of operations a second, such as 3e14")
        return flops, f"a device of {flops:.3g} operations a second, as --flops says"
    kind = kind_of_device(device)
    if kind == "cpu":
        return _measured(width), "this machine's CPU (work divided by the speed of one matrix product)"
    if kind not in ("cuda", "mps"):
        raise ValueError(f"nothing is known of how fast {device!r} is: say so with --flops, operations a second")
    peak, which = (APPLE, "an Apple M1") if kind == "mps" else _gpu(device)
    rate = peak.float32 if dtype == "float32" else peak.half
    return rate, f"{which} at its peak of {rate:.3g} operations a second in {dtype} (--flops names another)"


def kind_of_device(device: str | None) -> str:
    """Of a device by its name, "cuda", or of the one that is taken by default."""
    import torch

    from diffusion_lens.config import device_named

    if device is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    return device_named(device).type


def _gpu(device: str | None) -> tuple[Peak, str]:
    """The GPU that is here if its speed is known, otherwise the first of the table."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        for peak in GPUS:
            if re.search(rf"\b{peak.name}\b", name):
                return peak, f"this machine's {name}"
    return GPUS[0], f"an NVIDIA {GPUS[0].name}"


def _measured(width: int) -> float:
    """Speed of a matrix product of this width on the CPU, the best of three."""
    import torch

    left, right = torch.ones(512, width), torch.ones(width, 4 * width)
    left @ right
    best = min(_timed(left, right) for _ in range(3))
    return 2.0 * 512 * width * 4 * width / best


def _timed(left: Any, right: Any) -> float:
    begun = time.perf_counter()
    left @ right
    return time.perf_counter() - begun
