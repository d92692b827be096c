"""ROME's search for v* (Meng et al. 2022), as its code runs it: every iteration runs the whole network and computes the
logits of the full vocabulary at every position."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusion_lens import HookedDiffusionTransformer, Query
from diffusion_lens.analysis.rome import ValueSettings

Edit = Callable[[Tensor, Any], Tensor]


def plain_search(
    model: HookedDiffusionTransformer,
    queries: Sequence[Query],
    essence: Query,
    layer: int,
    settings: ValueSettings,
    run: Callable[[Tensor, Tensor, int, Edit], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """ROME's `compute_v`. Returns the losses Float[iteration 4] and v*.

    Args:
        run: Function from tokens, real positions, layer and the edit of that layer's MLP to logits; by default of
            `model`, and otherwise of another network with its weights.
    """
    run = run or partial(_run, model)
    canvases = [*queries, essence]
    tokens = torch.nn.utils.rnn.pad_sequence([canvas.tokens for canvas in canvases], batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones(len(canvas.tokens)) for canvas in canvases], batch_first=True)
    lookups = [canvas.subject[1] - 1 for canvas in canvases]
    shift = int(model.cfg.readout == "shifted")
    last = (
        len(essence.tokens) - shift - (not model.cfg.is_autoregressive)
    )  # The position after the text, or its [MASK] or noise.
    delta = torch.zeros(model.cfg.d_model, requires_grad=True)
    initial: list[Tensor] = []
    essence_log_probs: list[Tensor] = []

    def edit(out: Tensor, hook: Any) -> Tensor:
        if not initial:
            initial.append(out[0, lookups[0]].detach().clone())
        edited = out.clone()
        for row, position in enumerate(lookups):
            edited[row, position] = edited[row, position] + delta
        return edited

    targets = torch.full(tokens.shape, -100)
    for row, query in enumerate(queries):
        targets[row, [pos - shift for pos in query.answer_positions]] = torch.tensor(query.answer_tokens)
    is_target = (targets != -100).float()
    model.requires_grad_(False)
    optimizer = torch.optim.Adam([delta], lr=settings.lr)
    losses = []
    for iteration in range(settings.steps):
        optimizer.zero_grad()
        logits = run(tokens, real, layer, edit)
        log_probs = torch.log_softmax(logits, dim=-1)
        answer_log_probs = log_probs.gather(2, targets.clamp(min=0)[..., None])[..., 0] * is_target
        nll = -(answer_log_probs.sum(1)[: len(queries)] / len(queries[0].answer_tokens)).mean()
        essence_log_probs.append(torch.log_softmax(logits[-1, last], dim=-1))
        first, current = essence_log_probs[0].detach(), essence_log_probs[-1]
        kl = settings.kl_factor * (current.exp() * (current - first)).sum()
        decay = settings.weight_decay * delta.norm() / initial[0].norm() ** 2
        total = nll + kl + decay
        losses.append(torch.stack([total, nll, kl, decay]).detach())
        if total < settings.stop_below or iteration == settings.steps - 1:
            break
        total.backward()
        optimizer.step()
        radius = settings.clamp_norm_factor * initial[0].norm()
        with torch.no_grad():
            if delta.norm() > radius:
                delta.mul_(radius / delta.norm())
    model.requires_grad_(True)
    return torch.stack(losses), initial[0] + delta.detach()


def _run(model: HookedDiffusionTransformer, tokens: Tensor, real: Tensor, layer: int, edit: Edit) -> Tensor:
    hooks = [(f"blocks.{layer}.hook_mlp_out", edit)]
    logits: Tensor = model.run_with_hooks(tokens, attention_mask=real, fwd_hooks=hooks)
    return logits
