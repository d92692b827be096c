"""Positions as a part of the network: how it knows the order of its tokens.

Positions can enter a transformer at three points. Each kind answers for all three:

| kind         | what is added to the embedding  | how queries and keys are turned | what is added to the scores |
|--------------|---------------------------------|---------------------------------|-----------------------------|
| `"rotary"`   | nothing                         | rotated by their position       | nothing                     |
| `"standard"` | a learned vector, `model.W_pos` | not                             | nothing                     |
| `"none"`     | nothing                         | not                             | nothing                     |
| `"alibi"`    | nothing                         | not                             | -slope · |i - j|            |

Of every kind, queries may also be scaled by their position, after they are turned (`QueryScale`).

The words are those of TransformerLens's `positional_embedding_type`. `model.positions` is the object of a model.
Positions count real tokens, so that padding on the left moves none of them. `model/build.py` lists the kinds by name.
"""

import math
from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weight_conversion import QueryScale

Tables = tuple[Tensor, Tensor]
Heads = Float[Tensor, "batch pos head d_head"]
ScoreBias = Float[Tensor, "#batch head query key"]


class Positions(ABC):
    """What a kind of positions does. By default queries and keys are not turned, and nothing is added.

    Attributes:
        learned: Whether a learned vector of each position is added to the embedding (`model.pos_embed`).
        query_scale: Scaling of the queries by position, or `None`.
    """

    learned: bool = False
    query_scale: QueryScale | None = None

    @property
    def frequencies(self) -> Float[Tensor, "frequency"] | None:
        """Radians per position by which each pair of dimensions is rotated; `None` if nothing is rotated."""
        return None

    def turn(self, x: Heads, positions: Int[Tensor, "#batch pos"]) -> Heads:
        """Queries or keys as they are at some positions.

        Args:
            x: Queries or keys before they are turned, as at `hook_q` and `hook_k`, after the norms of heads if the
                model has any.
            positions: Position of each, counted from 0.

        Raises:
            ValueError: A position is negative.
        """
        check_positions(positions)
        return x

    def scale_queries(self, q: Heads, positions: Int[Tensor, "#batch pos"]) -> Heads:
        """Turned queries as they meet the keys, which is as they are at `hook_rot_q`.

        Raises:
            ValueError: A position is negative.
        """
        check_positions(positions)
        factors = self.query_factors(positions.to(q.device))
        return q if factors is None else q * factors.to(q.dtype)

    def query_factors(self, positions: Int[Tensor, "#batch pos"]) -> Float[Tensor, "#batch pos 1 1"] | None:
        """What turned queries at these positions are multiplied by; `None` if nothing scales them."""
        if self.query_scale is None:
            return None
        lengths = torch.floor(positions / self.query_scale.original_max_position_embeddings)
        return (1 + self.query_scale.beta * torch.log(1 + lengths))[:, :, None, None]

    def query_factors_of_pass(
        self, n_pos: int, device: torch.device, positions: Int[Tensor, "batch pos"] | None, n_past: int
    ) -> Float[Tensor, "#batch pos 1 1"] | None:
        """`query_factors` of a pass; the arguments are those of `of_pass`."""
        if self.query_scale is None:
            return None
        if positions is None:
            positions = torch.arange(n_past, n_past + n_pos, device=device)[None]
        return self.query_factors(positions)

    def score_bias(self, queries: Int[Tensor, "#batch query"], keys: Int[Tensor, "#batch key"]) -> ScoreBias | None:
        """What is added to the scores of queries and keys at these positions; `None` if nothing is."""
        check_positions(queries)
        check_positions(keys)
        return None

    @abstractmethod
    def of_pass(
        self,
        n_pos: int,
        device: torch.device,
        positions: Int[Tensor, "batch pos"] | None,
        n_past: int,
        activation: torch.dtype,
    ) -> tuple[Tables | None, ScoreBias | None]:
        """What all layers of one forward pass share: the tables of the rotation, and what is added to the scores.

        Args:
            n_pos: Number of query positions.
            device: Device of the result.
            positions: Position of each token where there is padding; by default the `n_pos` positions from `n_past` on.
            n_past: Number of earlier positions, whose keys come from the cache.
            activation: Precision of the activations.
        """


class OutsideAttention(Positions):
    """Attention does not know positions. Without learned vectors, a bidirectional model reads its text as a set.

    Args:
        learned: Whether learned vectors are added to the embedding, as in GPT-2.
    """

    def __init__(self, learned: bool) -> None:
        self.learned = learned

    def of_pass(
        self,
        n_pos: int,
        device: torch.device,
        positions: Int[Tensor, "batch pos"] | None,
        n_past: int,
        activation: torch.dtype,
    ) -> tuple[None, None]:
        """Neither tables nor a bias."""
        return None, None


class LinearBiases(Positions):
    """ALiBi (Press et al. 2021, arXiv 2108.12409): each head attends less to a position the farther away it is.

    The distance is |i - j|, so that attention reads both directions alike. On a causal model, where no key comes after
    its query, this is the ALiBi of the paper.

    Args:
        n_heads: Number of query heads. The slopes are 2^(-8/n), 2^(-16/n), ..., 2^-8 for n heads; if n is not a power
            of 2, those of the next lower power of 2, followed by every other slope of twice that number.
    """

    def __init__(self, n_heads: int) -> None:
        power = 2 ** int(math.log2(n_heads))
        slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
        between = [2 ** (-4 * i / power) for i in range(1, 2 * power, 2)]
        self.slopes = tuple([*slopes, *between][:n_heads])

    def score_bias(self, queries: Int[Tensor, "#batch query"], keys: Int[Tensor, "#batch key"]) -> ScoreBias:
        """-slope · |i - j|, in float32."""
        check_positions(queries)
        check_positions(keys)
        return self._between(queries, keys)

    def of_pass(
        self,
        n_pos: int,
        device: torch.device,
        positions: Int[Tensor, "batch pos"] | None,
        n_past: int,
        activation: torch.dtype,
    ) -> tuple[None, ScoreBias]:
        """No tables; the bias between the positions of the pass and those, with the cache's, that it sees."""
        keys = torch.arange(n_past + n_pos, device=device)[None] if positions is None else positions
        return None, self._between(keys[:, n_past:], keys)

    def _between(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[:, None, :, None] - keys[:, None, None, :]).abs()
        return -torch.tensor(self.slopes, device=queries.device)[:, None, None] * distance


def check_positions(positions: Int[Tensor, "#batch pos"]) -> None:
    """Raise a `ValueError` if a position is negative."""
    if positions.numel() and int(positions.min()) < 0:
        raise ValueError(
            f"position {int(positions.min())} is negative; positions count from 0. Where only the distance of queries "
            "and keys matters, add the same number to all of them"
        )
