"""The rank-one edit (Meng et al. 2022, arXiv 2202.05262, eq. 2), which assigns a new value to one key of a memory.

    ΔW = (v* − W k_p) (C⁻¹ k*)ᵀ / ((C⁻¹ k*)ᵀ k_p)

W is the down-projection of one MLP, k* the subject's key, and k_p its key in the plain request, which the edited W maps
exactly to v*. Keys orthogonal to C⁻¹ k* keep their values. As in ROME's code, the direction comes from the mean key and
the length from the plain one. Without a second moment, C = I.

In a network that is told the time, the output of W passes a gate before it is added to the stream, and v* is what is
added. The edit therefore assigns v* / gate, with the gate at the time of the search for v* (`model.at_time(t)`). At
that time the key has the value v*; at another time t' it has v* · gate(t') / gate(t), entry by entry.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.rome.covariance import SecondMoment
from diffusion_lens.analysis.rome.edited_layer import pick_edited_layer
from diffusion_lens.analysis.rome.inverse_moment import Covariance, InverseMoment, require_covariance_of
from diffusion_lens.analysis.rome.keys import KeyResult
from diffusion_lens.analysis.rome.values import ValueResult
from diffusion_lens.analysis.rome.weight_edit import Factors, WeightEdit, before_gate, require_same_model
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import network_of
from diffusion_lens.settings import Whole


class RankOneEdit(WeightEdit):
    """One edit of one model: `with edit: ...`, or `edit.apply()` and `edit.revert()`.

    The weight is written in place, and restored bit for bit. Edits can be nested: each starts from the current W, and
    the last one applied is the first to be reverted. A `with` restores the weight that it began with, also after an
    exception. Other changes to that weight inside it are undone too, which raises a `ValueError`. Arithmetic is in
    float64, whatever the model's dtype.

    Args:
        model: The model to edit.
        layer: Number of the block, negative ones from the end; key and value must belong to this layer.
        key: k*.
        value: v*, with k_p.
        covariance: `second_moment(...)`, or C itself, Float[d_mlp d_mlp]. Factoring a large C takes most of the time of
            an edit, so give many edits one `InverseMoment.of(...)` of either.

    Attributes:
        taken_from: Weights, hooks and modules with which key, value and covariance were computed; `None` for a bare C.
            They may differ from the edited weights, for example in nested edits.

    Raises:
        ValueError: Key, value, covariance and layer do not belong together or come from another model, C cannot be
            inverted, or the two keys are orthogonal under C.
    """

    def __init__(
        self,
        model: DiffusionTransformer,
        layer: Whole,
        key: KeyResult,
        value: ValueResult,
        covariance: Covariance | InverseMoment | None = None,
    ) -> None:
        layer = pick_edited_layer(model, layer)
        for name, part in (("key", key), ("value", value)):
            if part.layer != layer:
                raise ValueError(f"the edit is of layer {layer}, but the {name} was taken at layer {part.layer}")
            require_same_model(name, part.record, model)
        c = covariance.covariance if isinstance(covariance, InverseMoment) else covariance
        if c is not None:
            require_covariance_of(model, layer, c)
        moment = c.record if isinstance(c, SecondMoment) else None
        records = {"key": key.record, "value": value.record, "covariance": moment}
        self.taken_from = {name: None if record is None else network_of(record) for name, record in records.items()}
        self.model, self.layer = model, layer
        self._target = before_gate(value.vector.cpu().double(), value.gate)
        self._plain_key = value.key.cpu().double()
        self.direction, self.ridge = self._solve(key, covariance)

    @property
    def layers(self) -> list[int]:
        """The edited block."""
        return [self.layer]

    @property
    def weight(self) -> Float[Tensor, "d_model d_mlp"]:
        """The down-projection as it is now."""
        return self.weight_of(self.layer)

    @torch.no_grad()
    def update(self) -> Float[Tensor, "d_model d_mlp"]:
        """ΔW for the weight as it is now, float64 on the CPU."""
        return self.factors(self.layer).product()

    @torch.no_grad()
    def factors(self, layer: int) -> Factors:
        """The two vectors whose outer product is ΔW, for the weight as it is now."""
        return Factors(self._missing()[:, None], self.direction[:, None])

    def describe(self) -> dict[str, Any]:
        """Layer, ridge, and the networks that key, value and covariance were taken from."""
        return {"layer": self.layer, "ridge": self.ridge, "taken_from": self.taken_from}

    def _solve(self, key: KeyResult, covariance: Covariance | InverseMoment | None) -> tuple[Tensor, float]:
        """C⁻¹ k*, scaled so that its product with k_p is 1, and the ridge that was added to C."""
        mean_key, ridge = key.vector.cpu().double(), 0.0
        sizes = (len(self._target), len(mean_key), len(self._plain_key))
        if sizes != (self.weight.shape[0], self.weight.shape[1], self.weight.shape[1]):
            raise ValueError(
                f"the value has {sizes[0]} entries and the keys {sizes[1]} and {sizes[2]}, but the weight of layer "
                f"{self.layer} is {list(self.weight.shape)}: they come from another model"
            )
        solved = mean_key
        if covariance is not None:
            inverse = covariance if isinstance(covariance, InverseMoment) else InverseMoment.of(covariance)
            solved, ridge = inverse.times(mean_key), inverse.ridge
        overlap = float(solved @ self._plain_key)
        if not abs(overlap) > 1e-9 * float(solved.norm() * self._plain_key.norm()):
            raise ValueError(
                f"the mean key and the plain one have an overlap of {overlap:.1e}, so v* cannot affect the request; "
                "take key and value from the same subject"
            )
        return solved / overlap, ridge

    def _missing(self) -> Float[Tensor, "d_model"]:
        """v* − W k_p, for the weight as it is now."""
        mlp = self.model.blocks[self.layer].mlp
        missing: Tensor = self._target - self.weight.cpu().double() @ self._plain_key - mlp.b_out.cpu().double()
        return missing
