"""The rank-one edit (Meng et al. 2022, arXiv 2202.05262, eq. 2), which assigns a new value to one key of a memory.

    ΔW = (v* − W k_p) (C⁻¹ k*)ᵀ / ((C⁻¹ k*)ᵀ k_p)

W is the down-projection of one MLP, k* the subject's key, and k_p its key in the plain request, which the edited W maps
exactly to v*. Keys orthogonal to C⁻¹ k* keep their values. As in ROME's code, the direction comes from the mean key and
the length from the plain one. Without a second moment, C = I.

In a time-conditioned network, the output of W passes a gate before it is added to the stream, and v* is what is
added. The edit therefore assigns v* / gate, with the gate at the time of the search for v* (`model.at_time(t)`). At
that time the key has the value v*; at another time t' it has v* · gate(t') / gate(t), entry by entry.

Success of an edit: whether it changed the requested fact, and no other (Meng et al. 2022, arXiv 2202.05262, 3.2).

    efficacy          the request itself has the new object
    paraphrase        paraphrases of the request have the new object
    neighbourhood     other subjects with the same object keep it
    shared_name       other subjects that share a word of the subject's name keep their own objects
    other_relations   the subject's other attributes keep their objects
    reverse           the reverse question, given the new object, has the subject
    reverse_old       the reverse question, given the old object, still has the subject

The first three groups are the paper's. Each probe is a query whose answer should win after the edit. It may have a
rival, a query whose answer should lose, such as the old object. As in ROME's code, the answer then wins if the mean
log-probability of its tokens is above the rival's. Without a rival the criterion is stricter: each of its tokens has to
be the likeliest of those that the model may write (never [MASK]).

An answer of several tokens that wins is not necessarily written. A diffusion model writes it token by token, and reads
the later ones on canvases that an edit was not searched for (Park and Jo 2026, arXiv 2606.03924). So studies of edits
score each answer in two more ways, for which rivals do not matter:

    tokens     share of its tokens that are the likeliest, all read from one canvas
    written    whether all tokens result if they are revealed one at a time, each time the position of the highest
               confidence with its likeliest token; on a causal model from left to right
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.engine.answer import Answer
from diffusion_lens.analysis.engine.inputs import as_batch
from diffusion_lens.analysis.rome.covariance import Covariance, InverseMoment, SecondMoment, require_covariance_of
from diffusion_lens.analysis.rome.keys import (
    Factors,
    KeyResult,
    WeightEdit,
    before_gate,
    pick_edited_layer,
    require_same_model,
)
from diffusion_lens.analysis.rome.values import ValueResult
from diffusion_lens.facts.fact import Probe, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.model.weights import say_layers
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, network_of, provenance
from diffusion_lens.settings import Whole, at_least, checked_arguments
from diffusion_lens.settings.figures import styled


@checked_arguments
class RankOneEdit(WeightEdit):
    """The rank-one edit of one model, applied and reverted like every `WeightEdit`. It is computed in float64.

    Args:
        layer: Number of the block, negative ones from the end; key and value must belong to this layer.
        key: k*.
        value: v*, with k_p.
        covariance: `second_moment(...)`, or C itself, Float[d_mlp d_mlp]. Factoring a large C takes most of the time of
            an edit, so give many edits one `InverseMoment.of(...)` of either.

    Attributes:
        taken_from: Weights, hooks and modules with which key, value and covariance were computed; `None` for a bare C.
            They may differ from the edited weights, for example in nested edits.

    Raises:
        ValueError: Key, value, covariance and layer do not belong together or come from another model, C cannot be
            inverted, or the two keys are orthogonal under C.
    """

    def __init__(
        self,
        model: DiffusionTransformer,
        layer: Whole,
        key: KeyResult,
        value: ValueResult,
        covariance: Covariance | InverseMoment | None = None,
    ) -> None:
        layer = pick_edited_layer(model, layer)
        for name, part in (("key", key), ("value", value)):
            if part.layer != layer:
                raise ValueError(f"the edit is of layer {layer}, but the {name} was taken at layer {part.layer}")
            require_same_model(name, part.record, model)
        c = covariance.covariance if isinstance(covariance, InverseMoment) else covariance
        if c is not None:
            require_covariance_of(model, layer, c)
        moment = c.record if isinstance(c, SecondMoment) else None
        records = {"key": key.record, "value": value.record, "covariance": moment}
        self.taken_from = {name: None if record is None else network_of(record) for name, record in records.items()}
        self.model, self.layer = model, layer
        self._target = before_gate(value.vector.cpu().double(), value.gate)
        self._plain_key = value.key.cpu().double()
        self.direction, self.ridge = self._solve(key, covariance)

    @property
    def layers(self) -> list[int]:
        """The edited block."""
        return [self.layer]

    @property
    def weight(self) -> Float[Tensor, "d_model d_mlp"]:
        """The down-projection as it is now."""
        return self.weight_of(self.layer)

    @torch.no_grad()
    def factors(self, layer: int) -> Factors:
        """The two vectors whose outer product is ΔW, for the weight as it is now: v* − W k_p, and the direction."""
        written = self.weight.cpu().double() @ self._plain_key
        missing = self._target - written - self.model.blocks[self.layer].mlp.b_out.cpu().double()
        return Factors(missing[:, None], self.direction[:, None])

    def describe(self) -> dict[str, Any]:
        """Layer, ridge, and the networks that key, value and covariance were taken from."""
        return {"layer": self.layer, "ridge": self.ridge, "taken_from": self.taken_from}

    def _solve(self, key: KeyResult, covariance: Covariance | InverseMoment | None) -> tuple[Tensor, float]:
        """C⁻¹ k*, scaled so that its product with k_p is 1, and the ridge that was added to C."""
        mean_key, ridge = key.vector.cpu().double(), 0.0
        sizes = (len(self._target), len(mean_key), len(self._plain_key))
        if sizes != (self.weight.shape[0], self.weight.shape[1], self.weight.shape[1]):
            raise ValueError(
                f"the value has {sizes[0]} entries and the keys {sizes[1]} and {sizes[2]}, but the weight of layer "
                f"{self.layer} is {list(self.weight.shape)}: they come from another model"
            )
        solved = mean_key
        if covariance is not None:
            inverse = covariance if isinstance(covariance, InverseMoment) else InverseMoment.of(covariance)
            solved, ridge = inverse.times(mean_key), inverse.ridge
        overlap = float(solved @ self._plain_key)
        if not abs(overlap) > 1e-9 * float(solved.norm() * self._plain_key.norm()):
            raise ValueError(
                f"the mean key and the plain one have an overlap of {overlap:.1e}, so v* cannot affect the request; "
                "take key and value from the same subject"
            )
        return solved / overlap, ridge


GROUPS = ("efficacy", "paraphrase", "neighbourhood", "shared_name", "other_relations", "reverse", "reverse_old")


@dataclass(frozen=True)
class Score:
    """One group of probes.

    Attributes:
        before, after: Share of probes whose answer wins, without the edit and with it.
        probability_before, probability_after: Mean p(answer), all positions read from one canvas.
    """

    before: float
    after: float
    probability_before: float
    probability_after: float
    count: int


@dataclass(frozen=True, eq=False, repr=False)
class EditReport(PicturedResult, Saved):
    """The effect of an edit on each probe.

    Columns of the data frame: probe, group, wins_before, wins_after, probability_before, probability_after.

    Attributes:
        wins: Float[state probe], 1 if the answer wins, else 0; state 0 is without the edit, state 1 with it.
        probabilities: Float[state probe], p(answer).
        groups: Group of each probe.
        record: Prompts and answers, `describe()` of the edit, model, hash of the unedited weights, hooks, modules,
            versions.
    """

    KIND = "edit report"
    SHOWS = "the share of probes that are won before and after an edit, by group of probes"
    AXES = (("probe", "groups"), ("state", 2))

    wins: Float[Tensor, "state probe"]
    probabilities: Float[Tensor, "state probe"]
    groups: list[str]
    record: dict[str, Any]

    def table(self) -> dict[str, Score]:
        """The scores of the groups that have probes, in the order of `GROUPS`."""
        return {group: self._score(group) for group in GROUPS if group in self.groups}

    def _table(self) -> Table:
        return Table({"probe": range(len(self.groups)), **by_probe(self.groups, self.wins, self.probabilities)})

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """Share of wins by group, before and after. Returns the matplotlib axes."""
        table = self.table()
        return plots.share_bars(
            {state: [getattr(score, state) for score in table.values()] for state in ("before", "after")},
            list(table),
            ax=ax,
            title=title or f"Edit of {say_layers(edited_layers(self.record))}",
        )

    def _score(self, group: str) -> Score:
        selected = torch.tensor([probe_group == group for probe_group in self.groups])
        before, after = self.wins[:, selected].mean(dim=1).tolist()
        p_before, p_after = self.probabilities[:, selected].mean(dim=1).tolist()
        return Score(before, after, p_before, p_after, int(selected.sum()))


def by_probe(
    groups: Sequence[str], wins: Float[Tensor, "state probe"], probabilities: Float[Tensor, "state probe"]
) -> dict[str, Any]:
    """Columns with a row for each probe."""
    return {
        "group": groups,
        "wins_before": wins[0],
        "wins_after": wins[1],
        "probability_before": probabilities[0],
        "probability_after": probabilities[1],
    }


@begins_run
@torch.no_grad()
def edit_success(
    model: DiffusionTransformer,
    edit: WeightEdit,
    probes: Mapping[str, Sequence[Probe | Query]],
    *,
    max_batch: Whole = 256,
) -> EditReport:
    """Score the probes without and with the edit.

    Args:
        edit: A `RankOneEdit` or `MemitEdit` that is not applied; this function applies and reverts it.
        probes: Probes by group, of the groups above; a bare query has no rival. `EditRequest.probes` makes them.
        max_batch: Largest number of canvases in one forward pass.

    Raises:
        ValueError: A group is unknown, there are no probes, the model cannot write an answer, or the edit is applied
            already or belongs to another model.
    """
    if unknown := [group for group in probes if group not in GROUPS]:
        raise ValueError(f"{unknown[0]!r} is not a group of probes; the groups are {', '.join(GROUPS)}")
    if edit.model is not model:
        raise ValueError("the edit belongs to another model object than `model`; pass edit.model")
    if edit.is_applied:
        raise ValueError("the edit is applied already, but it is compared with the unedited model; revert it first")
    max_batch = at_least(1, "max_batch", max_batch)
    grouped = [
        (group, Probe(probe) if isinstance(probe, Query) else probe) for group in probes for probe in probes[group]
    ]
    if not grouped:
        raise ValueError("there are no probes: give queries, at least for 'efficacy'")
    record = {
        "prompts": [model.words(probe.query.tokens.tolist()) for _, probe in grouped],
        "answers": [model.words(probe.query.answer_tokens) for _, probe in grouped],
        **edit.describe(),
        **provenance(model, model.cfg),
    }
    all_probes = [probe for _, probe in grouped]
    before = judge(model, all_probes, max_batch)
    with edit:
        after = judge(model, all_probes, max_batch)
    wins, probabilities = torch.stack([before, after], dim=1)
    return EditReport(wins, probabilities, [group for group, _ in grouped], record)


def edited_layers(record: Mapping[str, Any]) -> list[int]:
    """The blocks that an edit changed, from the record of its result."""
    return record["layers"] if "layers" in record else [record["layer"]]


@torch.no_grad()
def judge(model: DiffusionTransformer, probes: Sequence[Probe], max_batch: int = 256) -> Float[Tensor, "2 probe"]:
    """Whether each answer wins on the model as it is now, 1 or 0, and the probability of each answer."""
    return _scores(probes, _read_all(model, _queries(probes), max_batch))


@torch.no_grad()
def judge_by_token(
    model: DiffusionTransformer, probes: Sequence[Probe], max_batch: int = 256
) -> Float[Tensor, "4 probe"]:
    """The two rows of `judge`, the share of each answer's tokens that are the likeliest, and whether it is written."""
    readings = _read_all(model, _queries(probes), max_batch)
    scores, answers = _scores(probes, readings), readings[: len(probes)]
    tokens = torch.tensor([float(each.right.double().mean()) for each in answers], dtype=scores.dtype)
    written = _written(model, [probe.query for probe in probes], answers, max_batch)
    return torch.cat([scores, tokens[None], torch.tensor([written], dtype=scores.dtype)])


