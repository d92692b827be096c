"""Each signature alone: evidence, edge cuts, routes and gradients of taught pairs, batch by batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.signatures.alignment import GradientAlignment
from diffusion_lens.analysis.signatures.batches import longest_canvas, plan_batches
from diffusion_lens.analysis.signatures.canvases import CanvasBatch
from diffusion_lens.analysis.signatures.edges import edge_cut_of
from diffusion_lens.analysis.signatures.evidence import evidence_of
from diffusion_lens.analysis.signatures.gradients import check_projections, matrix_names
from diffusion_lens.analysis.signatures.reading import CanvasReading
from diffusion_lens.analysis.signatures.routes import routes_of
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, whole_numbers
from diffusion_lens.taught_pairs import TaughtPair

Pairs = Sequence[TaughtPair]


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
        ValueError: A candidate is no token that the model can write, or the budget is too small.
    """
    chosen = pick_candidates(model, pairs, candidates)

    def compute(forward: CanvasBatch, reverse: CanvasBatch) -> Tensor:
        return torch.stack([evidence_of(CanvasReading.of(batch), chosen) for batch in (forward, reverse)], dim=1)

    return _joined(model, pairs, batch_size, max_bytes, compute)


@begins_run
def edge_cut(
    model: DiffusionTransformer, pairs: Pairs, *, batch_size: Whole | None = None, max_bytes: int = 2**30
) -> Float[Tensor, "fact canvas layer head"]:
    """log p(answer) that is lost by cutting the edge from reader to source in one head, in nats.

    The causal counterpart of `evidence`, with the arguments and errors of `routes`. A cut edge has the score -inf. NaN
    where a causal model does not see the source.
    """

    def compute(forward: CanvasBatch, reverse: CanvasBatch) -> Tensor:
        readings = map(CanvasReading.of, (forward, reverse))
        return torch.stack([edge_cut_of(reading, by_head=True) for reading in readings], dim=1)

    return _joined(model, pairs, batch_size, max_bytes, compute)


@begins_run
def routes(
    model: DiffusionTransformer, pairs: Pairs, *, batch_size: Whole | None = None, max_bytes: int = 2**30
) -> Float[Tensor, "fact route layer head"]:
    """The attention scores from reader to source: on the forward canvas, on the reverse one, and counterfactual.

    The counterfactual scores take queries and keys of the forward canvas, before their rotation, to the positions of
    the reverse canvas, which isolates what the positions do. NaN where a causal model does not see the source.

    Args:
        model: Masked diffusion model or causal model.
        pairs: Pairs on this model's canvases.
        batch_size: Pairs computed together; by default as many as fit, at most 32.
        max_bytes: Most memory for one batch, in addition to weights and result.

    Raises:
        ValueError: The budget is too small.
    """

    def compute(forward: CanvasBatch, reverse: CanvasBatch) -> Tensor:
        return routes_of(CanvasReading.of(forward), CanvasReading.of(reverse))

    return _joined(model, pairs, batch_size, max_bytes, compute)


@begins_run
def gradient_alignment(
    model: DiffusionTransformer,
    pairs: Pairs,
    parameters: Sequence[str] | None = None,
    *,
    batch_size: Whole | None = None,
    max_bytes: int = 2**30,
) -> GradientAlignment:
    """Cosine and transfer of the gradients of the two losses of each pair, and the effect of a small step.

    No weight is changed, and no gradient is stored in the model.

    Args:
        model: Masked diffusion model or causal model.
        pairs: Pairs on this model's canvases.
        parameters: Names of weight matrices, as in `named_parameters`; by default all matrices. Biases and norms have
            no part in it.
        batch_size: Pairs computed together, which are also each other's baseline; by default as many as fit, at most
        32.
        max_bytes: Most memory for one batch, in addition to weights and result.

    Raises:
        ValueError: A parameter is no weight matrix of the model, a projection was replaced or carries a hook of torch,
            or the budget is too small.
    """
    names = pick_parameters(model, parameters)
    with model.optional_hooks():
        return GradientAlignment.joined(
            [
                GradientAlignment.of(forward, reverse, names)
                for forward, reverse in _batches(model, pairs, batch_size, max_bytes)
            ]
        )


def canvases_of(model: DiffusionTransformer, pairs: Pairs) -> tuple[CanvasBatch, CanvasBatch]:
    forward, reverse = ([getattr(pair, name) for pair in pairs] for name in ("forward", "reverse"))
    return CanvasBatch.of(model, forward), CanvasBatch.of(model, reverse)


def _batches(
    model: DiffusionTransformer, pairs: Pairs, batch_size: Whole | None, max_bytes: int
) -> Iterator[tuple[CanvasBatch, CanvasBatch]]:
    """The forward and the reverse canvases of each batch."""
    _require_pairs(pairs)
    for batch in plan_batches(model.cfg, longest_canvas(pairs), len(pairs), batch_size, max_bytes):
        yield canvases_of(model, [pairs[i] for i in batch])


def _joined(
    model: DiffusionTransformer,
    pairs: Pairs,
    batch_size: Whole | None,
    max_bytes: int,
    compute: Callable[[CanvasBatch, CanvasBatch], Tensor],
) -> Tensor:
    return torch.cat([compute(*both).cpu() for both in _batches(model, pairs, batch_size, max_bytes)])


def _require_pairs(pairs: Pairs) -> None:
    if not pairs:
        raise ValueError("no pairs were given")


def pick_candidates(model: DiffusionTransformer, pairs: Pairs, candidates: Iterable[Whole] | None) -> list[int]:
    _require_pairs(pairs)
    if candidates is None:
        return sorted({pair.reverse.answer_token for pair in pairs})
    chosen = whole_numbers("candidates", candidates)
    if wrong := [token for token in chosen if not 0 <= token < model.cfg.d_vocab_out]:
        raise ValueError(f"candidates contain {wrong[0]}; the model writes tokens 0 to {model.cfg.d_vocab_out - 1}")
    if len(set(chosen)) < len(chosen):
        raise ValueError("candidates contain a token twice; give each once")
    return chosen


def pick_parameters(model: DiffusionTransformer, parameters: Sequence[str] | None) -> list[str]:
    names = matrix_names(model) if parameters is None else list(parameters)
    if not names:
        raise ValueError("parameters is empty; name at least one weight matrix, or leave it out for all")
    check_projections(model, names)
    return names
