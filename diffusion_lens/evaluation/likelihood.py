"""The diffusion bound on the negative log-likelihood (NLL) of an answer after a prompt, in nats.

A masked diffusion model has one NLL for each order in which the answer may be revealed (`chain_rule.py`).
`monte_carlo_nll` estimates the mean over all orders, which is the diffusion bound on the NLL (Nie et al. 2024, arXiv
2410.18514, eq. 4): each of the L answer tokens is masked with probability p,

    ∫ dp E[Σ_masked -log p(a_i | prompt, what is not masked) / p]

It is computed as in ML-GSAI/SMDM `evaluate_diff.py`, whose guidance masks the prompt and not the answer. In general,
the bound is the integral over p from 0 to 1 of the expected sum, over the answer, of

    logits, absorbing      -log p(x_0) / p at masked positions                  Nie et al. 2024, arXiv 2410.18514, eq. 4
    log scores             score entropy / (1 - p)                               Lou et al. 2023, arXiv 2310.16834
    logits, uniform        the term of Schiff et al. 2024, arXiv 2412.10193, eq. 18, which leaves a token with 1 - p;
                           to the integral, -log p(x_0) of the clean answer at time 0 is added

None depends on a schedule: it says only which p a network meets at which time, which a time-conditioned one is given.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.denoising.loop import require_logits
from diffusion_lens.denoising.predictor import guide
from diffusion_lens.denoising.sampler import row_seeds
from diffusion_lens.facts.fact import Fact
from diffusion_lens.model.inputs import check_length, check_tokens
from diffusion_lens.model.loss import NOWHERE, hide, require_known_loss
from diffusion_lens.model.noise import LossTerm, Noise, clean_cross_entropy, score_entropy, uniform_bound
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import Result, Saved, Table, provenance
from diffusion_lens.settings import at_least, not_negative

Text = str | Tensor


@dataclass(frozen=True, repr=False)
class NLLEstimate(Result, Saved):
    """A Monte-Carlo estimate of a negative log-likelihood, in nats: the mean of `samples`.

    Columns of the data frame: value, standard_error, samples.

    Attributes:
        standard_error: Standard error of `value`. Samples of one batch share their stratification, so batches are the
            independent units, and the scatter of their means gives the error. NaN when there is only one batch.
        record: Prompt and answer, noise, guidance, seed, model, weights' hash, versions.
    """

    KIND = "NLL estimate"
    NO_PICTURE = "It is one number with its standard error."

    value: float
    standard_error: float
    samples: int
    record: dict[str, Any] = field(repr=False)

    def _table(self) -> Table:
        return Table({name: [getattr(self, name)] for name in ("value", "standard_error", "samples")})


@begins_run
@torch.no_grad()
def monte_carlo_nll(
    model: DiffusionTransformer,
    prompt: Text,
    answer: Text,
    *,
    samples: int = 1024,
    batch_size: int = 16,
    cfg_scale: float = 0.0,
    seed: int | torch.Generator = 0,
    noisy: Int[Tensor, "sample pos"] | None = None,
    p_mask: Float[Tensor, "sample pos"] | None = None,
    max_batch: int = 32,
    progress: bool = False,
) -> NLLEstimate:
    """The diffusion bound on the answer's NLL, from random noise on the answer.

    A time-conditioned network gets that of each sample's p, which is uniform between 0.001 and 1, as in
    training; this changes the value by about a thousandth. Losses are weighted by functions of p such as 1/p, so rare
    samples have large weights, and a standard error from few samples tends to be too small.

    Args:
        prompt, answer, cfg_scale, max_batch: The same as in `chain_rule_nll`.
        samples: Number of samples; each is one forward pass of one row (two with guidance).
        batch_size: Number of samples that cover the range of p evenly (see `loss.hide`).
        seed: Seed of the noise, or a `torch.Generator` to take the seed from.
        noisy: Canvases to use instead of sampled ones: prompt and answer, with some positions of the answer masked, or
            under uniform noise replaced. Their rows count as independent samples; `samples`, `batch_size` and `seed`
            are then ignored.
        p_mask: Probability with which each position of `noisy` was masked or replaced. The network is given that of the
            answer's first.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: `chain_rule_nll` would refuse an argument, the noise does not fit, or the model is causal.
    """
    for name, count in (("samples", samples), ("batch_size", batch_size), ("max_batch", max_batch)):
        at_least(1, name, count)
    if model.cfg.is_autoregressive:
        raise ValueError(
            f"{model.cfg.model_name!r} has no [MASK] for the noise; use chain_rule_nll, exact for causal models"
        )
    require_known_loss(model)
    check_guidance(model, cfg_scale)
    question, noise = question_of(model, prompt, answer), model.head.noise
    assert noise is not None
    record: dict[str, Any] = {"prompt": question.prompt.tolist(), "answer": question.answer.tolist()}
    if (noisy is None) != (p_mask is None):
        raise ValueError("noisy and p_mask go together: pass both, or neither to sample the noise")
    if noisy is not None and p_mask is not None:
        noisy, p_mask = noisy.to(model.cfg.device), p_mask.to(model.cfg.device)
        scored = _check_noise(question, model, noisy, p_mask)
        batches, record = torch.arange(len(noisy)), record | {"noise": "given"}
    else:
        noise_seed = one_seed(seed)
        noisy, p_mask = _sample_noise(question, noise, samples, batch_size, noise_seed)
        scored = noisy != question.tokens
        batches = torch.arange(samples) // batch_size
        record |= {"noise": "sampled", "seed": noise_seed, "batch_size": batch_size}
    if model.cfg.uniform_noise:
        scored = (torch.arange(len(question.tokens), device=noisy.device) >= len(question.prompt)).expand_as(noisy)
    chances, bound = p_mask[:, len(question.prompt)], bound_term(model)
    losses = surprisals(model, question, noisy, scored, chances, cfg_scale, max_batch, bound.term, progress)
    estimates = torch.zeros(len(noisy), dtype=torch.float64)
    weighted = losses.cpu().double() * bound.weight(p_mask[scored].cpu().double())
    estimates.index_add_(0, scored.nonzero()[:, 0].cpu(), weighted)
    if bound.reconstructs:
        clean, never = question.tokens[None], torch.zeros_like(chances[:1])
        estimates += surprisals(model, question, clean, scored[:1], never, cfg_scale, max_batch).sum().cpu().double()
    return NLLEstimate(
        value=estimates.mean().item(),
        standard_error=_standard_error(estimates, batches),
        samples=len(estimates),
        record={**record, "cfg_scale": cfg_scale, **provenance(model, model.cfg)},
    )


@dataclass(frozen=True)
class Question:
    """Tokens of a prompt and of the answer after it."""

    prompt: Int[Tensor, "pos"]
    answer: Int[Tensor, "selected"]

    @property
    def tokens(self) -> Int[Tensor, "pos"]:
        return torch.cat([self.prompt, self.answer])


def question_of(model: DiffusionTransformer, prompt: Text, answer: Text) -> Question:
    """The tokens of a prompt and of its answer; errors as in `chain_rule_nll`."""
    if isinstance(prompt, str) and isinstance(answer, str):
        ids = Fact(prompt, subject="", answer=answer).tokenize(model)
        before, after = (torch.tensor(part, device=model.cfg.device) for part in ids)
    elif isinstance(prompt, Tensor) and isinstance(answer, Tensor):
        before, after = model.padding.removed(_one_row(model, "prompt", prompt)), _one_row(model, "answer", answer)
    else:
        given = f"the prompt is {type(prompt).__name__}, the answer {type(answer).__name__}"
        raise TypeError(f"{given}; give both as text, or both as tokens")
    if not len(after):
        raise ValueError("the answer is empty: there is nothing to score")
    if bool((unwritable := ~model.cfg.writable(after)).any()):
        token = int(after[position := int(unwritable.nonzero()[0])])
        name = "[MASK]" if token == model.cfg.mask_token_id else f"token {token}"
        raise ValueError(
            f"answer[{position}] is {name}: {model.cfg.model_name!r} never writes it, so it has no likelihood"
        )
    check_length(len(before) + len(after), model.cfg)
    return Question(before, after)


def one_seed(seed: int | torch.Generator) -> int:
    """A seed as a number, which a generator draws."""
    return row_seeds(seed if isinstance(seed, torch.Generator) else [seed], 1)[0]


def check_guidance(model: DiffusionTransformer, cfg_scale: float) -> None:
    if not_negative("cfg_scale", cfg_scale) and not model.cfg.has_mask:
        kind = "for an autoregressive model" if model.cfg.is_autoregressive else "under uniform noise"
        raise ValueError(
            f"cfg_scale={cfg_scale} compares with a masked prompt, and {model.cfg.model_name!r} has no [MASK]: use "
            f"cfg_scale=0 {kind}"
        )


def _one_row(model: DiffusionTransformer, name: str, tokens: Tensor) -> Int[Tensor, "pos"]:
    tokens = tokens[0] if tokens.dim() == 2 and tokens.shape[0] == 1 else tokens
    if tokens.dim() != 1:
        raise ValueError(f"{name} has shape {list(tokens.shape)}; give one row, [pos] or [1 pos]")
    if not len(tokens):
        return torch.zeros(0, dtype=torch.long, device=model.cfg.device)
    return check_tokens(tokens, model.cfg)[0]


# At p = 1 nothing is left of the text, and its noise level is infinite.
MOST = 1 - 1e-6


class BoundTerm(NamedTuple):
    """A loss at each position, its weight by p, and whether the surprisal of the clean answer at time 0 is added."""

    term: LossTerm
    weight: Callable[[Float[Tensor, "*rest"]], Float[Tensor, "*rest"]]
    reconstructs: bool = False


def bound_term(model: DiffusionTransformer) -> BoundTerm:
    """The term of a model with noise."""
    head = model.head
    if model.cfg.head == "log_scores":
        return BoundTerm(partial(score_entropy, head), lambda p: 1 / (1 - p.clamp(max=MOST)))
    if model.cfg.uniform_noise:
        return BoundTerm(partial(uniform_bound, head), torch.ones_like, reconstructs=True)
    return BoundTerm(partial(clean_cross_entropy, head), torch.reciprocal)


def conditioning(model: DiffusionTransformer, p: Float[Tensor, "batch"]) -> dict[str, Float[Tensor, "batch"]]:
    """The noise level that a network is given, as an argument; see `model.time.sigma_of_noise`."""
    sigma = model.time.sigma_of_noise(p)
    return {} if sigma is None else {"sigma": sigma}


def sigma_of_chance(p: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
    """The noise level at which a token is noised with probability p."""
    return -torch.log1p(-p.double().clamp(max=MOST))


def surprisals(
    model: DiffusionTransformer,
    question: Question,
    canvases: Int[Tensor, "sample pos"],
    scored: PosMask,
    chances: Float[Tensor, "sample"],
    cfg_scale: float,
    max_batch: int,
    term: LossTerm | None = None,
    progress: bool = False,
) -> Float[Tensor, "selected"]:
    """-log p of the question's own token, or another loss, at every scored position, in reading order.

    `chances` are the chances of noise on each canvas, which say at which time a time-conditioned network reads it.
    """
    canvases, scored, chances = (of_canvas[scored.any(dim=1)] for of_canvas in (canvases, scored, chances))
    targets = question.tokens.expand_as(canvases)
    dtype = torch.promote_types(model.cfg.dtype, torch.float32)
    surprisals = [torch.zeros(0, device=canvases.device, dtype=dtype)]
    for start in tqdm(range(0, len(canvases), max_batch), desc="likelihood", unit="pass", disable=not progress):
        rows = slice(start, start + max_batch)
        logits_at, attention_mask = model.readout.locate(scored[rows]), model.padding.all_real(canvases[rows])
        # Each block is scored given clean blocks before it.
        beside: dict[str, Any] = {} if model.cfg.causal_block is None else {"clean": targets[rows]}
        beside |= conditioning(model, chances[rows])
        logits = model(canvases[rows], attention_mask=attention_mask, logits_at=logits_at, **beside).to(dtype)
        if cfg_scale:
            in_prompt = torch.arange(canvases.shape[1], device=canvases.device) < len(question.prompt)
            unprompted = canvases[rows].masked_fill(in_prompt, model.cfg.blank)
            if "clean" in beside:
                beside["clean"] = beside["clean"].masked_fill(in_prompt, model.cfg.blank)
            unconditional = model(unprompted, attention_mask=attention_mask, logits_at=logits_at, **beside).to(dtype)
            logits = guide(logits, unconditional, cfg_scale)
        require_logits(logits, scored[rows])
        p = chances[rows].repeat_interleave(scored[rows].sum(dim=1)).double()
        at = (targets[rows][scored[rows]], canvases[rows][scored[rows]], p, sigma_of_chance(p))
        if term is None:
            surprisals.append(clean_cross_entropy(model.head, logits, *at))
        else:
            surprisals.append(term(logits.double(), *at).to(dtype))
    return torch.cat(surprisals)


def _sample_noise(
    question: Question, noise: Noise, samples: int, batch_size: int, seed: int
) -> tuple[Int[Tensor, "sample pos"], Float[Tensor, "sample pos"]]:
    """Canvases with noise on a part of the answer, and its probability; stratified within each batch."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [min(batch_size, samples - start) for start in range(0, samples, batch_size)]
    batches = [hide(question.answer.repeat(size, 1), NOWHERE, generator=generator) for size in sizes]
    answers, p = (torch.cat(parts) for parts in zip(*batches, strict=True))
    answers = torch.where(answers == NOWHERE, noise.replacements(answers, generator), answers)
    return torch.cat([question.prompt.expand(samples, -1), answers], dim=1), p[:, :1].expand(-1, len(question.tokens))


