"""Batches of pairs within a memory budget."""

from collections.abc import Sequence
from itertools import pairwise

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.settings import Whole, at_least
from diffusion_lens.taught_pairs import TaughtPair

LARGEST = 32


def pair_bytes(cfg: DiffusionConfig, n_pos: int, n_facts: int, n_candidates: int = 0) -> int:
    """Bytes to reserve for one pair of canvases of `n_pos` positions in a batch of `n_facts`.

    Gradients need most: inputs and output gradients of every matrix for both canvases, in float32 at least, and the
    graph of one pass. Inner products of a matrix need a table of positions by positions.
    """
    size, wide = cfg.dtype.itemsize, max(cfg.dtype.itemsize, 4)
    d_attn, d_key_value = (heads * cfg.d_head for heads in (cfg.n_heads, cfg.n_key_value_heads or cfg.n_heads))
    read_and_written = 4 * cfg.d_model + 2 * d_attn + 2 * d_key_value + 4 * cfg.most_units
    graph = cfg.d_model * (2 * size + 2 * wide) + (2 * cfg.most_units + 2 * d_attn) * size
    scores = 3 * cfg.n_heads * n_pos**2 * wide
    tables = 3 * n_facts * n_pos**2 * wide
    head = 5 * cfg.d_vocab_out * 8  # log-probabilities and their gradient are in float64
    evidence = 5 * cfg.n_layers * n_candidates * wide
    return n_pos * cfg.n_layers * (2 * read_and_written * wide + graph) + scores + tables + head + evidence


def longest_canvas(pairs: Sequence[TaughtPair]) -> int:
    """Number of positions of the longest canvas."""
    return max(len(canvas.tokens) for pair in pairs for canvas in (pair.forward, pair.reverse))


def plan_batches(
    cfg: DiffusionConfig, n_pos: int, n_pairs: int, batch_size: Whole | None, max_bytes: int, n_candidates: int = 0
) -> list[range]:
    """The indices of the pairs that are computed together: batches of nearly equal sizes.

    A pair alone has no shuffled pairs, so an odd number of pairs is not divided by two: some batches have three then.

    Args:
        n_pos: Number of positions of the longest canvas.
        batch_size: Largest number of pairs; by default as many as fit `max_bytes`, at most 32.

    Raises:
        ValueError: The budget does not suffice for two pairs, or for `batch_size` pairs.
    """
    least = min(3 if n_pairs % 2 else 2, n_pairs)
    wanted = least if batch_size is None else min(at_least(1, "batch_size", batch_size), n_pairs)
    if wanted == 2:
        wanted = least
    if (needed := wanted * pair_bytes(cfg, n_pos, wanted, n_candidates)) > max_bytes:
        smaller = "" if wanted <= least else ", or choose a smaller batch_size"
        raise ValueError(f"max_bytes={max_bytes:,} is too small: {wanted} pairs take {needed:,} bytes{smaller}")
    if batch_size is None:
        fitting = [n for n in range(least, LARGEST + 1) if n * pair_bytes(cfg, n_pos, n, n_candidates) <= max_bytes]
        wanted = min(fitting[-1], n_pairs)
    n_batches = -(-n_pairs // wanted)
    ends = [n_pairs * i // n_batches for i in range(n_batches + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def require_shuffled_pairs(n_pairs: int, batch_size: Whole | None) -> None:
    """Raise a `ValueError` if every pair would be alone in its batch, without other pairs as its baseline."""
    if n_pairs > 1 and batch_size is not None and at_least(1, "batch_size", batch_size) == 1:
        raise ValueError("batch_size=1: pairs computed together are each other's baseline; give at least 2")
