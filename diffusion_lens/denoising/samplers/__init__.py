"""The samplers, by name and as objects; presets carry the name of the code they equal."""

from difflib import get_close_matches

from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.samplers.ancestral import Ancestral
from diffusion_lens.denoising.samplers.confidence import Confidence
from diffusion_lens.denoising.samplers.left_to_right import LeftToRight

SAMPLERS: dict[str, Sampler] = {sampler.name: sampler for sampler in (Confidence(), Ancestral(), LeftToRight())}


def smdm() -> Confidence:
    """SMDM's evaluation sampler ("greddy" in `eval/gen_model_answer.py`), its ranking pooled over the batch."""
    return Confidence(scope="batch")


def resolve_sampler(sampler: str | Sampler | None, attention_dir: str) -> Sampler:
    """A sampler from its name, itself, or the default of the variant."""
    if sampler is None:
        sampler = "left_to_right" if attention_dir == "causal" else "confidence"
    if isinstance(sampler, str):
        if sampler not in SAMPLERS:
            near = get_close_matches(sampler, SAMPLERS, n=1, cutoff=0.0)
            raise ValueError(f"unknown sampler {sampler!r}; known are {', '.join(SAMPLERS)} (nearest: {near[0]})")
        sampler = SAMPLERS[sampler]
    if attention_dir == "causal" and not isinstance(sampler, LeftToRight):
        raise ValueError(
            f"the sampler {sampler.name!r} fills places in any order, which a causal model cannot; use 'left_to_right'"
        )
    return sampler


__all__ = ["SAMPLERS", "Ancestral", "Confidence", "LeftToRight", "Sampler", "resolve_sampler", "smdm"]
