"""The toy of the one-layer experiment: 64 facts "A is B" of three tokens, and small networks that learn them.

A and B are one token each, and every fact has its own two. There are three sets of sentences:

    one-way     "A is B" for all 64 facts
    both-ways   "A is B" and "B is A" for all 64 facts
    mixed       "A is B" for all 64 facts, and "B is A" for the first 32 of them only

The questions of `taught_pairs` are about the facts that were told one way, and in "both-ways" about all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.taught_pairs import TaughtCanvas, TaughtPair
from weight_conversion import Architecture, PositionKind

DATA = ("one-way", "both-ways", "mixed")
VARIANTS = ("mdm", "ar")
N_FACTS = 64
IS, MASK = 0, 2 * N_FACTS + 1
# The facts told in both directions in the mixed data: the first ones.
_N_BOTH = N_FACTS // 2


@dataclass(frozen=True)
class Cell:
    """One training of the experiment.

    Attributes:
        positions: Kind of positions (`model/positions.py`).
        variant: "mdm", masked diffusion with bidirectional attention, or "ar", next-token prediction with causal
            attention.
        data: Name of the sentences, one of `DATA`.
        depth: Number of layers.
        seed: Seed of weights, order of the sentences, and noise.
    """

    positions: PositionKind
    variant: str
    data: str
    depth: int
    seed: int

    @property
    def id(self) -> str:
        """Name in records and files."""
        return f"{self.positions} {self.variant} {self.data} depth {self.depth} seed {self.seed}"


def architecture(positions: PositionKind, variant: str, depth: int = 1) -> Architecture:
    """The network: width 64, 4 heads of 16, MLP of 128.

    Both variants have the same tokens, so that a seed gives the same weights to all networks of one depth. The AR
    baseline never reads [MASK].
    """
    masked = variant == "mdm"
    return Architecture(
        family="diffusion_lens",
        name=f"one-layer-{variant}" if depth == 1 else f"{depth}-layer-{variant}",
        n_layers=depth,
        d_model=64,
        n_heads=4,
        n_key_value_heads=4,
        d_head=16,
        d_mlp=128,
        d_vocab=MASK + 1,
        d_vocab_out=MASK,
        n_ctx=3,
        attention_dir="bidirectional" if masked else "causal",
        readout="in_place" if masked else "shifted",
        mask_token_id=MASK if masked else None,
        positional_embedding_type=positions,
    )


def answers() -> list[int]:
    """The token A of every fact."""
    return list(range(1, N_FACTS + 1))


def sentences(data: str) -> Int[Tensor, "entry pos"]:
    """The sentences that a network is trained on."""
    a = torch.tensor(answers())
    b, middle = a + N_FACTS, torch.full_like(a, IS)
    forward, backward = torch.stack([a, middle, b], dim=1), torch.stack([b, middle, a], dim=1)
    n_backward = {"one-way": 0, "both-ways": N_FACTS, "mixed": _N_BOTH}[data]
    return torch.cat([forward, backward[:n_backward]])


def taught_pairs(variant: str, data: str) -> list[TaughtPair]:
    """The sentence "A is B" and the reverse question of the facts that are asked about.

    The MDM reads A in "[M] is B" and in "B is [M]". The AR baseline reads B after "A is" and A after "B is".
    """
    asked = answers()[_N_BOTH if data == "mixed" else 0 :]
    return [_mdm_pair(a, a + N_FACTS) if variant == "mdm" else _ar_pair(a, a + N_FACTS) for a in asked]


def _mdm_pair(a: int, b: int) -> TaughtPair:
    forward = TaughtCanvas(_row((MASK, IS, b)), row=0, answer_token=a, source=2)
    return TaughtPair(forward, TaughtCanvas(_row((b, IS, MASK)), row=2, answer_token=a, source=0), id=f"fact {a}")


def _ar_pair(a: int, b: int) -> TaughtPair:
    forward = TaughtCanvas(_row((a, IS, b)), row=1, answer_token=b, source=2)
    return TaughtPair(forward, TaughtCanvas(_row((b, IS, a)), row=1, answer_token=a, source=0), id=f"fact {a}")


def _row(tokens: Sequence[int]) -> Int[Tensor, "pos"]:
    return torch.tensor(tokens)
