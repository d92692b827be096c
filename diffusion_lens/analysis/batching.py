"""Processing of many small items in few large batches, within a memory budget."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from diffusion_lens.config import DiffusionConfig

Item = TypeVar("Item")
Result = TypeVar("Result")

CPU_TENSOR_BYTES = 6 * 2**20
CPU_LOGITS_BYTES = 24 * 2**20


def in_batches(
    process: Callable[[Sequence[Item]], Result], items: Sequence[Item], size: int
) -> Iterator[tuple[Sequence[Item], Result]]:
    """Process `items` in order, at most `size` at once; after an out-of-memory error, half as many.

    Raises:
        torch.OutOfMemoryError: Memory does not suffice for one item.
    """
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


def rows_at_once(cfg: DiffusionConfig, n_pos: int, n_read: int, max_bytes: int) -> int:
    """Number of rows of `n_pos` positions that one batch should have within `max_bytes`; 0 if not even one fits.

    The CPU gets smaller batches: tensors beyond a few MB are given new pages of memory each time, and the same work
    takes twice as long (measured: 8 layers, d_mlp 1024, batches of 80 against 320 rows of 16 positions). Logits are
    written once, so more of them are allowed, up to the 32 MiB from which glibc never reuses memory (measured: passes
    with 39 MiB of logits took 8% longer).
    """
    fitting = max_bytes // row_bytes(cfg, n_pos, n_read)
    if not cfg.is_on_cpu or not fitting:
        return fitting
    assert cfg.d_mlp is not None
    size = cfg.dtype.itemsize
    in_a_block = CPU_TENSOR_BYTES // (n_pos * cfg.d_mlp * size)
    at_the_head = CPU_LOGITS_BYTES // (max(1, n_read) * cfg.d_vocab_out * size)
    return max(1, min(fitting, in_a_block, at_the_head))


def row_bytes(cfg: DiffusionConfig, n_pos: int, n_read: int) -> int:
    """Bytes to reserve for one row of `n_pos` positions: its widest block, or the head at `n_read` positions.

    At the widest point of a block there are four tensors of the residual stream, the keys and values, and either three
    tensors of the MLP or those that rotate the queries. Three times that is reserved, because tensors of changing sizes
    fragment the memory: resident memory grew by up to 2.5 times the bytes in use (Linux's C library, measured).
    """
    assert cfg.d_mlp is not None
    # Rotations and probabilities are computed in float32 at least.
    size, wide = cfg.dtype.itemsize, max(cfg.dtype.itemsize, 4)
    d_attn, d_key_value = (heads * cfg.d_head for heads in (cfg.n_heads, cfg.n_key_value_heads or cfg.n_heads))
    mlp = 3 * cfg.d_mlp
    if (experts := cfg.experts) is not None:  # the outputs of the chosen experts exist twice, in two orders
        mlp = max(mlp, 3 * max(experts.d_expert, experts.d_shared or 0) + 2 * experts.n_chosen * cfg.d_model)
    inside = max(mlp * size, d_attn * (size + 4 * wide))
    block = n_pos * ((4 * cfg.d_model + 2 * d_key_value) * size + inside)
    head = n_pos * cfg.d_model * size + n_read * cfg.d_vocab_out * 3 * wide
    return 3 * max(block, head)


def _is_out_of_memory(error: RuntimeError) -> bool:
    allocator = ("can't allocate memory", "not enough memory")  # messages of the CPU allocator on Linux and on Windows
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in allocator)
