"""Do subject and attribute belong together, forward and in reverse? Log odds ratios of pairs of facts.

For two facts (s, a) and (s', a') of one relation, whose subjects have as many tokens,

    D = log p(s | a) - log p(s' | a) - log p(s | a') + log p(s' | a')

In it the frequencies of the four names cancel, so that no neutral text is needed. D is the log odds ratio of the table
of both subjects and both attributes. A model whose conditional probabilities were those of one joint distribution would
have the same D forward, with log p(a | s) in place of log p(s | a). A model that knows nothing has D > 0 in half of
the pairs. Three forms ask:

    forward   the attribute after the statement: "The capital of Peru is ___"
    masked    the subject in the statement: "The capital of ___ is Lima"; a causal model cannot read what comes after
    asked     the subject after a reverse question: "The city of Lima is the capital of ___"

p of several tokens is their product by the chain rule, from left to right.

Names tell their language, and the language tells the attribute. So each subject of several words has a control, a mixed
name: its own words, the last one replaced by that of another subject with the same attribute, and as many tokens. No
fact is about a mixed name, but each of its words is of a subject with the attribute. What the subject reaches beyond it
needs the whole name; where it reaches nothing more, its words may be all that the model knows.
"""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.over_facts.intervals import mean_interval, share_interval
from diffusion_lens.analysis.rome.edit import judge
from diffusion_lens.facts.fact import Fact, Probe, Query
from diffusion_lens.facts.taught_pairs import Sentence
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from real_words.questions import Relation

FORMS = ("forward", "masked", "asked")
FEWEST_GROUPS, RESAMPLES = 5, 1000  # of a correlation's interval


@dataclass(frozen=True)
class Rival:
    """What one fact reaches against the others of its group: means over the pairs; NaN without a pair.

    Attributes:
        group: Facts of one group share their pairs, and are not independent.
        prior: Share of the pairs in which the right one is the likelier, as it is, without the other attribute.
        share: Share of the pairs with D > 0.
        odds: D in nats.
        mixed_share, mixed_odds: The same with the mixed name in place of the subject.
        pairs: D of each pair, by the id of the other fact.
    """

    group: str
    prior: float
    share: float
    odds: float
    mixed_share: float
    mixed_odds: float
    pairs: dict[str, float]

    @property
    def whole_odds(self) -> float:
        """D of the subject itself, if it has a mixed name."""
        return math.nan if math.isnan(self.mixed_odds) else self.odds

    @property
    def beyond(self) -> float:
        """What the subject reaches beyond its mixed name, in nats."""
        return self.odds - self.mixed_odds


def log_odds(
    model: HookedDiffusionTransformer,
    relation: Relation,
    facts: Sequence[Fact],
    form: str,
    taken: Collection[str] = (),
) -> dict[str, Rival]:
    """Every fact of a relation against those with another attribute and a subject of the same length, by id.

    A pair says as much about one of its facts as about the other, so give facts of one kind, held out or not.

    Args:
        taken: Names of subjects, which are no mixed names.
    """
    groups: dict[int, list[Fact]] = defaultdict(list)
    for fact in facts:
        groups[len(model.encode(f" {fact.subject}", False))].append(fact)
    found: dict[str, Rival] = {}
    for length, group in sorted(groups.items()):
        if len({fact.description for fact in group}) > 1:
            found |= _of_group(model, relation, group, form, f"{relation.name}, {length} tokens", taken)
    return found


def summary(rivals: Sequence[Rival], seed: int = 0) -> dict[str, list[float]]:
    """Mean, 95% interval and number of facts, of every number over facts that have it; whole groups are resampled."""
    result = {}
    for name in ("prior", "share", "odds", "mixed_share", "mixed_odds", "whole_odds", "beyond"):
        known = [rival for rival in rivals if not math.isnan(getattr(rival, name))]
        values, groups = torch.tensor([getattr(rival, name) for rival in known]), [rival.group for rival in known]
        if not known:
            continue
        is_share = name in ("prior", "share", "mixed_share")
        ends = share_interval(values, groups, 0.95) if is_share else mean_interval(values, groups, 0.95, seed)
        result[name] = [values.mean().item(), *(end.item() for end in ends), len(known)]
    return result


def agreement(one: Mapping[str, Rival], other: Mapping[str, Rival], seed: int = 0) -> list[float]:
    """Pearson's correlation over pairs of facts of D in two forms, its 95% interval and the number of pairs.

    Each pair counts once. Whole groups of facts are resampled (percentile interval).
    """
    pairs: dict[str, dict[tuple[str, ...], tuple[float, float]]] = defaultdict(dict)
    for fact, rival in one.items():
        for against, odds in rival.pairs.items():
            in_other = other[fact].pairs.get(against, math.nan) if fact in other else math.nan
            if not math.isnan(odds + in_other):
                pairs[rival.group][tuple(sorted((fact, against)))] = (odds, in_other)
    groups = [torch.tensor(list(of_group.values())) for of_group in pairs.values()]
    n_pairs = sum(map(len, groups))
    if len(groups) < FEWEST_GROUPS:
        return [math.nan, math.nan, math.nan, n_pairs]
    order = random.Random(seed)
    drawn = [_correlation(order.choices(groups, k=len(groups))) for _ in range(RESAMPLES)]
    low, high = torch.tensor(drawn).nanquantile(torch.tensor([0.025, 0.975])).tolist()
    return [_correlation(groups), low, high, n_pairs]


