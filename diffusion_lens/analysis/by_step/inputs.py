"""Forward passes whose activations are read: over texts, tokens, queries and facts, or over the canvases of runs.

A canvas of a denoising run is read as the network reads it at that step, in the conditional branch, with `hook.step`
set, so that hooks of the caller act as they do in the loop. Positions that a growing text has not reached, and padding,
are never read.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.analysis.canvas_layout import as_query
from diffusion_lens.config import reached
from diffusion_lens.denoising.cache import resolve_steps
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_tokens, warn_of_another_network
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Fact, Query
from diffusion_lens.hook_names import FwdHooks
from diffusion_lens.model.inputs import check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import StepState

Item = str | Query | Fact | Trajectory
Readable = Item | Tensor | Sequence[Item]


@dataclass(frozen=True, eq=False)
class ReadPass:
    """One forward pass.

    Attributes:
        model: Model that reads the tokens.
        tokens: Int[batch pos], the canvas; on a growing text -1 where it has not been reached.
        real: Bool[batch pos], false at padding; `None` without padding.
        step: The denoising step; `None` outside the loop.
        answers: Positions of the answer of each row, for queries.
    """

    model: DiffusionTransformer
    tokens: Tokens
    real: PosMask | None = None
    step: StepState | None = None
    answers: tuple[tuple[int, ...], ...] | None = None

    @property
    def present(self) -> PosMask:
        """Bool[batch pos], positions that contain a token or [MASK]."""
        inside = reached(self.tokens)
        return inside if self.real is None else inside & self.real

    @property
    def masked(self) -> PosMask:
        """Bool[batch pos], positions that contain [MASK]."""
        if not self.model.cfg.has_mask:
            return torch.zeros_like(self.tokens, dtype=torch.bool)
        return (self.tokens == self.model.cfg.blank) & self.present

    @property
    def predicting(self) -> PosMask:
        """Bool[batch pos], the rows whose logits predict a [MASK], or where the text grows, the next token."""
        present = self.present
        if not self.model.cfg.grows:
            located = torch.zeros_like(present)
            located[self.model.readout.locate(self.masked, self.real)] = True
            return located & present
        last = present & (present.flip(1).cumsum(dim=1).flip(1) == 1)
        if self.step is None:
            return last
        return last & self.step.masked.any(dim=1, keepdim=True)

    @property
    def answer_rows(self) -> PosMask:
        """Bool[batch pos], the rows whose logits predict the answers.

        Raises:
            ValueError: The inputs are not queries or facts.
        """
        if self.answers is None:
            raise ValueError(
                "positions='answer' needs queries or facts, whose answers have positions; for other inputs give "
                "'predicting', 'masked', 'unmasked', 'all' or indices"
            )
        chosen = torch.zeros_like(self.present)
        for row, positions in enumerate(self.answers):
            rows = self.model.readout.rows(torch.tensor(positions, dtype=torch.long, device=chosen.device))
            if len(rows) and int(rows.max()) >= chosen.shape[1]:
                raise ValueError(
                    f"the answer positions {list(positions)} are beyond the {chosen.shape[1]} tokens of the query"
                )
            chosen[row, rows] = True
        return chosen

    def run(self, fwd_hooks: FwdHooks, stop_at_layer: int | None) -> None:
        """Compute the pass with these hooks, after those of the caller."""
        at_step: AbstractContextManager[None] = self.model.clock.at(self.step)
        with at_step, self.model.hooks(fwd_hooks=list(fwd_hooks)):
            self.model(
                self.tokens.clamp(min=0),
                return_type=None,
                # A token that only pads is text where the caller's mask or a run's canvas says so.
                attention_mask=torch.ones_like(self.tokens) if self.real is None else self.real,
                stop_at_layer=stop_at_layer,
            )


@dataclass(frozen=True, eq=False)
class ReadInputs:
    """The inputs of one group: either trajectories, or rows of tokens without a step.

    Attributes:
        model: Model that reads them.
        trajectories: Denoising runs, all of the same number of steps; empty for other inputs.
        rows: Passes without a step.
    """

    model: DiffusionTransformer
    trajectories: tuple[Trajectory, ...]
    rows: tuple[ReadPass, ...]

    @classmethod
    def of(cls, model: DiffusionTransformer, given: Readable, batch_size: int = 16) -> "ReadInputs":
        """The passes over inputs; texts and queries of one length share a pass.

        Raises:
            ValueError: No input, trajectories with other inputs or with different steps, trajectories of another
                architecture or tokenizer, or rows of tokens whose padding cannot be told from text.
            TypeError: An input of another kind.

        Warns:
            UserWarning: A trajectory that another network wrote.
        """
        if isinstance(given, Tensor):
            tokens = check_tokens(given, model.cfg)
            return cls(model, (), (ReadPass(model, tokens, model.checked_real_positions(tokens)),))
        items = [given] if isinstance(given, str | Query | Fact | Trajectory) else list(given)
        runs = [item for item in items if isinstance(item, Trajectory)]
        if not items:
            raise ValueError("there is no input; give texts, queries, facts or trajectories")
        if not runs:
            return cls(model, (), tuple(_batches(model, [_row(model, item) for item in items], batch_size)))
        if len(runs) < len(items):
            raise ValueError("trajectories cannot be mixed with other inputs, which have no steps; give one kind")
        for run in runs:
            require_same_tokens(run.record, model)
        steps = {(run.first_step, len(run.record["times"]) - 1) for run in runs}
        if len(steps) > 1:
            described = ", ".join(f"{first} to {n_steps - 1}" for first, n_steps in sorted(steps))
            raise ValueError(f"the trajectories have different steps ({described}); denoise with one number of steps")
        warn_of_another_network({f"trajectory {i}": (run.record, model) for i, run in enumerate(runs)})
        return cls(model, tuple(runs), ())

    @property
    def n_steps(self) -> int | None:
        """Number of steps of a run from its beginning; `None` without trajectories."""
        return len(self.trajectories[0].record["times"]) - 1 if self.trajectories else None

    def pick_steps(self, steps: Whole | Iterable[Whole] | None) -> list[int] | None:
        """The steps to read, in order; `None` without trajectories.

        Raises:
            ValueError: Steps without trajectories, or a step that they do not have.
        """
        if self.n_steps is None:
            if steps is not None:
                raise ValueError("steps= needs trajectories: pass the results of model.denoise(...)")
            return None
        first = self.trajectories[0].first_step
        picked = sorted(resolve_steps(range(first, self.n_steps) if steps is None else steps, self.n_steps))
        if picked[0] < first:
            raise ValueError(f"step {picked[0]} is not part of the trajectories, which begin at step {first}")
        return picked

    def at(self, step: int | None) -> Iterator[ReadPass]:
        """The passes of one step, or without trajectories, all passes."""
        if step is None:
            yield from self.rows
            return
        for run in self.trajectories:
            state = run.state_at(step, self.model.cfg.device)
            real = None if bool(run.real.all()) else run.real.to(state.tokens.device)
            yield ReadPass(self.model, state.tokens, real, state)

    def describe(self) -> dict[str, Any]:
        """The inputs, for a record: number of rows, a digest of the tokens, and the networks that wrote the runs."""
        canvases = [run.canvases for run in self.trajectories] or [row.tokens for row in self.rows]
        digest = hashlib.sha256()
        for tokens in canvases:
            digest.update(f"{list(tokens.shape)} {tokens.tolist()}".encode())
        return {
            "kind": "trajectories" if self.trajectories else "tokens",
            "rows": sum(tokens.shape[-2] for tokens in canvases),
            "tokens_sha256": digest.hexdigest(),
            "trajectory": [canvas_provenance(run.record) for run in self.trajectories] or None,
        }


def last_layer(names: Iterable[str]) -> int | None:
    """The layer before which a pass may stop, `None` if it has to reach the final norm."""
    last = 0
    for name in names:
        if not name.startswith("blocks.") and name != "hook_embed":
            return None
        last = max(last, int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0)
    return last


def _row(model: DiffusionTransformer, item: object) -> tuple[list[int], tuple[int, ...] | None]:
    """Tokens of one text, query or fact, and the positions of its answer."""
    if isinstance(item, str):
        return model.tokenize(item)[0][0].tolist(), None
    if isinstance(item, Query | Fact):
        query = as_query(model, item)
        return query.tokens.tolist(), query.answer_positions
    raise TypeError(
        f"an input is a {type(item).__name__}; give a text, a Query, a Fact, a Trajectory or a list of one kind, or "
        "one tensor of tokens"
    )


def _batches(
    model: DiffusionTransformer, rows: Sequence[tuple[list[int], tuple[int, ...] | None]], size: int
) -> Iterator[ReadPass]:
    ordered = sorted(rows, key=lambda row: len(row[0]))
    for _, group in groupby(ordered, key=lambda row: len(row[0])):
        same_length = list(group)
        for start in range(0, len(same_length), size):
            batch = same_length[start : start + size]
            tokens = check_tokens(torch.tensor([ids for ids, _ in batch]), model.cfg)
            answers = [answer for _, answer in batch if answer is not None]
            yield ReadPass(model, tokens, answers=tuple(answers) if len(answers) == len(batch) else None)
