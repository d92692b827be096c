"""Fictional people whose facts can only be looked up by both tokens of a name: the world of a planted subject site.

Twelve surnames form one pool for both tokens of a name, and 120 people have one of the 132 ordered pairs each, so that
"Mondall Rorrick" and "Rorrick Mondall" may be two people. Neither token alone says who is meant, nor, for most people,
do the two without their order. A model that has to answer from such a name is therefore rewarded for composing its
tokens first.

Each person has one value in each of six relations, such as an instrument ("plays flute", "practises flute") or an
animal ("owns goats"). All values are single tokens, and each belongs to seven or eight people. Each person also has a
description, "sailor of Kaurgate", in the sentences of `toy_facts`: of some people the documents say only who they are
(p2d), of some only who the description is (d2p), and of most both. A description names a place of one's own.

The documents are in `site_documents`, which samples them afresh. The questions are `Fact`s: `SiteFacts.facts`.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal, get_args

from diffusion_lens.data import toy_facts
from diffusion_lens.data.toy_facts import (
    HELD_OUT,
    PREFIXES,
    ROLES,
    TRAINED,
    Trained,
    directions_of,
    invented_places,
    invented_surnames,
    question,
)
from diffusion_lens.facts.fact import Direction, Fact

ADVERBS = ("", "often ", "still ", "gladly ")
MIDDLES = ("", ", they say,", ", as everybody knows,", " without doubt", " from abroad indeed")
MIDDLES_WITH_PERSON = (", friend of {},", ", unlike {},", " and not {}")
PREFIXES_WITH_PERSON = ("unlike {}, ", "says {}, ")
HELD_OUT_ADVERBS = tuple((prefix, ADVERBS[i % len(ADVERBS)]) for i, prefix in enumerate(PREFIXES))
TRAINED_ADVERBS = tuple(
    pair for pair in ((prefix, adverb) for prefix in PREFIXES for adverb in ADVERBS) if pair not in HELD_OUT_ADVERBS
)


@dataclass(frozen=True)
class Relation:
    """A relation of a person to one of sixteen values of one token each, which either of two verbs states."""

    name: str
    verbs: tuple[str, str]
    values: tuple[str, ...]


# Name, verbs and values.
_RELATIONS = (
    "instrument plays practises flute harp drums violin cello trumpet oboe lute guitar piano banjo zither bassoon tuba "
    "organ fiddle",
    "animal owns keeps cats dogs goats sheep horses geese ducks hens pigs bees doves rabbits cows donkeys parrots "
    "ferrets",
    "home lives dwells upstairs downstairs uptown downtown inland offshore ashore upstream downstream uphill downhill "
    "overseas outdoors underground afloat nearby",
    "time works serves mornings evenings nights afternoons weekends weekdays mondays tuesdays wednesdays thursdays "
    "fridays saturdays sundays holidays summers winters",
    "food eats cooks beans lentils rice noodles fish soup mushrooms potatoes cabbage carrots pancakes dumplings eggs "
    "leeks turnips peas",
    "colour wears likes red blue green yellow orange purple black white grey brown pink scarlet turquoise indigo "
    "maroon beige",
)
RELATIONS = tuple(
    Relation(name, (one, other), tuple(values)) for name, one, other, *values in map(str.split, _RELATIONS)
)
RELATION_OF = {verb: relation for relation in RELATIONS for verb in relation.verbs}


SHIPPED_SEED = 5

Kind = Literal["attribute", "description"]

PEOPLE: dict[Trained, int] = {"p2d": 15, "d2p": 15, "both": 90}
N_NAMES = 12

_ID = re.compile(r"site\d+-(?P<person>\d+)-(?P<way>\w+)-(?P<templates>held-out|trained)-(?P<template>\d+)")


@dataclass(frozen=True)
class Person(toy_facts.Person):
    """A person whose name is two of the common pool, with a value of each relation in the order of `RELATIONS`."""

    values: tuple[str, ...]

    def value(self, relation: Relation) -> str:
        """This person's value of a relation."""
        return self.values[RELATIONS.index(relation)]


