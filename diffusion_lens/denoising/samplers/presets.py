"""Samplers under the name of the code they equal, with what each does otherwise by default, and why."""

from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.denoising.samplers.ancestral import Ancestral
from diffusion_lens.denoising.samplers.blocks import Blocks
from diffusion_lens.denoising.samplers.confidence import Confidence

_ORDERS = {"low_confidence": "confidence", "random": "random"}
_SCORES = {"maskgit_plus": "probability", "topk_margin": "margin", "entropy": "entropy"}


def smdm() -> Confidence:
    """SMDM's evaluation sampler ("greddy" in `eval/gen_model_answer.py`), its ranking pooled over the batch."""
    return Confidence(scope="batch")


def llada(block_length: int | None = None, remasking: str = "low_confidence", *, as_published: bool = False) -> Blocks:
    """LLaDA's sampler (Nie et al. 2025, arXiv 2502.09992; ML-GSAI/LLaDA `generate.py`).

    Blocks from left to right; within a block the masks are shared evenly by its steps, the first taking what remains.
    Tokens are drawn by Gumbel noise in float64; their confidence is the softmax of the logits without noise, after
    guidance. The number of blanks is a multiple of `block_length`, and `steps` one of the number of blocks; by default
    there are as many steps as blanks.

    What differs from the authors' code:

    - Masks inside the prompt are blanks like the others. There they are filled but not counted, so that as many masks
      remain in the end (`as_published=True`).
    - [MASK] is never written. There it may win, and its place counts as revealed and stays masked
      (`as_published=True`).
    - Confidence is compared in float64; there in the dtype of the model, in which near-certain tokens tie.
    - Guidance needs no attention mask; there it fails without one.
    - There is no switch against the end token (`logits_eos_inf`, `confidence_eos_eot_inf`), whose ids are written into
      the code there: a hook on `denoise.hook_logits` or `denoise.hook_confidence` does it.
    - Seeds are not theirs: chance belongs to row, step and place here.

    Args:
        block_length: blanks of a block; `None` is one block.
        remasking: "low_confidence" reveals the surest places, "random" any.
        as_published: keep the first two, as the authors' code has them.
    """
    if remasking not in _ORDERS:
        raise ValueError(f"remasking={remasking!r}; it is 'low_confidence' or 'random'")
    return Blocks(
        block_length,
        _ORDERS[remasking],
        masks_in_prompt="uncounted" if as_published else "counted",
        proposal=Proposal(writes_mask=as_published),
    )


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

    Times from 1 to `eps` in equal steps. "origin" reveals each masked place with probability 1 - s/t. The others reveal
    floor(masked · (1 - s/t)) places, all that remain in the last step: with as many steps as masks the first reveals
    none and the last two. Logits are divided by the temperature, then filtered by top-p, then by top-k; confidence is
    read after that.

    What differs from the authors' code:

    - Each row has a schedule of its own. There the masks of the batch are divided by its rows: where rows differ in
      masks, one with more keeps some in the end (`as_published=True`), and in one with fewer, decided tokens, those of
      the prompt included, are overwritten by [MASK]. Which, hangs on how `torch.topk` breaks ties on the machine; that
      is not reproduced, such a row is merely finished early.
    - [MASK] is never written. There it may win, and its place counts as revealed and stays masked
      (`as_published=True`).
    - Probabilities are taken in float64; there in the dtype of the model, in which near-certain tokens tie.
    - `top_k` is what you say. There, called without a generation config, it became 50, and the temperature 1
      (transformers 4.46).
    - A draw that fails does so aloud; there it silently becomes the likeliest token.
    - Seeds are not theirs: chance belongs to row, step and place here.

    Args:
        alg: "origin", "maskgit_plus" (probability of the token), "topk_margin" (likeliest minus second) or "entropy"
            (negative).
        alg_temp: above 0, places are drawn without replacement by softmax(confidence / alg_temp); not for "origin",
            which ranks nothing.
        top_p, top_k: draw tokens from the likeliest only.
        eps: the time at which the run ends.
        as_published: keep the first two, as the authors' code has them.
    """
    if alg != "origin" and alg not in _SCORES:
        raise ValueError(f"alg={alg!r}; it is one of origin, {', '.join(_SCORES)}")
    proposal = Proposal(_SCORES.get(alg, "probability"), "drawn", top_p, top_k, writes_mask=as_published)
    if alg == "origin":
        if alg_temp:
            raise ValueError(
                f"alg_temp={alg_temp} draws among ranked places, and alg='origin' ranks none: leave it out"
            )
        return Ancestral(eps, proposal)
    return Confidence("mean" if as_published else "row", eps, alg_temp or 0.0, proposal)
