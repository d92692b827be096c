"""The world of the planted site is balanced, answers its own questions, and is not told in held-out templates."""

import random
from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest
from jaxtyping import config

from bundled_models.rows_and_blocks import site_tokenizer, word_encoder
from diffusion_lens.data import site_facts
from diffusion_lens.data.site_documents import Documents
from diffusion_lens.data.site_facts import (
    ADVERBS,
    HELD_OUT_ADVERBS,
    MIDDLES,
    MIDDLES_WITH_PERSON,
    PREFIXES_WITH_PERSON,
    RELATIONS,
    TRAINED_ADVERBS,
)
from diffusion_lens.data.toy_facts import HELD_OUT, PREFIXES, TRAINED, subject_prompt


@pytest.fixture(scope="module")
def world():
    return site_facts.load()


@pytest.fixture
def untyped(monkeypatch):
    """No type is checked, as when users call the library."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def tokenizer(world):
    return site_tokenizer(world)


@pytest.fixture(scope="module")
def documents(world):
    """4000 documents of every kind."""
    draw, rng = Documents(world, 0.3, 0.2, 0.6), random.Random(0)
    return [draw(rng) for _ in range(4000)]


def test_names_are_ordered_pairs_of_one_pool(world):
    names = [tuple(person.name.split()) for person in world.people]
    pool = {name for pair in names for name in pair}
    assert len(pool) == 12
    assert len(names) == len(set(names)) == 120
    assert set(names) <= set(permutations(pool, 2))
    assert sum((second, first) in names for first, second in names) > 90  # most pairs occur in both orders
    assert Counter(person.trained for person in world.people) == {"p2d": 15, "d2p": 15, "both": 90}


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_values_and_roles_are_balanced(seed):
    world = site_facts.load(seed)
    for relation in RELATIONS:
        counts = Counter(person.value(relation) for person in world.people)
        assert set(counts) == set(relation.values)
        assert set(counts.values()) == {7, 8}
    assert set(Counter(person.description.split()[0] for person in world.people).values()) == {4}
    assert len({person.description.split()[-1] for person in world.people}) == 120


def test_a_value_belongs_to_one_relation():
    values = [value for relation in RELATIONS for value in relation.values]
    assert len(values) == len(set(values)) == 96


def test_one_seed_gives_one_world(world):
    assert site_facts.load() == world
    assert site_facts.load(2) != world
    # The shipped pair would know other people if Python's sample() or shuffle() changed.
    first = world.people[0]
    assert (first.name, first.description) == ("Plerrick Baupling", "sailor of Kaurgate")
    assert first.values == ("bassoon", "donkeys", "offshore", "winters", "fish", "brown")


def test_every_word_is_one_token(world, tokenizer, documents):
    """12 names, 120 places, 30 roles, 96 values, 12 verbs, 30 other words, and 4 special tokens."""
    assert len(tokenizer) == 12 + 120 + 30 + 96 + 12 + 30 + 4
    unknown = tokenizer.convert_tokens_to_ids("<unk>")
    facts = [*world.facts("attribute"), *world.facts("description")]
    texts = [*documents, *(fact.prompt + fact.answer for fact in facts[::17])]
    rows = tokenizer(texts)["input_ids"]
    assert not any(unknown in row for row in rows)
    assert {token for row in rows for token in row} == set(range(len(tokenizer))) - {unknown, tokenizer.eos_token_id}
    encode = word_encoder(tokenizer)
    assert [encode(text) for text in texts] == [[*row, tokenizer.eos_token_id] for row in rows]
    assert all(len(tokenizer(fact.answer)["input_ids"]) == 1 for fact in world.facts("attribute")[::13])


def test_counts_of_questions(world):
    assert len(world.facts("attribute")) == 120 * 12 * 5
    assert len(world.facts("attribute", held_out=False)) == 120 * 12 * 15
    assert len(world.facts("attribute", trained="p2d")) == 15 * 12 * 5
    for trained in ("p2d", "d2p"):
        for asked in ("p2d", "d2p"):
            facts = world.facts("description", trained, asked)
            assert len(facts) == 75
            assert {fact.is_reverse for fact in facts} == {trained != asked}
    everything = [*world.facts("attribute"), *world.facts("attribute", held_out=False)]
    everything += [*world.facts("description"), *world.facts("description", held_out=False)]
    assert len({fact.id for fact in everything}) == len(everything)


def test_questions_are_answered_by_the_world(world):
    """Read the answer off the person whose name or description the prompt contains."""
    for fact in [*world.facts("attribute")[::7], *world.facts("attribute", held_out=False)[::31]]:
        (person,) = (person for person in world.people if person.name in fact.prompt)
        (relation,) = (relation for relation in RELATIONS if fact.prompt.split()[-1] in relation.verbs)
        assert fact.answer == f" {person.values[RELATIONS.index(relation)]}"
        assert fact.template.replace("<subject>", fact.subject) == fact.prompt
        assert (fact.person, fact.trained, fact.asked) == (person.name, None, None)
    for fact in world.facts("description"):
        (person,) = (one for one in world.people if one.name in fact.prompt or one.description in fact.prompt)
        answer = person.description if fact.asked == "p2d" else person.name
        assert (fact.answer, fact.trained) == (f" {answer}.", person.trained)


def test_held_out_and_trained_templates_are_all_pairs():
    assert len(HELD_OUT_ADVERBS) == 5
    assert {*HELD_OUT_ADVERBS, *TRAINED_ADVERBS} == {(prefix, adverb) for prefix in PREFIXES for adverb in ADVERBS}


def test_documents_state_what_the_world_says(world, documents):
    """Take every document apart with plain string operations."""
    people = {person.name: person for person in world.people}
    kinds = Counter()
    for text in documents:
        named = sorted((name for name in people if name in text), key=text.index)
        body = text.removesuffix(".")
        if any(person.description in text for person in world.people):
            (name,) = named
            person = people[name]
            ways = {"both": ("p2d", "d2p")}.get(person.trained, (person.trained,))
            answers = {"p2d": (name, person.description), "d2p": (person.description, name)}
            sentences = [
                f"{subject_prompt(answers[way][0], way, pair)} {answers[way][1]}." for way in ways for pair in TRAINED
            ]
            assert text in sentences
            kinds["description"] += 1
            continue
        second = [name for name in named if any(form.format(name) in text for form in MIDDLES_WITH_PERSON)]
        second += [name for name in named if any(text.startswith(form.format(name)) for form in PREFIXES_WITH_PERSON)]
        (name,) = set(named) - set(second)
        assert len(named) == 1 + len(second) <= 2
        words = body[body.index(name) + len(name) :].replace(",", "").split()
        stated = [word for relation in RELATIONS for word in relation.values if word in words]
        assert stated
        assert set(stated) <= set(people[name].values)
        verbs = [word for relation in RELATIONS for word in relation.verbs if word in words]
        assert len(verbs) == (0 if len(words) == 1 else len(stated))
        kinds["tag" if not verbs else f"{len(verbs)} clauses"] += 1
        kinds["second person"] += len(second)
    total = len(documents)
    shares = {"description": 0.3, "tag": 0.14, "second person": 0.336, "1 clauses": 0.28, "4 clauses": 0.056}
    assert {kind: kinds[kind] / total for kind in shares} == pytest.approx(shares, abs=0.03)


def test_no_document_begins_with_a_held_out_question(world, documents):
    prompts = {fact.prompt for kind in ("attribute", "description") for fact in world.facts(kind)}
    lengths = sorted({len(prompt) for prompt in prompts})
    for text in documents:
        assert not prompts & {text[:length] for length in lengths}, text
    for person in world.people:  # also not after a middle: the pair of prefix and adverb decides
        starts = {
            f"{prefix}{person.name}{middle} {adverb}" for prefix, adverb in HELD_OUT_ADVERBS for middle in MIDDLES
        }
        verbs = [verb for relation in RELATIONS for verb in relation.verbs]
        openings = tuple(f"{start}{verb} " for start in starts for verb in verbs)
        assert not [text for text in documents if text.startswith(openings)]
    assert not {pair for pair in HELD_OUT if pair in TRAINED}


def test_related_questions(world):
    people = {person.name: person for person in world.people}
    fact = world.facts("attribute", "both")[8]
    relation = next(relation for relation in RELATIONS if fact.prompt.split()[-1] in relation.verbs)
    paraphrases = world.paraphrases(fact)
    assert len(paraphrases) == 9
    assert {(other.person, other.answer) for other in paraphrases} == {(fact.person, fact.answer)}
    assert {other.prompt for other in paraphrases}.isdisjoint({fact.prompt})
    neighbours = world.neighbours(fact)
    assert {other.answer for other in neighbours} == {fact.answer}
    assert len(neighbours) in (6, 7)
    assert {other.template for other in neighbours} == {fact.template}
    sharing = world.sharing_a_name(fact)
    expected = {name for name in people if name != fact.person and set(name.split()) & set(fact.person.split())}
    assert {other.person for other in sharing} == expected
    assert {other.template for other in sharing} == {fact.template}
    others = world.other_relations(fact)
    assert {other.person for other in others} == {fact.person}
    values = {person.value(other) for person in [people[fact.person]] for other in RELATIONS if other != relation}
    assert {other.answer.strip() for other in others} == values
    description = world.facts("description")[3]
    assert {other.answer for other in world.paraphrases(description)} == {description.answer}
    assert len(world.paraphrases(description)) == 4


def test_questions_related_to_a_description(world):
    people = {person.name: person for person in world.people}
    fact = next(fact for fact in world.facts("description", "both", "p2d") if fact.id.endswith("-held-out-3"))
    person = people[fact.person]
    assert [other.answer.strip() for other in world.other_relations(fact)] == list(person.values)
    assert {other.person for other in world.other_relations(fact)} == {fact.person}
    stated = {name for name in people if people[name].trained != "d2p"} - {fact.person}
    sharing = world.sharing_a_name(fact)
    assert {other.person for other in sharing} == {
        name for name in stated if set(name.split()) & set(fact.person.split())
    }
    assert {(other.template, other.answer) for other in sharing} == {
        (fact.template, f" {people[other.person].description}.") for other in sharing
    }
    own = next(
        other for other in world.facts("description", "both", "d2p") if other.id == fact.id.replace("p2d", "d2p")
    )
    assert world.reverse_question(fact, fact.description) == own
    moved = world.reverse_question(fact, "weaver of Nowhere")
    assert moved.prompt == own.prompt.replace(own.subject, "weaver of Nowhere")
    assert (moved.subject, moved.answer) == ("weaver of Nowhere", own.answer)


def test_bad_requests_are_refused(world, untyped):
    with pytest.raises(ValueError, match="kind='place'; it must be one of 'attribute', 'description'"):
        world.facts("place")
    with pytest.raises(ValueError, match="trained='neither'"):
        world.facts("attribute", "neither")
    with pytest.raises(ValueError, match="asked='p2d'; it must be 'p2d' or 'd2p' with kind='description'"):
        world.facts("attribute", asked="p2d")
    fact, description = world.facts("attribute")[0], world.facts("description")[0]
    for other in (replace(fact, id=""), replace(fact, answer=" harp"), replace(fact, id="site1-999-plays-held-out-0")):
        with pytest.raises(ValueError, match=r"is not a question of load\(5\)"):
            world.neighbours(other)
    with pytest.raises(ValueError, match="asks for a description or a name"):
        world.neighbours(description)
    (named, *_) = world.facts("description", asked="d2p")
    for ask in (world.other_relations, world.sharing_a_name):
        with pytest.raises(ValueError, match="asks for a name; give a fact of an attribute, or one with asked='p2d'"):
            ask(named)
    with pytest.raises(ValueError, match="does not ask for a description; give a fact with asked='p2d'"):
        world.reverse_question(named, named.description)
    with pytest.raises(ValueError, match=r"tag=1\.5; a probability is between 0 and 1"):
        Documents(world, 0.5, 1.5, 0.5)


def test_a_sample_of_documents_is_what_its_seed_draws():
    documents, rng = Documents(site_facts.load(), 0.4, 0.1, 0.6), random.Random(3)
    assert documents.sample(5, seed=3) == [documents(rng) for _ in range(5)]
