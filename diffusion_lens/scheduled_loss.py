"""The losses of models that were trained by a schedule of noise, and the noise of all losses.

At time t a token is noised with probability p = 1 - exp(-sigma(t)). The loss of a text is the mean over times of

    logits, absorbing      Σ_masked -log p(x_0) · sigma'(t) / (e^sigma - 1)      Sahoo et al. 2024, arXiv 2406.07524
    log scores             Σ score entropy · sigma'(t)                           Lou et al. 2023, arXiv 2310.16834
    logits, uniform        Σ bound of `noise.UniformBound`                       Schiff et al. 2024, arXiv 2412.10193

The last bounds the likelihood together with the surprisal of the clean text at time 0, which training leaves out and
`evaluation.monte_carlo_nll` adds. The first is that of masked diffusion with the weight 1/t in place of 1/p, which is
1/t under a linear schedule.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.loss_batch import LossBatch
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.noise import CleanCrossEntropy, LossTerm, Schedule, ScoreEntropy, Uniform, UniformBound, schedule_of
from diffusion_lens.shapes import PosMask, Tokens

# No token: it marks those that noise replaces.
NOWHERE = -1


def has_schedule(model: DiffusionTransformer) -> bool:
    """Whether the loss of a model depends on a schedule of noise."""
    return model.cfg.rewrites or (model.cfg.has_mask and model.cfg.schedule is not None)


def scheduled_batch(
    model: DiffusionTransformer, tokens: Tokens, noisy: Tokens, p: Float[Tensor, "batch pos"], real: PosMask | None
) -> LossBatch:
    """The batch of the loss of text under given noise.

    Args:
        tokens: The clean text.
        noisy: The text under noise.
        p: Probability with which each token was noised, at most that of the schedule's time 1: no network was trained
            with more. The network is told that of the first token.
        real: Bool[batch pos], positions that may be noised and that count; by default all.
    """
    noisy, schedule = noisy.to(tokens.device), schedule_of(model.cfg.schedule)
    # Where the schedule ends with p = 1, nothing is left of the text, and sigma is infinite.
    highest = min(float(schedule.chance(torch.ones((), dtype=torch.float64))), 1 - 1e-9)
    sigma = -torch.log1p(-p.to(tokens.device).double().clamp(max=highest))
    t = schedule.time(sigma)
    counted = torch.ones_like(tokens, dtype=torch.bool) if real is None else real.to(tokens.device)
    noisy = torch.where(counted, noisy, tokens)
    predicted = counted if model.cfg.rewrites else counted & (noisy == model.cfg.blank)
    n_counted = int(counted.sum())
    term, weights = term_of(model, schedule, t, sigma)
    return LossBatch(
        noisy,
        model.readout.locate(predicted, real),
        tokens[predicted],
        (weights / n_counted).float()[predicted],
        predicted,
        n_counted,
        # Each block is predicted from clean blocks before it.
        None if model.cfg.causal_block is None else tokens,
        term=term,
        t=t.float(),
        # The network is told what its schedule says, which may have a largest noise.
        sigma=schedule.sigma(t).float(),
        tells=model.cfg.is_told_time,
    )


def term_of(
    model: DiffusionTransformer, schedule: Schedule, t: Float[Tensor, "batch pos"], sigma: Float[Tensor, "batch pos"]
) -> tuple[LossTerm, Float[Tensor, "batch pos"]]:
    """The loss at each position, and its weight there."""
    head = model.head
    if model.cfg.head == "log_scores":
        return ScoreEntropy(head), schedule.rate(t)
    if isinstance(head.noise, Uniform):
        return UniformBound(head, head.noise), torch.ones_like(t)
    return CleanCrossEntropy(head), schedule.rate(t) / torch.expm1(sigma)


def noised(
    model: DiffusionTransformer, tokens: Tokens, *, generator: torch.Generator | None = None, eps: float = 1e-3
) -> tuple[Tokens, Float[Tensor, "batch pos"]]:
    """Tokens under the model's noise, and the probability p with which each was noised.

    As `hide`, at times between `eps` and 1 where the model has a schedule. Under uniform noise, a token is replaced by
    one drawn from all, itself included.
    """
    if not has_schedule(model):
        return hide(tokens, model.cfg.blank, generator=generator, eps=eps)
    schedule, noise = schedule_of(model.cfg.schedule), model.head.noise
    assert noise is not None
    replaced, p = hide(tokens, NOWHERE, generator=generator, eps=eps, schedule=schedule)
    return torch.where(replaced == NOWHERE, noise.replacements(tokens, generator), tokens), p


def hide(
    tokens: Tokens,
    mask_token_id: int,
    *,
    generator: torch.Generator | None = None,
    eps: float = 1e-3,
    schedule: Schedule | None = None,
) -> tuple[Tokens, Float[Tensor, "batch pos"]]:
    """Mask each token with the probability p of its row, and return the masked tokens and p.

    The times of the rows are stratified, t_i = u + i/batch (mod 1) with one u ~ U(0, 1): each is uniform, and together
    they cover the unit interval evenly, which lowers the variance of the loss. The noise is sampled on the CPU, so that
    a seed means the same on every device; with a generator of another device, it is sampled there.

    Args:
        schedule: Schedule of noise, by which p is the probability at a time between `eps` and 1; by default p itself is
            between `eps` and 1.
    """
    n_batch, n_pos = tokens.shape
    device = generator.device if generator is not None else torch.device("cpu")
    t = (torch.rand((), generator=generator, device=device) + torch.arange(n_batch, device=device) / n_batch) % 1
    t = (1 - eps) * t + eps
    p = (t if schedule is None else schedule.chance(t.double()))[:, None].expand(n_batch, n_pos)
    masked = torch.rand((n_batch, n_pos), generator=generator, device=device) < p
    return tokens.masked_fill(masked.to(tokens.device), mask_token_id), p.to(tokens.device)