@dataclass(frozen=True, eq=False)
class _Reading:
    """What a model predicts at the positions of one answer.

    Attributes:
        log_probabilities: Of the answer's tokens.
        right: Whether each of its tokens is the likeliest of those that may be written.
        confidence: Probability of the likeliest token at each position.
    """

    log_probabilities: Float[Tensor, "selected"]
    right: Bool[Tensor, "selected"]
    confidence: Float[Tensor, "selected"]


def _queries(probes: Sequence[Probe]) -> list[Query]:
    """The queries of all probes, then their rivals."""
    return [probe.query for probe in probes] + [probe.rival for probe in probes if probe.rival is not None]


def _scores(probes: Sequence[Probe], readings: Sequence[_Reading]) -> Float[Tensor, "2 probe"]:
    answers, rivals = readings[: len(probes)], iter(readings[len(probes) :])
    wins = []
    for probe, answer in zip(probes, answers, strict=True):
        if probe.rival is None:
            wins.append(bool(answer.right.all()))
        else:
            wins.append(bool(answer.log_probabilities.mean() > next(rivals).log_probabilities.mean()))
    probabilities = torch.stack([answer.log_probabilities.sum().exp() for answer in answers]).cpu()
    return torch.stack([torch.tensor(wins, dtype=probabilities.dtype), probabilities])


