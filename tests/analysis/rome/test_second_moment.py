"""C = E[k kᵀ]: the mean over a corpus by hand, masked as in training, resumed as if uninterrupted, solved with."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from diffusion_lens.analysis.rome import SecondMoment, second_moment
from diffusion_lens.analysis.rome import covariance as key_sums
from diffusion_lens.analysis.rome.covariance import RIDGE, InverseMoment
from diffusion_lens.data import toy_facts
from diffusion_lens.model.loss import hide
from diffusion_lens.settings import own_seed
from weight_conversion import as_json

LAYER = 1


@pytest.fixture
def corpus():
    """Seven texts of several lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(10, 500, (n,), generator=generator) for n in (9, 4, 12, 7, 7, 3, 10)]


def keys_of(model, tokens):
    _, cache = model.run_with_cache(tokens[None], names_filter=f"blocks.{LAYER}.mlp.hook_post")
    return cache[f"blocks.{LAYER}.mlp.hook_post"][0].double()


def keys_of_each(either, corpus, seed):
    """Of each text alone, unpadded; of a masked diffusion model masked as its losses mask it."""
    keys = []
    for i, text in enumerate(corpus):
        if either.kind == "mdm":
            generator = torch.Generator().manual_seed(own_seed(seed, i))
            text = hide(text[None], either.model.cfg.mask_token_id, generator=generator)[0][0]
        keys.append(keys_of(either.model, text))
    return keys


def test_mean_over_the_corpus_by_hand(either, corpus):
    moment = second_moment(either.model, corpus, LAYER, seed=20, batch_size=3)
    together = torch.cat(keys_of_each(either, corpus, 20))
    assert (moment.count, moment.texts) == (len(together), len(corpus)) == (52, 7)
    torch.testing.assert_close(moment.matrix, together.T @ together / 52, rtol=1e-4, atol=1e-5)


def test_a_masked_model_is_shown_masks(either, corpus):
    seen = []
    with either.model.hooks(fwd_hooks=[("hook_embed", lambda embedded, hook: seen.append(embedded.detach()))]):
        second_moment(either.model, corpus, LAYER)
    mask = either.model.W_E[-1].detach()
    share = (torch.cat([batch.flatten(0, 1) for batch in seen]) == mask).all(dim=1).float().mean().item()
    assert (0.2 < share < 0.8) if either.kind == "mdm" else share == 0


def test_batches_and_padding_change_nothing(either, corpus):
    moments = [second_moment(either.model, corpus, LAYER, batch_size=size) for size in (1, 7)]
    torch.testing.assert_close(*(moment.matrix for moment in moments), rtol=1e-4, atol=1e-5)
    assert moments[0].relative_error() == pytest.approx(moments[1].relative_error(), rel=1e-4)


def test_interrupted_and_resumed_is_uninterrupted(either, corpus, tmp_path, monkeypatch):
    model = either.model
    whole = second_moment(model, corpus, LAYER, batch_size=2, save_every=1)
    passed, read = [], key_sums._as_in_training

    def give_out(*request):
        passed.append(1)
        if len(passed) == 3:
            raise KeyboardInterrupt
        return read(*request)

    monkeypatch.setattr(key_sums, "_as_in_training", give_out)
    with pytest.raises(KeyboardInterrupt):
        second_moment(model, corpus, LAYER, batch_size=2, folder=tmp_path, save_every=1)
    monkeypatch.undo()
    (path,) = tmp_path.iterdir()
    assert SecondMoment.load(path).texts == 4
    begun = path.read_bytes()
    resumed = second_moment(model, corpus, LAYER, batch_size=2, folder=tmp_path, save_every=1)
    for moment in (resumed, SecondMoment.load(path)):
        assert torch.equal(moment.total, whole.total)
        assert torch.equal(moment.by_length, whole.by_length)
        assert (moment.count, moment.texts, moment.relative_error()) == (52, 7, whole.relative_error())
        assert moment.record == whole.record
    path.write_bytes(begun)
    with pytest.warns(UserWarning, match=r"was begun with other batches .*the last bits of the sum may differ"):
        mixed = second_moment(model, corpus, LAYER, batch_size=2, folder=tmp_path)
    torch.testing.assert_close(mixed.total, whole.total)
    assert mixed.record == {**whole.record, "batch_size": None, "save_every": None}


def test_a_saved_moment_is_read(either, corpus, tmp_path, monkeypatch):
    saved = second_moment(either.model, corpus, LAYER, folder=tmp_path)

    def refuse(*request):
        raise AssertionError("the network ran")

    monkeypatch.setattr(key_sums, "_as_in_training", refuse)
    again = second_moment(either.model, corpus, LAYER, folder=tmp_path)
    monkeypatch.undo()
    assert torch.equal(again.total, saved.total)
    # Another layer, corpus or (where there is noise) seed has another name.
    second_moment(either.model, corpus, 0, folder=tmp_path)
    second_moment(either.model, corpus[:5], LAYER, folder=tmp_path)
    second_moment(either.model, corpus, LAYER, folder=tmp_path, seed=1)
    assert len(list(tmp_path.iterdir())) == (4 if either.kind == "mdm" else 3)


