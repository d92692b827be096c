"""The question that one canvas of a trajectory poses: which answer tokens are still open, and what the network sees."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.batching import row_bytes
from diffusion_lens.analysis.canvas_layout import as_query
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.config import reached
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.same_network import require_same_architecture
from diffusion_lens.denoising.step_hooks import on_branch
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, whole_numbers
from diffusion_lens.shapes import Tokens
from diffusion_lens.step_state import StepState


@dataclass(frozen=True, eq=False)
class TracedTrajectory:
    """A clean run of the loop, and the query that is asked of it.

    Attributes:
        query: the canvas before the first step, the subject, the answer.
        trajectory: one row.
    """

    model: DiffusionTransformer
    query: Query
    trajectory: Trajectory

    @classmethod
    def of(cls, model: DiffusionTransformer, asked: Fact | Query, trajectory: Trajectory | None) -> "TracedTrajectory":
        """Lay out the query and, unless given, run the loop with its default settings.

        A fact is laid out as many places long as the trajectory that is given, or as in `average_indirect_effect`.

        Raises:
            ValueError: no answer, or a trajectory of another architecture or prompt, of several rows, or padded.
        """
        query = as_query(model, asked, None if trajectory is None else trajectory.tokens.shape[1])
        Answer.of(model, query)
        given, length = loop_prompt(model, query)
        if trajectory is None:
            trajectory = denoise(model, lay_out(model, given[None], length), DenoiseSettings())
        require_same_architecture(trajectory.record, model)
        n_rows, n_pos = trajectory.tokens.shape
        if n_rows != 1 or not bool(trajectory.real.all()):
            raise ValueError(
                f"the trajectory has {n_rows} rows{'' if trajectory.real.all() else ' with padding'}; denoise this "
                "prompt alone, without padding"
            )
        if max(query.answer_positions) >= n_pos:
            raise ValueError(
                f"the trajectory of {n_pos} places does not write the answer's places {list(query.answer_positions)}"
            )
        given = given.to(trajectory.tokens.device)
        start = trajectory.tokens[0].masked_fill(~trajectory.given[0], trajectory.record["blank"])
        if not torch.equal(start[: len(given)], given) or bool(trajectory.given[0, len(given) :].any()):
            raise ValueError(
                "the trajectory was given another prompt than the query's; denoise query.tokens (on a causal model up "
                "to the answer)"
            )
        places = list(query.answer_positions)
        if not bool((trajectory.canvases[1:, 0, places] != trajectory.record["blank"]).any()):
            raise ValueError(
                f"the trajectory reveals none of the answer's places {places}, so no step wrote the answer: give one "
                "that reveals them (a sampler with Proposal(writes_mask=True) may leave them masked)"
            )
        return cls(model, query, trajectory)

    @property
    def answered_from(self) -> int:
        """t1, the first step held that unmasks an answer token, whether or not the token stays."""
        places = list(self.query.answer_positions)
        shown = self.trajectory.canvases[1:, 0, places] != self.trajectory.record["blank"]
        return self.trajectory.first_step + int(shown.any(dim=1).nonzero()[0])

    @property
    def revealed_at(self) -> list[int]:
        """The step that revealed each answer token for good."""
        revealed: list[int] = self.trajectory.revealed_at[0, list(self.query.answer_positions)].tolist()
        return revealed

    @property
    def wrote_the_answer(self) -> bool:
        """Whether the run ends with the answer."""
        return bool(self.written(self.trajectory).all())

    def written(self, ended: Trajectory) -> Bool[Tensor, "batch selected"]:
        """Which answer tokens a run ends with."""
        tokens = torch.tensor(self.query.answer_tokens, device=ended.tokens.device)
        return ended.tokens[:, list(self.query.answer_positions)] == tokens

    def loop_row_bytes(self) -> int:
        """Bytes to reserve for one row that takes the loop."""
        # The loop holds logits of every masked position in float64 too, under guidance those of two branches.
        share = 3 if self.trajectory.record["cfg_scale"] else 2
        return share * row_bytes(self.model.cfg, self.n_pos, self.n_pos)

    def require_loop_memory(self, corrupt: Corruption, max_bytes: int) -> None:
        """Raise a `ValueError` unless all samples of the corrupted run may take the loop together."""
        need = corrupt.rows * self.loop_row_bytes()
        if max_bytes < need:
            raise ValueError(
                f"max_bytes={max_bytes:,} is too little: {corrupt.rows} draws in the denoising loop take {need:,} bytes"
            )

    def corrupted(self, corrupt: Corruption) -> Trajectory:
        """The corrupted runs of the loop, a row a draw, each revealing what it likes."""
        hooks = [(name, on_branch(hook, "conditional")) for name, hook in corrupt.hooks(self.model, self.query)]
        return self.trajectory.repeat(corrupt.rows).replay(self.model, canvas="free", fwd_hooks=hooks)

    @property
    def n_pos(self) -> int:
        """Places of the canvas."""
        return self.trajectory.tokens.shape[1]

    def canvas(self, step: int) -> Int[Tensor, "pos"]:
        """The canvas before a step."""
        return self.trajectory.canvases[step - self.trajectory.first_step, 0]

    def state(self, step: int, canvases: Tokens) -> StepState:
        """What a hook is told of a step whose canvases are these, a row a draw."""
        of_run = self.trajectory.state_at(step, self.model.cfg.device)
        tokens = canvases.to(of_run.tokens.device)
        masked = tokens == self.trajectory.record["blank"]
        return replace(of_run, tokens=tokens, masked=masked, given=of_run.given.expand_as(tokens))

    @property
    def answer_rows(self) -> list[int]:
        """The rows of the logits that predict the answer's tokens."""
        rows: list[int] = Answer.of(self.model, self.query).rows.tolist()
        return rows

    def reading(self, step: int, canvases: Tokens) -> Answer:
        """The answer as it is read from the canvases of one step, a row a sample.

        Under guidance the unconditional logits come from the same canvases with everything given masked.
        """
        answer, scale = Answer.of(self.model, self.query), self.trajectory.record["cfg_scale"]
        if not scale:
            return answer
        unconditional = self.unconditional(step, canvases, answer.rows.tolist())
        return replace(answer, cfg_scale=scale, unconditional=unconditional)

    def unconditional(
        self, step: int, canvases: Tokens, rows: Sequence[int]
    ) -> Float[Tensor, "#sample selected d_vocab_out"]:
        """Logits of the unconditional branch of guidance; one row where all canvases are the same."""
        given, blank = self.trajectory.given.to(canvases.device), self.trajectory.record["blank"]
        distinct = canvases[:1] if bool((canvases == canvases[:1]).all()) else canvases
        with self.model.clock.at(replace(self.state(step, distinct), branch="unconditional")):
            logits: Tensor = self.model(distinct.masked_fill(given, blank), logits_at=rows)
        return logits

    def settled(self, canvases: Tokens) -> Float[Tensor, "sample selected"]:
        """Of each of the answer's tokens 1 or 0 where a sample has revealed it or another, NaN where it is masked."""
        shown = canvases[:, list(self.query.answer_positions)]
        right = shown == torch.tensor(self.query.answer_tokens, device=canvases.device)
        return right.to(torch.float32).masked_fill(shown == self.trajectory.record["blank"], torch.nan)

    def answer(self, step: int, canvases: Tokens) -> Answer:
        """What is still open on the canvases of one step, a row a sample; tokens already revealed count 1 or 0."""
        return replace(self.reading(step, canvases), settled=self.settled(canvases))

    def seen(self, canvases: Tokens) -> Tokens:
        """What the network is shown: on a causal model the answer goes on where it has not been reached, by force."""
        final = self.trajectory.tokens[0].clone()
        places = list(self.query.answer_positions)
        final[places] = torch.tensor(self.query.answer_tokens, device=final.device)
        return torch.where(reached(canvases), canvases, final.to(canvases.device))

    def on_canvas(self, step: int) -> list[int]:
        """The places that the canvas of a step holds: all, or on a causal model those that have been reached."""
        positions: list[int] = reached(self.canvas(step)).nonzero().flatten().tolist()
        return positions


def loop_prompt(model: DiffusionTransformer, query: Query) -> tuple[Int[Tensor, "pos"], int]:
    """What the loop is given, the canvas or on a causal model what precedes the answer, and the places in all."""
    given = query.tokens[: min(query.answer_positions)] if not model.cfg.has_mask else query.tokens
    return given, max(len(query.tokens), max(query.answer_positions) + 1)


def check_steps(run: TracedTrajectory, steps: Iterable[Whole]) -> list[int]:
    """Steps at which an answer token is open, each once, or a `ValueError`."""
    first, last = run.trajectory.first_step, max(run.revealed_at)
    chosen = whole_numbers("steps", steps)
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"steps={chosen} names one twice; give each once")
    if not chosen or any(not first <= step <= last for step in chosen):
        raise ValueError(
            f"steps={chosen}; the run begins at step {first} and reveals the answer's last token at step {last}, "
            "after which there is nothing to read"
        )
    return chosen
