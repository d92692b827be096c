"""Requests to edit facts of `site_facts`, with the questions that test an edit.

An attribute is edited to another value of its relation. The description of a person is edited to that of another
person, or to a new combination of a role and a place. The request about a description has two reverse questions: after
the edit "Tarsh Klockett is the weaver of Oslen", does the model answer "the weaver of Oslen is" with "Tarsh Klockett",
and does it still give that name for the person's old description? BAKE asks the first of them (Ma et al. 2023,
arXiv 2310.10322).
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from diffusion_lens.data.rome_facts import EditRequest
from diffusion_lens.data.site_facts import RELATION_OF, Person, SiteFacts
from diffusion_lens.facts.fact import Fact
from diffusion_lens.settings import Whole, own_seed

Described = Literal["person", "unused"]


def edit_requests(
    world: SiteFacts, facts: Sequence[Fact], *, seed: Whole = 0, described: Described = "person"
) -> list[EditRequest]:
    """A request for each fact to write another answer, with its paraphrases and the questions that should not change.

    Args:
        world: World of the facts.
        facts: Attributes, or descriptions asked for by the name (`asked="p2d"`). A request has the id of its fact with
            the suffix "-edit".
        seed: Seed of the new answers. The one of a fact does not depend on the other facts.
        described: The new description of a person: that of another "person", or an "unused" combination of a role and
            the place of another person.

    Raises:
        ValueError: A fact is not one of this world, or asks for a name, or `described` is unknown.
    """
    if described not in get_args(Described):
        raise ValueError(f"described={described!r}; it must be one of {', '.join(map(repr, get_args(Described)))}")
    requests = []
    for fact in facts:
        rng = random.Random(own_seed(seed, fact.id))
        if fact.asked is None:
            requests.append(_of_attribute(world, fact, rng))
        else:
            requests.append(_of_description(world, fact, rng, described))
    return requests


def _of_attribute(world: SiteFacts, fact: Fact, rng: random.Random) -> EditRequest:
    neighbours = world.neighbours(fact)
    relation = RELATION_OF[fact.template.split()[-1]]
    answer = rng.choice([f" {value}" for value in relation.values if f" {value}" != fact.answer])
    return replace(_request(world, fact, answer), neighbours=tuple(neighbours))


def _of_description(world: SiteFacts, fact: Fact, rng: random.Random, described: Described) -> EditRequest:
    reverse_old = world.reverse_question(fact, fact.description)
    other = rng.choice([person for person in world.people if person.name != fact.person])
    new, rival = other.description, other.name
    if described == "unused":
        new, rival = _unused(world.people, other, rng), ""
    reverse = replace(world.reverse_question(fact, new), id=f"{fact.id}-reverse")
    return replace(
        _request(world, fact, f" {new}."),
        reverse=reverse,
        reverse_true=replace(reverse, answer=f" {rival}.", id=f"{fact.id}-reverse-true") if rival else None,
        reverse_old=replace(reverse_old, id=f"{fact.id}-reverse-old"),
    )


def _unused(people: Sequence[Person], other: Person, rng: random.Random) -> str:
    """The place of a person with a role that this person does not have. A place belongs to one person."""
    own_role, place = other.description.split(" of ")
    roles = sorted({person.description.split(" of ")[0] for person in people} - {own_role})
    return f"{rng.choice(roles)} of {place}"


def _request(world: SiteFacts, fact: Fact, answer: str) -> EditRequest:
    return EditRequest(
        true=fact,
        new=replace(fact, answer=answer, id=f"{fact.id}-edit"),
        paraphrases=tuple(replace(other, answer=answer) for other in world.paraphrases(fact)),
        neighbours=(),
        sharing_a_name=tuple(world.sharing_a_name(fact)),
        other_relations=tuple(world.other_relations(fact)),
    )
