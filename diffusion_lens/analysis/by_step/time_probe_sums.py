"""The sums of a time probe: those of the regressions, and those of the predictor that knows the position only."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.by_step.ridge import Moments
from diffusion_lens.hook_names import Hook
from diffusion_lens.shapes import PosMask

PARTS = ("train", "validation", "held_out")


class ProbeSums:
    """Sums by hook point and part, and those of the predictor that knows the position only."""

    def __init__(self, names: list[str], rows: str, n_ctx: int) -> None:
        self.names, self.rows = names, rows
        self.moments: dict[str, dict[str, Moments]] = {name: {} for name in names}
        self.shapes: dict[str, torch.Size] = {}
        # By part: number of rows, sum of t, and sum of t², at each position.
        self._positions = {part: torch.zeros(3, n_ctx, dtype=torch.float64) for part in PARTS}

    def n_rows(self, part: str) -> int:
        """Number of rows of a part."""
        moments = self.moments[self.names[0]].get(part)
        return 0 if moments is None else moments.n

    def hooks(
        self, selected: Sequence[PosMask], parts: list[str], targets: Float[Tensor, "canvas batch axis"]
    ) -> list[tuple[str, Hook]]:
        """Hooks of a pass that add the rows of each of its canvases."""

        def add(activation: Tensor, hook: Any) -> None:
            self.shapes[hook.name] = activation.shape[2:]
            for inside, times in zip(selected, targets, strict=True):
                for part in set(parts):
                    own = torch.tensor([each == part for each in parts], device=inside.device)
                    x, y = self._rows(activation.flatten(2), inside & own[:, None], times)
                    if len(x):
                        moments, before = Moments.of(x, y), self.moments[hook.name].get(part)
                        self.moments[hook.name][part] = moments if before is None else before + moments

        return [(name, add) for name in self.names]

    def _rows(
        self, states: Float[Tensor, "batch pos d"], inside: PosMask, times: Float[Tensor, "batch axis"]
    ) -> tuple[Float[Tensor, "entry d"], Float[Tensor, "entry axis"]]:
        """The selected states and their times, in float64."""
        # Apple's GPUs have no float64.
        device = torch.device("cpu") if states.device.type == "mps" else states.device
        inside, times = inside.to(states.device), times.to(device)
        if self.rows == "position":
            return states[inside].to(device).double(), times[inside.nonzero()[:, 0].to(device)].double()
        some = inside.any(dim=1).nonzero()[:, 0].tolist()
        means = [states[row, inside[row]].to(device).double().mean(dim=0) for row in some]
        return torch.stack(means) if some else states.new_empty(0, states.shape[2]), times[some].double()

    def count(self, selected: PosMask, parts: list[str], times: Float[Tensor, "batch"]) -> None:
        """Add the selected positions of a pass with their times."""
        inside, n_pos = selected.cpu().double(), selected.shape[1]
        powers = torch.stack([torch.ones_like(times), times, times * times]).double()
        for part in set(parts):
            rows = torch.tensor([own == part for own in parts])
            self._positions[part][:, :n_pos] += powers[:, rows] @ inside[rows]

    def position_r2(self) -> float:
        """R² on the held-out part of the mean t of each position, or of all positions where it was never seen."""
        n, total, _ = self._positions["train"] + self._positions["validation"]
        mean = torch.where(n > 0, total / n, total.sum() / n.sum())
        count, y, yy = self._positions["held_out"]
        residual = (yy - 2 * mean * y + count * mean * mean).sum()
        spread = yy.sum() - y.sum() ** 2 / count.sum()
        return float(1 - residual / spread) if spread > 0 else float("nan")
