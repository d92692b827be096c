"""The loss under a splice equals that of each canvas alone, by hand, and obeys its laws."""

import copy
import math

import pytest
import torch
from random_dictionaries import Identity, RandomDictionary, Zero
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diffusion_lens import Fact
from diffusion_lens.analysis import DictionaryLoss, NoiseRange, activations, dictionary_loss, splice
from diffusion_lens.analysis.dictionaries.loss import STATES
from diffusion_lens.data import toy_facts
from diffusion_lens.records.identity import value_in_words
from diffusion_lens.settings import own_seed

RESID = "blocks.1.hook_resid_post"
SENTENCES = toy_facts.load().sentences()[::61][:7]
FACTS = toy_facts.load().facts()[:4]
TOKENS = torch.randint(3, 500, (3, 17), generator=torch.Generator().manual_seed(0))

# Models whose loss reads a text once.
once = pytest.mark.parametrize("several", ["lit_gpt-mdm", "dream", "llama", "uniform"], indirect=True)


def canvas_of(tokens, editable, text, level, t):
    """A canvas, masked again from its seed; Bool[pos], its masked positions."""
    seed = own_seed(0, f"{text}/{level}")
    uniform = torch.rand(1 + len(tokens), generator=torch.Generator().manual_seed(seed))
    return (uniform[1:] < torch.tensor(t)) & editable


def noise_of(model, tokens, text, level):
    """What stands at the masked positions: [MASK], or tokens that follow the uniform numbers of `canvas_of`."""
    generator = torch.Generator().manual_seed(own_seed(0, f"{text}/{level}"))
    torch.rand(1 + len(tokens), generator=generator)
    drawn = torch.randint(model.cfg.d_vocab_out, (len(tokens),), generator=generator)
    return torch.full_like(tokens, model.cfg.blank) if model.cfg.has_mask else drawn


def uniform_bound(p_clean, clean, noisy, chance):
    """The bound of Schiff et al. 2024 (arXiv 2412.10193) at one position, where a token is noise with this chance."""
    n, t = len(p_clean), chance / (1 - 1e-3)
    kept = 1 - t
    true, guess = (n * kept * x + t for x in (torch.eye(n, dtype=torch.float64)[clean], p_clean.double()))
    ratios = (true / true[noisy]) * ((guess[noisy] / guess) * (true / true[noisy])).log()
    return (n / guess[noisy] - n / true[noisy] + ratios.sum()) / (n * kept)


def slow_losses(model, rows, dictionary, levels, mask):
    """Losses [entry level state] and, by level, the positions' activations: one canvas at a time."""
    pieces, xs = [], [[] for _ in levels]
    for text, (tokens, editable) in enumerate(rows):
        for level, t in enumerate(levels):
            masked = canvas_of(tokens, editable, text, level, t)
            noisy = (
                tokens
                if model.cfg.is_autoregressive
                else torch.where(masked, noise_of(model, tokens, text, level), tokens)
            )
            where = {"all": editable, "masked": masked, "unmasked": editable & ~masked}[mask]
            xs[level].append(model.run_with_cache(noisy[None], names_filter=RESID)[1][RESID][0, where])
            pieces.append((text, level, t, tokens, noisy, masked, editable, where))
    mean = torch.cat([x for per_level in xs for x in per_level]).mean(dim=0)
    losses = torch.zeros(len(rows), len(levels), 4, dtype=torch.float64)
    replacements = (
        lambda x: x,
        lambda x: dictionary.decode(dictionary.encode(x)),
        torch.zeros_like,
        lambda x: mean.expand_as(x),
    )
    for text, level, t, tokens, noisy, masked, editable, where in pieces:
        for state, new in enumerate(replacements):
            hook = lambda x, hook, new=new, where=where: torch.where(where[None, :, None], new(x), x)  # noqa: E731
            log_p = model.run_with_hooks(noisy[None], fwd_hooks=[(RESID, hook)])[0].log_softmax(dim=-1)
            if model.cfg.uniform_noise:
                at = editable.nonzero()[:, 0].tolist()
                each = [uniform_bound(log_p[i].exp(), int(tokens[i]), int(noisy[i]), t) for i in at]
                losses[text, level, state] = sum(each) / len(at)
                continue
            if model.cfg.has_mask:
                predicted, weight, n_counted = masked, 1 / t, editable.sum()
            else:
                predicted, weight = editable & (torch.arange(len(tokens)) > 0), 1
                n_counted = predicted.sum()
            positions = predicted.nonzero()[:, 0]
            read = (positions - int(model.cfg.readout == "shifted")).clamp(min=0)
            nll = -log_p[read, tokens[positions]].double().sum()
            losses[text, level, state] = nll * weight / n_counted
    return losses, [torch.cat(x) for x in xs]