def _standard_error(estimates: Float[Tensor, "sample"], batches: Int[Tensor, "sample"]) -> float:
    """Standard error of the mean of samples that are independent between batches only; batches may differ in size."""
    if (n_batches := int(batches.max()) + 1) == 1:
        return math.nan
    deviations = torch.zeros(n_batches, dtype=estimates.dtype).index_add_(0, batches, estimates - estimates.mean())
    return math.sqrt(n_batches * deviations.square().sum() / (n_batches - 1) / len(estimates) ** 2)


def _check_noise(
    question: Question,
    model: DiffusionTransformer,
    noisy: Int[Tensor, "sample pos"],
    p_mask: Float[Tensor, "sample pos"],
) -> PosMask:
    """The positions that noise of the caller's changes."""
    n_prompt, n_pos = len(question.prompt), len(question.tokens)
    if noisy.shape != p_mask.shape or noisy.dim() != 2 or noisy.shape[1] != n_pos or not len(noisy):
        raise ValueError(
            f"noisy has shape {list(noisy.shape)} and p_mask {list(p_mask.shape)}; both are [sample, pos] with "
            f"pos={n_pos}, prompt and answer together"
        )
    changed = noisy != question.tokens
    hides = model.cfg.writable(noisy) if model.cfg.uniform_noise else noisy == model.cfg.blank
    allowed = hides & (torch.arange(n_pos, device=noisy.device) >= n_prompt)
    if bool((wrong := changed & ~allowed).any()):
        sample, position = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"noisy[{sample}, {position}] is {int(noisy[sample, position])} and not "
            f"{int(question.tokens[position])}; noise may only {'replace' if model.cfg.uniform_noise else 'mask'} "
            f"positions of the answer ({n_prompt} to {n_pos - 1})"
        )
    if not bool(((p_mask > 0) & (p_mask <= 1))[changed].all()):
        raise ValueError("p_mask must be above 0 and at most 1 wherever noisy is masked")
    return changed
