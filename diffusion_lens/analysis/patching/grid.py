"""Activation patching: which activation carries the information that the clean run has and the corrupted run lacks?

In a corrupted run, replace one activation by that of the clean run, and measure how much of the change in a metric of
the logits is undone (Vig et al. 2020, arXiv 2004.12265; Meng et al. 2022, arXiv 2202.05262; Zhang and Nanda 2023, arXiv
2309.16042). A grid has the metric for every layer, position and head of a site. The two runs may be

    two prompts of one length, as in `transformer_lens.patching`, which gives the same numbers;
    two prompts whose positions are paired by hand, such as the forward and the reverse query of a fact;
    two models, such as a masked diffusion model and its AR baseline;
    two trajectories: the canvas of step k of one is patched into the canvas of step k of the other, one grid per step.

`method="attribution"` gives the first-order estimate of the same grid (see `runs.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.engine.kept_run import CellBudget
from diffusion_lens.analysis.engine.layout import Queries, as_queries
from diffusion_lens.analysis.patching.metrics import (
    UNREAD,
    AnswerProbabilities,
    AnswerProbability,
    Metric,
    Reading,
    require_own_model,
    require_own_rows,
)
from diffusion_lens.analysis.patching.result import EstimateError, PatchGrid
from diffusion_lens.analysis.patching.runs import (
    CellPositions,
    Given,
    Neurons,
    PositionPairs,
    Side,
    SidePair,
    Site,
    Sweep,
    cell_budgets,
    resolve_groups,
    resolve_sites,
    sweep_by_gradient,
    sweep_exactly,
)
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_tokens, warn_of_another_network
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import provenance
from diffusion_lens.settings import (
    INHERITED,
    Whole,
    checked_arguments,
    pick_indices,
    setting,
    takes,
    warn_user,
    whole_numbers,
)
from diffusion_lens.settings.shared import PatchFields


@dataclass(frozen=True)
class PatchSettings(PatchFields):
    """The cells of a sweep, and how they are computed."""

    positions: CellPositions = setting(
        None,
        "None sweeps every position. all patches all positions at once, so the grid has no pos axis. Otherwise a list "
        "with one entry per cell: a position, a (clean position, corrupted position) pair, or a list of these that are "
        "patched together. Negative positions count from the end.",
        option=False,
    )

    neurons: Neurons = INHERITED

    def check_units(self, sites: Sequence[Site]) -> None:
        """Raise a `ValueError` if heads or neurons are selected and no site has any."""
        names = ", ".join(site.name for site in sites)
        if self.heads is not None and not any(site.heads for site in sites):
            raise ValueError(f"heads={list(self.heads)}, but {names} has no heads")
        if self.neurons is not None and not any(site.has_neurons for site in sites):
            raise ValueError(f"neurons={list(self.neurons)}, but {names} has no neurons: their site is 'post'")


Patchable = Given | Trajectory


@dataclass(frozen=True, eq=False)
class PatchInputs:
    """The clean and the corrupted input, each after the model that reads it, and the steps of two trajectories."""

    source: DiffusionTransformer
    clean: Patchable
    model: DiffusionTransformer
    corrupted: Patchable
    steps: list[int] | None

    @classmethod
    def of(
        cls,
        source: DiffusionTransformer,
        clean: Patchable,
        model: DiffusionTransformer,
        corrupted: Patchable,
        steps: Iterable[Whole] | None,
    ) -> "PatchInputs":
        """Inputs with steps as callers give them; negative ones count from the end of both trajectories.

        Diffusion trajectories of different lengths, in which a step is another time, are a `UserWarning`.
        """
        numbers = None if steps is None else whole_numbers("steps", steps)
        counts = sorted({run.first_step + run.n_steps for run in (clean, corrupted) if isinstance(run, Trajectory)})
        if len(counts) > 1 and not (source.cfg.is_autoregressive or model.cfg.is_autoregressive):
            warn_user(
                f"one trajectory has {counts[0]} steps and the other {counts[1]}, so that a step is another time in "
                "each: denoise both with the same number of steps"
            )
        if len(counts) > 1 and any(step < 0 for step in numbers or ()):
            raise ValueError(
                f"steps={numbers} counts from the end, and the trajectories have {counts[0]} and {counts[1]} steps: "
                "count from the first step"
            )
        if len(counts) == 1 and numbers is not None:
            numbers = [step + counts[0] if -counts[0] <= step < 0 else step for step in numbers]
        return cls(source, clean, model, corrupted, numbers)

    def pick_layers(self, layers: Iterable[Whole] | None) -> list[int]:
        """The layers to sweep, which both models must have."""
        n_clean, n_corrupted = self.source.cfg.n_layers, self.model.cfg.n_layers
        if layers is None and n_clean != n_corrupted:
            raise ValueError(
                f"{self.source.cfg.model_name!r} has {n_clean} layers and {self.model.cfg.model_name!r} {n_corrupted}: "
                "select the layers to patch with layers=[...]"
            )
        return pick_indices("layers", layers, min(n_clean, n_corrupted))

    def canvas_provenances(self) -> dict[str, Any] | None:
        """The networks that wrote the two trajectories, for the record; `None` for other inputs.

        A trajectory of another architecture or tokenizer is refused, and one of another network warned of.
        """
        if not (isinstance(self.clean, Trajectory) and isinstance(self.corrupted, Trajectory)):
            return None
        for reader, trajectory in ((self.source, self.clean), (self.model, self.corrupted)):
            require_same_tokens(trajectory.record, reader)
        clean, corrupted = self.clean.record, self.corrupted.record
        warn_of_another_network(
            {"clean trajectory": (clean, self.source), "corrupted trajectory": (corrupted, self.model)}
        )
        return {"clean": canvas_provenance(clean), "corrupted": canvas_provenance(corrupted)}

    def describe(
        self, reading: Reading, sides: Sequence[tuple[Side, Side]], written_by: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The metric and the inputs, for the record; `written_by` is what `canvas_provenances` returned."""
        return {
            "metric": reading.name,
            "logits_at": reading.rows,
            "clean_tokens": [side.tokens.tolist() for side, _ in sides],
            "corrupted_tokens": [side.tokens.tolist() for _, side in sides],
            "trajectory": written_by,
        }

    def sides(self, reading: Reading) -> list[tuple[Side, Side]]:
        """The clean and the corrupted side of the grid, or of each step's grid.

        The metric's rows are rows of the corrupted run. The metric is also computed in the clean run if that run has
        the same layout.
        """
        source, clean, model, corrupted = self.source, self.clean, self.model, self.corrupted
        require_own_model(reading.function, model)
        is_same_layout = source.readout is model.readout and source.cfg.d_vocab_out == model.cfg.d_vocab_out
        if isinstance(clean, Trajectory) and isinstance(corrupted, Trajectory):
            if not self.steps:
                raise ValueError("a trajectory has one canvas per step: select steps to patch, such as steps=[0]")
            if len(set(self.steps)) < len(self.steps):
                raise ValueError(f"steps={self.steps} contains duplicates; give each once")
            is_same_layout &= all(
                torch.equal(getattr(clean, name).cpu(), getattr(corrupted, name).cpu()) for name in ("given", "real")
            )
            of_clean = [Side.at_step(source, clean, i, reading if is_same_layout else UNREAD) for i in self.steps]
            of_corrupted = [Side.at_step(model, corrupted, i, reading) for i in self.steps]
        elif self.steps is not None or isinstance(clean, Trajectory) or isinstance(corrupted, Trajectory):
            raise ValueError(
                "steps= requires two trajectories from model.denoise(...): pass one as clean and one as corrupted"
            )
        else:
            of_clean = [Side.of(source, clean, reading if is_same_layout else UNREAD)]
            of_corrupted = [Side.of(model, corrupted, reading)]
            if isinstance(reading.function, AnswerProbability | AnswerProbabilities):
                require_own_rows(reading.function, of_clean[0].queries, of_corrupted[0].queries)
        if (n_clean := len(of_clean[0].tokens)) != (n_corrupted := len(of_corrupted[0].tokens)):
            raise ValueError(
                f"the clean run has {n_clean} rows and the corrupted run {n_corrupted}: give both the same number of "
                "rows, since row i of the one is patched into row i of the other"
            )
        return [
            (one if one.extent == other.extent else replace(one, reading=UNREAD), other)
            for one, other in zip(of_clean, of_corrupted, strict=True)
        ]


