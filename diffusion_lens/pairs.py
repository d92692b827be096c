"""A masked diffusion model and the causal model to hold it against.

How near the two are differs, and a comparison can claim no more than that: `PAIRS` says for each pair what they share,
and who says so. Nearest are the twins of SMDM that had the same data and compute; LLaDA's and Llama's 8B share neither
weights nor data.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch

from diffusion_lens.catalogue import BUNDLED, PUBLISHED, SMDM
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer


@dataclass(frozen=True)
class Pair:
    """Two models that may be compared.

    Attributes:
        diffusion, causal: their names.
        shared: what the two have in common, and what not.
        source: who says so.
    """

    diffusion: str
    causal: str
    shared: str
    source: str


_SMDM_PAPER = "Nie et al. 2024, arXiv 2410.18514; the files of nieshen/SMDM"
_LLADA_TUNED = "Zhu et al. 2025, arXiv 2505.19223: tuned from LLaDA-8B-Instruct"
_LLADA_PAPER = "Nie et al. 2025, arXiv 2502.09992, which compares them"
_NO_WEIGHTS = "size only: LLaDA was trained from scratch on data of its own, with another tokenizer"
_DREAM_PAPER = "Ye et al. 2025, arXiv 2508.15487"
_CODER_CARD = "apple/DiffuCoder-7B-Base, model card; Gong et al. 2025, arXiv 2506.20639"
_BEGAN = "the weights that the diffusion model began with, and the tokenizer"
_TUNED = "the causal weights that both began with; each was tuned to follow instructions in its own way"


def _smdm() -> list[Pair]:
    """Each of SMDM's models with the twin of its size, of the same compute if there is one.

    Of models tuned on other data, only those whose twin was tuned on the same.
    """
    pairs = []
    for entry in SMDM:
        tuned_on = entry.tuned_on
        twins = [twin for twin in SMDM if (twin.kind, twin.size, twin.tuned_on) == ("ar", entry.size, tuned_on)]
        if entry.kind == "mdm" and twins:
            twin = next((each for each in twins if each.flops == entry.flops), twins[0])
            against = "" if twin.flops == entry.flops else f" against the twin's {twin.flops}"
            shared = f"network, tokenizer and {tuned_on or 'pre-training'} data; {entry.flops} FLOPs{against}"
            pairs.append(Pair(entry.name, twin.name, shared, _SMDM_PAPER))
    return pairs


PAIRS: dict[str, Pair] = {
    pair.diffusion: pair
    for pair in (
        Pair("tiny-mdm", "tiny-ar", "network, tokenizer, sentences and recipe", "tiny_pair"),
        *_smdm(),
        Pair("llada-8b-base", "llama-3-8b", _NO_WEIGHTS, _LLADA_PAPER),
        Pair("llada-8b-instruct", "llama-3-8b-instruct", _NO_WEIGHTS, _LLADA_PAPER),
        Pair("llada-1.5", "llama-3-8b-instruct", _NO_WEIGHTS, _LLADA_TUNED),
        Pair("dream-7b-base", "qwen2.5-7b", _BEGAN, _DREAM_PAPER),
        Pair("dream-7b-instruct", "qwen2.5-7b-instruct", _TUNED, _DREAM_PAPER),
        Pair("dream-coder-7b-instruct", "qwen2.5-coder-7b-instruct", _TUNED, "from memory: its authors' announcement"),
        Pair("diffucoder-7b-base", "qwen2.5-coder-7b", _BEGAN, _CODER_CARD),
        Pair("diffucoder-7b-instruct", "qwen2.5-coder-7b-instruct", _TUNED, _CODER_CARD),
        Pair("diffucoder-7b-cpgrpo", "qwen2.5-coder-7b-instruct", _TUNED, _CODER_CARD),
        Pair("qwen3-0.6b-mdlm", "qwen3-0.6b", _BEGAN, "dllm-hub, the diffusion model's card"),
        Pair("qwen2.5-coder-0.5b-instruct-mdlm", "qwen2.5-coder-0.5b-instruct", _BEGAN, "the diffusion model's name"),
    )
}


def load_pair(
    name: str,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> tuple[HookedDiffusionTransformer, HookedDiffusionTransformer]:
    """A masked diffusion model and its causal relative; `PAIRS[name]` says what the two share.

    Both are held at once: two models of 8 billion weights take 64 GB in float32, 32 GB in bfloat16.

    Args:
        name: of the diffusion model, "smdm-1028m"; the keys of `PAIRS`.
        device, dtype, cache_dir, token, local_files_only: of both, as in `from_pretrained`.

    Raises:
        ValueError: a name without a relative here; the message names those that have one.
    """
    pair = PAIRS.get(name.lower())
    if pair is None:
        raise _no_pair(name)
    diffusion, causal = (
        HookedDiffusionTransformer.from_pretrained(
            each, device=device, dtype=dtype, cache_dir=cache_dir, token=token, local_files_only=local_files_only
        )
        for each in (pair.diffusion, pair.causal)
    )
    return diffusion, causal


def _no_pair(name: str) -> ValueError:
    lower = name.lower()
    if relatives := [pair.diffusion for pair in PAIRS.values() if pair.causal == lower]:
        return ValueError(f"{name!r} is causal; load_pair takes the diffusion model: {', '.join(relatives)}")
    if lower in PUBLISHED or lower in BUNDLED:
        return ValueError(
            f"{name!r} has no causal relative that was published for it; these have one: {', '.join(PAIRS)}. Any two "
            "models may be loaded with from_pretrained"
        )
    near = get_close_matches(lower, PAIRS, n=3, cutoff=0.0)
    return ValueError(f"{name!r} is no name of a pair; nearest are {', '.join(near)} (all of them: {', '.join(PAIRS)})")
