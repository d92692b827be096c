"""The strongest examples of features are those that a search through all stored rows finds."""

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import activations, dictionary_loss, feature_examples, train_dictionary
from diffusion_lens.data import toy_facts

READS, WRITES = "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"
FACTS = toy_facts.load().facts("p2d", "p2d")[:30]
TEXTS = [f"{fact.prompt}{fact.answer}" for fact in FACTS]


@pytest.fixture(scope="module")
def model():
    return HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")


@pytest.fixture(scope="module")
def store(model, tmp_path_factory):
    return activations(model, TEXTS, [READS, WRITES], t=[0.3, 0.8], out=tmp_path_factory.mktemp("store") / "rows")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "conditioned"])
def dictionary(request, model, store):
    few = {"n_features": 96, "k": 8, "updates": 60, "batch_size": 128}
    return train_dictionary(model, store, READS, WRITES, conditioned=request.param, **few)


def test_examples_are_the_largest_of_all_rows(model, store, dictionary):
    found = feature_examples(model, dictionary, TEXTS, [3, -1, 7], most=4, t=[0.3, 0.8], batch_size=7)
    features = dictionary.encode(store.rows(READS, range(len(store))), store.share)
    bins = (store.share * 10).long().clamp(max=9)
    assert found.features == [3, 95, 7]
    for i, feature in enumerate(found.features):
        values, rows = features[:, feature].topk(4)
        torch.testing.assert_close(found.values[i], values, atol=1e-4, rtol=1e-4)
        for example, row in enumerate(rows.tolist()):
            if values[example] - features[:, feature].where(torch.arange(len(store)) != row, -1.0).min() > 0:
                same = (features[:, feature] - found.values[i, example]).abs() < 1e-4
                keys = {(int(store.text[r]), int(store.position[r])) for r in same.nonzero()[:, 0]}
                assert (int(found.texts[i, example]), int(found.positions[i, example])) in keys
        for b in bins.unique().tolist():
            expected = (features[bins == b, feature] > 0).float().mean()
            torch.testing.assert_close(found.density[i, b], expected, atol=0.02, rtol=0)
    assert found.n_rows.tolist() == torch.bincount(bins, minlength=10).tolist()


def test_words_around_are_those_of_the_canvas_and_promoted_tokens_those_of_the_head(model, dictionary):
    run = model.denoise([fact.prompt for fact in FACTS[:3]], max_new_tokens=4, steps=3)
    found = feature_examples(model, dictionary, run, most=2)
    assert (found.values[:, 0] > 0).any()
    for feature, example in found.values.gt(0).nonzero().tolist():
        step, row, pos = (int(x[feature, example]) for x in (found.steps, found.texts, found.positions))
        canvas = run.canvases[step, row].tolist()
        around = [canvas[i] if 0 <= i < len(canvas) else -1 for i in range(pos - 6, pos + 7)]
        assert found.around[feature, example].tolist() == around
        masked = run.canvases[step, row][run.real[row]] == model.cfg.mask_token_id
        assert found.share[feature, example].item() == pytest.approx(masked.float().mean().item())
        with torch.no_grad():
            x = model.run_with_cache(
                run.canvases[step, row : row + 1], names_filter=READS, attention_mask=run.real[row : row + 1]
            )[1][READS]
        expected = dictionary.encode(x[0, pos], masked.float().mean())[feature]
        assert found.values[feature, example].item() == pytest.approx(expected.item(), abs=1e-3)
    at_masks = feature_examples(model, dictionary, run, most=2, mask="masked")
    seen = at_masks.around[..., 6][at_masks.values > 0]
    assert len(seen)
    assert (seen == model.cfg.mask_token_id).all()
    effects = torch.stack([model.unembed(model.ln_final.w * row) for row in dictionary.W_dec])
    best = (effects - effects.mean(dim=1, keepdim=True)).topk(8, dim=1)
    torch.testing.assert_close(found.effects, best.values, atol=1e-4, rtol=1e-3)
    assert found.promotes(0)[0] == model.words(best.indices[0, :1].tolist())[0]


@pytest.mark.parametrize("several", ["lit_gpt-mdm", "dream", "llama", "uniform"], indirect=True)
def test_each_kind_of_model_has_examples(several):
    """On texts under noise, or without [MASK] as they are."""
    from diffusion_lens.analysis import SparseDictionary

    model, d = several.model, several.model.cfg.d_model
    generator = torch.Generator().manual_seed(0)
    W_enc, n = torch.randn(d, 5, generator=generator), torch.zeros(5)
    rest = {"reads": "blocks.0.hook_resid_post", "writes": "blocks.0.hook_resid_post", "conditioned": False}
    tensors = {"W_enc": W_enc, "W_dec": W_enc.T.clone(), "b_dec": torch.zeros(d), "losses": torch.zeros(1)}
    zeros = dict.fromkeys(("b_enc", "b_noise", "threshold", "density"), n)
    dictionary = SparseDictionary(**tensors, **zeros, **rest, record={"model": "random"})
    texts = several.tokens.masked_fill(~model.cfg.writable(several.tokens), 5)
    found = feature_examples(model, dictionary, texts, most=2)
    assert (found.values[:, 0] > 0).all()
    assert found.n_rows.sum() > 0


def test_refusals(model, dictionary):
    run = model.denoise(FACTS[0].prompt, max_new_tokens=2, steps=1)
    with pytest.raises(ValueError, match="t= is for texts"):
        feature_examples(model, dictionary, run, t=0.5)
    found = feature_examples(model, dictionary, run, [0, 1])
    with pytest.raises(ValueError, match="feature=5 was not read"):
        found.plot(5)
    with pytest.raises(ValueError, match="must be 'examples' or 'density'"):
        found.plot(0, show="both")


def test_a_dictionary_of_another_model_is_told(dictionary):
    other = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    for call in (
        lambda: feature_examples(other, dictionary, TEXTS[:4], [0]),
        lambda: dictionary_loss(other, TEXTS[:4], WRITES, dictionary),
    ):
        with pytest.warns(UserWarning, match="was trained on 'tiny-mdm', with other weights than those of 'tiny-ar'"):
            call()
