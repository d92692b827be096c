"""Activation patching: which activation carries the information that the clean run has and the corrupted run lacks?

In a corrupted run, replace one activation by that of the clean run, and measure how much of the change in a metric of
the logits is undone (Vig et al. 2020, arXiv 2004.12265; Meng et al. 2022, arXiv 2202.05262; Zhang and Nanda 2023, arXiv
2309.16042). A grid has the metric for every layer, position and head of a site. The two runs may be

    two prompts of one length, as in `transformer_lens.patching`, which gives the same numbers;
    two prompts whose positions are paired by hand, such as the forward and the reverse query of a fact;
    two models, such as a masked diffusion model and its AR baseline;
    two trajectories: the canvas of step k of one is patched into the canvas of step k of the other, one grid per step.

`method="attribution"` gives the first-order estimate of the same grid (see `attribution.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.cell_budget import CellBudget
from diffusion_lens.analysis.patching.attribution import EstimateError, run_with_gradients, sweep_by_gradient
from diffusion_lens.analysis.patching.inputs import Patchable, PatchInputs
from diffusion_lens.analysis.patching.metrics import AnswerProbability, Metric, Reading
from diffusion_lens.analysis.patching.patch_settings import PatchSettings
from diffusion_lens.analysis.patching.result import PatchGrid
from diffusion_lens.analysis.patching.runs import Side, SidePair, cell_budgets, stored_points, sweep_exactly
from diffusion_lens.analysis.patching.sites import CellPositions, PositionPairs, Sweep, resolve_sites
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, at_least


def answer_probability(model: DiffusionTransformer, query: Query) -> AnswerProbability:
    """p(answer) of a query as a metric for `patch_grid`: the product of its tokens' probabilities, mean over the batch.

    With `steps`, p(answer) is read from each step's canvas, as in `trace_trajectory`. Tokens that are already revealed
    count 1 or 0, and a causal model reads the answer's tokens where it has not reached them.

    Args:
        model: Model that predicts the answer.
        query: Query with the answer.

    Raises:
        ValueError: No answer, or an answer that the model cannot write.
    """
    return AnswerProbability(query, Answer.of(model, query))


@begins_run
@torch.inference_mode(False)
@torch.no_grad()
def patch_grid(
    model: DiffusionTransformer,
    clean: Patchable,
    corrupted: Patchable,
    metric: Metric,
    sites: str | Sequence[str],
    steps: Iterable[Whole] | None = None,
    *,
    positions: CellPositions = None,
    layers: Iterable[Whole] | None = None,
    heads: Iterable[Whole] | None = None,
    logits_at: Sequence[int] | Tensor | None = None,
    source_model: DiffusionTransformer | None = None,
    method: str = "exact",
    check: Whole = 8,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> Any:
    """Patch every cell of one site or several, from the clean run into the corrupted one.

    Args:
        model: Model whose corrupted run is patched.
        clean, corrupted: Text or texts, tokens Int[batch pos], a `Query` or, with `steps`, a `Trajectory` each.
        metric: Function from the corrupted model's logits [batch pos d_vocab_out] to a scalar tensor, as in
            TransformerLens. Their softmax is p(x_0), whatever the head's output means. The logits are guided if the
            corrupted trajectory is. `answer_probability(model, query)`
            has its own rows and, with `steps`, reads the tokens that are still masked on each canvas.
        sites: "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out" [layer pos]; "q", "k", "v", "z",
            "pattern" [layer pos head].
        steps: Steps of the trajectories; the grid gets a step axis. On a causal model the canvas of a step ends with
            the last position reached. Under guidance, states are patched in the conditional branch.
        positions: `None` sweeps every position. "all" patches all positions at once, so the grid has no pos axis.
            Otherwise a list with one entry per cell: a position, a (clean position, corrupted position) pair, or a list
            of these that are patched together. Negative positions count from the end.
        layers, heads: Layers and heads to sweep, negative ones from the end; by default all.
        logits_at: Rows of the logits to compute; the metric gets [batch selected d_vocab_out].
        source_model: Model that reads the clean input; by default `model`.
        method: "exact", or "attribution" for an estimate by gradients.
        check: With "attribution", number of cells of each site (and step) to patch exactly as well: those with the
            largest estimates.
        max_bytes: Memory to use in addition to the weights.
        progress: Whether to show a progress bar.

    The canvases of `steps` may have been written by another network, such as the model without its hooks, or another
    checkpoint of the same architecture and tokenizer. The models read both sides in their present state. The record's
    "trajectory" names the network that wrote each canvas.

    Returns:
        A `PatchGrid`; for a list of sites, a dictionary with one for each.

    Raises:
        ValueError: A site or method is unknown; runs have different lengths without pairs; states do not fit; a
            position, layer, head or step does not exist or is named twice; the metric does not return a scalar; the
            budget is too small for one cell; or a trajectory has another architecture or tokenizer than the model that
            reads it.

    Warns:
        UserWarning: A trajectory was written by another checkpoint, or with other hooks, weights, modules or dtype.
    """
    source = model if source_model is None else source_model
    reading = Reading.of(metric, logits_at)
    inputs = PatchInputs.of(source, clean, model, corrupted, steps)
    settings = PatchSettings(
        resolve_sites(sites),
        positions,
        inputs.pick_layers(layers),
        None if heads is None else list(heads),
        method,
        at_least(0, "check", check),
    )
    grids = patch_sites(inputs, reading, settings, max_bytes, progress)
    return grids[sites] if isinstance(sites, str) else grids


@dataclass(frozen=True, eq=False)
class _SweptPair:
    """The scores of all sites for one pair of runs.

    Attributes:
        clean: Metric of the clean run.
        corrupted: Metric of the corrupted run.
        labels: Text at the positions of each cell.
        by_site: For each site, the scores of its cells and the error of the estimates.
    """

    clean: float
    corrupted: float
    labels: list[str]
    by_site: list[tuple[Float[Tensor, "*rest"], EstimateError | None]]


def patch_sites(
    inputs: PatchInputs, reading: Reading, settings: PatchSettings, max_bytes: int, progress: bool
) -> dict[str, PatchGrid]:
    """Patch every cell of every site; `patch_grid` describes the arguments."""
    # 1. Lay out the two sides of the grid, or of each step's grid, and the cells of each site.
    cfg = inputs.model.cfg
    provenances = inputs.canvas_provenances()
    sides = inputs.sides(reading)
    n_clean, n_corrupted = (max(side.n_canvas for side in by_step) for by_step in zip(*sides, strict=True))
    sweeps = settings.sweeps(n_clean, n_corrupted, cfg)

    # 2. Refuse a budget that is too small, before anything is run.
    by_pair = [cell_budgets(clean, corrupted, sweeps, settings.method, max_bytes) for clean, corrupted in sides]

    # 3. Compute both sides once, then score every cell in the corrupted run.
    swept = [
        _sweep_pair(clean, corrupted, sweeps, settings, budgets, progress)
        for (clean, corrupted), budgets in zip(sides, by_pair, strict=True)
    ]

    # 4. Join the steps and make one grid per site.
    record = {
        "method": settings.method,
        **inputs.describe(reading, sides, provenances),
        "cfg_scale": inputs.corrupted.record["cfg_scale"] if isinstance(inputs.corrupted, Trajectory) else 0.0,
        "source": None if inputs.source is inputs.model else provenance(inputs.source, inputs.source.cfg),
        **provenance(inputs.model, cfg),
    }
    return {
        sweep.site.name: _grid(sweep, index, swept, inputs.steps, record, cfg) for index, sweep in enumerate(sweeps)
    }


def _sweep_pair(
    clean: Side,
    corrupted: Side,
    sweeps: Sequence[Sweep],
    settings: PatchSettings,
    budgets: Mapping[str, CellBudget],
    progress: bool,
) -> _SweptPair:
    """Compute both sides once, and score every cell of every site."""
    pair = _run_both(clean, corrupted, sweeps, settings.method, budgets)
    by_site: list[tuple[Tensor, EstimateError | None]] = []
    for sweep in sweeps:
        cells = sweep.cells(clean.n_canvas, corrupted.n_canvas, corrupted.model.cfg.device)
        if settings.method == "attribution":
            by_site.append(sweep_by_gradient(pair, sweep, cells, settings.check))
        else:
            by_site.append((sweep_exactly(pair, sweep, cells, progress), None))
    labels = [_label(group, clean, corrupted) for group in sweeps[0].groups]
    return _SweptPair(pair.clean_score, pair.corrupted_score, labels, by_site)


def _grid(
    sweep: Sweep,
    index: int,
    swept: Sequence[_SweptPair],
    steps: list[int] | None,
    record: dict[str, Any],
    cfg: DiffusionConfig,
) -> PatchGrid:
    """The grid of one site, the sweep of this index, with a step axis for trajectories."""
    baselines = torch.tensor(
        [[pair.clean, pair.corrupted] for pair in swept], dtype=torch.promote_types(cfg.dtype, torch.float32)
    )
    clean, corrupted = baselines[0] if steps is None else baselines.unbind(dim=1)
    scores, error = swept[0].by_site[index]
    coordinates = sweep.coordinates
    if steps is not None:
        coordinates = {"step": steps, **coordinates}
        scores = torch.stack([pair.by_site[index][0] for pair in swept])
        error = EstimateError.by_step([pair.by_site[index][1] for pair in swept])
    return PatchGrid(
        scores=scores,
        axes=tuple(coordinates),
        site=sweep.site.name,
        clean=clean,
        corrupted=corrupted,
        coordinates=coordinates,
        labels=[pair.labels for pair in swept],
        error=error,
        record=record,
    )


def _run_both(
    clean: Side, corrupted: Side, sweeps: Sequence[Sweep], method: str, budgets: Mapping[str, CellBudget]
) -> SidePair:
    """Compute each side once."""
    points, names = stored_points(corrupted.input.past_points, sweeps, method)
    clean, corrupted = clean.through_head(), corrupted.through_head()
    clean_run = clean.input.run(points)
    gradients: dict[str, Tensor] = {}
    if method == "attribution":
        corrupted_run, gradients = run_with_gradients(corrupted, names, points)
    else:
        corrupted_run = corrupted.input.run(names)
    device = corrupted.model.cfg.device
    return SidePair(
        side=corrupted,
        clean={name: clean_run.activations[name].to(device) for name in points},
        corrupted=corrupted_run,
        gradients=gradients,
        clean_score=float(clean.reading(clean_run.logits.to(device))),
        corrupted_score=float(corrupted.reading(corrupted_run.logits)),
        budgets=budgets,
    )


def _label(group: PositionPairs, clean: Side, corrupted: Side) -> str:
    """The text at a cell's first and last position in the first row; empty where none is reached."""
    reached = [(source, target) for source, target in group if source < clean.n_canvas and target < corrupted.n_canvas]
    words = []
    for source, target in reached[:1] + reached[1:][-1:]:
        clean_word, corrupted_word = clean.word(source), corrupted.word(target)
        words.append(corrupted_word if clean_word == corrupted_word else f"{clean_word} → {corrupted_word}")
    return " … ".join(words)
