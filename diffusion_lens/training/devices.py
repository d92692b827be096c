"""Training on one or several devices with Hugging Face accelerate.

`accelerate launch script.py` starts the same script in several processes. Each process holds the whole model and works
on its rows of a batch; gradients are averaged (data parallelism). On CPUs use `torchrun --nproc-per-node 2 script.py`,
because `accelerate launch --cpu` starts only one process unless MPI is installed. Without a launcher there is one
process, and the model stays on its device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diffusion_lens.model.transformer import DiffusionTransformer

Accelerator = Any  # `accelerate.Accelerator`. The library is imported when training starts.


def require_gpu(mixed_precision: str, on_cpu: bool) -> None:
    """Raise a `ValueError` for a precision that a CPU does not support."""
    if mixed_precision == "fp16" and on_cpu:
        raise ValueError("mixed_precision='fp16' needs a GPU; on a CPU use 'no' or 'bf16'")


@contextmanager
def accelerated(model: DiffusionTransformer, mixed_precision: str = "no") -> Iterator[Accelerator]:
    """An `accelerate.Accelerator` for `model`. The global state of accelerate is restored afterwards.

    Raises:
        ValueError: The precision does not fit the device or the weights, or processes share one model.
    """
    import accelerate  # type: ignore[import-untyped]

    on_cpu = torch.device(model.cfg.device or "cpu").type == "cpu"
    require_gpu(mixed_precision, on_cpu)
    if mixed_precision != "no" and model.cfg.dtype != torch.float32:
        raise ValueError(
            f"mixed_precision={mixed_precision!r} computes in half precision on float32 weights; those of "
            f"{model.cfg.model_name!r} are {model.cfg.dtype}: load it with dtype=torch.float32, or use 'no'"
        )
    with _fresh_accelerate_state():
        # The trainer weights the parts of a batch itself, so accelerate must not divide by their number.
        no_scaling = accelerate.utils.GradientAccumulationPlugin(num_steps=1)
        accelerator = accelerate.Accelerator(
            cpu=on_cpu, mixed_precision=mixed_precision, gradient_accumulation_plugin=no_scaling, device_placement=False
        )
        kind = accelerator.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise ValueError(f"the trainer works with plain data parallel processes, not with accelerate's {kind}")
        try:
            yield accelerator
        finally:
            remove_patches(model)


@contextmanager
def plain_forward(model: DiffusionTransformer) -> Iterator[None]:
    """Remove accelerate's mixed precision, which patches `model.forward`, inside the `with` block."""
    patches = remove_patches(model)
    try:
        yield
    finally:
        vars(model).update(patches)


def remove_patches(model: DiffusionTransformer) -> dict[str, Any]:
    """Remove accelerate's patches and its marker from the model, and return them."""
    patches = ("forward", "_original_forward", "_is_accelerate_prepared")
    return {name: vars(model).pop(name) for name in patches if name in vars(model)}


@contextmanager
def _fresh_accelerate_state() -> Iterator[None]:
    """Start with an empty accelerate state and restore the previous one afterwards.

    Accelerate has one state per Python process, which refuses a second precision or device.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-untyped]

    states = [owner._shared_state for owner in (AcceleratorState, GradientState, PartialState)]
    saved = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state, before in zip(states, saved, strict=True):
            state.clear()
            state.update(before)
