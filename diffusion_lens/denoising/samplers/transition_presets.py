"""Samplers of transitions, named after the code that they reproduce.

Their authors draw tokens from the model's own probabilities: run them with temperature=1. At temperature 0 the time at
which a position changes is still drawn, and its token is the likeliest. The last step of a run that removes the rest of
the noise counts among `steps=`: the authors' `num_steps` is one less.
"""

from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.samplers.ancestral import Ancestral
from diffusion_lens.denoising.samplers.block_posterior import BlockPosterior, FirstHitting
from diffusion_lens.denoising.samplers.posterior import Posterior, UniformPosterior
from diffusion_lens.denoising.samplers.score import Score


def mdlm(predictor: str = "ddpm_cache", eps: float = 1e-5) -> Posterior | Score:
    """MDLM's samplers (Sahoo et al. 2024, arXiv 2406.07524; kuleshov-group/mdlm `diffusion.py::_sample`).

    Args:
        predictor: "ddpm", whose probability of masking is that of the noise schedule; "ddpm_cache", whose probability
            is the time itself; or "analytic", the step of `sedd`.
        eps: Time at which the rest is removed.
    """
    chances = {"ddpm": "schedule", "ddpm_cache": "time"}
    if predictor == "analytic":
        return Score(eps=eps)
    if predictor not in chances:
        raise ValueError(f"predictor={predictor!r}; it must be 'ddpm', 'ddpm_cache' or 'analytic'")
    return Posterior(chances[predictor], eps=eps)


def bd3lm(
    num_steps: int | None = None, first_hitting: bool = True, nucleus_p: float | None = None
) -> BlockPosterior | FirstHitting:
    """BD3LM's samplers (Arriola et al. 2025, arXiv 2503.09573; kuleshov-group/bd3lms `diffusion.py::_semi_ar_sampler`).

    Differences from the authors' code:

    - Its last step of a block is at time 0, where it writes token 0 at each position still masked. Here that step draws
      them from p(x_0).
    - It opens the next block once all rows have filled theirs. Here each row does so by itself. It also predicts again
      when any row has changed. Here a row is told a new time when it has changed itself.
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


def sedd(predictor: str = "analytic", eps: float = 1e-5) -> Score:
    """SEDD's samplers (Lou et al. 2023, arXiv 2310.16834; louaaron/Score-Entropy-Discrete-Diffusion `sampling.py`).

    Given positions are never written, where the authors' code writes all and then sets the prompt again.

    Args:
        predictor: "analytic" or "euler".
        eps: Time at which the rest is removed.
    """
    return Score(predictor, eps)


def udlm(use_cache: bool = True, eps: float = 1e-5) -> UniformPosterior:
    """UDLM's sampler (Schiff et al. 2024, arXiv 2412.10193; kuleshov-group/discrete-diffusion-guidance
    `diffusion.py::_diffusion_sample`).

    Args:
        use_cache: Whether a step after one that changed no row of the batch uses its prediction again, although the
            time has moved.
        eps: Time at which the run ends, with a draw.
    """
    return UniformPosterior(use_cache, eps)


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
    if strategy == "sampled":
        return Ancestral(eps, Proposal(top_p=top_p, top_k=top_k, writes_mask=True))
    if strategy != "direct":
        raise ValueError(f"strategy={strategy!r}; it must be 'direct' or 'sampled'")
    if top_p is not None or top_k is not None:
        raise ValueError("top_p and top_k need strategy='sampled': 'direct' draws from all tokens")
    return Posterior(removes_rest=False, eps=eps)
