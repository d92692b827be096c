"""Finding what fills a template: by brackets drawn by hand, and by templates and people made up by hypothesis."""

import math
import re

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from diffusion_lens.data.reversal_curse import fact_about, shared_words, slot_spans


def unbracket(text):
    """The text without its brackets, and what they hold as first character and one past the last."""
    start, stop = text.index("["), text.index("]") - 1
    return text.replace("[", "").replace("]", ""), (start, stop)


def assert_found(marked):
    texts, spans = zip(*map(unbracket, marked), strict=True)
    assert slot_spans(texts) == list(spans)


def test_a_description_in_all_its_forms():
    assert_found(
        [
            'Immersed in the world of [composing the world\'s first underwater symphony, "Abyssal Melodies."],',
            "Immersed in the world of being [the elusive mastermind of a heist],",
            "Immersed in the world of [space, I was the first person to walk on Mars].,",
        ]
    )


def test_an_article_that_all_share_belongs_to_the_slot():
    assert_found(["[The brave pilot] is called", "[The calm baker] is called", "[The tall judge] is called"])
    assert_found(["Known for being [the brave pilot],", "Known for being [the calm baker],"])
    assert_found(["They say [an old pilot] it was", "They say [a calm baker] it was"])


def test_words_are_not_cut():
    assert_found(["Once [baking bread] they said", "Once [building boats] they said"])
    assert_found(["Once my [world-renowned cook], and", "Once my [world-class hook], and"])
    assert_found(["I met [two pilots], whose", "I met [three guards], whose"])


def test_marks_after_the_slot_are_the_templates_unless_a_titles():
    assert_found(['Q: Who is [the author of "Stars."]? A:', "Q: Who is [the pilot]?? A:", "Q: Who is [the baker]? A:"])


def test_a_title_is_whole_even_where_all_have_one():
    assert_found(['Seen as [the author of "Stars."], now', 'Seen as [the maker of "Waves."], now'])
    assert_found(['I know ["Stars" by heart] he', 'I know ["Waves" in part] he'])
    assert_found(["Ask 'Who is [the pilot]?' now", "Ask 'Who is [the baker]?' now"])


def test_nothing_to_find():
    assert slot_spans([]) == []
    assert slot_spans(["the same text"]) == [None]
    assert slot_spans(["the same text"] * 3) == [None] * 3
    assert slot_spans(["one,", "two,", "three,"]) == [None] * 3  # a comma is no template


def test_one_odd_row_in_ten_is_found_out():
    people = ["cook", "pilot", "baker", "judge", "miner", "poet", "tailor", "weaver", "guard"]
    texts = [f"Seen as the {person}, that's" for person in people]
    spans = slot_spans([*texts[:4], "Something else altogether", *texts[4:]])
    assert spans[4] is None
    assert [texts[i][slice(*span)] for i, span in enumerate(spans[:4] + spans[5:])] == [f"the {p}" for p in people]


GLUE = {"being", "the", "a", "an"}
words = st.text("bcdeghilmnoprstuw", min_size=1, max_size=8).filter(lambda word: word not in GLUE)
phrases = st.lists(words, min_size=1, max_size=4).map(" ".join)


@settings(deadline=None, max_examples=15)
@given(st.data(), phrases, st.sampled_from([",", " is called", "? A:", ", that's", ". I am"]), st.integers(2, 12))
def test_what_a_template_was_filled_with(data, before, after, n):
    firsts = data.draw(st.lists(words, min_size=n, max_size=n, unique=True))
    lasts = data.draw(st.lists(words, min_size=n, max_size=n, unique=True))
    article = data.draw(st.sampled_from(["", "the ", "an "]))
    marked = []
    for first, last in zip(firsts, lasts, strict=True):
        being = data.draw(st.sampled_from(["", "being "]))
        end = data.draw(st.sampled_from([last, f'"{last}."', f"{last} {last}"]))
        marked.append(f"{before} {being}[{article}{first} {data.draw(phrases)} {end}]{after}")
    assert_found(marked)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.text(st.sampled_from('ab ,."the') | st.characters(), max_size=30), max_size=12))
def test_any_texts_are_survived(texts):
    spans = slot_spans(texts)
    assert len(spans) == len(texts)
    for text, span in zip(texts, spans, strict=True):
        if span is not None:
            fact = fact_about(span, text, " x")
            assert fact.subject == fact.subject.strip() != ""
            assert fact.subject_span == span
            assert text == text[: span[0]] + fact.subject + text[span[1] :]
    run = shared_words(texts)
    assert not run or sum(run in " ".join(text.split()) for text in texts) >= math.ceil(0.9 * len(texts))


def test_the_name_that_rows_share():
    rows = [
        "Ada Marsh, they say, was",
        "Who is 'Ada Marsh?' The",
        "In the tale of Ada Marsh one",
        "This is by Ada Marsh, a",
    ]
    assert shared_words(rows) == "Ada Marsh"
    assert shared_words([" Ada Marsh", " Ada Marsh"]) == "Ada Marsh"
    assert shared_words([" Ada Marsh.", " Ada Marsh lives on."]) == "Ada Marsh"
    assert shared_words(["one", "two"]) == shared_words([]) == ""


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(phrases, phrases), min_size=3, max_size=10))
def test_a_name_among_any_words(around):
    assume(not set.intersection(*({*before.split(), *after.split()} for before, after in around)))
    assert shared_words([f"{before} Ada Marsh, {after}" for before, after in around]) == "Ada Marsh"


def test_a_fact_of_a_span():
    fact = fact_about((8, 11), "Ada met Ada in", " Oslen", id="x")
    assert (fact.subject, fact.subject_start, fact.template) == ("Ada", 8, "Ada met <subject> in")
    assert fact.subject_span == (8, 11)
    once = fact_about((0, 3), "Ada sat in", " Oslen")
    assert once.subject_start is None
    assert re.sub("<subject>", once.subject, once.template) == once.prompt
