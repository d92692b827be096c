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

Rotary positions (Su et al. 2021, arXiv 2104.09864), half-split: dimension i is rotated with dimension i + d_head/2.

The tables are computed in float32 and rounded to the precision with which the checkpoint was trained. The rotation is
computed in the wider precision of tables and activations. Families that rotate in the precision of the activations have
tables of that precision.
"""

import math
from dataclasses import astuple
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weight_conversion import QueryScale, RotaryScaling, YarnScaling

Tables = tuple[Tensor, Tensor]
Heads = Float[Tensor, "batch pos head d_head"]
ScoreBias = Float[Tensor, "#batch head query key"]


class PassPositions(NamedTuple):
    """The positions of one forward pass: `given` where there is padding, else `n_pos` of them from `n_past` on."""

    n_pos: int
    device: torch.device
    given: Int[Tensor, "batch pos"] | None
    n_past: int  # earlier positions, whose keys come from the cache
    activation: torch.dtype

    @property
    def numbers(self) -> Int[Tensor, "#batch pos"]:
        """The position of each token."""
        return (
            torch.arange(self.n_past, self.n_past + self.n_pos, device=self.device)[None]
            if self.given is None
            else self.given
        )


class Positions:
    """What a kind of positions does. By default queries and keys are not turned, and nothing is added.

    Attributes:
        learned: Whether a learned vector of each position is added to the embedding (`model.pos_embed`).
        biases_scores: Whether something is added to the scores.
        query_scale: Scaling of the queries by position, or `None`.
    """

    learned: bool = False
    biases_scores: bool = False
    query_scale: QueryScale | None = None

    @property
    def frequencies(self) -> Float[Tensor, "frequency"] | None:
        """Radians per position by which each pair of dimensions is rotated; `None` if nothing is rotated."""
        return None

    def turn(self, x: Heads, positions: Int[Tensor, "#batch pos"]) -> Heads:
        """Queries or keys at positions that count from 0; `x` is as at `hook_q` and `hook_k`, after norms of heads."""
        check_positions(positions)
        return x

    def scale_queries(self, q: Heads, positions: Int[Tensor, "#batch pos"]) -> Heads:
        """Turned queries as they meet the keys, which is as they are at `hook_rot_q`."""
        check_positions(positions)
        factors = self.query_factors(positions.to(q.device))
        return q if factors is None else q * factors.to(q.dtype)

    def query_factors(self, positions: Int[Tensor, "#batch pos"]) -> Float[Tensor, "#batch pos 1 1"] | None:
        """What turned queries at these positions are multiplied by; `None` if nothing scales them."""
        if self.query_scale is None:
            return None
        lengths = torch.floor(positions / self.query_scale.original_max_position_embeddings)
        return (1 + self.query_scale.beta * torch.log(1 + lengths))[:, :, None, None]

    def query_factors_of_pass(self, at: PassPositions) -> Float[Tensor, "#batch pos 1 1"] | None:
        """`query_factors` of all positions of a pass."""
        return None if self.query_scale is None else self.query_factors(at.numbers)

    def score_bias(self, queries: Int[Tensor, "#batch query"], keys: Int[Tensor, "#batch key"]) -> ScoreBias | None:
        """What is added to the scores of queries and keys at these positions; `None` if nothing is."""
        check_positions(queries)
        check_positions(keys)
        return None

    def of_pass(self, at: PassPositions) -> tuple[Tables | None, ScoreBias | None]:
        """What all layers of one forward pass share: the tables of the rotation, and what is added to the scores."""
        return None, None


class OutsideAttention(Positions):
    """Attention does not know positions. Without learned vectors, a bidirectional model reads its text as a set.

    Args:
        learned: Whether learned vectors are added to the embedding, as in GPT-2.
    """

    def __init__(self, learned: bool) -> None:
        self.learned = learned


class LinearBiases(Positions):
    """ALiBi (Press et al. 2021, arXiv 2108.12409): each head attends less to a position the farther away it is.

    The distance is |i - j|, so that attention reads both directions alike. On a causal model, where no key comes after
    its query, this is the ALiBi of the paper.

    Args:
        n_heads: Number of query heads. The slopes are 2^(-8/n), 2^(-16/n), ..., 2^-8 for n heads; if n is not a power
            of 2, those of the next lower power of 2, followed by every other slope of twice that number.
    """

    biases_scores = True

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

    def of_pass(self, at: PassPositions) -> tuple[None, ScoreBias]:
        keys = torch.arange(at.n_past + at.n_pos, device=at.device)[None] if at.given is None else at.given
        return None, self._between(keys[:, at.n_past :], keys)

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


class Rotary(Positions):
    """Cosines and sines for all positions up to the longest sequence so far, stored per device.

    Args:
        d_head: Dimensions of a head that are rotated, from the first one on.
        base: Base of the frequencies.
        dtype: Precision to which the tables are rounded.
        rotation: "float32", or "activation" for tables in the precision of the activations.
        scaling: Scaling of the frequencies, if they are scaled.
        share: Share of the frequencies that rotate, from the highest on; the others are 0.
    """

    # Only where they differ from these have objects the attributes: records describe objects by their attributes.
    scaling: RotaryScaling | YarnScaling | None = None
    share: float = 1.0

    def __init__(
        self,
        d_head: int,
        base: float,
        dtype: torch.dtype,
        rotation: str = "float32",
        scaling: RotaryScaling | YarnScaling | None = None,
        share: float = 1.0,
    ) -> None:
        self.d_head = d_head
        self.base = base
        self.dtype = dtype
        self.rotation = rotation
        if scaling is not None:
            self.scaling = scaling
        if share != 1:
            self.share = share
        self._tables: dict[torch.device, Tables] = {}

    @property
    def frequencies(self) -> Float[Tensor, "frequency"]:
        """Radians per position by which each pair of dimensions is rotated, in float32 on the CPU."""
        divisors = self.base ** (torch.arange(0, self.d_head, 2, device="cpu").float() / self.d_head)
        found = 1.0 / divisors if self.scaling is None else scaled(divisors, self.scaling, self.base)
        n_turned = int(self.share * self.d_head // 2)
        return found if self.share == 1 else torch.cat([found[:n_turned], torch.zeros_like(found[n_turned:])])

    def turn(self, x: Heads, positions: Int[Tensor, "#batch pos"]) -> Heads:
        """Queries or keys, rotated by their positions; see `Positions.turn`."""
        check_positions(positions)
        n_pos = int(positions.max()) + 1 if positions.numel() else 0
        at = PassPositions(n_pos, x.device, positions.to(x.device), 0, x.dtype)
        return rotate(x, self.of_pass(at)[0])

    def of_pass(self, at: PassPositions) -> tuple[Tables, None]:
        """Cosine and signed sine, Float[(batch) pos 1 d_head]."""
        n_all, known = at.n_past + at.n_pos, self._tables.get(at.device)
        if known is None or known[0].shape[0] < n_all:
            length = max(n_all, 2 * known[0].shape[0] if known else 0)
            known = self._compute(length, at.device)
            # Later passes may not read what torch.export, torch.func's gradients or torch.jit compute with.
            wrapped = torch._C._functorch.is_functorch_wrapped_tensor(known[0])
            if type(known[0]) is Tensor and not wrapped and not torch.jit.is_tracing():  # type: ignore[attr-defined]
                self._tables[at.device] = known
        cos, sin = known
        if self.rotation == "activation":
            cos, sin = cos.to(at.activation), sin.to(at.activation)
        if at.given is None:
            return (cos[at.n_past : n_all, None], sin[at.n_past : n_all, None]), None
        return (cos[at.given][:, :, None], sin[at.given][:, :, None]), None

    # Tables are reused by later calls, so they must not be inference tensors, even if this call is in inference mode.
    @torch.inference_mode(False)
    def _compute(self, length: int, device: torch.device) -> Tables:
        # The angles are computed on the CPU, so that the tables do not depend on the device.
        # Frequencies are rounded once before they are multiplied with the positions, as in the code of every family.
        angles = torch.outer(torch.arange(length, device="cpu").float(), self.frequencies)
        factor = 1.0 if self.scaling is None else self.scaling.table_factor
        cos, sin = ((table * factor).to(self.dtype).float() for table in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)


def scaled(
    divisors: Float[Tensor, "frequency"], scaling: RotaryScaling | YarnScaling, base: float
) -> Float[Tensor, "frequency"]:
    """Frequencies after scaling, to the bit those of transformers; `divisors` are their reciprocals before it."""
    if isinstance(scaling, YarnScaling):
        return _by_dimension(divisors, scaling, base)
    return _by_wavelength(1.0 / divisors, scaling)


def _by_wavelength(frequencies: Float[Tensor, "frequency"], scaling: RotaryScaling) -> Float[Tensor, "frequency"]:
    """`_compute_llama3_parameters`; see `RotaryScaling`."""
    factor, low, high, length = map(float, astuple(scaling))
    wavelengths = 2 * math.pi / frequencies
    share = (length / wavelengths - low) / (high - low)
    between = (1 - share) * frequencies / factor + share * frequencies
    lowered = torch.where(wavelengths > length / low, frequencies / factor, between)
    return torch.where(wavelengths < length / high, frequencies, lowered)


def _by_dimension(
    divisors: Float[Tensor, "frequency"], scaling: YarnScaling, base: float
) -> Float[Tensor, "frequency"]:
    """`_compute_yarn_parameters`; see `YarnScaling`.

    Frequency i of n is base^(-i/n). It turns r times within the original length at i = n log(length / 2πr) / log(base),
    which gives both ends of the ramp.
    """
    n_dims = 2 * len(divisors)

    def dimension(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return (n_dims * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(base))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n_dims - 1)
    width = 0.001 if first == last else last - first
    kept = 1 - ((torch.arange(len(divisors), device="cpu").float() - first) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * divisors) * (1 - kept) + 1.0 / divisors * kept


def rotate(x: Heads, tables: Tables) -> Heads:
    """Rotate queries or keys by their position; dimensions beyond those of the tables stay as they are."""
    cos, sin = tables
    if (width := cos.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], tables), x[..., width:]], dim=-1)
    if x.dtype == cos.dtype:
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    return (wide * cos + wide.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)
