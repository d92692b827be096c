"""Sparse dictionaries: what training promises, and splices of transcoders, also conditioned on the share of masks."""

from dataclasses import fields

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import activations, dictionary_loss, splice, train_dictionary
from diffusion_lens.analysis.dictionaries import SparseDictionary
from diffusion_lens.analysis.dictionaries.splice import only_at
from diffusion_lens.analysis.dictionaries.train import _auxiliary
from diffusion_lens.data import toy_facts

READS, WRITES = "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"
TEXTS = [f"{fact.prompt}{fact.answer}" for fact in toy_facts.load().facts("p2d", "p2d")[:120]]
SHORT = {"updates": 150, "batch_size": 128, "n_features": 128, "k": 8}


def random_transcoder(model, conditioned=False, reads=READS, writes=WRITES, n_features=24):
    generator, d = torch.Generator().manual_seed(0), model.cfg.d_model

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    return SparseDictionary(
        W_enc=randn(d, n_features) / d**0.5,
        b_enc=randn(n_features),
        W_dec=randn(n_features, d) / n_features**0.5,
        b_dec=randn(d),
        b_noise=3 * randn(n_features) * conditioned,
        threshold=torch.full((n_features,), 0.5),
        density=torch.zeros(n_features),
        losses=torch.zeros(1),
        reads=reads,
        writes=writes,
        conditioned=conditioned,
        record={"model": "random", "architecture": {"mask_token_id": model.cfg.mask_token_id}},
    )


@pytest.fixture(scope="module")
def model():
    return HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")


@pytest.fixture(scope="module")
def store(model, tmp_path_factory):
    return activations(model, TEXTS, [READS, WRITES], out=tmp_path_factory.mktemp("store") / "rows")


def test_few_features_explain_more_than_as_many_principal_components(model, store):
    trained = train_dictionary(model, store, READS, WRITES, n_features=192, k=4, updates=300, batch_size=256)
    x, y = (store.rows(name, range(len(store))) for name in (READS, WRITES))
    features = trained.encode(x)
    left = (y - trained.decode(features)).square().sum() / (y - y.mean(dim=0)).square().sum()
    variances = torch.linalg.svdvals(y - y.mean(dim=0)).square()
    assert left < 0.7 * variances[4:].sum() / variances.sum()
    assert (features > 0).sum(dim=1).float().mean().item() == pytest.approx(4, rel=0.1)
    # All rows fit the sample of which the density is computed. Each feature depends on its own pre-activation.
    torch.testing.assert_close(trained.density, (features > 0).float().mean(dim=0))
    by_hand = [
        a if a > limit else 0.0 for a, limit in zip(trained.pre(x)[0].tolist(), trained.threshold.tolist(), strict=True)
    ]
    assert features[0].tolist() == by_hand
    torch.testing.assert_close(trained.W_dec.norm(dim=1), torch.ones(192))
    assert trained.losses[-20:].mean().item() == pytest.approx(left.item(), rel=0.3)  # a share of the variance


def test_dead_features_learn_what_the_others_leave(model):
    """The auxiliary loss, feature by feature; it moves no live feature."""
    dictionary, generator = random_transcoder(model, n_features=80), torch.Generator().manual_seed(1)
    pre, error = (torch.randn(5, n, generator=generator) for n in (80, model.cfg.d_model))
    dead = torch.arange(80) % 8 != 0
    pre.requires_grad_()
    loss = _auxiliary(dictionary, pre, error, dead)
    left = 0.0
    for of_row, wanted in zip(pre.tolist(), error, strict=True):
        largest = sorted((i for i in range(80) if dead[i]), key=lambda i: -of_row[i])[: model.cfg.d_model // 2]
        left += (wanted - sum(max(of_row[i], 0.0) * dictionary.W_dec[i] for i in largest)).square().sum()
    torch.testing.assert_close(loss, left / error.square().sum())
    loss.backward()
    assert (pre.grad[:, ~dead] == 0).all()
    assert (pre.grad != 0).any()


def test_the_same_seed_gives_the_same_dictionary(model, tmp_path):
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    first, again, other = (
        train_dictionary(model, TEXTS, READS, WRITES, out=out, seed=seed, **SHORT)
        for out, seed in ((tmp_path / "rows", 0), (tmp_path / "rows", 0), (None, 1))
    )
    assert all(torch.equal(each, again.state_dict()[name]) for name, each in first.state_dict().items())
    assert not torch.equal(first.W_enc, other.W_enc)
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert (model.list_hooks(), torch.is_grad_enabled()) == ({}, True)


def test_a_conditioned_dictionary_learns_what_the_share_of_masks_adds(model, store):
    trained = train_dictionary(model, store, READS, WRITES, conditioned=True, **SHORT)
    x = store.rows(READS, range(6))
    at_shares = trained.pre(x, torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])[:, None].expand(6, 1)[:, 0])
    expected = x @ trained.W_enc + trained.b_enc + torch.linspace(0, 1, 6)[:, None] * trained.b_noise
    torch.testing.assert_close(at_shares, expected)
    assert trained.b_noise.abs().max() > 1e-3
    with pytest.raises(ValueError, match="conditioned on the share of masked positions: give share="):
        trained.encode(x)
    by_row = [(store.masked & (store.text == text)).sum() / (store.text == text).sum() for text in range(3)]
    torch.testing.assert_close(
        torch.stack([store.share[store.text == text][0] for text in range(3)]), torch.stack(by_row)
    )


