"""The canvases that the lens reads, and the row of the network at which each position is read."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from diffusion_lens.analysis.inputs import ForwardPass, Inputs, shared_passes
from diffusion_lens.config import UNREACHED
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, pick_indices, whole_numbers

NOTHING = -1


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass of the lens.

    Attributes:
        network_input: What the network reads.
        rows: Int[batch selected], row at which each position is read; -1 where none can be.
        served: Indices of the canvases that the pass stands for.
    """

    network_input: ForwardPass
    rows: Int[Tensor, "batch selected"]
    served: list[int]


@dataclass(frozen=True, eq=False)
class Canvases:
    """The canvases of one input.

    Attributes:
        canvases: A pass for each step, or a single one.
        steps: Step of each canvas; `None` for an input that is no trajectory.
        known: Int[batch _], token at each position that can be predicted, as far as it is known; otherwise -1. After a
            text that grows, there is one position more than the canvas has.
    """

    canvases: list[ForwardPass]
    steps: list[int] | None
    known: Int[Tensor, "batch _"]

    @classmethod
    def of(cls, inputs: Inputs, steps: Iterable[Whole] | None = None, branch: str = "conditional") -> "Canvases":
        """The canvases of a trajectory, or the single one of any other input.

        Raises:
            ValueError: Several trajectories, or steps or a branch that do not fit the input.
        """
        trajectory, picked, cfg = inputs.trajectory, inputs.pick_steps(steps), inputs.model.cfg
        canvases = [one for step in ([None] if picked is None else picked) for one in inputs.at(step, branch)]
        final = canvases[0].tokens if trajectory is None else trajectory.tokens.to(cfg.device)
        known = final.masked_fill(~(canvases[0].real & cfg.writable(final)), NOTHING)
        if trajectory is None and cfg.grows:
            # The last row predicts the token after the text.
            known = torch.cat([known, torch.full_like(known[:, :1], NOTHING)], dim=1)
        for row, query in enumerate(canvases[0].queries or ()):
            for position, token in zip(query.answer_positions, query.answer_tokens, strict=True):
                if position < known.shape[1]:
                    known[row, position] = token
        return cls(canvases, picked, known)

    @property
    def model(self) -> DiffusionTransformer:
        """Model that reads the canvases."""
        return self.canvases[0].model

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
        canvas, width = self.canvases[index], self.known.shape[1]
        present = canvas.present
        selected = torch.tensor(positions, device=present.device)
        predicted = present.new_zeros(len(present), width)
        # A text that grows is predicted from the tokens before it, all other canvases from the whole canvas.
        predicted[:, selected] = present[:, self.model.readout.rows(selected) if self.model.cfg.grows else selected]
        _, rows = canvas.located(predicted, pad(canvas.real, (0, width - present.shape[1])))
        table = torch.full(predicted.shape, NOTHING, device=present.device)
        table[predicted] = rows
        return table[:, selected]

    def on_canvas(self, positions: list[int]) -> Int[Tensor, "step batch selected"]:
        """The token at each position of every canvas; -1 where there is none."""
        tokens = torch.stack([canvas.tokens for canvas in self.canvases])
        wide: Tensor = pad(tokens, (0, self.known.shape[1] - tokens.shape[2]), value=UNREACHED)
        return wide[..., positions]

    def passes(self, positions: list[int], is_hooked: bool) -> list[Pass]:
        """The forward passes that the canvases need; see `analysis.inputs.shared_passes`."""
        shared = shared_passes(self.canvases, is_hooked)
        return [Pass(one.read, self.rows(next(iter(one.served)), positions), list(one.served)) for one in shared]