def _written(
    model: DiffusionTransformer, queries: Sequence[Query], readings: Sequence[_Reading], max_batch: int
) -> list[bool]:
    """Whether each answer results if its positions are revealed one at a time, each with its likeliest token: on a
    causal model from left to right, otherwise always the one of the highest confidence."""
    if model.cfg.is_autoregressive:  # Later tokens are read behind the answer's own.
        return [bool(reading.right.all()) for reading in readings]
    written = [False] * len(queries)
    rows, left = list(range(len(queries))), list(queries)
    while rows:
        revealed = {}
        for row, query, reading in zip(rows, left, readings, strict=True):
            at = int(reading.confidence.argmax())
            written[row] = bool(reading.right[at])
            if written[row] and len(query.answer_tokens) > 1:
                revealed[row] = _reveal(query, at)
        rows, left = list(revealed), list(revealed.values())
        readings = _read_all(model, left, max_batch)
    return written


def _reveal(query: Query, i: int) -> Query:
    """The query with the token `i` of its answer on the canvas, which is the answer's no more."""
    canvas, positions, tokens = query.tokens.clone(), query.answer_positions, query.answer_tokens
    canvas[positions[i]] = tokens[i]
    return Query(canvas, query.subject, positions[:i] + positions[i + 1 :], tokens[:i] + tokens[i + 1 :])


