"""How alike are two sets of vectors, x and y, of the same facts row by row? Statistics that are 1 where they agree.

*Is the vector the same?* The mean cosine of a fact's two vectors, as they are and after the mean of each set is taken
away: what all facts share makes any two vectors alike. *Is it this fact's?* Retrieval: whether the vector nearest to a
fact's in the other set is its own. *Is the subspace the same?* The mean cos² of the principal angles between the
leading principal components of the two sets. Who is paired with whom would play no part in it; so it is taken in either
half of the facts, and there also of unrelated facts: at one layer of one model all vectors lie along common directions.
*Is it the same but for a rotation?* Procrustes: R is the orthogonal map that brings x nearest to y (Schönemann 1966).
With fewer facts than dimensions it has so many free numbers that it brings anything near anything; so it is fitted to
the leading principal components, and never to the fact that it is judged on:

    ρ = Σ_i ⟨x_i R_(−i), y_i⟩ / (‖x‖ ‖y‖)

At the best scale the residual is 1 − ρ². *Is the geometry the same?* Linear CKA (Kornblith et al. 2019, arXiv
1905.00414): the cosine of the two matrices of inner products between facts. Centred as in Székely & Rizzo 2014 (arXiv
1310.2926) it is HSIC_1 (Song et al. 2012) over its norms, which, unlike the usual estimate, is about 0 for unrelated
sets however few the facts are. The last two ask for no common axes, nor for equal widths.

Every statistic takes `orders`, each the rows of y in another order, and is computed for each: with the facts of y
shuffled it is what chance gives. `deviations` says how much it would differ with other facts.
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
        rank: principal components that "subspace" and "procrustes" look at.
        one_space: whether both sets have the same axes; otherwise only "procrustes" and "cka" are asked.
    """
    anywhere: dict[str, Statistic] = {"procrustes": partial(procrustes, rank=rank), "cka": cka}
    if not one_space:
        return anywhere
    return {
        "cosine": cosine,
        "centred_cosine": centred_cosine,
        "retrieval": retrieval,
        "subspace": partial(subspace_overlap, rank=rank),
        **anywhere,
    }


def cosine(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"], orders: Int[Tensor, "draw fact"]
) -> Float[Tensor, "draw"]:
    """Mean over facts of the cosine between a fact's two vectors."""
    return (unit(x) @ unit(y).T)[torch.arange(len(x)), orders].mean(dim=1)


def centred_cosine(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"], orders: Int[Tensor, "draw fact"]
) -> Float[Tensor, "draw"]:
    """`cosine` between the deviations from the mean of each set."""
    return cosine(centred(x), centred(y), orders)


def retrieval(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"], orders: Int[Tensor, "draw fact"]
) -> Float[Tensor, "draw"]:
    """Share of vectors whose nearest in the other set, by centred cosine, is their own fact's; both ways, averaged."""
    likeness = unit(centred(x)) @ unit(centred(y)).T
    found_in_y, found_in_x = likeness.argmax(dim=1), likeness.argmax(dim=0)
    hits = (found_in_y == orders).double() + (found_in_x[orders] == torch.arange(len(x))).double()
    return hits.mean(dim=1) / 2


def subspace_overlap(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"], orders: Int[Tensor, "draw fact"], rank: int
) -> Float[Tensor, "draw"]:
    """Mean cos² of the angles between the leading principal components, over every other fact and over the rest.

    Subspaces of a d-dimensional space turned at random have rank / d.
    """
    overlaps = torch.zeros(len(orders), dtype=x.dtype)
    for half in (range(0, len(x), 2), range(1, len(x), 2)):
        axes = principal_axes(x[half], rank)
        overlaps += torch.stack([(axes.T @ principal_axes(y[order[half]], rank)).square().sum() for order in orders])
    return overlaps / (2 * rank)


def procrustes(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d_other"], orders: Int[Tensor, "draw fact"], rank: int
) -> Float[Tensor, "draw"]:
    """ρ, the correlation of y with x turned by a map fitted to the other facts, in `rank` principal components."""
    x, y = (centred(each) @ principal_axes(each, rank) for each in (x, y))
    norms = x.norm() * y.norm()
    return torch.stack([_held_out_products(x, y[order]).sum() / norms for order in orders])


def cka(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d_other"], orders: Int[Tensor, "draw fact"]
) -> Float[Tensor, "draw"]:
    """Unbiased linear CKA; at least four facts."""
    x, y = _u_centred(centred(x)), _u_centred(centred(y))
    norms = x.norm() * y.norm()
    return torch.stack([(x * y[order][:, order]).sum() / norms for order in orders])


def deviations(
    statistic: Statistic,
    x: Float[Tensor, "fact d"],
    y: Float[Tensor, "fact d_other"],
    subsets: Int[Tensor, "draw kept"],
) -> Float[Tensor, "draw"]:
    """How the statistic would deviate from its mean with other facts, seen in random subsets of these.

    A mean over m of n facts varies about that over all n by 1/m − 1/n, and that about the truth by 1/n: hence the scale
    (Politis & Romano 1994).
    """
    n_facts, kept = len(x), subsets.shape[1]
    paired = torch.arange(kept)[None]
    found = torch.cat([statistic(x[subset], y[subset], paired) for subset in subsets])
    return (found - found.mean()) * math.sqrt(kept / (n_facts - kept))


def principal_angles(x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"], rank: int) -> Float[Tensor, "rank"]:
    """Angles between the leading principal components of x and those of y in radians, the smallest first."""
    from scipy.linalg import subspace_angles  # scipy takes its time to import, and few programs come here

    angles = subspace_angles(principal_axes(x, rank).numpy(), principal_axes(y, rank).numpy())
    ascending: Tensor = torch.from_numpy(angles[::-1].copy())
    return ascending


def principal_axes(x: Float[Tensor, "fact d"], rank: int) -> Float[Tensor, "d rank"]:
    """Directions in which the facts vary most, orthonormal; of length 0 where there are fewer."""
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
    """Without the mean over facts."""
    return x - x.mean(dim=0)


def unit(x: Float[Tensor, "fact d"]) -> Float[Tensor, "fact d"]:
    """Each vector at length 1; one of length 0 stays."""
    return torch.nn.functional.normalize(x, dim=1, eps=torch.finfo(x.dtype).tiny)


def _held_out_products(x: Float[Tensor, "fact rank"], y: Float[Tensor, "fact rank"]) -> Float[Tensor, "fact"]:
    """⟨x_i R, y_i⟩ of each fact, R fitted to the others; x and y are centred."""
    n_facts = len(x)
    # Centring anew without fact i takes away a little more than its own product.
    each = x[:, :, None] * y[:, None, :]
    u, _, vh = torch.linalg.svd(each.sum(dim=0) - each * (n_facts / (n_facts - 1)))
    return torch.einsum("ir,irs,is->i", x, u @ vh, y)


def _u_centred(x: Float[Tensor, "fact d"]) -> Float[Tensor, "fact fact"]:
    """Inner products between different facts, such that every row and column sums to 0; the diagonal is 0."""
    n_facts = len(x)
    products = (x @ x.T).fill_diagonal_(0)
    sums = products.sum(dim=0) / (n_facts - 2)
    mean = sums.sum() / (n_facts - 1)
    return (products - sums[:, None] - sums[None, :] + mean).fill_diagonal_(0)
