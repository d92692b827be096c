"""Facts about one person as pairs: a fact in its direction of training, and a question in the other direction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diffusion_lens.facts import Direction, Fact
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import at_least
from diffusion_lens.taught_pairs.pair import TaughtPair

FactPair = tuple[Fact, Fact]
OPPOSITE: dict[Direction, Direction] = {"p2d": "d2p", "d2p": "p2d"}
SHOWN = 3


@dataclass(frozen=True)
class LaidOutPairs:
    """Pairs on a model's canvas.

    Attributes:
        pairs: Pairs that could be laid out, in order.
        set_aside: Reasons why the others could not be, by id.
    """

    pairs: list[TaughtPair]
    set_aside: dict[str, str]


def match_facts(
    taught: Sequence[Fact], asked: Sequence[Fact], trained: Direction = "p2d", *, per_person: int = 1
) -> list[FactPair]:
    """Pairs of a fact as trained and a question in the other direction, about the same person and description.

    Only people trained in this direction alone are selected.

    Args:
        taught: Facts whose prompt and answer are sentences of training.
        asked: Questions; they may be the same list.
        trained: Direction of training, "p2d" or "d2p".
        per_person: Largest number of pairs for each person and description. The first consists of the first fact and
            the first question, and so on.

    Raises:
        ValueError: `trained` is not a direction, or there is no pair.
    """
    if trained not in OPPOSITE:
        raise ValueError(f"trained={trained!r}; it must be 'p2d' or 'd2p', the one direction of training")
    at_least(1, "per_person", per_person)
    questions: dict[tuple[str, str], list[Fact]] = {}
    for fact in asked:
        if fact.trained == trained and fact.asked == OPPOSITE[trained]:
            questions.setdefault((fact.person, fact.description), []).append(fact)
    sentences: dict[tuple[str, str], list[Fact]] = {}
    for fact in taught:
        if fact.trained == fact.asked == trained:
            sentences.setdefault((fact.person, fact.description), []).append(fact)
    pairs = [
        pair
        for key, facts in sentences.items()
        for pair in list(zip(facts, questions.get(key, ()), strict=False))[:per_person]
    ]
    if not pairs:
        raise ValueError(
            f"no person is trained {trained} only and has both a fact that asks {trained} and a question that asks "
            f"{OPPOSITE[trained]}; pairs are made of facts with the same person and description, trained {trained}"
        )
    return pairs


def lay_out_pairs(
    model: DiffusionTransformer, fact_pairs: Sequence[FactPair], *, length: int | None = None
) -> LaidOutPairs:
    """Pairs of facts on the model's canvas; those that the model cannot be given are set aside with the reason.

    Args:
        fact_pairs: Pairs of a fact as trained and the reverse question, as of `match_facts`.
        length: As in `TaughtPair.from_sentences`.

    Raises:
        ValueError: No pair can be laid out, or two pairs have one id.
    """
    pairs: list[TaughtPair] = []
    set_aside: dict[str, str] = {}
    names: set[str] = set()
    for number, (forward, reverse) in enumerate(fact_pairs):
        pair_id = "+".join(fact.id for fact in (forward, reverse) if fact.id) or f"pair-{number:04d}"
        if pair_id in names:
            raise ValueError(f"two pairs have the id {pair_id!r}; give each fact an id of its own")
        names.add(pair_id)
        try:
            pairs.append(TaughtPair.from_facts(model, forward, reverse, length=length, id=pair_id))
        except ValueError as error:
            set_aside[pair_id] = str(error)
    if not pairs:
        shown = "; ".join(f"{pair_id!r}: {reason}" for pair_id, reason in list(set_aside.items())[:SHOWN])
        raise ValueError(
            f"none of the {len(fact_pairs)} pairs can be laid out for the model; {shown or 'there are none'}"
        )
    return LaidOutPairs(pairs, set_aside)


def pairs_in_common(laid_out: Mapping[str, LaidOutPairs]) -> dict[str, LaidOutPairs]:
    """The pairs that each of several models can be given. The others are set aside for all of them.

    Args:
        laid_out: By name of the model, the same pairs of facts as `lay_out_pairs` lays them out.

    Raises:
        ValueError: The models have no pair in common.
    """
    set_aside = {
        pair_id: f"{name}: {reason}" if len(laid_out) > 1 else reason
        for name, of_model in reversed([*laid_out.items()])
        for pair_id, reason in of_model.set_aside.items()
    }
    common = {
        name: LaidOutPairs([pair for pair in of_model.pairs if pair.id not in set_aside], set_aside)
        for name, of_model in laid_out.items()
    }
    if not all(each.pairs for each in common.values()):
        shown = "; ".join(f"{pair_id!r}: {reason}" for pair_id, reason in list(set_aside.items())[:SHOWN])
        raise ValueError(f"no pair can be laid out for all of {', '.join(laid_out)}; {shown}")
    return common
