"""Tokens, chats, logits, states and texts are those of transformers, whose own code reads the same GGUF file."""

import unicodedata
from copy import deepcopy

import pytest
import torch

TEXTS = [
    "The capital of France is",
    "Ça coûte 12,50 € — déjà vu, naïve façade.",
    "你好，世界！今天天气很好。",
    "Emoji: 🙂🚀👩‍👩‍👧 and a flag 🇨🇭",
    "def f(x):\n    return x ** 2\n\n\tprint( f(3) )\n",
    "   leading, trailing   and   inner spaces  ",
    "I'll say: it's the '90s; MIXED case, http://a.b/c?d=e&f=1",
    "",
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the Rhine?"}]
PROMPTS = ["The capital of France is", "Water boils at a temperature of", "def fibonacci(n):"]
# Largest difference of float32 numbers, relative to the largest of them: sums in another order.
ROUNDING = 2e-5


def rows(real, n_rows=3, n_pos=24):
    """Rows of a text, and one of random tokens."""
    text = " ".join(PROMPTS) + " " + " ".join(TEXTS[:5])
    ids = real.words(text)["input_ids"][: (n_rows - 1) * n_pos]
    drawn = torch.randint(len(real.words), (1, n_pos), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor(ids).view(-1, n_pos), drawn])


def apart(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("text", TEXTS)
def test_tokens(real, text):
    ids = real.words(text)["input_ids"]
    assert real.model.encode(text) == ids if text else ids == []
    assert real.model.to_string(torch.tensor(ids)) == real.words.decode(ids)


def test_text_is_split_as_it_was_published(smollm, qwen):
    """Where transformers builds another tokenizer of a GGUF file: SmolLM2's sets digits apart before all else, and
    Qwen's composes accents."""
    assert smollm.model.to_str_tokens("a  5 12") == ["a", "  ", "5", " ", "1", "2"]
    assert smollm.words.convert_ids_to_tokens(smollm.words("a  5")["input_ids"]) == ["a", "Ġ", "Ġ", "5"]
    accents = unicodedata.normalize("NFD", "déjà")
    assert qwen.model.encode(accents) == qwen.words("déjà")["input_ids"] != qwen.words(accents)["input_ids"]


def test_chat_templates(real):
    for options in ({}, {"add_generation_prompt": True}):
        ours = real.model.tokenizer.apply_chat_template(CHAT, tokenize=False, **options)
        assert ours == real.words.apply_chat_template(CHAT, tokenize=False, **options)
        assert "Where is the Rhine?" in ours
        assert real.model.encode(ours) == real.words(ours)["input_ids"]


@torch.no_grad()
def test_logits_and_every_hidden_state(real):
    tokens = rows(real)
    theirs = real.network(tokens, output_hidden_states=True)
    logits, cache = real.model.run_with_cache(tokens)
    assert apart(logits, theirs.logits) < ROUNDING
    n_layers = real.model.cfg.n_layers
    assert len(theirs.hidden_states) == n_layers + 1
    assert apart(cache["hook_embed"], theirs.hidden_states[0]) == 0
    for layer in range(n_layers - 1):
        assert apart(cache["resid_post", layer], theirs.hidden_states[layer + 1]) < ROUNDING, layer
    # The last one of theirs is normed.
    assert apart(real.model.ln_final(cache["resid_post", n_layers - 1]), theirs.hidden_states[-1]) < ROUNDING


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows(real, side):
    pad = real.words.pad_token_id
    ids = [real.words(text)["input_ids"] for text in PROMPTS]
    real.words.padding_side = side
    theirs = real.words.pad({"input_ids": ids}, return_tensors="pt")
    tokens, mask = theirs["input_ids"], theirs["attention_mask"]
    tokens_and_mask = real.model.tokenize(PROMPTS, padding_side=side)
    assert all(map(torch.equal, tokens_and_mask, (tokens, mask.bool())))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = real.network(tokens, attention_mask=mask, position_ids=positions).logits
    given = real.model(tokens, attention_mask=mask)
    assert (tokens == pad).any()
    assert apart(given[mask.bool()], expected[mask.bool()]) < ROUNDING
    for row, each in enumerate(ids):  # and the row alone
        alone = real.network(torch.tensor([each])).logits[0]
        assert apart(given[row][mask[row].bool()], alone) < ROUNDING


def test_greedy_texts(real):
    chat = real.words.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    end = real.words.eos_token_id
    for prompt in (PROMPTS[0], chat):
        tokens = torch.tensor([real.words(prompt)["input_ids"]])
        whole = {"attention_mask": torch.ones_like(tokens), "pad_token_id": end, "eos_token_id": end}
        theirs = real.network.generate(tokens, **whole, max_new_tokens=12, do_sample=False)
        ours = real.model.generate(prompt, 12, return_type="tokens")
        assert torch.equal(ours[:, : theirs.shape[1]], theirs), prompt
        assert (ours[:, theirs.shape[1] :] == end).all()


@torch.no_grad()
def test_bfloat16(real):
    """Both round by themselves, and lie about as far from float32."""
    tokens = rows(real)[:, :16]
    exact = real.network(tokens).logits
    theirs = deepcopy(real.network).to(torch.bfloat16)(tokens).logits
    ours = real.load(dtype=torch.bfloat16)(tokens)
    of_ours, of_theirs = (float((each.float() - exact).square().mean().sqrt() / exact.std()) for each in (ours, theirs))
    assert of_ours < 0.05
    assert of_ours < 1.25 * of_theirs
    first, second = exact.topk(2).values.unbind(dim=-1)
    clear = first - second > 6 * of_theirs * exact.std()  # How many are closer depends on the products of the machine.
    assert clear.float().mean() > 0.3
    assert (ours.argmax(-1) == exact.argmax(-1))[clear].all()
