"""The question that one canvas of a trajectory poses: which answer tokens are still open, and what the network sees."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.corruption import Corruption
from diffusion_lens.denoising.loop import denoise
from diffusion_lens.denoising.step_hooks import on_branch
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Fact, Query
from diffusion_lens.model.text import UNREACHED
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import Tokens


@dataclass(frozen=True, eq=False)
class TracedRun:
    """A clean run of the loop, and the query that is asked of it.

    Attributes:
        query: the canvas before the first step, the subject, the answer.
        trajectory: one row.
    """

    model: DiffusionTransformer
    query: Query
    trajectory: Trajectory

    @classmethod
    def of(cls, model: DiffusionTransformer, asked: Fact | Query, trajectory: Trajectory | None) -> "TracedRun":
        """Lay out the query and, unless given, run the loop with its default settings.

        Raises:
            ValueError: a trajectory of another canvas, of several rows, or that leaves an answer's place open.
        """
        query = asked.to_query(model) if isinstance(asked, Fact) else asked
        places = torch.tensor(query.answer_positions)
        if trajectory is None:
            prompt = query.tokens[: int(places.min())] if model.cfg.mask_token_id is None else query.tokens
            length = max(len(query.tokens), int(places.max()) + 1)
            trajectory = denoise(model, prompt[None], length=length)
        n_rows, n_pos = trajectory.tokens.shape
        if n_rows != 1:
            raise ValueError(f"the trajectory has {n_rows} rows; trace one: denoise this prompt alone")
        given = trajectory.given[0].nonzero().flatten().cpu()
        asked_tokens = query.tokens.cpu()
        if int(places.max()) >= n_pos or not bool((trajectory.revealed_at[0].cpu()[places] >= 0).all()):
            raise ValueError(
                f"the trajectory of {n_pos} places does not write the answer's places {list(query.answer_positions)}"
            )
        if not bool((asked_tokens[given] == trajectory.tokens[0].cpu()[given]).all()):
            raise ValueError("the trajectory was given another prompt than the query's; denoise query.tokens")
        return cls(model, query, trajectory)

    @property
    def revealed_at(self) -> list[int]:
        """The step that revealed each answer token."""
        revealed: list[int] = self.trajectory.revealed_at[0, list(self.query.answer_positions)].tolist()
        return revealed

    @property
    def wrote_the_answer(self) -> bool:
        """Whether the run ends with the answer."""
        return bool(self.written(self.trajectory).all())

    def written(self, ended: Trajectory) -> Bool[Tensor, "batch place"]:
        """Which answer tokens a run ends with."""
        tokens = torch.tensor(self.query.answer_tokens, device=ended.tokens.device)
        return ended.tokens[:, list(self.query.answer_positions)] == tokens

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

    def answer(self, canvases: Tokens) -> Answer:
        """What is still open on canvases of one step, a row a draw.

        Tokens that a draw has revealed are settled: 1 where they are the answer's, 0 where not. With guidance the
        unconditional logits come from the same canvases with everything given masked.
        """
        answer, record = Answer.of(self.model, self.query), self.trajectory.record
        shown = canvases[:, list(self.query.answer_positions)]
        settled = (shown == answer.tokens).to(torch.float32)
        settled[shown == record["blank"]] = torch.nan
        unconditional: Float[Tensor, "#sample place d_vocab_out"] | None = None
        if record["cfg_scale"]:
            given = self.trajectory.given.to(canvases.device)
            distinct = canvases[:1] if bool((canvases == canvases[:1]).all()) else canvases
            unprompted = distinct.masked_fill(given, record["blank"])
            unconditional = self.model(unprompted, logits_at=answer.rows)
        return Answer(answer.tokens, answer.rows, record["cfg_scale"], unconditional, settled)

    def seen(self, canvases: Tokens) -> Tokens:
        """What the network is shown: on a causal model the answer goes on where it has not been reached, by force."""
        final = self.trajectory.tokens[0].clone()
        places = list(self.query.answer_positions)
        final[places] = torch.tensor(self.query.answer_tokens, device=final.device)
        return torch.where(canvases == UNREACHED, final.to(canvases.device), canvases)

    def on_canvas(self, step: int) -> list[int]:
        """The places that the canvas of a step holds: all, or on a causal model those that have been reached."""
        reached: list[int] = (self.canvas(step) != UNREACHED).nonzero().flatten().tolist()
        return reached


def check_steps(run: TracedRun, steps: Sequence[int]) -> list[int]:
    """Steps at which an answer token is open, or a `ValueError`."""
    first, last = run.trajectory.first_step, max(run.revealed_at)
    if not steps or any(not first <= step <= last for step in steps):
        raise ValueError(
            f"steps={list(steps)}; the run begins at step {first} and reveals the answer's last token at step {last}, "
            "after which there is nothing to read"
        )
    return [int(step) for step in steps]
