"""Results of averages over facts: which facts are averaged, over which tokens, and the effects side by side.

Roles of the tokens of a query: the rows over which traces of many facts are averaged.

    before_subject   tokens before the subject, a prepended BOS among them
    subject_first    the subject's first token, if it has several
    subject_middle   those between its first and its last
    subject_last     its last token, or its only one
    after_first      the first token after the subject
    after_further    the others of the prompt
    prompt_last      the last token of the prompt, which a causal model reads the answer from
    answer           the positions of the answer: masked, or on a causal canvas the tokens that are there already
    other_masks      masked positions that are no part of the answer

and at a denoising step

    answer_revealed  positions of the answer that are revealed; "answer" are then those that are still masked, and under
                     uniform noise all of them at every step
    not_reached      positions that are not on the canvas yet; they have no effect and count in no average

These are the rows of the average figures of ROME (Meng et al. 2022, arXiv 2202.05262, figure 2) and three more. There a
token counts in every row that fits it: a subject of one token is its first and its last. Here each position has one
role, so that no state is counted twice: the last token of a subject is `subject_last` even where it is the only one or
ends the prompt, and a single token after the subject is `prompt_last`.

Rules that select the facts, by whether the model recalls them:

    recalled    the denoising loop writes the answer: with the given settings, `denoise` from the fact's canvas ends
                with the answer's tokens at their positions
    one_canvas  in one pass over the canvas with the whole answer masked, the answer's tokens are the likeliest at all
                its positions; [MASK], which the loop never writes, is not counted
    all         every fact
    ids         facts given by id, such as those that two models recall

On a masked diffusion model "recalled" and "one_canvas" select different facts: the loop reveals some positions before
others, and each prediction depends on what is revealed. On a causal model that writes the likeliest token they select
the same facts, because its sequence contains the answer's earlier tokens in both cases.

Controls, which show what the same restoring gives where nothing is expected of it. Of each fact are drawn at random

    random_site     for each role as many positions as it has, none of them in the subject or the answer or with this
                    role. They are restored in the same corrupted run. If they give as much back, the role is no site.
    random_subject  a span of the prompt with as many tokens as the subject and none in common with it. It is corrupted
                    with the same noise and traced in the subject's place, and its tokens have the subject's roles. If
                    its total effect is as large, the answer does not depend on the subject more than on other words.
                    A fact whose prompt has no room for a span has none, and does not count in the control.

The draws of a fact depend on its seed and, of sites, on the role. Another subject in the place of the subject is not a
control but a corruption ("swap").
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.causal_tracing.trace import LEAST_TOTAL_EFFECT, CausalTrace, share_of_total
from diffusion_lens.analysis.causal_tracing.trajectory import TrajectoryTrace
from diffusion_lens.analysis.over_facts.intervals import mean_interval
from diffusion_lens.analysis.over_facts.study import FactResult, StudyResult
from diffusion_lens.facts.fact import Query
from diffusion_lens.hooks.names import nearest
from diffusion_lens.model.config import reached
from diffusion_lens.records.results import Table, shown_model
from diffusion_lens.settings import own_seed, warn_user
from diffusion_lens.settings.arguments import check_type
from diffusion_lens.settings.figures import styled
from diffusion_lens.settings.shared import CONTROLS

ROLES = (
    "before_subject",
    "subject_first",
    "subject_middle",
    "subject_last",
    "after_first",
    "after_further",
    "prompt_last",
    "answer",
    "other_masks",
)
STEP_ROLES = (*ROLES, "answer_revealed")
NOT_REACHED = "not_reached"
RULES = ("recalled", "one_canvas", "all")
_CURES = {
    "recalled": "Give the canvas length of the model's training (length=) or other settings of the loop (loop=), or "
    "use another rule: known='one_canvas', or known='all'",
    "one_canvas": "Give the canvas length of the model's training (length=), or use another rule: "
    "known='recalled', or known='all'",
    "all": "No denoising run writes all positions of an answer: give the loop other settings (loop=)",
    "ids": "Give at least one fact that can be traced in known=, or use a rule: known='all'",
}

A = TypeVar("A", bound="FactAverage")


@dataclass(frozen=True, eq=False)
class FactEffect(FactResult):
    """The effects in one fact, step by step; a trace of one canvas counts as one step.

    Attributes:
        averaged: Whether the rule of the study counts the fact among those that the model knows.
        clean: Float[step], p(answer) of the clean run; for a fact that is not averaged, on its first canvas.
        corrupted: Float[step], p(answer) of the corrupted run.
        effect: Float[step role layer], indirect effect, mean over the positions of each role.
        control_corrupted: Float[step control], p(answer) of the corrupted run of each control; NaN where the fact has
            none. `None` in a study without controls.
        control_effect: Float[step control role layer], indirect effect in each control.
    """

    averaged: bool
    clean: Float[Tensor, "step"]
    corrupted: Float[Tensor, "step"]
    effect: Float[Tensor, "step role layer"]
    control_corrupted: Float[Tensor, "step control"] | None = None
    control_effect: Float[Tensor, "step control role layer"] | None = None

    @classmethod
    def of(
        cls, trace: CausalTrace | TrajectoryTrace, roles: Sequence[str], controls: Sequence[str] = ()
    ) -> "FactEffect":
        """A trace averaged over the positions of each of these roles, with the controls of its fact."""
        by_step = isinstance(trace, TrajectoryTrace)
        grids = trace.indirect_effect if by_step else trace.indirect_effect[None]
        role_rows = trace.record["roles"] if by_step else [trace.record["roles"]]
        effects = [
            mean_by_role(grid, [role_row[position] for position in trace.positions], roles)
            for grid, role_row in zip(grids, role_rows, strict=True)
        ]
        fact = cls(
            averaged=bool(trace.positions),
            clean=torch.as_tensor(trace.clean, dtype=torch.float64).reshape(-1),
            corrupted=torch.as_tensor(trace.corrupted, dtype=torch.float64).reshape(-1),
            effect=torch.stack(effects),
        )
        if not controls:
            return fact
        nothing = torch.full_like(fact.corrupted, torch.nan), torch.full_like(fact.effect, torch.nan)
        of_control = dict.fromkeys(controls, nothing)
        if "random_site" in controls and fact.averaged:
            sites = [
                [random_sites(role_row, role, trace.subject, trace.record["seed"]) for role in roles]
                for role_row in role_rows
            ]
            means = [
                torch.stack([grid[[trace.positions.index(at) for at in of_role]].mean(dim=0) for of_role in at_step])
                for grid, at_step in zip(grids, sites, strict=True)
            ]
            of_control["random_site"] = fact.corrupted, torch.stack(means)
        if "random_subject" in controls and (found := trace.record.get("random_subject")):
            of_control["random_subject"] = (
                torch.tensor(found["corrupted"], dtype=torch.float64),
                torch.tensor(found["effect"], dtype=fact.effect.dtype).view_as(fact.effect),
            )
        corrupted, effect = (torch.stack(each, dim=1) for each in zip(*of_control.values(), strict=True))
        return replace(fact, control_corrupted=corrupted, control_effect=effect)


@dataclass(frozen=True, eq=False, repr=False)
class FactAverage(StudyResult[FactEffect]):
    """Facts traced with the same settings; `...` is the denoising step where the average has one.

    `AverageEffect` and `AverageTrajectoryEffect` describe the fields.
    """

    BY_STEP: ClassVar[bool]
    AXES = (("fact", "ids"), ("role", "roles"), ("layer", "layers"))
    ENTRIES: ClassVar[Mapping[str, Any]] = {
        **StudyResult.ENTRIES,
        "model": str,
        "kind": str,
        "seed": int,
        "known": Literal["recalled", "one_canvas", "all", "ids"],
    }

    effects: Float[Tensor, "fact ... role layer"]
    clean: Float[Tensor, "fact ..."]
    corrupted: Float[Tensor, "fact ..."]
    ids: list[str]
    roles: list[str]
    layers: list[int]
    unknown: dict[str, float]
    record: dict[str, Any]
    control_effects: Float[Tensor, "fact ... control role layer"] | None = None
    control_corrupted: Float[Tensor, "fact ... control"] | None = None

    @classmethod
    def of(cls: type[A], results: Mapping[str, FactEffect], record: dict[str, Any]) -> A:
        """Facts of a study side by side, their last steps aligned; NaN before the first step of a fact."""
        averaged = {fact_id: effect for fact_id, effect in results.items() if effect.averaged}
        shape = len(averaged), max((len(effect.clean) for effect in averaged.values()), default=1)
        effects = torch.full((*shape, len(record["roles"]), len(record["layers"])), torch.nan)
        clean, corrupted = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(2))
        n_controls = len(record.get("controls", ()))
        control_corrupted = torch.full((*shape, n_controls), torch.nan, dtype=torch.float64)
        control_effects = torch.full((*shape, n_controls, *effects.shape[2:]), torch.nan)
        for row, fact in enumerate(averaged.values()):
            steps = slice(shape[1] - len(fact.clean), None)
            effects[row, steps], clean[row, steps], corrupted[row, steps] = fact.effect, fact.clean, fact.corrupted
            if fact.control_effect is not None and fact.control_corrupted is not None:
                control_effects[row, steps], control_corrupted[row, steps] = fact.control_effect, fact.control_corrupted
        one = slice(None) if cls.BY_STEP else 0
        return cls(
            effects=effects[:, one],
            clean=clean[:, one],
            corrupted=corrupted[:, one],
            ids=list(averaged),
            roles=record["roles"],
            layers=record["layers"],
            unknown={fact_id: each.clean[0].item() for fact_id, each in results.items() if not each.averaged},
            record=record,
            control_effects=control_effects[:, one] if n_controls else None,
            control_corrupted=control_corrupted[:, one] if n_controls else None,
        )

    def by_fact(self) -> dict[str, FactEffect]:
        """The inverse of `of`."""
        by_step = [self.clean, self.corrupted, self.effects]
        if self.control_effects is not None and self.control_corrupted is not None:
            by_step += [self.control_corrupted, self.control_effects]
        if not self.BY_STEP:
            by_step = [each[:, None] for each in by_step]
        facts = {}
        for fact_id, clean, *rest in zip(self.ids, *by_step, strict=True):
            steps = ~clean.isnan()
            facts[fact_id] = FactEffect(True, clean[steps], *(each[steps] for each in rest))
        _, *nothing = (torch.full((1, *each.shape[2:]), torch.nan, dtype=each.dtype) for each in by_step)
        for fact_id, probability in self.unknown.items():
            facts[fact_id] = FactEffect(False, torch.tensor([probability], dtype=torch.float64), *nothing)
        return facts

    @classmethod
    def from_file(cls, saved: Any, record: Mapping[str, Any]) -> FactEffect:
        """The effects in a fact, from its trace."""
        return FactEffect.of(saved, record["roles"], record.get("controls", ()))

    def warn_of_gaps(self) -> None:
        """Warn if the rule of a whole study leaves out every fact. A single shard may have no fact to average."""
        if not self.ids and len(self.unknown) >= len(self.record["facts"]):
            warn_user(f"the average has no facts: {self.rule}. {_CURES[self.record['known']]}")

    def _table(self) -> Table:
        offsets = {"offset": range(1 - self.clean.shape[1], 1)} if self.BY_STEP else {}
        table = Table.of_cells(
            {"fact": self.ids, **offsets, "role": self.roles, "layer": self.layers},
            {
                "effect": self.effects,
                "clean": self.clean[..., None, None],
                "corrupted": self.corrupted[..., None, None],
                **{name: self._of_control(name)[0] for name in self.controls},
            },
            most="effect",
        )
        return table.where(~self.effects.isnan())

    @property
    def controls(self) -> list[str]:
        """Names of the controls of the study."""
        names: list[str] = self.record.get("controls", [])
        return names

    def control(self: A, name: str) -> A:
        """A control as an average of its own, over the facts that have it: `control("random_subject").ate` is the
        average total effect of corrupting random spans.

        Raises:
            ValueError: The study has no such control.
        """
        effects, corrupted = self._of_control(name)
        has = ~corrupted.isnan().flatten(start_dim=1).all(dim=1) if corrupted.dim() > 1 else ~corrupted.isnan()
        others = {key: value for key, value in self.record.items() if key != "controls"}
        return replace(
            self,
            effects=effects[has],
            clean=self.clean[has],
            corrupted=corrupted[has],
            ids=[fact_id for fact_id, has_control in zip(self.ids, has.tolist(), strict=True) if has_control],
            record={**others, "control": name},
            control_effects=None,
            control_corrupted=None,
        )

    def _of_control(self, name: str) -> tuple[Float[Tensor, "fact ... role layer"], Float[Tensor, "fact ..."]]:
        """The effects and p(answer) of the corrupted run in a control."""
        if name not in self.controls or self.control_effects is None or self.control_corrupted is None:
            has = f"has the controls {', '.join(self.controls)}" if self.controls else "was computed without controls"
            raise ValueError(
                f"name={name!r}, and this average {has}; compute it with controls=[{name!r}], one of "
                f"{', '.join(CONTROLS)}"
            )
        index = self.controls.index(name)
        return self.control_effects[..., index, :, :], self.control_corrupted[..., index]

    @property
    def rule(self) -> str:
        """Which facts are averaged, in words: "64 of 100 facts, recalled in 4 steps"."""
        steps, n_set_aside = self.record.get("loop", {}).get("steps"), len(self.record["set_aside"])
        rules = {
            "recalled": "recalled" + (f" in {steps} step{'s' * (steps > 1)}" if steps else ""),
            "one_canvas": "known on one canvas",
            "all": "known or not",
            "ids": "chosen by id",
        }
        averaged = f"{len(self.ids)} of {len(self.ids) + len(self.unknown)} facts, {rules[self.record['known']]}"
        of_control = f", control {self.record['control']}" if "control" in self.record else ""
        return averaged + of_control + (f" ({n_set_aside} set aside)" if n_set_aside else "")

    def _require_facts(self) -> None:
        if not self.ids:
            raise ValueError(
                f"there is no average to plot: {shown_model(self.record)} knows none of the {len(self.unknown)} facts "
                f"that it was queried for ({self.rule})"
            )

    @property
    def total_effects(self) -> Float[Tensor, "fact ..."]:
        """How much the corruption takes away from each fact: clean - corrupted."""
        return self.clean - self.corrupted

    @property
    def aie(self) -> Float[Tensor, "... role layer"]:
        """Average indirect effect over the facts that have such a token, at that step; NaN where none has."""
        return self.effects.nanmean(dim=0)

    @property
    def normalized_effect(self) -> Float[Tensor, "... role layer"]:
        """Share of the total effect that a restored state recovers: the mean indirect effect over the mean total effect
        of the same facts. NaN where that mean is below 0.01.

        It is the ratio of the means, as ROME compares the AIE with the ATE, and not the mean of the facts' ratios, in
        which a fact whose answer the corruption hardly touches would count as much as any, with a share that is wild.
        """
        totals = self.total_effects[..., None, None].where(~self.effects.isnan(), torch.nan)
        return share_of_total(self.aie, totals.nanmean(dim=0))

    def _interval(
        self, effects: Float[Tensor, "fact *rest"], level: float, of_total: bool = False
    ) -> tuple[Float[Tensor, "*rest"], Float[Tensor, "*rest"]]:
        """Ends of the interval of the mean over the facts that have an effect, or of its share of their mean total
        effect."""
        having = (~effects.isnan()).flatten(start_dim=1).all(dim=1) if effects.dim() > 1 else ~effects.isnan()
        clusters = [cluster for cluster, has in zip(self.clusters, having.tolist(), strict=True) if has]
        seed, totals = self.record["seed"], self.total_effects[having]
        if not of_total:
            return mean_interval(effects[having], clusters, level, seed, within=(-1.0, 1.0))
        low, high = mean_interval(effects[having], clusters, level, seed, weights=totals)
        wanting = ~(totals.mean() >= LEAST_TOTAL_EFFECT)
        return low.masked_fill(wanting, torch.nan), high.masked_fill(wanting, torch.nan)


@dataclass(frozen=True, eq=False, repr=False)
class AverageEffect(FactAverage):
    """Facts traced on one canvas each, and their average.

    Columns of the data frame: fact, role, layer, effect, clean, corrupted, and the effect in each control.

    Attributes:
        effects: Float[fact role layer], indirect effect, mean over the positions of each role; NaN where a fact has
            none.
        clean: Float[fact], p(answer) of the clean runs.
        corrupted: Float[fact], p(answer) of the corrupted runs, mean over the samples.
        ids: The fact of each row.
        roles: The role of each row of the average.
        layers: The layer of each column of the average.
        unknown: p(answer) of the clean run, by id, of the facts that the rule of the study leaves out as not known.
        record: The settings, the rule (`known`, and `loop` where the loop writes the answers), all facts of the study
            by id, those `set_aside`, model, weights' hash, versions.
        control_effects: Float[fact control role layer], indirect effect in each of the `controls`; `None` if there are
            none. NaN where a fact has no such role, or no random subject.
        control_corrupted: Float[fact control], p(answer) of the corrupted run of each control.
    """

    KIND = "average effect"
    SHOWS = "the average indirect effect of restoring a state in a corrupted run, by layer and role of the token"
    FACT_FILE = CausalTrace
    BY_STEP = False

    effects: Float[Tensor, "fact role layer"]
    clean: Float[Tensor, "fact"]
    corrupted: Float[Tensor, "fact"]
    control_effects: Float[Tensor, "fact control role layer"] | None = None
    control_corrupted: Float[Tensor, "fact control"] | None = None

    @property
    def ate(self) -> float:
        """Average total effect."""
        return self.total_effects.mean().item()

    def ate_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Ends of the confidence interval of the ATE, which resamples persons; NaN for fewer than four."""
        low, high = self._interval(self.total_effects, level)
        return low.item(), high.item()

    def aie_interval(self, level: float = 0.95) -> tuple[Float[Tensor, "role layer"], Float[Tensor, "role layer"]]:
        """Ends of the confidence intervals of the AIE, by role and layer."""
        return self._by_role(level, of_total=False)

    def normalized_interval(
        self, level: float = 0.95
    ) -> tuple[Float[Tensor, "role layer"], Float[Tensor, "role layer"]]:
        """Ends of the confidence intervals of `normalized_effect`, which resample persons, with the indirect and the
        total effects of their facts; NaN where that is NaN, or where a resample has no total effect."""
        return self._by_role(level, of_total=True)

    def _by_role(self, level: float, of_total: bool) -> tuple[Float[Tensor, "role layer"], Float[Tensor, "role layer"]]:
        ends = [self._interval(effect, level, of_total) for effect in self.effects.unbind(dim=1)]
        return torch.stack([low for low, _ in ends]), torch.stack([high for _, high in ends])

    @styled
    def plot(self, level: float = 0.95, ax: Any = None, title: str | None = None) -> Any:
        """The AIE over layers, a curve with its interval for each role that occurs, and dotted those of the controls.
        Returns the matplotlib axes; a `ValueError` if no fact is averaged."""
        self._require_facts()
        title = title or f"{shown_model(self.record)}: {self.rule}\naverage total effect {self.ate:.2f}"
        low, high = self.aie_interval(level)
        controls = {name: self.control(name).aie for name in self.controls}
        return plots.effect_curves(
            self.aie, low, high, self.roles, self.layers, self.record["kind"], ax=ax, title=title, controls=controls
        )


