"""The work of a job before it is run: the job itself runs, on a network of the same blocks whose vectors are narrow.

There are no rules of what a job costs. The narrow network has the layers, heads, attention, vocabulary and hook points
of the model, and vectors of a few numbers, so that its passes are fast. Batches are those of the model's sizes.
Each block that runs is counted:

    token-layers   rows times positions, summed over the blocks
    operations     2 for each weight of a block and position, 4 d_head for each head and pair of positions, and
                   2 d_model d_vocab for each row of the logits; a gradient takes twice as many again
    bytes          of the widest pass, as the engine plans them (`batching`), beside those of the weights

    with torch.no_grad(), counting(narrow_network(cfg, tokenizer)) as counter:
        denoise(counter.model, ...)
    counter.work.token_layers

What depends on numbers is that of random weights: when a search stops, and in which order a loop reveals its tokens.
"""

import math
from collections.abc import Iterator
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.analysis.engine.batching import graph_row_bytes, listening, proposal_bytes, reserved, row_bytes
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.hooks.clock import restoring
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.settings import Real
from weight_conversion import tensor_shapes

WIDTH, D_HEAD = 8, 2  # of the narrow network


@dataclass(frozen=True, eq=False)
class PlannedWork:
    """The work of a job on one model. `+` joins jobs, and `*` repeats one.

    Attributes:
        cfg: Config of the model.
        token_layers: Rows times positions, summed over the blocks of all forward passes.
        row_layers: Rows, summed over the blocks.
        gradient_layers: Those of them through which gradients pass.
        calls: Blocks that run, whatever their rows.
        operations: Operations of blocks and head, gradients included.
        positions: Positions of the longest row, cached ones included.
        batch_bytes: Bytes of the tensors that the job has at once in addition to the weights, at most.
        weight_copies: Copies of the weights in memory, those of an optimizer included.
    """

    cfg: DiffusionConfig
    token_layers: float = 0
    row_layers: float = 0
    gradient_layers: float = 0
    calls: float = 0
    operations: float = 0
    positions: int = 0
    batch_bytes: int = 0
    weight_copies: int = 1

    def __add__(self, other: "PlannedWork") -> "PlannedWork":
        """Both jobs, one after the other."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        most = {name: max(getattr(self, name), getattr(other, name)) for name in _LARGEST}
        return PlannedWork(self.cfg, **sums, **most)

    def __mul__(self, times: Real) -> "PlannedWork":
        """The job done this many times."""
        return replace(self, **{name: float(times) * getattr(self, name) for name in _SUMS})

    @property
    def forward_passes(self) -> float:
        """Passes of one row; one through part of the network counts in proportion."""
        return self.row_layers / self.cfg.n_layers

    @property
    def backward_passes(self) -> float:
        """Those of them after which gradients are computed."""
        return self.gradient_layers / self.cfg.n_layers

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, and of what an optimizer keeps for them."""
        weights = sum(math.prod(shape) for shape in tensor_shapes(self.cfg.architecture).values())
        return self.weight_copies * weights * self.cfg.dtype.itemsize

    @property
    def process_bytes(self) -> int:
        """Bytes of the device that a process should be given: those of the weights, and what an allocator takes for the
        other tensors."""
        return self.weight_bytes + reserved(self.cfg, self.batch_bytes)


_SUMS = ("token_layers", "row_layers", "gradient_layers", "calls", "operations")
_LARGEST = ("positions", "batch_bytes", "weight_copies")


def narrow_network(cfg: DiffusionConfig, tokenizer: Any = None) -> HookedDiffusionTransformer:
    """A network on the CPU whose jobs are those of a model: as many layers and heads, but narrow vectors."""
    shape = cfg.architecture
    experts = shape.experts
    if experts is not None:
        experts = replace(experts, d_expert=D_HEAD, d_shared=None if experts.d_shared is None else D_HEAD)
    narrow = copy(cfg)
    narrow.device, narrow.dtype = "cpu", torch.float32  # in which a CPU is fastest
    narrow.d_model = narrow.d_mlp = WIDTH
    narrow.d_head, narrow.rotary_dim = D_HEAD, None
    narrow.experts = experts
    narrow.time = None if shape.time is None else replace(shape.time, d_cond=WIDTH)
    vars(narrow)["stands_for"] = cfg
    return HookedDiffusionTransformer(narrow, tokenizer)


