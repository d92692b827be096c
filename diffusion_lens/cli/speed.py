"""Peak speed of a device, by which --dry-run divides the work.

The speed of a CPU is measured with one matrix product of the model's width. The speed of a GPU comes from the data
sheet, for dense matrices and float32 accumulation, because the dry run may take place on another machine. Torch does
not use TensorFloat-32 by default, so the float32 rates exclude it.
"""

import re
import time
from typing import Any, NamedTuple


class Peak(NamedTuple):
    """Operations per second of a device.

    Attributes:
        name: Part of the name that the device reports.
        float32: Rate in float32 without tensor cores.
        half: Rate in bfloat16 or float16 with tensor cores.
    """

    name: str
    float32: float
    half: float


# From NVIDIA's data sheets. The first entry is the default GPU.
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
# Torch does not report which Apple GPU it uses, so this is the smallest, the M1 with 8 cores (Apple, 2020).
APPLE = Peak("M1", 2.6e12, 2.6e12)


def operations_per_second(device: str | None, dtype: str, width: int, flops: float | None) -> tuple[float, str]:
    """The peak rate of a device, and a description of the device.

    Args:
        device: Name of the device, as in `torch.device`. Default: the best device of this machine.
        dtype: Dtype of the weights.
        width: Width of the matrices that measure a CPU.
        flops: Operations per second, if known.

    Raises:
        ValueError: The device is unknown, or `flops` is not a positive number.
    """
    if flops is not None:
        if not 0 < flops < float("inf"):
            raise ValueError(f"flops={flops}; it must be a number of operations per second, such as 3e14")
        return flops, f"a device of {flops:.3g} operations per second (--flops)"
    kind = kind_of_device(device)
    if kind == "cpu":
        return _measured(width), "this machine's CPU (work divided by the speed of one matrix product)"
    if kind not in ("cuda", "mps"):
        raise ValueError(f"the speed of {device!r} is unknown; give it with --flops, in operations per second")
    peak, name = (APPLE, "an Apple M1") if kind == "mps" else _gpu(device)
    rate = peak.float32 if dtype == "float32" else peak.half
    return rate, f"{name} at its peak of {rate:.3g} operations per second in {dtype} (--flops sets another rate)"


def kind_of_device(device: str | None) -> str:
    """Kind of a device, such as "cuda", for a device by name or for the default device."""
    import torch

    from diffusion_lens.config import device_named

    if device is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    return device_named(device).type


def _gpu(device: str | None) -> tuple[Peak, str]:
    """The GPU of this machine if its speed is known, otherwise the first of `GPUS`."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        for peak in GPUS:
            if re.search(rf"\b{peak.name}\b", name):
                return peak, f"this machine's {name}"
    return GPUS[0], f"an NVIDIA {GPUS[0].name}"


def _measured(width: int) -> float:
    """Operations per second of a matrix product of this width on the CPU, the best of three."""
    import torch

    left, right = torch.ones(512, width), torch.ones(width, 4 * width)
    left @ right
    best = min(_timed(left, right) for _ in range(3))
    return 2.0 * 512 * width * 4 * width / best


def _timed(left: Any, right: Any) -> float:
    started = time.perf_counter()
    left @ right
    return time.perf_counter() - started
