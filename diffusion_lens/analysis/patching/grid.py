"""Activation patching: which activation carries what the clean run knows and the corrupted one does not?

Run the corrupted input with one activation taken from the clean run, and see how far a metric of the logits moves back
(Vig et al. 2020, arXiv 2004.12265; Meng et al. 2022, arXiv 2202.05262; Zhang and Nanda 2023, arXiv 2309.16042). A grid
holds the metric for every layer, place and head of a site. The two runs may be

    two prompts of one length, as in `transformer_lens.patching`, whose numbers these grids are;
    two prompts whose places are paired by hand, such as the forward and the reverse query of a fact;
    two models, such as a masked diffusion model and its causal twin;
    two trajectories: the canvas of step k of the one into the canvas of step k of the other, a grid a step.

`method="attribution"` gives the first-order estimate of the same grid (see `attribution.py` beside this file).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.kept_run import keys_and_values, stream_entering
from diffusion_lens.analysis.patching.attribution import EstimateError, run_with_gradients, sweep_by_gradient
from diffusion_lens.analysis.patching.metrics import UNREAD, AnswerProbability, Metric, Reading
from diffusion_lens.analysis.patching.result import PatchGrid
from diffusion_lens.analysis.patching.runs import Side, SidePair, sweep_exactly
from diffusion_lens.analysis.patching.sites import Group, Positions, Sweep, resolve_groups, resolve_sites
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_tokens, warn_of_another_network
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, at_least, pick_indices, whole_numbers

Patchable = str | Sequence[str] | Tensor | Query | Trajectory
METHODS = ("exact", "attribution")


def answer_probability(model: DiffusionTransformer, query: Query) -> AnswerProbability:
    """p(answer) of a query as a metric for `patch_grid`: the product of its tokens' probabilities, mean over the batch.

    With `steps`, p(answer) is that of each step's canvas, as in `trace_trajectory`: tokens already revealed count 1 or
    0, and a causal model is shown the answer's tokens where it has not reached them.

    Raises:
        ValueError: no answer, or one that the model cannot write.
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
    positions: Positions = None,
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
        clean, corrupted: text or texts, tokens Int[batch pos], a `Query`, or, with `steps`, a `Trajectory` each.
        metric: as in TransformerLens, a function from logits [batch pos d_vocab_out] to a scalar tensor; of the
            corrupted model's logits, with guidance if its trajectory has any. `answer_probability(model, query)` is one
            that brings its rows, and with `steps` asks each canvas for the tokens still open on it.
        sites: "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out" [layer pos]; "q", "k", "v", "z",
            "pattern" [layer pos head].
        steps: steps of the trajectories; the grid gets a step axis. On a causal model a step's canvas ends with the
            last place reached. Under guidance states are patched in the conditional branch.
        positions: `None` sweeps every place, "all" patches all places at once (no pos axis: whole heads, whole layers).
            Otherwise a list, an entry a cell: a place, a (clean place, corrupted place) pair, or a list of these to be
            patched together. Negative places count from the end.
        layers, heads: the ones to sweep, negative ones from the end; by default all.
        logits_at: rows of the logits to compute; the metric is shown [batch selected d_vocab_out].
        source_model: the model that reads the clean input, if it is another.
        method: "exact", or "attribution" for the estimate by gradients.
        check: with "attribution", how many of the largest cells of each site (and step) to patch exactly as well.
        max_bytes: memory to use beside the weights. The one backward pass of "attribution" is not counted.
        progress: show a bar.

    The canvases of `steps` may be another network's, such as a plain run's for a model under a hook, or another
    checkpoint's of the same architecture and tokenizer: both sides are read by their models as they are now, and the
    record's "trajectory" holds the network that wrote each.

    Returns:
        A `PatchGrid`; for a list of sites, a dictionary with one for each.

    Raises:
        ValueError: an unknown site or method, runs of different lengths without pairs, states that do not fit, a place,
            layer, head or step that is not there or named twice, a metric that returns no scalar, a budget too small
            for one cell, a trajectory of another architecture or tokenizer than those of the model that reads it.

    Warns:
        UserWarning: a trajectory that was made by another checkpoint, or under other hooks, weights, modules or dtype.
    """
    source = model if source_model is None else source_model
    reading, chosen = Reading.of(metric, logits_at), resolve_sites(sites)
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; it is one of {', '.join(METHODS)}")
    check = at_least(0, "check", check)
    blocks = _pick_layers(layers, source, model)
    of_steps = None if steps is None else whole_numbers("steps", steps)
    provenances = _canvas_provenances(source, clean, model, corrupted)
    sides = _sides(source, clean, model, corrupted, of_steps, reading)
    groups = resolve_groups(positions, *(max(side.n_held for side in run) for run in zip(*sides, strict=True)))
    heads = None if heads is None else list(heads)
    if heads is not None and not any(site.n_heads for site in chosen):
        raise ValueError(f"heads={heads}, but {', '.join(site.name for site in chosen)} has no heads")
    sweeps = [
        Sweep(site, blocks, groups, isinstance(positions, str), site.pick_heads(heads, model.cfg)) for site in chosen
    ]

    baselines, labels = [], []
    found: list[list[tuple[Tensor, EstimateError | None]]] = []
    for clean_side, corrupted_side in sides:
        pair = _run_both(clean_side, corrupted_side, sweeps, method, max_bytes)
        baselines.append([pair.clean_score, pair.corrupted_score])
        labels.append([_label(group, clean_side, corrupted_side) for group in groups])
        cells = [sweep.cells(clean_side.n_held, corrupted_side.n_held, model.cfg.device) for sweep in sweeps]
        if method == "attribution":
            found.append([sweep_by_gradient(pair, *each, check) for each in zip(sweeps, cells, strict=True)])
        else:
            found.append([(sweep_exactly(pair, *each, progress), None) for each in zip(sweeps, cells, strict=True)])

    record = {
        "method": method,
        "metric": getattr(metric, "__name__", type(metric).__name__),
        "logits_at": reading.rows,
        "cfg_scale": corrupted.record["cfg_scale"] if isinstance(corrupted, Trajectory) else 0.0,
        "clean_tokens": [side.tokens.tolist() for side, _ in sides],
        "corrupted_tokens": [side.tokens.tolist() for _, side in sides],
        "trajectory": provenances,
        "source": None if source is model else provenance(source, source.cfg),
        **provenance(model, model.cfg),
    }
    measured = torch.tensor(baselines, dtype=torch.promote_types(model.cfg.dtype, torch.float32))
    clean_score, corrupted_score = measured[0] if of_steps is None else measured.unbind(dim=1)
    grids = {}
    for sweep, by_step in zip(sweeps, zip(*found, strict=True), strict=True):
        coordinates, (scores, error) = sweep.coordinates, by_step[0]
        if of_steps is not None:
            coordinates = {"step": of_steps, **coordinates}
            scores = torch.stack([scores for scores, _ in by_step])
            error = EstimateError.by_step([error for _, error in by_step])
        grids[sweep.site.name] = PatchGrid(
            scores=scores,
            axes=tuple(coordinates),
            site=sweep.site.name,
            clean=clean_score,
            corrupted=corrupted_score,
            coordinates=coordinates,
            labels=labels,
            error=error,
            record=record,
        )
    return grids[sites] if isinstance(sites, str) else grids


def _canvas_provenances(
    source: DiffusionTransformer, clean: Patchable, model: DiffusionTransformer, corrupted: Patchable
) -> dict[str, Any] | None:
    """For the record, the networks that wrote two trajectories; `None` where the grid is of other inputs."""
    if not (isinstance(clean, Trajectory) and isinstance(corrupted, Trajectory)):
        return None
    for reader, side in ((source, clean), (model, corrupted)):
        require_same_tokens(side.record, reader)
    warn_of_another_network(
        {"clean trajectory": (clean.record, source), "corrupted trajectory": (corrupted.record, model)}
    )
    return {"clean": canvas_provenance(clean.record), "corrupted": canvas_provenance(corrupted.record)}


def _pick_layers(
    layers: Iterable[Whole] | None, source: DiffusionTransformer, model: DiffusionTransformer
) -> list[int]:
    """The layers swept; both models must have them."""
    n_clean, n_corrupted = source.cfg.n_layers, model.cfg.n_layers
    if layers is None and n_clean != n_corrupted:
        raise ValueError(
            f"{source.cfg.model_name!r} has {n_clean} layers and {model.cfg.model_name!r} {n_corrupted}: say which to "
            "patch with layers=[...]"
        )
    return pick_indices("layers", layers, min(n_clean, n_corrupted))


def _sides(
    source: DiffusionTransformer,
    clean: Patchable,
    model: DiffusionTransformer,
    corrupted: Patchable,
    steps: Sequence[int] | None,
    reading: Reading,
) -> list[tuple[Side, Side]]:
    """The clean and the corrupted canvas, or those of each step.

    The metric's rows are rows of the corrupted run; the clean one is read if it is laid out in the same way.
    """
    alike = source.readout is model.readout and source.cfg.d_vocab_out == model.cfg.d_vocab_out
    if isinstance(clean, Trajectory) and isinstance(corrupted, Trajectory):
        if not steps:
            raise ValueError("a trajectory has a canvas a step: say which to patch, such as steps=[0]")
        if len(set(steps)) < len(steps):
            raise ValueError(f"steps={list(steps)} names one twice; give each once")
        alike &= all(
            torch.equal(getattr(clean, name).cpu(), getattr(corrupted, name).cpu()) for name in ("given", "real")
        )
        of_clean = reading if alike else UNREAD
        sides = [
            (Side.at_step(source, clean, step, of_clean), Side.at_step(model, corrupted, step, reading))
            for step in steps
        ]
    elif steps is not None or isinstance(clean, Trajectory) or isinstance(corrupted, Trajectory):
        raise ValueError(
            "steps= goes with two trajectories, as model.denoise(...) returns them, one as clean and one as corrupted"
        )
    else:
        sides = [(Side.of(source, clean, reading if alike else UNREAD), Side.of(model, corrupted, reading))]
    n_clean, n_corrupted = (side.tokens.shape[0] for side in sides[0])
    if n_clean != n_corrupted:
        raise ValueError(f"the clean run has {n_clean} rows and the corrupted run {n_corrupted}: pair them row by row")
    return [(high if high.extent == low.extent else replace(high, reading=UNREAD), low) for high, low in sides]


def _run_both(clean: Side, corrupted: Side, sweeps: Sequence[Sweep], method: str, max_bytes: int) -> SidePair:
    """Run both sides, once each."""
    points = {sweep.site.hook_point(layer) for sweep in sweeps for layer in sweep.layers}
    names = points | {stream_entering(layer + sweep.site.ends_block) for sweep in sweeps for layer in sweep.layers}
    if corrupted.input.resumes_at_positions:
        names |= {name for block in range(corrupted.model.cfg.n_layers) for name in keys_and_values(block)}
    clean, corrupted = clean.guided(), corrupted.guided()
    clean_run = clean.input.run(points)
    gradients: dict[str, Tensor] = {}
    if method == "attribution":
        corrupted_run, gradients = run_with_gradients(corrupted, names, points)
    else:
        corrupted_run = corrupted.input.run(names)
    device = corrupted.model.cfg.device
    pair = SidePair(
        side=corrupted,
        clean={name: clean_run.activations[name].to(device) for name in points},
        corrupted=corrupted_run,
        gradients=gradients,
        clean_score=float(clean.reading(clean_run.logits.to(device))),
        corrupted_score=float(corrupted.reading(corrupted_run.logits)),
        max_bytes=max_bytes,
    )
    for sweep in sweeps:
        pair.cells(sweep.site)  # refuses a budget too small before any cell is run
    return pair


def _label(group: Group, clean: Side, corrupted: Side) -> str:
    """The text of a cell's places in the first row; nothing where none is reached."""
    reached = [(source, target) for source, target in group if source < clean.n_held and target < corrupted.n_held]
    words = []
    for source, target in reached[:1] + reached[1:][-1:]:
        there, here = clean.word(source), corrupted.word(target)
        words.append(here if there == here else f"{there} → {here}")
    return " … ".join(words)
