"""Ragged batches give what rows give alone, and chance follows the distribution it claims."""

import pytest
import torch

from diffusion_lens import Fact
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.samplers import Ancestral, ReMDM

SHORT, LONG = "Gustav Geisser is the", "people say Gustav Geisser was the"


def test_a_batch_of_texts_gives_what_each_text_gives_alone(tiny):
    together = tiny.denoise([SHORT, LONG], max_new_tokens=6, steps=4)
    for row, text in enumerate((SHORT, LONG)):
        alone = tiny.denoise(text, max_new_tokens=6, steps=4)
        assert together.text[row] == alone.text[0]
        n = alone.tokens.shape[1]
        assert torch.equal(together.canvases[:, row, :n], alone.canvases[:, 0])
        assert torch.equal(together.revealed_at[row, :n], alone.revealed_at[0])
    assert together.real.sum(dim=1).tolist() == [10, 12]


def test_guidance_does_not_see_padding():
    from diffusion_lens import HookedDiffusionTransformer

    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    together = model.denoise([SHORT, LONG], max_new_tokens=6, steps=4, cfg_scale=0.7)
    alone = model.denoise(SHORT, max_new_tokens=6, steps=4, cfg_scale=0.7)
    assert torch.equal(together.canvases[:, 0, :10], alone.canvases[:, 0])
    torch.testing.assert_close(together.confidence[0, :10], alone.confidence[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_a_batch_of_texts_runs_with_its_padding_mask(tiny):
    together = tiny([SHORT, LONG])
    torch.testing.assert_close(together[0, :4], tiny(SHORT)[0], rtol=1e-5, atol=2e-5)
    left, _ = tiny.tokenize([SHORT, LONG], padding_side="left")
    assert torch.equal(left[0, 2:], tiny.to_tokens(SHORT)[0])


def test_padding_is_the_tokenizers_own(tiny):
    canvas = lay_out(tiny, [SHORT, LONG], None, 3)
    assert canvas.tokens[0, 7:].tolist() == [tiny.tokenizer.pad_token_id] * 2


def test_gumbel_noise_draws_from_the_softmax(either):
    """1000 samples of one token at temperature 1 against its probabilities."""
    model, prompt = either.model, torch.tensor([[5, 6, 7]])
    scale = 0.3  # flattens the distribution so that many tokens take part

    def flatten(logits, hook):
        return logits * scale

    drawn = model.denoise(
        prompt.expand(1000, -1),
        length=4,
        steps=1,
        temperature=1.0,
        seed=0,
        fwd_hooks=[("denoise.hook_logits", flatten)],
    ).tokens[:, 3]
    canvas = torch.tensor([[5, 6, 7, 512]]) if either.kind == "mdm" else prompt
    expected = (model(canvas)[0, -1] * scale).softmax(-1)
    top = expected.topk(5).indices
    for token in top.tolist():
        p = expected[token].item()
        assert (drawn == token).float().mean().item() == pytest.approx(p, abs=5 * (p * (1 - p) / 1000) ** 0.5)


def test_a_lower_temperature_sharpens(either):
    draws = [
        either.model.denoise(torch.tensor([[5, 6, 7]]).expand(200, -1), length=4, steps=1, temperature=heat).tokens[
            :, 3
        ]
        for heat in (0.2, 3.0)
    ]
    assert draws[0].unique().numel() < draws[1].unique().numel()


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_ancestral_reveals_each_position_with_its_probability(either):
    """After k of n equal steps a position is revealed with probability 1 - t_k."""
    run = either.model.denoise(torch.tensor([[5]]).expand(60, -1), length=41, steps=4, sampler=Ancestral(), seed=3)
    for step in range(3):
        share = (run.revealed_at[:, 1:] <= step).float().mean().item()
        expected = (step + 1) / 4
        assert share == pytest.approx(expected, abs=5 * (expected * (1 - expected) / 2400) ** 0.5)


def test_a_hook_cannot_reveal_over_the_prompt(either):
    run = either.model.denoise(
        torch.tensor([[5, 6, 7]]), length=8, steps=3, fwd_hooks=[("denoise.hook_reveal", lambda a, hook: a | True)]
    )
    assert (run.tokens[0, :3] == torch.tensor([5, 6, 7])).all()
    assert (run.revealed_at[0, :3] == -1).all()
    assert (run.confidence[0, :3] == 1).all()


def test_one_function_serves_both_variants(either):
    """It indexes places that the twin has not reached yet, and asks which are masked."""

    def fn(activation, hook):
        assert activation.shape[1] == 12
        return torch.where(hook.step.masked[..., None], activation * 2, activation)

    run = either.model.denoise(
        torch.tensor([[5, 6, 7, 8]]), length=12, steps=4, fwd_hooks=[("blocks.1.hook_resid_post", fn)]
    )
    assert (run.tokens >= 0).all()


def test_the_subject_is_found_behind_a_bos(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from diffusion_lens import HookedDiffusionTransformer

    tiny = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    words = {word: i for i, word in enumerate(["<s>", "<unk>", "Ada", "Marsh", "was", "here"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny.set_tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>"),
        default_prepend_bos=True,
    )
    query = Fact("Ada Marsh was", "Marsh", " here").to_query(tiny)
    assert query.tokens[:4].tolist() == [0, 2, 3, 4]
    assert query.subject == (2, 3)
    assert query.answer_positions == (4,)
    assert Fact("Ada Marsh was", "Marsh", " here").to_query(tiny, prepend_bos=False).subject == (1, 2)
    tiny.cfg.default_prepend_bos = False
    again = HookedDiffusionTransformer.from_pretrained(tiny.save_pretrained(tmp_path / "saved"), device="cpu")
    assert again.cfg.default_prepend_bos is False


def test_masks_written_in_text_are_filled():
    from diffusion_lens import HookedDiffusionTransformer

    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    run = model.denoise("Gustav [MASK] is the brave [MASK] of Rolsen.", length=14, steps=8)
    assert run.text[0].startswith("Gustav Geisser is the brave drummer of Rolsen.")
    assert run.given[0, :8].tolist() == [True, False, True, True, True, False, True, True]


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_remasked_rows_are_independent(either):
    prompt = torch.tensor([[5, 6], [7, 8], [9, 10]])
    options = dict(length=10, steps=6, sampler=ReMDM(eta=0.3))
    together = either.model.denoise(prompt, seed=4, **options)
    masked = together.canvases == either.model.cfg.mask_token_id
    assert (masked[1:] & ~masked[:-1]).any(dim=(0, 2)).all()  # each row is remasked somewhere
    for row in range(3):
        alone = either.model.denoise(prompt[row : row + 1], seed=[together.record["seeds"][row]], **options)
        assert torch.equal(alone.canvases[:, 0], together.canvases[:, row])