@dataclass(frozen=True, eq=False, repr=False)
class AverageTrajectoryEffect(FactAverage):
    """Facts traced at the steps that write their answers, aligned at the step that reveals the last token.

    Columns of the data frame: fact, offset (the step, counted from the one that reveals the last token), role,
    layer, effect, clean, corrupted, and the effect in each control.

    Attributes:
        effects, clean, corrupted, ids, roles, layers, record, control_effects, control_corrupted: Those of
            `AverageEffect`, with an axis for the steps; NaN where a fact has no such step. p(answer) is the joint
            probability of the tokens masked at that step.
        unknown: p(answer) on the first canvas, by id, of the facts that the rule of the study leaves out as not known,
            or because some of their answer's positions are still masked at the end.
    """

    KIND = "average trajectory effect"
    SHOWS = "the average indirect effect of restoring a state in a corrupted run, by layer and denoising step"
    FACT_FILE = TrajectoryTrace
    BY_STEP = True

    effects: Float[Tensor, "fact step role layer"]
    clean: Float[Tensor, "fact step"]
    corrupted: Float[Tensor, "fact step"]
    control_effects: Float[Tensor, "fact step control role layer"] | None = None
    control_corrupted: Float[Tensor, "fact step control"] | None = None

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
        ends = [self._interval(each, level) for each in self.total_effects.unbind(dim=1)]
        return torch.stack([low for low, _ in ends]), torch.stack([high for _, high in ends])

    def aie_interval(
        self, level: float = 0.95
    ) -> tuple[Float[Tensor, "step role layer"], Float[Tensor, "step role layer"]]:
        """Ends of the confidence intervals of the AIE, by step, role and layer."""
        ends = [self.at(offset).aie_interval(level) for offset in self.offsets]
        return torch.stack([low for low, _ in ends]), torch.stack([high for _, high in ends])

    def normalized_interval(
        self, level: float = 0.95
    ) -> tuple[Float[Tensor, "step role layer"], Float[Tensor, "step role layer"]]:
        """Ends of the confidence intervals of `normalized_effect`, by step, role and layer."""
        ends = [self.at(offset).normalized_interval(level) for offset in self.offsets]
        return torch.stack([low for low, _ in ends]), torch.stack([high for _, high in ends])

    def at(self, offset: int) -> AverageEffect:
        """The average of one step, over the facts that have it."""
        if offset not in self.offsets:
            raise ValueError(
                f"offset={offset}; the steps of this average are {self.offsets[0]} to 0, counted from the one that "
                "reveals the answer's last token"
            )
        column = self.offsets.index(offset)
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
            control_effects=None if self.control_effects is None else self.control_effects[has_step, column],
            control_corrupted=None if self.control_corrupted is None else self.control_corrupted[has_step, column],
        )

    @styled
    def plot(self, role: str | None = None, ax: Any = None, title: str | None = None) -> Any:
        """The AIE of one role: steps down, with the one that reveals the answer at the bottom, and layers across.

        The role is by default "subject_last", or the first that occurs. A `ValueError` if no fact is averaged, no
        position has any of the roles, or there is no such role.
        """
        self._require_facts()
        curves, kind = dict(zip(self.roles, self.aie.unbind(dim=1), strict=True)), self.record["kind"]
        occurring = [name for name, values in curves.items() if not values.isnan().all()]
        if not occurring:
            raise ValueError(f"there is no map to draw: the effect is NaN in every role of {', '.join(self.roles)}")
        drawn = role or ("subject_last" if "subject_last" in occurring else occurring[0])
        if drawn not in curves:
            raise ValueError(f"there is no role {drawn!r} in this average; it has {', '.join(self.roles)}")
        return plots.labelled_map(
            curves[drawn],
            rows=[f"{_step_label(offset)}, n = {n}" for offset, n in zip(self.offsets, self.n_facts, strict=True)],
            layers=self.layers,
            xlabel=plots.RESTORED[kind],
            hue=plots.HUES[kind],
            limits=(0.0, float(self.aie.nan_to_num().max())),
            bar="AIE",
            title=title or f"{shown_model(self.record)}, {drawn}\n{self.rule}",
            ax=ax,
        )


