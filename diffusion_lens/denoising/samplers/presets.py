"""Samplers named after the code that they reproduce, with the differences of their defaults and the reasons.

The authors of samplers of transitions (`mdlm`, `bd3lm`, `sedd`, `udlm`, `radd`) draw tokens from the model's own
probabilities: run them with temperature=1. At temperature 0 the time at which a position changes is still drawn, and
its token is the likeliest. The last step of a run that removes the rest of the noise counts among `steps=`: the
authors' `num_steps` is one less.

All differ from the authors' code in this: seeds give other samples, because random numbers belong to row, step and
position here; a run does not stop at an end token; and the canvas ends where `length` says, where their code may fill
the last block beyond it.
"""

from diffusion_lens.denoising.sampler import Proposal
from diffusion_lens.denoising.samplers.by_block import BlockConfidence, BlockPosterior, EntropyBound, FirstHitting
from diffusion_lens.denoising.samplers.masked import Ancestral, Blocks, Confidence, ConfidenceThreshold
from diffusion_lens.denoising.samplers.transitions import Posterior, Score, UniformPosterior
from diffusion_lens.settings import checked_arguments, not_negative, one_of

_ORDERS = {"low_confidence": "confidence", "random": "random"}
_STRATEGIES = ("low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded")
_SCORES = {"maskgit_plus": "probability", "topk_margin": "margin", "entropy": "entropy"}


def smdm() -> Confidence:
    """SMDM's evaluation sampler ("greddy" in `eval/gen_model_answer.py`), which ranks the batch as one pool."""
    return Confidence(scope="batch")


@checked_arguments
def llada(block_length: int | None = None, remasking: str = "low_confidence", *, as_published: bool = False) -> Blocks:
    """LLaDA's sampler (Nie et al. 2025, arXiv 2502.09992; ML-GSAI/LLaDA `generate.py`).

    It reveals blocks from left to right. Within a block its steps share the masks evenly, and the first of them take
    the remainder. Tokens are sampled with Gumbel noise in float64; their confidence is the softmax of the logits
    without noise, after guidance. The number of masks must be a multiple of `block_length`, and `steps` a multiple of
    the number of blocks; by default there are as many steps as masks.

    Differences from the authors' code:

    - Masks inside the prompt are treated like the others. The authors' code fills them without counting them, so that
      as many masks remain at the end (`as_published=True`).
    - [MASK] is never written. In the authors' code it may be proposed; the position then counts as revealed and stays
      masked (`as_published=True`).
    - Confidence is compared in float64. The authors' code compares it in the dtype of the model, in which near-certain
      tokens tie.
    - Guidance needs no attention mask. The authors' code fails without one.
    - There is no option against the end token (`logits_eos_inf`, `confidence_eos_eot_inf`), whose ids the authors' code
      contains. A hook on `denoise.hook_logits` or `denoise.hook_confidence` has the same effect.

    Args:
        block_length: Number of masked positions of a block; `None` makes one block.
        remasking: "low_confidence" reveals the positions of the highest confidence first, "random" any.
        as_published: Whether to follow the authors' code in the first two differences.
    """
    return Blocks(
        block_length,
        _ORDERS[one_of(*_ORDERS)("remasking", remasking)],
        masks_in_prompt="uncounted" if as_published else "counted",
        proposal=Proposal(writes_mask=as_published),
    )


@checked_arguments
def threshold(
    confidence: float | None = None,
    factor: float | None = None,
    block_length: int | None = None,
    approximate_cache: str | None = None,
) -> ConfidenceThreshold:
    """Fast-dLLM's parallel decoding of models with full attention (Wu et al. 2025, arXiv 2505.22618;
    NVlabs/Fast-dLLM `llada/generate.py`, and of Dream `generation_utils_block.py`).

    A step reveals all positions of a block whose confidence is above a number, or by a factor the n most confident:
    the more there are, the more certain each has to be. It reveals at least one. As in the authors' code, by a factor
    the least confident position is revealed whenever all others are.

    With an approximate cache, steps read keys and values outside the block as its first step left them
    (`cache_drift` measures the error). On a model that reads a token in the row before it (Dream), the first
    step of a block then reveals its first position alone, as the authors' code does.

    Differences from the authors' code:

    - Masks inside the prompt are treated like the others. The authors' code fills them beside the first block. The last
      block may be shorter.
    - [MASK] is never written. In the authors' code it may be proposed, and the run can then go on forever.
    - A row of a batch does not wait for the others before it opens its next block.
    - A confidence that equals the threshold to the last bit is not above it.
    - Confidence is compared in float64, also on Dream.

    Args:
        confidence: Confidence above which a position is revealed; by default 0.9, without `factor`.
        factor: f, in place of `confidence`: from the second on, the k-th most confident of the revealed positions has a
            confidence of at least 1 - f / (k + 1).
        block_length: Number of masked positions of a block; `None` makes one block.
        approximate_cache: "prefix", "dual" or `None`, as in `ConfidenceThreshold`.
    """
    if confidence is None and factor is None:
        confidence = 0.9
    return ConfidenceThreshold(confidence, factor, block_length, approximate_cache)


