"""Pairs of a masked diffusion model and the causal model to compare it with (its AR baseline).

What a comparison can show depends on what the two models share: `PAIRS` states it for each pair, with the source. The
closest pairs are two modes of one checkpoint, which share every weight; then those of SMDM with the same data and
compute. LLaDA and Llama share neither weights nor data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import torch

from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer, load_source
from diffusion_lens.loading.catalogue import BUNDLED, PUBLISHED, SMDM
from diffusion_lens.loading.source import given_options
from diffusion_lens.settings import checked_arguments
from weight_conversion import family_of


@dataclass(frozen=True)
class ModelPair:
    """A masked diffusion model and its AR baseline.

    Attributes:
        diffusion, causal: Names of the two models; twice the same name where one checkpoint is both.
        shared: What the two have in common, and where they differ.
        source: Source of that statement.
    """

    diffusion: str
    causal: str
    shared: str
    source: str


_SMDM_PAPER = "Nie et al. 2024, arXiv 2410.18514; the files of nieshen/SMDM"
_LLADA_PAPER = "Nie et al. 2025, arXiv 2502.09992, which compares them"
_NO_WEIGHTS = "size only: LLaDA was trained from scratch on other data, with another tokenizer"
_DREAM_PAPER = "Ye et al. 2025, arXiv 2508.15487"
_ONE_CHECKPOINT = "every weight: they are two modes of one checkpoint, trained with both losses"
_NEMOTRON = "the checkpoint's code, whose dlm_paradigm chooses the mode"
_INITIALISED = "the initial weights of the diffusion model, and the tokenizer"
_TUNED = "the causal weights from which both were initialised; each has its own instruction tuning"


def _smdm() -> list[ModelPair]:
    """Each of SMDM's models with the AR baseline of its size, of the same compute if there is one.

    A fine-tuned model is paired with a baseline that was fine-tuned on the same data.
    """
    pairs = []
    for entry in SMDM:
        data = entry.tuned_on
        baselines = [other for other in SMDM if (other.kind, other.size, other.tuned_on) == ("ar", entry.size, data)]
        if entry.kind == "mdm" and baselines:
            baseline = next((other for other in baselines if other.flops == entry.flops), baselines[0])
            difference = "" if baseline.flops == entry.flops else f" against the baseline's {baseline.flops}"
            shared = f"network, tokenizer and {data or 'pre-training'} data; {entry.flops} FLOPs{difference}"
            pairs.append(ModelPair(entry.name, baseline.name, shared, _SMDM_PAPER))
    return pairs


PAIRS: dict[str, ModelPair] = {
    pair.diffusion: pair
    for pair in (
        ModelPair("site-mdm", "site-ar", "network, tokenizer, documents, first phase of training", "site_pair"),
        ModelPair("tiny-mdm", "tiny-ar", "network, tokenizer, sentences and recipe", "tiny_pair"),
        *_smdm(),
        ModelPair("llada-8b-base", "llama-3-8b", _NO_WEIGHTS, _LLADA_PAPER),
        ModelPair("llada-8b-instruct", "llama-3-8b-instruct", _NO_WEIGHTS, _LLADA_PAPER),
        ModelPair("dream-7b-base", "qwen2.5-7b", _INITIALISED, _DREAM_PAPER),
        ModelPair("dream-7b-instruct", "qwen2.5-7b-instruct", _TUNED, _DREAM_PAPER),
        *(
            ModelPair(f"nemotron-labs-diffusion-{size}", f"nemotron-labs-diffusion-{size}", _ONE_CHECKPOINT, _NEMOTRON)
            for size in ("3b", "3b-base", "14b")
        ),
    )
}


@checked_arguments
def load_pair(
    name: str | Path,
    *,
    mode: Literal["bidirectional", "block"] | None = None,
    block_size: SupportsIndex | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> tuple[HookedDiffusionTransformer, HookedDiffusionTransformer]:
    """A masked diffusion model and its AR baseline; `PAIRS[name]` says what the two share.

    Both are in memory at once: two models of 8 billion weights take 64 GB in float32, 32 GB in bfloat16. Where one
    checkpoint is both, its weights are in memory once: the parameters of the two models are the same tensors, so that
    an edit of one model, its training and its move to another device or dtype are those of the other, too. Folding the
    norms of one is refused.

    Args:
        name: Name of the diffusion model, such as "smdm-1028m"; a key of `PAIRS`. Or the file or folder of a checkpoint
            that is both.
        mode: Mode of the diffusion model, where one checkpoint is both; by default "bidirectional".
        block_size: Positions in a block of the diffusion model in mode "block", as in `from_pretrained`.
        device, dtype, cache_dir, token, local_files_only: Arguments of `from_pretrained`, for both models.

    Raises:
        ValueError: No pair has this name; the message lists the names. Or the checkpoint at this path has one mode, or
            the pair is two checkpoints, of which no mode can be chosen.
    """
    settings: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "cache_dir": cache_dir,
        "token": token,
        "local_files_only": local_files_only,
    }
    pair = PAIRS.get(str(name).lower())
    if Path(name).expanduser().exists() or (pair is not None and pair.diffusion == pair.causal):
        return _two_modes(name, given_options(mode or "bidirectional", block_size), settings)
    if pair is None:
        raise _no_pair(str(name))
    if given := given_options(mode, block_size):
        raise ValueError(
            f"{', '.join(f'{key}={value!r}' for key, value in given.items())} does not apply to a pair of two "
            f"checkpoints, {pair.diffusion!r} and {pair.causal!r}, each of which is one model: leave it out"
        )
    diffusion, causal = (
        HookedDiffusionTransformer.from_pretrained(model_name, **settings)
        for model_name in (pair.diffusion, pair.causal)
    )
    return diffusion, causal


def _two_modes(
    name: str | Path, options: Mapping[str, Any], settings: dict[str, Any]
) -> tuple[HookedDiffusionTransformer, HookedDiffusionTransformer]:
    """Both modes of one checkpoint, whose weights are read once.

    Args:
        options: Mode and block size of the diffusion model.
    """
    path = Path(name).expanduser()
    if path.exists() and not (family := family_of(path, {"mode": "ar"})).modes:
        raise ValueError(
            f"{name} has one mode only, as all checkpoints of the family {family.name!r}, so that it is one model of a "
            "pair. Load both models by from_pretrained, each from its own checkpoint, and pass the two wherever a pair "
            "is taken; load_pair needs a name, or a checkpoint that is both"
        )
    diffusion = HookedDiffusionTransformer.from_pretrained(name, **options, **settings)
    assert diffusion.source is not None
    causal = load_source(
        diffusion.source.in_mode("ar"), settings["device"], token=settings["token"], weights_of=diffusion
    )
    return diffusion, causal


def _no_pair(name: str) -> ValueError:
    lower = name.lower()
    if diffusion_models := [pair.diffusion for pair in PAIRS.values() if pair.causal == lower]:
        return ValueError(f"{name!r} is causal; load_pair takes the diffusion model: {', '.join(diffusion_models)}")
    if lower in PUBLISHED or lower in BUNDLED:
        return ValueError(
            f"{name!r} has no published AR baseline; these have one: {', '.join(PAIRS)}. Any two models may be loaded "
            "with from_pretrained"
        )
    near = get_close_matches(lower, PAIRS, n=3, cutoff=0.0)
    return ValueError(
        f"{name!r} is not the name of a pair; nearest are {', '.join(near)} (all of them: {', '.join(PAIRS)})"
    )
