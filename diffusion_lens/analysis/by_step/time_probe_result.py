"""The result of `probe_time`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.by_step.vectors_result import short_name
from diffusion_lens.display import PicturedResult, Table
from diffusion_lens.hook_names import nearest
from diffusion_lens.records import as_dataclass, load_result, save_result

_TENSORS = ("bias", "r2", "r2_fitted", "r2_shuffled", "penalty")


@dataclass(frozen=True, eq=False)
class TimeProbe(PicturedResult):
    """Linear probes of the denoising time, one for each hook point.

    Columns of the data frame: point, r2, r2_fitted, r2_shuffled, penalty.

    Attributes:
        weights: The weights by hook point, with the axes of the hook point after its positions, such as d_model.
        bias: Float[point].
        r2: Float[point], R² on the held-out texts or runs; NaN if they all have the same time.
        r2_fitted: Float[point], R² on the rows that the probe was fitted to.
        r2_shuffled: Float[point], R² on the held-out part of a probe of times that were permuted among the canvases.
        penalty: Float[point], relative penalty of each probe.
        r2_position: R² on the held-out part of the mean time of each position; NaN for `rows="canvas"`.
        record: Hook points, positions, kind of rows, split, penalties, seed, number of units and rows in each part,
            inputs, model, hash of the weights, hooks, versions.
    """

    weights: dict[str, Tensor]
    bias: Float[Tensor, "point"]
    r2: Float[Tensor, "point"]
    r2_fitted: Float[Tensor, "point"]
    r2_shuffled: Float[Tensor, "point"]
    penalty: Float[Tensor, "point"]
    r2_position: float
    record: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The hook points."""
        return tuple(self.weights)

    def predict(self, name: str, activations: Tensor) -> Float[Tensor, "*rest"]:
        """The time that the probe of a hook point reads from activations [... d_model], one for each state."""
        if name not in self.weights:
            raise KeyError(f"there is no probe of {name!r}; nearest are: {nearest(name, self.names)}")
        weights = self.weights[name].to(activations.device)
        if activations.shape[-weights.dim() :] != weights.shape:
            raise ValueError(
                f"the activations are {list(activations.shape)}; the probe of {name!r} reads [... {weights.shape[-1]}]"
            )
        states = activations.float().flatten(activations.dim() - weights.dim())
        times: Tensor = states @ weights.flatten() + self.bias[self.names.index(name)].to(activations.device)
        return times

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        tensors = {f"weights/{name}": x.contiguous() for name, x in self.weights.items()}
        tensors |= {name: getattr(self, name) for name in _TENSORS}
        return save_result(path, "time probe", tensors, {"r2_position": self.r2_position, "record": self.record})

    @classmethod
    def load(cls, path: str | Path) -> "TimeProbe":
        """Read what `save` wrote."""
        tensors, saved = load_result(path, "time probe")
        weights = {name: tensors[f"weights/{name}"] for name in saved["record"]["names"]}
        return as_dataclass(cls, {**tensors, **saved, "weights": weights})

    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """R² by hook point with both controls; returns the matplotlib axes."""
        lines = {"probe": self.r2, "times permuted": self.r2_shuffled}
        if self.record["rows"] == "position":
            lines["position only"] = torch.full_like(self.r2, self.r2_position)
        labels = [short_name(name) for name in self.names]
        title = title or "Linear probe of the denoising time"
        values = torch.stack(list(lines.values()))
        return plots.labelled_lines(values, list(lines), labels, "hook point", "R² on held-out runs", title, ax)

    def _table(self) -> Table:
        values = {name: getattr(self, name) for name in ("r2", "r2_fitted", "r2_shuffled", "penalty")}
        return Table({"point": self.names, **values})

    def __repr__(self) -> str:
        best = int(self.r2.nan_to_num(nan=-torch.inf).argmax())
        return f"TimeProbe({len(self.names)} hook points, best R² {float(self.r2[best]):.3f} at {self.names[best]!r})"