def measured(model, texts, rows, mask="all", **settings):
    dictionary = RandomDictionary(model.cfg.d_model)
    levels = [0.0] if model.cfg.is_autoregressive else [0.4, 0.9]
    t = None if model.cfg.is_autoregressive else levels
    result = dictionary_loss(model, texts, RESID, dictionary, mask=mask, t=t, **settings)
    return result, slow_losses(model, rows, dictionary, levels, mask), dictionary


@once
def test_losses_are_those_of_each_canvas_alone(several):
    model = several.model
    mask = "all" if model.cfg.is_autoregressive else {"in_place": "masked", "shifted": "unmasked"}[model.cfg.readout]
    rows = [(row, torch.ones(len(row), dtype=torch.bool)) for row in TOKENS]
    result, (expected, xs), dictionary = measured(model, TOKENS, rows, mask, batch_size=2)
    torch.testing.assert_close(result.losses, expected, rtol=1e-4, atol=1e-4)
    for level, x in enumerate(xs):
        features = dictionary.encode(x)
        residual = (x - dictionary.decode(features)).square().sum()
        explained = 1 - residual / (x - x.mean(dim=0)).square().sum()
        assert result.variance_explained[level].item() == pytest.approx(explained.item(), rel=1e-4)
        assert result.l0[level].item() == pytest.approx((features > 0).sum(dim=1).float().mean().item(), abs=0.05)
        assert result.n_rows[level] == len(x)
    x = torch.cat(xs)
    residual = (x - dictionary.decode(dictionary.encode(x))).square().sum()
    explained = 1 - residual / (x - x.mean(dim=0)).square().sum()
    assert result.overall_variance_explained == pytest.approx(explained.item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_only_answers_of_facts_count(small):
    rows = []
    for fact in FACTS:
        prompt, answer = fact.tokenize(small)
        rows.append((torch.tensor(prompt + answer), torch.arange(len(prompt + answer)) >= len(prompt)))
    result, (expected, _), _ = measured(small, FACTS, rows, batch_size=3)
    torch.testing.assert_close(result.losses, expected, rtol=1e-4, atol=1e-4)
    assert result.n_counted.tolist() == [int(editable.sum()) for _, editable in rows]


def numbered_words():
    """A tokenizer of the words w1 to w511."""
    backend = Tokenizer(models.WordLevel({"<eos>": 0, **{f"w{i}": i for i in range(1, 512)}}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@once
def test_the_answer_after_a_prompt_is_read_in_the_row_before_it(several):
    """A shifted readout reads the first token of an answer in a row of the prompt."""
    model = copy.deepcopy(several.model)
    model.set_tokenizer(numbered_words(), default_prepend_bos=False)
    facts = [Fact("w3 w4 w5", "w3", " w6 w7"), Fact("w8 w9", "w8", " w10 w11 w12")]
    rows = []
    for fact in facts:
        prompt, answer = fact.tokenize(model)
        rows.append((torch.tensor(prompt + answer), torch.arange(len(prompt + answer)) >= len(prompt)))
    result, (expected, _), _ = measured(model, facts, rows)
    torch.testing.assert_close(result.losses, expected, rtol=1e-4, atol=1e-4)


@once
def test_the_clean_loss_is_the_model_s_own(several):
    model, tokens = several.model, TOKENS
    result = dictionary_loss(model, tokens, RESID, Identity(), t=None if model.cfg.is_autoregressive else 0.6)
    if not model.cfg.is_autoregressive:
        noisy = tokens.clone()
        for text, row in enumerate(tokens):
            masked = canvas_of(row, torch.ones(len(row), dtype=torch.bool), text, 0, 0.6)
            noisy[text, masked] = noise_of(model, row, text, 0)[masked]
        p_mask = torch.full(tokens.shape, 0.6)
        own = model.loss_fn(model(noisy), tokens, noisy=noisy, p_mask=p_mask)
    else:
        own = model(tokens, return_type="loss")
    assert result.loss().value == pytest.approx(own.item(), rel=1e-5)


@once
def test_an_identity_recovers_everything_and_zero_nothing(several):
    model, tokens = several.model, TOKENS
    name = "blocks.0.attn.hook_z" if model.cfg.readout == "shifted" else "hook_embed"
    identity = dictionary_loss(model, tokens, name, Identity())
    assert torch.equal(identity.losses[..., STATES.index("spliced")], identity.losses[..., STATES.index("clean")])
    assert identity.change() == (0, 0)
    assert identity.recovered() == identity.recovered("mean_ablated") == (1, 0)
    assert identity.overall_variance_explained == 1
    assert identity.variance_explained.tolist() == [1] * len(identity.spans)
    zero = dictionary_loss(model, tokens, name, Zero())
    assert torch.equal(zero.losses[..., 1], zero.losses[..., STATES.index("zero_ablated")])
    assert zero.recovered() == (0, 0)
    assert zero.change() == zero.change("zero_ablated")
    assert torch.equal(zero.losses[..., 0], identity.losses[..., 0])


@once
def test_the_standard_error_is_that_of_a_mean_over_texts(several):
    result = dictionary_loss(several.model, TOKENS, RESID, RandomDictionary(several.model.cfg.d_model))
    per_text = result.losses[:, 0, 1] - result.losses[:, 0, 0]
    change = result.change(level=0)
    assert change.value == pytest.approx(per_text.mean().item())
    assert change.standard_error == pytest.approx(per_text.std().item() / len(per_text) ** 0.5)
    single = dictionary_loss(several.model, TOKENS[:1], RESID, Identity())
    assert math.isnan(single.change().standard_error)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_the_canvases_are_those_of_activations(small, tmp_path):
    dictionary, noise = RandomDictionary(small.cfg.d_model), NoiseRange(0.1, 0.9, samples=2)
    result = dictionary_loss(small, SENTENCES, RESID, dictionary, t=noise, seed=5, mask="masked", batch_size=3)
    store = activations(small, SENTENCES, RESID, out=tmp_path / "a", t=noise, seed=5, mask="masked")
    for level, (low, high) in enumerate(noise.spans):
        x = store.rows(RESID, store.select(t=NoiseRange(low, high)))
        explained = (
            1 - (x - dictionary.decode(dictionary.encode(x))).square().sum() / (x - x.mean(dim=0)).square().sum()
        )
        assert result.variance_explained[level].item() == pytest.approx(explained.item(), rel=1e-4)
        assert result.n_rows[level] == len(x)


def test_results_are_saved_and_drawn(small, tmp_path):
    dictionary = RandomDictionary(small.cfg.d_model)
    result = dictionary_loss(small, SENTENCES, RESID, dictionary)
    loaded = DictionaryLoss.load(result.save(tmp_path / "loss.safetensors"))
    assert repr(loaded) == repr(result)
    assert repr(result).startswith(
        f"DictionaryLoss({RESID} of small-{'mdm' if small.cfg.has_mask else 'ar'}, 7 texts: loss "
    )
    assert torch.equal(loaded.losses, result.losses)
    assert loaded.record == result.record
    assert result.record["dictionary"] == value_in_words(dictionary)
    other = dictionary_loss(small, SENTENCES, RESID, RandomDictionary(small.cfg.d_model, seed=1))
    assert other.record["dictionary"] != result.record["dictionary"]
    axes = result.plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "loss recovered from zero ablation",
        "loss recovered from mean ablation",
        "variance explained",
    ]
    assert len(axes.containers[0].lines[0].get_xdata()) == len(result.spans)


@once
def test_bf16(several):
    model, tokens = copy.deepcopy(several.model).to("bfloat16"), TOKENS
    result = dictionary_loss(model, tokens, RESID, RandomDictionary(model.cfg.d_model))
    full = dictionary_loss(several.model, tokens, RESID, RandomDictionary(model.cfg.d_model))
    assert result.loss("spliced").value == pytest.approx(full.loss("spliced").value, rel=0.05)
    assert dictionary_loss(model, tokens, RESID, Identity()).recovered() == (1, 0)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_canvases_without_a_masked_position_cost_nothing(small):
    result = dictionary_loss(small, SENTENCES[:2], RESID, RandomDictionary(small.cfg.d_model), t=1e-9, mask="unmasked")
    assert result.loss("spliced").value == result.loss("zero_ablated").value == 0
    assert math.isnan(result.recovered().value)
    assert result.n_rows.tolist() == [sum(len(small.encode(sentence)) for sentence in SENTENCES[:2])]


@pytest.mark.parametrize("small", ["ar"], indirect=True)
def test_texts_without_predicted_tokens_are_named_before_any_pass(small):
    """Whatever the batches are."""
    for size in (1, 2, 32):
        with pytest.raises(ValueError, match=r"does not predict the first token of a text.*leave out the texts 1, 3$"):
            dictionary_loss(small, [SENTENCES[0], "Ada", SENTENCES[1], "is"], RESID, Identity(), batch_size=size)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_what_does_not_fit_is_refused(small):
    def lose(**options):
        return dictionary_loss(small, **{"texts": SENTENCES, "name": RESID, "dictionary": Identity(), **options})

    for options, message in (
        ({"t": [0.5, 0]}, "at the noise level t=0 nothing is masked, so there is no loss"),
        ({"t": 1e-9, "mask": "masked"}, "mask='masked' selects no position of any canvas"),
        ({"dictionary": RandomDictionary(3)}, "encode of RandomDictionary failed at .*must have the width 32"),
        ({"name": "blocks.0.attn.hook_attn_scores"}, r"\[batch head query key\], and a vector for each position"),
    ):
        with pytest.raises(ValueError, match=message):
            lose(**options)
        assert not small.list_hooks()
    result = lose(t=[0.5])
    for refused, message in (
        (
            lambda: result.loss("ablated"),
            "state='ablated'; it must be one of clean, spliced, zero_ablated, mean_ablated",
        ),
        (lambda: result.recovered("clean"), "baseline='clean'; it must be 'zero_ablated' or 'mean_ablated'"),
        (lambda: result.loss(level=1), "level=1; the 1 noise levels are numbered from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


@pytest.mark.parametrize("several", ["sdar"], indirect=True)
def test_a_loss_that_reads_a_text_twice_is_refused(several):
    model, dictionary = several.model, RandomDictionary(several.model.cfg.d_model)
    with pytest.raises(ValueError, match=r"attends by blocks, .*run_with_hooks\(tokens, return_type='loss'"):
        dictionary_loss(model, TOKENS, RESID, dictionary)
    plain = model(TOKENS, return_type="loss")
    spliced = (RESID, splice(dictionary, error_term=False))
    assert model.run_with_hooks(TOKENS, return_type="loss", fwd_hooks=[spliced]) != plain
