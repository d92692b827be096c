"""Random numbers that belong to a row, a step and a place.

Each draw has a generator of its own, seeded from (seed of the row, step, place, purpose). So a row draws the same
numbers whoever its neighbours are and however it is padded, and an intervention at one place does not reshuffle the
chance at another: a run and its patched copy differ by the patch alone.
"""

import hashlib
from collections.abc import Sequence
from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.shapes import Places, Tokens

Seed = int | Sequence[int] | torch.Generator


def row_seeds(seed: Seed, n_batch: int) -> list[int]:
    """A seed for each row: `seed + row` for a number, the numbers themselves for a list, drawn from a generator."""
    if isinstance(seed, torch.Generator):
        drawn: list[int] = torch.randint(2**62, (n_batch,), generator=seed, device=seed.device).tolist()
        return drawn
    if isinstance(seed, Integral):
        return [int(seed) + row for row in range(n_batch)]
    if not isinstance(seed, Sequence):
        raise TypeError(f"seed={seed!r}; it is a number, one a row, or a torch.Generator")
    if len(seed) != n_batch:
        raise ValueError(f"{len(seed)} seeds for {n_batch} rows; give one a row, or a single number")
    return [int(each) for each in seed]


class PlaceNoise:
    """Uniform numbers on the CPU, in float64, so that a seed means the same on every device.

    Args:
        seeds: one a row.
        positions: Int[batch pos], the number of each place among the real ones of its row.
    """

    def __init__(self, seeds: Sequence[int], positions: Tokens) -> None:
        self._seeds = seeds
        self._positions = positions.cpu()

    def by_place(self, step: int, places: Places) -> Float[Tensor, "place"]:
        """One number in [0, 1) for every marked place, in reading order."""
        width = int(self._positions.max()) + 1
        drawn = torch.stack([_uniform(width, seed, step, "place") for seed in self._seeds])
        return drawn.gather(1, self._positions)[places.cpu()].to(places.device)

    def by_token(self, step: int, places: Places, n_tokens: int) -> Float[Tensor, "place token"]:
        """`n_tokens` numbers in (0, 1) for every marked place, in reading order."""
        where = places.cpu().nonzero().tolist()
        drawn = [_uniform(n_tokens, self._seeds[row], step, int(self._positions[row, pos])) for row, pos in where]
        if not drawn:
            return torch.empty(0, n_tokens, dtype=torch.float64, device=places.device)
        return torch.stack(drawn).clamp_(min=torch.finfo(torch.float64).tiny).to(places.device)


def _uniform(n: int, *key: int | str) -> Tensor:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.rand(
        n, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1), dtype=torch.float64
    )
