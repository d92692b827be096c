"""Gradients of a matrix for many facts, as sums of outer products that are never multiplied out.

The gradient of W in y = W x is Σ_p δ_p x_p^T over positions p, with δ_p the gradient of y_p. The inner product of two
gradients is Σ_pq (δ_p · δ'_q)(x_p · x'_q): it needs inputs and gradients of outputs only, which are small beside the
matrix (67 MB for a W_V of 4096 x 4096 in float32).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OuterSums:
    """Σ_t left_t right_t^T for each fact.

    Attributes:
        left: Float[fact term d]; or Int[fact term], the indices of one-hot vectors, as for rows of an embedding.
        right: Float[fact term d_other].
        n_rows: Length d of the one-hot vectors.
    """

    left: Float[Tensor, "fact term d"] | Int[Tensor, "fact term"]
    right: Float[Tensor, "fact term d_other"]
    n_rows: int = 0

    def inner(self, other: "OuterSums") -> Float[Tensor, "fact fact"]:
        """The inner product of every gradient of `self` (rows) with every one of `other` (columns)."""
        ours, theirs = (
            OuterSums(each.left.flatten(0, 1)[None], each.right.flatten(0, 1)[None]) for each in (self, other)
        )
        products = ours._products(theirs)[0]
        by_fact = products.unflatten(1, (-1, other.right.shape[1])).unflatten(0, (-1, self.right.shape[1]))
        summed: Tensor = by_fact.sum(dim=(1, 3))
        return summed

    def own(self, other: "OuterSums") -> Float[Tensor, "fact"]:
        """The inner product of the two gradients of each fact, the diagonal of `inner`."""
        return self._products(other).sum(dim=(1, 2))

    def _products(self, other: "OuterSums") -> Float[Tensor, "fact term term"]:
        """The inner product of every term of a fact with every term of the same fact in `other`."""
        return _inner(self.left, other.left) * (self.right @ other.right.mT)

    def times(self, x: Float[Tensor, "fact pos d_other"]) -> Float[Tensor, "fact pos d"]:
        """Each fact's matrix times vectors of that fact."""
        coefficients = x.to(self.right.dtype) @ self.right.mT
        if self.left.is_floating_point():
            return coefficients @ self.left
        product = coefficients.new_zeros(*x.shape[:2], self.n_rows)
        return product.scatter_add_(2, self.left[:, None].expand_as(coefficients), coefficients)

    def rows(self, indices: Int[Tensor, "fact pos"]) -> Float[Tensor, "fact pos d_other"]:
        """Some rows of each fact's matrix."""
        if self.left.is_floating_point():
            chosen = self.left.gather(2, indices[:, None].expand(-1, self.left.shape[1], -1))
            return chosen.mT @ self.right
        same = (indices[:, :, None] == self.left[:, None, :]).to(self.right.dtype)
        return same @ self.right


def _inner(one: Tensor, other: Tensor) -> Float[Tensor, "fact term term"]:
    """Inner products of vectors, each dense or given as the index of a one-hot vector."""
    if one.is_floating_point() and other.is_floating_point():
        return one @ other.mT
    if one.is_floating_point():
        return one.gather(2, other[:, None].expand(-1, one.shape[1], -1))
    if other.is_floating_point():
        return _inner(other, one).mT
    return (one[:, :, None] == other[:, None, :]).float()


def inner(one: list[OuterSums], other: list[OuterSums]) -> Float[Tensor, "fact fact"]:
    """Inner products of gradients that are sums of several `OuterSums`, such as those of a tied embedding."""
    return torch.stack([a.inner(b) for a in one for b in other]).sum(dim=0)


def own(one: list[OuterSums], other: list[OuterSums]) -> Float[Tensor, "fact"]:
    """The diagonal of `inner`."""
    return torch.stack([a.own(b) for a in one for b in other]).sum(dim=0)
