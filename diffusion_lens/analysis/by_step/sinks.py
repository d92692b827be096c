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

from diffusion_lens.analysis.batching import reserved, row_bytes
from diffusion_lens.analysis.by_step.sinks_result import AttentionSinks
from diffusion_lens.analysis.inputs import ForwardPass, Inputs, Readable, SharedPass, passes_of
from diffusion_lens.identity import begins_run
from diffusion_lens.model.attention_patterns import AttentionPattern
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, not_negative, pick_indices

HEADS = ("each", "mean")
# 4 + 8 + 8 + 1 + 1 of the result, and 8 + 1 + 1 of the canvases to be read.
_BYTES_OF_A_POSITION = 32


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
    attention_mask: Tensor | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> AttentionSinks:
    """The attention that each position receives, by step, layer and head, and which positions are sinks.

    The caller's hooks act, also those that change patterns. Without hooks, steps with the same canvas share a forward
    pass; a causal model takes a single one. Under guidance it is the conditional branch.

    Args:
        model: Model of either variant.
        inputs: A trajectory, or texts, Int[batch pos] tokens, queries or facts for a single pass without a step.
        threshold: ε, in multiples of equal attention.
        steps: Steps of the trajectory, negative ones from the end; by default all.
        layers: Layers, negative ones from the end; by default all.
        heads: "each", or "mean" for the average over the heads of a layer, which takes less memory.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        max_bytes: Most memory for the result and for one forward pass.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A step or layer that does not exist, steps without a trajectory, or a budget that is too small.
    """
    if heads not in HEADS:
        raise ValueError(f"heads={heads!r}; it must be 'each' or 'mean'")
    epsilon = not_negative("threshold", threshold, "every position above the mean")
    given = Inputs.of(model, inputs, attention_mask=attention_mask)
    run, chosen, picked = given.trajectory, given.pick_steps(steps), pick_indices("layers", layers, model.cfg.n_layers)
    indices = None if chosen is None else sorted(chosen)
    batch, pos = next(given.at(None if indices is None else indices[0])).tokens.shape
    n_steps, n_heads = 1 if indices is None else len(indices), 1 if heads == "mean" else model.cfg.n_heads
    _require_memory(model, (batch, pos), (n_steps, len(picked), n_heads), max_bytes)

    tensors = {
        "received": torch.full((n_steps, len(picked), n_heads, batch, pos), torch.nan),
        "even": torch.empty(n_steps, batch, pos),
        "n_queries": torch.empty(n_steps, batch, pos, dtype=torch.long),
        "canvases": torch.empty(n_steps, batch, pos, dtype=torch.long),
        "masked": torch.empty(n_steps, batch, pos, dtype=torch.bool),
        "special": torch.empty(n_steps, batch, pos, dtype=torch.bool),
    }
    ids: set[int] = set()
    with tqdm(total=n_steps, desc="attention sinks", unit="step", disable=not progress) as bar:
        for one in passes_of(given, indices):
            _receive(one, picked, tensors["received"])
            for index, canvas in one.served.items():
                tensors["even"][index], tensors["n_queries"][index] = _equal_attention(canvas)
                tensors["canvases"][index], tensors["masked"][index] = canvas.tokens, canvas.masked
                tensors["special"][index] = _special(model, canvas.tokens) & canvas.present
                ids |= set(canvas.tokens.unique().tolist())
                bar.update()
    final = tensors["canvases"][0] if run is None else run.tokens.cpu()
    named = sorted(ids | set(final.unique().tolist()))
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
        given=torch.zeros_like(final, dtype=torch.bool) if run is None else run.given.cpu(),
        final=final,
        threshold=epsilon,
        words=dict(zip(named, model.words(named), strict=True)),
        record=record,
    )


def _receive(one: SharedPass, layers: Sequence[int], received: Float[Tensor, "step layer head batch pos"]) -> None:
    """Write the column sums of the patterns of some layers, at the positions and steps that the pass serves."""
    inside = {index: one.on_read(canvas.present) for index, canvas in one.served.items()}
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in layers]

    def reduce(pattern: Tensor, hook: Any) -> None:
        wide = pattern.to(torch.promote_types(pattern.dtype, torch.float32))
        of_layer = received[:, names.index(hook.name)]
        for index, present in inside.items():
            present = present.to(wide.device)
            columns = (present[:, None, None].to(wide) @ wide)[:, :, 0].transpose(0, 1)
            columns = columns.mean(dim=0, keepdim=True) if len(of_layer[index]) == 1 else columns
            of_layer[index, ..., : pattern.shape[-1]] = columns.masked_fill(~present, torch.nan)

    one.read.run([(name, reduce) for name in names])


def _equal_attention(read: ForwardPass) -> tuple[Tensor, Tensor]:
    """What each position receives if every query attends equally to all that it sees, and the number of its queries.

    Both are [batch pos], and 0 at positions without a token.
    """
    tokens, present = read.tokens, read.present
    pattern = AttentionPattern.of(read.model.cfg)
    with read.model.clock.at(read.step):
        origins = read.model.origins_of(tokens, read.real)
    visibility = pattern.visibility(tokens.shape[1], tokens.device, read.real, origin=origins)
    allowed = visibility.dense(tokens.shape[1], tokens.shape[1], tokens.device)[:, 0].expand(len(tokens), -1, -1)
    seen = (allowed & present[:, :, None] & present[:, None, :]).float()
    shares = seen / seen.sum(dim=2, keepdim=True).clamp(min=1)
    return shares.sum(dim=1), seen.sum(dim=1)


def _special(model: DiffusionTransformer, tokens: Tensor) -> Tensor:
    """True at special tokens of the tokenizer other than [MASK]."""
    ids = set(getattr(model.tokenizer, "all_special_ids", ())) - {model.cfg.mask_token_id}
    return torch.isin(tokens, torch.tensor(sorted(ids), dtype=tokens.dtype, device=tokens.device))


def _require_memory(
    model: DiffusionTransformer, shape: tuple[int, int], entries: tuple[int, int, int], max_bytes: int
) -> None:
    """Raise a `ValueError` if the result and one pass take more than `max_bytes`.

    Args:
        shape: Rows and positions of a canvas.
        entries: Number of steps, layers and heads of the result.
    """
    cfg, (batch, pos), (n_steps, n_layers, n_heads) = model.cfg, shape, entries
    one_pass = reserved(cfg, batch * row_bytes(cfg, pos, 0, explicit=True))
    # Beside the attention: equal attention, numbers of queries, canvases and two flags, and the canvases of the passes.
    needed = n_steps * batch * pos * (4 * n_layers * n_heads + _BYTES_OF_A_POSITION) + one_pass
    if needed > max_bytes:
        raise ValueError(
            f"the attention received takes {needed:,} bytes, of which {one_pass:,} are for one forward pass, but "
            f"max_bytes is {max_bytes:,}: give fewer steps or layers, heads='mean', or fewer rows"
        )
