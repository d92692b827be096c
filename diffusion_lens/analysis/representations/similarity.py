"""Similarity of two sets of vectors, x and y, whose rows belong to the same facts. Each statistic is 1 if they agree.

- "cosine", "centred_cosine": are the two vectors of a fact the same? Mean cosine between them, as they are, and after
  the mean of each set is subtracted. The mean is shared by all facts, so it makes any two vectors similar.
- "retrieval": does the vector identify its fact? Share of vectors whose nearest vector in the other set is their own
  fact's.
- "subspace": do both sets vary along the same directions? Mean cos² of the principal angles between the leading
  principal components. This does not depend on the pairing of the facts, so it is computed in halves: on every other
  fact, and on the rest. It is above chance for unrelated facts too, because all vectors at one layer of one model share
  directions.
- "procrustes": are the sets the same up to a rotation? R is the orthogonal map that brings x nearest to y (Schönemann
  1966). With fewer facts than dimensions R has enough parameters to fit unrelated sets. So it is fitted in the leading
  principal components, and without the fact i on which it is evaluated:

      ρ = Σ_i ⟨x_i R_(−i), y_i⟩ / (‖x‖ ‖y‖)

  At the best scale the residual is 1 − ρ².
- "cka": do both sets have the same geometry? Linear CKA (Kornblith et al. 2019, arXiv 1905.00414): the cosine between
  the two matrices of inner products between facts. They are centred as in Székely & Rizzo 2014 (arXiv 1310.2926), which
  gives HSIC_1 (Song et al. 2012) divided by its norms. Unlike the usual estimate it is about 0 for unrelated sets, even
  with few facts.

"procrustes" and "cka" need neither common axes nor equal widths.

Every statistic takes `orders`, permutations of the rows of y, and is computed for each of them. Random permutations
give its distribution by chance. `deviations` estimates how much a statistic would vary with other facts.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

Statistic: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

NEVER_NEGATIVE = ("retrieval", "subspace")


def statistics(rank: int, one_space: bool) -> dict[str, Statistic]:
    """All statistics by name.

    Args:
        rank: Number of principal components that "subspace" and "procrustes" use.
        one_space: Whether both sets have the same axes; otherwise only "procrustes" and "cka" are defined.
    """
    without_axes: dict[str, Statistic] = {"procrustes": partial(procrustes, rank=rank), "cka": cka}
    if not one_space:
        return without_axes
    return {
        "cosine": cosine,
        "centred_cosine": centred_cosine,
        "retrieval": retrieval,
        "subspace": partial(subspace_overlap, rank=rank),
        **without_axes,
    }


def cosine(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"], orders: Int[Tensor, "resample fact"]
) -> Float[Tensor, "resample"]:
    """Mean over facts of the cosine between a fact's two vectors."""
    return (unit(x) @ unit(y).T)[torch.arange(len(x)), orders].mean(dim=1)


def centred_cosine(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"], orders: Int[Tensor, "resample fact"]
) -> Float[Tensor, "resample"]:
    """`cosine` after the mean of each set is subtracted."""
    return cosine(centred(x), centred(y), orders)


def retrieval(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"], orders: Int[Tensor, "resample fact"]
) -> Float[Tensor, "resample"]:
    """Share of vectors whose nearest in the other set, by centred cosine, is their own fact's; mean over both sets."""
    cosines = unit(centred(x)) @ unit(centred(y)).T
    nearest_in_y, nearest_in_x = cosines.argmax(dim=1), cosines.argmax(dim=0)
    hits = (nearest_in_y == orders).double() + (nearest_in_x[orders] == torch.arange(len(x))).double()
    return hits.mean(dim=1) / 2


def subspace_overlap(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"], orders: Int[Tensor, "resample fact"], rank: int
) -> Float[Tensor, "resample"]:
    """Mean cos² of the angles between the leading principal components; mean over the two halves of the facts.

    Random subspaces of a d-dimensional space have an overlap of rank / d on average.
    """
    overlaps = torch.zeros(len(orders), dtype=x.dtype)
    for half in (range(0, len(x), 2), range(1, len(x), 2)):
        axes = principal_axes(x[half], rank)
        overlaps += torch.stack([(axes.T @ principal_axes(y[order[half]], rank)).square().sum() for order in orders])
    return overlaps / (2 * rank)


