"""What the output of a head means: one place turns it into the probabilities p(x_0) of the clean tokens.

`model(...)` returns the output of the head's linear map as it is. A head here reads it:

    logits       softmax over all columns is p(x_0)
    subs         the same without [MASK], which no clean text contains (Sahoo et al. 2024, arXiv 2406.07524)
    log_scores   logarithms of the scores p_sigma(y) / p_sigma(z), from which p(x_0) follows (Lou et al. 2023,
                 arXiv 2310.16834). Under absorbing noise it is proportional to them, as with "subs"; under uniform
                 noise it depends on the present token z and on sigma.

`clean_logits` returns logits whose softmax is p(x_0), so that everything that works on logits works on every head. On a
head of plain logits it returns its argument.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.noise.kinds import Absorbing, Noise, Uniform, noise_of
from weight_conversion import Variant

Raw = Float[Tensor, "*rest d_vocab_out"]
Ids = Int[Tensor, "*rest"]
Amount = Float[Tensor, "*#rest"]

# The authors' logit of [MASK] in "subs": finite, so that differences of two such logits are numbers.
NEVER = -1e6


class Head(ABC):
    """The meaning of a head's output.

    Attributes:
        noise: Kind of noise; `None` for a model of next tokens.
        needs_canvas: Whether p(x_0) depends on the present tokens and on sigma, apart from the output.
    """

    noise: Noise | None
    needs_canvas: bool = False

    @abstractmethod
    def clean_logits(self, output: Raw, present: Ids | None = None, sigma: Amount | None = None) -> Raw:
        """Logits whose softmax is p(x_0).

        Args:
            output: Output of the head at some positions.
            present: Token at each of these positions, where `needs_canvas`.
            sigma: Noise there, where `needs_canvas`.
        """

    def log_scores(self, output: Raw, present: Ids, sigma: Amount) -> Float[Tensor, "*rest d_vocab"]:
        """The logarithms of the scores, 0 at the present token."""
        scores = self.scores(output, present, sigma)
        return scores.clamp(min=torch.finfo(scores.dtype).tiny).log()

    def scores(self, output: Raw, present: Ids, sigma: Amount) -> Float[Tensor, "*rest d_vocab"]:
        """The scores p_sigma(y) / p_sigma(z); of a head of logits, those that follow from p(x_0)."""
        assert self.noise is not None
        p_clean = self.clean_logits(output, present, sigma).softmax(dim=-1)
        return self.noise.scores(p_clean, present, sigma)


@dataclass(frozen=True)
class PlainLogits(Head):
    """Softmax over all columns is p(x_0), or the probability of the next token."""

    noise: Noise | None

    def clean_logits(self, output: Raw, present: Ids | None = None, sigma: Amount | None = None) -> Raw:
        return output


@dataclass(frozen=True)
class WithoutMask(Head):
    """Softmax over all columns but that of [MASK] is p(x_0) at masked positions."""

    noise: Absorbing

    def clean_logits(self, output: Raw, present: Ids | None = None, sigma: Amount | None = None) -> Raw:
        if self.noise.mask >= output.shape[-1]:
            return output
        never = max(NEVER, torch.finfo(output.dtype).min)
        return output.index_fill(-1, torch.tensor([self.noise.mask], device=output.device), never)


@dataclass(frozen=True)
class AbsorbingScores(Head):
    """Log scores, before the authors subtract the constant that depends on sigma.

    At a masked position the score of a token is p(x_0) / (e^sigma - 1), so p(x_0) is proportional to the scores.
    """

    noise: Absorbing

    def clean_logits(self, output: Raw, present: Ids | None = None, sigma: Amount | None = None) -> Raw:
        return WithoutMask(self.noise).clean_logits(output)

    def scores(self, output: Raw, present: Ids, sigma: Amount) -> Float[Tensor, "*rest d_vocab"]:
        return self.log_scores(output, present, sigma).exp()

    def log_scores(self, output: Raw, present: Ids, sigma: Amount) -> Raw:
        """The logarithms of the scores, 0 at the present token."""
        n_others = output.shape[-1] - 1
        scaled = output - torch.log(torch.expm1(sigma) * n_others)[..., None]
        return scaled.scatter(-1, present[..., None], 0.0)


@dataclass(frozen=True)
class UniformScores(Head):
    """Log scores under uniform noise. p(x_0) is the analytic step that removes all noise (Tweedie), normalised."""

    noise: Uniform
    needs_canvas: bool = True

    def clean_logits(self, output: Raw, present: Ids | None = None, sigma: Amount | None = None) -> Raw:
        if present is None or sigma is None:
            raise ValueError(
                "the head's output is log scores under uniform noise, so the probabilities of clean tokens depend on "
                "the present tokens and on the noise: pass present= and sigma="
            )
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        p = self.noise.analytic(self.scores(wide, present, sigma), present, sigma)
        # Entries far from the data are negative; the smallest positive number has a finite logarithm.
        return p.clamp(min=torch.finfo(p.dtype).tiny).log()

    def scores(self, output: Raw, present: Ids, sigma: Amount) -> Float[Tensor, "*rest d_vocab"]:
        return self.log_scores(output, present, sigma).exp()

    def log_scores(self, output: Raw, present: Ids, sigma: Amount) -> Raw:
        """The logarithms of the scores, 0 at the present token."""
        return output.scatter(-1, present[..., None], 0.0)


@dataclass(frozen=True, eq=False)
class HeadAt:
    """A head at some positions of canvases.

    Attributes:
        head: The head.
        present: Int[#sample selected], token at each position, where the head needs the canvas.
        sigma: Noise of the canvases, where the head needs it.
    """

    head: Head
    present: Int[Tensor, "#sample selected"] | None = None
    sigma: float | None = None

    def clean_logits(
        self, output: Float[Tensor, "batch selected d_vocab_out"], indices: Int[Tensor, "selected"] | None = None
    ) -> Float[Tensor, "batch selected d_vocab_out"]:
        """Logits whose softmax is p(x_0).

        Args:
            output: Output of the head, in whole copies of the samples.
            indices: Indices of the positions that the output is of; by default all.
        """
        if not self.head.needs_canvas:
            return self.head.clean_logits(output)
        if self.present is None or self.sigma is None:
            raise ValueError(
                "the head's output is log scores under uniform noise, so the probabilities of clean tokens depend on "
                "the canvas and on its time: make queries' metrics and read probabilities inside "
                "`with model.at_time(t):`"
            )
        present = self.present if indices is None else self.present[:, indices]
        present = present.to(output.device).repeat(len(output) // len(present), 1)
        return self.head.clean_logits(output, present, output.new_full(present.shape, self.sigma))


def head_of(variant: Variant, meaning: str, n_tokens: int) -> Head:
    """The head of a model.

    Args:
        variant: Kind of the model, which says what noise is.
        meaning: "logits", "subs" or "log_scores", as in the config.
        n_tokens: Number of the head's columns.
    """
    noise = None if variant.noise is None else noise_of(variant, n_tokens)
    if meaning == "logits":
        return PlainLogits(noise)
    if isinstance(noise, Absorbing):
        return WithoutMask(noise) if meaning == "subs" else AbsorbingScores(noise)
    if isinstance(noise, Uniform) and meaning == "log_scores":
        return UniformScores(noise)
    raise ValueError(f"a head of {meaning!r} does not fit noise {variant.noise!r}; it must be 'logits'")
