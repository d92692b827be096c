"""The operations of a job on tensors, recorded so that they run again alone: the floor of the job's time."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.model.block import Block


class Operations(TorchDispatchMode):
    """Records the operations of a job on tensors: the matrix products, and the other ones of the network.

    Args:
        model: The model of the job.

    Attributes:
        products: Matrix products, in order.
        network: The same with the other operations of blocks and of gradients.
        flops: Operations of all products on single numbers.
        token_layers: Positions that pass a block, summed over rows and blocks.
    """

    def __init__(self, model: HookedDiffusionTransformer) -> None:
        super().__init__()
        self.in_block = False
        self.weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        self.activations: dict[Any, Tensor] = {}
        self.products: list[Callable[[], object]] = []
        self.network: list[Callable[[], object]] = []
        self.flops = self.token_layers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func.overloadpacket.__name__.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm")
        in_network = self.in_block or torch._C._current_graph_task_id() >= 0  # or in a backward pass
        if is_product:
            one, other = args[-2:]
            self.flops += 2 * one.numel() * other.shape[-1]
        if is_product or (in_network and not func.is_view):
            alone = partial(func, *tree_map(self._kept, args), **tree_map(self._kept, kwargs or {}))
            self.network.append(alone)
            if is_product:
                self.products.append(alone)
        return func(*args, **(kwargs or {}))

    def _kept(self, x: Any) -> Any:
        """An argument for the operation alone."""
        if not isinstance(x, Tensor):
            return x
        # Indices remain as they are.
        if x.untyped_storage().data_ptr() in self.weights or not x.is_floating_point() or 0 in x.stride():
            return x.detach()
        kind = x.shape, x.stride(), x.dtype
        if kind not in self.activations:
            self.activations[kind] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).fill_(1)
        return self.activations[kind]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records what happens inside."""
        forward = Block.forward

        def counted(block: Any, resid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.token_layers += resid.shape[0] * resid.shape[1]
            self.in_block = True
            try:
                return forward(block, resid, *args, **kwargs)
            finally:
                self.in_block = False

        Block.forward = counted  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            Block.forward = forward  # type: ignore[method-assign]


@torch.no_grad()
def timed_alone(operations: list[Callable[[], object]]) -> float:
    """Duration of recorded operations."""

    def run() -> None:
        for operation in operations:
            operation()

    return timed(run)


def clock() -> float:
    """Seconds: those of the process if it has one thread, which other processes do not change."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(run: Callable[[], object]) -> float:
    """Duration of a call in seconds."""
    started = clock()
    run()
    return clock() - started


def alternately(one: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds of two calls that take turns, and the median of the ratios other/one of the rounds."""
    pairs = [(timed(one), timed(other)) for _ in range(rounds)]
    seconds, other_seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    return seconds, other_seconds, statistics.median(b / a for a, b in pairs)
