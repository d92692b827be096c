"""What the network predicts at the positions of a step, in the words that proposals and transitions ask for."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.denoising.proposal import Proposal
from diffusion_lens.noise import Absorbing, Head, Noise, Schedule


@dataclass(frozen=True)
class Prediction:
    """The output of the head at the positions of a step, and what it says of the clean tokens.

    Attributes:
        output: Float[selected d_vocab_out], output of the head after guidance and hooks.
        present: Int[selected], token or [MASK] at each position.
        head: What the output means.
        schedule: Schedule of noise of the run.
        sigma: Noise of which the network was told, or that of each position; `None` for a model of next tokens.
        temperature: 1 leaves the model's own probabilities; 0 gives all to the likeliest token.
        proposal: Limits of the likeliest tokens that are sampled from.
    """

    output: Float[Tensor, "selected d_vocab_out"]
    present: Int[Tensor, "selected"]
    head: Head
    schedule: Schedule
    sigma: float | Float[Tensor, "selected"] | None
    temperature: float
    proposal: Proposal

    @cached_property
    def logits(self) -> Float[Tensor, "selected d_vocab_out"]:
        """Logits whose softmax is p(x_0) at temperature 1; the head's own, [MASK] included, where it may be written."""
        if self.proposal.writes_mask or self.sigma is None:
            return self.output
        return self.head.clean_logits(self.output, self.present, self.amount(self.sigma))

    @property
    def noise(self) -> Noise:
        """The kind of noise, which every model has that a sampler of transitions fits."""
        assert self.head.noise is not None
        return self.head.noise

    @property
    def mask(self) -> int | None:
        """Id of [MASK], if there is one."""
        return self.noise.mask if isinstance(self.noise, Absorbing) else None

    @property
    def p_clean(self) -> Float[Tensor, "selected d_vocab_out"]:
        """p(x_0) in float64, at the temperature and over the likeliest tokens, without [MASK]."""
        logits = self.proposal.allowed(self.logits.double(), self.temperature or 1.0, self.mask)
        if not self.temperature:
            return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double()
        return (logits / self.temperature).softmax(dim=-1)

    @property
    def scores(self) -> Float[Tensor, "selected d_vocab"]:
        """The scores in float64: the head's own or, where a setting changes p(x_0), those that follow from it."""
        assert self.sigma is not None
        sigma = self.amount(self.sigma)
        if self.temperature == 1 and not self.proposal.filters:
            return self.head.scores(self.output.double(), self.present, sigma)
        return self.noise.scores(self.p_clean, self.present, sigma)

    def amount(self, sigma: float | Float[Tensor, "selected"]) -> Float[Tensor, "selected"]:
        """An amount of noise as a number for each position, in float64."""
        if isinstance(sigma, Tensor):
            return sigma
        return torch.full(self.present.shape, sigma, dtype=torch.float64, device=self.present.device)