@dataclass(frozen=True)
class Known:
    """A rule that selects the facts of an average: one of `RULES`, or "ids" with the ids of the facts. A `ValueError`
    if there is no such rule."""

    rule: str
    ids: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.rule not in (RULES if self.ids is None else ("ids",)):
            raise ValueError(
                f"known={self.rule!r}, nearest is {nearest(str(self.rule), RULES, 1)}; it must be one of "
                f"{', '.join(RULES)}, or a collection of fact ids"
            )
        if self.ids is not None:
            object.__setattr__(self, "ids", frozenset(self.ids))

    @classmethod
    def of(cls, known: "str | Collection[str] | Known") -> "Known":
        """The rule with a name, or for a collection of fact ids."""
        if isinstance(known, Known):
            return known
        return (
            cls(known) if isinstance(known, str) else cls("ids", frozenset(check_type(Collection[str], "known", known)))
        )

    def check_ids(self, facts: Collection[str]) -> None:
        """Raise a `ValueError` if the rule names an id that none of these facts has."""
        if unknown := sorted((self.ids or frozenset()) - set(facts)):
            near = nearest(unknown[0], list(facts), 1)
            raise ValueError(f"known= has {len(unknown)} ids that no fact has: {unknown[0]!r}, nearest is {near}")

    def describe(self) -> dict[str, Any]:
        """The rule for a record."""
        return {"known": self.rule, **({} if self.ids is None else {"known_ids": sorted(self.ids)})}