@checked_arguments
def answer_probability(model: DiffusionTransformer, query: Queries) -> AnswerProbability | AnswerProbabilities:
    """p(answer) of a query as a metric for `patch_grid`: the product of its tokens' probabilities, mean over the batch.

    With `steps`, p(answer) is read from each step's canvas, as in `trace_trajectory`. Tokens that are already revealed
    count 1 or 0, and a causal model reads the answer's tokens where it has not reached them.

    Args:
        model: Model that predicts the answer.
        query: Query or fact with the answer; or one for each row of the batch. A fact is laid out as in `causal_trace`.

    Raises:
        ValueError: No answer, or an answer that the model cannot write.
        TypeError: A text, which does not say what its answer is.
    """
    metrics = tuple(AnswerProbability.of(model, each) for each in as_queries(model, query))
    return AnswerProbabilities(metrics) if len(metrics) > 1 else metrics[0]


@takes(PatchSettings)
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
    settings: PatchSettings,
    logits_at: Sequence[int] | Tensor | None = None,
    source_model: DiffusionTransformer | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> Any:
    """Patch every cell of one site or several, from the clean run into the corrupted one.

    Args:
        model: Model whose corrupted run is patched.
        clean, corrupted: A `Fact` or a `Query`, or several as rows of a batch (a fact is laid out as in
            `causal_trace`); texts as they stand, without masked positions; tokens Int[batch pos]; or, with `steps`, a
            `Trajectory` each.
        metric: Function from the corrupted model's logits [batch pos d_vocab_out] to a scalar tensor, as in
            TransformerLens. Their softmax is p(x_0), whatever the head's output means. The logits are guided if the
            corrupted trajectory is. `answer_probability(model, query)`
            has its own rows and, with `steps`, reads the tokens that are still masked on each canvas.
        sites: "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "post" [layer pos]; "q", "k", "v", "z",
            "pattern" [layer pos head]. With `neurons`, "post" is [layer pos neuron].
        steps: Steps of the trajectories, negative ones from the end; the grid gets a step axis. On a causal model the
            canvas of a step ends with the last position reached. Under guidance, states are patched in the conditional
            branch.
        settings: The cells, and how they are computed.
        logits_at: Rows of the logits to compute; the metric gets [batch selected d_vocab_out].
        source_model: Model that reads the clean input; by default `model`.
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
        UserWarning: A trajectory was written by another checkpoint, or with other hooks, weights, modules or dtype; or
            the two have different numbers of steps.
    """
    source = model if source_model is None else source_model
    reading = Reading.of(metric, logits_at)
    inputs = PatchInputs.of(source, clean, model, corrupted, steps)
    swept_sites, layers = resolve_sites(sites), inputs.pick_layers(settings.layers)
    settings.check_units(swept_sites)
    if any(site.has_neurons for site in swept_sites):
        require_neurons(source, layers)
        require_neurons(model, layers)

    # 1. Lay out the two sides of the grid, or of each step's grid, and the cells of each site.
    written_by, pairs = inputs.canvas_provenances(), inputs.sides(reading)
    n_clean, n_corrupted = (max(side.n_canvas for side in by_step) for by_step in zip(*pairs, strict=True))
    groups, together = resolve_groups(settings.positions, n_clean, n_corrupted), isinstance(settings.positions, str)
    sweeps = [
        Sweep(
            site,
            layers,
            groups,
            together,
            site.pick_heads(settings.heads, model.cfg),
            site.pick_neurons(settings.neurons, model.cfg),
        )
        for site in swept_sites
    ]

    # 2. Refuse a budget that is too small, before anything is run.
    budgets = [cell_budgets(*pair, sweeps, settings.method, max_bytes) for pair in pairs]

    # 3. Compute both sides once, then score every cell in the corrupted run.
    swept = [_swept(*pair, sweeps, settings, of_pair, progress) for pair, of_pair in zip(pairs, budgets, strict=True)]

    # 4. Join the steps and make one grid per site.
    record = {
        "method": settings.method,
        **inputs.describe(reading, pairs, written_by),
        "cfg_scale": corrupted.record["cfg_scale"] if isinstance(corrupted, Trajectory) else 0.0,
        "source": None if source is model else provenance(source, source.cfg),
        **provenance(model, model.cfg),
    }
    grids = {sweep.site.name: _grid(sweep, i, swept, inputs.steps, record, model.cfg) for i, sweep in enumerate(sweeps)}
    return grids[sites] if isinstance(sites, str) else grids


