"""Results of a study of edits: every probe before and after, and the scores over requests with their intervals."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.bootstrap import percentile_interval
from diffusion_lens.analysis.over_facts import StudyResult
from diffusion_lens.analysis.rome.success import GROUPS, by_probe, edited_layers
from diffusion_lens.analysis.rome.weight_edit import say_layers
from diffusion_lens.display import Table
from diffusion_lens.records import load_fields, one_line, save_fields, shown_model

SCORED = ("efficacy", "paraphrase", "neighbourhood")


@dataclass(frozen=True, eq=False)
class EditOutcome:
    """The effect of one request's edit on its probes.

    Attributes:
        wins: Float[state probe], 1 if the answer wins, else 0; state 0 is without the edit, state 1 with it.
        probabilities: Float[state probe], p(answer).
        groups: Group of each probe.
        searched: p(new object) in the plain request with the δ that the search for v* found, before the weights are
            edited.
    """

    wins: Float[Tensor, "state probe"]
    probabilities: Float[Tensor, "state probe"]
    groups: list[str]
    searched: float

    __repr__ = one_line

    @classmethod
    def of(
        cls, groups: list[str], before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], searched: float
    ) -> "EditOutcome":
        """From what `success.judge` returned without the edit and with it."""
        wins, probabilities = (torch.stack(pair).float() for pair in zip(before, after, strict=True))
        return cls(wins, probabilities, groups, searched)

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "edit of a fact", self)

    @classmethod
    def load(cls, path: str | Path) -> "EditOutcome":
        """Read what `save` wrote."""
        return load_fields(path, "edit of a fact", cls)

    def equals(self, other: "EditOutcome") -> bool:
        """Whether both are identical to the bit, NaN included."""
        pairs = (self.wins, other.wins), (self.probabilities, other.probabilities)
        same = all(a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)
        return same and self.groups == other.groups and self.searched == other.searched


@dataclass(frozen=True)
class GroupScore:
    """One group of probes over the requests that have such probes.

    Each request counts once: its score is the share, or the mean, over its own probes. The intervals are percentile
    intervals of the bootstrap over requests.

    Attributes:
        before, after: Share of probes whose answer wins, without the edit and with it.
        before_interval, after_interval: Ends of their intervals.
        probability_before, probability_after: Mean p(answer).
        requests, probes: Number of requests with such probes, and of their probes.
    """

    before: float
    after: float
    before_interval: tuple[float, float]
    after_interval: tuple[float, float]
    probability_before: float
    probability_after: float
    requests: int
    probes: int


@dataclass(frozen=True)
class HarmonicScore:
    """ROME's score S: the harmonic mean of efficacy, paraphrase and neighbourhood.

    Attributes:
        before, after: S without the edits and with them.
        before_interval, after_interval: Ends of their intervals.
        requests: Number of requests that have probes of all three groups, over which S is computed.
    """

    before: float
    after: float
    before_interval: tuple[float, float]
    after_interval: tuple[float, float]
    requests: int


@dataclass(frozen=True, eq=False, repr=False)
class EditStudy(StudyResult[EditOutcome]):
    """The edits of many requests, each probed without and with its edit.

    Columns of the data frame: request, searched, group, wins_before, wins_after, probability_before,
    probability_after; a row for each probe.

    Attributes:
        wins: Float[state probe], 1 if the answer wins, else 0; state 0 is without the edit, state 1 with it.
        probabilities: Float[state probe], p(answer).
        owner: Int[probe], row of the request of each probe.
        searched: Float[request], p(new object) in the plain request with the δ that the search for v* found.
        groups: Group of each probe.
        ids: The request of each row.
        record: Settings, all requests of the study by id, those `set_aside`, covariance, model, weights' hash, hooks,
            versions.
    """

    wins: Float[Tensor, "state probe"]
    probabilities: Float[Tensor, "state probe"]
    owner: Int[Tensor, "probe"]
    searched: Float[Tensor, "request"]
    groups: list[str]
    ids: list[str]
    record: dict[str, Any]

    KIND: ClassVar[str] = "edit study"
    FACT_FILE: ClassVar[type[Any]] = EditOutcome
    UNIT: ClassVar[str] = "request"

    @classmethod
    def of(cls, results: Mapping[str, EditOutcome], record: dict[str, Any]) -> "EditStudy":
        """One result from the outcomes of some requests of a study."""
        outcomes = list(results.values())
        nothing = torch.empty(2, 0)
        return cls(
            wins=torch.cat([nothing, *(outcome.wins for outcome in outcomes)], dim=1),
            probabilities=torch.cat([nothing, *(outcome.probabilities for outcome in outcomes)], dim=1),
            owner=torch.tensor([row for row, each in enumerate(outcomes) for _ in each.groups], dtype=torch.long),
            searched=torch.tensor([outcome.searched for outcome in outcomes], dtype=torch.float64),
            groups=[group for outcome in outcomes for group in outcome.groups],
            ids=list(results),
            record=record,
        )

    def by_fact(self) -> dict[str, EditOutcome]:
        """The inverse of `of`."""
        counts = torch.bincount(self.owner, minlength=len(self.ids)).tolist()
        starts = torch.tensor([0, *counts]).cumsum(dim=0).tolist()
        return {
            request_id: EditOutcome(
                wins=self.wins[:, start : start + count].clone(),
                probabilities=self.probabilities[:, start : start + count].clone(),
                groups=self.groups[start : start + count],
                searched=searched,
            )
            for request_id, start, count, searched in zip(
                self.ids, starts[:-1], counts, self.searched.tolist(), strict=True
            )
        }

    def by_request(self, group: str) -> dict[str, Float[Tensor, "state"]]:
        """Share of the probes of a group that each request wins, without the edit and with it.

        Requests without such probes are left out.
        """
        rows, wins = self._means(self.wins, group)
        return {self.ids[row]: of_request for row, of_request in zip(rows, wins, strict=True)}

    def table(self, level: float = 0.95, seed: int = 0) -> dict[str, GroupScore]:
        """The scores of the groups that have probes, in the order of `success.GROUPS`.

        Args:
            level: Probability that an interval covers the mean over all such requests.
            seed: Seed of the bootstrap.
        """
        return {group: self._score(group, level, seed) for group in GROUPS if group in self.groups}

    def score(self, level: float = 0.95, seed: int = 0) -> HarmonicScore:
        """ROME's score S, the harmonic mean of the means of efficacy, paraphrase and neighbourhood over requests.

        Args:
            level, seed: The same as in `table`.

        Raises:
            ValueError: No request has probes of all three groups.
        """
        by_group = [self.by_request(group) for group in SCORED]
        ids = [request_id for request_id in self.ids if all(request_id in wins for wins in by_group)]
        if not ids:
            raise ValueError(
                f"the score S needs a request with probes of {', '.join(SCORED)}; no request has all three"
            )
        # Float[fact state entry]: one entry for each group
        values = torch.stack([torch.stack([wins[request_id] for wins in by_group], dim=1) for request_id in ids])
        before, after = _harmonic(values.mean(dim=0)).tolist()
        intervals = [percentile_interval(values[:, state], level, seed, _harmonic) for state in (0, 1)]
        return HarmonicScore(before, after, intervals[0], intervals[1], len(ids))

    def plot(self, level: float = 0.95, ax: Any = None, title: str | None = None) -> Any:
        """Plot the share of wins by group, before and after, with intervals over requests. Returns the axes."""
        table = self.table(level)
        states = ("before", "after")
        return plots.share_bars(
            {state: [getattr(score, state) for score in table.values()] for state in states},
            list(table),
            {
                state: torch.tensor([getattr(score, f"{state}_interval") for score in table.values()])
                for state in states
            },
            ax=ax,
            title=title
            or f"{shown_model(self.record)}: {len(self.ids)} edits of {say_layers(edited_layers(self.record))}",
        )

    def _table(self) -> Table:
        return Table(
            {
                "request": [self.ids[row] for row in self.owner.tolist()],
                "searched": self.searched[self.owner],
                **by_probe(self.groups, self.wins, self.probabilities),
            }
        )

    def _means(
        self, numbers: Float[Tensor, "state probe"], group: str
    ) -> tuple[list[int], Float[Tensor, "request state"]]:
        """Rows of the requests that have probes of a group, and the mean of these probes' numbers in each."""
        selected = torch.tensor([own == group for own in self.groups], dtype=torch.bool)
        owner, chosen = self.owner[selected], numbers[:, selected].T.double()
        counts = torch.bincount(owner, minlength=len(self.ids))
        sums = torch.zeros(len(self.ids), 2, dtype=torch.float64).index_add(0, owner, chosen)
        rows = counts.nonzero().flatten()
        return rows.tolist(), sums[rows] / counts[rows, None]

    def _score(self, group: str, level: float, seed: int) -> GroupScore:
        rows, wins = self._means(self.wins, group)
        _, probabilities = self._means(self.probabilities, group)
        before, after = wins.mean(dim=0).tolist()
        p_before, p_after = probabilities.mean(dim=0).tolist()
        intervals = [percentile_interval(wins[:, state], level, seed) for state in (0, 1)]
        return GroupScore(
            before, after, intervals[0], intervals[1], p_before, p_after, len(rows), self.groups.count(group)
        )


def _harmonic(shares: Float[Tensor, "*rest entry"]) -> Float[Tensor, "*rest"]:
    """The harmonic mean over the last axis; 0 if one of the shares is 0."""
    return shares.shape[-1] / shares.reciprocal().sum(dim=-1)