def procrustes(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d_other"], orders: Int[Tensor, "resample fact"], rank: int
) -> Float[Tensor, "resample"]:
    """ρ, the correlation of y with the rotated x in `rank` principal components; R is fitted to the other facts."""
    x, y = (centred(vectors) @ principal_axes(vectors, rank) for vectors in (x, y))
    norms = x.norm() * y.norm()
    return torch.stack([_held_out_products(x, y[order]).sum() / norms for order in orders])


def cka(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d_other"], orders: Int[Tensor, "resample fact"]
) -> Float[Tensor, "resample"]:
    """Unbiased linear CKA; needs at least four facts."""
    x, y = _u_centred(centred(x)), _u_centred(centred(y))
    norms = x.norm() * y.norm()
    return torch.stack([(x * y[order][:, order]).sum() / norms for order in orders])


def deviations(
    statistic: Statistic,
    x: Float[Tensor, "fact d"],
    y: Float[Tensor, "fact d_other"],
    subsets: Int[Tensor, "resample subset"],
) -> Float[Tensor, "resample"]:
    """Deviations of the statistic from its mean that other facts would give, estimated from random subsets of these.

    The variance of a mean over m of n facts around the mean over all n is proportional to 1/m − 1/n, and that of the
    mean over n around the true one to 1/n. So deviations are scaled by √(m / (n − m)) (Politis & Romano 1994).
    """
    n_facts, size = len(x), subsets.shape[1]
    paired = torch.arange(size)[None]
    values = torch.cat([statistic(x[subset], y[subset], paired) for subset in subsets])
    return (values - values.mean()) * math.sqrt(size / (n_facts - size))


def principal_angles(x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"], rank: int) -> Float[Tensor, "rank"]:
    """Angles between the leading principal components of x and those of y in radians, the smallest first."""
    from scipy.linalg import subspace_angles  # Imported here because scipy is slow to import.

    angles = subspace_angles(principal_axes(x, rank).numpy(), principal_axes(y, rank).numpy())
    ascending: Tensor = torch.from_numpy(angles[::-1].copy())
    return ascending


def principal_axes(x: Float[Tensor, "fact d"], rank: int) -> Float[Tensor, "d rank"]:
    """Orthonormal directions in which the facts vary most; vectors of length 0 if there are fewer directions."""
    from scipy.linalg import eigh

    x = centred(x)
    x = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    variances, facts = eigh((x @ x.T).numpy(), subset_by_index=(len(x) - rank, len(x) - 1))
    lengths = torch.from_numpy(variances).clamp(min=len(x) * torch.finfo(x.dtype).eps).sqrt()
    axes: Tensor = x.T @ torch.from_numpy(facts) / lengths
    return axes


def effective_rank(singular_values: Float[Tensor, "component"]) -> float:
    """exp of the entropy of the singular values as shares of their sum (Roy & Vetterli 2007)."""
    return float(torch.special.entr(singular_values / singular_values.sum()).sum().exp())


def centred(x: Float[Tensor, "fact d"]) -> Float[Tensor, "fact d"]:
    """The vectors without their mean over facts."""
    return x - x.mean(dim=0)


def unit(x: Float[Tensor, "fact d"]) -> Float[Tensor, "fact d"]:
    """The vectors scaled to length 1; a vector of length 0 stays 0."""
    return torch.nn.functional.normalize(x, dim=1, eps=torch.finfo(x.dtype).tiny)


def _held_out_products(x: Float[Tensor, "fact rank"], y: Float[Tensor, "fact rank"]) -> Float[Tensor, "fact"]:
    """⟨x_i R, y_i⟩ of each fact, with R fitted to the other facts; x and y are centred."""
    n_facts = len(x)
    # The factor n / (n - 1) accounts for centring again without fact i.
    products = x[:, :, None] * y[:, None, :]
    u, _, vh = torch.linalg.svd(products.sum(dim=0) - products * (n_facts / (n_facts - 1)))
    return torch.einsum("ir,irs,is->i", x, u @ vh, y)


def _u_centred(x: Float[Tensor, "fact d"]) -> Float[Tensor, "fact fact"]:
    """Inner products between different facts, centred so that every row and column sums to 0; the diagonal is 0."""
    n_facts = len(x)
    products = (x @ x.T).fill_diagonal_(0)
    sums = products.sum(dim=0) / (n_facts - 2)
    mean = sums.sum() / (n_facts - 1)
    return (products - sums[:, None] - sums[None, :] + mean).fill_diagonal_(0)
