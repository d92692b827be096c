"""Average effects by denoising step: which states carry the answer before it is written, and which while it is?

The loop reveals the tokens of an answer at different steps, from t1, which unmasks the first of them, to t2, which
reveals the last one finally; for an answer of one token, or a loop that reveals all in one step, t1 = t2. Every fact is
traced at all steps from t1 to t2, on the canvases of its own denoising run (`trace_trajectory`). Runs differ in length,
so they are aligned at their ends, and a column of the average is an offset from t2:

    AIE(offset, role, layer) = mean over the facts that have a step t2 + offset >= t1 of their IE at that step

Offset 0 is the canvas from which the answer's last token is read, or the last few where one step reveals them together;
all others are revealed there. The first step of a fact isolates the flow from the subject. p(answer) at a step is the
joint probability of the tokens that are still masked.

Few facts have a step far from t2: `n_facts` counts them, and their answers are the longest.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.average_effects.average import AverageEffect
from diffusion_lens.analysis.average_effects.fact_average import FactAverage
from diffusion_lens.analysis.average_effects.known import Known
from diffusion_lens.analysis.average_effects.study import average_facts
from diffusion_lens.analysis.average_effects.trace_settings import TraceSettings, corruption_of_facts
from diffusion_lens.analysis.bootstrap import bootstrap_interval
from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.trajectory_result import TrajectoryTrace
from diffusion_lens.analysis.causal_tracing.trajectory_trace import check_canvas
from diffusion_lens.analysis.loop_settings import LoopSettings
from diffusion_lens.analysis.resumable import Shard
from diffusion_lens.analysis.workers.executor import Executes
from diffusion_lens.facts import Fact
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import shown_model


@dataclass(frozen=True, eq=False, repr=False)
class AverageTrajectoryEffect(FactAverage):
    """Facts traced at the steps that write their answers, aligned at the step that reveals the last token.

    Columns of the data frame: fact, offset (the step, counted from the one that reveals the last token), role,
    layer, effect, clean, corrupted.

    Attributes:
        effects: Float[fact step role layer], indirect effect, mean over the positions of each role; NaN where a fact
            has no such step or no such position.
        clean: Float[fact step], p(answer) of the clean runs: the joint probability of the tokens masked at that step.
        corrupted: Float[fact step], the same of the corrupted runs, mean over the samples.
        ids: The fact of each row.
        roles: The role of each row of the averages.
        layers: The layer of each column of the averages.
        unknown: p(answer) on the first canvas, by id, of the facts that the rule of the study leaves out as not known,
            or because some of their answer's positions are still masked at the end.
        record: The same as in `AverageEffect`; `loop` contains the settings of the runs that are traced.
    """

    KIND: ClassVar[str] = "average trajectory effect"
    FACT_FILE: ClassVar[type[Any]] = TrajectoryTrace
    BY_STEP: ClassVar[bool] = True

    effects: Float[Tensor, "fact step role layer"]
    clean: Float[Tensor, "fact step"]
    corrupted: Float[Tensor, "fact step"]

    @property
    def offsets(self) -> list[int]:
        """The step of each column, counted from the one that reveals the answer's last token: ..., -1, 0."""
        return list(range(1 - self.clean.shape[1], 1))

    @property
    def n_facts(self) -> list[int]:
        """Number of facts that have each step."""
        counts: list[int] = (~self.clean.isnan()).sum(dim=0).tolist()
        return counts

    @property
    def ate(self) -> Float[Tensor, "step"]:
        """Average total effect by step, over the facts that have it."""
        return self.total_effects.nanmean(dim=0)

    def ate_interval(self, level: float = 0.95) -> tuple[Float[Tensor, "step"], Float[Tensor, "step"]]:
        """Ends of the confidence intervals of the ATE, by step; only the facts that have a step are resampled."""
        effects = [each[~each.isnan(), None] for each in self.total_effects.unbind(dim=1)]
        ends = [bootstrap_interval(each, level, self.record["seed"]) for each in effects]
        return torch.cat([low for low, _ in ends]), torch.cat([high for _, high in ends])

    def aie_interval(
        self, level: float = 0.95
    ) -> tuple[Float[Tensor, "step role layer"], Float[Tensor, "step role layer"]]:
        """Ends of the confidence intervals of the AIE, by step, role and layer."""
        ends = [self.at(offset).aie_interval(level) for offset in self.offsets]
        return torch.stack([low for low, _ in ends]), torch.stack([high for _, high in ends])

    def at(self, offset: int) -> AverageEffect:
        """The average of one step, over the facts that have it."""
        column = self._column(offset)
        has_step = ~self.clean[:, column].isnan()
        return AverageEffect(
            effects=self.effects[has_step, column],
            clean=self.clean[has_step, column],
            corrupted=self.corrupted[has_step, column],
            ids=[fact_id for fact_id, has in zip(self.ids, has_step.tolist(), strict=True) if has],
            roles=self.roles,
            layers=self.layers,
            unknown=self.unknown,
            record={**self.record, "offset": offset},
        )

    def plot(self, role: str | None = None, ax: Any = None, title: str | None = None) -> Any:
        """The AIE of one role: steps down, with the one that reveals the answer at the bottom, and layers across.

        Args:
            role: Role to draw; by default "subject_last", or the first role that occurs.

        Raises:
            ValueError: No fact is averaged, no position has any of the roles, or there is no such role.
        """
        self._require_facts()
        curves = dict(zip(self.roles, self.aie.unbind(dim=1), strict=True))
        occurring = [name for name, values in curves.items() if not values.isnan().all()]
        if not occurring:
            raise ValueError(f"there is no map to draw: the effect is NaN in every role of {', '.join(self.roles)}")
        drawn = role or ("subject_last" if "subject_last" in occurring else occurring[0])
        if drawn not in curves:
            raise ValueError(f"there is no role {drawn!r} in this average; it has {', '.join(self.roles)}")
        values = curves[drawn]
        highest = float(self.aie.nan_to_num().max())
        kind = self.record["kind"]
        return plots.labelled_map(
            values,
            rows=[f"{_step_label(offset)}, n = {n}" for offset, n in zip(self.offsets, self.n_facts, strict=True)],
            layers=self.layers,
            xlabel=plots.RESTORED[kind],
            hue=plots.HUES[kind],
            limits=(0.0, highest),
            bar="AIE",
            title=title or f"{shown_model(self.record)}, {drawn}\n{self.rule}",
            ax=ax,
        )

    def plot_at(self, offset: int, level: float = 0.95, ax: Any = None, title: str | None = None) -> Any:
        """The AIE of one step over layers: a curve with its interval for each role that occurs."""
        self._require_facts()
        average = self.at(offset)
        counts = f"{len(average.ids)} of them have this step, average total effect {average.ate:.2f}"
        default = f"{shown_model(self.record)}, {_step_label(offset)}: {self.rule}\n{counts}"
        return average.plot(level, ax=ax, title=title or default)

    def _column(self, offset: int) -> int:
        if offset not in self.offsets:
            raise ValueError(
                f"offset={offset}; the steps of this average are {self.offsets[0]} to 0, counted from the one that "
                "reveals the answer's last token"
            )
        return self.offsets.index(offset)

    def _require_facts(self) -> None:
        if not self.ids:
            raise ValueError(f"there is no average to plot: {shown_model(self.record)} has {self.rule}")


