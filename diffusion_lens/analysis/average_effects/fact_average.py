"""The common part of averages over one canvas and of averages by denoising step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.average_effects.fact_effect import FactEffect, one_by_one, side_by_side
from diffusion_lens.analysis.average_effects.known import say_rule, warn_of_nothing
from diffusion_lens.analysis.over_facts import StudyResult
from diffusion_lens.display import Table

A = TypeVar("A", bound="FactAverage")


@dataclass(frozen=True, eq=False, repr=False)
class FactAverage(StudyResult[FactEffect]):
    """Facts traced with the same settings; `...` is the denoising step where the average has one.

    Columns of the data frame: fact, role, layer, effect, clean, corrupted; by step also offset, counted from the
    step that reveals the last token.

    Attributes:
        effects: Float[fact ... role layer], indirect effect, mean over the positions of each role; NaN where a fact has
            none.
        clean: Float[fact ...], p(answer) of the clean runs.
        corrupted: Float[fact ...], p(answer) of the corrupted runs, mean over the samples.
        ids: The fact of each row.
        roles: The role of each row of the average.
        layers: The layer of each column of the average.
        unknown: p(answer) of the clean run, by id, of the facts that the rule of the study leaves out as not known.
        record: The settings, the rule (`known`, and `loop` where the loop writes the answers), all facts of the study
            by id, those `set_aside`, model, weights' hash, versions.
    """

    BY_STEP: ClassVar[bool]

    effects: Float[Tensor, "fact ... role layer"]
    clean: Float[Tensor, "fact ..."]
    corrupted: Float[Tensor, "fact ..."]
    ids: list[str]
    roles: list[str]
    layers: list[int]
    unknown: dict[str, float]
    record: dict[str, Any]

    @classmethod
    def of(cls: type[A], results: Mapping[str, FactEffect], record: dict[str, Any]) -> A:
        """Facts of a study side by side."""
        fields = side_by_side(results, record)
        if not cls.BY_STEP:
            fields |= {name: fields[name][:, 0] for name in ("effects", "clean", "corrupted")}
        return cls(**fields, roles=record["roles"], layers=record["layers"], record=record)

    def by_fact(self) -> dict[str, FactEffect]:
        """The inverse of `of`."""
        effects, clean, corrupted = self.effects, self.clean, self.corrupted
        if not self.BY_STEP:
            effects, clean, corrupted = effects[:, None], clean[:, None], corrupted[:, None]
        return one_by_one(effects, clean, corrupted, self.ids, self.unknown)

    @classmethod
    def from_file(cls, saved: Any, record: Mapping[str, Any]) -> FactEffect:
        """The effects in a fact, from its trace."""
        return FactEffect.of(saved, record["roles"])

    def warn_of_gaps(self) -> None:
        """Warn if the rule of a whole study leaves out every fact. A single shard may have no fact to average."""
        if not self.ids and len(self.unknown) >= len(self.record["facts"]):
            warn_of_nothing(self.record, len(self.unknown))

    def _table(self) -> Table:
        offsets = {"offset": range(1 - self.clean.shape[1], 1)} if self.BY_STEP else {}
        table = Table.of_cells(
            {"fact": self.ids, **offsets, "role": self.roles, "layer": self.layers},
            {
                "effect": self.effects,
                "clean": self.clean[..., None, None],
                "corrupted": self.corrupted[..., None, None],
            },
            most="effect",
        )
        return table.where(~self.effects.isnan())

    @property
    def rule(self) -> str:
        """Which facts are averaged, in words: "64 of 100 facts, recalled in 4 steps"."""
        return say_rule(self.record, len(self.ids), len(self.unknown))

    @property
    def total_effects(self) -> Float[Tensor, "fact ..."]:
        """How much the corruption takes away from each fact: clean - corrupted."""
        return self.clean - self.corrupted

    @property
    def aie(self) -> Float[Tensor, "... role layer"]:
        """Average indirect effect over the facts that have such a token, at that step; NaN where none has."""
        return self.effects.nanmean(dim=0)
