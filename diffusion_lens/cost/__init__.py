"""What a job costs before it is run: token-layers, operations, bytes, and the time on a device."""

from diffusion_lens.cost.devices import DEVICES, Device, kind_of_device, with_rate
from diffusion_lens.cost.grids import average_effect, patch_grid, temporal_effect, trace, trajectory_trace
from diffusion_lens.cost.loop import denoising
from diffusion_lens.cost.machine import find_device, this_machine
from diffusion_lens.cost.passes import Cost, Pass, total
from diffusion_lens.cost.searches import keys_and_values
from diffusion_lens.cost.vectors import forward, recall, second_moment, signatures, training, up_to_layer

__all__ = [
    "DEVICES",
    "Cost",
    "Device",
    "Pass",
    "average_effect",
    "denoising",
    "find_device",
    "forward",
    "keys_and_values",
    "kind_of_device",
    "patch_grid",
    "recall",
    "second_moment",
    "signatures",
    "temporal_effect",
    "this_machine",
    "total",
    "trace",
    "training",
    "trajectory_trace",
    "up_to_layer",
    "with_rate",
]
