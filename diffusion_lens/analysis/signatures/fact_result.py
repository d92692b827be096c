"""The signatures of one pair."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.records import load_fields, one_line, save_fields


@dataclass(frozen=True, eq=False)
class FactSignatures:
    """The signatures of one pair. The canvases are forward and reverse.

    Attributes:
        percentiles: Float[canvas estimate layer], share of the other candidates that the right answer's evidence
            exceeds, by the evidence of the own source, and in the mean by that of the sources of other facts of the
            batch.
        reuses: Float[layer], cosine of the evidence on the two canvases.
        cuts: Float[canvas layer], log p(answer) that is lost by cutting the edge from reader to source, in nats.
        routes: Float[route layer head], scores from reader to source: forward, reverse, and counterfactual. NaN where a
            causal model does not see the source.
        isotropic: Float[], correlation of the two scores for isotropic queries and keys; NaN without rotary positions.
        cosines: Float[parameter estimate], cosine of the gradients of the two losses: of the pair itself, and the mean
            over the forward gradient of this pair with the reverse gradients of the other pairs of its batch.
        transfers: Float[parameter], <g_forward, g_reverse> / |g_forward|².
        steps: Float[estimate], change of the reverse loss, in nats, by a small step on the forward loss: predicted to
            first order, and measured.
        probabilities: Float[canvas], p(answer).
    """

    percentiles: Float[Tensor, "canvas estimate layer"]
    reuses: Float[Tensor, "layer"]
    cuts: Float[Tensor, "canvas layer"]
    routes: Float[Tensor, "route layer head"]
    isotropic: Float[Tensor, ""]
    cosines: Float[Tensor, "parameter estimate"]
    transfers: Float[Tensor, "parameter"]
    steps: Float[Tensor, "estimate"]
    probabilities: Float[Tensor, "canvas"]

    __repr__ = one_line

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "signatures of a fact", self)

    @classmethod
    def load(cls, path: str | Path) -> "FactSignatures":
        """Read what `save` wrote."""
        return load_fields(path, "signatures of a fact", cls)

    def equals(self, other: "FactSignatures") -> bool:
        """Whether both are identical to the bit, NaN included."""
        pairs = [[getattr(each, name).contiguous().view(torch.int32) for each in (self, other)] for name in TENSORS]
        return all(torch.equal(one, another) for one, another in pairs)


TENSORS = tuple(field.name for field in fields(FactSignatures))


def no_rows(record: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a study of no pairs."""
    layers, heads, parameters = (
        record["architecture"]["n_layers"],
        record["architecture"]["n_heads"],
        len(record["parameters"]),
    )
    shapes = {
        "percentiles": (2, 2, layers),
        "reuses": (layers,),
        "cuts": (2, layers),
        "routes": (3, layers, heads),
        "isotropic": (),
        "cosines": (parameters, 2),
        "transfers": (parameters,),
        "steps": (2,),
        "probabilities": (2,),
    }
    return [torch.empty(0, *shapes[name]) for name in TENSORS]
