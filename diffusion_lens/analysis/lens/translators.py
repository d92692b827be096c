"""`Translators`: an affine map for each layer, to states that the last norm and the unembedding can read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.display import Result, Table
from diffusion_lens.identity import identity_of
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, save_fields, shown_model


@dataclass(frozen=True, eq=False)
class Translators(Result):
    """The affine maps of a tuned lens, h + h W + b; with W = 0 and b = 0, the lens is the direct one.

    Columns of the data frame: iteration, layer, loss.

    Attributes:
        weights: Float[layer d_model d_model], W of each layer.
        biases: Float[layer d_model], b of each layer.
        layers: Number of each layer: layer l is the state that enters block l.
        losses: Float[iteration layer], mean KL in nats of each batch, before its update.
        record: Settings of the fit, model, hash of the weights, hooks, versions.
    """

    weights: Float[Tensor, "layer d_model d_model"]
    biases: Float[Tensor, "layer d_model"]
    layers: list[int]
    losses: Float[Tensor, "iteration layer"]
    record: dict[str, Any] = field(repr=False)

    def translate(self, states: Float[Tensor, "*rest d_model"], layer: int) -> Float[Tensor, "*rest d_model"]:
        """The states of a layer, translated in float32 at least; those of the last layer are returned unchanged."""
        if layer not in self.layers:
            return states
        index = self.layers.index(layer)
        weight, bias = (x[index].to(states.device) for x in (self.weights, self.biases))
        return translated(states, weight, bias)

    def require_for(self, model: DiffusionTransformer, layers: Sequence[int]) -> None:
        """Raise a `ValueError` unless the maps were fitted on this model's weights, for all these layers."""
        if self.record["weights_sha256"] != identity_of(model).weights_sha256:
            raise ValueError(
                f"the translators were fitted on other weights ({self.record['model']!r}) than those of "
                f"{model.cfg.model_name!r} now, whose states they do not translate: fit_translators(model, ...)"
            )
        if missing := [layer for layer in layers if layer not in (*self.layers, model.cfg.n_layers)]:
            raise ValueError(
                f"the translators were fitted for the layers {self.layers}, and not for {missing}: fit these too, or "
                f"read layers={[*self.layers, model.cfg.n_layers]}"
            )

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "translators", self)

    @classmethod
    def load(cls, path: str | Path) -> "Translators":
        """Read what `save` wrote."""
        return load_fields(path, "translators", cls)

    def _table(self) -> Table:
        return Table.of_cells({"iteration": range(len(self.losses)), "layer": self.layers}, {"loss": self.losses})

    def __repr__(self) -> str:
        return f"Translators({shown_model(self.record)}, layers {self.layers}, {len(self.losses)} iterations)"


def translated(
    states: Float[Tensor, "*rest d_model"], weight: Float[Tensor, "d_model d_model"], bias: Float[Tensor, "d_model"]
) -> Float[Tensor, "*rest d_model"]:
    """h + h W + b, in the dtype of the states."""
    wide = states.to(torch.promote_types(states.dtype, weight.dtype))
    return (wide + wide @ weight.to(wide.dtype) + bias.to(wide.dtype)).to(states.dtype)
