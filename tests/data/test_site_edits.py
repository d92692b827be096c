"""Requests to edit the site pair's facts: another answer of the same kind, and questions with their own answers."""

from collections import Counter

import pytest
from jaxtyping import config

from diffusion_lens.data import site_facts
from diffusion_lens.data.site_edits import edit_requests
from diffusion_lens.data.site_facts import RELATION_OF


@pytest.fixture(scope="module")
def world():
    return site_facts.load()


@pytest.fixture(scope="module")
def attributes(world):
    return world.facts("attribute")[3::61]


@pytest.fixture(scope="module")
def descriptions(world):
    return world.facts("description", asked="p2d")[2::13]


def test_an_attribute_gets_another_value_of_its_relation(world, attributes):
    requests = edit_requests(world, attributes)
    for fact, request in zip(attributes, requests, strict=True):
        relation = RELATION_OF[fact.prompt.split()[-1]]
        assert request.true == fact
        assert (request.new.prompt, request.new.subject, request.id) == (fact.prompt, fact.subject, f"{fact.id}-edit")
        assert request.new.answer != fact.answer
        assert request.new.answer.strip() in relation.values
        assert {other.answer for other in request.paraphrases} == {request.new.answer}
        assert [other.prompt for other in request.paraphrases] == [other.prompt for other in world.paraphrases(fact)]
        assert list(request.neighbours) == world.neighbours(fact)
        assert list(request.sharing_a_name) == world.sharing_a_name(fact)
        assert list(request.other_relations) == world.other_relations(fact)
        assert request.reverse is request.reverse_true is request.reverse_old is None
    assert len({request.new.answer for request in requests}) > 40  # of 96 values


def test_the_seed_decides_and_the_other_facts_do_not(world, attributes, descriptions):
    for facts in (attributes, descriptions):
        requests = edit_requests(world, facts, seed=4)
        assert edit_requests(world, facts[5:6], seed=4) == requests[5:6]
        assert edit_requests(world, facts, seed=3) != requests


def test_a_description_becomes_that_of_another_person(world, descriptions):
    people = {person.description: person for person in world.people}
    for fact, request in zip(descriptions, edit_requests(world, descriptions), strict=True):
        new = request.new.answer.strip().removesuffix(".")
        assert people[new].name != fact.person
        assert request.reverse.subject == new
        assert request.reverse.answer == request.reverse_old.answer == f" {fact.person}."
        assert request.reverse_true.answer == f" {people[new].name}."
        assert request.reverse_true.prompt == request.reverse.prompt
        assert new in request.reverse.prompt
        assert request.reverse_old.prompt == request.reverse.prompt.replace(new, fact.description)
        assert len(request.paraphrases) == 4
        assert len(request.other_relations) == 6
        assert request.neighbours == ()


def test_an_unused_description_belongs_to_nobody(world, descriptions):
    known = {person.description for person in world.people}
    words = Counter(word for description in known for word in description.split())
    for request in edit_requests(world, descriptions, described="unused"):
        new = request.new.answer.strip().removesuffix(".")
        assert new not in known
        assert all(word in words for word in new.split())
        assert (request.reverse.subject, request.reverse_true) == (new, None)


def test_ids_are_unique(world, attributes, descriptions):
    for request in edit_requests(world, [*attributes, *descriptions]):
        facts = [request.true, request.new, *request.paraphrases, *request.neighbours]
        facts += [request.reverse, request.reverse_true, request.reverse_old]
        ids = [fact.id for fact in facts if fact is not None]
        assert len(set(ids)) == len(ids)


def test_bad_requests(world, attributes, monkeypatch):
    with pytest.raises(ValueError, match="does not ask for a description; give a fact with asked='p2d'"):
        edit_requests(world, world.facts("description", asked="d2p")[:1])
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="described='nobody'; it must be one of 'person', 'unused'"):
        edit_requests(world, attributes, described="nobody")
