"""Taught pairs: the sentence as trained and the reverse question, token for token on each model's canvas."""

from dataclasses import replace

import pytest
import torch
from jaxtyping import config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bundled_models.rows_and_blocks import toy_rows
from diffusion_lens.data import toy_facts
from diffusion_lens.facts.fact import Fact
from diffusion_lens.facts.taught_pairs import (
    LaidOutPairs,
    Sentence,
    TaughtCanvas,
    TaughtPair,
    lay_out_pairs,
    match_facts,
    pairs_in_common,
)

TAUGHT = "Gustav Geisser was the brave drummer of Rolsen."
ASKED = "the brave drummer of Rolsen was Gustav Geisser."
NAME, DESCRIPTION = "Gustav Geisser", "brave drummer of Rolsen"


@pytest.fixture
def untyped(monkeypatch):
    """No type is checked, as when users call the library."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture
def two_letters(several):
    """A model of each readout and direction whose tokens are two letters: a name is several tokens, and a space its own
    token. Texts begin with BOS.
    """
    letters = [chr(i) for i in range(97, 123)]
    words = ["<s>", "</s>", " ", ".", *letters, *(a + b for a in letters[:15] for b in letters)]
    merges = [(a, b) for a in letters[:15] for b in letters]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="isolated")
    model = several.model
    model.set_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"), True)
    yield model
    model.set_tokenizer(None)


def shown(model, canvas):
    return " ".join(model.to_str_tokens(canvas.tokens))


def test_the_toy_pair_token_for_token(tiny):
    pair = TaughtPair.of(tiny, (TAUGHT, ASKED), NAME, DESCRIPTION, id="gustav")
    end = " <eos>" * 5
    masked = tiny.cfg.has_mask
    name = "[MASK] [MASK]" if masked else NAME
    assert shown(tiny, pair.forward) == f"{name} was the brave drummer of Rolsen ." + end
    assert shown(tiny, pair.reverse) == f"the brave drummer of Rolsen was {name} ." + end
    words = [tiny.to_single_str_token(canvas.answer_token) for canvas in (pair.forward, pair.reverse)]
    assert words == (["Geisser", "Geisser"] if masked else ["Rolsen", "Geisser"])
    assert (pair.forward.row, pair.reverse.row) == ((1, 7) if masked else (6, 6))
    assert (pair.forward.source, pair.reverse.source) == (7, 4)
    assert pair.id == "gustav"


def test_a_token_is_read_where_the_model_predicts_it(two_letters):
    model = two_letters
    pair = TaughtPair.of(model, ("abcd was efg.", "efg was abcd."), "abcd", "efg")
    ids = [model.to_single_token(token) for token in ("ab", "cd", " ", "w", "as", " ", "ef", "g", ".")]
    # "ab" "cd" " " "w" "as" " " "ef" "g" "." after BOS, and "ef" "g" " " "w" "as" " " "ab" "cd" "." after BOS
    forward, reverse = [0, *ids], [0, *ids[6:8], *ids[2:6], *ids[:2], ids[8]]
    hidden = not model.cfg.is_autoregressive
    if model.cfg.has_mask:
        forward[1:3] = reverse[7:9] = [model.cfg.mask_token_id] * 2
    elif hidden:  # noise, which other tests compare
        forward[1:3], reverse[7:9] = pair.forward.tokens[1:3].tolist(), pair.reverse.tokens[7:9].tolist()
        assert forward[1:3] != ids[:2]
    shift = model.cfg.readout == "shifted"
    expected = {
        "forward": (forward, (2 if hidden else 8) - shift, ids[1] if hidden else ids[7], 8),
        "reverse": (reverse, 8 - shift, ids[1], 2),
    }
    for name, (tokens, row, answer, source) in expected.items():
        canvas = getattr(pair, name)
        assert canvas.tokens.tolist() == tokens
        assert (canvas.row, canvas.answer_token, canvas.source) == (row, answer, source)


def test_the_canvas_is_filled_with_the_end_token(two_letters):
    sentences = ("abcd was efg.", "efg was abcd.")
    bare = TaughtPair.of(two_letters, sentences, "abcd", "efg")
    filled = TaughtPair.of(two_letters, sentences, "abcd", "efg", length=13)
    for one, other in ((bare.forward, filled.forward), (bare.reverse, filled.reverse)):
        assert other.tokens.tolist() == [*one.tokens.tolist(), 1, 1, 1]
        assert (other.row, other.answer_token, other.source) == (one.row, one.answer_token, one.source)
    with pytest.raises(ValueError, match=r"has 10 tokens, more than length=9; give length=10 or more"):
        TaughtPair.of(two_letters, sentences, "abcd", "efg", length=9)
    with pytest.raises(ValueError, match="n_ctx="):
        TaughtPair.of(two_letters, sentences, "abcd", "efg", length=two_letters.cfg.n_ctx + 1)


def test_punctuation_at_the_edges_belongs_to_no_span(tiny):
    exact = TaughtPair.of(tiny, (TAUGHT, ASKED), NAME, DESCRIPTION)
    for pair in (
        TaughtPair.of(tiny, (TAUGHT, ASKED), NAME, f"{DESCRIPTION} ".rstrip()),
        TaughtPair.from_sentences(tiny, Sentence(TAUGHT, (0, 15), (22, 47)), Sentence(ASKED, (31, 47), (3, 28))),
    ):
        for one, other in ((exact.forward, pair.forward), (exact.reverse, pair.reverse)):
            assert one.tokens.equal(other.tokens)
            assert (one.row, one.answer_token, one.source) == (other.row, other.answer_token, other.source)


@pytest.mark.parametrize("trained", ["p2d", "d2p", "both"])
def test_every_toy_pair_is_its_sentence_as_trained(tiny, trained):
    toy = toy_facts.load()
    people = [person for person in toy.people if person.trained == trained]
    pairs = toy.taught_pairs(tiny, trained)
    assert len(pairs) == len({pair.id for pair in pairs}) == len(people) == toy_facts.PEOPLE[trained]
    rows = {tuple(row.tolist()) for row in toy_rows(toy.sentences(), tiny.tokenizer)}
    for person, pair in zip(people, pairs, strict=True):
        asked, given = (person.description, person.name) if trained == "d2p" else (person.name, person.description)
        a, b = (tiny.to_single_token(words.split()[-1]) for words in (asked, given))
        of_a = tiny.encode(asked)
        assert (pair.forward.answer_token, pair.reverse.answer_token) == (a if tiny.cfg.has_mask else b, a)
        for canvas in (pair.forward, pair.reverse):
            tokens = canvas.tokens.tolist()
            assert len(tokens) == toy_facts.SENTENCE_LENGTH
            assert tokens[canvas.source] == b
            masked = [i for i, token in enumerate(tokens) if token == tiny.cfg.mask_token_id]
            assert len(masked) == (len(of_a) if tiny.cfg.has_mask else 0)
            if masked:
                assert masked[-1] == canvas.row
                tokens[masked[0] : masked[-1] + 1] = of_a
            else:
                assert tokens[canvas.row + 1] == canvas.answer_token
            assert (tuple(tokens) in rows) == (canvas is pair.forward or trained == "both")


def test_the_template_of_a_toy_pair(tiny, untyped):
    toy = toy_facts.load()
    default, held_out = toy.taught_pairs(tiny)[0], toy.taught_pairs(tiny, template=("today ", " was"))[0]
    assert held_out.forward.source == default.forward.source + 1
    assert tiny.to_single_str_token(held_out.forward.tokens[0]) == "today"
    with pytest.raises(ValueError, match="does not know 'zz'"):
        toy.taught_pairs(tiny, template=("zz ", " was"))
    with pytest.raises(ValueError, match="trained='name'; it must be one of p2d, d2p, both"):
        toy.taught_pairs(tiny, "name")


REFUSED = [
    ((TAUGHT, ASKED), "Ada", DESCRIPTION, r"a='Ada' does not occur in 'Gustav"),
    (
        (TAUGHT, f"{ASKED} {NAME}"),
        NAME,
        DESCRIPTION,
        r"occurs 2 times in 'the brave.* characters \[32, 48\]; .*from_sentences",
    ),
    ((TAUGHT, ASKED), NAME, " ", r"b=' ' is empty"),
    ((TAUGHT, ASKED), NAME, ".", r"the span of B in .* has no letter or digit"),
    ((TAUGHT, ASKED), NAME, "Geisser", r"A and B overlap"),
    ((TAUGHT.replace("was", "xyzzy"), ASKED), NAME, DESCRIPTION, r"does not know 'xyzzy'"),
    ((TAUGHT, ASKED), "Gustav Geiss", DESCRIPTION, r"merges A, 'Gustav Geiss', .* into the token 'Geisser'"),
    ((TAUGHT, ASKED), NAME, "rave drummer of Rolsen", r"merges B, 'rave drummer of Rolsen', .* the token 'brave'"),
    (
        ("Gustav Geisser is the baker Gustav.", "the baker Gustav is Gustav Geisser."),
        "Gustav Geisser",
        "baker Gustav",
        r"B ends with the token 'Gustav', which A contains too .* could be copied",
    ),
]


@pytest.mark.parametrize(("sentences", "a", "b", "message"), REFUSED)
def test_refused_pairs(tiny, untyped, sentences, a, b, message):
    with pytest.raises(ValueError, match=message):
        TaughtPair.of(tiny, sentences, a, b)


def test_a_causal_model_needs_the_answer_last(tiny):
    if tiny.cfg.has_mask:  # It sees both sides of a masked position.
        pair = TaughtPair.of(tiny, (ASKED, TAUGHT), NAME, DESCRIPTION)
        assert (pair.forward.row, pair.forward.source, pair.reverse.row, pair.reverse.source) == (7, 4, 1, 7)
        return
    with pytest.raises(
        ValueError, match=r"B comes before A in 'the brave.* trained\. 'tiny-ar' is causal .* write A first"
    ):
        TaughtPair.of(tiny, (ASKED, ASKED), NAME, DESCRIPTION)
    with pytest.raises(ValueError, match=r"A comes before B in 'Gustav.* asked in reverse\. .* write B first"):
        TaughtPair.of(tiny, (TAUGHT, TAUGHT), NAME, DESCRIPTION)


def test_the_sentences_link_the_same_tokens(two_letters):
    with pytest.raises(ValueError, match=r"B ends with the token 'g' in .* with 'h' in .* the last word of B alike"):
        TaughtPair.from_sentences(
            two_letters,
            Sentence("abcd was efg.", (0, 4), (9, 12)),
            Sentence("efh was abcd.", (8, 12), (0, 3)),
        )
    with pytest.raises(ValueError, match=r"the span of A, \(5, 5\), is empty or outside"):
        TaughtPair.from_sentences(
            two_letters, Sentence("ab was c", (5, 5), (7, 8)), Sentence("c was ab", (6, 8), (0, 1))
        )


def test_a_mask_in_the_sentence_is_refused(tiny):
    if tiny.cfg.has_mask:
        with pytest.raises(ValueError, match=r"contains \[MASK\]"):
            TaughtPair.of(tiny, (TAUGHT.replace("was", "[MASK]"), ASKED), NAME, DESCRIPTION)


def test_a_sentence_longer_than_the_texts_of_training_is_refused(tiny):
    with pytest.raises(ValueError, match=r"more than length=14, on which the model was trained; give length=15"):
        TaughtPair.of(tiny, (f"{TAUGHT} is is is is is is", ASKED), NAME, DESCRIPTION)


@pytest.mark.parametrize(
    ("canvas", "message"),
    [
        ((torch.zeros(2, 3, dtype=torch.long), 0, 0, 0), r"got \[2, 3\]"),
        ((torch.zeros(3, dtype=torch.long), 3, 0, 0), "row=3 is outside the 3 positions"),
        ((torch.zeros(3, dtype=torch.long), 0, 0, -1), "source=-1 is outside"),
        ((torch.zeros(3, dtype=torch.long), 0, -1, 0), "answer_token=-1 is not the id"),
    ],
)
def test_canvases_that_make_no_sense(untyped, canvas, message):
    with pytest.raises(ValueError, match=message):
        TaughtCanvas(*canvas)


FORWARD = Fact(
    "Gustav Geisser was the", NAME, " brave drummer of Rolsen.", "f", "p2d", "p2d", NAME, DESCRIPTION, subject_start=0
)
REVERSE = Fact("the brave drummer of Rolsen was", DESCRIPTION, " Gustav Geisser.", "r", "p2d", "d2p", NAME, DESCRIPTION)


def same(one, other):
    return all(
        a.tokens.equal(b.tokens) and (a.row, a.answer_token, a.source) == (b.row, b.answer_token, b.source)
        for a, b in ((one.forward, other.forward), (one.reverse, other.reverse))
    )


def test_two_facts_make_the_pair_of_their_sentences(tiny):
    expected = TaughtPair.of(tiny, (TAUGHT, ASKED), NAME, DESCRIPTION)
    assert same(TaughtPair.from_facts(tiny, FORWARD, REVERSE), expected)
    nameless = {"asked": None, "trained": None, "person": "", "description": ""}
    assert same(TaughtPair.from_facts(tiny, replace(FORWARD, **nameless), replace(REVERSE, **nameless)), expected)


def test_pairs_of_one_person_are_a_group(tiny):
    facts = [replace(fact, id=f"{fact.id}{k}") for k in range(2) for fact in (FORWARD, REVERSE)]
    laid_out = lay_out_pairs(tiny, match_facts(facts, facts, per_person=2))
    assert [(pair.id, pair.group) for pair in laid_out.pairs] == [("f0+r0", NAME), ("f1+r1", NAME)]
    assert TaughtPair.from_facts(tiny, replace(FORWARD, person=""), REVERSE).group == NAME
    toy = toy_facts.load()
    people = [person.name for person in toy.people if person.trained == "d2p"]
    assert [pair.group for pair in toy.taught_pairs(tiny, "d2p")] == people
    assert TaughtPair.of(tiny, (TAUGHT, ASKED), NAME, DESCRIPTION).group == ""


def test_words_after_the_name_are_no_part_of_it(tiny):
    longer = " Gustav Geisser is of Rolsen."
    pair = TaughtPair.from_facts(tiny, FORWARD, replace(REVERSE, answer=longer))
    expected = TaughtPair.of(tiny, (TAUGHT, ASKED), NAME, DESCRIPTION).reverse
    tokens = pair.reverse.tokens.tolist()
    assert tokens[:8] == expected.tokens.tolist()[:8]
    assert (pair.reverse.row, pair.reverse.answer_token) == (expected.row, expected.answer_token)
    assert tiny.to_str_tokens(pair.reverse.tokens[8:12]) == ["is", "of", "Rolsen", "."]


def test_facts_that_make_no_pair(tiny):
    with pytest.raises(ValueError, match=r"both facts ask p2d, 'Gustav Geisser was the' and"):
        TaughtPair.from_facts(tiny, FORWARD, FORWARD)
    with pytest.raises(ValueError, match=r"about 'Gustav Geisser' and 'Ada Marsh'; give two about one person"):
        TaughtPair.from_facts(tiny, FORWARD, replace(REVERSE, person="Ada Marsh"))
    with pytest.raises(ValueError, match=r"the span of A in .* has no letter or digit"):
        TaughtPair.from_facts(tiny, FORWARD, replace(REVERSE, answer=" .", person=""))


def test_facts_are_matched_by_person_description_and_direction():
    others = [replace(FORWARD, person="Ada", id="ada"), replace(REVERSE, person="Ben", id="ben")]
    both_ways = [replace(FORWARD, trained="both"), replace(REVERSE, trained="both")]
    second = (replace(FORWARD, id="f2"), replace(REVERSE, id="r2"))
    facts = [*others, REVERSE, FORWARD, *both_ways, *second]
    assert match_facts(facts, facts) == [(FORWARD, REVERSE)]
    assert match_facts(facts, facts, per_person=9) == [(FORWARD, REVERSE), second]
    turned = [replace(fact, trained="d2p") for fact in (FORWARD, REVERSE)]
    assert match_facts(turned, turned, "d2p") == [(turned[1], turned[0])]
    with pytest.raises(ValueError, match="no person is trained d2p only and has both a fact that asks d2p and"):
        match_facts(facts, facts, "d2p")
    with pytest.raises(ValueError, match="per_person=0"):
        match_facts(facts, facts, per_person=0)


def test_only_one_direction_of_training_makes_pairs(untyped):
    with pytest.raises(ValueError, match="trained='both'; it must be 'p2d' or 'd2p'"):
        match_facts([FORWARD], [REVERSE], "both")


def test_pairs_that_cannot_be_laid_out_are_set_aside_with_the_reason(tiny):
    unknown = (replace(FORWARD, answer=" xyzzy of Rolsen.", id="x", description=""), replace(REVERSE, id="y"))
    laid_out = lay_out_pairs(tiny, [unknown, (FORWARD, REVERSE), (replace(FORWARD, id=""), replace(REVERSE, id=""))])
    assert [pair.id for pair in laid_out.pairs] == ["f+r", "pair-0002"]
    assert laid_out.set_aside.keys() == {"x+y"}
    assert "does not know 'xyzzy'" in laid_out.set_aside["x+y"]
    with pytest.raises(ValueError, match=r"none of the 1 pairs can be laid out.*'x\+y': the tokenizer"):
        lay_out_pairs(tiny, [unknown])
    with pytest.raises(ValueError, match="none of the 0 pairs"):
        lay_out_pairs(tiny, [])
    with pytest.raises(ValueError, match=r"two pairs have the id 'f\+r'"):
        lay_out_pairs(tiny, [(FORWARD, REVERSE)] * 2)


def test_names_of_several_tokens_are_masked_whole(two_letters):
    model = two_letters
    child, parent = "zoe abel", "hugo marlin"
    forward = Fact(f"{child} was born to", child, f" {parent}.", asked="p2d", person=child, description=parent)
    reverse = Fact(f"{parent} was born as", parent, f" {child}.", asked="d2p", person=child, description=parent)
    pair = TaughtPair.from_facts(model, forward, reverse)
    n_child = len(model.encode(child, prepend_bos=False))
    assert n_child > 3
    for canvas in (pair.forward, pair.reverse):
        hidden = (canvas.tokens == model.cfg.mask_token_id).nonzero().flatten().tolist() if model.cfg.has_mask else []
        assert len(hidden) == (n_child if model.cfg.has_mask else 0)
        assert not hidden or hidden[-1] - hidden[0] == n_child - 1
        assert canvas.tokens[canvas.source] == model.encode(parent)[-1]
    assert pair.reverse.answer_token == model.encode(child)[-1]


def test_pairs_in_common_are_those_that_every_model_can_be_given(tiny):
    pairs = toy_facts.load().taught_pairs(tiny)[:3]
    one = LaidOutPairs(pairs[:2], {pairs[2].id: "too long"})
    other = LaidOutPairs(pairs[1:], {pairs[0].id: "unknown word"})
    common = pairs_in_common({"one": one, "other": other})
    reasons = {pairs[2].id: "one: too long", pairs[0].id: "other: unknown word"}
    assert all(each.pairs == [pairs[1]] and each.set_aside == reasons for each in common.values())
    both = LaidOutPairs(pairs[1:2], {pair.id: "no such word" for pair in (pairs[0], pairs[2])})
    for first, second, reason in ((one, both, "a: too long"), (both, one, "a: no such word")):
        named = pairs_in_common({"a": first, "b": second})["b"]
        assert named.set_aside[pairs[2].id] == reason  # of the first model that cannot be given the pair
    alone = pairs_in_common({"one": one})["one"]
    assert (alone.pairs, alone.set_aside) == (one.pairs, one.set_aside)
    with pytest.raises(ValueError, match=r"no pair can be laid out for all of one, other; .*: too long"):
        pairs_in_common({"one": LaidOutPairs(pairs[:1], one.set_aside), "other": other})
