"""Attention sinks by denoising step: which positions receive most of the attention, and for how long?

The attention that position j receives from the queries i of one head is a column sum of the pattern A,

    r_j = Σ_i A_ij,

so that the r_j of a head add up to its number of queries, and on a bidirectional model equal attention gives r_j = 1.
Position j is a sink if r_j exceeds the mean of all other positions by more than a threshold ε (Rulli et al. 2025, arXiv
2510.15731, eq. 3). The paper defines the score as the mean over the queries, which is at most 1, and uses ε = 3, with
scores of up to 50 in its histograms. This fits sums, in multiples of equal attention, which are used here.

On a causal model an early position has more queries, and equal attention gives it more: e_j = Σ_(i ≥ j) 1 / (i + 1). A
position is therefore a sink by its excess r_j - e_j. On a bidirectional model e_j is 1 everywhere, and the excess
decides as in the paper. (The mean over the queries that see j is `incoming`. By that measure the last token of a causal
text, whose only query is itself, would often exceed all others.)

Padding, and positions that a text has not reached, are neither queries nor keys. Patterns are reduced inside the hook,
and never kept.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.by_step.sinks_result import AttentionSinks
from diffusion_lens.analysis.inputs import ForwardPass, Inputs, Readable
from diffusion_lens.identity import begins_run
from diffusion_lens.model.attention_patterns import AttentionPattern
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, not_negative, pick_indices

HEADS = ("each", "mean")


@begins_run
@torch.no_grad()
def attention_sinks(
    model: DiffusionTransformer,
    inputs: Readable,
    *,
    threshold: float = 3.0,
    steps: Whole | Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = None,
    heads: str = "each",
    max_bytes: int = 2**30,
    progress: bool = False,
) -> AttentionSinks:
    """The attention that each position receives, by step, layer and head, and which positions are sinks.

    The caller's hooks act, also those that change patterns. Under guidance it is the conditional branch.

    Args:
        model: Model of either variant.
        inputs: A trajectory, or texts, Int[batch pos] tokens, queries or facts for a single pass without a step.
        threshold: ε, in multiples of equal attention.
        steps: Steps of the trajectory, negative ones from the end; by default all.
        layers: Layers, negative ones from the end; by default all.
        heads: "each", or "mean" for the average over the heads of a layer, which takes less memory.
        max_bytes: Most memory for the result and for the pattern of one layer.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A step or layer that does not exist, steps without a trajectory, or a budget that is too small.
    """
    if heads not in HEADS:
        raise ValueError(f"heads={heads!r}; it must be 'each' or 'mean'")
    epsilon = not_negative("threshold", threshold, "every position above the mean")
    given = Inputs.of(model, inputs)
    run, chosen, picked = given.trajectory, given.pick_steps(steps), pick_indices("layers", layers, model.cfg.n_layers)
    indices = None if chosen is None else sorted(chosen)
    axis: Sequence[int | None] = [None] if indices is None else indices
    passes = [read for index in axis for read in given.at(index)]
    n_heads = 1 if heads == "mean" else model.cfg.n_heads
    _require_memory(model, passes[0], len(passes) * len(picked) * n_heads, max_bytes)

    received = [
        _received(read, picked, heads)
        for read in tqdm(passes, desc="attention sinks", unit="step", disable=not progress)
    ]
    tokens = torch.stack([read.tokens for read in passes]).cpu()
    present = torch.stack([read.present for read in passes]).cpu()
    even, queries = zip(*(_equal_attention(read) for read in passes), strict=True)
    tensors = {
        "received": torch.stack(received),
        "even": torch.stack(even),
        "n_queries": torch.stack(queries),
        "canvases": tokens,
        "masked": torch.stack([read.masked for read in passes]).cpu(),
        "special": _special(model, tokens) & present,
    }
    final = tokens[0] if run is None else run.tokens.cpu()
    ids = torch.cat([tokens.flatten(), final.flatten()]).unique().tolist()
    record = {
        "steps": indices,
        "n_steps": given.n_steps,
        "layers": picked,
        "heads": heads,
        "inputs": given.describe(),
        **provenance(model, model.cfg),
    }
    return AttentionSinks(
        **(tensors if indices is not None else {name: x[0] for name, x in tensors.items()}),
        given=torch.zeros_like(tokens[0], dtype=torch.bool) if run is None else run.given.cpu(),
        final=final,
        threshold=epsilon,
        words=dict(zip(ids, model.words(ids), strict=True)),
        record=record,
    )


def _received(read: ForwardPass, layers: Sequence[int], heads: str) -> Float[Tensor, "layer head batch pos"]:
    """The column sums of the patterns of some layers; NaN at positions without a token."""
    summed: dict[str, Tensor] = {}
    present = read.present

    def reduce(pattern: Tensor, hook: Any) -> None:
        wide = torch.promote_types(pattern.dtype, torch.float32)
        columns = torch.einsum("bhqk,bq->hbk", pattern.to(wide), present.to(wide))
        columns = columns.mean(dim=0, keepdim=True) if heads == "mean" else columns
        summed[hook.name] = columns.masked_fill(~present, torch.nan).float().cpu()

    names = [f"blocks.{layer}.attn.hook_pattern" for layer in layers]
    read.run([(name, reduce) for name in names])
    return torch.stack([summed[name] for name in names])


def _equal_attention(read: ForwardPass) -> tuple[Tensor, Tensor]:
    """What each position receives if every query attends equally to all that it sees, and the number of its queries.

    Both are [batch pos], and 0 at positions without a token.
    """
    tokens, present = read.tokens, read.present
    visibility = AttentionPattern(read.model.cfg.block_size).visibility(tokens.shape[1], tokens.device, read.real)
    allowed = visibility.dense(tokens.shape[1], tokens.shape[1], tokens.device)[:, 0].expand(len(tokens), -1, -1)
    seen = (allowed & present[:, :, None] & present[:, None, :]).float()
    shares = seen / seen.sum(dim=2, keepdim=True).clamp(min=1)
    return shares.sum(dim=1).cpu(), seen.sum(dim=1).long().cpu()


def _special(model: DiffusionTransformer, tokens: Tensor) -> Tensor:
    """True at special tokens of the tokenizer other than [MASK]."""
    ids = set(getattr(model.tokenizer, "all_special_ids", ())) - {model.cfg.mask_token_id}
    return torch.isin(tokens, torch.tensor(sorted(ids), dtype=tokens.dtype))


def _require_memory(model: DiffusionTransformer, read: ForwardPass, n_rows: int, max_bytes: int) -> None:
    """Raise a `ValueError` if the result and one pattern take more than `max_bytes`."""
    batch, pos = read.tokens.shape
    pattern = 3 * batch * model.cfg.n_heads * pos * pos * max(4, model.cfg.dtype.itemsize)
    needed = n_rows * batch * pos * 4 + pattern
    if needed > max_bytes:
        raise ValueError(
            f"the attention received takes {needed:,} bytes, of which {pattern:,} are for the pattern of one layer, "
            f"but max_bytes is {max_bytes:,}: give fewer steps or layers, heads='mean', or fewer rows"
        )
