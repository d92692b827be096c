"""C⁻¹ k for the keys of many edits: C is checked, factored once, and described for records."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.rome.covariance import SecondMoment
from diffusion_lens.analysis.rome.weight_edit import require_same_model
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import network_of

RIDGE = 1e-4  # Relative to the mean of C's diagonal.
_SINGULAR = 1e-12  # Ratio of the smallest to the largest pivot below which C counts as singular.

Covariance = SecondMoment | Tensor


@dataclass(frozen=True, eq=False)
class InverseMoment:
    """C⁻¹ in the form of a Cholesky factor, which takes much longer to compute than the product with a key.

    Attributes:
        covariance: C.
        factor: Float[d_mlp d_mlp], lower triangular factor of C plus the ridge, float64 on the CPU.
        ridge: Number that was added to C's diagonal: 0, or `RIDGE` times its mean if C is singular.
    """

    covariance: Covariance
    factor: Float[Tensor, "d_mlp d_mlp"]
    ridge: float

    @classmethod
    def of(cls, covariance: Covariance) -> "InverseMoment":
        """Factor C in float64.

        C is singular if it comes from fewer keys than it has rows. The criterion is a pivot of its Cholesky
        factorisation that is not positive, or below 1e-12 of the largest.

        Raises:
            ValueError: C is not symmetric, not finite, or has negative eigenvalues.
        """
        c = matrix_of(covariance)
        if not bool(c.isfinite().all()) or not torch.allclose(c, c.T, rtol=1e-5, atol=1e-8 * float(c.abs().max())):
            raise ValueError("the second moment is not a symmetric matrix of finite numbers; compute it again")
        ridge = 0.0
        factor, failed = torch.linalg.cholesky_ex(c)
        pivots = factor.diagonal().square()
        if int(failed) or float(pivots.min()) < _SINGULAR * float(pivots.max()):
            ridge = RIDGE * float(c.diagonal().mean())
            factor, failed = torch.linalg.cholesky_ex(c + ridge * torch.eye(len(c), dtype=c.dtype))
            if int(failed) or not ridge > 0:
                raise ValueError(
                    "the second moment is singular even with a ridge: it is zero or has negative eigenvalues, so it is "
                    "not E[k kᵀ] of any keys; compute it again with second_moment(), or edit without one"
                )
        return cls(covariance, factor, ridge)

    def times(self, keys: Float[Tensor, "d_mlp *rest"]) -> Float[Tensor, "d_mlp *rest"]:
        """C⁻¹ k in float64 for one key or for the columns of a matrix."""
        k = keys.cpu().double()
        return torch.cholesky_solve(k.reshape(len(k), -1), self.factor).reshape(k.shape)


def matrix_of(covariance: Covariance) -> Float[Tensor, "d_mlp d_mlp"]:
    """C in float64 on the CPU."""
    matrix = covariance.matrix if isinstance(covariance, SecondMoment) else covariance.detach()
    return matrix.cpu().double()


def require_covariance_of(model: DiffusionTransformer, layer: int, covariance: Covariance) -> None:
    """Raise a `ValueError` unless C may belong to the MLP of this block of this model."""
    if isinstance(covariance, SecondMoment):
        if covariance.layer != layer:
            raise ValueError(f"the edit is of layer {layer}, but the covariance was taken at layer {covariance.layer}")
        require_same_model("covariance", covariance.record, model)
    shape = list((covariance.total if isinstance(covariance, SecondMoment) else covariance).shape)
    n_units = model.blocks[layer].mlp.W_out.shape[0]
    if shape != [n_units, n_units]:
        raise ValueError(
            f"the covariance of layer {layer} is {shape}, and its MLP has {n_units} units; take it from the model that "
            "you edit"
        )


def describe_covariance(covariance: Covariance | None) -> dict[str, Any] | None:
    """What identifies C in a record; the record of a moment has the seed of its noise and the hash of its corpus."""
    if covariance is None:
        return None
    if isinstance(covariance, SecondMoment):
        names = ("key", "corpus_sha256", "corpus_texts", "seed")
        recorded = {name: covariance.record.get(name) for name in names}
        return {"layer": covariance.layer, "count": covariance.count, **recorded, **network_of(covariance.record)}
    return {"sha256": hashlib.sha256(matrix_of(covariance).contiguous().numpy().tobytes()).hexdigest()}