def _read_all(model: DiffusionTransformer, queries: Sequence[Query], max_batch: int) -> list[_Reading]:
    starts = range(0, len(queries), max_batch)
    return [reading for start in starts for reading in _read(model, queries[start : start + max_batch])]


def _read(model: DiffusionTransformer, queries: Sequence[Query]) -> list[_Reading]:
    answers = [Answer.of(model, query) for query in queries]
    counts = [len(answer.tokens) for answer in answers]
    canvases, real = as_batch(model, queries)
    canvas = torch.arange(len(queries)).repeat_interleave(torch.tensor(counts)).to(canvases.device)
    rows, tokens = (torch.cat([getattr(answer, name) for answer in answers]) for name in ("rows", "tokens"))
    logits = model(canvases, attention_mask=real, logits_at=(canvas, rows))
    of_answers = logits.to(torch.promote_types(logits.dtype, torch.float32)).split(counts)
    pairs = list(zip(answers, of_answers, strict=True))
    log_probs = torch.cat([answer.head.clean_logits(x[None])[0] for answer, x in pairs]).log_softmax(dim=-1)
    writable = torch.cat([answer.writable_logits(model, x[None])[0] for answer, x in pairs])
    likeliest = writable.argmax(dim=-1, keepdim=True)
    columns = (log_probs.gather(-1, tokens[:, None]), likeliest == tokens[:, None], log_probs.gather(-1, likeliest))
    by_answer = zip(*(column[:, 0].split(counts) for column in columns), strict=True)
    return [_Reading(log_prob, right, confidence.exp()) for log_prob, right, confidence in by_answer]
