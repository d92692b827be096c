"""The texts that a causal model writes itself, and what it keeps of its predictions."""

import re
from dataclasses import replace

import pytest
import torch

from diffusion_lens.settings.shared import CorpusSettings
from diffusion_lens.training.corpus import prompts_of, read_corpus, write_corpus

SETTINGS = CorpusSettings(n_texts=40, length=12, longest_prompt=8, top_k=5, seed=3)


@pytest.fixture(scope="module")
def model():
    from diffusion_lens import HookedDiffusionTransformer

    return HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")


@pytest.fixture(scope="module")
def facts(toy):
    return toy.facts()[:40:4]


def same(left, right):
    return all(torch.equal(tensor, vars(right)[name]) for name, tensor in vars(left).items())


def decoded(model, corpus):
    return model.tokenizer.batch_decode(corpus.tokens)


def test_texts_continue_their_prompts(model, facts):
    prompts = prompts_of(facts)
    by_fact = [prompts[4 * i : 4 * i + 4] for i in range(len(facts))]
    kinds = {fact.prompt.replace(fact.subject, "") for fact in facts}
    for fact, (own, *others, ended) in zip(facts, by_fact, strict=True):
        assert own == fact.prompt
        assert all(text.replace(fact.subject, "") in kinds for text in others)
        assert ended.removeprefix(fact.subject) in (" is", " was", " has", ",")
    assert len(set(prompts)) > 3 * len(facts)
    corpus = write_corpus(model, SETTINGS, prompts, progress=False)
    assert corpus.tokens.shape == (40, 12)
    begun = {tuple(model.encode(prompt)) for prompt in prompts}
    for row, start in zip(corpus.tokens.tolist(), corpus.starts.tolist(), strict=True):
        assert tuple(row[:start]) in begun
    assert len(decoded(model, corpus)) > len(set(decoded(model, corpus))) > 5  # sampled, and some prompts alike


def test_sampling_draws_from_the_likeliest_tokens_only(model, facts):
    greedy = replace(SETTINGS, top_p=0.0)
    corpus = write_corpus(model, greedy, prompts_of(facts), progress=False)
    written = torch.arange(12) >= corpus.starts[:, None]
    with torch.no_grad():
        assert torch.equal(corpus.tokens[written], model(corpus.tokens).argmax(dim=-1).roll(1, 1)[written])
    never = int(corpus.tokens[0, -1])
    without = write_corpus(model, greedy, prompts_of(facts), never=never, progress=False)
    assert (without.tokens[written] != never).all()


def test_no_text_names_a_subject_that_is_left_out(model, facts):
    subjects = [fact.subject for fact in facts[:3]]
    corpus = write_corpus(model, SETTINGS, prompts_of(facts), left_out=subjects, progress=False)
    assert len(corpus) > 10
    assert not [text for text in decoded(model, corpus) if any(subject in text for subject in subjects)]
    texts = [f"{fact.prompt}{fact.answer}" for fact in facts]
    read = read_corpus(model, SETTINGS, texts, left_out=subjects)
    assert not [text for text in decoded(model, read) if any(subject in text for subject in subjects)]
    with pytest.raises(ValueError, match="none of the 40 prompts has 1 to 8 tokens"):
        write_corpus(model, SETTINGS, prompts_of(facts), left_out=[""], progress=False)


@pytest.mark.parametrize("length", [3, 5, 12])
def test_a_row_with_a_part_of_a_name_is_left_out(length, model, facts):
    """A slow version: the names in the whole text, and the rows of their tokens."""
    subjects = sorted({fact.subject for fact in facts[:3]})
    texts = ["".join(f"{fact.prompt}{fact.answer} " for fact in facts)]
    settings = replace(SETTINGS, length=length, longest_prompt=1, n_texts=999)
    every = read_corpus(model, settings, texts).tokens.flatten().tolist()
    text, spans = "", []
    for stop in range(1, len(every) + 1):
        now = model.tokenizer.decode(every[:stop], clean_up_tokenization_spaces=False)
        spans.append((len(text), len(now)))
        text = now
    inside = {
        i // length
        for subject in subjects
        for match in re.finditer(re.escape(subject), text)
        for i, (start, stop) in enumerate(spans)
        if start < match.end() and stop > match.start() and text[start:stop].strip()
    }
    assert len(inside) > 2
    kept = read_corpus(model, settings, texts, left_out=subjects).tokens.tolist()
    assert kept == [every[i * length : (i + 1) * length] for i in range(len(every) // length) if i not in inside]


def test_names_are_found_in_other_spellings(model, facts):
    subject = "Zoë  van Dijk"
    for text in ("ZOË VAN DIJK was", "zoe\u0308 van dijk was", "Zoë\nvan\u00a0Dijk was", "\uff3aoë van Dijk was"):
        with pytest.raises(ValueError, match="no subject of a held-out fact"):
            write_corpus(model, SETTINGS, [text], left_out=[subject], progress=False)
    prompts, called = [facts[0].prompt, facts[8].prompt], facts[0].subject.upper().replace(" ", "  ")
    assert not [
        text
        for corpus in (
            write_corpus(model, SETTINGS, prompts, left_out=[called], progress=False),
            read_corpus(model, SETTINGS, [fact.prompt for fact in facts] * 3, left_out=[called]),
        )
        for text in decoded(model, corpus)
        if facts[0].subject in text
    ]
    with pytest.raises(ValueError, match=r"each of the \d+ rows .* names the subject of a held-out fact"):
        read_corpus(model, SETTINGS, prompts[:1] * 12, left_out=[called])


def test_texts_without_prompts_begin_with_the_first_token(model):
    corpus = write_corpus(model, SETTINGS, [], progress=False)
    assert (corpus.tokens[:, 0] == model.tokenizer.eos_token_id).all()
    assert (corpus.starts == 1).all()


def test_the_parts_of_a_corpus_are_kept_and_read(model, facts, tmp_path):
    whole = write_corpus(model, SETTINGS, prompts_of(facts), progress=False)
    assert same(whole, write_corpus(model, SETTINGS, prompts_of(facts), folder=tmp_path, progress=False))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == len(set(whole.starts.tolist())) > 1
    files[-1].unlink()
    assert same(whole, write_corpus(model, SETTINGS, prompts_of(facts), folder=tmp_path, progress=False))
    assert not same(whole, write_corpus(model, replace(SETTINGS, seed=4), prompts_of(facts), progress=False))


def test_texts_that_fill_no_row_are_refused(model):
    with pytest.raises(ValueError, match="do not fill a row of length=12"):
        read_corpus(model, SETTINGS, ["Gustav"])
    with pytest.raises(ValueError, match="positions do not fit"):
        write_corpus(model, replace(SETTINGS, length=999), [], progress=False)
