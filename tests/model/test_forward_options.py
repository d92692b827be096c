"""Padding, partial runs, picked rows, weights, devices: what surrounds the forward pass."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts_by_hand import clipped, gate, mlp_post, normed
from transformer_lens import ActivationCache
from transformer_lens.model_protocol import TransformerLensModel, TransformerLensModelWithWeights

relaxed = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def tokens(every):
    return every.tokens


@relaxed
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3), left=st.booleans(), seed=st.integers(0, 99))
def test_padding_never_moves_a_real_tokens_logits(several, lengths, left, seed):
    model, generator = several.model, torch.Generator().manual_seed(seed)
    width = max(lengths) + 3
    tokens = torch.randint(500, (len(lengths), width), generator=generator)
    real = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        real[row, slice(width - length, None) if left else slice(length)] = True
    padded = model(tokens, attention_mask=real)
    assert padded.isfinite().all()
    for row in range(len(lengths)):
        alone = model(tokens[row][real[row]][None])[0]
        torch.testing.assert_close(padded[row][real[row]], alone, rtol=1e-5, atol=5e-5)


def test_a_mask_of_ones_is_no_mask(several):
    tokens = several.tokens
    assert torch.equal(several.model(tokens, attention_mask=torch.ones_like(tokens)), several.model(tokens))


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_stopping_and_starting_again_is_one_run(several, cut):
    tokens = several.tokens
    resid = several.model(tokens, stop_at_layer=cut)
    assert resid.shape == (*tokens.shape, several.model.cfg.d_model)
    assert torch.equal(several.model(resid, start_at_layer=cut), several.model(tokens))


def test_negative_layers_count_from_the_end(several):
    tokens = several.tokens
    assert torch.equal(several.model(tokens, stop_at_layer=-1), several.model(tokens, stop_at_layer=2))


def test_picked_rows_are_rows_of_the_whole(several):
    tokens = several.tokens
    whole = several.model(tokens)
    close = dict(rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(several.model(tokens, logits_at=[3, -1]), whole[:, [3, -1]], **close)
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    torch.testing.assert_close(several.model(tokens, logits_at=mask), whole[mask], **close)
    batch, rows = torch.tensor([2, 0]), torch.tensor([16, 5])
    torch.testing.assert_close(several.model(tokens, logits_at=(batch, rows)), whole[batch, rows], **close)


@relaxed
@given(data=st.data(), padded=st.booleans(), left=st.booleans())
def test_the_last_block_may_leave_out_rows_that_nobody_reads(several, data, padded, left):
    """Any ragged choice of rows, some of them twice, in any order: the rows of the whole run."""
    model, tokens = several.model, several.tokens
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 16)), min_size=1, max_size=12))
    batch, rows = torch.tensor(pairs).unbind(1)
    real = torch.ones_like(tokens)
    if padded:
        real[1, : 4 if left else 17] = 0
        real[1, 5:9] = 1
    torch.testing.assert_close(
        model(tokens, attention_mask=real, logits_at=(batch, rows)),
        model(tokens, attention_mask=real)[batch, rows],
        rtol=1e-5,
        atol=2e-5,
    )


def test_a_hook_in_the_last_block_sees_every_row(several):
    tokens = several.tokens
    model, seen = several.model, {}

    def keep(activation, hook):
        seen[hook.name] = activation.shape[1]

    names = [f"blocks.{model.cfg.n_layers - 1}.hook_mlp_out", "ln_final.hook_scale", "blocks.0.hook_mlp_out"]
    for name in names:
        model.run_with_hooks(tokens, logits_at=[2], fwd_hooks=[(name, keep)])
    assert seen == dict.fromkeys(names, tokens.shape[1])


def test_unread_rows_of_the_last_block_cost_nothing(several):
    """The products that the last MLP and the head take, counted: one row of 17."""
    from torch.utils.flop_counter import FlopCounterMode

    tokens = several.tokens

    def cost(**options):
        with FlopCounterMode(display=False) as counter:
            several.model(tokens, start_at_layer=None, **options)
        return counter.get_total_flops()

    cfg = several.model.cfg
    whole, one = cost(), cost(logits_at=[4])
    by_row = 2 * (
        (3 if cfg.gated_mlp else 2) * cfg.d_model * cfg.d_mlp
        + 2 * cfg.n_heads * cfg.d_head * cfg.d_model
        + cfg.d_model * cfg.d_vocab_out
    )
    assert whole - one >= 3 * 16 * by_row


@pytest.mark.parametrize("rows", [(torch.tensor([3]), torch.tensor([0])), (torch.tensor([0]), torch.tensor([17]))])
def test_pairs_outside_are_refused(several, rows):
    tokens = several.tokens
    with pytest.raises(ValueError, match="logits_at reaches"):
        several.model(tokens, logits_at=rows)


def test_return_type_none_runs_the_hooks(several):
    tokens = several.tokens
    seen = []
    out = several.model.run_with_hooks(
        tokens, return_type=None, fwd_hooks=[("ln_final.hook_scale", lambda a, hook: seen.append(a.shape))]
    )
    assert out is None
    assert seen == [torch.Size([3, 17, 1])]


def test_cache_is_transformer_lens_own(every, tokens):
    _, cache = every.model.run_with_cache(tokens[:1], remove_batch_dim=True)
    assert isinstance(cache, ActivationCache)
    assert cache["resid_post", -1].shape == (17, every.model.cfg.d_model)
    assert cache["k", 0].shape == (17, every.model.cfg.n_key_value_heads, every.model.cfg.d_head)
    if every.model.cfg.layer_scalars:
        for tool in (cache.decompose_resid, cache.stack_head_results, cache.stack_neuron_results):
            with pytest.raises(ValueError, match="ends with a factor of the whole stream"):
                tool(layer=-1)
        return
    stack, labels = cache.decompose_resid(layer=-1, return_labels=True)
    assert labels[0] == "embed"
    torch.testing.assert_close(stack.sum(0), cache["resid_post", -1], rtol=1e-5, atol=1e-4)


def test_cached_scale_reproduces_the_final_norm(every, tokens):
    _, cache = every.model.run_with_cache(tokens)
    final = cache.accumulated_resid(layer=-1, apply_ln=False)[-1]
    output = normed(every.model, cache, "ln_final", cache.apply_ln_to_stack(final[None], layer=-1)[0])
    torch.testing.assert_close(every.model.unembed(output), every.model(tokens), rtol=1e-4, atol=1e-4)


def test_the_protocols_hold(several):
    assert isinstance(several.model, TransformerLensModel)
    assert isinstance(several.model, TransformerLensModelWithWeights)


def test_weights_under_their_names_rebuild_an_attention_output(summed):
    """Heads multiplied out by hand from W_V, W_O and the cached pattern give attn_out."""
    model = summed.model
    _, cache = model.run_with_cache(summed.tokens)
    read = normed(model, cache, "blocks.1.ln1")
    shared_by = model.cfg.n_heads // model.cfg.n_key_value_heads
    out = torch.zeros_like(read)
    for head in range(model.cfg.n_heads):
        value = clipped(model, read @ model.W_V[1, head // shared_by] + model.b_V[1, head // shared_by])
        out += cache["pattern", 1][:, head] @ value @ model.W_O[1, head]
    out = (out + model.b_O[1]) * gate(model, cache, 1, "attn")
    torch.testing.assert_close(out, cache["attn_out", 1], rtol=1e-4, atol=1e-5)
    ov = model.OV[1, 3].AB
    torch.testing.assert_close(ov, model.W_V[1, 3 // shared_by] @ model.W_O[1, 3], rtol=1e-5, atol=1e-5)


def test_weights_under_their_names_rebuild_an_mlp_output(summed):
    model = summed.model
    _, cache = model.run_with_cache(summed.tokens)
    layer = summed.dense_layers[-1]
    mlp = model.blocks[layer].mlp
    post = mlp_post(mlp, normed(model, cache, f"blocks.{layer}.ln2"))
    out = (post @ mlp.W_out + mlp.b_out) * gate(model, cache, layer, "mlp")
    torch.testing.assert_close(out, cache["mlp_out", layer], rtol=1e-4, atol=1e-5)


def test_one_blocks_weights_are_views(several):
    tokens = several.tokens
    model = several.tell(copy.deepcopy(several.model))
    before = model(tokens)
    with torch.no_grad():
        model.blocks[0].mlp.W_out[3] += 1.0
        model.blocks[1].attn.W_Q[0] *= 2.0
    assert not torch.allclose(model(tokens), before)
    assert torch.equal(several.model(tokens), before)


def test_a_deep_copy_has_a_clock_of_its_own(several):
    model = copy.deepcopy(several.model)
    assert model.clock is not several.model.clock
    assert {id(point.clock) for point in model.hook_points()} == {id(model.clock)}


def test_moving_keeps_the_config_in_step(several):
    model = copy.deepcopy(several.model).to(torch.float64)
    assert model.cfg.dtype == torch.float64
    assert several.model.cfg.dtype == torch.float32


def test_bidirectional_rows_do_not_know_their_batch(several):
    tokens = several.tokens
    alone = torch.cat([several.model(row[None]) for row in tokens])
    torch.testing.assert_close(several.model(tokens), alone, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (torch.tensor([[1, 513]]), ValueError, "513 is not among the"),
        (torch.tensor([[1, -1]]), ValueError, "has not reached"),
        (torch.tensor([[1, -7]]), ValueError, "-7 is not among"),
        (torch.tensor([[1.0, 2.0]]), TypeError, "must be integers"),
        (torch.zeros(1, 0, dtype=torch.long), ValueError, "needs at least one token"),
        (torch.zeros(0, 4, dtype=torch.long), ValueError, "needs at least one token"),
        (torch.zeros(1, 129, dtype=torch.long), ValueError, "n_ctx=128"),
        (torch.zeros(1, 2, 3, dtype=torch.long), ValueError, "must be \\[batch, pos\\]"),
        ("some text", ValueError, "without a tokenizer"),
    ],
)
def test_bad_tokens(several, tokens, error, message):
    with pytest.raises(error, match=message):
        several.model(tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(start_at_layer=9), "start_at_layer=9"),
        (dict(stop_at_layer=-9), "stop_at_layer=-9"),
        (dict(logits_at=[17]), "outside the 17 rows"),
        (dict(logits_at=torch.zeros(2, 17, dtype=torch.bool)), "logits_at"),
        (dict(attention_mask=torch.ones(3, 4)), "must match the tokens"),
        (dict(attention_mask=torch.zeros(3, 17)), "without a single real token"),
        (dict(return_type="logit"), "return_type='logit'"),
        (dict(start_at_layer=1), "residual stream"),
    ],
)
def test_bad_options(several, options, message):
    tokens = several.tokens
    with pytest.raises(ValueError, match=message):
        several.model(tokens, **options)
