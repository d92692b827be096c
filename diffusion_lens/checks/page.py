"""The training loss on a page, in order and with its words shuffled.

A model that computes what it was trained to is far better on the first. The noise of a diffusion loss is the same in
both, and for every alternative that a diagnosis tries, so that small differences count.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.checks.expected import Expected
from diffusion_lens.checks.finding import Finding
from diffusion_lens.checks.texts import Page, Texts
from diffusion_lens.losses import LossQuestion, ask_next, hide
from diffusion_lens.model.transformer import DiffusionTransformer

NOISE_SEED = 0
# Draws of noise a row: t then covers (0, 1) evenly in four parts.
DRAWS = 4
# Places in one forward pass, for the memory of their logits.
MAX_PLACES = 2048
NOT_TRAINED = -1  # stands for what is hidden, whatever the id of [MASK]
# Nats a token. Words that are only counted are as likely in any order; the smallest published models gain more than one
# nat from the order, and one that computes something else gains next to nothing.
LEAST_GAIN = 0.5
# Of ln(vocabulary), what a model that knows nothing reaches. Frequencies of words alone take a fifth off that.
CHANCE = 0.9
# Losses measured on the page where the checkpoint is known to be right. A machine rounds to about 1e-5 of them.
KNOWN_LOSS = {"tiny-mdm": 0.614472, "tiny-ar": 0.506850}
# What the right model may differ from them by, of them.
TOLERANCE = {torch.float32: 0.001, torch.bfloat16: 0.05, torch.float16: 0.05}


@torch.no_grad()
def page_losses(model: DiffusionTransformer, tokens: Tensor) -> Float[Tensor, "row pos"]:
    """What each token of rows of clean text adds to the loss that the model is trained by, with fixed noise.

    The sum is that loss, in nats a token. A row is one of the text, or of its `DRAWS` noisy copies.
    """
    if model.cfg.mask_token_id is None:
        asked = ask_next(model, tokens)
    else:
        asked = _ask_masked(model, tokens, model.cfg.mask_token_id)
    n_row, n_pos = asked.tokens.shape
    size = max(1, MAX_PLACES // n_pos)
    parts = [asked.part(start, min(start + size, n_row)) for start in range(0, n_row, size)]
    losses = [
        part.by_place(model(part.tokens, attention_mask=model.all_real(part.tokens), logits_at=part.rows))
        for part in parts
    ]
    return torch.cat(losses).cpu() / asked.counted


def page_loss(model: DiffusionTransformer, tokens: Tensor) -> float:
    """The loss on rows of clean text, in nats a token."""
    return float(page_losses(model, tokens).sum())


def no_better_than_chance(loss: float, vocabulary: int) -> bool:
    """Whether a loss is that of a model that knows nothing, or no number."""
    return not loss <= CHANCE * math.log(vocabulary)


def right_loss(expected: Expected | None, dtype: torch.dtype) -> tuple[float, float] | None:
    """The least and the largest loss on the page of what a model should be; `None` where nobody measured it."""
    known = KNOWN_LOSS.get(expected.name) if expected else None
    return None if known is None else (known * (1 - TOLERANCE[dtype]), known * (1 + TOLERANCE[dtype]))


def check_page(
    model: DiffusionTransformer, texts: Texts, page: Page, right: tuple[float, float] | None, in_order: float
) -> Finding:
    """Hold the loss in order against the shuffled one, against chance, and against the right one where it is known."""
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
    wrong = []
    if not math.isfinite(in_order):
        wrong.append("the loss is not a number: weights that are not finite, or overflow")
    elif no_better_than_chance(in_order, model.cfg.d_vocab_out):
        wrong.append("the model predicts no better than chance")
    elif shuffled - in_order < LEAST_GAIN:
        wrong.append(f"the order of words lowers the loss by less than {LEAST_GAIN} nats")
    elif right is not None and not right[0] <= in_order <= right[1]:
        wrong.append("the loss is not the one that was measured of these weights")
    return Finding(name, "off" if wrong else "ok", "; ".join([said, *wrong]), numbers=numbers)


def _ask_masked(model: DiffusionTransformer, tokens: Tensor, mask: int) -> LossQuestion:
    """The question of masked diffusion. The text may hold the id that is taken for [MASK], should that be wrong."""
    tokens = tokens.repeat_interleave(DRAWS, dim=0)
    noisy, p_mask = hide(tokens, NOT_TRAINED, generator=torch.Generator().manual_seed(NOISE_SEED))
    hidden = noisy == NOT_TRAINED
    # The head has no column for what it never writes.
    asked = hidden & (tokens < model.cfg.d_vocab_out)
    counted = tokens.numel()
    return LossQuestion(
        tokens=noisy.masked_fill(hidden, mask),
        rows=model.readout.locate(asked),
        targets=tokens[asked],
        weights=1 / (p_mask[asked] * counted),
        places=asked,
        counted=counted,
    )
