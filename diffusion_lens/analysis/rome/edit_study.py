"""ROME's experiment over many requests: key, value and rank-one edit of each, and what the edit changes.

For each request to write another object (`EditRequest`) the study computes k* (`rome.keys`) and v* (`rome.values`),
applies the rank-one edit, scores the probes of the request without and with it (`rome.edit`), and restores the weights,
so that each edit is applied to the model as it was given. `EditStudy.table` gives the means over requests, as in ROME's
table 1.

Edits are judged by the length of what they write, too (Park and Jo 2026, arXiv 2606.03924, who find that edits of
diffusion models fail the more, the more tokens the new object has): `EditStudy.by_target_length` divides a study by the
number of these tokens, and every table takes a way to score the probes, `scored`.

    wins       the answer wins, as in `rome.edit`
    tokens     share of the answer's tokens that are the likeliest, each for itself
    written    all tokens result when they are written one after another

The values of a batch of requests are searched together. The batches are fixed for the whole study, and a batch is
always computed in full, so results are bit-identical in one process, in shards, and after an interruption.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.engine.layout import CanvasLayout, UsableFacts
from diffusion_lens.analysis.over_facts.executor import Executes
from diffusion_lens.analysis.over_facts.folder import Shard, content, name_facts
from diffusion_lens.analysis.over_facts.intervals import share_interval
from diffusion_lens.analysis.over_facts.study import FactResult, FactsJob, Study, StudyResult, in_batches_of
from diffusion_lens.analysis.rome.covariance import (
    Covariance,
    InverseMoment,
    describe_covariance,
    require_covariance_of,
)
from diffusion_lens.analysis.rome.edit import GROUPS, RankOneEdit, by_probe, edited_layers, judge_by_token
from diffusion_lens.analysis.rome.keys import compute_keys, lay_out_request, pick_edited_layer
from diffusion_lens.analysis.rome.values import optimize_values
from diffusion_lens.data.rome_facts import EditRequest
from diffusion_lens.facts.fact import Fact, Probe, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.model.weights import say_layers
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import Saved, Table, one_line, provenance, shown_model
from diffusion_lens.records.schema import require_indices
from diffusion_lens.settings import Settings, Whole, at_least, setting, text_tuple
from diffusion_lens.settings.figures import styled
from diffusion_lens.settings.shared import ValueSettings, check_key_position
from weight_conversion import as_json

SCORED = ("efficacy", "paraphrase", "neighbourhood")
Scored = Literal["wins", "tokens", "written"]
STATES = ("before", "after")


@dataclass(frozen=True, eq=False)
class EditOutcome(FactResult, Saved):
    """The effect of one request's edit on its probes; see `EditReport`.

    Attributes:
        searched: p(new object) in the plain request with the δ that the search for v* found, before the weights are
            edited.
        target_tokens: Number of tokens of the new object that are queried; like `tokens` and `written`, files of
            earlier versions have none.
    """

    KIND = "edit of a fact"
    AXES = (("probe", "groups"), ("state", 2))

    wins: Float[Tensor, "state probe"]
    probabilities: Float[Tensor, "state probe"]
    groups: list[str]
    searched: float
    tokens: Float[Tensor, "state probe"] | None = None
    written: Float[Tensor, "state probe"] | None = None
    target_tokens: int | None = None

    __repr__ = one_line

    @classmethod
    def of(
        cls,
        before: Float[Tensor, "4 probe"],
        after: Float[Tensor, "4 probe"],
        groups: list[str],
        query: Query,
        searched: float,
    ) -> "EditOutcome":
        """The outcome for probes of these groups, as `judge_by_token` scores them, of the plain request `query`."""
        wins, probabilities, tokens, written = torch.stack([before, after], dim=1).float()
        return cls(wins, probabilities, groups, searched, tokens, written, len(query.answer_tokens))


@dataclass(frozen=True)
class GroupScore:
    """One group of probes over the requests that have such probes; `Score` describes the shares and probabilities.

    Each request counts once: its score is the share, or the mean, over its own probes. The intervals are Wilson's;
    requests about one person are not independent (`over_facts.intervals`).
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
    """ROME's score S, the harmonic mean of efficacy, paraphrase and neighbourhood, without the edits and with them,
    over the requests that have probes of all three groups.

    The ends of its interval are the scores of the lower and of the upper ends of the three shares. So it covers at
    least as often as theirs.
    """

    before: float
    after: float
    before_interval: tuple[float, float]
    after_interval: tuple[float, float]
    requests: int