@dataclass(frozen=True)
class SiteFacts:
    """People of one seed, grouped by the direction of their descriptions, and questions about them.

    A method that takes a fact raises a `ValueError` if that is no question of this world, or asks for something else.
    """

    people: tuple[Person, ...]
    seed: int

    def facts(
        self, kind: Kind, trained: Trained | None = None, asked: Direction | None = None, held_out: bool = True
    ) -> list[Fact]:
        """Questions, ordered by person, by verb or direction, and by template.

        Args:
            kind: "attribute" asks for the value of a relation, and the answer is one token. "description" asks for the
                description of a person, or for the name by the description; the answer ends with its full stop.
            trained: Direction of the descriptions of the selected people. `None` selects all.
            asked: Direction of a question about descriptions. `None` selects both. Attributes have no directions:
                documents state them about every person, so their facts have neither `trained` nor `asked`.
            held_out: Whether to use the five held-out templates, or the others, which occur in documents.

        Raises:
            ValueError: A choice is unknown, or `asked` is given for attributes.
        """
        for name, given, known in (("kind", kind, get_args(Kind)), ("trained", trained, (None, *PEOPLE))):
            if given not in known:
                raise ValueError(f"{name}={given!r}; it must be one of {', '.join(map(repr, known))}")
        if asked is not None and (kind == "attribute" or asked not in get_args(Direction)):
            raise ValueError(f"asked={asked!r}; it must be 'p2d' or 'd2p' with kind='description', and None otherwise")
        ways = tuple(RELATION_OF) if kind == "attribute" else directions_of("both" if asked is None else asked)
        return [
            self._question(i, way, held_out, k)
            for i, person in enumerate(self.people)
            if trained in (None, person.trained)
            for way in ways
            for k in range(len(_templates(way, held_out)))
        ]

    def paraphrases(self, fact: Fact) -> list[Fact]:
        """The same question in the other held-out templates, and about an attribute with its other verb too."""
        i, way, _, _ = self._place(fact)
        ways = RELATION_OF[way].verbs if way in RELATION_OF else (way,)
        same = [self._question(i, way, True, k) for way in ways for k in range(len(_templates(way, True)))]
        return [other for other in same if other.prompt != fact.prompt]

    def neighbours(self, fact: Fact) -> list[Fact]:
        """An attribute's question about the other people with this value, whose answers an edit should not change."""
        i, verb, held_out, k = self._place(fact)
        if verb not in RELATION_OF:
            raise ValueError(f"{fact.id!r} asks for a description or a name; give a fact of facts('attribute')")
        values = [person.value(RELATION_OF[verb]) for person in self.people]
        same = [j for j, value in enumerate(values) if value == values[i] and j != i]
        return [self._question(j, verb, held_out, k) for j in same]

    def sharing_a_name(self, fact: Fact) -> list[Fact]:
        """The same question about other people with one of the two names, at either place, whatever their answer.

        Of a description, only people whose documents state it in this direction are asked.
        """
        i, way, held_out, k = self._about_a_person(fact)
        names = [set(person.name.split()) for person in self.people]
        stated = [way in RELATION_OF or way in directions_of(person.trained) for person in self.people]
        sharing = [j for j, other in enumerate(names) if j != i and stated[j] and other & names[i]]
        return [self._question(j, way, held_out, k) for j in sharing]

    def other_relations(self, fact: Fact) -> list[Fact]:
        """The person's other attributes, in the same template with the corresponding verb.

        Of a description, these are all attributes of the person, with the first verb and the template of this number.
        """
        i, way, held_out, k = self._about_a_person(fact)
        own = RELATION_OF.get(way)
        which = 0 if own is None else own.verbs.index(way)
        return [self._question(i, other.verbs[which], held_out, k) for other in RELATIONS if other != own]

    def reverse_question(self, fact: Fact, description: str) -> Fact:
        """The question about the name by a description, in the template of a question about the description.

        The description need not be the person's; the answer is the person's name.
        """
        i, way, held_out, k = self._place(fact)
        if way != "p2d":
            raise ValueError(f"{fact.id!r} does not ask for a description; give a fact with asked='p2d'")
        asked = self._question(i, "d2p", held_out, k)
        prompt = asked.template.replace("<subject>", description)
        return replace(asked, prompt=prompt, subject=description, description=description)

    def _question(self, i: int, way: str, held_out: bool, k: int) -> Fact:
        """Question `k` about person `i` with a verb, or in a direction of the description."""
        person = self.people[i]
        fact_id = f"site{self.seed}-{i:03d}-{way}-{'held-out' if held_out else 'trained'}-{k}"
        if way not in RELATION_OF:
            return question(person, "p2d" if way == "p2d" else "d2p", _templates(way, held_out)[k], fact_id)
        prefix, adverb = _templates(way, held_out)[k]
        template = f"{prefix}<subject> {adverb}{way}"
        return Fact(
            prompt=template.replace("<subject>", person.name),
            subject=person.name,
            answer=f" {person.value(RELATION_OF[way])}",
            id=fact_id,
            person=person.name,
            description=person.description,
            template=template,
        )

    def _place(self, fact: Fact) -> tuple[int, str, bool, int]:
        """Person, verb or direction, held-out flag and template of a question, from its id."""
        match = _ID.fullmatch(fact.id)
        if match is not None:
            i, held_out, k = int(match["person"]), match["templates"] == "held-out", int(match["template"])
            if i < len(self.people) and self._question(i, match["way"], held_out, k) == fact:
                return i, match["way"], held_out, k
        raise ValueError(f"{fact!r} is not a question of load({self.seed}); give one that its facts() returned")

    def _about_a_person(self, fact: Fact) -> tuple[int, str, bool, int]:
        place = self._place(fact)
        if place[1] == "d2p":
            raise ValueError(f"{fact.id!r} asks for a name; give a fact of an attribute, or one with asked='p2d'")
        return place


def load(seed: int = SHIPPED_SEED) -> SiteFacts:
    """Generate the world of one seed. The same seed gives the same people on every machine."""
    rng = random.Random(seed)
    n_people = sum(PEOPLE.values())
    names = rng.sample(list(permutations(invented_surnames(rng, N_NAMES), 2)), n_people)
    roles = _balanced(rng, ROLES, n_people)
    places = invented_places(rng, n_people)
    columns = [_balanced(rng, relation.values, n_people) for relation in RELATIONS]
    directions = [trained for trained, count in PEOPLE.items() for _ in range(count)]
    people = tuple(
        Person(" ".join(name), f"{role} of {place}", trained, tuple(values))
        for name, role, place, trained, *values in zip(names, roles, places, directions, *columns, strict=True)
    )
    return SiteFacts(people, seed)


def _templates(way: str, held_out: bool) -> tuple[tuple[str, str], ...]:
    if way in RELATION_OF:
        return HELD_OUT_ADVERBS if held_out else TRAINED_ADVERBS
    return HELD_OUT if held_out else TRAINED


def _balanced(rng: random.Random, values: Sequence[str], count: int) -> list[str]:
    """`count` values in random order, each as often as the others or once more."""
    repeated = [values[i % len(values)] for i in range(count)]
    rng.shuffle(repeated)
    return repeated