@begins_run
def average_trajectory_effect(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    kind: str | Restoration = "resid",
    *,
    canvas: str = "forced",
    window: int = 10,
    noise: float | None = None,
    samples: int = 10,
    seed: int = 1,
    corruption: str | Corruption = "gaussian",
    severed: str | None = None,
    roles: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    n_masks: int | None = None,
    length: int | None = None,
    first_tokens: int | None = None,
    occurrence: int | None = None,
    known: str | Collection[str] = "recalled",
    loop: LoopSettings | None = None,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    max_bytes: int = 2**30,
    progress: bool = False,
    executor: Executes | None = None,
) -> AverageTrajectoryEffect:
    """Trace many facts at the steps that write their answers, on either variant, and average step by step.

    `average_facts` takes the settings as one object, `TraceSettings`.

    Args:
        canvas: Canvases that the corrupted runs see, "forced" or "free", as in `trace_trajectory`.
        roles: Roles to trace, "answer_revealed" among them; by default all.
        known: The same as in `average_indirect_effect`; by default the facts whose answer the traced run itself writes.
            For the others p(answer) is 0 once a wrong token is revealed in the answer. "one_canvas" reads the canvas of
            the run's first step as the traces do: hooks see that step, and under guidance the logits are guided.
        loop: Settings of the loop that writes the traced runs; by default those of `denoise`.
        out: Folder for one file per fact, which `TrajectoryTrace.load` reads.

    The other arguments are those of `average_indirect_effect`.

    Raises:
        ValueError: `average_indirect_effect` refuses an argument.

    Warns:
        UserWarning: The rule leaves out all facts, so that nothing is averaged.
    """
    check_canvas(canvas)
    corrupted, measures_noise = corruption_of_facts(corruption, noise, samples, seed)
    settings = TraceSettings(
        layout=CanvasLayout(length, n_masks, first_tokens, occurrence),
        restoration=Restoration.of(kind, window, severed),
        corruption=corrupted,
        measures_noise=measures_noise,
        known=Known.of(known),
        roles=roles,
        layers=layers,
        loop=loop,
        canvas=canvas,
        max_bytes=max_bytes,
    )
    return average_facts(AverageTrajectoryEffect, model, facts, settings, out, shard, progress, executor)


def _step_label(offset: int) -> str:
    return f"{-offset} step{'s' * (offset < -1)} before" if offset else "last token revealed"
