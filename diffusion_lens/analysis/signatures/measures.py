"""Each signature alone: evidence, edge cuts, routes and gradients of taught pairs, batch by batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.signatures.alignment import GradientAlignment
from diffusion_lens.analysis.signatures.batches import longest_canvas, plan_batches, require_shuffled_pairs
from diffusion_lens.analysis.signatures.canvases import CanvasBatch
from diffusion_lens.analysis.signatures.edges import edge_cut_of
from diffusion_lens.analysis.signatures.evidence import evidence_of
from diffusion_lens.analysis.signatures.gradients import Gradients, check_projections, matrix_names
from diffusion_lens.analysis.signatures.reading import CanvasReading
from diffusion_lens.analysis.signatures.routes import routes_of
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, whole_numbers
from diffusion_lens.taught_pairs import TaughtCanvas, TaughtPair

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
        ValueError: A candidate is no token that the model can write, a projection was replaced or carries a hook of
            torch, a canvas is that of another model, or the budget is too small.
    """
    chosen = pick_candidates(model, pairs, candidates)
    check_projections(model, [f"blocks.{layer}.attn.o.weight" for layer in range(model.cfg.n_layers)])

    def compute(forward: CanvasBatch, reverse: CanvasBatch) -> Tensor:
        readings = map(CanvasReading.of, (forward, reverse))
        return torch.stack([evidence_of(reading, chosen, by_head=True) for reading in readings], dim=1)

    return _joined(model, pairs, batch_size, max_bytes, compute)


@begins_run
def edge_cut(
    model: DiffusionTransformer, pairs: Pairs, *, batch_size: Whole | None = None, max_bytes: int = 2**30
) -> Float[Tensor, "fact canvas layer head"]:
    """log p(answer) that is lost by cutting the edge from reader to source in one head, in nats.

    The causal counterpart of `evidence`, with the arguments and errors of `routes`. A cut edge has the score -inf. NaN
    where a causal model does not see the source. In bfloat16, a hook that changes nothing still moves cuts (by 0.08
    where the largest was 1.27), because whole blocks are computed then and round differently; in float32 it does not.
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
    In bfloat16, a hook at the scores that changes nothing still moves them (by 0.04 where the largest was 8.9), because
    hooked scores are rounded and others are computed in float32; in float32 it does not.

    Args:
        model: Masked diffusion model or causal model.
        pairs: Pairs on this model's canvases.
        batch_size: Pairs computed together; by default as many as fit, at most 32.
        max_bytes: Most memory for one batch, in addition to weights and result.

    Raises:
        ValueError: A canvas is that of another model, or the budget is too small.
    """

    def compute(forward: CanvasBatch, reverse: CanvasBatch) -> Tensor:
        return routes_of(CanvasReading.of(forward), CanvasReading.of(reverse))

    return _joined(model, pairs, batch_size, max_bytes, compute)


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
        model: Masked diffusion model or causal model.
        pairs: Pairs on this model's canvases.
        parameters: Names of weight matrices, as in `named_parameters`; by default all matrices. Biases and norms have
            no part in it.
        batch_size: Pairs computed together, which are also each other's baseline; by default as many as fit, at most
            32. At least 2; an odd number of pairs in batches of two makes one batch of three.
        max_bytes: Most memory for one batch, in addition to weights and result.

    Raises:
        ValueError: A parameter is no weight matrix of the model, a projection was replaced or carries a hook of torch,
            a canvas is that of another model, or the budget is too small.
    """
    names = pick_parameters(model, parameters)
    require_shuffled_pairs(len(pairs), batch_size)
    with model.optional_hooks():
        return GradientAlignment.joined(
            [
                GradientAlignment.of(*both, *(Gradients.of(batch, names) for batch in both))
                for both in _batches(model, pairs, batch_size, max_bytes)
            ]
        )


def canvases_of(model: DiffusionTransformer, pairs: Pairs) -> tuple[CanvasBatch, CanvasBatch]:
    forward, reverse = ([getattr(pair, name) for pair in pairs] for name in ("forward", "reverse"))
    return CanvasBatch.of(model, forward), CanvasBatch.of(model, reverse)


def _batches(
    model: DiffusionTransformer, pairs: Pairs, batch_size: Whole | None, max_bytes: int
) -> Iterator[tuple[CanvasBatch, CanvasBatch]]:
    """The forward and the reverse canvases of each batch."""
    check_pairs(model, pairs)
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


def check_pairs(model: DiffusionTransformer, pairs: Pairs) -> None:
    """Raise a `ValueError` unless the pairs are canvases of this model, which may have been laid out for another."""
    if not pairs:
        raise ValueError("no pairs were given")
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


def pick_candidates(model: DiffusionTransformer, pairs: Pairs, candidates: Iterable[Whole] | None) -> list[int]:
    """Token ids among which evidence is compared; by default the answers of the reverse questions, in order."""
    check_pairs(model, pairs)
    if candidates is None:
        return sorted({pair.reverse.answer_token for pair in pairs})
    chosen = whole_numbers("candidates", candidates)
    if wrong := [token for token in chosen if not 0 <= token < model.cfg.d_vocab_out]:
        raise ValueError(f"candidates contain {wrong[0]}; the model writes tokens 0 to {model.cfg.d_vocab_out - 1}")
    if len(set(chosen)) < len(chosen):
        raise ValueError("candidates contain a token twice; give each once")
    return chosen


def pick_parameters(model: DiffusionTransformer, parameters: Sequence[str] | None) -> list[str]:
    """Names of the weight matrices to compare; by default all."""
    if isinstance(parameters, str):
        raise ValueError(f"parameters={parameters!r}; give a list of names, [{parameters!r}]")
    names = matrix_names(model) if parameters is None else list(parameters)
    if not names:
        raise ValueError("parameters is empty; name at least one weight matrix, or leave it out for all")
    if len(set(names)) < len(names):
        raise ValueError("parameters contain a name twice; give each once")
    check_projections(model, names)
    return names
