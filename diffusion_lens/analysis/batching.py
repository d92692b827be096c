"""Many small runs in few large batches, within a budget of memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from diffusion_lens.config import DiffusionConfig

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_batches(
    run: Callable[[Sequence[Item]], Result], items: Sequence[Item], size: int
) -> Iterator[tuple[Sequence[Item], Result]]:
    """Run `items` in their order, at most `size` at once; after an out-of-memory error, half as many.

    Raises:
        torch.OutOfMemoryError: not even one fits.
    """
    begun, size = 0, max(1, size)
    while begun < len(items):
        batch = items[begun : begun + size]
        try:
            result = run(batch)
        except RuntimeError as error:
            if not _is_out_of_memory(error) or len(batch) == 1:
                raise
            size = len(batch) // 2
            continue
        yield batch, result
        begun += len(batch)


def row_bytes(cfg: DiffusionConfig, n_pos: int, n_read: int) -> int:
    """Bytes that one row of `n_pos` places takes at the widest point of a block, and of the head at `n_read` places."""
    assert cfg.d_mlp is not None
    d_attn = cfg.n_heads * cfg.d_head
    block = n_pos * (6 * cfg.d_model + max(4 * cfg.d_mlp, 8 * d_attn)) * cfg.dtype.itemsize
    # Norms and rotary products are taken in float32 at least, so are the probabilities.
    wide = n_pos * 4 * (2 * cfg.d_model + 2 * d_attn) if cfg.dtype.itemsize < 4 else 0
    head = n_read * (cfg.d_vocab_out * (cfg.dtype.itemsize + 8) + cfg.d_model * 8)
    return block + wide + head


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