@checked_arguments
def dream(
    alg: str = "origin",
    alg_temp: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    eps: float = 1e-3,
    *,
    as_published: bool = False,
) -> Ancestral | Confidence:
    """Dream's sampler (Ye et al. 2025, arXiv 2508.15487; DreamLM/Dream `generation_utils.py::_sample`).

    The times fall from 1 to `eps` in equal steps. "origin" reveals each masked position with probability 1 - s/t. The
    others reveal floor(masked · (1 - s/t)) positions, and in the last step all that remain: with as many steps as
    masks, the first step reveals none and the last reveals two. Logits are divided by the temperature, then filtered by
    top-p, then by top-k; confidence is read after that.

    Differences from the authors' code:

    - Each row has a schedule of its own. The authors' code divides the masks of the batch by its rows: where rows
      differ in masks, a row with more keeps some at the end (`as_published=True`), and in a row with fewer, [MASK]
      overwrites tokens that were decided, those of the prompt included. Which ones depends on how `torch.topk` breaks
      ties on the machine. This is not reproduced; such a row is finished early.
    - [MASK] is never written. In the authors' code it may be proposed; the position then counts as revealed and stays
      masked (`as_published=True`).
    - Probabilities are in float64. The authors' code takes them in the dtype of the model, in which near-certain tokens
      tie.
    - `top_k` is the value that you give. In the authors' code, called without a generation config, it became 50, and
      the temperature 1 (transformers 4.46).
    - Sampling that fails raises an error. In the authors' code it silently takes the likeliest token.

    Args:
        alg: Score of a position: "maskgit_plus" (probability of the token), "topk_margin" (likeliest minus second) or
            "entropy" (negative); or "origin", which ranks nothing.
        alg_temp: Temperature above 0 at which positions are sampled without replacement, by
            softmax(confidence / alg_temp); not for "origin".
        top_p, top_k: Limits of the likeliest tokens that are sampled from.
        eps: Time at which the run ends.
        as_published: Whether to follow the authors' code in the first two differences.
    """
    one_of("origin", *_SCORES)("alg", alg)
    proposal = Proposal(_SCORES.get(alg, "probability"), "sampled", top_p, top_k, writes_mask=as_published)
    if alg == "origin":
        if alg_temp:
            raise ValueError(
                f"alg_temp={alg_temp} samples among ranked positions, and alg='origin' ranks none: leave it out"
            )
        return Ancestral(eps, proposal)
    return Confidence("mean" if as_published else "row", eps, alg_temp or 0.0, proposal)


@checked_arguments
def rnd1(top_k: int | None = None, top_p: float | None = None) -> Confidence:
    """RND1's sampler (Radical Numerics 2025; RadicalNumerics/RND1 `rnd/sampling.py::diffusion_sample`).

    Each step reveals the positions of the lowest entropy, so that after step k of N, floor(all · (N - k) / N) of the
    positions to write are masked. Logits are divided by the temperature, then filtered by top-k, then by top-p; the
    entropy is read after that.

    Differences from the authors' code:

    - Entropies at temperature 0 are those of temperature 1. The authors' demonstration divides by 1e-8, after which
      they are all 0 and the order is that of `torch.topk` on equal numbers. With top-k or top-p, they are all NaN
      there.
    - [MASK] is never written. In the authors' code it may be proposed; the position then stays masked to the end.
    - The canvas is yours. The authors' code keeps one position more than the new tokens at its end, which holds the
      padding token, or with `add_eos_at_end` the end token, and is seen by all others.
    - The strategy bounded by entropy (`eb_gamma`) is left out.

    Args:
        top_k, top_p: Limits of the likeliest tokens that are sampled from.
    """
    return Confidence(rounding="up", proposal=Proposal("entropy", "sampled", top_p, top_k, first="top_k"))