@dataclass(frozen=True, eq=False, repr=False)
class EditStudy(StudyResult[EditOutcome]):
    """The edits of many requests, each probed without and with its edit.

    Columns of the data frame: request, target_tokens, searched, group, wins_before, wins_after, probability_before,
    probability_after, tokens_before, tokens_after, written_before, written_after; a row for each probe. A study of an
    earlier version lacks target_tokens, tokens and written.

    Attributes:
        wins, probabilities, groups: Those of `EditReport`, for the probes of all requests.
        owner: Int[probe], row of the request of each probe.
        searched: Float[request], p(new object) in the plain request with the δ that the search for v* found.
        ids: The request of each row.
        record: Settings, all requests of the study by id, those `set_aside`, covariance, model, weights' hash, hooks,
            versions.
        tokens: Float[state probe], share of the answer's tokens that are the likeliest on the canvas of the probe.
        written: Float[state probe], 1 if the answer is written token by token, else 0.
        target_tokens: Int[request], number of tokens of the new object that are queried.
    """

    wins: Float[Tensor, "state probe"]
    probabilities: Float[Tensor, "state probe"]
    owner: Int[Tensor, "probe"]
    searched: Float[Tensor, "request"]
    groups: list[str]
    ids: list[str]
    record: dict[str, Any]
    tokens: Float[Tensor, "state probe"] | None = None
    written: Float[Tensor, "state probe"] | None = None
    target_tokens: Int[Tensor, "request"] | None = None

    KIND = "edit study"
    SHOWS = (
        "the share of probes that are won before and after the edits, by group of probes, with intervals over requests"
    )
    ENTRIES: ClassVar[Mapping[str, Any]] = {**StudyResult.ENTRIES, "model": str}
    FACT_FILE = EditOutcome
    AXES = (("request", "ids"), ("probe", "groups"), ("state", 2))
    UNIT = "request"

    def _check(self) -> None:
        super()._check()
        require_indices("owner", self.owner.tolist(), len(self.ids))
        if (self.owner.diff() < 0).any():
            raise ValueError("the probes are not in the order of their requests")

    @classmethod
    def of(cls, results: Mapping[str, EditOutcome], record: dict[str, Any]) -> "EditStudy":
        """One result from the outcomes of some requests of a study."""
        outcomes = list(results.values())
        nothing = torch.empty(2, 0)

        def joined(parts: Iterable[Tensor | None]) -> Tensor | None:
            """`None` if an earlier version wrote one of the outcomes."""
            known = [part for part in parts if part is not None]
            return torch.cat([nothing, *known], dim=1) if len(known) == len(outcomes) else None

        lengths = [outcome.target_tokens for outcome in outcomes]
        return cls(
            wins=torch.cat([nothing, *(outcome.wins for outcome in outcomes)], dim=1),
            probabilities=torch.cat([nothing, *(outcome.probabilities for outcome in outcomes)], dim=1),
            owner=torch.tensor([row for row, each in enumerate(outcomes) for _ in each.groups], dtype=torch.long),
            searched=torch.tensor([outcome.searched for outcome in outcomes], dtype=torch.float64),
            groups=[group for outcome in outcomes for group in outcome.groups],
            ids=list(results),
            record=record,
            tokens=joined(outcome.tokens for outcome in outcomes),
            written=joined(outcome.written for outcome in outcomes),
            target_tokens=None if None in lengths else torch.tensor(lengths, dtype=torch.long),
        )

    def by_fact(self) -> dict[str, EditOutcome]:
        """The inverse of `of`."""
        counts = torch.bincount(self.owner, minlength=len(self.ids)).tolist()
        nothing = [None] * len(self.ids)
        tensors = (self.wins, self.probabilities, self.tokens, self.written)
        parts = [nothing if each is None else [x.clone() for x in each.split(counts, dim=1)] for each in tensors]
        lengths = nothing if self.target_tokens is None else self.target_tokens.tolist()
        groups = iter(self.groups)
        return {
            request_id: EditOutcome(wins, probabilities, list(islice(groups, count)), searched, tokens, written, length)
            for request_id, count, wins, probabilities, tokens, written, searched, length in zip(
                self.ids, counts, *parts, self.searched.tolist(), lengths, strict=True
            )
        }

    def by_target_length(self) -> dict[int, "EditStudy"]:
        """The requests whose new object has one token, those with two, and so on, each as a study of its own.

        Raises:
            ValueError: An earlier version made the study, and did not keep the lengths.
        """
        lengths, outcomes = self._known("target_tokens").tolist(), self.by_fact()
        return {
            length: self.of(
                {i: outcomes[i] for i, own in zip(self.ids, lengths, strict=True) if own == length}, self.record
            )
            for length in sorted(set(lengths))
        }

    def by_request(self, group: str, scored: Scored = "wins") -> dict[str, Float[Tensor, "state"]]:
        """Mean score of the probes of a group in each request with such probes, without the edit and with it."""
        rows, scores = self._means(self._known(scored), group)
        return {self.ids[row]: of_request for row, of_request in zip(rows, scores, strict=True)}

    def table(self, level: float = 0.95, seed: int | None = None, scored: Scored = "wins") -> dict[str, GroupScore]:
        """The scores of the groups that have probes, in the order of `edit.GROUPS`, with intervals of this level.

        Args:
            level: Probability that an interval covers the mean.
            seed: Deprecated.
            scored: What is averaged, "wins", "tokens" or "written"; see the top of this page.

        Raises:
            ValueError: An earlier version made the study, and did not keep tokens or written.
        """
        _warn_of_seed(seed)
        return {group: self._score(group, level, scored) for group in GROUPS if group in self.groups}

    def score(self, level: float = 0.95, seed: int | None = None) -> HarmonicScore:
        """ROME's score S, the harmonic mean of the means of efficacy, paraphrase and neighbourhood over requests; a
        `ValueError` if no request has probes of all three groups. `seed` is deprecated."""
        _warn_of_seed(seed)
        by_group = [self.by_request(group) for group in SCORED]
        ids = [request_id for request_id in self.ids if all(request_id in wins for wins in by_group)]
        if not ids:
            raise ValueError(
                f"the score S needs a request with probes of {', '.join(SCORED)}; no request has all three"
            )
        # Float[fact state entry]: one entry for each group
        values = torch.stack([torch.stack([wins[request_id] for wins in by_group], dim=1) for request_id in ids])
        cluster_of = dict(zip(self.ids, self.clusters, strict=True))
        ends = share_interval(values, [cluster_of[request_id] for request_id in ids], level)
        before, after = _harmonic(values.mean(dim=0)).tolist()
        return HarmonicScore(before, after, *_by_state(*map(_harmonic, ends)), len(ids))

    @styled
    def plot(self, level: float = 0.95, ax: Any = None, title: str | None = None, scored: Scored = "wins") -> Any:
        """Plot the scores by group, before and after, with intervals over requests. Returns the axes."""
        table = self.table(level, scored=scored)
        return plots.share_bars(
            {state: [getattr(score, state) for score in table.values()] for state in STATES},
            list(table),
            {
                state: torch.tensor([getattr(score, f"{state}_interval") for score in table.values()])
                for state in STATES
            },
            ax=ax,
            title=title or self._title(),
            ylabel=_YLABELS[scored],
        )

    @styled
    def plot_by_target_length(
        self, level: float = 0.95, ax: Any = None, title: str | None = None, scored: Scored = "wins"
    ) -> Any:
        """Plot the scores after the edits by the number of tokens of the new object, a curve for each group. Returns
        the axes; a `ValueError` as of `by_target_length`."""
        tables = {length: study.table(level, scored=scored) for length, study in self.by_target_length().items()}
        curves = {
            group: {
                length: (table[group].after, *table[group].after_interval)
                for length, table in tables.items()
                if group in table
            }
            for group in GROUPS
            if group in self.groups
        }
        return plots.shares_by_number(
            curves, "tokens of the new object", _YLABELS[scored], ax=ax, title=title or self._title()
        )

    def _title(self) -> str:
        return f"{shown_model(self.record)}: {len(self.ids)} edits of {say_layers(edited_layers(self.record))}"

    def _table(self) -> Table:
        lengths = {} if self.target_tokens is None else {"target_tokens": self.target_tokens[self.owner]}
        by_token = {"tokens": self.tokens, "written": self.written}
        return Table(
            {
                "request": [self.ids[row] for row in self.owner.tolist()],
                **lengths,
                "searched": self.searched[self.owner],
                **by_probe(self.groups, self.wins, self.probabilities),
                **{
                    f"{name}_{state}": column
                    for name, columns in by_token.items()
                    if columns is not None
                    for state, column in zip(STATES, columns, strict=True)
                },
            }
        )

    def _known(self, name: str) -> Tensor:
        """The tensor with this name; a `ValueError` if an earlier version did not keep it."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(
                f"this study has no {name}: an earlier version made it or one of its files. Compute it again, in "
                "another folder"
            )
        return tensor

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

    def _score(self, group: str, level: float, scored: Scored) -> GroupScore:
        rows, wins = self._means(self._known(scored), group)
        _, probabilities = self._means(self.probabilities, group)
        before, after = wins.mean(dim=0).tolist()
        p_before, p_after = probabilities.mean(dim=0).tolist()
        clusters = self.clusters
        before_interval, after_interval = _by_state(*share_interval(wins, [clusters[row] for row in rows], level))
        return GroupScore(
            before, after, before_interval, after_interval, p_before, p_after, len(rows), self.groups.count(group)
        )


_YLABELS: Mapping[str, str] = {
    "wins": "share of probes won",
    "tokens": "share of tokens right",
    "written": "share of answers written",
}


def _by_state(
    low: Float[Tensor, "state"], high: Float[Tensor, "state"]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The two ends of each state's interval."""
    return (low[0].item(), high[0].item()), (low[1].item(), high[1].item())


