"""Edits of down-projections, which ROME and MEMIT compute.

An edit adds to the down-projection W of each of its blocks a product A Bᵀ of few columns.
"""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.model.weights import Edit
from weight_conversion import export


class Factors(NamedTuple):
    """The factors of an update ΔW = A Bᵀ, A and B, in float64 on the CPU."""

    left: Float[Tensor, "d_model rank"]
    right: Float[Tensor, "d_mlp rank"]


def before_gate(added: Float[Tensor, "*rest d_model"], gate: Float[Tensor, "d_model"] | None) -> Tensor:
    """What a down-projection has to write so that `added` is added to the stream behind its gate; a `ValueError` if an
    entry of the gate is 0, so that nothing reaches the stream there."""
    if gate is None:
        return added
    if not bool(gate.all()):
        raise ValueError(
            "the gate of this MLP is 0 in some entries at this time, so no weight can write there: edit another layer, "
            "or at another time, `with model.at_time(t):`"
        )
    return added / gate.cpu().double()


class WeightEdit(Edit):
    """An edit of down-projections of one model, applied and reverted like every `Edit`."""

    @abstractmethod
    def factors(self, layer: int) -> Factors:
        """The update of the down-projection of block `layer`, for the weight as it is now."""

    @property
    def weights(self) -> list[str]:
        return [f"blocks.{layer}.mlp.down.weight" for layer in self.layers]

    def update_of(self, name: str) -> Tensor:
        return self.update(int(name.split(".")[1]))

    def say_weight(self, name: str) -> str:
        return f"the weight of layer {name.split('.')[1]}"

    def weight_of(self, layer: int) -> Float[Tensor, "d_model d_mlp"]:
        """The down-projection of block `layer` as it is now."""
        weight: Tensor = self.model.blocks[layer].mlp.down.weight
        return weight

    @torch.no_grad()
    def update(self, layer: int | None = None) -> Float[Tensor, "d_model d_mlp"]:
        """ΔW of block `layer`, by default the first, for the weight as it is now; float64 on the CPU."""
        left, right = self.factors(self.layers[0] if layer is None else layer)
        return left @ right.T

    def export(self, path: str | Path) -> Path:
        """Write the edited model in its checkpoint's own format; the edit need not be applied."""
        if self.is_applied:
            return export(self.model.state_dict(), self.model.cfg.architecture, path)
        with self:
            return self.export(path)


def require_same_model(name: str, record: Mapping[str, Any] | None, model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if a part was taken from another model. The model's weights may have been edited since."""
    edited = {"model": model.cfg.model_name, "architecture": model.cfg.architecture.to_dict()}
    if record is not None and any(record.get(name, value) != value for name, value in edited.items()):
        raise ValueError(
            f"the {name} was taken from another model or architecture ({record.get('model')!r}) than the edited model "
            f"({model.cfg.model_name!r}); take it from the model that you edit"
        )
