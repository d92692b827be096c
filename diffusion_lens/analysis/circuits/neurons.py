"""Attribution to single neurons of MLPs: which of them carry what the clean run has and the corrupted run lacks?

The score of neuron n at position i of block l is that of a node (`attribution.py`), with the neuron's activation h, the
input of the down-projection (`mlp.hook_post`), in the place of a writer's output:

    (h_clean - h_corrupted) · dM/dh,

with the gradient averaged over `ig_steps` runs. It estimates the effect of patching this neuron alone, which
`patch_grid(..., "post", neurons=[...])` measures. The down-projection is linear, so the scores of all neurons of a
block, over all positions, add up to the score of its MLP in `node_attribution`.

Hidden layers are wide and few neurons matter (Dai et al. 2022, "Knowledge neurons", arXiv 2104.08696, attribute facts
to some by integrated gradients too), so the result keeps the `top` largest, and which share of all they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.circuits.attribution import IntegrationPath, MovedRun, Passes, attribute
from diffusion_lens.analysis.circuits.graph import Graph
from diffusion_lens.analysis.patching.grid import Patchable, PatchInputs, require_neurons
from diffusion_lens.analysis.patching.metrics import Metric, Reading
from diffusion_lens.analysis.patching.runs import PATCH_SITES, Side
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.plots import readable
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table
from diffusion_lens.settings import Whole, at_least, pick_indices
from diffusion_lens.settings.figures import styled


@dataclass(frozen=True, eq=False, repr=False)
class NeuronScores(PicturedResult, Saved):
    """The neurons with the largest scores of each step; all others are left out.

    Columns of the data frame: step (of a trajectory), layer, pos, neuron, token, score.

    Attributes:
        scores: Float[entry], estimated change of the metric if the neuron's clean activation replaces that of the
            corrupted run, summed over rows; the largest absolute scores of a step first.
        cells: Int[entry axis], step (index among the steps; 0 without steps), layer, position and neuron of each score.
        total: Float[*step], sum of the scores of all neurons of the chosen layers and positions.
        kept: Float[*step], share of the sum of their absolute scores that these neurons have; NaN where this sum is 0.
        clean, corrupted: Float[*step], metric of both runs.
        words: Text at each position of the corrupted run, of each step.
        record: Layers, positions, and the entries of `NodeScores`.
    """

    KIND = "neuron scores"
    SHOWS = (
        "the effect on the metric of the strongest neurons, estimated by attribution and summed by position and layer"
    )
    ENTRIES: ClassVar[Mapping[str, Any]] = {"steps": list[int] | None, "layers": list[int]}

    scores: Float[Tensor, "entry"]
    cells: Int[Tensor, "entry 4"]
    total: Float[Tensor, "*step"]
    kept: Float[Tensor, "*step"]
    clean: Float[Tensor, "*step"]
    corrupted: Float[Tensor, "*step"]
    words: list[list[str]]
    record: dict[str, Any]

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("*step", self.record["steps"]),)

    def _check(self) -> None:
        sizes = torch.tensor([len(self.words), max(self.record["layers"]) + 1, max(map(len, self.words))])
        if bool((self.cells < 0).any() | (self.cells[:, :3] >= sizes).any()):
            raise ValueError("cells has a step, layer or position that there is not")

    def by_position(self, step: int | None = None) -> Float[Tensor, "pos layer"]:
        """Sum of the kept scores at each position and layer, of one of the `steps` where there are several.

        Raises:
            ValueError: There is no such step, or several and none is given.
        """
        index = self._index(step)
        layers = self.record["layers"]
        sums = torch.zeros(len(self.words[index]), len(layers), dtype=self.scores.dtype)
        for score, (at_step, layer, position, _) in zip(self.scores, self.cells.tolist(), strict=True):
            if at_step == index:
                sums[position, layers.index(layer)] += score
        return sums

    @styled
    def plot(self, step: int | None = None, ax: Any = None, title: str | None = None) -> Any:
        """Heat map of `by_position`: positions down, layers across. Returns the matplotlib axes."""
        sums, index = self.by_position(step), self._index(step)
        bound = float(sums.abs().max())
        return plots.labelled_map(
            sums,
            rows=self.words[index],
            layers=self.record["layers"],
            xlabel="layer",
            hue="RdBu",
            limits=(-bound, bound),
            bar="score",
            title=title
            or f"{int((self.cells[:, 0] == index).sum())} neurons, {float(self.kept.view(-1)[index]):.0%} of all",
            ax=ax,
        )

    def _picture(self) -> Any:
        """The first step, where there are several."""
        return self.plot(None if self.record["steps"] is None else self.record["steps"][0])

    def _table(self) -> Table:
        steps, layers, positions, neurons = self.cells.T.tolist()
        columns = {"layer": layers, "pos": positions, "neuron": neurons}
        if self.record["steps"] is not None:
            columns = {"step": [self.record["steps"][i] for i in steps], **columns}
        words = [self.words[step][position] for step, position in zip(steps, positions, strict=True)]
        return Table({**columns, "token": words, "score": self.scores}, most="score")

    def _index(self, step: int | None) -> int:
        steps = self.record["steps"]
        if (steps is None) != (step is None) or (steps is not None and step not in steps):
            raise ValueError(f"step={step}; the steps of these scores are {steps}: give one of them, or none if None")
        return 0 if steps is None else int(steps.index(step))


@begins_run
@torch.inference_mode(False)
@torch.no_grad()
def neuron_attribution(
    model: DiffusionTransformer,
    clean: Patchable,
    corrupted: Patchable,
    metric: Metric,
    steps: Iterable[Whole] | None = None,
    *,
    layers: Iterable[Whole] | None = None,
    positions: Iterable[Whole] | None = None,
    top: Whole = 100,
    ig_steps: Whole = 5,
    logits_at: Sequence[int] | Tensor | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> NeuronScores:
    """The neurons of MLPs with the largest scores: (clean - corrupted activation) times the metric's gradient.

    Args:
        model, clean, corrupted, metric, steps, logits_at, max_bytes, progress: The same as in `node_attribution`.
        layers: Blocks whose neurons are scored, negative ones from the end; by default all that have one MLP.
        positions: Positions at which they are scored, negative ones from the end of the longest canvas; by default
            all. At steps before it is reached, a position has no scores.
        top: Number of neurons to keep of each step.
        ig_steps: Number of gradients that are averaged; 1 is the gradient of the corrupted run, and gives the estimates
            of `patch_grid(..., "post", neurons=[...], method="attribution")`.

    Raises:
        ValueError: As in `node_attribution`, or a block has experts in place of one MLP: their neurons differ from
            position to position.
    """
    experts = model.cfg.experts
    dense = [i for i in range(model.cfg.n_layers) if experts is None or not experts.layers[i]]
    chosen = dense if layers is None and dense else pick_indices("layers", layers, model.cfg.n_layers)
    require_neurons(model, chosen)
    count, averaged = at_least(1, "top", top), IntegrationPath(ig_steps, "inputs")
    inputs, reading = PatchInputs.of(model, clean, model, corrupted, steps), Reading.of(metric, logits_at)
    seen: list[Side] = []
    passes = partial(_NeuronPasses, chosen, seen)
    scored, _, record = attribute(passes, inputs, reading, averaged, max_bytes, progress)

    # Of each step, the largest of the chosen positions that it has reached.
    entries, cells, measures = [], [], []
    selected_positions = pick_indices("positions", positions, max(side.n_canvas for side in seen))
    for index, ((scores, of_clean, of_corrupted), side) in enumerate(zip(scored, seen, strict=True)):
        at = [position for position in selected_positions if position < side.n_canvas]
        selected = scores[:, at]
        flat = selected.flatten().double()
        best = flat.abs().topk(min(count, len(flat))).indices
        layer, place, neuron = torch.unravel_index(best, selected.shape)
        entries.append(flat[best])
        found = (
            torch.full_like(layer, index),
            torch.tensor(chosen)[layer],
            torch.tensor(at, dtype=torch.long)[place],
            neuron,
        )
        cells.append(torch.stack(found, dim=1))
        measures.append(torch.stack([flat.sum(), flat[best].abs().sum() / flat.abs().sum(), of_clean, of_corrupted]))
    total, kept, of_clean, of_corrupted = torch.stack(measures, dim=1) if steps is not None else measures[0]
    return NeuronScores(
        scores=torch.cat(entries).float(),
        cells=torch.cat(cells),
        total=total,
        kept=kept,
        clean=of_clean,
        corrupted=of_corrupted,
        words=[[readable(word) for word in model.words(side.tokens[0, : side.n_canvas].tolist())] for side in seen],
        record={**record, "layers": chosen, "top": count},
    )


class _NeuronPasses(Passes):
    """Gradients at the neurons of some blocks; the corrupted sides are appended to `seen`."""

    def __init__(
        self, layers: Sequence[int], seen: list[Side], graph: Graph, clean: Side, corrupted: Side, max_bytes: int
    ) -> None:
        self.points = [PATCH_SITES["post"].hook_point(layer) for layer in layers]
        super().__init__(graph, clean, corrupted, max_bytes)
        seen.append(corrupted)

    def _choose_points(self) -> None:
        # The integration moves the embeddings; the neurons of a block are one writer here.
        names = ["hook_embed", *self.points]
        self.writer_points = {name: range(i, i + 1) for i, name in enumerate(names)}
        self.gradient_points = self.points

    def _copy_bytes(self) -> int:
        return self.given.stored_bytes(self.points)

    def _contracted(self, gradients: Mapping[str, Tensor], run: MovedRun | None) -> Float[Tensor, "layer pos d_mlp"]:
        products = (self.change[name][:, :, 0] * gradients[name].to(self.change[name]) for name in self.points)
        return torch.stack([each.sum(dim=0).cpu() for each in products])