def _warn_of_seed(seed: int | None) -> None:
    if seed is not None:
        warnings.warn(f"seed={seed} is ignored: the intervals of an edit study are Wilson's", DeprecationWarning, 3)


def _harmonic(shares: Float[Tensor, "*rest entry"]) -> Float[Tensor, "*rest"]:
    """The harmonic mean over the last axis; 0 if one of the shares is 0."""
    return shares.shape[-1] / shares.reciprocal().sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class RequestSettings(Settings):
    """What the settings of edits share: requests and probes on canvases, and the record."""

    prefixes: Sequence[str] = setting(
        (),
        "Short texts before every request (rome.sample_prefixes), over which keys and the loss are averaged.",
        text_tuple,
    )
    layout: CanvasLayout = setting(
        CanvasLayout(),
        "Layout of the canvases, of the requests and of all probes. By default those of a masked diffusion model have "
        "the length that it was trained on, if that is known.",
        option=False,
    )

    def usable(
        self, model: DiffusionTransformer, requests: Sequence[EditRequest]
    ) -> tuple[dict[str, EditRequest], dict[str, Any]]:
        """The requests that can be laid out with their probes, and the record of these and of those set aside.

        Raises:
            ValueError: No request can be laid out, or two have one id.
        """
        by_id = dict(zip(name_facts([request.new for request in requests]), requests, strict=True))

        def check(fact: Fact) -> EditRequest:
            self.queries(model, by_id[fact.id])
            self.probes(model, by_id[fact.id])
            return by_id[fact.id]

        usable = UsableFacts.of([replace(request.new, id=i) for i, request in by_id.items()], check)
        facts = {request_id: _describe(request) for request_id, request in usable.prepared.items()}
        return usable.prepared, {"facts": facts, "set_aside": usable.set_aside}

    def queries(self, model: DiffusionTransformer, request: EditRequest) -> list[Query]:
        """The plain request with the new object, and the same after each prefix."""
        return lay_out_request(model, request.new, self.prefixes, self.layout)

    def probes(self, model: DiffusionTransformer, request: EditRequest) -> tuple[list[str], list[Probe]]:
        """The groups of a request's probes, and the probes."""
        # `occurrence` counts mentions of the subject in the request; a probe mentions it elsewhere.
        of_probe = replace(self.layout, occurrence=None)

        def lay_out(fact: Fact) -> Query:
            return (self.layout if fact.prompt == request.new.prompt else of_probe).query(model, fact)

        pairs = [(group, probe) for group, own in request.probes(model, lay_out).items() for probe in own]
        return [group for group, _ in pairs], [probe for _, probe in pairs]

    def describe(self) -> dict[str, Any]:
        """The settings for a record."""
        described = super().describe()
        return described | {"settings": asdict(described.pop("search")), **asdict(described.pop("layout"))}


