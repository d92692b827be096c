"""The canvases that the lens reads, and the row of the network at which each position is read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from diffusion_lens.config import UNREACHED, reached
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Query
from diffusion_lens.model.inputs import check_attention_mask, check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, pick_indices, whole_numbers
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import StepState

# Lenses read these; a trajectory is read step by step, anything else in one pass.
Readable = str | Sequence[str] | Tensor | Query | Trajectory
NOTHING = -1


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass of the lens.

    Attributes:
        tokens: Int[batch pos], what the network reads.
        real: Bool[batch pos], false at padding.
        state: The denoising step that hooks read; `None` outside the loop.
        rows: Int[batch selected], row at which each position is read; -1 where none can be.
        served: Indices of the canvases that the pass stands for.
    """

    tokens: Tokens
    real: PosMask
    state: StepState | None
    rows: Int[Tensor, "batch selected"]
    served: list[int]


@dataclass(frozen=True, eq=False)
class Canvases:
    """The canvases of one input.

    Attributes:
        model: Model that reads them.
        tokens: Int[step batch pos], a canvas for each step, or a single one; -1 where a text has not been reached.
        real: Bool[batch pos], false at padding.
        states: What `hook.step` is on each canvas; `None` outside the loop.
        steps: Step of each canvas; `None` for an input that is no trajectory.
        known: Int[batch _], token at each position that can be predicted, as far as it is known; otherwise -1. After a
            text that grows, there is one position more than the canvas has.
    """

    model: DiffusionTransformer
    tokens: Int[Tensor, "step batch pos"]
    real: PosMask
    states: list[StepState | None]
    steps: list[int] | None
    known: Int[Tensor, "batch _"]

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        inputs: Readable,
        steps: Iterable[Whole] | None = None,
        branch: str = "conditional",
        attention_mask: Tensor | None = None,
    ) -> "Canvases":
        """The canvases of a trajectory, or the single one of any other input.

        Raises:
            ValueError: Steps, a branch or a mask that do not fit the input, or tokens whose padding could be text.
        """
        if branch not in ("conditional", "unconditional"):
            raise ValueError(f"branch={branch!r}; it must be 'conditional' or 'unconditional'")
        if isinstance(inputs, Trajectory):
            require_no_mask(attention_mask)
            return cls._of_trajectory(model, inputs, steps, branch)
        if steps is not None:
            raise ValueError("steps= requires a trajectory of model.denoise(...): other inputs are one canvas")
        if branch != "conditional":
            raise ValueError("branch='unconditional' requires a trajectory that was denoised with cfg_scale")
        tokens, real = tokenized(model, inputs, attention_mask)
        known = tokens.masked_fill(~(real & model.cfg.writable(tokens)), NOTHING)
        if model.cfg.grows:
            # The last row predicts the token after the text.
            known = torch.cat([known, torch.full_like(known[:, :1], NOTHING)], dim=1)
        if isinstance(inputs, Query):
            for position, token in zip(inputs.answer_positions, inputs.answer_tokens, strict=True):
                if position < known.shape[1]:
                    known[:, position] = token
        return cls(model, tokens[None], real, [None], None, known)

    @classmethod
    def _of_trajectory(
        cls, model: DiffusionTransformer, trajectory: Trajectory, steps: Iterable[Whole] | None, branch: str
    ) -> "Canvases":
        if branch == "unconditional" and not trajectory.record["cfg_scale"]:
            raise ValueError("branch='unconditional' needs guidance: without cfg_scale there is no such branch")
        n_steps = len(trajectory.record["times"]) - 1
        recorded = range(trajectory.first_step, trajectory.first_step + trajectory.n_steps)
        selected = list(recorded) if steps is None else pick_indices("steps", whole_numbers("steps", steps), n_steps)
        states = [trajectory.state_at(step, model.cfg.device) for step in selected]
        canvases = torch.stack([state.tokens for state in states])
        if branch == "unconditional":
            canvases = canvases.masked_fill(states[0].given, trajectory.blank)
            states = [replace(state, branch="unconditional") for state in states]
        final, real = (x.to(model.cfg.device) for x in (trajectory.tokens, trajectory.real))
        known = final.masked_fill(~(real & model.cfg.writable(final)), NOTHING)
        return cls(model, canvases, real, list(states), selected, known)

    def pick_positions(self, positions: Iterable[Whole] | None) -> list[int]:
        """The positions to read, all that can be predicted by default.

        Raises:
            ValueError: A position outside the canvas, or one that no row predicts.
        """
        grows, n_pos = self.model.cfg.grows, self.known.shape[1]
        rows = self.model.readout.rows(torch.arange(n_pos))
        predicted = [position for position, row in enumerate(rows.tolist()) if not grows or row < position]
        if positions is None:
            return predicted
        picked = pick_indices("positions", whole_numbers("positions", positions), n_pos)
        if unread := [position for position in picked if position not in predicted]:
            raise ValueError(f"nothing precedes position {unread[0]}, so a causal model has no prediction there")
        return picked

    def rows(self, index: int, positions: list[int]) -> Int[Tensor, "batch selected"]:
        """Row that predicts the token at each position of one canvas; -1 at padding and where no text is before it."""
        canvas, width = self.tokens[index], self.known.shape[1]
        seen = reached(canvas) & self.real
        selected = torch.tensor(positions, device=canvas.device)
        predicted = seen.new_zeros(len(canvas), width)
        # A text that grows is predicted from the tokens before it, all other canvases from the whole canvas.
        predicted[:, selected] = seen[:, self.model.readout.rows(selected) if self.model.cfg.grows else selected]
        _, rows = self.model.readout.locate(predicted, pad(self.real, (0, width - canvas.shape[1])))
        table = torch.full((len(canvas), width), NOTHING, device=canvas.device)
        table[predicted] = rows
        return table[:, selected]

    def on_canvas(self, positions: list[int]) -> Int[Tensor, "step batch selected"]:
        """The token at each position of every canvas; -1 where there is none."""
        after = self.known.shape[1] - self.tokens.shape[2]
        wide: Tensor = pad(self.tokens, (0, after), value=UNREACHED)
        return wide[..., positions]

    def passes(self, positions: list[int], is_hooked: bool) -> list[Pass]:
        """The forward passes that the canvases need.

        Without hooks, equal canvases share a pass. So do the canvases of a causal model that continue one another,
        because no position sees a later one. A hook may act by step, and sees the whole canvas as in the loop.
        """
        passes: list[Pass] = []
        for index in reversed(range(len(self.tokens))):
            if passes and not is_hooked and self._covers(passes[-1].served[0], index):
                passes[-1].served.append(index)
            else:
                passes.append(self.forward_pass(index, positions, whole=is_hooked))
        return passes

    def forward_pass(self, index: int, positions: list[int], whole: bool) -> Pass:
        """The pass on one canvas, on the whole of it or up to the last position that has been reached."""
        canvas = self.tokens[index]
        n_shown = canvas.shape[1]
        if not whole:
            n_shown = int((reached(canvas) & self.real).any(dim=0).nonzero().max()) + 1
        tokens = check_tokens(canvas[:, :n_shown].clamp(min=0), self.model.cfg)
        return Pass(tokens, self.real[:, :n_shown], self.states[index], self.rows(index, positions), [index])

    def _covers(self, index: int, earlier: int) -> bool:
        """Whether a pass on one canvas computes all that is read on another."""
        wide, narrow = self.tokens[index], self.tokens[earlier]
        if self.model.cfg.is_causal:
            return bool((wide == narrow).where(reached(narrow) & self.real, True).all())
        return torch.equal(wide, narrow)


def tokenized(
    model: DiffusionTransformer, inputs: str | Sequence[str] | Tensor | Query, attention_mask: Tensor | None
) -> tuple[Tokens, PosMask]:
    """Tokens of an input, and which of them are real.

    Raises:
        ValueError: A mask for an input without padding, or tokens whose padding could be text.
    """
    if isinstance(inputs, Query):
        require_no_mask(attention_mask)
        tokens = check_tokens(inputs.tokens, model.cfg)
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    if not isinstance(inputs, Tensor):
        require_no_mask(attention_mask)
        return model.tokenize(inputs)
    tokens = check_tokens(inputs, model.cfg)
    if attention_mask is None:
        real = model.checked_real_positions(tokens)
    else:
        real = check_attention_mask(attention_mask, tokens.shape[0], tokens.shape[1], tokens.device)
    return tokens, torch.ones_like(tokens, dtype=torch.bool) if real is None else real


def require_no_mask(attention_mask: Tensor | None) -> None:
    """Raise a `ValueError` if a mask is given for an input other than tokens."""
    if attention_mask is not None:
        raise ValueError("attention_mask= belongs to tokens: texts, queries and trajectories know their padding")
