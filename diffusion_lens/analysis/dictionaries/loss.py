"""What a dictionary loses: the model's loss with reconstructions in the place of activations.

The loss is the one that the model is trained on (`losses`). Of a masked diffusion model it is the cross-entropy of the
masked tokens, divided by the noise level t of their canvas (Nie et al. 2024, arXiv 2410.18514, eq. 4). Of an AR
baseline it is that of the next token. It is computed in four states of the model, on the same canvases:

    clean           nothing is replaced
    spliced         activations are replaced by reconstructions, without error term
    zero_ablated    by zeros
    mean_ablated    by their mean over all canvases

    recovered share = (loss ablated - loss spliced) / (loss ablated - loss clean)

It is 1 if the reconstructions serve the model as well as the activations, and 0 if they serve it no better than zeros
(`ce_loss_score` in SAELens), or than the mean. The share is not bounded: DLM-Scope (arXiv 2602.05859) finds splices in
early layers that lower the diffusion loss.

The reconstruction itself is measured at the same positions:

    variance explained = 1 - Σ |x - x̂|² / Σ |x - mean x|²        L0 = mean number of features that are not zero

For a transcoder x is what it writes, the output of the MLP.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.dictionaries.canvases import (
    CanvasBatch,
    Canvases,
    Mask,
    Noise,
    NoiseRange,
    RunCanvases,
    check_mask,
    spans_of,
)
from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary, warn_of_other_weights
from diffusion_lens.analysis.dictionaries.splice import Dictionary, check_dictionary, only_at, splice, vectors
from diffusion_lens.analysis.dictionaries.store import run_to
from diffusion_lens.analysis.engine.inputs import CleanTexts, Texts, readable_points
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.names import Hook
from diffusion_lens.interventions import zero_ablate
from diffusion_lens.model.loss import masked_batch, next_token_batch
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run, value_in_words
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance, shown_model
from diffusion_lens.settings import Whole, at_least, whole_number
from diffusion_lens.settings.figures import styled

STATES = ("clean", "spliced", "zero_ablated", "mean_ablated")


class Estimate(NamedTuple):
    """A mean and its standard error over texts, NaN for a single text."""

    value: float
    standard_error: float


@dataclass(frozen=True, eq=False)
class DictionaryLoss(PicturedResult, Saved):
    """The model's loss in four states: clean, spliced, zero-ablated and mean-ablated.

    Columns of the data frame: level, state, low, high, loss, standard_error, variance_explained, l0.

    Attributes:
        losses: Float[entry level state], loss of each text at each noise level, in nats per position that counts; the
            states in the order clean, spliced, zero_ablated, mean_ablated.
        n_counted: Int[entry], number of positions of each text that count in the loss.
        texts: Int[entry], index of each text in the list that was given.
        spans: Float[level axis], lowest and highest noise level; equal for a single one, and 0 without [MASK].
        variance_explained: Float[level], share of the activations' variance at this level that the reconstruction
            explains.
        l0: Float[level], mean number of features that are not zero.
        n_rows: Int[level], number of positions at which activations were replaced.
        overall_variance_explained: Share of the variance at all levels together.
        density: Float[level feature], share of these positions at which each feature is not zero.
        record: Hook point, digest of the dictionary, positions (`mask`), seed, hash of the texts, facts set aside,
            model, hash of the weights, hooks, versions.
    """

    KIND: ClassVar[str] = "dictionary loss"
    SHOWS: ClassVar[str] = (
        "by noise level how much of the loss the dictionary recovers and how much of the variance it explains"
    )
    ENTRIES: ClassVar[Mapping[str, Any]] = {"model": str, "name": str}

    losses: Float[Tensor, "entry level state"]
    n_counted: Int[Tensor, "entry"]
    texts: Int[Tensor, "entry"]
    spans: Float[Tensor, "level axis"]
    variance_explained: Float[Tensor, "level"]
    l0: Float[Tensor, "level"]
    n_rows: Int[Tensor, "level"]
    overall_variance_explained: float
    record: dict[str, Any] = field(repr=False)
    density: Float[Tensor, "level feature"] | None = None

    @property
    def dead(self) -> float:
        """Share of the features that are zero at all replaced positions; NaN in results of earlier versions."""
        return math.nan if self.density is None else (self.density.nansum(dim=0) == 0).float().mean().item()

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("state", len(STATES)), ("axis", 2))

    def loss(self, state: str = "clean", level: Whole | None = None) -> Estimate:
        """Mean loss per position in a state, at one level or over all.

        Args:
            state: "clean", "spliced", "zero_ablated" or "mean_ablated".
            level: Index of a noise level, from 0.
        """
        return _ratio(self._sums(state, level), self._counts(level))

    def change(self, state: str = "spliced", level: Whole | None = None) -> Estimate:
        """Mean loss in a state less the clean loss; its standard error is that of the paired differences."""
        return _ratio(self._sums(state, level) - self._sums("clean", level), self._counts(level))

    def recovered(self, baseline: str = "zero_ablated", level: Whole | None = None) -> Estimate:
        """Share of the loss that the ablation costs and the reconstruction saves; NaN if the ablation costs nothing.

        Args:
            baseline: "zero_ablated" or "mean_ablated".
            level: Index of a noise level, from 0; by default over all.
        """
        if baseline not in STATES[2:]:
            raise ValueError(f"baseline={baseline!r}; it must be 'zero_ablated' or 'mean_ablated'")
        ablated = self._sums(baseline, level)
        return _ratio(ablated - self._sums("spliced", level), ablated - self._sums("clean", level))

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The recovered shares and the variance explained by noise level, with standard errors. Returns the axes."""
        levels = range(len(self.spans))
        curves = {
            f"loss recovered from {baseline.removesuffix('_ablated')} ablation": [
                self.recovered(baseline, level) for level in levels
            ]
            for baseline in STATES[2:]
        }
        curves["variance explained"] = [Estimate(share, 0.0) for share in self.variance_explained.tolist()]
        return plots.level_curves(self.spans, curves, ax=ax, title=title or f"dictionary at {self.record['name']}")

    def _sums(self, state: str, level: Whole | None) -> Float[Tensor, "entry"]:
        """Loss of each text in a state, summed over positions and levels."""
        if state not in STATES:
            raise ValueError(f"state={state!r}; it must be one of {', '.join(STATES)}")
        chosen = self.losses[..., STATES.index(state)] * self.n_counted[:, None]
        return chosen.sum(dim=1) if level is None else chosen[:, self._level(level)]

    def _counts(self, level: Whole | None) -> Float[Tensor, "entry"]:
        return self.n_counted.double() * (len(self.spans) if level is None else 1)

    def _level(self, level: Whole) -> int:
        index = whole_number("level", level)
        if not 0 <= index < len(self.spans):
            raise ValueError(f"level={index}; the {len(self.spans)} noise levels are numbered from 0")
        return index

    def _table(self) -> Table:
        losses = [[self.loss(state, level) for state in STATES] for level in range(len(self.spans))]
        values = {
            "low": self.spans[:, :1],
            "high": self.spans[:, 1:],
            "loss": [[loss.value for loss in row] for row in losses],
            "standard_error": [[loss.standard_error for loss in row] for row in losses],
            "variance_explained": self.variance_explained[:, None],
            "l0": self.l0[:, None],
        }
        return Table.of_cells({"level": range(len(self.spans)), "state": STATES}, values)

    def __repr__(self) -> str:
        clean, spliced, recovered = self.loss(), self.loss("spliced"), self.recovered()
        return (
            f"DictionaryLoss({self.record['name']} of {shown_model(self.record)}, {len(self.losses)} texts: loss "
            f"{clean.value:.3f}, spliced {spliced.value:.3f}; recovered {recovered.value:.3f} ± "
            f"{recovered.standard_error:.3f}, variance explained {self.overall_variance_explained:.3f}, "
            f"L0 {(self.l0 * self.n_rows).nansum().item() / self.n_rows.sum().item():.1f}"
            f"{'' if self.density is None else f', dead {self.dead:.1%}'})"
        )