@dataclass(frozen=True)
class EditSettings(RequestSettings):
    """Settings of the edits of a study."""

    layer: Whole = setting(MISSING, "Block whose down-projection is edited, negative ones from the end.")
    search: ValueSettings = setting(ValueSettings(), "Settings of the search for v*.", option=False)
    at: str = setting("subject_last", "Token at which the key is taken.", check_key_position)
    batch_size: Whole = setting(32, "Number of requests whose values are searched together.", partial(at_least, 1))

    def on(self, model: DiffusionTransformer) -> "EditSettings":
        """These settings with the layer counted from 0 and the length of canvas that applies to `model`."""
        return replace(self, layer=pick_edited_layer(model, self.layer), layout=self.layout.on(model))


@begins_run
def edit_study(
    model: DiffusionTransformer,
    requests: Sequence[EditRequest],
    settings: EditSettings,
    *,
    covariance: Covariance | None = None,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> EditStudy:
    """Edit the model by each request in turn, and score the request's probes without and with its edit.

    Args:
        model: Masked diffusion model or causal model. Its weights are restored after each edit.
        requests: Requests of `data.counterfact`, `data.bake` or `data.site_edits`, or your own.
        settings: Settings of the edits.
        covariance: C of the layer, `second_moment(...)` or Float[d_mlp d_mlp]; by default C = I.
        out: Folder for one file per request. A call that finds requests there computes only the others. By default
            nothing is written.
        shard: (i, n) or "i/n": compute the batches i, i + n, i + 2n, ... only; `EditStudy.merge` joins the shards.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the batches; by default this process does.

    Raises:
        ValueError: A setting is out of range, two requests have one id, the covariance belongs to another layer or
            model or is no second moment, the folder contains another study, or no request can be laid out. A single
            request that cannot be laid out, or one of whose probes cannot, is set aside, with the reason in
            `EditStudy.set_aside`.
    """
    settings = settings.on(model)
    if covariance is not None:
        require_covariance_of(model, int(settings.layer), covariance)
    usable, facts = settings.usable(model, requests)
    of_c = {"covariance": describe_covariance(covariance)}
    record = {**settings.describe(), **of_c, **facts, **provenance(model, model.cfg)}
    batches = in_batches_of(int(settings.batch_size), usable)
    study = Study(model, record, batches, FactsJob(usable, _EachEdit(settings, covariance)))
    return study.collect(EditStudy, out, shard, progress, executor)


@dataclass(frozen=True)
class _EachEdit:
    """Applies and reverts the edit of each request in turn. Keys and values are computed on the unedited model."""

    settings: EditSettings
    covariance: Covariance | None

    @cached_property
    def inverse(self) -> InverseMoment | None:
        return None if self.covariance is None else InverseMoment.of(self.covariance)

    def __call__(self, model: DiffusionTransformer, requests: Mapping[str, EditRequest]) -> list[EditOutcome]:
        layer = int(self.settings.layer)
        queries = [self.settings.queries(model, request) for request in requests.values()]
        keys = compute_keys(model, queries, layer, self.settings.at)
        values = optimize_values(model, queries, layer, settings=self.settings.search)
        outcomes = []
        for request, plain, key, value in zip(requests.values(), queries, keys, values, strict=True):
            groups, probes = self.settings.probes(model, request)
            before = judge_by_token(model, probes)
            with RankOneEdit(model, layer, key, value, self.inverse):
                after = judge_by_token(model, probes)
            outcomes.append(EditOutcome.of(before, after, groups, plain[0], value.probability_after))
        return outcomes


def _describe(request: EditRequest) -> dict[str, Any]:
    """The fact to write, the true answer, and a hash of the complete request."""
    digest = hashlib.sha256(json.dumps(as_json(asdict(request)), sort_keys=True).encode()).hexdigest()
    return {**content(request.new), "true": request.true.answer, "sha256": digest}
