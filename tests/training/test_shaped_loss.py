"""The early-exit loss and edge dropout, against slow versions and against what the network can know."""

import pytest
import torch

from bundled_models.rows_and_blocks import grow
from bundled_models.site_losses import EarlyExit, EdgeDropout, ShapedLoss, Targets
from diffusion_lens.model.loss import loss_batch, own_loss
from diffusion_lens.training import TrainingConfig, train

READERS, SOURCES = (438,), tuple(range(20, 60))  # [MASK], and some words


def first_words(tokens):
    """Ids 5 and 6 at the first position of each row, but not of the last one."""
    rows = torch.arange(len(tokens) - 1)
    return Targets((rows, torch.zeros_like(rows)), torch.tensor([[5, 6]]).repeat(len(rows), 1))


def noise(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def model(new_model):
    return grow(new_model(), 2, std=0.3)


def test_early_exit_is_the_cross_entropy_of_the_models_lower_part(model, tokens):
    """A model without its upper block computes the same residual stream, and reads it with the same head."""
    exit = EarlyExit(0, first_words, weight=0.3)
    shaped = ShapedLoss(exit)(model, tokens[:4], noise())
    own = loss_batch(model, tokens[:4], None, noise())
    logits = model.unembed(model.ln_final(model(own.tokens, attention_mask=None, stop_at_layer=1)))
    expected = torch.zeros(())
    for row in range(3):
        p = logits[row, 0].exp() / logits[row, 0].exp().sum()
        expected = expected - 0.3 * (p[5].log() / 2 + p[6].log() / 2) / 3
    torch.testing.assert_close(shaped, own_loss(model, tokens[:4], noise()) + expected, atol=1e-5, rtol=1e-5)


def test_nothing_to_predict_costs_nothing(model, tokens):
    def nothing(tokens):
        empty = torch.zeros(0, dtype=torch.long)
        return Targets((empty, empty), empty.reshape(0, 2))

    shaped = ShapedLoss(EarlyExit(0, nothing))(model, tokens[:4], noise())
    assert torch.equal(shaped, own_loss(model, tokens[:4], noise()))
    shaped.backward()


def test_without_parts_it_is_the_models_own_loss(model, new_model, tokens):
    assert torch.equal(ShapedLoss()(model, tokens[:4], noise()), own_loss(model, tokens[:4], noise()))
    causal = new_model("ar")
    assert torch.equal(ShapedLoss()(causal, tokens[:4], noise()), own_loss(causal, tokens[:4]))


def test_dropped_edges_have_no_weight_and_others_keep_their_proportions(model, tokens):
    batch = tokens[:6].clone()
    batch[:, 3] = READERS[0]
    plain, dropped = {}, {}
    hooks = EdgeDropout((0,), READERS, SOURCES, share=0.5).hooks(batch, noise(2))
    assert [name for name, _ in hooks] == ["blocks.0.attn.hook_attn_scores"]

    def keep(store):
        return ("blocks.0.attn.hook_pattern", lambda pattern, hook: store.update(pattern=pattern))

    model.run_with_hooks(batch, fwd_hooks=[keep(plain)])
    model.run_with_hooks(batch, fwd_hooks=[*hooks, keep(dropped)])
    rows = torch.rand(6, generator=noise(2)) < 0.5
    assert 0 < rows.sum() < 6
    for row in range(6):
        for query in range(batch.shape[1]):
            seen = torch.tensor(
                [
                    not (rows[row] and int(batch[row, query]) in READERS and int(token) in SOURCES)
                    for token in batch[row]
                ]
            )
            weights = plain["pattern"][row, :, query] * seen
            expected = weights / weights.sum(dim=-1, keepdim=True)
            torch.testing.assert_close(dropped["pattern"][row, :, query], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_a_position_always_sees_itself(model, tokens):
    batch = torch.full((1, 4), 20)
    pattern = {}
    hooks = EdgeDropout((1,), (20,), (20,), share=1.0).hooks(batch)
    read = ("blocks.1.attn.hook_pattern", lambda activation, hook: pattern.update(found=activation))
    model.run_with_hooks(batch, fwd_hooks=[*hooks, read])
    assert torch.equal(pattern["found"], torch.eye(4).expand_as(pattern["found"]))


def test_hidden_sources_do_not_move_the_logits_of_a_reader(model, new_model, tokens):
    """In a model of one block, the edge is the only way. Otherwise a source still arrives through other positions."""
    batch = tokens[:1].clone()
    batch[0, 3], batch[0, 5] = READERS[0], SOURCES[0]
    other = batch.clone()
    other[0, 5] = SOURCES[1]
    for network, layers, moves in ((new_model(), (0,), False), (model, (0,), True), (model, (0, 1), True)):
        dropout = EdgeDropout(layers, READERS, SOURCES, share=1.0)
        first, second = (network.run_with_hooks(x, fwd_hooks=dropout.hooks(x))[0, 3] for x in (batch, other))
        assert torch.equal(first, second) is not moves


@pytest.mark.parametrize(("share", "same"), [(0.0, True), (1.0, False)])
def test_share_is_the_probability_of_a_row(share, same, model, tokens):
    dropout = EdgeDropout((0, 1), READERS, tuple(range(438)), share)
    generator = noise()
    shaped = ShapedLoss(dropout=dropout)(model, tokens[:6], generator)
    # The noise of the text comes first, so that dropout does not change it.
    assert torch.allclose(shaped, own_loss(model, tokens[:6], noise())) is same


def test_training_with_both_resumes_and_leaves_nothing(model, tokens, tmp_path):
    objective = ShapedLoss(EarlyExit(0, first_words), EdgeDropout((0, 1), READERS, SOURCES))
    config = TrainingConfig(steps=4, batch_size=8, warmup=1)
    whole, resumed = (grow(model, 2) for _ in range(2))
    record = train(whole, tokens, config, objective=objective, progress=False)
    assert not whole.list_hooks()

    def stop(model):
        raise KeyboardInterrupt

    keywords = dict(objective=objective, folder=tmp_path, progress=False)
    with pytest.raises(KeyboardInterrupt):
        train(grow(model, 2), tokens, config, checkpoint_every=2, evaluate=stop, evaluate_every=3, **keywords)
    again = train(resumed, tokens, config, **keywords)
    assert torch.equal(again.losses, record.losses)
    assert all(torch.equal(weight, resumed.state_dict()[name]) for name, weight in whole.state_dict().items())


def test_hooks_do_not_stay_after_an_exception(model, tokens):
    def broken(tokens):
        raise RuntimeError("no targets")

    objective = ShapedLoss(EarlyExit(0, broken), EdgeDropout((0,), READERS, SOURCES))
    with pytest.raises(RuntimeError, match="no targets"):
        objective(model, tokens[:4], noise())
    assert not model.list_hooks()


def test_bad_settings_are_refused(model, tokens):
    with pytest.raises(ValueError, match=r"share=1\.5; it must be between 0 and 1"):
        EdgeDropout((0,), READERS, SOURCES, share=1.5)
    with pytest.raises(ValueError, match="weight"):
        EarlyExit(0, first_words, weight=float("inf"))
    with pytest.raises(KeyError, match=r"blocks\.7"):
        ShapedLoss(EarlyExit(7, first_words))(model, tokens[:2], noise())