class Counter:
    """Counts the blocks of a network that run, and the rows of its logits, as those of the model that it stands for."""

    def __init__(self, model: Any) -> None:
        self.model, self.cfg = model, model.cfg.sizes
        self.work = PlannedWork(self.cfg)
        self.stored = 0
        self._weights = _active_weights(self.cfg)
        self._parameters = list(model.parameters())  # listed once: that visits every module
        self._pass = (1, 1, 0)  # rows, positions and earlier positions of the last block

    def block(
        self, forward: Any, layer: int, resid: Tensor, context: Any, past: Any = None, rows: Any = None
    ) -> Tensor:
        """Run a block."""
        cfg, (n_rows, n_pos) = self.cfg, resid.shape[:2]
        n_past = 0 if past is None else past.n_pos
        tokens, self._pass = n_rows * n_pos, (n_rows, n_pos, n_past)
        pairs = 4 * cfg.n_heads * cfg.d_head * tokens * (n_past + n_pos)
        operations = 2 * self._weights[layer] * tokens + pairs
        counts = {"token_layers": tokens, "row_layers": n_rows, "calls": 1, "positions": n_past + n_pos}
        self.add(n_rows * row_bytes(cfg, n_pos, 0, n_past), operations=operations, **counts)
        out: Tensor = forward(resid, context, past, rows)
        if out.requires_grad:
            row = graph_row_bytes(cfg, n_pos, 0, any(each.requires_grad for each in self._parameters))

            def graded(gradient: Tensor) -> None:
                self.add(n_rows * row, gradient_layers=n_rows, operations=2 * operations)

            out.register_hook(graded)
        return out

    def head(self, forward: Any, resid: Tensor) -> Tensor:
        """Compute logits."""
        cfg, (n_rows, n_pos, n_past) = self.cfg, self._pass
        n_read = resid[..., 0].numel()
        operations = 2 * n_read * cfg.d_model * cfg.d_vocab_out
        self.add(n_rows * row_bytes(cfg, n_pos, -(-n_read // n_rows), n_past), operations=operations)
        if self.model.clock.step is not None:  # the loop samples from them
            self.add(proposal_bytes(cfg, n_read, 1, sampled=True))
        logits: Tensor = forward(resid)
        return logits

    def add(self, n_bytes: int = 0, **counts: Any) -> None:
        """Add counts, by the names of `PlannedWork`, of what takes this many bytes beside those that are stored."""
        self.work = self.work + PlannedWork(self.cfg, batch_bytes=self.stored + n_bytes, **counts)

    def store(self, n_bytes: int) -> None:
        """Hear of bytes that a job keeps beside its passes."""
        self.stored = n_bytes
        self.add()


# Held here and not in the modules, whose attributes are a part of the network's identity.
_COUNTER: ContextVar[Counter] = ContextVar("counter")


def _counted(part: str, *given: Any) -> Any:
    return getattr(_COUNTER.get(), part)(*given)


@restoring
def counting(model: Any) -> Iterator[Counter]:
    """Count the blocks of a network that run inside."""
    counter = Counter(model)
    # Not by hooks of torch, for which the loop computes some passes otherwise.
    for layer, block in enumerate(model.blocks):
        block.forward = partial(_counted, "block", block.forward, layer)
    model.unembed.forward = partial(_counted, "head", model.unembed.forward)
    token = _COUNTER.set(counter)
    try:
        with listening(counter.store):
            yield counter
    finally:
        _COUNTER.reset(token)
        for module in (*model.blocks, model.unembed):
            del module.forward


def _active_weights(cfg: DiffusionConfig) -> list[int]:
    """Weights of the matrices that one position meets in each block."""
    experts, weights = cfg.experts, [0.0] * cfg.n_layers
    for name, shape in tensor_shapes(cfg.architecture).items():
        part, _, rest = name.partition(".")
        # The matrix that turns the time into scales and shifts is used once a row, not once a position.
        if part != "blocks" or len(shape) != 2 or ".modulation." in name:
            continue
        share = 1.0 if experts is None or ".mlp.experts." not in name else experts.n_chosen / experts.n_experts
        weights[int(rest.partition(".")[0])] += share * math.prod(shape)
    return [round(each) for each in weights]