def test_files_from_before_clean_blocks_were_read_have_other_names(specimen, configs, corpus):
    """The other models' files, which that did not change, are still read."""

    def key_of(record):
        """The hash that named every file then."""
        names = ["architecture", "weights_sha256", "hooks", "modules", "layer", "corpus_sha256", "corpus_texts", "seed"]
        content = {name: record[name] for name in names} | {"noise": "by own_seed"}
        return hashlib.sha256(json.dumps(as_json(content), sort_keys=True).encode()).hexdigest()

    for name in ("sdar", "llada"):
        record = second_moment(specimen(configs[name]).model, corpus[:2], LAYER).record
        assert (record["key"] == key_of(record)) == (name == "llada")


def test_the_error_is_that_of_a_bootstrap_over_texts(either):
    """Every text has one large key, as at an attention sink, so that longer texts have smaller means."""
    model, rng = either.model, torch.Generator().manual_seed(0)
    texts = [torch.randint(10, 500, (int(n),), generator=rng) for n in torch.randint(3, 13, (60,), generator=rng)]

    def add_sink(keys, hook):
        return torch.cat([keys[:, :1] + 5.0, keys[:, 1:]], dim=1)

    with model.hooks(fwd_hooks=[(f"blocks.{LAYER}.mlp.hook_post", add_sink)]):
        moment = second_moment(model, texts, LAYER, seed=20, save_every=2)
        keys = keys_of_each(either, texts, 20)
    sums = torch.stack([own.T @ own for own in keys])
    lengths = torch.tensor([float(len(own)) for own in keys], dtype=torch.float64)
    counts = torch.ones(60).multinomial(400 * 60, replacement=True, generator=rng).view(400, 60)
    counts = torch.nn.functional.one_hot(counts, 60).sum(dim=1).double()
    resampled = (counts @ sums.flatten(1)) / (counts @ lengths)[:, None]
    errors = (resampled - moment.matrix.flatten()).square().sum(dim=1)
    expected = (errors.mean().sqrt() / moment.matrix.norm()).item()
    assert expected > 0.03
    assert moment.relative_error() == pytest.approx(expected, rel=0.1)
    assert moment.relative_error(4 * moment.count) == pytest.approx(moment.relative_error() / 2)


def test_a_moment_without_sums_over_texts_has_no_error(either, corpus, tmp_path):
    moment = second_moment(either.model, corpus, LAYER)
    replace(moment, by_length=None).save(tmp_path / "before.safetensors")
    with pytest.raises(ValueError, match=r"no error estimate.*compute it again"):
        SecondMoment.load(tmp_path / "before.safetensors").relative_error()
    assert torch.isnan(torch.tensor(second_moment(either.model, corpus[:1], LAYER).relative_error()))


def test_solving():
    generator = torch.Generator().manual_seed(0)
    keys, vector = torch.randn(200, 6, generator=generator).double(), torch.randn(6, generator=generator)
    regular = keys.T @ keys / 200
    inverse = InverseMoment.of(regular)
    assert inverse.ridge == 0
    torch.testing.assert_close(regular @ inverse.times(vector), vector.double())
    torch.testing.assert_close(regular @ inverse.times(keys.T), keys.T)
    few = keys[:3].T @ keys[:3] / 3
    inverse = InverseMoment.of(few)
    solved, ridge = inverse.times(vector), inverse.ridge
    assert ridge == pytest.approx(RIDGE * few.diagonal().mean().item())
    torch.testing.assert_close(few @ solved + ridge * solved, vector.double())


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(3, 3), "is singular even with a ridge"),
        (-torch.eye(3), "is singular even with a ridge"),
        (torch.full((3, 3), float("nan")), "not a symmetric matrix of finite numbers"),
        (torch.arange(9.0).view(3, 3), "not a symmetric matrix"),
    ],
)
def test_no_second_moment(matrix, message):
    with pytest.raises(ValueError, match=message):
        InverseMoment.of(matrix)


def test_text_or_tokens(tiny):
    sentences = toy_facts.load().sentences()[:5]
    from_text = second_moment(tiny, sentences, 0)
    from_tokens = second_moment(tiny, [tiny.to_tokens(sentence)[0] for sentence in sentences], 0)
    assert torch.equal(from_text.total, from_tokens.total)
    assert from_text.record == from_tokens.record


def test_bad_input(either, corpus):
    model = either.model
    with pytest.raises(ValueError, match="layer=7 is not one of the layers 0 to 2"):
        second_moment(model, corpus, 7)
    with pytest.raises(ValueError, match="the corpus is empty"):
        second_moment(model, [], LAYER)
    with pytest.raises(TypeError, match=r"corpus='Ada' is a str; .*: give a list, \['Ada'\]"):
        second_moment(model, "Ada", LAYER)
    with pytest.raises(ValueError, match="save_every=0"):
        second_moment(model, corpus, LAYER, save_every=0)
    if either.kind == "mdm":
        with pytest.raises(ValueError, match=r"text 1 contains \[MASK\]"):
            second_moment(model, [corpus[0], torch.tensor([3, model.cfg.mask_token_id])], LAYER)


def test_save_and_load(either, corpus, tmp_path):
    moment = second_moment(either.model, corpus, LAYER)
    again = SecondMoment.load(moment.save(tmp_path / "moment.safetensors"))
    assert torch.equal(again.total, moment.total)
    assert torch.equal(again.by_length, moment.by_length)
    assert vars(replace(again, total=moment.total, by_length=moment.by_length)) == vars(moment)