def _ratio(numerators: Float[Tensor, "entry"], denominators: Float[Tensor, "entry"]) -> Estimate:
    """Ratio of two sums over texts. Its error is that of the linearised ratio, with texts as independent units."""
    total, n_texts = denominators.sum().item(), len(denominators)
    if total == 0:
        return Estimate(math.nan, math.nan)
    ratio = numerators.sum().item() / total
    if n_texts == 1:
        return Estimate(ratio, math.nan)
    squares = (numerators - ratio * denominators).square().sum().item()
    return Estimate(ratio, math.sqrt(n_texts / (n_texts - 1) * squares) / abs(total))


@begins_run
@torch.no_grad()
def dictionary_loss(
    model: DiffusionTransformer,
    texts: Texts | Trajectory | Sequence[Trajectory],
    name: str,
    dictionary: Dictionary,
    *,
    mask: str = "all",
    t: Noise = None,
    seed: Whole = 0,
    batch_size: Whole = 32,
    attention_mask: Tensor | None = None,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> DictionaryLoss:
    """The model's loss with and without a dictionary in the place of the activation at a hook point.

    Each text is masked once at each noise level, and all states see the same canvases, so that differences of losses
    have small standard errors. A batch takes five forward passes, one of them to the hook point only.

    Args:
        model: Model, of either variant.
        texts: Texts, facts (whose answers count) or tokens, as in `activations`. Use texts on which the dictionary was
            not trained. Or runs of a masked diffusion model: then the canvases are those of each step, in place of
            noise, and the levels are steps; the loss is that of the tokens that the run wrote in the end.
        name: Hook point; of a transcoder the one that it writes.
        dictionary: Dictionary, as in `splice`.
        mask: Positions at which activations are replaced and measured: "masked", "unmasked" or "all", as in
            `activations`. Give what the dictionary was trained on. The loss is that of all masked positions.
        t: Noise levels, as in `activations`, but above 0. By default four quarters of the range from 0.001 to 1.
        seed: Seed of the noise. With the seed, the texts and the levels of `activations`, the canvases are the same.
        batch_size: Number of canvases in one forward pass. It affects the result by rounding only.
        attention_mask, prepend_bos, progress: As in `activations`.

    Raises:
        KeyError: There is no such hook point.
        TypeError: The dictionary lacks `encode` or `decode`.
        ValueError: The dictionary does not fit the hook point, a setting is out of range or does not fit the model, no
            position is selected, the model predicts no token of a text (an AR baseline that of a single token), it
            attends by blocks, so that its loss reads every text twice, or the call is inside `model.at_time`.

    Warns:
        UserWarning: The dictionary was trained on other weights.
    """
    check_dictionary(dictionary)
    warn_of_other_weights(model, dictionary)
    model.time.require_own("dictionary_loss")
    if model.cfg.causal_block is not None:
        raise ValueError(
            f"{model.cfg.model_name!r} attends by blocks, and its loss reads the noisy and the clean text in one pass, "
            "in which a position has two activations; dictionary_loss replaces one. Compare its loss with and without "
            "both, model.run_with_hooks(tokens, return_type='loss', fwd_hooks=[(name, splice(dictionary, "
            "error_term=False))]), or denoise under this hook"
        )
    runs = [texts] if isinstance(texts, Trajectory) else [each for each in texts if isinstance(each, Trajectory)]
    of_runs = RunCanvases.of(model, runs) if runs else None
    if of_runs is not None and t is not None:
        raise ValueError("t= is for texts; the canvases of runs are read as they are")
    spans = spans_of(model, t, NoiseRange(samples=4)) if of_runs is None else of_runs.spans
    if not model.cfg.is_autoregressive and any(span == (0.0, 0.0) for span in spans):
        raise ValueError("at the noise level t=0 nothing is masked, so there is no loss; give levels above 0")
    selection, size = check_mask(model, mask, spans), at_least(1, "batch_size", batch_size)
    (point,) = readable_points(model, [name])
    if isinstance(dictionary, SparseDictionary) and point != dictionary.writes:
        raise ValueError(f"name={name!r}: this dictionary writes {dictionary.writes!r}; give that hook point")
    given: Any = texts
    clean = CleanTexts.of(model, given, attention_mask, prepend_bos) if of_runs is None else of_runs.texts
    _require_predictions(model, clean)
    noise = whole_number("seed", seed)
    canvases = Canvases(model, clean, spans, noise) if of_runs is None else of_runs
    with tqdm(total=2 * len(canvases), desc="dictionary", unit="canvas", disable=not progress) as bar:

        def batches() -> Iterator[CanvasBatch]:
            for batch in canvases.batches(size):
                yield batch
                bar.update(len(batch.tokens))

        fit = _Fit(model, len(spans), point, selection, batches())
        losses = torch.zeros(len(clean.tokens), len(spans), len(STATES), dtype=torch.float64)
        n_counted = torch.zeros(len(clean.tokens), dtype=torch.long)
        for batch in batches():
            of_batch, counted = _losses(model, batch, _hooks(point, dictionary, batch.selected(selection), batch, fit))
            losses[batch.rows, batch.levels], n_counted[batch.rows] = of_batch / counted[:, None].clamp(min=1), counted
    record = {
        "name": point,
        "dictionary": value_in_words(dictionary),
        "mask": selection,
        "seed": noise,
        "batch_size": size,
        "texts": clean.describe(),
        "steps": None if of_runs is None else of_runs.inputs.pick_steps(None),
        **provenance(model, model.cfg),
    }
    density = fit.active / fit.n_rows[:, None]
    return DictionaryLoss(
        losses=losses,
        n_counted=n_counted,
        texts=torch.tensor(clean.indices),
        spans=torch.tensor(spans, dtype=torch.float64),
        variance_explained=1 - fit.residual / fit.within_levels,
        l0=density.sum(dim=1),
        n_rows=fit.n_rows,
        overall_variance_explained=float(1 - fit.residual.sum() / fit.overall),
        record=record,
        density=density,
    )


def _require_predictions(model: DiffusionTransformer, clean: CleanTexts) -> None:
    if not model.cfg.is_autoregressive:
        return
    rows = zip(clean.indices, clean.editable, strict=True)
    if unpredicted := [index for index, editable in rows if not bool(editable[1:].any())]:
        shown = ", ".join(map(str, unpredicted[:5])) + (", ..." if len(unpredicted) > 5 else "")
        raise ValueError(
            f"{model.cfg.model_name!r} does not predict the first token of a text, so texts of one token have no loss: "
            f"leave out the texts {shown}"
        )


class _Fit:
    """Sums over the replaced positions of each noise level, against the mean activation there and over all."""

    def __init__(
        self, model: DiffusionTransformer, n_levels: int, point: str, mask: Mask, batches: Iterable[CanvasBatch]
    ) -> None:
        """Compute the means, in a first pass over all canvases."""
        # By level: number of positions at which each feature is not zero, and squared distances of activations and
        # reconstructions, and of activations and their mean.
        self.active = torch.zeros(n_levels, 1, dtype=torch.float64)
        self.residual, self.within_levels = torch.zeros(2, n_levels, dtype=torch.float64)
        self.n_rows = torch.zeros(n_levels, dtype=torch.long)
        self.overall = torch.zeros((), dtype=torch.float64)
        total, counts = None, torch.zeros(n_levels, dtype=torch.float64)
        for batch in batches:
            selected = batch.selected(mask)
            rows = run_to(model, batch, [point])[point][selected].to(device="cpu", dtype=torch.float64)
            levels = _level_of_rows(batch, selected)
            total = rows.new_zeros(len(counts), rows.shape[1]) if total is None else total
            total.index_add_(0, levels, rows)
            counts += torch.bincount(levels, minlength=len(counts))
        if total is None or not counts.sum():
            raise ValueError(f"mask={mask!r} selects no position of any canvas; give other noise levels, or more texts")
        self._mean_of_level, self.mean = total / counts[:, None], total.sum(dim=0) / counts.sum()

    def add(self, levels: Tensor, x: Tensor, reconstruction: Tensor, features: Tensor) -> None:
        """Add some positions: their levels, and a row of each tensor for each of them."""
        x, reconstruction = (rows.to(device="cpu", dtype=torch.float64) for rows in (x, reconstruction))
        self.residual.index_add_(0, levels, (x - reconstruction).square().sum(dim=1))
        self.within_levels.index_add_(0, levels, (x - self._mean_of_level[levels]).square().sum(dim=1))
        of_level = one_hot(levels, len(self.n_rows)).T.to(features.device, torch.float32)
        self.active = self.active + (of_level @ (features != 0).float()).cpu()
        self.n_rows += torch.bincount(levels, minlength=len(self.n_rows))
        self.overall += (x - self.mean).square().sum()


def _hooks(
    point: str, dictionary: Dictionary, selected: PosMask, batch: CanvasBatch, fit: _Fit
) -> dict[str, list[tuple[str, Hook]]]:
    """The hooks of each state. That of "spliced" also adds the positions of the batch to `fit`."""
    kept: list[Tensor] = []
    reconstruct = splice(
        dictionary, error_term=False, edit=lambda features, hook: kept.append(features), share=batch.share
    )

    def spliced(activation: Tensor, hook: Any) -> Tensor:
        new: Tensor = reconstruct(activation, hook)
        x, reconstruction = vectors(activation, hook)[selected], vectors(new, hook)[selected]
        fit.add(_level_of_rows(batch, selected), x, reconstruction, kept.pop()[selected])
        return new

    def mean(activation: Tensor, hook: Any) -> Tensor:
        return fit.mean.to(activation).view(activation.shape[2:]).expand_as(activation)

    hooks = {"spliced": spliced, "zero_ablated": zero_ablate(), "mean_ablated": mean}
    attached = {state: [(point, only_at(hook, selected))] for state, hook in hooks.items()}
    if isinstance(dictionary, SparseDictionary) and dictionary.reads != dictionary.writes:
        attached["spliced"].insert(0, (dictionary.reads, reconstruct))
    return {"clean": [], **attached}


def _losses(
    model: DiffusionTransformer, batch: CanvasBatch, hooks: Mapping[str, list[tuple[str, Hook]]]
) -> tuple[Float[Tensor, "batch state"], Int[Tensor, "batch"]]:
    """Sum of the weighted cross-entropies of each canvas in each state, and the number of positions that count."""
    if model.cfg.is_autoregressive:
        loss = next_token_batch(model, batch.tokens, real=batch.real, counted=batch.editable)
        counted = loss.predicted.sum(dim=1)
    else:
        p_mask = batch.t[:, None].expand(batch.tokens.shape)
        # Under uniform noise every position that may be noise is predicted.
        real = batch.editable if model.cfg.uniform_noise else batch.real
        loss = masked_batch(model, batch.tokens, batch.noisy, p_mask, real=real)
        counted = batch.editable.sum(dim=1)
    sums = torch.zeros(len(batch.tokens), len(STATES), dtype=torch.float64)
    for i, state in enumerate(STATES):
        with model.hooks(fwd_hooks=hooks[state]):
            if not len(loss.targets):  # nothing is masked here; the hooks still measure the reconstruction
                model(loss.tokens, return_type=None, attention_mask=batch.real, **loss.beside)
                continue
            logits = model(loss.tokens, attention_mask=batch.real, logits_at=loss.rows, **loss.beside)
        sums[:, i] = loss.by_position(logits).cpu().double().sum(dim=1)
    return sums, counted.cpu()


def _level_of_rows(batch: CanvasBatch, selected: PosMask) -> Int[Tensor, "selected"]:
    """The noise level of each selected position, in reading order."""
    return batch.levels[selected.cpu().nonzero(as_tuple=True)[0]]
