"""One forward pass whose states are read, outside the loop or in the place of a denoising step.

A canvas of a run is read as the network reads it at that step, with `hook.step` set, so that hooks of the caller act as
they do in the loop. Positions that a growing text has not reached, and padding, are never read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.config import reached
from diffusion_lens.facts import Query
from diffusion_lens.hook_names import FwdHooks, Hook, NamesFilter, select_names
from diffusion_lens.model.hook_points import position_axis
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import StepState


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass.

    Attributes:
        model: Model that reads the tokens.
        tokens: Int[batch pos], the canvas; on a growing text -1 where it has not been reached.
        real: Bool[batch pos], false at padding.
        step: The denoising step that hooks read; `None` outside the loop.
        queries: The query of each row, where the inputs are queries or facts.
        clean: Int[batch pos], the clean text that a model which attends by blocks reads beside a text under noise.
        sigma: Noise of each row, of which a network that is told the time reads; by default that of the step, then that
            of `model.at_time(t)`.
    """

    model: DiffusionTransformer
    tokens: Tokens
    real: PosMask
    step: StepState | None = None
    queries: tuple[Query, ...] | None = None
    clean: Tokens | None = None
    sigma: Float[Tensor, "batch"] | None = None

    @classmethod
    def under_noise(
        cls, model: DiffusionTransformer, text: Tokens, noisy: Tokens, real: PosMask, p: Float[Tensor, "batch"]
    ) -> "ForwardPass":
        """The pass on texts under noise, as in training.

        Each row is told its own noise, and a model that attends by blocks reads each block after the clean ones.

        Args:
            text: The clean texts.
            noisy: The texts under noise.
            real: False at padding.
            p: Probability with which the tokens of each row were noised.
        """
        clean = None if model.cfg.causal_block is None else text
        return cls(model, noisy, real, clean=clean, sigma=model.sigma_told_of(p))

    @property
    def told_sigma(self) -> float | tuple[float, ...] | None:
        """Noise of which a network that is told the time reads; `None` for other networks, and outside the loop."""
        return None if self.step is None or not self.model.cfg.is_told_time else self.step.sigma

    @property
    def present(self) -> PosMask:
        """Bool[batch pos], positions that contain a token or [MASK]."""
        inside: PosMask = reached(self.tokens) & self.real
        return inside

    @property
    def masked(self) -> PosMask:
        """Bool[batch pos], positions with [MASK]; under uniform noise those that the step may write, or all."""
        if self.model.cfg.rewrites:
            return self.present if self.step is None else self.step.masked & self.present
        if not self.model.cfg.has_mask:
            return torch.zeros_like(self.tokens, dtype=torch.bool)
        return (self.tokens == self.model.cfg.blank) & self.present

    @property
    def predicting(self) -> PosMask:
        """Bool[batch pos], the rows whose logits predict a [MASK], or where the text grows, the next token."""
        present = self.present
        if not self.model.cfg.grows:
            located = torch.zeros_like(present)
            located[self.located(self.masked, self.real)] = True
            return located & present
        last = present & (present.flip(1).cumsum(dim=1).flip(1) == 1)
        if self.step is None:
            return last
        return last & self.step.masked.any(dim=1, keepdim=True)

    def located(self, positions: PosMask, real: PosMask) -> tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]]:
        """Row of the batch and row of the logits that predict each marked position, as the loop reads it.

        Args:
            positions: Bool[batch pos], true at the positions to predict.
            real: Bool[batch pos], false at padding.
        """
        batch, rows = self.model.readout.locate(positions, real)
        block = None if self.step is None else self.step.block
        return batch, rows if block is None else block.rows(rows, positions.nonzero()[:, 1], batch)

    @property
    def answer_rows(self) -> PosMask:
        """Bool[batch pos], the rows whose logits predict the answers.

        Raises:
            ValueError: The inputs are not queries or facts.
        """
        if self.queries is None:
            raise ValueError(
                "positions='answer' needs queries or facts, whose answers have positions; for other inputs give "
                "'predicting', 'masked', 'unmasked', 'all' or indices"
            )
        chosen = torch.zeros_like(self.present)
        for row, query in enumerate(self.queries):
            positions = torch.tensor(query.answer_positions, dtype=torch.long, device=chosen.device)
            rows, n_pos = self.model.readout.rows(positions), len(query.tokens)
            if len(rows) and int(rows.max()) >= n_pos:
                raise ValueError(
                    f"the answer positions {positions.tolist()} are beyond the {n_pos} tokens of the query"
                )
            chosen[row, rows] = True
        return chosen

    def run(self, readers: Sequence[tuple[str, Hook]], fwd_hooks: FwdHooks = ()) -> None:
        """Compute the pass as far as to the last hook point that is read.

        Args:
            readers: Hooks that read states, after those of the caller; beside a clean text, states of the other one.
            fwd_hooks: The caller's hooks, in addition to those that are attached to the model.
        """
        n_pos = self.tokens.shape[1]

        def of_noisy(read: Hook) -> Hook:
            return lambda activation, hook: read(activation[:, :n_pos], hook)

        attached = readers if self.clean is None else [(name, of_noisy(read)) for name, read in readers]
        with self.model.clock.at(self.step):
            self.model.run_with_hooks(
                self.model.cfg.readable(self.tokens),
                return_type=None,
                # Always a mask: a token that only pads is text where the caller's mask or a run's canvas says so.
                attention_mask=self.real,
                fwd_hooks=[*fwd_hooks, *attached],
                clean=self.clean,
                sigma=self.sigma,
                stop_at_layer=_last_layer(name for name, _ in readers),
            )

    def states(
        self, names: Iterable[str], entries: tuple[Tensor, Tensor] | None = None, fwd_hooks: FwdHooks = ()
    ) -> dict[str, Tensor]:
        """The states at some hook points.

        Args:
            entries: Index in the batch and row of each state that is kept; by default all are.
            fwd_hooks: The caller's hooks; the states are those that they return.
        """
        stored: dict[str, Tensor] = {}

        def store(activation: Tensor, hook: Any) -> None:
            kept = activation if entries is None else activation[tuple(each.to(activation.device) for each in entries)]
            stored[hook.name] = kept.to(self.model.main_device)

        self.run([(name, store) for name in names], fwd_hooks)
        return stored