@checked_arguments
def nemotron(threshold: float | None = None, block_length: int | None = None) -> BlockConfidence:
    """The sampler of Nemotron-Labs-Diffusion (`generate` of the hub model).

    Blocks begin at the end of the prompt. Each step reveals the most confident position of the block, and all others
    whose confidence is above the threshold. By default the finished text is causal: the first token of a block is the
    one that the finished text predicts, as a causal model, and is never diffused; when a block is filled, the next step
    computes it again as a causal text. A model whose config says `"causal_context": false` reads the prompt as one
    block, and finished blocks as they were written; no token of its blocks is predicted so.

    Differences from the authors' code:

    - A row of a batch does not wait for the others before it opens its next block.
    - A text does not end at the end token, and thinking budgets and speculation are left out.
    - A confidence that equals the threshold to the last bit is not above it.
    - `causal_context` belongs to the model (its config), because attention depends on it.

    Args:
        threshold: Confidence above which a position is revealed in any case; `None` reveals one in each step.
        block_length: Number of positions in a block; a model with another one is refused.
    """
    return BlockConfidence(threshold=threshold, block_length=block_length)


@checked_arguments
def diffullama(top_p: float | None = 0.9, *, as_published: bool = False) -> Ancestral:
    """DiffuLLaMA's sampler (Gong et al. 2024, arXiv 2410.17891; HKUNLP/DiffuLLaMA `model.py::generate_samples`).

    With T steps, step k reveals each masked position with probability 1/(T - k), and the last step all that remain.
    Logits are divided by the temperature, then filtered by top-p. The authors' code reveals at the beginning of a step
    what the forward pass of the step before predicted, which is the same sequence of canvases.

    Differences from the authors' code:

    - The first token is given, and it is part of the result. The authors' code cuts it off. If it is not given there,
      it is masked, and the position is "revealed" to the token that the input has there.
    - [MASK] is never written. In the authors' code it may be sampled; the position then counts as revealed and stays
      masked (`as_published=True`).

    Args:
        top_p: Limit of the likeliest tokens that are sampled from; `None` for all tokens.
        as_published: Whether to follow the authors' code in the second difference.
    """
    return Ancestral(eps=0.0, proposal=Proposal(top_p=top_p, writes_mask=as_published))


@checked_arguments
def sdar(
    block_length: int | None = None,
    steps_per_block: int | None = None,
    strategy: str = "low_confidence_dynamic",
    threshold: float | None = 0.85,
    eb_threshold: float = 0.35,
    top_p: float | None = None,
    top_k: int | None = None,
) -> BlockConfidence:
    """SDAR's sampler (Cheng et al. 2025, arXiv 2510.06303; JetAstra/SDAR `generate.py::block_diffusion_generate`).

    It writes block after block, in the blocks of the model, which are counted from the first token of the prompt. A
    step of a block reveals a number of its positions, as `BlockConfidence` describes it:

    - "low_confidence_dynamic": all positions of a confidence above the threshold, if these are more than the number;
      otherwise the most confident ones.
    - "low_confidence_static": the most confident ones.
    - "sequential": the leftmost ones.
    - "entropy_bounded": the positions of the lowest entropy, as long as their entropies add up to at most
      `eb_threshold`, and at least one. The published code raises an `UnboundLocalError` here, and would take one
      entropy for the whole block, from the probabilities of the chosen tokens alone. Here each position has the entropy
      of its own distribution.

    Differences from the authors' code:

    - A step reveals masked positions only. Where fewer are left than its number, the authors' code overwrites decided
      tokens by its predictions, tokens of the prompt included; their evaluation code does not.
    - Temperature 0 takes the likeliest token. The authors' code divides by it.
    - [MASK] is never written. In the authors' code it may be proposed; the run can then fail with an `IndexError`.

    Args:
        block_length: Number of positions in a block, which has to be that of the model; `None` for any.
        steps_per_block: Steps of a block; by default as in `BlockConfidence`.
        strategy: One of the four above.
        threshold: Confidence above which "low_confidence_dynamic" reveals.
        eb_threshold: Bound of "entropy_bounded" in nats.
        top_p, top_k: Limits of the likeliest tokens that are sampled from. Confidence is read after temperature, top-p
            and top-k: with `top_k=1` every confidence is 1, so that "low_confidence_dynamic" reveals a block at once.
    """
    one_of(*_STRATEGIES)("strategy", strategy)
    if strategy == "low_confidence_dynamic" and threshold is None:
        raise ValueError("strategy='low_confidence_dynamic' needs a threshold; without one use 'low_confidence_static'")
    not_negative("eb_threshold", eb_threshold)
    bounded = strategy == "entropy_bounded"
    return BlockConfidence(
        steps_per_block,
        "sequential" if strategy == "sequential" else "confidence",
        threshold if strategy == "low_confidence_dynamic" else None,
        eb_threshold if bounded else None,
        block_length,
        Proposal("entropy" if bounded else "probability", "sampled", top_p, top_k, first="top_k"),
    )


