"""The three signatures of taught pairs: each alone, and all as a study that can be stopped, resumed and split.

Shin et al., "A Theoretical Analysis of Why Masked Diffusion Models Mitigate the Reversal Curse" (arXiv 2602.02133),
claim for a model of one layer that training on forward sentences (1) strengthens evidence between tokens that the
reverse question reuses, because values do not know positions; (2) makes the attention routes of the two directions
correlate, because rotary positions only turn queries and keys; (3) gives the reverse loss a gradient aligned with that
of the forward loss. The measures are ours, named after what they measure.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.over_facts.executor import Executes
from diffusion_lens.analysis.over_facts.folder import Shard
from diffusion_lens.analysis.over_facts.study import Compute, Study
from diffusion_lens.analysis.signatures.evidence import (
    CanvasBatch,
    CanvasReading,
    PassReader,
    correlation_of_frequencies,
    edge_cut_of,
    evidence_of,
    longest_canvas,
    percentiles,
    plan_batches,
    reuse,
    routes_of,
)
from diffusion_lens.analysis.signatures.gradients import GradientAlignment, Gradients, check_projections, matrix_names
from diffusion_lens.analysis.signatures.result import FactSignatures, ReversalSignatures
from diffusion_lens.facts.taught_pairs import LaidOutPairs, TaughtCanvas, TaughtPair
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import provenance
from diffusion_lens.settings import Whole, at_least, takes, whole_numbers
from diffusion_lens.settings.shared import SignatureSettings

Pairs = Sequence[TaughtPair]
DEFAULTS = SignatureSettings()


@begins_run
def evidence(
    model: DiffusionTransformer,
    pairs: Pairs,
    candidates: Iterable[Whole] | None = None,
    *,
    batch_size: Whole | None = None,
    max_bytes: int = 2**30,
) -> Float[Tensor, "fact canvas layer head candidate"]:
    """Evidence of the source's value for every candidate, on the forward and the reverse canvas, for each head.

    Evidence is (gamma · U_y) · (W_O v), the direct effect on the logit of candidate y per unit of attention.

    Args:
        model: Masked diffusion model or causal model.
        pairs: Pairs on this model's canvases.
        candidates: Token ids; by default the answers of the reverse questions, in increasing order.
        batch_size: Pairs computed together; by default as many as fit, at most 32.
        max_bytes: Most memory for one batch, in addition to weights and result.

    Raises:
        ValueError: A candidate is no token that the model can write, a projection was replaced or carries a hook of
            torch, a canvas is that of another model, or the budget is too small.
    """
    chosen = _pick_candidates(model, pairs, candidates)
    check_projections(model, [f"blocks.{layer}.attn.o.weight" for layer in range(model.cfg.n_layers)])
    by_batch = [
        torch.stack([evidence_of(each, chosen, by_head=True) for each in both], dim=1).cpu()
        for both in _readings(model, pairs, batch_size, max_bytes)
    ]
    return torch.cat(by_batch)


@begins_run
def edge_cut(
    model: DiffusionTransformer, pairs: Pairs, *, batch_size: Whole | None = None, max_bytes: int = 2**30
) -> Float[Tensor, "fact canvas layer head"]:
    """log p(answer) that is lost by cutting the edge from reader to source in one head, in nats.

    The causal counterpart of `evidence`, with its arguments. A cut edge has the score -inf. NaN where the model
    does not see the source. In bfloat16, a hook that changes nothing still moves cuts (by 0.08 where the largest was
    1.27), because whole blocks are computed then and round differently; in float32 it does not.

    Raises:
        ValueError: A canvas is that of another model, or the budget is too small.
    """
    by_batch = [
        torch.stack([edge_cut_of(each, by_head=True) for each in both], dim=1).cpu()
        for both in _readings(model, pairs, batch_size, max_bytes)
    ]
    return torch.cat(by_batch)


@begins_run
def routes(
    model: DiffusionTransformer, pairs: Pairs, *, batch_size: Whole | None = None, max_bytes: int = 2**30
) -> Float[Tensor, "fact route layer head"]:
    """The attention scores from reader to source: on the forward canvas, on the reverse one, and counterfactual.

    The counterfactual scores take queries and keys of the forward canvas, before their rotation, to the positions of
    the reverse canvas, which isolates what the positions do. NaN where the model does not see the source from there.
    In bfloat16, a hook at the scores that changes nothing still moves them (by 0.04 where the largest was 8.9), because
    hooked scores are rounded and others are computed in float32; in float32 it does not. The arguments and errors are
    those of `edge_cut`.
    """
    return torch.cat([routes_of(*both).cpu() for both in _readings(model, pairs, batch_size, max_bytes)])


@begins_run
@torch.inference_mode(False)
def gradient_alignment(
    model: DiffusionTransformer,
    pairs: Pairs,
    parameters: Sequence[str] | None = None,
    *,
    batch_size: Whole | None = None,
    max_bytes: int = 2**30,
) -> GradientAlignment:
    """Cosine and transfer of the gradients of the two losses of each pair, and the effect of a small step.

    No weight is changed, and no gradient is stored in the model. The gradients are those of the weights as they are:
    a model with folded norms has others (`model.cfg.layer_norm_folding`).

    Args:
        model, pairs, max_bytes: Those of `evidence`.
        parameters: Names of weight matrices, as in `named_parameters`; by default all matrices. Biases and norms have
            no part in it.
        batch_size: Pairs computed together, which are also each other's baseline; by default as many as fit, at most
            32. At least 2; an odd number of pairs in batches of two makes one batch of three.

    Raises:
        ValueError: A parameter is no weight matrix of the model, a projection was replaced or carries a hook of torch,
            a canvas is that of another model, or the budget is too small.
    """
    names = _pick_parameters(model, parameters)
    _require_shuffled_pairs(len(pairs), batch_size)
    with model.optional_hooks():
        return GradientAlignment.joined(
            [
                GradientAlignment.of(*both, *(Gradients.of(batch, names) for batch in both))
                for both in _batches(model, pairs, batch_size, max_bytes)
            ]
        )


@takes(SignatureSettings)
@begins_run
@torch.inference_mode(False)
def reversal_signatures(
    model: DiffusionTransformer,
    pairs: Pairs | LaidOutPairs,
    *,
    candidates: Iterable[Whole] | None = None,
    settings: SignatureSettings,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> ReversalSignatures:
    """Evidence, edge cuts, routes and gradients of every pair, forward and in reverse.

    A pair costs L + 2 forward passes of one canvas in a model of L layers, and two backward passes without gradients of
    weights. One pass of each canvas gives states, scores and gradients, L - 1 in all are the blocks behind each cut,
    and one is the small step. To these come the readers in the block of each cut, or whole blocks under hooks.

    Args:
        model: Masked diffusion model or causal model, of any family.
        pairs: Pairs on this model's canvases, each with its own id or none; or those of `lay_out_pairs`, of which the
            record also lists the reasons for pairs that were set aside.
        candidates: Token ids among which the evidence for the right answer is ranked; by default the answers of all
            reverse questions, in increasing order.
        settings: How the signatures are computed.
        out: Folder for one file per pair. A call that finds pairs there computes only the others. By default nothing is
            written.
        shard: (i, n) or "i/n": compute the batches i, i + n, i + 2n, ... only; `ReversalSignatures.merge` joins them.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the batches; by default this process does.

    Raises:
        ValueError: There are no pairs, two have one id, the candidates do not contain an answer or are fewer than two,
            the folder contains another study, the budget is too small, or as in `gradient_alignment`.
    """
    plan = SignaturePlan.of(model, pairs, settings, candidates)
    folding = {"layer_norm_folding": model.cfg.layer_norm_folding}
    record = {**plan.describe(), **folding, **provenance(model, model.cfg)}

    study = Study(model, record, plan.batches, plan)
    return study.collect(ReversalSignatures, out, shard, progress, executor)


@dataclass(frozen=True, eq=False)
class SignaturePlan:
    """What a study of signatures computes, known without the weights; the `Job` of the study.

    Attributes:
        pairs: Pairs by id, in their order; those without an id are numbered.
        set_aside: Reasons why other pairs are left out, by id.
        candidates: Token ids among which the percentile is taken.
        parameters: Names of the weight matrices in which gradients are compared.
        batches: Ids of the pairs that are computed together.
    """

    pairs: dict[str, TaughtPair]
    set_aside: dict[str, str]
    candidates: list[int]
    parameters: list[str]
    batches: list[list[str]]

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        pairs: Pairs | LaidOutPairs,
        settings: SignatureSettings = DEFAULTS,
        candidates: Iterable[Whole] | None = None,
    ) -> "SignaturePlan":
        """The plan, with the arguments and errors of `reversal_signatures`; the model may lack its weights."""
        given, set_aside = (pairs.pairs, pairs.set_aside) if isinstance(pairs, LaidOutPairs) else (pairs, {})
        chosen, parameters = _pick_candidates(model, given, candidates), _pick_parameters(model, None)
        if missing := [pair.reverse.answer_token for pair in given if pair.reverse.answer_token not in chosen]:
            raise ValueError(f"the candidates do not contain the answer {missing[0]} of a reverse question; add it")
        if len(chosen) < 2:
            raise ValueError(
                "a percentile needs at least two candidates, which are the answers of the pairs unless others are "
                "named: use more pairs"
            )
        _require_shuffled_pairs(len(given), settings.batch_size)
        named: dict[str, TaughtPair] = {}
        for i, pair in enumerate(given):
            if (fact_id := pair.id or f"pair-{i:04d}") in named:
                raise ValueError(f"two pairs are called {fact_id!r}; give each its own id, and each once")
            named[fact_id] = pair
        ids, most = list(named), (settings.batch_size, settings.max_bytes)
        batches = plan_batches(model.cfg, longest_canvas(given), len(ids), *most, len(chosen))
        return cls(named, set_aside, chosen, parameters, [[ids[i] for i in batch] for batch in batches])

    def describe(self) -> dict[str, Any]:
        """The plan for the record of the study."""

        def canvas(one: TaughtCanvas) -> dict[str, Any]:
            numbers = {name: getattr(one, name) for name in ("row", "answer_token", "source")}
            return {"tokens": one.tokens.tolist(), **numbers}

        return {
            "candidates": self.candidates,
            "parameters": self.parameters,
            "batch_size": max(map(len, self.batches)),
            "facts": {
                fact_id: {"forward": canvas(pair.forward), "reverse": canvas(pair.reverse), "group": pair.group}
                for fact_id, pair in self.pairs.items()
            },
            "set_aside": self.set_aside,
        }

    def part(self, ids: Sequence[str]) -> "SignaturePlan":
        """The plan of these pairs alone."""
        return replace(self, pairs={pair_id: self.pairs[pair_id] for pair_id in ids}, set_aside={}, batches=[])

    def on(self, model: DiffusionTransformer) -> Compute:
        """The function that computes the signatures of a batch."""

        def compute(batch: Sequence[str]) -> list[FactSignatures]:
            with model.optional_hooks():
                return _signatures(model, [self.pairs[pair_id] for pair_id in batch], self.candidates, self.parameters)

        return compute


def _signatures(
    model: DiffusionTransformer, pairs: Pairs, candidates: Sequence[int], parameters: Sequence[str]
) -> list[FactSignatures]:
    """The signatures of a batch of pairs."""
    forward, reverse = _canvases(model, pairs)
    readers = [PassReader(batch) for batch in (forward, reverse)]
    gradients = [Gradients.of(reader.batch, parameters, reader) for reader in readers]
    aligned = GradientAlignment.of(forward, reverse, *gradients)
    readings = [reader.reading(each.losses) for reader, each in zip(readers, gradients, strict=True)]
    del gradients  # the largest tensors
    found = [evidence_of(reading, candidates) for reading in readings]
    right = [candidates.index(pair.reverse.answer_token) for pair in pairs]
    tensors = {
        "percentiles": torch.stack([percentiles(each, right) for each in found], dim=1),
        "reuses": reuse(*found),
        "cuts": torch.stack([edge_cut_of(reading) for reading in readings], dim=1),
        "routes": routes_of(*readings),
        "isotropic": torch.tensor([_isotropic(model, pair) for pair in pairs]),
        "cosines": aligned.cosines,
        "transfers": aligned.transfers,
        "steps": aligned.steps,
        "probabilities": (-aligned.losses).exp(),
    }
    on_cpu = {name: tensor.float().cpu() for name, tensor in tensors.items()}
    return [FactSignatures(**{name: tensor[i] for name, tensor in on_cpu.items()}) for i in range(len(pairs))]


def _isotropic(model: DiffusionTransformer, pair: TaughtPair) -> float:
    if (frequencies := model.positions.frequencies) is None:
        return math.nan
    forward, reverse = (canvas.source - canvas.row for canvas in (pair.forward, pair.reverse))
    return correlation_of_frequencies(frequencies, forward, reverse)


def _batches(
    model: DiffusionTransformer, pairs: Pairs, batch_size: Whole | None, max_bytes: int
) -> Iterator[tuple[CanvasBatch, CanvasBatch]]:
    """The forward and the reverse canvases of each batch."""
    _check_pairs(model, pairs)
    for batch in plan_batches(model.cfg, longest_canvas(pairs), len(pairs), batch_size, max_bytes):
        yield _canvases(model, [pairs[i] for i in batch])


def _readings(
    model: DiffusionTransformer, pairs: Pairs, batch_size: Whole | None, max_bytes: int
) -> Iterator[tuple[CanvasReading, CanvasReading]]:
    for forward, reverse in _batches(model, pairs, batch_size, max_bytes):
        yield CanvasReading.of(forward), CanvasReading.of(reverse)


def _canvases(model: DiffusionTransformer, pairs: Pairs) -> tuple[CanvasBatch, CanvasBatch]:
    forward, reverse = ([getattr(pair, name) for pair in pairs] for name in ("forward", "reverse"))
    return CanvasBatch.of(model, forward), CanvasBatch.of(model, reverse)


def _check_pairs(model: DiffusionTransformer, pairs: Pairs) -> None:
    """Refuse pairs that were laid out for another model."""
    if not pairs:
        raise ValueError("no pairs were given")
    if model.cfg.self_conditioning:
        raise ValueError(
            f"{model.cfg.model_name!r} has no [MASK] where an answer is read, and which positions see each other "
            "differs by layer, so that a canvas has no one reader and source: signatures are of models that mask, or "
            "that predict next tokens"
        )
    for pair in pairs:
        for way in ("forward", "reverse"):
            canvas: TaughtCanvas = getattr(pair, way)
            where = f"the {way} canvas of {pair.id or 'a pair'}"
            if canvas.tokens.is_floating_point():
                raise ValueError(f"{where} has tokens of {canvas.tokens.dtype}; give the ids of tokens, whole numbers")
            if not 0 <= canvas.answer_token < model.cfg.d_vocab_out:
                raise ValueError(
                    f"{where} has the answer {canvas.answer_token}; {model.cfg.model_name!r} writes tokens 0 to "
                    f"{model.cfg.d_vocab_out - 1}"
                )
            read = model.readout.rows(torch.arange(len(canvas.tokens))) == canvas.row
            masked = canvas.tokens.cpu() == model.cfg.blank if model.cfg.has_mask else read
            if not bool((masked & read).any()):
                raise ValueError(
                    f"{where} has no [MASK] where row {canvas.row} reads, as {model.cfg.model_name!r} needs: lay the "
                    "pair out for this model, TaughtPair.of(model, ...)"
                )


def _pick_candidates(model: DiffusionTransformer, pairs: Pairs, candidates: Iterable[Whole] | None) -> list[int]:
    _check_pairs(model, pairs)
    if candidates is None:
        return sorted({pair.reverse.answer_token for pair in pairs})
    chosen = whole_numbers("candidates", candidates)
    if not chosen:
        raise ValueError("candidates is empty; give the ids of tokens, or leave it out for the answers of the pairs")
    if wrong := [token for token in chosen if not 0 <= token < model.cfg.d_vocab_out]:
        raise ValueError(f"candidates contain {wrong[0]}; the model writes tokens 0 to {model.cfg.d_vocab_out - 1}")
    if len(set(chosen)) < len(chosen):
        raise ValueError("candidates contain a token twice; give each once")
    return chosen


def _pick_parameters(model: DiffusionTransformer, parameters: Sequence[str] | None) -> list[str]:
    names = matrix_names(model) if parameters is None else list(parameters)
    if not names:
        raise ValueError("parameters is empty; name at least one weight matrix, or leave it out for all")
    if len(set(names)) < len(names):
        raise ValueError("parameters contain a name twice; give each once")
    check_projections(model, names)
    return names


def _require_shuffled_pairs(n_pairs: int, batch_size: Whole | None) -> None:
    if n_pairs > 1 and batch_size is not None and at_least(1, "batch_size", batch_size) == 1:
        raise ValueError("batch_size=1: pairs computed together are each other's baseline; give at least 2")
