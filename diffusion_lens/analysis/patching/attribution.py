"""Attribution patching (Nanda 2023, "Attribution Patching: Activation Patching At Industrial Scale").

To first order, patching a state a into the corrupted run changes the metric M by

    (a_clean - a_corrupted) · dM/da, the gradient taken at the corrupted run.

One forward pass of the clean input, and one forward and one backward pass of the corrupted one, estimate every cell of
every site at once. The estimate is less accurate the more nonlinear M is between the two runs. So the cells with the
largest estimates are also patched exactly, and the result contains the differences.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.analysis.kept_run import KeptRun
from diffusion_lens.analysis.patching.runs import Side, SidePair
from diffusion_lens.analysis.patching.sites import Cells, Site, Sweep


@dataclass(frozen=True, eq=False)
class EstimateError:
    """Estimated and exact effects of the cells with the largest estimates.

    Attributes:
        cells: Int[cell axis], index of each cell in the scores of the grid.
        estimated: Float[cell], estimated effect of each cell, score - corrupted.
        exact: Float[cell], effect of each cell when it is patched.
    """

    cells: Int[Tensor, "cell axis"]
    estimated: Float[Tensor, "cell"]
    exact: Float[Tensor, "cell"]

    @classmethod
    def by_step(cls, errors: Sequence["EstimateError | None"]) -> "EstimateError | None":
        """Joins the errors of several steps; the index of the step comes first in `cells`."""
        present = [(step, error) for step, error in enumerate(errors) if error is not None]
        if not present:
            return None
        return cls(
            torch.cat([F.pad(error.cells, (1, 0), value=step) for step, error in present]),
            torch.cat([error.estimated for _, error in present]),
            torch.cat([error.exact for _, error in present]),
        )

    @property
    def difference(self) -> Float[Tensor, "cell"]:
        """Estimated minus exact effect of each cell."""
        return self.estimated - self.exact

    @property
    def max_abs(self) -> float:
        """Largest absolute difference."""
        return float(self.difference.abs().max())

    @property
    def correlation(self) -> float:
        """Pearson's correlation of estimated and exact effects; NaN for fewer than two cells, or if all are equal."""
        if len(self.exact) < 2:
            return math.nan
        return float(torch.corrcoef(torch.stack([self.estimated, self.exact]))[0, 1])


def run_with_gradients(side: Side, names: Iterable[str], points: Collection[str]) -> tuple[KeptRun, dict[str, Tensor]]:
    """A pass with the activations at `names` stored, and the metric's gradient at some of them, `points`.

    Only activations are differentiated: no parameter gets a gradient, whether it is frozen or not.

    Raises:
        ValueError: The metric has no gradient.
    """
    given = side.input
    embedded = given.embed()
    with torch.enable_grad():
        run = given.run(names, embedded.clone().requires_grad_())
        score = side.reading(run.logits)
        if not score.requires_grad:
            raise ValueError(
                "method='attribution' needs the metric's gradient, and it has none: compute the metric from the logits "
                "with torch, without .item(), .detach() or argmax"
            )
        with given.at_step():
            gradients = torch.autograd.grad(score, [run.activations[name] for name in points])
    states = {name: state.detach() for name, state in run.activations.items()}
    return KeptRun(given, states, run.logits.detach()), dict(zip(points, gradients, strict=True))


def sweep_by_gradient(
    pair: SidePair, sweep: Sweep, cells: Cells, check: int
) -> tuple[Float[Tensor, "layer *cell"], EstimateError | None]:
    """The estimated score of every cell of a site, and the error of the `check` largest estimates."""
    # 1. Estimate every cell from the gradients.
    site, layers = sweep.site, sweep.layers
    effects = torch.stack([_estimated_effects(pair, site, layer, cells) for layer in layers])
    scores = (pair.corrupted_score + effects).view(len(layers), *cells.shape)

    # 2. Patch the cells with the largest estimates exactly.
    flat = effects.flatten()
    largest = flat.abs().nan_to_num(nan=-1).topk(min(check, len(flat))).indices.sort().values
    largest = largest[~flat[largest].isnan()]
    if not len(largest):
        return scores, None
    selected = [
        (layer, cells.pick((largest[largest // cells.n == index] % cells.n).to(cells.cell.device)))
        for index, layer in enumerate(layers)
    ]
    exact = pair.patched_scores(site, selected)
    indices = torch.stack(torch.unravel_index(largest, scores.shape), dim=1)
    return scores, EstimateError(indices, flat[largest], torch.cat(exact) - pair.corrupted_score)


def _estimated_effects(pair: SidePair, site: Site, layer: int, cells: Cells) -> Float[Tensor, "cell"]:
    """The first-order effect of each cell of a layer; NaN for a cell without a position."""
    clean, corrupted = pair.states(site, layer)
    gradient = cells.from_corrupted(site.with_positions_first(pair.gradients[site.hook_point(layer)]))
    wide = torch.promote_types(gradient.dtype, torch.float32)
    change = cells.from_clean(clean).to(wide) - cells.from_corrupted(corrupted).to(wide)
    terms = (change * gradient.to(wide)).flatten(1).sum(dim=1)
    effects = terms.new_zeros(cells.n).index_add(0, cells.cell, terms)
    return effects.masked_fill(~cells.present, math.nan).cpu()