@checked_arguments
def fast_dllm_v2(
    threshold: float | None = None,
    sub_block: int | None = 8,
    block_length: int | None = None,
    top_p: float | None = None,
) -> BlockConfidence:
    """The sampler of Fast-dLLM v2 (Wu et al. 2025, arXiv 2509.26328; `generate` of the hub model).

    It writes block after block, in the blocks of the model, which are counted from the first token of the prompt. The
    first token of a block is the one that the finished text predicts, as a causal model. Then each step reveals, in the
    first part of the block that is not filled, the most confident position and all others above the threshold.

    Differences from the authors' code:

    - A run does not stop at an end token, and does not begin the block after the last with its first token.
    - A prompt of exactly one block is read. The authors' code forgets it.
    - [MASK] is never written. In the authors' code it may be proposed; the position then stays masked.
    - The approximate cache of the block (`use_block_cache`) is left out, and a row of a batch does not wait for others.

    Args:
        threshold: Confidence above which a position is revealed in any case; `None` reveals one in each step. The
            published configs name none; the authors evaluate with 0.9 and 1.
        sub_block: Number of positions in a part of a block (`small_block_size`); `None` for one part.
        block_length: Number of positions in a block; a model with another one is refused.
        top_p: Limit of the likeliest tokens that are sampled from, after which confidence is read. In the authors' code
            it is 0.95, and has no effect at temperature 0, where here it has one on the confidence.
    """
    proposal = Proposal(scored_on="sampled", top_p=top_p)
    return BlockConfidence(threshold=threshold, block_length=block_length, proposal=proposal, sub_block=sub_block)


@checked_arguments
def llada2(
    block_length: int | None = None,
    steps_per_block: int | None = None,
    threshold: float = 0.95,
    top_p: float | None = None,
    top_k: int | None = None,
) -> BlockConfidence:
    """LLaDA2.0's sampler (inclusionAI `modeling_llada2_moe.py::generate`): SDAR's "low_confidence_dynamic" at 0.95.

    It writes block after block, in the blocks of the model, which are counted from the first token of the prompt. A
    step of a block reveals all positions of a confidence above the threshold, if these are more than the step's share
    of the block, as `BlockConfidence` describes it; otherwise the most confident ones. The published models have blocks
    of 32 positions, and as many steps for each.

    Differences from the authors' code:

    - [MASK] is never written. In the authors' code it may be proposed; the position then stays masked.
    - A run does not stop after the block with the end token, nor at that token (`eos_early_stop`).
    - `minimal_topk` is left out. With fewer new tokens than steps of a block, the authors' code takes as few steps as
      new tokens.
    - Revealed tokens stay. The code of LLaDA2.1 may replace them by others (`editing_threshold`), which is not
      supported: its models run by the rule of LLaDA2.0.

    Args:
        block_length: Number of positions in a block, which has to be that of the model; `None` for any.
        steps_per_block: Steps of a block; by default as in `BlockConfidence`.
        threshold: Confidence above which a position is revealed in any case.
        top_p, top_k: Limits of the likeliest tokens that are sampled from. Confidence is read after temperature, top-p
            and top-k.
    """
    return sdar(block_length, steps_per_block, threshold=threshold, top_p=top_p, top_k=top_k)


@checked_arguments
def mdlm(predictor: str = "ddpm_cache", eps: float = 1e-5) -> Posterior | Score:
    """MDLM's samplers (Sahoo et al. 2024, arXiv 2406.07524; kuleshov-group/mdlm `diffusion.py::_sample`).

    Args:
        predictor: "ddpm", whose probability of masking is that of the noise schedule; "ddpm_cache", whose probability
            is the time itself; or "analytic", the step of `sedd`.
        eps: Time at which the rest is removed.
    """
    chances = {"ddpm": "schedule", "ddpm_cache": "time"}
    if one_of(*chances, "analytic")("predictor", predictor) == "analytic":
        return Score(eps=eps)
    return Posterior(chances[predictor], eps=eps)


