"""Alignment of the gradients of the two losses of each pair, with shuffled pairs as the baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.signatures.canvases import CanvasBatch, mean_where, other_facts
from diffusion_lens.analysis.signatures.gradients import Gradients, losses_after_step
from diffusion_lens.analysis.signatures.outer_sums import inner, own

STEP = 0.001  # Share of the forward loss by which the small step lowers it, to first order.


@dataclass(frozen=True, eq=False)
class GradientAlignment:
    """How the gradients of the forward and of the reverse loss agree, for each pair.

    Attributes:
        cosines: Float[fact parameter estimate], cosine of the two gradients of a pair, and the mean of the cosines of
            its forward gradient with the reverse gradients of other facts of its batch (`other_facts`). The
            second is the baseline: a generic fall of the reverse loss, which all pairs share, shows in both. NaN where
            the batch has no other fact.
        transfers: Float[fact parameter], <g_forward, g_reverse> / |g_forward|². Cosines and transfers are 0 where a
            gradient is, as in an expert that no position of a canvas chooses.
        steps: Float[fact estimate], change of the reverse loss, in nats, by a step along minus the forward gradient in
            all these matrices that lowers the pair's forward loss by 0.1% to first order: predicted, and measured. The
            measured one is NaN in less than float32, where so small a step is lost in rounding.
        losses: Float[fact canvas], in nats.
        parameters: Names of the weight matrices.
    """

    cosines: Float[Tensor, "fact parameter estimate"]
    transfers: Float[Tensor, "fact parameter"]
    steps: Float[Tensor, "fact estimate"]
    losses: Float[Tensor, "fact canvas"]
    parameters: list[str]

    @classmethod
    def of(cls, forward: CanvasBatch, reverse: CanvasBatch, one: Gradients, other: Gradients) -> "GradientAlignment":
        """The alignment in one batch, which takes one forward pass for the step.

        Args:
            one, other: Gradients of the forward and of the reverse canvases in the same matrices.
        """
        different = other_facts(forward, reverse)
        compared, transfers, squares, products = [], [], [], []
        for name in one.by_name:
            ours, theirs = one.by_name[name], other.by_name[name]
            square, table = own(ours, ours).clamp(min=0), inner(ours, theirs)
            others = own(theirs, theirs).clamp(min=0)
            cosines = table / _or_one(square).sqrt()[:, None] / _or_one(others).sqrt()[None, :]
            compared.append(torch.stack([cosines.diagonal(), mean_where(cosines, different)], dim=1))
            transfers.append(table.diagonal() / _or_one(square))
            squares.append(square)
            products.append(table.diagonal())
        steps = _small_step(reverse, one, other.losses, torch.stack(squares).sum(0), torch.stack(products).sum(0))
        return cls(
            cosines=torch.stack(compared, dim=1).float().cpu(),
            transfers=torch.stack(transfers, dim=1).float().cpu(),
            steps=steps.float().cpu(),
            losses=torch.stack([one.losses, other.losses], dim=1).float().cpu(),
            parameters=list(one.by_name),
        )

    @classmethod
    def joined(cls, batches: Sequence["GradientAlignment"]) -> "GradientAlignment":
        """The facts of several batches."""
        names = ("cosines", "transfers", "steps", "losses")
        tensors = {name: torch.cat([getattr(each, name) for each in batches]) for name in names}
        return cls(**tensors, parameters=batches[0].parameters)


def _small_step(
    reverse: CanvasBatch,
    of_forward: Gradients,
    before: Float[Tensor, "fact"],
    squares: Float[Tensor, "fact"],
    products: Float[Tensor, "fact"],
) -> Float[Tensor, "fact estimate"]:
    """The change of each reverse loss by a small step on the forward loss: predicted, and measured.

    Args:
        before: The reverse losses without the step.
        squares: |g_forward|² in all matrices.
        products: <g_forward, g_reverse> in all matrices.
    """
    sizes = STEP * of_forward.losses / squares
    predicted = -sizes * products
    if reverse.model.cfg.dtype not in (torch.float32, torch.float64):
        return torch.stack([predicted, torch.full_like(predicted, torch.nan)], dim=1)
    return torch.stack([predicted, losses_after_step(reverse, of_forward, sizes) - before], dim=1)


def _or_one(square: Tensor) -> Tensor:
    """Divisors of what is 0 where they are."""
    return square.where(square > 0, 1)
