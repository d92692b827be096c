"""One device or many, through Hugging Face accelerate.

`accelerate launch script.py` starts the same script in several processes; each holds the whole model, works on its rows
of a batch, and gradients are averaged (data parallel). On CPUs take `torchrun --nproc-per-node 2 script.py`, because
`accelerate launch --cpu` starts one process unless MPI is there. Without a launcher there is one process, and the model
stays where it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diffusion_lens.model.transformer import DiffusionTransformer

Accelerator = Any  # accelerate's; the library is imported when something is trained


def require_gpu(mixed_precision: str, on_cpu: bool) -> None:
    """Raise a `ValueError` at a precision that a CPU does not have."""
    if mixed_precision == "fp16" and on_cpu:
        raise ValueError("mixed_precision='fp16' needs a GPU; on a CPU take 'no' or 'bf16'")


@contextmanager
def accelerated(model: DiffusionTransformer, mixed_precision: str = "no") -> Iterator[Accelerator]:
    """An `accelerate.Accelerator` for `model`; accelerate's own state is put back afterwards.

    Raises:
        ValueError: a precision that does not fit, or processes that share one model between them.
    """
    import accelerate  # type: ignore[import-untyped]

    on_cpu = torch.device(model.cfg.device or "cpu").type == "cpu"
    require_gpu(mixed_precision, on_cpu)
    if mixed_precision != "no" and model.cfg.dtype != torch.float32:
        raise ValueError(
            f"mixed_precision={mixed_precision!r} computes in half precision on float32 weights; those of "
            f"{model.cfg.model_name!r} are {model.cfg.dtype}: load it with dtype=torch.float32, or take 'no'"
        )
    with _state_of_its_own():
        once = accelerate.utils.GradientAccumulationPlugin(num_steps=1)  # the trainer weighs its parts itself
        made = accelerate.Accelerator(
            cpu=on_cpu, mixed_precision=mixed_precision, gradient_accumulation_plugin=once, device_placement=False
        )
        kind = made.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise ValueError(f"the trainer works with plain data parallel processes, not with accelerate's {kind}")
        try:
            yield made
        finally:
            unpatched(model)


@contextmanager
def plain_forward(model: DiffusionTransformer) -> Iterator[None]:
    """The model as it is without accelerate's mixed precision, which is a patch of `model.forward`."""
    patches = unpatched(model)
    try:
        yield
    finally:
        vars(model).update(patches)


def unpatched(model: DiffusionTransformer) -> dict[str, Any]:
    """Take accelerate's patches and its mark off the model, and return them."""
    patches = ("forward", "_original_forward", "_is_accelerate_prepared")
    return {name: vars(model).pop(name) for name in patches if name in vars(model)}


@contextmanager
def _state_of_its_own() -> Iterator[None]:
    """Begin with accelerate's state empty: it has one a Python process, and refuses a second precision or device."""
    from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-untyped]

    states = [holder._shared_state for holder in (AcceleratorState, GradientState, PartialState)]
    held = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state, before in zip(states, held, strict=True):
            state.clear()
            state.update(before)