def readable_points(model: DiffusionTransformer, names_filter: NamesFilter) -> list[str]:
    """The hook points of a filter that one forward pass reaches.

    Raises:
        KeyError: There is no such hook point.
        ValueError: A hook point of the loop or of a flag that is off, one of scores or patterns, or no filter.
    """
    if names_filter is None:
        raise ValueError("names_filter is required: name the hook points to read, such as 'blocks.1.hook_resid_post'")
    names = select_names(names_filter, model.hook_dict)
    silent = {name: reason for name in names if (reason := model.why_silent(name))}
    if silent and (not callable(names_filter) or len(silent) == len(names)):
        raise ValueError("; ".join(f"{name!r} {reason}" for name, reason in silent.items()))
    names = [name for name in names if name not in silent]
    for name in names:
        check_vectors(model.hook_dict[name])
    return names


def check_vectors(point: Any) -> None:
    """Raise a `ValueError` unless the activation at a hook point has a vector for each position."""
    if (axis := position_axis(point)) != 1:
        shape = "without positions" if axis is None else "[batch head query key]"
        raise ValueError(
            f"{point.name!r} is {shape}, and a vector for each position is needed: use a hook point "
            "such as hook_resid_post, hook_mlp_out or attn.hook_z"
        )


def _last_layer(names: Iterable[str]) -> int | None:
    """The layer before which a pass may stop, `None` if it has to reach the final norm."""
    last = 0
    for name in names:
        if not name.startswith("blocks.") and name != "hook_embed":
            return None
        last = max(last, int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0)
    return last
