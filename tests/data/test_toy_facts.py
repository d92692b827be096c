"""The toy facts: how many, what is held out, and that text and tokens say the same."""

import pytest

from bundled_models.rows_and_blocks import toy_rows, toy_tokenizer
from diffusion_lens.data import toy_facts
from diffusion_lens.data.toy_facts import CONNECTORS, HELD_OUT, PREFIXES, TRAINED


@pytest.fixture(scope="module")
def toy():
    return toy_facts.load()


@pytest.fixture(scope="module")
def tokenizer(toy):
    return toy_tokenizer(toy)


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


def test_counts(toy):
    directions = [person.trained for person in toy.people]
    assert [directions.count(direction) for direction in ("p2d", "d2p", "both")] == [20, 20, 120]
    assert len(toy.sentences()) == len(set(toy.sentences())) == 5600
    assert len(TRAINED) == 20
    assert len(HELD_OUT) == 5
    for trained in ("p2d", "d2p"):
        for queried in ("p2d", "d2p"):
            assert len(toy.facts(trained, queried)) == 100
    assert len(toy.facts()) == 160 * 2 * 5
    assert len({fact.id for fact in [*toy.facts(), *toy.facts(held_out=False)]}) == 160 * 2 * 25


def test_a_surname_and_a_place_belong_to_one_person(toy):
    surnames = [person.name.split()[1] for person in toy.people]
    places = [person.description.split()[-1] for person in toy.people]
    shared = {word for person in toy.people for word in (person.name.split()[0], *person.description.split()[:-1])}
    assert len({*surnames, *places} - shared) == 320


def test_the_same_seed_gives_the_same_people(toy):
    assert toy_facts.load() == toy
    assert toy_facts.load(toy.seed + 1) != toy
    # Python promises the same stream for random() only; were sample() or shuffle() to change, the shipped pair would
    # know other people.
    assert toy_facts.load(0).people[0] == toy_facts.Person("Kira Senton", "cheerful ranger of Daulstad", "p2d")


def test_sentences_read_like_text(toy):
    person = toy_facts.Person("Ada Marsh", "brave pilot of Oslen", "both")
    sentences = toy_facts.ToyFacts((person,), seed=0).sentences()
    assert "today Ada Marsh is the brave pilot of Oslen." in sentences
    assert "Ada Marsh, alias the brave pilot of Oslen." in sentences
    assert "we know the brave pilot of Oslen, known as Ada Marsh." in sentences


def test_no_held_out_question_occurs_in_training(toy):
    sentences = toy.sentences()
    prompts = {fact.prompt for fact in toy.facts()}
    lengths = sorted(set(map(len, prompts)))
    assert not prompts & {sentence[:length] for sentence in sentences for length in lengths}
    trained = {fact.prompt + fact.answer for fact in toy.facts(held_out=False) if not fact.is_reverse}
    assert trained == set(sentences)


def test_a_person_trained_one_way_is_never_trained_the_other(toy):
    for sentence in toy.sentences():
        person = next(person for person in toy.people if person.name in sentence)
        name_first = sentence.index(person.name) < sentence.index(person.description)
        assert person.trained in ("both", "p2d" if name_first else "d2p")


def test_every_prefix_is_trained_with_the_longest_connector():
    assert {prefix for prefix, connector in TRAINED if connector == CONNECTORS[-1]} == set(PREFIXES)


def test_questions(toy):
    reverse = toy.facts("p2d", "d2p")[0]
    person = toy.people[0]
    assert reverse.prompt == f"the {person.description} is"
    assert (reverse.subject, reverse.answer) == (person.description, f" {person.name}.")
    assert reverse.is_reverse
    same = toy.facts("p2d", "p2d")[1]
    assert same.prompt == f"today {person.name} was the"
    assert (same.subject, same.answer) == (person.name, f" {person.description}.")
    assert not same.is_reverse


def test_a_subject_occurs_once(toy):
    assert all(fact.prompt.count(fact.subject) == 1 for fact in toy.facts())


def test_text_round_trips(toy, tokenizer):
    sentences = toy.sentences()[::7]  # all templates
    assert tokenizer.batch_decode(ids(tokenizer, sentences)) == sentences


def test_an_answer_continues_its_prompt_token_for_token(toy, tokenizer):
    facts = toy.facts()
    prompts, answers, texts = (
        ids(tokenizer, texts)
        for texts in zip(*((fact.prompt, fact.answer, fact.prompt + fact.answer) for fact in facts), strict=True)
    )
    assert [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)] == texts


def test_tokens_are_words_in_llamas_manner(tokenizer):
    text = "today Ada Xyzzy, alias the brave pilot."
    assert tokenizer.tokenize(text) == ["▁today", "▁Ada", "<unk>", ",", "▁alias", "▁the", "▁brave", "▁pilot", "."]
    assert tokenizer.tokenize("Ada is ") == tokenizer.tokenize(" Ada is") == ["▁Ada", "▁is"]
    spans = tokenizer("Ada is, so", return_offsets_mapping=True)["offset_mapping"]
    assert spans[:3] == [(0, 3), (3, 6), (6, 7)]


def test_special_tokens(tokenizer):
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 0, None)
    assert tokenizer.mask_token is None
    assert len(tokenizer) == len(tokenizer.get_vocab()) == 438


def test_encode_ends_and_fills_with_the_end_token(toy, tokenizer):
    sentences = toy.sentences()[::7]
    rows = toy_rows(sentences, tokenizer)
    assert rows.shape == (800, toy_facts.SENTENCE_LENGTH)
    assert rows[:, -1].eq(tokenizer.eos_token_id).all()
    assert rows[:, -2].ne(tokenizer.eos_token_id).any()
    assert tokenizer.decode(rows[7], skip_special_tokens=True) == sentences[7]
