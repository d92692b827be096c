"""Noise levels of canvases, and the positions that a dictionary is for: masked, unmasked, or all.

The noise level t of a canvas is the probability with which each of its positions was masked. Under uniform noise the
masked positions are those whose tokens were replaced by noise, which may be the token itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Real, at_least, plain_number

Mask = Literal["masked", "unmasked", "all"]
Span = tuple[float, float]  # Lowest and highest noise level.


@dataclass(frozen=True)
class NoiseRange:
    """Noise levels between two bounds; each level is equally likely.

    Attributes:
        low, high: Lowest and highest noise level. The defaults are those of training (`hide`); the sparse
            autoencoders of DLM-Scope (arXiv 2602.05859, its published code) are trained between 0.05 and 0.5.
        samples: Number of canvases per text. Each has its own one of `samples` equal parts of the range, so that
            together they cover the range evenly.
    """

    low: float = 1e-3
    high: float = 1.0
    samples: int = 1

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, _level(name, getattr(self, name)))
        object.__setattr__(self, "samples", at_least(1, "samples", self.samples))
        if self.low >= self.high:
            raise ValueError(
                f"low={self.low} and high={self.high}; low must be below high (for one level: t={self.low})"
            )

    @property
    def spans(self) -> tuple[Span, ...]:
        """Bounds of each part."""
        ends = [self.low + (self.high - self.low) * i / self.samples for i in range(self.samples)] + [self.high]
        return tuple(pairwise(ends))


Noise = Real | Sequence[Real] | NoiseRange | None


def spans_of(model: DiffusionTransformer, t: Noise, default: NoiseRange) -> tuple[Span, ...]:
    """The noise levels of a text's canvases: one, several, or parts of a range.

    Raises:
        ValueError: A level is not between 0 and 1, there is none, or the model predicts next tokens.
    """
    if model.cfg.grows:
        if t is not None:
            raise ValueError(f"t={t}: {model.cfg.model_name!r} has no [MASK], so its texts have no noise; leave out t")
        return ((0.0, 0.0),)
    if t is None or isinstance(t, NoiseRange):
        return (t or default).spans
    plain: Any = t.tolist() if hasattr(t, "tolist") else t
    levels = [_level("t", level) for level in (plain if isinstance(plain, Iterable) else [plain])]
    if not levels:
        raise ValueError("t is empty; give a noise level between 0 and 1, several, or a NoiseRange")
    return tuple((level, level) for level in levels)


def check_mask(model: DiffusionTransformer, mask: str, spans: Sequence[Span]) -> Mask:
    """`mask`, if it is known and the canvases can have such positions.

    Raises:
        ValueError: It selects no position.
    """
    if mask not in ("masked", "unmasked", "all"):
        raise ValueError(f"mask={mask!r}; it must be 'masked', 'unmasked' or 'all'")
    if mask != "all" and model.cfg.grows:
        raise ValueError(f"mask={mask!r}: {model.cfg.model_name!r} has no [MASK]; use mask='all'")
    only = {"masked": 0.0, "unmasked": 1.0}.get(mask)
    if only is not None and all(span == (only, only) for span in spans):
        raise ValueError(f"mask={mask!r} selects nothing at the noise level t={only:g}; give another t")
    return mask  # type: ignore[return-value]


def _level(name: str, value: Any) -> float:
    level = plain_number(name, value)
    if not 0 <= level <= 1:
        raise ValueError(f"{name}={level}; a noise level is the probability of being masked, between 0 and 1")
    return level