@checked_arguments
def bd3lm(
    num_steps: int | None = None, first_hitting: bool = True, nucleus_p: float | None = None
) -> BlockPosterior | FirstHitting:
    """BD3LM's samplers (Arriola et al. 2025, arXiv 2503.09573; kuleshov-group/bd3lms `diffusion.py::_semi_ar_sampler`).

    Differences from the authors' code:

    - Its last step of a block is at time 0, where it writes token 0 at each position still masked. Here that step draws
      them from p(x_0).
    - It opens the next block once all rows have filled theirs. Here each row does so by itself. It also predicts again
      when any row has changed. Here a row is given a new time when it has changed itself.
    - It stops early by criteria of its own, and reads the last `context_size` positions. Here the network reads the
      whole canvas.

    Args:
        num_steps: Number of steps of a block; by default `steps=` is shared among the blocks. Not for first hitting.
        first_hitting: Whether each step reveals one position at a sampled time.
        nucleus_p: Sample from the most likely tokens whose total probability is at most `nucleus_p`, and at least from
            the likeliest.
    """
    proposal = Proposal(top_p=nucleus_p, crosses=nucleus_p is None)
    if not first_hitting:
        return BlockPosterior(num_steps, keeps_prediction=True, proposal=proposal)
    if num_steps is not None:
        raise ValueError(
            f"num_steps={num_steps}: first hitting takes one step for each position; leave it out, or give "
            "first_hitting=False"
        )
    return FirstHitting(proposal)


@checked_arguments
def sedd(predictor: str = "analytic", eps: float = 1e-5) -> Score:
    """SEDD's samplers (Lou et al. 2023, arXiv 2310.16834; louaaron/Score-Entropy-Discrete-Diffusion `sampling.py`).

    Given positions are never written, where the authors' code writes all and then sets the prompt again.

    Args:
        predictor: "analytic" or "euler".
        eps: Time at which the rest is removed.
    """
    return Score(predictor, eps)


@checked_arguments
def udlm(use_cache: bool = True, eps: float = 1e-5) -> UniformPosterior:
    """UDLM's sampler (Schiff et al. 2024, arXiv 2412.10193; kuleshov-group/discrete-diffusion-guidance
    `diffusion.py::_diffusion_sample`).

    Args:
        use_cache: Whether a step after one that changed no row of the batch uses its prediction again, although the
            time has moved.
        eps: Time at which the run ends, with a draw.
    """
    return UniformPosterior(use_cache, eps)


@checked_arguments
def duo(noise_removal: str = "ancestral", eps: float = 1e-5) -> UniformPosterior:
    """DUO's ancestral sampler (Sahoo et al. 2025, arXiv 2506.10892; s-sahoo/duo `trainer_base.py::generate_samples`).

    Args:
        noise_removal: What the last step, from `eps` to 0, does: "ancestral" draws from the posterior, "greedy" writes
            the likeliest token everywhere (the "greedy tail" of the distilled models); "none" leaves it out.
        eps: Time at which that step begins, or the run ends.
    """
    removes_rest = one_of("ancestral", "greedy", "none")("noise_removal", noise_removal) != "none"
    return UniformPosterior(eps=eps, removes_rest=removes_rest, greedy_tail=noise_removal == "greedy")


@checked_arguments
def radd(
    strategy: str = "direct", top_p: float | None = None, top_k: int | None = None, eps: float = 1e-5
) -> Posterior | Ancestral:
    """RADD's samplers (Ou et al. 2024, arXiv 2406.03736; ML-GSAI/RADD `sampling.py`).

    Its rates "tweedie" and "euler" are both (t - s) / t under its schedule.

    Differences from the authors' code:

    - Probabilities are in float64. The authors' code takes them in float16.
    - With "top_p" and "top_k" the authors' code samples from all columns, so that [MASK] may be drawn and stay to the
      end; here too.

    Args:
        strategy: "direct" draws each position's transition. "sampled" reveals positions at the rate of the process, and
            samples their tokens by top-p or top-k.
        top_p, top_k: Limits of the likeliest tokens, for "sampled".
        eps: Time at which the run ends.
    """
    if one_of("direct", "sampled")("strategy", strategy) == "sampled":
        return Ancestral(eps, Proposal(top_p=top_p, top_k=top_k, writes_mask=True))
    if top_p is not None or top_k is not None:
        raise ValueError("top_p and top_k need strategy='sampled': 'direct' draws from all tokens")
    return Posterior(removes_rest=False, eps=eps)


@checked_arguments
def diffusion_gemma(
    entropy_bound: float = 0.1,
    t_min: float = 0.4,
    t_max: float = 0.8,
    stability_threshold: int = 1,
    confidence_threshold: float = 0.005,
) -> EntropyBound:
    """DiffusionGemma's sampler (transformers `generation_diffusion_gemma.py`), with its defaults.

    With `seed=torch.Generator()` the run draws the random numbers that `generate` draws.

    Differences from the authors' code:

    - A row that is finished waits for the steps of its canvas to end, in which nothing is computed.
    - Nothing is cut behind an end token.

    The arguments are those of `EntropyBound`.
    """
    return EntropyBound(entropy_bound, t_min, t_max, stability_threshold, confidence_threshold)
