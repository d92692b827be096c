"""A trajectory and the query whose answer is read along it: which answer tokens are still masked at each step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.engine.answer import Answer, check_answer
from diffusion_lens.analysis.engine.batching import proposal_bytes, row_bytes
from diffusion_lens.analysis.engine.kept_run import NetworkInput
from diffusion_lens.analysis.engine.layout import as_query
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.denoising.same_network import require_same_architecture
from diffusion_lens.denoising.settings import DenoiseSettings
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.hooks.step import StepState
from diffusion_lens.model.config import reached
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, checked_arguments, whole_numbers


@checked_arguments
@dataclass(frozen=True, eq=False)
class TracedTrajectory:
    """A clean denoising run of one row on a model, and the query whose answer is read along it."""

    model: DiffusionTransformer
    query: Query
    trajectory: Trajectory

    @classmethod
    def of(
        cls, model: DiffusionTransformer, fact_or_query: Fact | Query, trajectory: Trajectory | None
    ) -> "TracedTrajectory":
        """Lay out the query and, without a trajectory, denoise it with the default settings.

        A fact's canvas is as long as the trajectory, or as in `average_indirect_effect`.

        Raises:
            ValueError: No answer, or a trajectory of another architecture or prompt, of several rows, or with padding.
        """
        query = as_query(model, fact_or_query, None if trajectory is None else trajectory.tokens.shape[1])
        check_answer(model, query)
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
                f"the trajectory of {n_pos} positions does not contain the answer positions "
                f"{list(query.answer_positions)}"
            )
        given = given.to(trajectory.tokens.device)
        start = trajectory.prompt[0]
        if not torch.equal(start[: len(given)], given) or bool(trajectory.given[0, len(given) :].any()):
            raise ValueError(
                "the trajectory has another prompt than the query; denoise query.tokens (on a causal model up to the "
                "answer)"
            )
        return cls(model, query, trajectory)

    @property
    def answered_from(self) -> int:
        """t1, the first recorded step that unmasks an answer token, whether or not the token stays.

        A token that a hook wrote counts from the step that first reads it, as in `revealed_at`, or from the one before
        if it is masked again later. Under uniform noise every step may write the answer, so this is the first one.
        """
        run, positions = self.trajectory, list(self.query.answer_positions)
        if run.uniform_noise:
            return run.first_step
        steps = torch.arange(run.first_step, run.first_step + run.n_steps)
        # The token of a hook in the next step is on the canvas after this one.
        by_hook = run.revealed_at[0, positions].cpu() == steps[:, None] + 1
        unmasks = ~run.is_masked(run.canvases[1:, 0, positions]).cpu() & ~by_hook
        return min(steps[unmasks.any(dim=1)].tolist(), default=run.first_step)

    @property
    def revealed_at(self) -> list[int]:
        """The step that revealed each answer token for good; under uniform noise, the last step that changed it."""
        revealed: list[int] = self.trajectory.revealed_at[0, list(self.query.answer_positions)].tolist()
        return revealed

    @property
    def last_step(self) -> int:
        """The last step at which the answer is read: the one that reveals its last token, or the last of all; a
        `ValueError` if no token of it stays."""
        if self.trajectory.uniform_noise:
            return self.trajectory.first_step + self.trajectory.n_steps - 1
        if (last := max(self.revealed_at)) < 0:
            raise ValueError(
                f"the trajectory reveals none of the answer positions {list(self.query.answer_positions)} for good, so "
                "no step wrote the answer: give one that reveals them (a sampler with Proposal(writes_mask=True), and "
                "hooks, may leave them masked)"
            )
        return last

    @property
    def wrote_the_answer(self) -> bool:
        """Whether the run ends with the answer."""
        return bool(self.written(self.trajectory).all())

    def written(self, finished: Trajectory) -> Bool[Tensor, "batch selected"]:
        """Which answer tokens each row of a finished run contains."""
        tokens = torch.tensor(self.query.answer_tokens, device=finished.tokens.device)
        return finished.tokens[:, list(self.query.answer_positions)] == tokens

    def proposal_bytes(self, copies: int) -> int:
        """Bytes with which the loop proposes tokens for one row, with copies of the logits of each branch."""
        cfg, record = self.model.cfg, self.trajectory.record
        # Where the text grows, the loop reads one position.
        n_read = 1 if cfg.is_autoregressive else self.n_pos - int(self.trajectory.given[0].sum())
        sampled, guided = bool(record["temperature"]) or cfg.uniform_noise, bool(record["cfg_scale"])
        return proposal_bytes(cfg, n_read, copies + guided, sampled)

    def loop_row_bytes(self, copies: int = 1) -> int:
        """Bytes of the tensors of one row of the denoising loop: of its pass, or of what it proposes."""
        cfg, n_branches = self.model.cfg, 2 if self.trajectory.record["cfg_scale"] else 1
        cached = NetworkInput(self.model, self.trajectory.tokens).past_bytes_by_row if cfg.is_autoregressive else 0
        return cached + max(n_branches * row_bytes(cfg, self.n_pos, 0), self.proposal_bytes(copies))

    @property
    def n_pos(self) -> int:
        """Number of positions of the canvas."""
        return self.trajectory.tokens.shape[1]

    def canvas(self, step: int) -> Int[Tensor, "pos"]:
        """The canvas before a step."""
        return self.trajectory.canvases[step - self.trajectory.first_step, 0]

    def state(self, step: int, canvases: Tokens) -> StepState:
        """The state of a step with these canvases, one row per sample, as hooks read it."""
        return self.trajectory.repeat(len(canvases)).state_at(step, self.model.cfg.device, canvases)

    def rows(self, step: int, canvases: Tokens, positions: Sequence[int]) -> list[int]:
        """The rows of the logits from which the loop reads these positions at a step; a `ValueError` if samples of a
        run by blocks write different blocks, and the block decides which row is read."""
        at = torch.tensor(positions, dtype=torch.long)
        rows, block = self.model.readout.rows(at), self.state(step, canvases).block
        if block is None or not block.first_shifted:
            return rows.tolist()
        if len(starts := block.start.unique().tolist()) > 1:
            raise ValueError(
                f"at step {step} the samples write different blocks, which begin at the positions {starts}, and the "
                f"first token of a block of {self.model.cfg.model_name!r} is read in another row: denoise with a "
                "sampler that reveals as many positions in every run, such as BlockConfidence(threshold=None), or "
                "give canvas='forced' where there is a choice"
            )
        return block.rows(rows, at, torch.zeros_like(at)).tolist()

    def reading(self, step: int, canvases: Tokens) -> Answer:
        """The answer as it is read from the canvases of one step, one row per sample.

        Under guidance the unconditional logits come from the same canvases with the given positions masked.
        """
        with self.model.clock.at(self.state(step, canvases)):
            answer, scale = Answer.of(self.model, self.query, canvases), self.trajectory.record["cfg_scale"]
        rows = self.rows(step, canvases, self.query.answer_positions)
        answer = replace(answer, rows=torch.tensor(rows, device=answer.rows.device))
        if not scale:
            return answer
        distinct = canvases[:1] if bool((canvases == canvases[:1]).all()) else canvases
        unconditional = self.unconditional(step, distinct, answer.rows.tolist())
        return replace(answer, cfg_scale=scale, unconditional=unconditional)

    def unconditional(
        self, step: int, canvases: Tokens, rows: Sequence[int]
    ) -> Float[Tensor, "sample selected d_vocab_out"]:
        """Logits of the unconditional branch of guidance."""
        given, blank = self.trajectory.given.to(canvases.device), self.trajectory.blank
        with self.model.clock.at(replace(self.state(step, canvases), branch="unconditional")):
            logits: Tensor = self.model(self.model.cfg.readable(canvases.masked_fill(given, blank)), logits_at=rows)
        return logits

    def settled(self, canvases: Tokens) -> Float[Tensor, "sample selected"]:
        """For each answer token, 1 if a sample has revealed it, 0 if it has revealed another, NaN if it is masked.

        Under uniform noise no token is settled before the end.
        """
        present = canvases[:, list(self.query.answer_positions)]
        correct = present == torch.tensor(self.query.answer_tokens, device=canvases.device)
        is_open = self.trajectory.is_open(canvases)[:, list(self.query.answer_positions)]
        return correct.to(torch.float32).masked_fill(is_open, torch.nan)

    def answer(self, step: int, canvases: Tokens) -> Answer:
        """The answer on the canvases of one step, one row per sample; tokens already revealed count 1 or 0."""
        return replace(self.reading(step, canvases), settled=self.settled(canvases))

    def seen(self, canvases: Tokens) -> Tokens:
        """The input of the network: where the text grows, positions not reached are filled by teacher forcing."""
        if not self.model.cfg.is_autoregressive:
            return self.model.cfg.readable(canvases)
        final = self.trajectory.tokens[0].clone()
        positions = list(self.query.answer_positions)
        final[positions] = torch.tensor(self.query.answer_tokens, device=final.device)
        return torch.where(reached(canvases), canvases, final.to(canvases.device))

    def on_canvas(self, step: int) -> list[int]:
        """The positions on the canvas of a step: all or, on a causal model, those that have been reached."""
        positions: list[int] = reached(self.canvas(step)).nonzero().flatten().tolist()
        return positions


def loop_prompt(model: DiffusionTransformer, query: Query) -> tuple[Int[Tensor, "pos"], int]:
    """The prompt for `denoise`, which ends before the answer where the text grows, and under uniform noise, of which a
    run draws its own; and the length of the canvas."""
    given = query.tokens if model.cfg.has_mask else query.tokens[: min(query.answer_positions)]
    return given, max(len(query.tokens), max(query.answer_positions) + 1)


def check_steps(run: TracedTrajectory, steps: Iterable[Whole]) -> list[int]:
    """The steps as a list; a `ValueError` if there is none, or one is named twice or after the answer's last token."""
    first, last = run.trajectory.first_step, run.last_step
    selected = whole_numbers("steps", steps)
    if len(set(selected)) < len(selected):
        raise ValueError(f"steps={selected} contains duplicates; give each once")
    if not selected or any(not first <= step <= last for step in selected):
        raise ValueError(
            f"steps={selected}; the run begins at step {first} and writes the answer's last token at step {last}, "
            "after which there is nothing to read"
        )
    return selected
