"""Corrupted runs: what is done to the subject so that the answer is lost (Meng et al. 2022, section 2 and appendix B).

    gaussian   normal noise added to the embeddings of the subject's tokens (ROME's default)
    uniform    noise uniform in [-1, 1] added to them
    replace    normal noise in place of them
    mask       the embedding of [MASK] in place of them
    swap       the embeddings of another subject's tokens, of the same number, in place of them

The noise is drawn as in ROME's code, `numpy.random.RandomState(seed)`, so that published traces are met number for
number; it is scaled by `noise`. "mask" and "swap" have no chance in them, and are one run. All of them act on what the
network sees: in the denoising loop the canvas keeps its subject.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diffusion_lens import interventions
from diffusion_lens.facts import Query
from diffusion_lens.hook_names import nearest
from diffusion_lens.interventions import Hook
from diffusion_lens.model.inputs import check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Real, Whole, at_least, not_negative

Draw = Callable[[np.random.RandomState, tuple[int, ...]], Any]

_NOISE: dict[str, Draw] = {
    "gaussian": lambda chance, shape: chance.randn(*shape),
    "uniform": lambda chance, shape: chance.uniform(-1, 1, shape),
    "replace": lambda chance, shape: chance.randn(*shape),
}
CORRUPTIONS = (*_NOISE, "mask", "swap")


@dataclass(frozen=True)
class Corruption:
    """How a subject is corrupted.

    Attributes:
        kind: "gaussian", "uniform", "replace", "mask" or "swap".
        noise: scale of the noise, for the first three.
        samples: draws of noise.
        seed: of `numpy.random.RandomState`.
        swap: tokens that take the subject's place, for "swap".
    """

    kind: str = "gaussian"
    noise: float | None = None
    samples: int = 10
    seed: int = 1
    swap: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        kind: "str | Corruption",
        noise: Real | None = None,
        samples: Whole = 10,
        seed: Whole = 1,
        swap: Query | Iterable[Whole] | None = None,
    ) -> "Corruption":
        """From the keywords of `causal_trace`; a `Corruption` is returned as it is.

        Args:
            swap: Another query, whose subject's tokens are taken, or the tokens themselves.

        Raises:
            ValueError: A setting out of range, or a `Corruption` beside settings of its own.
        """
        if isinstance(kind, Corruption):
            if (noise, samples, seed, swap) != (None, 10, 1, None):
                raise ValueError(
                    "corruption= is a Corruption, which has its own noise, samples, seed and swap; leave those out"
                )
            return kind
        if isinstance(swap, Query):
            swap = swap.tokens[slice(*swap.subject)].tolist()
        return cls(
            kind,
            None if noise is None else not_negative("noise", noise),
            at_least(1, "samples", samples),
            at_least(0, "seed", seed),
            None if swap is None else tuple(at_least(0, "swap", token) for token in swap),
        )

    def __post_init__(self) -> None:
        if self.kind not in CORRUPTIONS:
            raise ValueError(
                f"unknown corruption {self.kind!r}, nearest is {nearest(self.kind, CORRUPTIONS, 1)}; "
                f"it is one of {', '.join(CORRUPTIONS)}"
            )
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples={self.samples}; it must be a whole number, at least 1")
        if self.kind in _NOISE:
            if self.noise is None:
                raise ValueError(
                    f"corruption={self.kind!r} needs noise=, a scale; noise_scale(model, subjects) measures ROME's"
                )
            if not isinstance(self.noise, int | float) or not math.isfinite(self.noise) or self.noise < 0:
                raise ValueError(f"noise={self.noise}; it must be a finite number, 0 or more")
        if (self.swap is not None) != (self.kind == "swap"):
            raise ValueError("corruption='swap' goes with swap=, another subject's tokens, and swap= with nothing else")

    @property
    def rows(self) -> int:
        """Corrupted runs: one a draw, or one where nothing is drawn."""
        return self.samples if self.kind in _NOISE else 1

    def hooks(self, model: DiffusionTransformer, query: Query, runs: int = 1) -> list[tuple[str, Hook]]:
        """What disturbs the subject's embeddings, in `runs` times all draws: row r gets draw r modulo `samples`.

        Raises:
            ValueError: "mask" on a model without [MASK], or a swap of another length than the subject.
        """
        start, stop = query.subject
        subject = slice(start, stop)
        if self.kind == "mask":
            return [("hook_embed", interventions.mask_tokens(model, subject))]
        if self.swap is not None:
            if len(self.swap) != stop - start:
                raise ValueError(
                    f"swap has {len(self.swap)} tokens and the subject {stop - start}: take another subject of the "
                    "same length"
                )
            other = torch.tensor(self.swap, device=model.cfg.device)[None]
            return [
                ("hook_embed", interventions.replace(model.embed(check_tokens(other, model.cfg)).detach(), subject))
            ]
        assert self.noise is not None
        shape = (self.samples, stop - start, model.cfg.d_model)
        drawn = self.noise * _NOISE[self.kind](np.random.RandomState(self.seed), shape)
        disturb = interventions.replace if self.kind == "replace" else interventions.add_noise
        return [("hook_embed", disturb(torch.from_numpy(drawn).repeat(runs, 1, 1), subject))]

    def describe(self) -> dict[str, Any]:
        """For a record."""
        noisy = self.kind in _NOISE
        drawn = {"noise": self.noise, "samples": self.samples, "seed": self.seed} if noisy else {}
        return {"corruption": self.kind, **drawn, **({"swap": list(self.swap)} if self.swap else {})}
