"""What a network reads beside its tokens: the time, and what the step before predicted.

The time enters by adaptive LayerNorms (adaLN, Peebles and Xie 2023, arXiv 2212.09748).

A network with time conditioning reads the noise level sigma of its canvas. An MLP computes one vector from it,

    c = silu(W_out silu(W_hidden e(sigma))),

with e(sigma) the cosines and sines of sigma times 128 frequencies. It passes `hook_time`. From c, a linear map of each
block computes six vectors: shift, scale and gate of its attention, then of its MLP (`blocks.{i}.hook_modulation`), and
one linear map the shift and scale of the last norm (`hook_final_modulation`). With n the output of a norm,

    resid + gate · part(n · (1 + scale) + shift).

All models scale the time alike here, by the log-linear schedule sigma = -log(1 - (1 - 1e-3) t), whatever the schedule
of their own training. The time is an argument of the call, that of the loop's step, or that of `model.at_time(t)`.

By self-conditioning, what a step predicted changes how the next step embeds its open block (Chen et al. 2022, arXiv
2208.04202; as in DiffusionGemma). The prediction enters as its expected embedding, Σ p(token) · W_E[token]. It passes a
norm and a gated MLP and is added to the embedding of the open block, whose norm follows. In the first step of a block
there is no prediction, and the expected embedding is zero; the norm follows all the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion_lens.model.hook_points import StepHookPoint
from diffusion_lens.model.layers import Embed, Modulation, RMSNorm, beside, rms_normalized
from diffusion_lens.model.mlp import GatedMLP
from diffusion_lens.model.noise import LogLinear, schedule_of
from diffusion_lens.model.shapes import PosMask, Resid
from diffusion_lens.settings import plain_number

Time = SupportsFloat | Tensor


class TimeEmbedding(nn.Module):
    """The noise level to the vector c, before it passes `hook_time`."""

    def __init__(self, hidden: nn.Linear, out: nn.Linear) -> None:
        super().__init__()
        self.hidden = hidden
        self.out = out

    def forward(self, sigma: Float[Tensor, "batch"]) -> Float[Tensor, "batch d_cond"]:
        # Cosines, then sines, of sigma times frequencies that fall from 1 to almost 1 / 10 000.
        half = self.hidden.in_features // 2
        exponents = torch.arange(half, dtype=torch.float32, device=sigma.device) / half
        angles = sigma.float()[:, None] * torch.exp(-math.log(10_000.0) * exponents)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return F.silu(self.out(F.silu(self.hidden(waves.to(self.hidden.weight.dtype)))))


def sigma_of(time: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
    """The noise level at a time, by the log-linear schedule, float32."""
    return LogLinear().sigma(time.double()).float()


@dataclass(frozen=True)
class NetworkTime:
    """`model.time`: the time that a network reads, and what it does to the parts of the network.

    A network without time conditioning has factors of 1 and no modulations here, and refuses to be given a time.
    """

    model: Any

    def read(self, time: Time | None) -> Float[Tensor, "batch"] | None:
        """The noise level for the argument `time=`, one for all rows or one for each; `None` if it was not given.

        Raises:
            TypeError: The time is no number and no tensor of floating-point numbers.
            ValueError: A time is not in (0, 1], the tensor has several axes, or there is no time conditioning.
        """
        if time is None:
            return None
        self.require_conditioning("time=")
        if not isinstance(time, Tensor):
            number = _one_time(time, "a number in (0, 1], or a tensor of one for each row")
            time = torch.tensor(number, dtype=torch.float64)
        if not time.is_floating_point():
            raise TypeError(
                f"time is a tensor of {time.dtype}; it must be of floating-point numbers in (0, 1]: time.float(), if "
                "its numbers are in this range"
            )
        if time.dim() > 1:
            raise ValueError(
                f"time has shape {list(time.shape)}; it must be a number, or a tensor of one axis with one for each "
                "row, [batch]"
            )
        check_times(time)
        return sigma_of(time.view(-1))

    def sigma_of_noise(self, p: Float[Tensor, "batch"]) -> Float[Tensor, "batch"] | None:
        """The noise level that the network reads for rows whose tokens were noised with probability p.

        It is that of the model's schedule at its time for p; `None` without time conditioning. A `ValueError` if the
        schedule is unknown.
        """
        if not self.model.cfg.time_conditioning:
            return None
        self._require_schedule()
        schedule = schedule_of(self.model.cfg.schedule)
        # At p = 1 nothing is left of the text, and the time is 1.
        sigma = -torch.log1p(-p.double().clamp(max=1 - 1e-12))
        return schedule.sigma(schedule.time(sigma).clamp(0, 1)).float()

    def require_own(self, what: str) -> None:
        """Raise a `ValueError` if the network reads a time and an analysis `what` that noises texts, each with a
        probability of its own, cannot tell it: inside `at_time`, or without a schedule of noise."""
        self._require_schedule()
        model = self.model
        if model.clock.time is not None:
            raise ValueError(
                f"{what} noises texts, each with a probability of its own, and gives {model.cfg.model_name!r} the "
                f"noise of each, but `model.at_time({model.clock.time})` says one time for all: call it outside"
            )

    def _require_schedule(self) -> None:
        cfg = self.model.cfg
        if cfg.time_conditioning and cfg.schedule is None:
            raise ValueError(
                f"{cfg.model_name!r} reads the time of its canvas, and its config names no schedule of noise, which "
                "says at which time a token is noised with a given probability: set that of its training, e.g. "
                "model.cfg.schedule = weight_conversion.NoiseSchedule('log_linear')"
            )

    def require_conditioning(self, what: str) -> None:
        """Raise a `ValueError` if a time was given, by `what`, and the network has no time conditioning."""
        if not self.model.cfg.time_conditioning:
            raise ValueError(
                f"{what} was given, and {self.model.cfg.model_name!r} has no time conditioning: it computes the same "
                "at every time, so leave it out"
            )

    def known_sigma(self) -> Float[Tensor, "rest"] | None:
        """The noise level, or that of each row, of the step or of `at_time`, if one of them says which."""
        step, time = self.model.clock.step, self.model.clock.time
        if step is not None and step.sigma is not None:
            return torch.tensor(step.sigma, dtype=torch.float32).view(-1)
        if step is not None:
            time = step.t
        return None if time is None else sigma_of(torch.tensor([time], dtype=torch.float64))

    def condition(
        self, sigma: Float[Tensor, "rest"] | None, n_batch: int, device: torch.device
    ) -> Float[Tensor, "batch d_cond"] | None:
        """The vector of the time, which passes `hook_time`; `None` without time conditioning.

        The noise level `sigma`, of all rows or of each, is by default that of the step, then that of `at_time`; if
        nothing says it, that is a `ValueError`.
        """
        model = self.model
        if not model.cfg.time_conditioning:
            return None
        if sigma is None and (sigma := self.known_sigma()) is None:
            raise ValueError(
                f"{model.cfg.model_name!r} is conditioned on the time of its canvas: pass time= (a number in (0, 1], "
                "or one for each row; 1 where all is noise), or run inside `with model.at_time(t):`"
            )
        if model.clock.branches is not None and 1 < len(sigma) < n_batch:
            sigma = sigma.repeat(n_batch // len(sigma))
        if len(sigma) not in (1, n_batch):
            raise ValueError(
                f"time has {len(sigma)} entries; it must be a number, or one for each of the {n_batch} rows of the "
                "batch"
            )
        condition: Tensor = model.hook_time(model.time_embed(sigma.to(device).expand(n_batch)))
        return condition

    def of_final_norm(self, condition: Float[Tensor, "batch d_cond"] | None) -> Modulation | None:
        """What the time does to the last norm, for `model.ln_final(resid, ...)`."""
        if condition is None:
            return None
        model = self.model
        shift, scale = model.hook_final_modulation(model.final_modulation(condition).unflatten(-1, (2, -1))).unbind(1)
        return Modulation(shift, scale)

    def final_weight(self) -> Float[Tensor, "d_model"]:
        """The weight of the last norm as the network applies it, at the time of the step or of `at_time`."""
        final = self.of_final_norm(self.condition(None, 1, self.model.cfg.main_device))
        weight: Tensor = self.model.ln_final.w
        return weight if final is None else beside(weight, final.scale) * (1 + final.scale[0])

    def gates(self, layer: int) -> tuple[Float[Tensor, "d_model"], Float[Tensor, "d_model"]]:
        """What multiplies the outputs of a block's attention and MLP, at the time of the step or of `at_time`."""
        both = (m.gate[0] if m is not None and m.gate is not None else self._ones() for m in self._modulations(layer))
        of_attention, of_mlp = both
        return of_attention, of_mlp

    def attention_factors(self, layer: int) -> tuple[Float[Tensor, "d_model"], Float[Tensor, "d_model"]]:
        """What multiplies the output of a block's first norm and that of its attention, as in `gates`."""
        modulation = self._modulations(layer)[0]
        return self._ones() if modulation is None else 1 + modulation.scale[0], self.gates(layer)[0]

    def _modulations(self, layer: int) -> tuple[Modulation | None, Modulation | None]:
        condition = self.condition(None, 1, self.model.cfg.main_device)
        if condition is None:
            return None, None
        both: tuple[Modulation, Modulation] = self.model.blocks[layer].modulations(condition)
        return both

    def _ones(self) -> Tensor:
        return torch.ones_like(self.model.ln_final.w, device=self.model.cfg.main_device)


