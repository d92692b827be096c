"""Separate seeds for the rows, texts or facts of a call, derived from the call's seed."""

import hashlib
import json
from typing import SupportsIndex

from diffusion_lens.settings import whole_number


def own_seed(seed: SupportsIndex, key: int | str, bits: int = 53) -> int:
    """The seed of one row, text or fact; the same on every machine.

    It is a hash, because sums would overlap: row 1 of seed 0 would have the seed of row 0 of seed 1, and five calls of
    20 rows would have 24 different seeds instead of 100.

    Args:
        seed: Seed of the call.
        key: Index of the row, or name of the text or fact.
        bits: Number of bits of the result. Every JSON reader preserves integers of 53 bits.
    """
    digest = hashlib.sha256(json.dumps([whole_number("seed", seed), key]).encode()).digest()
    return int.from_bytes(digest, "big") >> (8 * len(digest) - bits)
