"""Corruptions of the subject, which make the model lose the answer (Meng et al. 2022, section 2 and appendix B).

    gaussian   normal noise added to the embeddings of the subject's tokens (ROME's default)
    uniform    noise uniform in [-1, 1] added to them
    replace    normal noise instead of the embeddings
    mask       the embedding of [MASK] instead of each
    swap       the embeddings of another subject with the same number of tokens

The noise is sampled as in ROME's code, with `numpy.random.RandomState(seed)`, so that published traces are reproduced
exactly; it is scaled by `noise`. "mask" and "swap" are deterministic, so they need one sample only. All corruptions act
on the embeddings: in the denoising loop the canvas keeps its subject.
"""

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
from diffusion_lens.settings import Real, Whole, at_least, not_negative, whole_numbers

NoiseFunction = Callable[[np.random.RandomState, tuple[int, ...]], Any]

_NOISE: dict[str, NoiseFunction] = {
    "gaussian": lambda generator, shape: generator.randn(*shape),
    "uniform": lambda generator, shape: generator.uniform(-1, 1, shape),
    "replace": lambda generator, shape: generator.randn(*shape),
}
CORRUPTIONS = (*_NOISE, "mask", "swap")


@dataclass(frozen=True, init=False)
class Corruption:
    """How a subject is corrupted.

    Attributes:
        kind: "gaussian", "uniform", "replace", "mask" or "swap".
        noise: Scale of the noise, for the first three kinds.
        samples: Number of samples of the noise.
        seed: Seed of `numpy.random.RandomState`.
        swap: Tokens that replace the subject's, for "swap".
    """

    kind: str
    noise: float | None
    samples: int
    seed: int
    swap: tuple[int, ...] | None

    def __init__(
        self,
        kind: str = "gaussian",
        noise: Real | None = None,
        samples: Whole = 10,
        seed: Whole = 1,
        swap: Iterable[Whole] | None = None,
    ) -> None:
        """Check the settings, and convert NumPy's and torch's numbers to plain Python numbers.

        Raises:
            ValueError: A setting is unknown, missing or out of range.
            TypeError: A setting has the wrong type.
        """
        if kind not in CORRUPTIONS:
            raise ValueError(
                f"unknown corruption {kind!r}, nearest is {nearest(str(kind), CORRUPTIONS, 1)}; "
                f"it must be one of {', '.join(CORRUPTIONS)}"
            )
        if kind in _NOISE and noise is None:
            raise ValueError(
                f"corruption={kind!r} needs noise=, its scale; noise_scale(model, subjects) measures ROME's"
            )
        if (swap is not None) != (kind == "swap"):
            raise ValueError(
                "corruption='swap' requires swap=, another subject's tokens; no other corruption takes swap="
            )
        vars(self).update(
            kind=kind,
            noise=None if noise is None else not_negative("noise", noise),
            samples=at_least(1, "samples", samples),
            seed=at_least(0, "seed", seed),
            swap=None if swap is None else tuple(at_least(0, "swap", token) for token in whole_numbers("swap", swap)),
        )

    @classmethod
    def of(
        cls,
        kind: "str | Corruption",
        noise: Real | None = None,
        samples: Whole = 10,
        seed: Whole = 1,
        swap: Query | Iterable[Whole] | None = None,
    ) -> "Corruption":
        """A corruption from the keywords of `causal_trace`; a `Corruption` is returned as it is.

        Args:
            swap: Another query, whose subject's tokens are used, or the tokens themselves.

        Raises:
            ValueError: A `Corruption` together with the keywords that it replaces.
        """
        if not isinstance(kind, Corruption):
            tokens = swap.tokens[slice(*swap.subject)].tolist() if isinstance(swap, Query) else swap
            return cls(kind, noise, samples, seed, tokens)
        if swap is not None or (noise, samples, seed) != (None, 10, 1):
            raise ValueError(
                "corruption= is a Corruption, which has its own noise, samples, seed and swap; leave those out"
            )
        return kind

    @property
    def rows(self) -> int:
        """Number of rows of the corrupted run: one per sample, or one for a deterministic corruption."""
        return self.samples if self.kind in _NOISE else 1

    def hooks(self, model: DiffusionTransformer, query: Query, runs: int = 1) -> list[tuple[str, Hook]]:
        """The hooks that corrupt the subject's embeddings.

        Args:
            runs: Number of copies of the corrupted run in the batch; row r gets sample r modulo `samples`.

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
        noise = self.noise * _NOISE[self.kind](np.random.RandomState(self.seed), shape)
        corrupt = interventions.replace if self.kind == "replace" else interventions.add_noise
        return [("hook_embed", corrupt(torch.from_numpy(noise).repeat(runs, 1, 1), subject))]

    def describe(self) -> dict[str, Any]:
        """The settings, for a record."""
        is_noise = self.kind in _NOISE
        noise = {"noise": self.noise, "samples": self.samples, "seed": self.seed} if is_noise else {}
        return {"corruption": self.kind, **noise, **({"swap": list(self.swap)} if self.swap else {})}
