"""Trains one small network for each cell of the experiment, and measures it during the training.

Shin et al. (arXiv 2602.02133) explain the reverse recall of masked diffusion models by positions that are relative:
they turn queries and keys only, so that forward and reverse questions share their evidence, and their routes correlate.
If that is necessary, reverse recall should vanish with other positions while all else is fixed. So the experiment
changes only the positions: the data, the recipe, the number of steps and, for each seed, the initial weights are the
same in all cells of one depth; a seed gives networks of another depth other weights.

Two of the kinds decide the question by symmetry. Without positions, or with a bias by |i - j| only, a bidirectional
network computes the same logits for a text and its mirror image, at mirrored positions. "[M] is B" is the mirror image
of "B is [M]": whatever such a network learns forward, it knows in reverse, with no relative rotation at all.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch

from diffusion_lens.analysis.over_facts.executor import Executes, torch_threads
from diffusion_lens.analysis.over_facts.folder import Shard
from diffusion_lens.analysis.over_facts.study import Compute, Study
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.records.results import installed_version
from diffusion_lens.settings import Whole, at_least
from diffusion_lens.training.trainer import TrainingConfig, train
from one_layer.objectives import OBJECTIVES
from one_layer.result import CellCurves, OneLayerStudy
from one_layer.toy import DATA, INFILL, MEASURES, VARIANTS, Cell, architecture, infill_accuracy, measure, sentences
from weight_conversion import PositionKind

POSITIONS: tuple[PositionKind, ...] = get_args(PositionKind)
DEPTHS, SEEDS, STEPS = (1, 2, 4), 3, 600
_HALVINGS = 5


def one_layer_study(
    *,
    positions: Sequence[str] = POSITIONS,
    data: Sequence[str] = DATA,
    depths: Sequence[Whole] = DEPTHS,
    seeds: Whole = SEEDS,
    steps: Whole = STEPS,
    variants: Sequence[str] = VARIANTS,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> OneLayerStudy:
    """Train and measure the MDM and its AR baseline, or other variants, in every combination of the arguments.

    Gradients are clipped at norm 1, as in SMDM's recipe.

    Args:
        positions: Kinds of positions: "rotary", "standard", "none", "alibi".
        data: Names of the sentences: "one-way", "both-ways", "mixed" (`one_layer.toy`).
        depths: Numbers of layers.
        seeds: Number of seeds, from 0 on.
        steps: Number of training steps. Networks are measured before the first and after steps, steps/2, ...,
            steps/32.
        variants: "mdm", "ar" and the other objectives of the AR network (`one_layer.objectives`). With one of these,
            `INFILL` is measured too.
        out: Folder for one file per training. A call that finds trainings there computes only the others. The folder
            belongs to these arguments: to add seeds, depths or kinds, name another one. By default nothing is written.
        shard: (i, n) or "i/n": the trainings i, i + n, i + 2n, ... only; `OneLayerStudy.merge` joins them.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that trains the networks; by default this process does.

    Raises:
        ValueError: An argument is empty, unknown, named twice or out of range; or the folder contains another study.
    """
    record = describe(positions, data, depths, seeds, steps, variants)
    cells = {cell_id: Cell(**cell) for cell_id, cell in record["facts"].items()}
    job = TrainingJob(cells, int(steps), tuple(record["measures"]))
    study = Study(None, record, [[cell_id] for cell_id in cells], job)
    return study.collect(OneLayerStudy, out, shard, progress, executor)


@dataclass(frozen=True)
class TrainingJob:
    """The trainings of some cells.

    Attributes:
        cells: Cells by id.
        steps: Number of training steps.
        measures: What is measured of the networks.
    """

    cells: Mapping[str, Cell]
    steps: int
    measures: tuple[str, ...]

    def part(self, ids: Sequence[str]) -> "TrainingJob":
        """The job with these cells."""
        return replace(self, cells={cell_id: self.cells[cell_id] for cell_id in ids})

    def on(self, model: None) -> Compute:
        """The function that trains and measures some networks."""
        return lambda batch: [train_cell(self.cells[cell_id], self.steps, self.measures) for cell_id in batch]


def describe(
    positions: Sequence[str],
    data: Sequence[str],
    depths: Sequence[Whole],
    seeds: Whole,
    steps: Whole,
    variants: Sequence[str] = VARIANTS,
) -> dict[str, Any]:
    """The record of a study, before anything is trained; errors as in `one_layer_study`."""
    cells, n_steps = cells_of(positions, data, depths, seeds, variants), at_least(1, "steps", steps)
    has_others = any(cell.variant in OBJECTIVES for cell in cells)
    return {
        "recipe": {name: value for name, value in asdict(recipe(n_steps, seed=0)).items() if name != "seed"},
        "measured_at": measured_at(n_steps),
        "measures": [*MEASURES, *([INFILL] if has_others else [])],
        "facts": {cell.id: asdict(cell) for cell in cells},
        "set_aside": {},
        "versions": {
            "diffusion-lens": installed_version("diffusion-lens"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def cells_of(
    positions: Sequence[str],
    data: Sequence[str],
    depths: Sequence[Whole],
    seeds: Whole,
    variants: Sequence[str] = VARIANTS,
) -> list[Cell]:
    """Every training of a study; a `ValueError` for an argument that does not fit."""
    all_variants = (*VARIANTS, *OBJECTIVES)
    for name, given, known in (
        ("positions", positions, POSITIONS),
        ("data", data, DATA),
        ("variants", variants, all_variants),
    ):
        if isinstance(given, str):
            raise ValueError(f"{name}={given!r}; give a sequence of names, such as [{given!r}]")
        if unknown := [each for each in given if each not in known]:
            raise ValueError(f"{name}={unknown[0]!r}; it must be one of {', '.join(known)}")
    layers = [at_least(1, "depths", depth) for depth in depths]
    for name, values in (("positions", positions), ("data", data), ("depths", layers), ("variants", variants)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name}={list(values)}; give at least one, and each once")
    return [
        Cell(kind, variant, sentences_of, depth, seed)
        for depth, sentences_of, kind, variant, seed in product(
            layers,
            data,
            [kind for kind in POSITIONS if kind in positions],
            [variant for variant in all_variants if variant in variants],
            range(at_least(1, "seeds", seeds)),
        )
    ]


def recipe(steps: int, seed: int) -> TrainingConfig:
    """AdamW with torch's defaults, a constant learning rate of 2e-3, gradients clipped at norm 1, on batches of 64."""
    return TrainingConfig(
        steps=steps,
        batch_size=64,
        lr=2e-3,
        lr_end=2e-3,
        betas=(0.9, 0.999),
        weight_decay=0.01,
        decay_norms=True,
        warmup=0,
        clip=1.0,
        seed=seed,
    )


