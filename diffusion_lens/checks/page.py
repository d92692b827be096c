"""Checks the training loss on a page of text, in order and with its words shuffled.

The loss of a correct model is far lower in order. The noise of a diffusion loss is the same in both cases, and for all
alternatives that a diagnosis tries, so that small differences are significant.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.checks.expected import Expected
from diffusion_lens.checks.finding import Finding
from diffusion_lens.checks.texts import Page, Texts
from diffusion_lens.loss_batch import LossBatch
from diffusion_lens.losses import next_token_batch
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.scheduled_loss import has_schedule, hide, noised, scheduled_batch

NOISE_SEED = 0
# Noise samples per row: the times t cover (0, 1) evenly in four parts.
N_SAMPLES = 4
# Most positions in one forward pass, which limits the memory of their logits.
MAX_POSITIONS = 2048
HIDDEN = -1  # marks hidden positions, whatever the id of [MASK]
# Least gain from the order of words, in nats per token. Word frequencies alone gain nothing, the smallest published
# models gain more than one nat, and a model that is read wrongly gains almost nothing.
LEAST_GAIN = 0.5
# Share of ln(vocabulary) above which a loss is no better than chance. Word frequencies alone reduce it by a fifth.
CHANCE = 0.9
# Losses on the page of checkpoints that are known to be correct. Rounding changes them by about 1e-5 of their size.
KNOWN_LOSS = {
    "site-mdm": 1.413825,
    "site-ar": 1.132883,
    "tiny-mdm": 0.614472,
    "tiny-ar": 0.506850,
    "tiny-block": 0.641329,
    "tiny-uniform": 1.087115,
}
# Largest deviation of a correct model from its known loss, relative to that loss.
TOLERANCE = {torch.float32: 0.001, torch.bfloat16: 0.05, torch.float16: 0.05}


@torch.no_grad()
def page_losses(model: DiffusionTransformer, tokens: Tensor) -> Float[Tensor, "batch pos"]:
    """The contribution of each token of clean text to the training loss, with fixed noise.

    Their sum is the loss in nats per token. That of a diffusion model is a bound, for which each row of the text has
    `N_SAMPLES` rows, one after the other. It bounds what the loss of next tokens is, so both can be compared.
    """
    batch = _batch(model, tokens)
    n_row, n_pos = batch.tokens.shape
    size = max(1, MAX_POSITIONS // n_pos)
    parts = [batch.part(start, min(start + size, n_row)) for start in range(0, n_row, size)]
    losses = [
        part.by_position(
            model(part.tokens, attention_mask=model.all_real(part.tokens), logits_at=part.rows, **part.beside)
        )
        for part in parts
    ]
    return torch.cat(losses).cpu() / batch.n_counted


def page_loss(model: DiffusionTransformer, tokens: Tensor) -> float:
    """The loss on rows of clean text, in nats per token."""
    return float(page_losses(model, tokens).sum())


def no_better_than_chance(loss: float, vocabulary: int) -> bool:
    """Whether a loss is NaN or that of a model that knows nothing."""
    return not loss <= CHANCE * math.log(vocabulary)


def right_loss(expected: Expected | None, dtype: torch.dtype) -> tuple[float, float] | None:
    """The least and the largest loss on the page of the expected model; `None` if it was never measured."""
    known = KNOWN_LOSS.get(expected.name) if expected else None
    return None if known is None else (known * (1 - TOLERANCE[dtype]), known * (1 + TOLERANCE[dtype]))


def check_page(
    model: DiffusionTransformer, texts: Texts, page: Page, right: tuple[float, float] | None, in_order: float
) -> Finding:
    """Compare the loss in order with the shuffled one, with chance, and with the correct one if it is known."""
    name = "page loss"
    shuffled = page_loss(model, page.shuffled)
    chance = math.log(model.cfg.d_vocab_out)
    numbers = {"in_order": in_order, "shuffled": shuffled, "chance": chance, "tokens": page.ordered.numel()}
    said = (
        f"{in_order:.3f} nats a token on {texts.name}, {shuffled:.3f} with its words shuffled, {chance:.2f} by chance"
    )
    if right is not None:
        numbers |= {"least": right[0], "most": right[1]}
        said += f"; known to be {sum(right) / 2:.3f}"
    problems = []
    if not math.isfinite(in_order):
        problems.append("the loss is not finite: weights that are not finite, or overflow")
    elif no_better_than_chance(in_order, model.cfg.d_vocab_out):
        problems.append("the model predicts no better than chance")
    elif shuffled - in_order < LEAST_GAIN:
        problems.append(f"the order of words lowers the loss by less than {LEAST_GAIN} nats")
    elif right is not None and not right[0] <= in_order <= right[1]:
        problems.append("the loss is not the one that was measured with these weights")
    return Finding(name, "off" if problems else "ok", "; ".join([said, *problems]), numbers=numbers)


def _batch(model: DiffusionTransformer, tokens: Tensor) -> LossBatch:
    """The batch of the model's own loss. If the id of [MASK] is wrong, the text may contain it."""
    if model.cfg.grows:
        return next_token_batch(model, tokens)
    tokens = tokens.repeat_interleave(N_SAMPLES, dim=0)
    generator = torch.Generator().manual_seed(NOISE_SEED)
    if not has_schedule(model):
        return _masked_batch(model, tokens, generator)
    noisy, p = noised(model, tokens, generator=generator)
    return scheduled_batch(model, tokens, noisy, p, model.cfg.writable(tokens))


def _masked_batch(model: DiffusionTransformer, tokens: Tensor, generator: torch.Generator) -> LossBatch:
    noisy, p_mask = hide(tokens, HIDDEN, generator=generator)
    hidden = noisy == HIDDEN
    # The head has no column for tokens that are never predicted.
    scored = hidden & (tokens < model.cfg.d_vocab_out)
    counted = tokens.numel()
    return LossBatch(
        tokens=noisy.masked_fill(hidden, model.cfg.blank),
        rows=model.readout.locate(scored),
        targets=tokens[scored],
        weights=1 / (p_mask[scored] * counted),
        predicted=scored,
        n_counted=counted,
        # Each block is predicted from clean blocks before it.
        clean=None if model.cfg.causal_block is None else tokens,
    )
