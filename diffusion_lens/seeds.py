"""Seeds of one's own for each row, text or fact of a run, made from the run's seed."""

import hashlib
import json
from typing import SupportsIndex

from diffusion_lens.settings import whole_number


def own_seed(seed: SupportsIndex, key: int | str, bits: int = 53) -> int:
    """The seed of row `key`, or of whatever `key` names, in a run with this seed; the same on every machine.

    Hashed, because sums overlap: row 1 of seed 0 would be row 0 of seed 1, and five runs of 20 rows would draw 24
    samples instead of 100.

    Args:
        bits: the seed is below 2 to this power. 53 bits pass unharmed through every JSON reader.
    """
    digest = hashlib.sha256(json.dumps([whole_number("seed", seed), key]).encode()).digest()
    return int.from_bytes(digest, "big") >> (8 * len(digest) - bits)
