"""Devices that a job may run on: their peak rates by the vendors' data sheets, and the share of them that is reached.

The rates of GPUs are those of dense matrices with float32 accumulation. Torch does not use TensorFloat-32 unless it is
told to, so the float32 rates exclude it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from diffusion_lens.config import device_named

Number = int | float  # Type checks in tests would refuse the integer 67 for a float.


@dataclass(frozen=True)
class Device:
    """A device, or any with these numbers.

    Attributes:
        name: Name of the device.
        peaks: Peak rate in operations per second, by dtype.
        bandwidth: Bytes per second between memory and processor.
        memory: Bytes of memory; `None` if unknown.
        efficiency: Share of the peak that the blocks of a network reach with many positions, by dtype.
        by_positions: Pairs of a number of positions in a pass, counted over its rows, and the share of that rate which
            is reached then, in increasing order; between them it is interpolated on logarithmic scales.
        pair_rate: Rate of attention over pairs of positions, relative to that of the blocks.
        gradient: Time of a pass with the gradients of its states, relative to the pass.
        gradient_fixed: The same of the time in addition to its numbers.
        logit_seconds: Time in which a logit becomes a probability.
        block_seconds: Time of a block in addition to its numbers: that of Python and of starting kernels.
        pass_seconds: The same of a pass, of its embedding and its head.
        patch_seconds: The same of writing states into a pass.
        step_seconds: The same of a step of the denoising loop, or of a search, around the pass.
        record_seconds: The same of naming the network in a result, for each of its blocks.
        hashing: Bytes of weights per second that are hashed, once in a process.
        comparing: Bytes of weights per second in which changes are looked for, by each result that names its network.
        source: Where the numbers come from.
    """

    name: str
    peaks: Mapping[str, Number]
    bandwidth: Number
    memory: int | None
    efficiency: Mapping[str, Number]
    block_seconds: Number
    pass_seconds: Number
    patch_seconds: Number
    step_seconds: Number
    record_seconds: Number
    hashing: Number
    comparing: Number
    source: str
    by_positions: Sequence[tuple[int, Number]] = ((1, 1.0),)
    pair_rate: Number = 1.0
    gradient: Number = 2.0
    gradient_fixed: Number = 2.0
    logit_seconds: Number = 0.0

    def peak(self, dtype: torch.dtype) -> Number:
        """Operations per second of a large matrix product.

        Raises:
            ValueError: The device has no known rate in this dtype.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.peaks:
            raise ValueError(
                f"the rate of {self.name} in {name} is unknown; those in {', '.join(self.peaks)} are known. --flops "
                "gives another one"
            )
        return self.peaks[name]

    def rate(self, dtype: torch.dtype, positions: Number) -> Number:
        """Operations per second that a network reaches with so many positions; the errors are those of `peak`."""
        counts, shares = zip(*self.by_positions, strict=True)
        share = math.exp(np.interp(math.log(positions), np.log(counts), np.log(shares)))
        return share * self.efficiency[str(dtype).removeprefix("torch.")] * self.peak(dtype)

    def pairs(self, dtype: torch.dtype) -> Number:
        """Operations per second that attention reaches over pairs of positions; the errors are those of `peak`."""
        return self.pair_rate * self.efficiency[str(dtype).removeprefix("torch.")] * self.peak(dtype)


# Measured on an H100 in forward passes of LLaDA-8B, 16 rows of 64 positions: 217e12 operations per second in bfloat16
# and 28e12 in float32. Other GPUs are taken to reach the same shares of their peaks.
_EFFICIENCY = {"float64": 0.42, "float32": 0.42, "bfloat16": 0.22, "float16": 0.22}
# Seconds that Python and torch's dispatcher take for a block, a pass, writing states into it, a step of the loop, and
# the record of a block, measured on a CPU with tiny matrices. On a GPU they take no less: torch starts some 30 kernels
# for a block, each in about 5e-6 seconds, from the same thread.
_FIXED = (2e-4, 2e-4, 1e-3, 1e-3, 3e-4)
# The first job copies the weights from a GPU and hashes them on the cores of its machine; later ones read them there
# (`weights_digest.fingerprint`), in several passes over the memory.
_HASHING, _READINGS = 4e9, 8
_SHEET = "NVIDIA's data sheet, and the share of the peak that an H100 was measured to reach"


def _gpu(
    name: str, double: Number, single: Number, half: Number, gigabytes_per_second: Number, gigabytes: int
) -> Device:
    """A GPU, whose rates are given in 1e12 operations per second."""
    rates = {"float64": double, "float32": single, "bfloat16": half, "float16": half}
    peaks = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    bandwidth = gigabytes_per_second * 1e9
    hashing = _HASHING, bandwidth / _READINGS
    return Device(name, peaks, bandwidth, gigabytes * 10**9, _EFFICIENCY, *_FIXED, *hashing, _SHEET)


