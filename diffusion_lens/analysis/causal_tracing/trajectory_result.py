"""The traces of one query at several steps of one denoising run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace
from diffusion_lens.display import PicturedResult, Table, shaped
from diffusion_lens.records import load_fields, save_fields, shown_model


@dataclass(frozen=True, eq=False, repr=False)
class TrajectoryTrace(PicturedResult):
    """The causal traces of one query at several steps of one denoising run.

    Columns of the data frame: step, pos, layer, token, score, indirect_effect, clean, corrupted.

    Attributes:
        scores: Float[step pos layer], p(answer) with that state restored at that step, mean over the samples: the
            product over the tokens still masked, times 0 where another token than the answer's has been revealed. NaN
            at positions that a causal model has not reached yet.
        token_scores: Float[step pos layer selected], score of each token of the answer, mean over the samples.
        chained: Float[pos layer], p(answer) by the chain rule: each token is read at the step that committed it, with
            the state restored at all these steps. `None` for free canvases, and if not all of these steps were traced.
        clean: Float[step], p(answer) of the clean run.
        corrupted: Float[step], p(answer) of the corrupted run.
        clean_token_scores: Float[step selected], score of each token in the clean run.
        corrupted_token_scores: Float[step selected], score of each token in the corrupted run.
        steps: Step of each grid.
        revealed_at: Step in which the clean run revealed each answer token for good.
        known: Whether the clean run wrote the answer.
        str_canvases: Text at each position of the canvas, for each step.
        subject: First position of the subject and one past the last.
        positions: Position of each row of the grids.
        layers: Layer of each column of the grids.
        record: Settings of the trace and of the run, model, hash of the weights, hooks, modules, versions. "trajectory"
            contains the weights, hooks and modules that wrote the clean run's canvases.
    """

    scores: Float[Tensor, "step pos layer"]
    token_scores: Float[Tensor, "step pos layer selected"]
    chained: Float[Tensor, "pos layer"] | None
    clean: Float[Tensor, "step"]
    corrupted: Float[Tensor, "step"]
    clean_token_scores: Float[Tensor, "step selected"]
    corrupted_token_scores: Float[Tensor, "step selected"]
    steps: list[int]
    revealed_at: list[int]
    known: bool
    str_canvases: list[list[str]]
    subject: tuple[int, int]
    positions: list[int]
    layers: list[int]
    record: dict[str, Any]

    @property
    def indirect_effect(self) -> Float[Tensor, "step pos layer"]:
        """Rise of p(answer) when a state is restored: scores - corrupted."""
        return self.scores - self.corrupted[:, None, None]

    @property
    def order(self) -> list[int]:
        """Indices of the answer's tokens in the order of their commitment; from left to right within a step."""
        return sorted(range(len(self.revealed_at)), key=lambda token: self.revealed_at[token])

    def at_step(self, step: int) -> CausalTrace:
        """The grid of one step as a `CausalTrace`."""
        if step not in self.steps:
            raise KeyError(f"step {step} was not traced; the steps are {self.steps}")
        i = self.steps.index(step)
        return CausalTrace(
            scores=self.scores[i],
            token_scores=self.token_scores[i],
            clean_token_scores=self.clean_token_scores[i],
            corrupted_token_scores=self.corrupted_token_scores[i],
            clean=self.clean[i].item(),
            corrupted=self.corrupted[i].item(),
            known=self.known,
            str_tokens=self.str_canvases[i],
            subject=self.subject,
            positions=self.positions,
            layers=self.layers,
            record={**self.record, "step": step},
        )

    def plot(self, step: int, ax: Any = None, title: str | None = None) -> Any:
        """The heat map of one step, on a colour scale that all steps share; returns the matplotlib axes."""
        limits = float(self.corrupted.min()), float(self.scores.nan_to_num().max())
        return self.at_step(step).plot(ax=ax, title=title or f"step {step}", limits=limits)

    def _table(self) -> Table:
        tokens = [canvas[pos] for canvas in self.str_canvases for pos in self.positions]
        return Table.of_cells(
            {"step": self.steps, "pos": self.positions, "layer": self.layers},
            {
                "token": shaped(tokens, len(self.steps), len(self.positions), 1),
                "score": self.scores,
                "indirect_effect": self.indirect_effect,
                "clean": self.clean[:, None, None],
                "corrupted": self.corrupted[:, None, None],
            },
            most="indirect_effect",
        )

    def _picture(self) -> Any:
        """The step at which a restored state has the largest effect."""
        strongest = self.indirect_effect.nan_to_num().flatten(1).amax(dim=1).argmax()
        return self.plot(self.steps[int(strongest)])

    def page(self, title: str | None = None) -> Any:
        """The heat maps with a slider over the steps, as a page; `pages.write_page` writes it."""
        return plots.step_slider(
            self.scores,
            str_canvases=self.str_canvases,
            subject=self.subject,
            steps=self.steps,
            layers=self.layers,
            positions=self.positions,
            kind=self.record["kind"],
            answer=self.record["answer"],
            clean=self.clean,
            corrupted=self.corrupted,
            title=title or f"{shown_model(self.record)}: {' '.join(map(plots.readable, self.str_canvases[-1]))}",
        )

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "trajectory trace", self)

    @classmethod
    def load(cls, path: str | Path) -> "TrajectoryTrace":
        """Read what `save` wrote."""
        return load_fields(path, "trajectory trace", cls)
