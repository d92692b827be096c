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

Names tell their language. So each subject of several words has a control that nobody knows: the same name with the last
word of another subject that has the same attribute, and as many tokens. What it reaches, the look of the names does.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Rival:
    """What one fact reaches against the others of its group: means over the pairs; NaN without a pair.

    Attributes:
        group: Facts of one group share their pairs, and are not independent.
        prior: Share of the pairs in which the right one is the likelier, as it is, without the other attribute.
        share: Share of the pairs with D > 0.
        odds: D in nats.
        invented_share, invented_odds: The same with the invented name in place of the subject.
    """

    group: str
    prior: float
    share: float
    odds: float
    invented_share: float
    invented_odds: float


def log_odds(
    model: HookedDiffusionTransformer, relation: Relation, facts: Sequence[Fact], form: str
) -> dict[str, Rival]:
    """Every fact of a relation against those with another attribute and a subject of the same length, by id."""
    groups: dict[int, list[Fact]] = defaultdict(list)
    for fact in facts:
        groups[len(model.encode(f" {fact.subject}", False))].append(fact)
    found: dict[str, Rival] = {}
    for length, group in sorted(groups.items()):
        if len({fact.description for fact in group}) > 1:
            found |= _of_group(model, relation, group, form, f"{relation.name}, {length} tokens")
    return found


def summary(rivals: Sequence[Rival], seed: int = 0) -> dict[str, list[float]]:
    """Mean and 95% interval of every number over the facts that have it; whole groups are resampled."""
    result = {}
    for name in ("prior", "share", "odds", "invented_share", "invented_odds"):
        known = [rival for rival in rivals if not math.isnan(getattr(rival, name))]
        values, groups = torch.tensor([getattr(rival, name) for rival in known]), [rival.group for rival in known]
        if not known:
            continue
        is_share = not name.endswith("odds")
        ends = share_interval(values, groups, 0.95) if is_share else mean_interval(values, groups, 0.95, seed)
        result[name] = [values.mean().item(), *(end.item() for end in ends), len(known)]
    return result


def _of_group(
    model: HookedDiffusionTransformer, relation: Relation, group: Sequence[Fact], form: str, name: str
) -> dict[str, Rival]:
    invented = [_invent(model, fact, group) for fact in group]
    subjects = [fact.subject for fact in group] + [each or "" for each in invented]
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
        rivals[fact.id] = Rival(name, *numbers)
    return rivals


def _above(values: Tensor) -> float:
    """Share of positive values; equal ones count half."""
    return _mean(torch.where(values.isnan(), values, values.sign() / 2 + 0.5))


def _mean(values: Tensor) -> float:
    return values.nanmean().item()


def _invent(model: HookedDiffusionTransformer, fact: Fact, group: Sequence[Fact]) -> str | None:
    """The name with the last word of another subject of the group that has the same attribute, if its length fits."""
    words, length = fact.subject.split(), len(model.encode(f" {fact.subject}", False))
    taken = {other.subject for other in group}
    for other in group if len(words) > 1 else ():
        name = " ".join([*words[:-1], other.subject.split()[-1]])
        fits = len(model.encode(f" {name}", False)) == length
        if other.description == fact.description and name not in taken and fits:
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