def token_roles(query: Query) -> list[str]:
    """The role of each position. The prompt ends at the first position of the answer behind the subject."""
    n_pos = len(query.tokens)
    start, stop = query.subject
    end = min([position for position in query.answer_positions if position >= stop], default=n_pos)
    # A later line of this table overrules an earlier one.
    painted: tuple[tuple[str, Sequence[int]], ...] = (
        ("other_masks", range(end, n_pos)),
        ("before_subject", range(start)),
        ("after_further", range(stop, end)),
        ("after_first", range(stop, end)[:1]),
        ("prompt_last", range(stop, end)[-1:]),
        ("subject_middle", range(start, stop)),
        ("subject_first", (start,)),
        ("subject_last", (stop - 1,)),
        ("answer", [position for position in query.answer_positions if position < n_pos]),
    )
    role_of = {position: role for role, positions in painted for position in positions}
    return [role_of[position] for position in range(n_pos)]


def step_roles(query: Query, canvas: Int[Tensor, "pos"], is_open: Bool[Tensor, "pos"]) -> list[str]:
    """The role of each position on the canvas before a step, which may still write the open ones."""
    # A causal canvas also contains the last token of the answer, which the query does not.
    at_step = zip(token_roles(query), reached(canvas).tolist(), is_open.tolist(), strict=False)
    return [
        NOT_REACHED if not on_canvas else "answer_revealed" if role == "answer" and not is_open_here else role
        for role, on_canvas, is_open_here in at_step
    ]


