"""The loss of models that attend by blocks: each block is predicted from its noisy self and clean blocks before it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.evaluation import chain_rule_nll, monte_carlo_nll, nll_by_order
from diffusion_lens.model.attention import AttentionPattern
from diffusion_lens.training import masked_diffusion_loss

GOLDEN = Path(__file__).parent / "golden" / "sdar"
BLOCK = 4


@pytest.fixture(scope="module")
def block_model():
    return HookedDiffusionTransformer.from_pretrained(GOLDEN, device="cpu")


@pytest.fixture(scope="module")
def numbers():
    return load_file(GOLDEN / "golden.safetensors")


@torch.no_grad()
def test_the_training_pass_is_that_of_the_authors_code(block_model, numbers):
    noisy, text = numbers["train.xt"], numbers["train.x0"]
    n_pos = text.shape[1]
    pattern = AttentionPattern(BLOCK).beside_clean(n_pos, text.device, None)
    assert torch.equal(pattern.allowed[0, 0], numbers["train.mask_b4"])
    expected = numbers["train.logits_b4"][:, :n_pos]
    torch.testing.assert_close(block_model(noisy, clean=text), expected, rtol=1e-5, atol=3e-5)

    masked = noisy == block_model.cfg.mask_token_id
    p = torch.full(text.shape, 0.4)
    ours = masked_diffusion_loss(block_model, text, noisy, p)
    theirs = (F.cross_entropy(expected[masked], text[masked], reduction="none") / 0.4).sum() / text.numel()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_noisy_block_reads_what_it_reads_in_the_loop(block_model):
    """Clean blocks before it, then the noisy block: with padding too, which is read by nobody."""
    text = torch.randint(140, (2, 11), generator=torch.Generator().manual_seed(0))
    noisy, p_mask = block_model.hide(text, generator=torch.Generator().manual_seed(1))
    both = block_model(noisy, clean=text)
    for start in range(0, 11, BLOCK):
        canvas = torch.cat([text[:, :start], noisy[:, start : start + BLOCK]], dim=1)
        alone = block_model(canvas)[:, start:]
        torch.testing.assert_close(both[:, start : start + BLOCK], alone, rtol=1e-4, atol=2e-5)
    real = torch.ones(2, 14, dtype=torch.bool)
    real[:, :2] = real[:, 13] = False
    padded = [F.pad(x, (2, 1), value=7) for x in (noisy, text)]
    inside = block_model(padded[0], attention_mask=real, clean=padded[1])[:, 2:13]
    torch.testing.assert_close(inside, both, rtol=1e-4, atol=2e-5)
    some = block_model(noisy, clean=text, logits_at=[1, 9])
    torch.testing.assert_close(some, both[:, [1, 9]], rtol=1e-4, atol=2e-5)

    loss = block_model.loss_fn(both, text, noisy=noisy, p_mask=p_mask)
    own, samples = (block_model(text, return_type="loss", samples=n) for n in (1, 3))
    assert own.isfinite()
    assert samples.isfinite()
    torch.testing.assert_close(loss, masked_diffusion_loss(block_model, text, noisy, p_mask), rtol=1e-5, atol=1e-5)
    logits, again = block_model(text, return_type="both")
    assert logits.shape == (2, 11, block_model.cfg.d_vocab_out)
    torch.testing.assert_close(again, own)


def test_the_loss_trains_the_clean_stream_too(block_model):
    text = torch.randint(140, (1, 12), generator=torch.Generator().manual_seed(0))
    noisy = text.clone()
    noisy[:, 8:] = block_model.cfg.mask_token_id
    embedded = []
    hooks = [("hook_embed", lambda x, hook: embedded.append(x) or x.retain_grad())]
    with block_model.hooks(fwd_hooks=hooks):
        masked_diffusion_loss(block_model, text, noisy, torch.full(text.shape, 0.5)).backward()
    block_model.zero_grad()
    moved = embedded[0].grad[0].abs().amax(dim=-1) > 0
    assert moved.tolist() == [False] * 8 + [True] * 4 + [True] * 8 + [False] * 4


@torch.no_grad()
def test_the_bound_is_above_the_chain_rule_and_tight_for_one_token(block_model):
    text = torch.randint(140, (9,), generator=torch.Generator().manual_seed(0))
    exact = chain_rule_nll(block_model, text[:8], text[8:])
    noisy = text[None].clone()
    noisy[:, 8] = block_model.cfg.mask_token_id
    bound = monte_carlo_nll(block_model, text[:8], text[8:], noisy=noisy, p_mask=torch.ones(1, 9))
    assert bound.value == pytest.approx(float(exact), rel=1e-5)
    # Later blocks are scored given the clean answer in earlier ones.
    noisy = text.index_fill(0, torch.arange(3, 9), block_model.cfg.mask_token_id)[None]
    answer = monte_carlo_nll(block_model, text[:3], text[3:], noisy=noisy, p_mask=torch.ones(1, 9))
    by_block = 0.0
    for start, stop in ((3, 4), (4, 8), (8, 9)):
        canvas = text[None, :stop].clone()
        canvas[:, start:] = block_model.cfg.mask_token_id
        scores = block_model(canvas)[0, start:stop].log_softmax(dim=-1)
        by_block -= float(scores.gather(1, text[start:stop, None]).sum())
    assert answer.value == pytest.approx(by_block, rel=1e-5)


@torch.no_grad()
def test_orders_are_within_blocks(block_model):
    """Blocks of the text, of which the answer begins at its position 6, from left to right."""
    text = torch.randint(140, (11,), generator=torch.Generator().manual_seed(0))
    question = block_model, text[:6], text[6:]

    def one_at_a_time(order):
        canvas, total = text.clone()[None], 0.0
        canvas[:, 6:] = block_model.cfg.mask_token_id
        for place in order:
            stop = 4 * ((6 + place) // 4 + 1)
            total -= float(block_model(canvas[:, :stop])[0, 6 + place].log_softmax(dim=-1)[text[6 + place]])
            canvas[0, 6 + place] = text[6 + place]
        return total

    for order, named in (([0, 1, 2, 3, 4], "left_to_right"), ([1, 0, 4, 3, 2], "right_to_left")):
        expected = pytest.approx(one_at_a_time(order), rel=1e-5)
        assert float(chain_rule_nll(*question, order=named)) == expected
        assert float(chain_rule_nll(*question, order=torch.tensor(order))) == expected
    found = nll_by_order(*question, n_orders=5)
    assert found.nll.tolist() == pytest.approx([one_at_a_time(order) for order in found.orders.tolist()], rel=1e-5)
    with pytest.raises(ValueError, match=r"order=\[0, 2, 1, 3, 4\] reveals a token before one of an earlier block"):
        chain_rule_nll(*question, order=torch.tensor([0, 2, 1, 3, 4]))


def test_clean_is_for_models_that_attend_by_blocks(block_model, either):
    with pytest.raises(ValueError, match="clean= is what the blocks of a model that attends by blocks see"):
        either.model(either.tokens, clean=either.tokens)
    with pytest.raises(ValueError, match=r"clean is \[1, 3\]; it must have the shape of the tokens, \[1, 4\]"):
        block_model(torch.ones(1, 4, dtype=torch.long), clean=torch.ones(1, 3, dtype=torch.long))