@pytest.mark.parametrize("conditioned", [False, True])
def test_a_spliced_transcoder_replaces_what_is_written(several, conditioned):
    model, tokens = several.model, several.tokens
    dictionary, share = random_transcoder(model, conditioned), torch.tensor([0.3] * len(tokens))
    kept = {}

    def read(x, hook):
        kept["x"] = x

    def by_hand(y, hook):
        pre = kept["x"] @ dictionary.W_enc + dictionary.b_enc + (0.3 * dictionary.b_noise if conditioned else 0)
        return torch.where(pre > 0.5, pre, 0.0) @ dictionary.W_dec + dictionary.b_dec

    def logits(**settings):
        hook = splice(dictionary, share=share, **settings)
        return model.run_with_hooks(tokens, fwd_hooks=[(READS, hook), (WRITES, hook)])

    torch.testing.assert_close(
        logits(error_term=False), model.run_with_hooks(tokens, fwd_hooks=[(READS, read), (WRITES, by_hand)])
    )
    assert torch.equal(logits(), model(tokens))
    assert not torch.allclose(logits(error_term=False), model(tokens), atol=1e-3)


def test_in_the_loop_the_share_is_that_of_the_canvas(model):
    """Of each branch of guidance, whose network sees the prompt or not, and without the padding of a row."""
    seen = []

    class Noting(SparseDictionary):
        def encode(self, x, share=None):
            seen.append(share[:, 0].tolist())
            return super().encode(x, share)

    plain = random_transcoder(model, conditioned=True)
    dictionary = Noting(**{each.name: getattr(plain, each.name) for each in fields(plain)})
    hook = splice(dictionary)
    prompts = [fact.prompt for fact in toy_facts.load().facts("p2d", "p2d")[:40]]
    prompts = sorted(prompts, key=lambda prompt: len(model.encode(prompt)))[:: len(prompts) - 1]
    hooked = {"fwd_hooks": [(READS, hook), (WRITES, hook)]}
    plain_run = model.denoise(prompts, max_new_tokens=4, steps=2, cfg_scale=0.8)
    run = model.denoise(prompts, max_new_tokens=4, steps=2, cfg_scale=0.8, **hooked)
    assert torch.equal(run.canvases, plain_run.canvases)
    expected = []
    for canvas in run.canvases[:2]:
        masked = canvas == model.cfg.mask_token_id
        for hidden in (masked, masked | run.given):
            expected.append([(hidden & run.real)[row].sum().item() / run.real[row].sum().item() for row in range(2)])
    assert not run.real.all()
    assert seen == [pytest.approx(each) for each in expected]


def test_the_loss_of_a_transcoder_is_that_of_its_splice(model):
    dictionary = random_transcoder(model, conditioned=True)
    result = dictionary_loss(model, TEXTS[:1], WRITES, dictionary, t=[0.5])
    zero = dictionary_loss(model, TEXTS[:1], WRITES, random_transcoder(model, n_features=1), t=[0.5])
    assert result.loss("spliced").value != zero.loss("spliced").value
    torch.testing.assert_close(result.density.sum(dim=1), result.l0)
    assert result.dead == (result.density == 0).double().mean()


def test_the_loss_by_step_is_that_of_each_canvas_of_a_run(model):
    dictionary = random_transcoder(model, conditioned=True)
    prompts = [fact.prompt for fact in toy_facts.load().facts("p2d", "p2d")[:3]]
    run = model.denoise(prompts, max_new_tokens=4, steps=3)
    result = dictionary_loss(model, run, WRITES, dictionary)
    for step, t in enumerate(run.record["times"][:-1]):
        assert result.spans[step].tolist() == [t, t]
        for row in range(3):
            real = run.real[row]
            canvas, final, is_open = run.canvases[step, row][real], run.tokens[row][real], ~run.given[row][real]
            masked = canvas == model.cfg.mask_token_id
            hook = splice(dictionary, error_term=False, share=masked.float().mean()[None])
            where = only_at(hook, is_open[None])  # the prompt keeps its activations
            for index, hooks in enumerate(([], [(READS, hook), (WRITES, where)])):
                log_p = model.run_with_hooks(canvas[None], fwd_hooks=hooks)[0].log_softmax(dim=-1)
                read = model.readout.rows(masked.nonzero()[:, 0])
                expected = -log_p[read, final[masked]].sum() / t / is_open.sum()
                assert result.losses[row, step, index].item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-5)
    with pytest.raises(ValueError, match="t= is for texts"):
        dictionary_loss(model, run, WRITES, dictionary, t=0.5)


def test_refusals(model, store):
    hook = splice(random_transcoder(model))
    with pytest.raises(ValueError, match=r"attach its splice to both, and not to 'blocks.1.hook_mlp_out' alone"):
        model.run_with_hooks(torch.tensor([[5, model.cfg.mask_token_id]]), fwd_hooks=[(WRITES, hook)])
    with pytest.raises(ValueError, match=r"writes 'blocks.1.hook_mlp_out'; give that hook point"):
        dictionary_loss(model, TEXTS[:1], READS, random_transcoder(model))
    with pytest.raises(ValueError, match="k=9 of 8 features"):
        train_dictionary(model, store, READS, n_features=8, k=9)
    with pytest.raises(ValueError, match="mask= and t= are for texts"):
        train_dictionary(model, store, READS, mask="masked")
    with pytest.raises(KeyError, match="was not stored"):
        train_dictionary(model, store, "blocks.0.hook_resid_post")
    with pytest.raises(ValueError, match="the loss is not finite with lr=1e"):
        train_dictionary(model, store, READS, lr=1e30, **SHORT)


def test_a_store_of_other_weights_is_refused(store):
    causal = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    with pytest.raises(ValueError, match="those of other weights"):
        train_dictionary(causal, store, READS)
    with pytest.raises(ValueError, match=r"no share of \[MASK\] tells"):
        train_dictionary(causal, TEXTS, READS, conditioned=True)
