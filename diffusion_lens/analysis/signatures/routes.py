"""Routes: the scores with which the reader of each canvas attends to its source, in both directions.

The score of reader i and source j is q^T R_(j-i) k / sqrt(d_head), with R the rotation. The two directions share q (of
[MASK]) and k (of the source) where these depend on the tokens only, and differ in the offset d = j - i. (With a shifted
readout and a name of one token, the reader is the token before [MASK], and the two queries are those of two words.) For
independent
isotropic q and k the correlation of the two scores is `isotropic_route_correlation`, or `correlation_of_frequencies`
for frequencies that are scaled.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens.analysis.signatures.canvases import CanvasBatch
from diffusion_lens.analysis.signatures.reading import CanvasReading, scores_between
from diffusion_lens.model.norm import Norm
from diffusion_lens.settings import Real, Whole, at_least, plain_number, whole_number


def isotropic_route_correlation(d_head: Whole, forward_offset: Whole, reverse_offset: Whole, base: Real) -> float:
    """The correlation of the scores at two offsets, if queries and keys are independent and isotropic.

        rho(a, b) = 2/d_head · Σ_m cos((a - b) · base^(-2m/d_head)),  m = 0 ... d_head/2 - 1

    Args:
        d_head: Dimensions of a head.
        forward_offset, reverse_offset: Position of the source minus position of the reader, in tokens.
        base: Base of the rotary frequencies.

    Raises:
        ValueError: `d_head` is odd or below 2, or the base is not above 0.
    """
    width, frequency_base = at_least(2, "d_head", d_head), plain_number("base", base)
    if width % 2 or not 0 < frequency_base < math.inf:
        raise ValueError(f"d_head={width}, base={frequency_base}; d_head must be even and the base above 0")
    turned = whole_number("forward_offset", forward_offset) - whole_number("reverse_offset", reverse_offset)
    half = width // 2
    return sum(math.cos(turned * frequency_base ** (-m / half)) for m in range(half)) / half


def correlation_of_frequencies(
    frequencies: Float[Tensor, "frequency"], forward_offset: int, reverse_offset: int
) -> float:
    """`isotropic_route_correlation` for a model's own rotary frequencies, such as scaled ones.

        rho(a, b) = mean over m of cos((a - b) · frequency_m)

    Args:
        frequencies: Radians per position, `model.positions.frequencies`.
        forward_offset, reverse_offset: Position of the source minus position of the reader, in tokens.
    """
    return float(((forward_offset - reverse_offset) * frequencies.double()).cos().mean())


@torch.no_grad()
def routes_of(forward: CanvasReading, reverse: CanvasReading) -> Float[Tensor, "fact route layer head"]:
    """The scores reader to source of the forward canvas, of the reverse one, and the counterfactual ones.

    The counterfactual score takes query and key of the forward canvas, before their rotation, to the positions of the
    reverse canvas: only the position differs from the forward score. NaN where the reader of one of the two
    canvases does not see the source.
    """
    scores = [torch.stack(reading.scores, dim=1).float() for reading in (forward, reverse)]
    routes = torch.stack([*scores, _turned(forward, reverse.batch)], dim=1)
    routes[~(forward.batch.sees_source & reverse.batch.sees_source)] = torch.nan
    return routes


def correlation(one: Tensor, other: Tensor, dim: int) -> Tensor:
    """Pearson's correlation along one axis."""
    a, b = (x.double() - x.double().mean(dim=dim, keepdim=True) for x in (one, other))
    product: Tensor = (a * b).sum(dim=dim) / (a.pow(2).sum(dim=dim) * b.pow(2).sum(dim=dim)).sqrt()
    return product.float()


def _turned(reading: CanvasReading, at: CanvasBatch) -> Float[Tensor, "fact layer head"]:
    """The scores of a pass's queries and keys at the positions of reader and source of other canvases.

    They are those of a reader that sees the source, whether or not it does so at its own positions.

    NaN with learned positions: they are in queries and keys already, and cannot be exchanged there.
    """
    model, scores = at.model, []
    if model.positions.learned:
        return torch.stack(reading.scores, dim=1).float() * torch.nan
    at_rows, at_sources = at.rows[:, None], at.sources[:, None]
    for block, q, k in zip(model.blocks, reading.queries, reading.keys, strict=True):
        turned_q = model.positions.turn(block.attn.clipped(_normed(block.attn.q_norm, q)[:, None]), at_rows)
        turned_q = model.positions.scale_queries(turned_q, at_rows)[:, 0]
        turned_k = model.positions.turn(block.attn.clipped(_normed(block.attn.k_norm, k)[:, None]), at_sources)[:, 0]
        scores.append(scores_between(at, turned_q, turned_k))
    return torch.stack(scores, dim=1).float()


def _normed(norm: nn.Module, x: Float[Tensor, "fact head d_head"]) -> Float[Tensor, "fact head d_head"]:
    """Queries or keys after the norm of their head, if there is one."""
    return norm.without_hooks(x) if isinstance(norm, Norm) else x
