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
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.dictionaries.canvases import CanvasBatch, Canvases
from diffusion_lens.analysis.dictionaries.loss_result import STATES, DictionaryLoss
from diffusion_lens.analysis.dictionaries.noise import Mask, Noise, NoiseRange, check_mask, spans_of
from diffusion_lens.analysis.dictionaries.shard_task import run_to
from diffusion_lens.analysis.dictionaries.splicing import Dictionary, check_dictionary, only_at, splice, vectors
from diffusion_lens.analysis.inputs import CleanTexts, Texts, readable_points
from diffusion_lens.hook_names import Hook
from diffusion_lens.identity import begins_run, name_of
from diffusion_lens.interventions import zero_ablate
from diffusion_lens.loss_batch import LossBatch
from diffusion_lens.losses import masked_batch, next_token_batch
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, at_least, whole_number
from diffusion_lens.shapes import PosMask


@begins_run
@torch.no_grad()
def dictionary_loss(
    model: DiffusionTransformer,
    texts: Texts,
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
            not trained.
        name: Hook point.
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
    """
    check_dictionary(dictionary)
    model.require_own_times("dictionary_loss")
    if model.cfg.causal_block is not None:
        raise ValueError(
            f"{model.cfg.model_name!r} attends by blocks, and its loss reads the noisy and the clean text in one pass, "
            "in which a position has two activations; dictionary_loss replaces one. Compare its loss with and without "
            "both, model.run_with_hooks(tokens, return_type='loss', fwd_hooks=[(name, splice(dictionary, "
            "error_term=False))]), or denoise under this hook"
        )
    spans = spans_of(model, t, NoiseRange(samples=4))
    if not model.cfg.grows and any(span == (0.0, 0.0) for span in spans):
        raise ValueError("at the noise level t=0 nothing is masked, so there is no loss; give levels above 0")
    selection, size = check_mask(model, mask, spans), at_least(1, "batch_size", batch_size)
    (point,) = readable_points(model, [name])
    clean = CleanTexts.of(model, texts, attention_mask, prepend_bos)
    _require_predictions(model, clean)
    canvases = Canvases(model, clean, spans, whole_number("seed", seed))
    with tqdm(total=2 * len(canvases), desc="dictionary", unit="canvas", disable=not progress) as bar:
        means = _Means.of(model, canvases, point, selection, size, bar)
        fit = _Fit.of(means)
        n_states, n_texts = len(STATES), len(clean.tokens)
        losses = torch.zeros(n_texts, len(spans), n_states, dtype=torch.float64)
        n_counted = torch.zeros(n_texts, dtype=torch.long)
        for batch in canvases.batches(size):
            of_batch, counted = _losses(
                model, batch, _hooks(point, dictionary, batch.selected(selection), batch, means, fit)
            )
            losses[batch.rows, batch.levels], n_counted[batch.rows] = of_batch / counted[:, None].clamp(min=1), counted
            bar.update(len(batch.tokens))
    record = {
        "name": point,
        "dictionary": name_of(dictionary),
        "mask": selection,
        "seed": canvases.seed,
        "batch_size": size,
        "texts": clean.describe(),
        **provenance(model, model.cfg),
    }
    return DictionaryLoss(
        losses=losses,
        n_counted=n_counted,
        texts=torch.tensor(clean.indices),
        spans=torch.tensor(spans, dtype=torch.float64),
        variance_explained=1 - fit.residual / fit.within_levels,
        l0=fit.active / fit.n_rows,
        n_rows=fit.n_rows,
        overall_variance_explained=float(1 - fit.residual.sum() / fit.overall),
        record=record,
    )


def _require_predictions(model: DiffusionTransformer, clean: CleanTexts) -> None:
    """Raise a `ValueError` that names the texts of which the model predicts no token."""
    if not model.cfg.grows:
        return
    rows = zip(clean.indices, clean.editable, strict=True)
    if unpredicted := [index for index, editable in rows if not bool(editable[1:].any())]:
        shown = ", ".join(map(str, unpredicted[:5])) + (", ..." if len(unpredicted) > 5 else "")
        raise ValueError(
            f"{model.cfg.model_name!r} does not predict the first token of a text, so texts of one token have no loss: "
            f"leave out the texts {shown}"
        )


@dataclass
class _Means:
    """Mean activations.

    Attributes:
        by_level: Float[level d], mean over the positions of each noise level.
        overall: Float[d], mean over all.
    """

    by_level: Float[Tensor, "level d"]
    overall: Float[Tensor, "d"]

    @classmethod
    def of(
        cls, model: DiffusionTransformer, canvases: Canvases, point: str, mask: Mask, size: int, bar: Any
    ) -> "_Means":
        """The means over the selected positions of all canvases."""
        total, counts = None, torch.zeros(len(canvases.spans), dtype=torch.float64)
        for batch in canvases.batches(size):
            selected = batch.selected(mask)
            rows = run_to(model, batch, [point])[point][selected].to(device="cpu", dtype=torch.float64)
            levels = _level_of_rows(batch, selected)
            total = rows.new_zeros(len(counts), rows.shape[1]) if total is None else total
            total.index_add_(0, levels, rows)
            counts += torch.bincount(levels, minlength=len(counts))
            bar.update(len(batch.tokens))
        if total is None or not counts.sum():
            raise ValueError(f"mask={mask!r} selects no position of any canvas; give other noise levels, or more texts")
        return cls(total / counts[:, None], total.sum(dim=0) / counts.sum())


@dataclass
class _Fit:
    """Sums over the positions of each noise level.

    Attributes:
        residual: Float[level], squared distance of activations and reconstructions.
        within_levels: Float[level], squared distance of activations and their mean at this level.
        active: Float[level], number of features that are not zero.
        n_rows: Int[level], number of positions.
        overall: Float[], squared distance of activations and their mean at all levels.
    """

    residual: Float[Tensor, "level"]
    within_levels: Float[Tensor, "level"]
    active: Float[Tensor, "level"]
    n_rows: Int[Tensor, "level"]
    overall: Float[Tensor, ""]

    @classmethod
    def of(cls, means: _Means) -> "_Fit":
        """Sums over no positions yet."""
        zeros = torch.zeros(len(means.by_level), dtype=torch.float64)
        return cls(zeros.clone(), zeros.clone(), zeros.clone(), zeros.long(), torch.zeros((), dtype=torch.float64))

    def add(self, means: _Means, levels: Tensor, x: Tensor, reconstruction: Tensor, features: Tensor) -> None:
        """Add some positions: their levels, and a row of each tensor for each of them."""
        x, reconstruction = (rows.to(device="cpu", dtype=torch.float64) for rows in (x, reconstruction))
        self.residual.index_add_(0, levels, (x - reconstruction).square().sum(dim=1))
        self.within_levels.index_add_(0, levels, (x - means.by_level[levels]).square().sum(dim=1))
        self.active.index_add_(0, levels, (features != 0).sum(dim=1).cpu().double())
        self.n_rows += torch.bincount(levels, minlength=len(self.n_rows))
        self.overall += (x - means.overall).square().sum()


def _hooks(
    point: str, dictionary: Dictionary, selected: PosMask, batch: CanvasBatch, means: _Means, fit: _Fit
) -> dict[str, list[tuple[str, Hook]]]:
    """The hooks of each state. That of "spliced" also adds the positions of the batch to `fit`."""
    kept: list[Tensor] = []
    reconstruct = splice(dictionary, error_term=False, edit=lambda features, hook: kept.append(features))

    def spliced(activation: Tensor, hook: Any) -> Tensor:
        new: Tensor = reconstruct(activation, hook)
        x, reconstruction = vectors(activation, hook)[selected], vectors(new, hook)[selected]
        fit.add(means, _level_of_rows(batch, selected), x, reconstruction, kept.pop()[selected])
        return new

    def mean(activation: Tensor, hook: Any) -> Tensor:
        return means.overall.to(activation).view(activation.shape[2:]).expand_as(activation)

    hooks = {"spliced": spliced, "zero_ablated": zero_ablate(), "mean_ablated": mean}
    return {"clean": [], **{state: [(point, only_at(hook, selected))] for state, hook in hooks.items()}}


def _losses(
    model: DiffusionTransformer, batch: CanvasBatch, hooks: Mapping[str, list[tuple[str, Hook]]]
) -> tuple[Float[Tensor, "batch state"], Int[Tensor, "batch"]]:
    """Sum of the weighted cross-entropies of each canvas in each state, and the number of positions that count."""
    if model.cfg.grows:
        loss = next_token_batch(model, batch.tokens, real=batch.real, counted=batch.editable)
        counted = loss.predicted.sum(dim=1)
    else:
        p_mask = batch.t[:, None].expand(batch.tokens.shape)
        # Under uniform noise every position that may be noise is predicted.
        real = batch.editable if model.cfg.rewrites else batch.real
        loss = masked_batch(model, batch.tokens, batch.noisy, p_mask, real=real)
        counted = batch.editable.sum(dim=1)
    sums = [_loss_of_rows(model, batch, loss, hooks[state]) for state in STATES]
    return torch.stack(sums, dim=1).cpu(), counted.cpu()


def _loss_of_rows(
    model: DiffusionTransformer, batch: CanvasBatch, loss: LossBatch, hooks: list[tuple[str, Hook]]
) -> Float[Tensor, "batch"]:
    with model.hooks(fwd_hooks=hooks):
        if not len(loss.targets):  # nothing is masked here; the hooks still measure the reconstruction
            model(loss.tokens, return_type=None, attention_mask=batch.real, **loss.beside)
            return torch.zeros(len(loss.tokens), dtype=torch.float64)
        logits = model(loss.tokens, attention_mask=batch.real, logits_at=loss.rows, **loss.beside)
    return loss.by_position(logits).cpu().double().sum(dim=1)


def _level_of_rows(batch: CanvasBatch, selected: PosMask) -> Int[Tensor, "selected"]:
    """The noise level of each selected position, in reading order."""
    return batch.levels[selected.cpu().nonzero(as_tuple=True)[0]]
