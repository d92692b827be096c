"""The time that a network is told: an argument, the step of the loop, or that of `model.at_time(t)`."""

from abc import ABC
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsFloat

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model import build
from diffusion_lens.model.hook_points import NO_POSITIONS, StepHookPoint
from diffusion_lens.model.linear import beside
from diffusion_lens.model.modulation import Modulation, TimeEmbedding, normed, sigma_of
from diffusion_lens.model.norm import Norm
from diffusion_lens.noise import schedule_of
from diffusion_lens.settings import plain_number
from diffusion_lens.shapes import Resid
from diffusion_lens.step_state import StepClock

Time = SupportsFloat | Tensor


class ToldTime(ABC):
    """The parts of a network that is told the time (`model/modulation.py`), and how it is told.

    A network whose conditioning is constant keeps the weights of these parts, folded into others, for an export.
    """

    cfg: DiffusionConfig
    main_device: torch.device
    clock: StepClock
    blocks: Any
    ln_final: Norm
    time_embed: TimeEmbedding
    hook_time: StepHookPoint
    final_modulation: nn.Linear
    hook_final_modulation: StepHookPoint

    def _add_time_parts(self) -> None:
        architecture = self.cfg.architecture
        if architecture.time is None:
            return
        self.time_embed = build.build_time_embed(architecture)
        self.final_modulation = build.build_modulation(architecture, 2)
        if architecture.is_told_time:
            self.hook_time = StepHookPoint(NO_POSITIONS)
            self.hook_final_modulation = StepHookPoint(NO_POSITIONS)

    @contextmanager
    def at_time(self, time: SupportsFloat) -> Iterator[Any]:
        """Tell the network this time in every forward pass inside that is told none, so that analyses can run.

            with model.at_time(0.5):
                result = causal_trace(model, query)

        A `time=` of a call, inside the denoising loop the time of the step, and the noise that a loss draws come first.
        Results record the time. Analyses that noise texts tell the network the noise of each text; inside, where the
        time is another one, they are refused (`require_own_times`). Inside, no other thread may use the model. A copy
        that is made of the model inside (`copy.deepcopy`) is told no time.

        Args:
            time: Time in (0, 1], as in `model(tokens, time=...)`.

        Raises:
            ValueError: The time is out of range, or the network is not told the time.
        """
        self._require_told("at_time")
        number = _one_time(time, "a number in (0, 1], the same for all rows")
        check_times(torch.tensor([number], dtype=torch.float64))
        with self.clock.telling(number):
            yield self

    def read_time(self, time: Time | None) -> Float[Tensor, "batch"] | None:
        """The noise level for the argument `time=`, one for all rows or one for each; `None` if it was not given.

        Raises:
            TypeError: The time is no number and no tensor of floating-point numbers.
            ValueError: A time is not in (0, 1], the tensor has several axes, or the network is not told the time.
        """
        if time is None:
            return None
        self._require_told("time=")
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

    def sigma_told_of(self, p: Float[Tensor, "batch"]) -> Float[Tensor, "batch"] | None:
        """The noise level that the network is told of rows whose tokens were noised with probability p.

        It is that of the model's schedule at its time for p; `None` for a network that is not told the time.
        """
        if not self.cfg.is_told_time:
            return None
        schedule = schedule_of(self.cfg.schedule)
        # At p = 1 nothing is left of the text, and the time is 1.
        sigma = -torch.log1p(-p.double().clamp(max=1 - 1e-12))
        return schedule.sigma(schedule.time(sigma).clamp(0, 1)).float()

    def require_own_times(self, what: str) -> None:
        """Raise a `ValueError` inside `at_time`, for an analysis `what` that noises texts at times of their own."""
        if self.clock.time is not None:
            raise ValueError(
                f"{what} noises texts, each with a probability of its own, and tells {self.cfg.model_name!r} the noise "
                f"of each, but `model.at_time({self.clock.time})` says one time for all: call it outside"
            )

    def condition_at(
        self, sigma: Float[Tensor, "rest"] | None, n_batch: int, device: torch.device
    ) -> Float[Tensor, "batch d_cond"] | None:
        """The vector of the time, which passes `hook_time`; `None` in a network that is not told the time.

        Args:
            sigma: Noise level of all rows or of each; by default that of the step, then that of `at_time`.
            n_batch: Number of rows.

        Raises:
            ValueError: The network is told the time, and nothing says which; or there are not as many as rows.
        """
        if not self.cfg.is_told_time:
            return None
        sigma = self.current_sigma() if sigma is None else sigma
        if self.clock.branches is not None and 1 < len(sigma) < n_batch:
            sigma = sigma.repeat(n_batch // len(sigma))
        if len(sigma) not in (1, n_batch):
            raise ValueError(
                f"time has {len(sigma)} entries; it must be a number, or one for each of the {n_batch} rows of the "
                "batch"
            )
        condition: Tensor = self.hook_time(self.time_embed(sigma.to(device).expand(n_batch)))
        return condition

    def final_modulation_at(self, condition: Float[Tensor, "batch d_cond"] | None) -> Modulation | None:
        """What the time does to the last norm, for `model.ln_final(resid, ...)`."""
        if condition is None:
            return None
        shift, scale = self.hook_final_modulation(self.final_modulation(condition).unflatten(-1, (2, -1))).unbind(1)
        return Modulation(shift, scale)

    def normalized(
        self, resid: Resid | Float[Tensor, "entry d_model"], sigma: Float[Tensor, "rest"] | None = None
    ) -> Tensor:
        """The input of the unembedding for a residual stream; `sigma` is as in `condition_at`."""
        final = self.final_modulation_at(self.condition_at(sigma, len(resid), resid.device))
        return normed(self.ln_final, resid, final)

    def final_weight(self) -> Float[Tensor, "d_model"]:
        """The weight of the last norm as the network applies it, at the time of the step or of `at_time`."""
        final = self.final_modulation_at(self.condition_at(None, 1, self.main_device))
        return self.ln_final.w if final is None else beside(self.ln_final.w, final.scale) * (1 + final.scale[0])

    def gates_at(self, layer: int) -> tuple[Float[Tensor, "d_model"], Float[Tensor, "d_model"]]:
        """By what the outputs of a block's attention and MLP are multiplied, at the time of the step or of `at_time`.

        Ones in a network that is not told the time.
        """
        ones = torch.ones_like(self.ln_final.w, device=self.main_device)
        of_attention, of_mlp = (ones if m is None or m.gate is None else m.gate[0] for m in self._modulations_at(layer))
        return of_attention, of_mlp

    def attention_factors_at(self, layer: int) -> tuple[Float[Tensor, "d_model"], Float[Tensor, "d_model"]]:
        """By what the output of a block's first norm and that of its attention are multiplied, as in `gates_at`."""
        modulation = self._modulations_at(layer)[0]
        read = (
            torch.ones_like(self.ln_final.w, device=self.main_device) if modulation is None else 1 + modulation.scale[0]
        )
        return read, self.gates_at(layer)[0]

    def _modulations_at(self, layer: int) -> tuple[Modulation | None, Modulation | None]:
        both: tuple[Modulation | None, Modulation | None]
        both = self.blocks[layer].modulations(self.condition_at(None, 1, self.main_device))
        return both

    def current_sigma(self) -> Float[Tensor, "rest"]:
        """The noise level, or that of each row, of the step or of `at_time`.

        Raises:
            ValueError: Nothing says which.
        """
        sigma = self.known_sigma()
        if sigma is None:
            raise ValueError(
                f"{self.cfg.model_name!r} is told the time of its canvas: pass time= (a number in (0, 1], or one for "
                "each row; 1 where all is noise), or run inside `with model.at_time(t):`"
            )
        return sigma

    def known_sigma(self) -> Float[Tensor, "rest"] | None:
        """The noise level of the step or of `at_time`, if one of them says which."""
        step, time = self.clock.step, self.clock.time
        if step is not None and step.sigma is not None:
            return torch.tensor(step.sigma, dtype=torch.float32).view(-1)
        if step is not None:
            time = step.t
        return None if time is None else sigma_of(torch.tensor([time], dtype=torch.float64))

    def _require_told(self, what: str) -> None:
        if not self.cfg.is_told_time:
            raise ValueError(
                f"{what} was given, and {self.cfg.model_name!r} is not told the time: it computes the same at every "
                "time, so leave it out"
            )


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