def measured_at(steps: int) -> list[int]:
    """The numbers of steps after which a network is measured."""
    return sorted({0, *(-(-steps // 2**i) for i in range(_HALVINGS + 1))})


def train_cell(cell: Cell, steps: int, measures: Sequence[str] = tuple(MEASURES)) -> CellCurves:
    """Train one network, and take these measures on the way.

    On one thread sums have one order, and matrices this small are no faster on several.
    """
    with torch_threads(1):
        model = build(cell)
        taken = measured_at(steps)
        evaluate = _measuring(cell, measures)
        first = evaluate(model)
        training = train(
            model,
            sentences(cell.data),
            recipe(steps, cell.seed),
            objective=OBJECTIVES[cell.variant].loss if cell.variant in OBJECTIVES else None,
            evaluate=evaluate,
            evaluate_every=taken[1:],
            progress=False,
        )
    curves = [first, *training.evaluations]
    values = torch.tensor([[each[name] for name in measures] for each in curves])
    return CellCurves(values, float(training.losses[-20:].mean()), float(training.record["seconds"]))


def build(cell: Cell) -> HookedDiffusionTransformer:
    """The untrained network of a cell."""
    shape = architecture(cell.positions, cell.variant, cell.depth)
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(shape, device="cpu"), seed=cell.seed)


def _measuring(cell: Cell, measures: Sequence[str]) -> Callable[[Any], dict[str, float]]:
    def evaluate(model: Any) -> dict[str, float]:
        filled = {INFILL: infill_accuracy(model, cell.variant, cell.data)} if INFILL in measures else {}
        return {**measure(model, cell.variant, cell.data), **filled}

    return evaluate
