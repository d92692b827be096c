"""Random numbers that belong to a row, a step and a position.

Each sample has a generator of its own, seeded from (seed of the row, step, position, purpose). A row therefore gets the
same numbers in every batch and under every padding, and an intervention at one position does not change the numbers at
another: a run and its patched copy differ by the patch alone.
"""

import hashlib
from collections.abc import Sequence
from typing import SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.seeds import own_seed
from diffusion_lens.settings import whole_number
from diffusion_lens.shapes import PosMask, Tokens

# One number for the batch, one for each row (as a list, array or tensor), or the generator of these.
Seed = SupportsIndex | Sequence[SupportsIndex] | torch.Generator


def plain_seed(seed: Seed) -> int | tuple[int, ...] | torch.Generator:
    """A seed as Python's own number, the seeds of rows as a tuple of these; a generator is returned as it is.

    Raises:
        TypeError: The seed is none of these.
    """
    if isinstance(seed, torch.Generator):
        return seed
    plain = seed.tolist() if hasattr(seed, "tolist") else seed  # of arrays and tensors
    if isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        return tuple(whole_number(f"seed[{row}]", row_seed) for row, row_seed in enumerate(plain))
    try:
        return whole_number("seed", seed)
    except TypeError as error:
        raise TypeError(f"{error}, or one for each row, or a torch.Generator") from None


def row_seeds(seed: Seed, n_batch: int) -> list[int]:
    """A seed for each row: hashed from one number and the row's index, taken from a list, or from a generator."""
    plain = plain_seed(seed)
    if isinstance(plain, torch.Generator):
        sampled: list[int] = torch.randint(2**62, (n_batch,), generator=plain, device=plain.device).tolist()
        return sampled
    if isinstance(plain, int):
        return [own_seed(plain, row) for row in range(n_batch)]
    if len(plain) != n_batch:
        raise ValueError(f"{len(plain)} seeds for {n_batch} rows; give one for each row, or a single number")
    return list(plain)


class PositionNoise:
    """Uniform random numbers on the CPU, in float64, so that a seed means the same on every device.

    Args:
        seeds: One seed for each row.
        positions: Int[batch pos], the number of each position among the real ones of its row.
    """

    def __init__(self, seeds: Sequence[int], positions: Tokens) -> None:
        self._seeds = seeds
        self._positions = positions.cpu()

    def by_position(self, step: int, positions: PosMask) -> Float[Tensor, "selected"]:
        """Float[selected], one number in [0, 1) for each selected position, in reading order."""
        width = int(self._positions.max()) + 1
        # The word "place" is part of the hashed key, so another word would give other numbers.
        uniform = torch.stack([_uniform(width, seed, step, "place") for seed in self._seeds])
        return uniform.gather(1, self._positions)[positions.cpu()].to(positions.device)

    def by_row(self, step: int) -> Float[Tensor, "batch"]:
        """One number in [0, 1) for each row, on the CPU."""
        return torch.cat([_uniform(1, seed, step, "row") for seed in self._seeds])

    def by_token(self, step: int, positions: PosMask, n_tokens: int) -> Float[Tensor, "selected d_vocab_out"]:
        """`n_tokens` numbers in (0, 1) for each selected position, in reading order."""
        selected = positions.cpu().nonzero().tolist()
        uniform = [_uniform(n_tokens, self._seeds[row], step, int(self._positions[row, pos])) for row, pos in selected]
        if not uniform:
            return torch.empty(0, n_tokens, dtype=torch.float64, device=positions.device)
        return torch.stack(uniform).clamp_(min=torch.finfo(torch.float64).tiny).to(positions.device)


def _uniform(n: int, *key: int | str) -> Tensor:
    """`n` numbers in [0, 1) by a generator that is seeded with a hash of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.rand(
        n, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1), dtype=torch.float64
    )
