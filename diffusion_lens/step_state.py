"""Where in the denoising loop an activation belongs: what `hook.step` holds inside the loop."""

from dataclasses import dataclass
from typing import Literal

from diffusion_lens.shapes import Places, Tokens

Branch = Literal["conditional", "unconditional"]


@dataclass(frozen=True)
class StepState:
    """One denoising step as a hook sees it.

    Attributes:
        index: 0 for the first step, `n_steps - 1` for the last.
        n_steps: steps of the whole run.
        t: time before the step; 1 is all masked, 0 is done.
        s: time after the step, `s < t`.
        tokens: Int[batch pos], the canvas of the step (in the unconditional branch too, whose network sees the
            prompt masked); on a causal model -1 marks places not reached yet.
        masked: Bool[batch pos], the places still to be filled.
        given: Bool[batch pos], the places that came with the prompt.
        branch: "conditional", or "unconditional" for guidance's second forward pass.
    """

    index: int
    n_steps: int
    t: float
    s: float
    tokens: Tokens
    masked: Places
    given: Places
    branch: Branch = "conditional"


class StepClock:
    """The current step of one model's loop; `None` outside. Shared by all hook points of that model.

    While guidance runs both of its branches as one batch, `branches` holds the state of each half.
    """

    def __init__(self) -> None:
        self.step: StepState | None = None
        self.branches: tuple[StepState, StepState] | None = None
