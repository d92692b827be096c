"""Rotary frequencies that were lowered for texts longer than those of pre-training, by type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from weight_conversion.checks import check_count, check_flag, check_positive, part_from


@dataclass(frozen=True)
class RotaryScaling:
    """Rotary frequencies lowered by wavelength, for texts longer than those of pre-training.

    With n for `original_max_position_embeddings`: wavelengths below n / high_freq_factor are kept, those above
    n / low_freq_factor become `factor` times as long, and the frequencies between are interpolated. Nothing depends on
    the length of a text. Source: type "llama3" of transformers, `modeling_rope_utils.py::_compute_llama3_parameters`.

    Attributes:
        factor: Divisor of the low frequencies.
        low_freq_factor, high_freq_factor: Turns within n positions, below and above which frequencies are low and high.
        original_max_position_embeddings: Length of texts in pre-training, in positions.
    """

    rope_type: ClassVar[str] = "llama3"
    table_factor: ClassVar[float] = 1.0

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        if self.factor < 1:
            raise ValueError(f"factor is {self.factor!r}; frequencies are divided by it, so it must be at least 1")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor!r}; it must be above low_freq_factor, "
                f"{self.low_freq_factor!r}"
            )
        check_count("original_max_position_embeddings", self.original_max_position_embeddings)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): frequencies that turn seldom are divided by `factor`, others are kept.

    A frequency that turns more than `beta_fast` times within the original length is kept, one that turns less than
    `beta_slow` times is divided, and between them a linear ramp over the dimensions mixes the two. Cosine and sine are
    multiplied by an attention factor. Source: type "yarn" of transformers, `_compute_yarn_parameters`.

    Attributes:
        factor: Divisor of the low frequencies. Below 1, as in one published config, it raises them.
        original_max_position_embeddings: Length of texts in pre-training, in positions.
        beta_fast, beta_slow: Turns within that length, above and below which frequencies are fast and slow.
        mscale, mscale_all_dim: Numbers of the attention factor, m(mscale) / m(mscale_all_dim) with
            m(x) = 0.1 x log(factor) + 1; unless both are given it is m(1).
        attention_factor: The attention factor itself, in place of that formula.
        truncate: Whether the ends of the ramp are rounded to whole dimensions.
    """

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_count("original_max_position_embeddings", self.original_max_position_embeddings)
        for name in ("factor", "beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast is {self.beta_fast!r}; it must be above beta_slow, {self.beta_slow!r}")
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_flag("truncate", self.truncate)

    @property
    def table_factor(self) -> float:
        """The attention factor, by which cosine and sine are multiplied."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1)

    def _magnitude(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class QueryScale:
    """Queries lengthened with the position, by 1 + beta · log(1 + floor(position / original length)) (Llama 4).

    Attributes:
        beta: The slope.
        original_max_position_embeddings: Length of texts in pre-training, below which nothing is scaled.
    """

    beta: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_count("original_max_position_embeddings", self.original_max_position_embeddings)


Scaling = RotaryScaling | YarnScaling
SCALINGS: dict[str, type[RotaryScaling] | type[YarnScaling]] = {
    scaling.rope_type: scaling for scaling in (RotaryScaling, YarnScaling)
}


def scaling_from(data: object, source: str = "rotary_scaling") -> Scaling:
    """A scaling from `scaling_data`; without "rope_type" it is one of type "llama3"."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{source} is {data!r}; it must be a mapping")
    numbers = dict(data)
    rope_type = numbers.pop("rope_type", RotaryScaling.rope_type)
    if rope_type not in SCALINGS:
        raise ValueError(f"{source} is of type {rope_type!r}; it must be one of {', '.join(SCALINGS)}")
    return part_from(SCALINGS[rope_type], numbers, source)


def scaling_data(scaling: Scaling) -> dict[str, Any]:
    """A scaling as plain data; the type "llama3" is not named, as in the files of earlier versions."""
    named = {} if isinstance(scaling, RotaryScaling) else {"rope_type": scaling.rope_type}
    return {**named, **{name: value for name, value in asdict(scaling).items() if value is not None}}