def mean_by_role(
    values: Float[Tensor, "pos layer"], roles: Sequence[str], selected: Sequence[str]
) -> Float[Tensor, "role layer"]:
    """Mean over the rows of each of the selected roles, NaN where there is none; `roles` has that of each row."""
    by_role = [[row for row, role in enumerate(roles) if role == wanted] for wanted in selected]
    return torch.stack([values[rows].mean(dim=0) for rows in by_role])


def random_sites(roles: Sequence[str], role: str, subject: tuple[int, int], seed: int) -> list[int]:
    """As many random positions as have a role, none of which has it or is in the subject or the answer, or fewer if
    there are no more; `roles` has that of each position."""
    left_out = (role, "answer", "answer_revealed", NOT_REACHED)
    others = [at for at, own in enumerate(roles) if own not in left_out and at not in range(*subject)]
    order = np.random.RandomState(own_seed(seed, f"random_site {role}", bits=32)).permutation(others)
    return sorted(order.tolist()[: roles.count(role)])


def described_control(
    trace: CausalTrace | TrajectoryTrace, roles: Sequence[Sequence[str]], selected: Sequence[str]
) -> dict[str, Any]:
    """The trace of a random subject, for the record of its fact's; `roles` are those of each step."""
    roles_of = roles if isinstance(trace, TrajectoryTrace) else roles[0]
    effect = FactEffect.of(replace(trace, record={**trace.record, "roles": roles_of}), selected)
    return {
        "random_subject": {
            "subject": list(trace.subject),
            "corrupted": effect.corrupted.tolist(),
            "effect": effect.effect.tolist(),
        }
    }


def pick_roles(roles: Sequence[str] | None, among: Sequence[str] = ROLES) -> list[str]:
    """The selected roles, in their usual order; by default all."""
    if roles is None:
        return list(among)
    if isinstance(roles, str) or not roles:
        raise ValueError(f"roles={roles!r}; give a list of some of {', '.join(among)}")
    if unknown := [role for role in roles if role not in among]:
        raise ValueError(
            f"there is no role {unknown[0]!r}, nearest is {nearest(unknown[0], among, 1)}; they are {', '.join(among)}"
        )
    return [role for role in among if role in roles]


def _step_label(offset: int) -> str:
    return f"{-offset} step{'s' * (offset < -1)} before" if offset else "last token revealed"
