"""A ragged batch of tokens: each row gives what it gives alone, or the batch is refused."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from diffusion_lens import HookedDiffusionTransformer

SHORT, LONG = "Gustav Geisser is the", "people say Gustav Geisser was the"
CLOSE = dict(rtol=1e-5, atol=2e-5)
pytestmark = pytest.mark.filterwarnings("ignore:no position of these tokens is")  # whole texts are compared


@pytest.fixture(scope="module", params=["tiny-mdm", "tiny-ar"])
def own_pad(request):
    """A model whose tokenizer has a padding token that is nothing else: its last word is renamed."""
    model = HookedDiffusionTransformer.from_pretrained(request.param, device="cpu")
    backend = json.loads(model.tokenizer.backend_tokenizer.to_str())
    vocab = backend["model"]["vocab"]
    vocab["<pad>"] = free = vocab.pop(max(vocab, key=vocab.get))
    renamed = Tokenizer.from_str(json.dumps(backend))
    model.set_tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=renamed, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>")
    )
    assert model.padding.own_id == model.padding.id == free
    return model


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_read_off_the_tokens_where_they_say_it(own_pad, side):
    tokens = own_pad.to_tokens([SHORT, LONG], padding_side=side)
    logits, cache = own_pad.run_with_cache(tokens, names_filter="blocks.1.hook_resid_post")
    real = tokens != own_pad.padding.id
    for row, text in enumerate((SHORT, LONG)):
        alone, own = own_pad.run_with_cache(own_pad.to_tokens(text), names_filter="blocks.1.hook_resid_post")
        torch.testing.assert_close(logits[row][real[row]], alone[0], **CLOSE)
        torch.testing.assert_close(cache["resid_post", 1][row][real[row]], own["resid_post", 1][0], **CLOSE)
    torch.testing.assert_close(own_pad(tokens[:1])[0][real[0]], own_pad(SHORT)[0], **CLOSE)


@pytest.mark.parametrize("name", ["tiny-mdm", "tiny-ar"])
def test_texts_are_padded_on_the_side_of_the_tokenizer_or_of_the_call(name):
    model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
    by_hand, mask = model.tokenize([SHORT, LONG], padding_side="left")
    assert not mask[0, 0]
    assert mask.sum() == mask.numel() - 2
    left, alone = model(by_hand, attention_mask=mask), model(SHORT)
    assert torch.equal(model([SHORT, LONG], padding_side="left"), left)
    torch.testing.assert_close(left[0, 2:], alone[0], **CLOSE)
    torch.testing.assert_close(model([SHORT, LONG])[0, :4], alone[0], **CLOSE)
    model.tokenizer.padding_side = "left"
    assert torch.equal(model([SHORT, LONG]), left)
    assert torch.equal(model.run_with_cache([SHORT, LONG])[0], left)
    assert torch.equal(model.tokenize([SHORT, LONG])[0], by_hand)
    torch.testing.assert_close(model([SHORT, LONG], padding_side="right")[0, :4], alone[0], **CLOSE)
    with pytest.raises(ValueError, match="padding_side='middle'; it must be 'left' or 'right'"):
        model([SHORT, LONG], padding_side="middle")
    call = dict(max_new_tokens=3, steps=3)
    runs = model.denoise([SHORT, LONG], **call), model.denoise(SHORT, **call)  # the loop pads as the model needs
    assert runs[0].completion[0] == runs[1].completion[0]


def test_an_explicit_mask_wins(own_pad):
    tokens = own_pad.to_tokens([SHORT, LONG])
    everything = own_pad(tokens, attention_mask=torch.ones_like(tokens))
    row = own_pad(tokens[:1], attention_mask=torch.ones(1, tokens.shape[1]))
    torch.testing.assert_close(everything[:1], row, **CLOSE)
    if own_pad.cfg.attention_dir == "bidirectional":
        assert not torch.allclose(everything[0, :4], own_pad(SHORT)[0], atol=1e-2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_padded_tokens_counts_no_padding(own_pad, side):
    tokens, mask = own_pad.tokenize([SHORT, LONG], padding_side=side)
    read_off = own_pad(tokens, return_type="loss")
    assert read_off == own_pad(tokens, return_type="loss", attention_mask=mask)
    assert read_off != own_pad(tokens, return_type="loss", attention_mask=torch.ones_like(mask))


def test_the_loop_reads_the_padding_of_a_token_prompt(own_pad):
    tokens = own_pad.to_tokens([SHORT, LONG], padding_side="left")
    together = own_pad.denoise(tokens, max_new_tokens=5, steps=3)
    alone = own_pad.denoise(SHORT, max_new_tokens=5, steps=3)
    assert torch.equal(together.tokens[0, 2:], alone.tokens[0])
    torch.testing.assert_close(together.confidence[0, 2:], alone.confidence[0], equal_nan=True, rtol=1e-4, atol=1e-5)


def test_padding_that_the_loop_wrote_is_text(own_pad):
    """A model that fills a canvas with its padding token reads it there: the canvas was not padded."""
    if not own_pad.cfg.has_mask:
        return
    seen = []

    def fill(candidates, hook):
        return torch.where(hook.step.masked, own_pad.padding.id, candidates)

    hooks = [("denoise.hook_candidates", fill), ("blocks.0.attn.hook_pattern", lambda a, hook: seen.append(a))]
    own_pad.denoise(SHORT, max_new_tokens=4, steps=2, fwd_hooks=hooks)
    assert (seen[1] > 0).all()


def test_a_row_of_padding_alone_is_refused(own_pad):
    tokens = own_pad.to_tokens([SHORT, LONG])
    tokens[1] = own_pad.padding.id
    with pytest.raises(ValueError, match="row 1 of the tokens is all padding"):
        own_pad(tokens)


def test_where_padding_is_also_text_nothing_is_guessed(tiny):
    tokens = tiny.to_tokens("Gustav Geisser <eos> <eos>")
    assert tiny.padding.own_id is None
    assert torch.equal(tiny(tokens), tiny(tokens, attention_mask=torch.ones_like(tokens)))


def test_ragged_texts_become_tokens_only_where_no_row_is_moved(tiny):
    cure = r"tokens, mask = model.tokenize\(texts\) and pass attention_mask=mask"
    with pytest.raises(ValueError, match=cure):
        tiny.to_tokens([SHORT, LONG], padding_side="left")
    if tiny.cfg.attention_dir == "bidirectional":
        with pytest.raises(ValueError, match=rf"\[4, 6\] tokens.*{cure}"):
            tiny.to_tokens([SHORT, LONG])
    else:
        torch.testing.assert_close(tiny(tiny.to_tokens([SHORT, LONG]))[0, :4], tiny(SHORT)[0], **CLOSE)
    assert tiny.to_tokens([SHORT, SHORT], padding_side="left").shape == (2, 4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_cure_gives_every_row_what_it_gives_alone(tiny, side):
    tokens, mask = tiny.tokenize([SHORT, LONG], padding_side=side)
    logits = tiny(tokens, attention_mask=mask)
    for row, text in enumerate((SHORT, LONG)):
        torch.testing.assert_close(logits[row][mask[row]], tiny(text)[0], **CLOSE)
        assert torch.equal(tokens[row][mask[row]], tiny.to_tokens(text)[0])


LOSS_OR_LOOP = {
    "loss": lambda model, tokens, **mask: model(tokens, return_type="loss", **mask),
    "hide": lambda model, tokens, **mask: model.hide(tokens, **mask),
    "loss_fn": lambda model, tokens, **mask: model.loss_fn(model(tokens), tokens, **mask),
    "denoise": lambda model, tokens, **mask: model.denoise(tokens, max_new_tokens=5, steps=3, **mask).tokens,
    "cache": lambda model, tokens, **mask: model.denoise_with_cache(
        tokens, names_filter="blocks.0.hook_resid_post", max_new_tokens=5, steps=3, **mask
    ),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("do", LOSS_OR_LOOP.values(), ids=LOSS_OR_LOOP)
def test_tokens_with_unclear_padding_have_no_loss_and_no_continuation(tiny, do, side):
    tokens, _ = tiny.tokenize([LONG, SHORT], padding_side=side)
    cure = r"tokens, mask = model.tokenize\(texts\).*attention_mask=mask.*texts themselves.*torch.ones_like\(tokens\)"
    edge = "begins" if side == "left" else "ends"
    with pytest.raises(ValueError, match=f"row 1 of the tokens {edge} with '<eos>' and row 0 does not.*{cure}"):
        do(tiny, tokens)


def test_the_cure_of_refused_ragged_tokens_works(tiny):
    tokens, mask = tiny.tokenize([SHORT, LONG], padding_side="left")
    options = dict(max_new_tokens=5, steps=3)
    together, texts = tiny.denoise(tokens, attention_mask=mask, **options), tiny.denoise([SHORT, LONG], **options)
    assert together.tokens[0, 2:].equal(texts.tokens[0, :9])
    everything = dict(attention_mask=torch.ones_like(tokens))
    assert tiny.denoise(tokens, **everything, **options).tokens[:, :6].equal(tokens)
    assert torch.isfinite(tiny(tokens, return_type="loss", **everything))
    if tiny.cfg.attention_dir == "causal":
        loss = tiny([SHORT, LONG], return_type="loss")
        torch.testing.assert_close(tiny(tokens, return_type="loss", attention_mask=mask), loss)


def test_rows_that_agree_on_their_edges_are_text(tiny):
    for texts in (["is <eos> <eos>", "Gustav is <eos>"], ["<eos> is the", "<eos> <eos> is"], ["is <eos> the", SHORT]):
        tokens = torch.cat([tiny.to_tokens(text)[:, :3] for text in texts])
        assert torch.isfinite(tiny(tokens, return_type="loss"))
        assert tiny.denoise(tokens, max_new_tokens=2, steps=1).tokens[:, :3].equal(tokens)
    alone = tiny.to_tokens("Gustav Geisser <eos> <eos>")
    assert torch.isfinite(tiny(alone, return_type="loss"))


def test_a_token_that_begins_every_text_is_padding_where_repeated():
    model = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    backend = model.tokenizer.backend_tokenizer
    model.set_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", bos_token="<eos>"))
    tokens, _ = model.tokenize([SHORT, LONG], prepend_bos=True, padding_side="left")
    with pytest.raises(ValueError, match="row 0 of the tokens begins with '<eos>' and row 1 does not"):
        model.denoise(tokens, max_new_tokens=2, steps=1)
    tokens = model.to_tokens([SHORT, SHORT], prepend_bos=True)
    assert model.denoise(tokens, max_new_tokens=2, steps=1).tokens.shape == (2, 7)


def test_tokens_without_a_tokenizer_are_all_text(either):
    assert torch.isfinite(either.model(torch.tensor([[5, 6, 0], [5, 6, 7]]), return_type="loss"))


def test_an_unknown_padding_side_is_refused(tiny):
    with pytest.raises(ValueError, match="padding_side='middle'"):
        tiny.to_tokens([SHORT, LONG], padding_side="middle")


def test_an_empty_text_is_named_by_its_row(tiny):
    with pytest.raises(ValueError, match="row 1 is empty and no BOS"):
        tiny([SHORT, ""])
    with pytest.raises(ValueError, match="row 0 is empty and no BOS"):
        tiny.denoise(["", SHORT], max_new_tokens=3)


def test_words_that_the_tokenizer_does_not_know_are_named(tiny):
    for attempt in (tiny.to_tokens, tiny, lambda text: tiny.denoise(text, max_new_tokens=2, steps=1)):
        with pytest.warns(UserWarning, match=r"does not know 'The', 'Eiffel', 'Tower': .*<unk>"):
            attempt("The Eiffel Tower Tower is")
    with pytest.raises(ValueError, match="does not know 'Eiffel'"):
        tiny.to_single_token("Eiffel")


def test_an_unknown_token_that_the_text_says_is_no_surprise(tiny):
    assert tiny.to_tokens("<unk> is")[0, 0] == tiny.tokenizer.unk_token_id


def test_a_fact_of_unknown_words_is_no_query(tiny):
    from diffusion_lens import Fact

    with pytest.raises(ValueError, match="does not know 'The', 'Eiffel', 'Tower'"):
        Fact("The Eiffel Tower is", "Tower", " the").to_query(tiny)
    with pytest.raises(ValueError, match="does not know 'Paris'"):
        Fact("Gustav Geisser is", "Gustav", " Paris").to_query(tiny)