def _correlation(groups: Sequence[Tensor]) -> float:
    return torch.corrcoef(torch.cat(list(groups)).T)[0, 1].item()


def _of_group(
    model: HookedDiffusionTransformer,
    relation: Relation,
    group: Sequence[Fact],
    form: str,
    name: str,
    taken: Collection[str],
) -> dict[str, Rival]:
    mixed = [mixed_name(model, fact, group, taken) for fact in group]
    subjects = [fact.subject for fact in group] + [each or "" for each in mixed]
    table = _log_probabilities(model, relation, subjects, [fact.description for fact in group], form)
    real, control = table.split(len(group))
    rivals = {}
    for i, fact in enumerate(group):
        others = torch.tensor([j for j, other in enumerate(group) if other.description != fact.description])
        rest = real[others]
        own = real[i] - rest  # [other attribute]: log p of this subject over each other
        prior = own[:, i] if form != "forward" else real[i, i] - real[i, others]
        odds = own[:, i] - own[torch.arange(len(others)), others]
        of_control = control[i] - rest
        control_odds = of_control[:, i] - of_control[torch.arange(len(others)), others]
        numbers = (_above(prior), _above(odds), _mean(odds), _above(control_odds), _mean(control_odds))
        by_other = {group[j].id: value for j, value in zip(others.tolist(), odds.tolist(), strict=True)}
        rivals[fact.id] = Rival(name, *numbers, pairs=by_other)
    return rivals


def _above(values: Tensor) -> float:
    """Share of positive values; equal ones count half."""
    return _mean(torch.where(values.isnan(), values, values.sign() / 2 + 0.5))


def _mean(values: Tensor) -> float:
    return values.nanmean().item()


def mixed_name(
    model: HookedDiffusionTransformer, fact: Fact, group: Sequence[Fact], taken: Collection[str] = ()
) -> str | None:
    """The subject with the last word of another one of the group that has the same attribute, if its length fits."""
    words, length = fact.subject.split(), len(model.encode(f" {fact.subject}", False))
    subjects = {*taken, *(other.subject for other in group)}
    for other in group if len(words) > 1 else ():
        name = " ".join([*words[:-1], other.subject.split()[-1]])
        fits = len(model.encode(f" {name}", False)) == length
        if other.description == fact.description and name not in subjects and fits:
            return name
    return None


def _log_probabilities(
    model: HookedDiffusionTransformer, relation: Relation, subjects: Sequence[str], attributes: Sequence[str], form: str
) -> Float[Tensor, "subject attribute"]:
    """log p of the subject given the attribute, or forward the reverse; NaN where a sentence names one in the other."""
    asked: dict[tuple[int, str], list[Query]] = {}
    for i, subject in enumerate(subjects):
        for attribute in dict.fromkeys(attributes):
            try:
                asked[i, attribute] = _queries(model, relation, subject, attribute, form)
            except ValueError:
                asked[i, attribute] = []
    probes = [Probe(query) for queries in asked.values() for query in queries]
    scores = iter(judge(model, probes)[1].log().split([len(queries) for queries in asked.values()])) if probes else None
    sums = {key: float(next(scores).sum()) if queries else math.nan for key, queries in asked.items()} if scores else {}
    rows = [[sums.get((i, attribute), math.nan) for attribute in attributes] for i in range(len(subjects))]
    return torch.tensor(rows, dtype=torch.float64)


def _queries(
    model: HookedDiffusionTransformer, relation: Relation, subject: str, attribute: str, form: str
) -> list[Query]:
    """The canvases whose answers' probabilities have the wanted product."""
    text = relation.statement.format(subject, attribute)
    if form == "asked":
        text = f"{relation.reverse.format(attribute)} {subject}"
    sentence = Sentence.of(text, subject, attribute).locate(model)
    target, given = (sentence.b, sentence.a) if form == "forward" else (sentence.a, sentence.b)
    tokens, spans = torch.tensor(sentence.tokens), (given[0], given[-1] + 1)
    if model.cfg.is_autoregressive:
        return [Query(tokens[: target[-1]], spans, tuple(target), tuple(tokens[list(target)].tolist()))]
    canvases = [tokens.clone() for _ in target]
    for canvas, position in zip(canvases, target, strict=True):
        canvas[position : target[-1] + 1] = model.cfg.mask_token_id
    return [
        Query(canvas, spans, (position,), (int(tokens[position]),))
        for canvas, position in zip(canvases, target, strict=True)
    ]