# Peak rates and bandwidths are those of NVIDIA's documents, without sparsity, which doubles the rates of tensor cores
# that its later data sheets print first:
#   A100      "NVIDIA A100 Tensor Core GPU" (data sheet, 2021), SXM modules
#   H100      "NVIDIA H100 Tensor Core GPU" (data sheet, 2023), SXM module; sparse 1,979 in bfloat16
#   H200      "NVIDIA H200 Tensor Core GPU" (data sheet, 2024), SXM module; sparse 1,979
#   L40S, L4  "NVIDIA L40S", "NVIDIA L4" (data sheets, 2023); sparse 733 and 242
#   T4        "NVIDIA T4 Tensor Core GPU" (product brief, 2019), whose data sheet rounds the bandwidth to 300
#   V100      "NVIDIA V100 Tensor Core GPU" (data sheet, 2020), SXM2 module of 32 GB
#   RTX 3090  "NVIDIA Ampere GA102 GPU Architecture" (2021), tensor cores with float32 accumulation
#   RTX 4090  "NVIDIA Ada GPU Architecture" (2022), likewise; sparse 330
# Where a sheet omits float64, its rate is the architecture's share of that of float32: 1/64, on the T4 1/32.
DEVICES = {
    "a100-40": _gpu("NVIDIA A100 (40 GB)", 9.7, 19.5, 312, 1555, 40),
    "a100-80": _gpu("NVIDIA A100 (80 GB)", 9.7, 19.5, 312, 2039, 80),
    "h100": _gpu("NVIDIA H100 (SXM)", 34, 67, 989, 3350, 80),
    "h200": _gpu("NVIDIA H200", 34, 67, 989, 4800, 141),
    "l40s": _gpu("NVIDIA L40S", 1.4, 91.6, 362, 864, 48),
    "l4": _gpu("NVIDIA L4", 0.47, 30.3, 121, 300, 24),
    "t4": _gpu("NVIDIA T4", 0.25, 8.1, 65, 320, 16),
    "v100": _gpu("NVIDIA V100", 7.8, 15.7, 125, 900, 32),
    "rtx3090": _gpu("NVIDIA RTX 3090", 0.56, 35.6, 71, 936, 24),
    "rtx4090": _gpu("NVIDIA RTX 4090", 1.3, 82.6, 165, 1008, 24),
}
# A V100 and a T4 multiply matrices of bfloat16 without tensor cores, no faster than float32.
for _name in ("v100", "t4"):
    _peaks = DEVICES[_name].peaks
    DEVICES[_name] = replace(DEVICES[_name], peaks={**_peaks, "bfloat16": _peaks["float32"]})
# The part of the name that torch reports. Where a name fits several, the first is taken.
REPORTED = {
    r"A100.*80": "a100-80",
    "A100": "a100-40",
    "H100": "h100",
    "H200": "h200",
    "L40S": "l40s",
    r"L4\b": "l4",
    "T4": "t4",
    "V100": "v100",
    "RTX 3090": "rtx3090",
    "RTX 4090": "rtx4090",
}
DEFAULT_GPU = "a100-80"
# Torch does not report which Apple GPU it uses, so this is the smallest, the M1 with 8 cores (Apple, 2020).
APPLE = Device(
    "an Apple M1",
    {"float32": 2.6e12, "float16": 2.6e12, "bfloat16": 2.6e12},
    68e9,
    None,
    _EFFICIENCY,
    *_FIXED,
    _HASHING,
    68e9 / _READINGS,
    "Apple's data for the peaks; the share of them that is reached has not been measured",
)


def with_rate(flops: Number) -> Device:
    """A device of this many operations per second in every dtype, of which nothing else is known.

    Raises:
        ValueError: It is not a positive number.
    """
    if not 0 < flops < float("inf"):
        raise ValueError(f"flops={flops}; it must be a number of operations per second, such as 3e14")
    name, infinite = f"a device of {flops:.3g} operations per second", float("inf")
    peaks = dict.fromkeys(_EFFICIENCY, float(flops))
    no_time = (0.0, 0.0, 0.0, 0.0, 0.0)
    return Device(name, peaks, infinite, None, dict.fromkeys(peaks, 1.0), *no_time, infinite, infinite, "--flops")


def kind_of_device(name: str | None) -> str:
    """Kind of a device by torch's names, such as "cuda", for a device by name or for the default device.

    Raises:
        ValueError: The name is unknown.
    """
    if name is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    return "cuda" if name.lower() in DEVICES else device_named(name).type