def require_neurons(model: DiffusionTransformer, layers: Iterable[int]) -> None:
    """Raise a `ValueError` unless each of these blocks has one MLP, whose neurons pass `mlp.hook_post`."""
    experts = model.cfg.experts
    has_experts = [False] * model.cfg.n_layers if experts is None else experts.layers
    if wrong := [layer for layer in layers if has_experts[layer]]:
        dense = [layer for layer, has in enumerate(has_experts) if not has]
        cure = f"choose among layers={dense}" if dense else "patch mlp_out, what they write together"
        raise ValueError(
            f"layer {wrong[0]} of {model.cfg.model_name!r} has experts in place of one MLP, and neurons of different "
            f"experts at different positions, which cannot be compared: {cure}"
        )


class _Swept(NamedTuple):
    """For one pair of runs the metric of both, the text at each cell, and the scores of each site with their error."""

    clean: float
    corrupted: float
    labels: list[str]
    by_site: list[tuple[Float[Tensor, "*rest"], EstimateError | None]]


def _swept(
    clean: Side,
    corrupted: Side,
    sweeps: Sequence[Sweep],
    settings: PatchSettings,
    budgets: Mapping[str, CellBudget],
    progress: bool,
) -> _Swept:
    """Compute both sides once, and score every cell of every site."""
    pair = SidePair.of(clean, corrupted, sweeps, settings.method, budgets)
    by_site: list[tuple[Tensor, EstimateError | None]] = []
    for sweep in sweeps:
        cells = sweep.cells(clean.n_canvas, corrupted.n_canvas, corrupted.model.cfg.device)
        if settings.method == "attribution":
            by_site.append(sweep_by_gradient(pair, sweep, cells, settings.check))
        else:
            by_site.append((sweep_exactly(pair, sweep, cells, progress), None))
    labels = [_label(group, clean, corrupted) for group in sweeps[0].groups]
    return _Swept(pair.clean_score, pair.corrupted_score, labels, by_site)


def _grid(
    sweep: Sweep,
    index: int,
    swept: Sequence[_Swept],
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


def _label(group: PositionPairs, clean: Side, corrupted: Side) -> str:
    """The text at a cell's first and last position in the first row; empty where none is reached."""
    reached = [(source, target) for source, target in group if source < clean.n_canvas and target < corrupted.n_canvas]
    words = []
    for source, target in reached[:1] + reached[1:][-1:]:
        clean_word, corrupted_word = clean.word(source), corrupted.word(target)
        words.append(corrupted_word if clean_word == corrupted_word else f"{clean_word} → {corrupted_word}")
    return " … ".join(words)
