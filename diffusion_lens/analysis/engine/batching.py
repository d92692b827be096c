"""Processing of many small items in few large batches, within a memory budget."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

from diffusion_lens.denoising.predictions import CPU_LOGITS_BYTES as CPU_LOGITS_BYTES
from diffusion_lens.model.config import DiffusionConfig

Item = TypeVar("Item")
Result = TypeVar("Result")

# What an allocator takes for each byte of the tensors of a pass, because tensors of changing sizes leave holes.
# Measured on Linux: up to 2.5 for traces, 1.2 for passes whose graph is kept. That of accelerators is an estimate.
RESERVE_ON_CPU = 3.0
RESERVE_FOR_A_GRAPH = 1.25
RESERVE_ON_ACCELERATOR = 1.5

CPU_TENSOR_BYTES = 6 * 2**20

_LISTENER: ContextVar[Callable[[int], None] | None] = ContextVar("listener", default=None)
_WATCHER: ContextVar[Callable[[int, int], None] | None] = ContextVar("watcher", default=None)


@contextmanager
def listening(hear: Callable[[int], None]) -> Iterator[None]:
    """Inside, `hear` gets the bytes that jobs keep beside their passes."""
    token = _LISTENER.set(hear)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def keeps(n_bytes: int) -> None:
    """Say how many bytes a job keeps beside its passes, where somebody listens."""
    if (hear := _LISTENER.get()) is not None:
        hear(n_bytes)


@contextmanager
def watching(see: Callable[[int, int], None]) -> Iterator[None]:
    """Inside, `see` gets the number of cells that are scored and of all, after every pass; its exception ends them."""
    token = _WATCHER.set(see)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def scored(done: int, of: int) -> None:
    """Say how many cells are scored, where somebody watches."""
    if (see := _WATCHER.get()) is not None:
        see(done, of)


def in_batches(
    process: Callable[[Sequence[Item]], Result], items: Sequence[Item], size: int
) -> Iterator[tuple[Sequence[Item], Result]]:
    """Process `items` in order, at most `size` at once; after an out-of-memory error, half as many."""
    done, size = 0, max(1, size)
    while done < len(items):
        batch = items[done : done + size]
        try:
            result = process(batch)
        except RuntimeError as error:
            if not _is_out_of_memory(error) or len(batch) == 1:
                raise
            size = len(batch) // 2
            continue
        yield batch, result
        done += len(batch)


def rows_at_once(cfg: DiffusionConfig, n_pos: int, n_read: int, max_bytes: int, one_row: int | None = None) -> int:
    """Number of rows of `n_pos` positions that one batch should have within `max_bytes`; 0 if not even one fits.

    The CPU gets smaller batches: tensors beyond a few MB are given new pages of memory each time, and the same work
    takes twice as long (measured). Logits are written once, so more of them are allowed, up to the 32 MiB from which
    glibc never reuses memory. `one_row` is the bytes of the tensors of one row, by default `row_bytes`.
    """
    fitting = max_bytes // reserved(cfg, row_bytes(cfg, n_pos, n_read) if one_row is None else one_row)
    if not cfg.is_on_cpu or not fitting:
        return fitting
    cfg = cfg.sizes
    assert cfg.d_mlp is not None
    logits_at_once = CPU_LOGITS_BYTES // (cfg.d_vocab_out * cfg.dtype.itemsize)
    in_a_block = CPU_TENSOR_BYTES // (n_pos * cfg.d_mlp * cfg.dtype.itemsize)
    return max(1, min(fitting, in_a_block, logits_at_once // max(1, n_read)))


def reserved(cfg: DiffusionConfig, n_bytes: int, of_graph: bool = False) -> int:
    """Bytes that an allocator takes for the tensors of a pass; `of_graph` if most live until the backward pass."""
    on_cpu = RESERVE_FOR_A_GRAPH if of_graph else RESERVE_ON_CPU
    return math.ceil((on_cpu if cfg.is_on_cpu else RESERVE_ON_ACCELERATOR) * n_bytes)


def row_bytes(cfg: DiffusionConfig, n_pos: int, n_read: int, n_past: int = 0, explicit: bool = False) -> int:
    """Bytes of the tensors of one row at the widest point of a pass without gradients.

    That is where a block rotates the queries, inside its MLP, or at the head. The stream that entered the pass, the one
    that entered the block and its norm are alive in the attention. Beside them the MLP has the output of the attention,
    the stream after it and its norm.

    Args:
        n_read: Number of rows of the logits that are computed, and turned into probabilities afterwards.
        n_past: Number of earlier positions, whose keys and values each block joins to its own.
        explicit: Whether hooks see scores or patterns of the attention, which the fused kernel does not keep.
    """
    # Rotations and probabilities are computed in float32 at least.
    cfg = cfg.sizes
    size, wide = cfg.dtype.itemsize, max(cfg.dtype.itemsize, 4)
    converted = wide if wide > size else 0
    d_attn, d_key_value = cfg.n_heads * cfg.d_head, (cfg.n_key_value_heads or cfg.n_heads) * cfg.d_head
    turned = converted + 3 * wide if cfg.positional_embedding_type == "rotary" else size
    attention = n_pos * (3 * cfg.d_model * size + d_attn * (size + turned)) + 2 * (n_past + n_pos) * d_key_value * size
    if explicit:
        # The scores, and the pattern before and after its hook, and as this writes it; keys and values by head.
        pairs = cfg.n_heads * n_pos * (n_past + n_pos) * max(4 * size, 2 * size + 2 * converted)
        by_head = 2 * d_attn * (2 * n_pos + n_past) * size
        attention = max(attention, n_pos * 3 * cfg.d_model * size + by_head + pairs)
    block = max(attention, n_pos * (6 * cfg.d_model * size + _bytes_in_mlp(cfg)))
    logits = n_read * cfg.d_vocab_out
    return max(block, logits * size + max(3 * n_pos * cfg.d_model * size, logits * (converted + wide)))


def proposal_bytes(cfg: DiffusionConfig, n_read: int, n_logits: int, sampled: bool) -> int:
    """Bytes with which the loop proposes tokens at `n_read` positions of a row: probabilities in float64, `n_logits`
    copies of the logits (two under guidance), and if tokens are sampled, as many random numbers."""
    return n_read * cfg.d_vocab_out * (cfg.dtype.itemsize * n_logits + (32 if sampled else 16))


def graph_row_bytes(cfg: DiffusionConfig, n_pos: int, n_read: int, learns: bool) -> int:
    """Bytes of the tensors of one row of a pass with gradients, where the backward pass begins.

    The whole graph is alive, and beside it the gradients of the logits or those inside the last block. Each block keeps
    the inputs of both norms, rotated queries, keys, values and mixed values, and what the products in the MLP
    multiplied. Where weights require gradients (`learns`), it also keeps what each matrix and norm multiplied.
    """
    cfg = cfg.sizes
    assert cfg.d_mlp is not None
    size, wide, experts = cfg.dtype.itemsize, max(cfg.dtype.itemsize, 4), cfg.experts
    d_attn, d_key_value = cfg.n_heads * cfg.d_head, (cfg.n_key_value_heads or cfg.n_heads) * cfg.d_head
    norms = 2 * cfg.d_model * (wide + 2 * size * learns)
    attention = 2 * (d_attn + d_key_value) * size
    if cfg.qk_norm:
        attention += (d_attn + d_key_value) * (wide + size * learns)
    gate = (3 if cfg.gated_mlp else 1) + learns
    mlp = gate * cfg.d_mlp * size
    if experts is not None:
        of_chosen = experts.n_chosen * (gate * experts.d_expert + (1 + learns) * cfg.d_model)
        routed = (of_chosen + gate * (experts.d_shared or 0)) * size + 8 * experts.n_experts + 24 * experts.n_chosen
        mlp = routed if all(experts.layers) else max(mlp, routed)
    in_block = n_pos * (2 * cfg.d_model * size + _bytes_in_mlp(cfg))
    at_head = 4 * n_read * cfg.d_vocab_out * size
    return n_pos * cfg.n_layers * (norms + attention + mlp) + max(in_block, at_head)


def _bytes_in_mlp(cfg: DiffusionConfig) -> int:
    """Bytes at a position inside an MLP: gate, up-projection and their product, or those of the experts."""
    assert cfg.d_mlp is not None
    size, experts = cfg.dtype.itemsize, cfg.experts
    dense = (3 if cfg.gated_mlp else 2) * cfg.d_mlp * size
    if experts is None:
        return dense
    # The outputs of the chosen experts exist by expert, joined, and by position. Before that, at most the positions of
    # one expert are in it, and they may be all.
    chosen, routing = experts.n_chosen * cfg.d_model * size, 8 * experts.n_experts + 24 * experts.n_chosen
    within = (2 * cfg.d_model + 3 * experts.d_expert) * size
    routed = max(3 * chosen, chosen + within) + routing
    shared = (cfg.d_model + 3 * (experts.d_shared or 0)) * size
    return max(routed, shared, 0 if all(experts.layers) else dense)


def _is_out_of_memory(error: RuntimeError) -> bool:
    allocator = ("can't allocate memory", "not enough memory")  # messages of the CPU allocator on Linux and on Windows
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in allocator)