def one_time_for_all(time: Any) -> float:
    """The time of `model.at_time(time)`, in (0, 1]."""
    number = _one_time(time, "a number in (0, 1], the same for all rows")
    check_times(torch.tensor([number], dtype=torch.float64))
    return number


def _one_time(time: Any, fits: str) -> float:
    """A time as a float; a `TypeError` that says what fits, if it is not one number."""
    try:
        return plain_number("time", time)
    except TypeError:
        several = isinstance(time, Sequence | Tensor) and not isinstance(time, str | bytes)
        advice = "; to give each row its own, pass torch.tensor([...]) as time= of the call" if several else ""
        raise TypeError(f"time={time!r} is of type {type(time).__name__}; it must be {fits}{advice}") from None


def check_times(time: Float[Tensor, "*rest"]) -> None:
    """Raise a `ValueError` unless all times are in (0, 1]."""
    outside = time[~((time > 0) & (time <= 1))]
    if outside.numel():
        raise ValueError(
            f"time is {float(outside.flatten()[0])}; it must be in (0, 1]: the share of noise in the canvas, 1 where "
            "all is noise"
        )


class SelfConditioning(nn.Module):
    """`hook_expected` [batch pos d_model] is the expected embedding, and `hook_self_conditioning` what is added to the
    embedding of the open block; both are 0 at other positions."""

    def __init__(self, norm: RMSNorm, mlp: GatedMLP) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp
        self.hook_expected, self.hook_self_conditioning = StepHookPoint(), StepHookPoint()

    def forward(self, embedded: Resid, expected: Resid | None, is_open: PosMask) -> Resid:
        """The stream at the first block: embedded tokens, with the prediction in the open block."""
        inside = is_open[..., None]
        expected = self.hook_expected(torch.zeros_like(embedded) if expected is None else expected.to(embedded.dtype))
        signal = self.hook_self_conditioning(self.mlp(self.norm(expected)) * inside)
        return torch.where(inside, rms_normalized(embedded + signal, self.norm.eps), embedded)


def expected_embedding(embed: Embed, logits: Float[Tensor, "*rest d_vocab"]) -> Float[Tensor, "*rest d_model"]:
    """Σ softmax(logits) · W_E, scaled as embeddings are; logits of all tokens in the order of the embedding."""
    weight = embed.weight
    p = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(weight.dtype)
    return embed.scaled(p.to(weight.device) @ weight).to(logits.device)
