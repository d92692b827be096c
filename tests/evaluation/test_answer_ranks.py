"""Ranks of an answer, against TransformerLens's `test_prompt` and a pass for each token."""

import re

import pytest
import torch
from torch.testing import assert_close
from transformer_lens import utilities

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.evaluation import AnswerRanks, chain_rule_nll, rank_answer
from diffusion_lens.model.noise import hidden_tokens

PROMPT, ANSWER = "Gustav Geisser is the", " brave drummer"


def test_the_print_is_transformer_lenss_on_the_ar_baseline(capsys):
    model = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    utilities.test_prompt(PROMPT, ANSWER, model, top_k=4)
    theirs = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert rank_answer(model, PROMPT, ANSWER, top_k=4).to_text().split() == theirs.split()


def test_each_token_is_read_after_those_before_it(several):
    model = several.model
    prompt, answer = several.tokens[0, :4] % 500, several.tokens[0, 4:7] % 500
    ranks = rank_answer(model, prompt, answer, top_k=3)
    question = torch.cat([prompt, answer])
    hidden = torch.tensor(
        [0] * 3 if model.cfg.is_autoregressive else hidden_tokens(model.cfg, 3, str(question.tolist()))
    )
    for i, token in enumerate(answer.tolist()):
        given = torch.cat([prompt, answer[:i]])
        tokens = given[None] if model.cfg.is_autoregressive else torch.cat([given, hidden[i:]])[None]
        row = len(given) - (model.cfg.readout == "shifted")
        logits = model(tokens)[0, row]
        if model.cfg.head != "logits":  # [MASK] takes no part in the softmax
            logits[model.cfg.mask_token_id] = -1e6
        assert_close(ranks.probability[i], logits.softmax(-1)[token], rtol=1e-4, atol=1e-7)
        assert_close(ranks.logit[i], logits[token], rtol=1e-4, atol=1e-5)
        ordered = [other for other in logits.argsort(descending=True).tolist() if other != model.cfg.mask_token_id]
        assert ordered.index(token) == ranks.rank[i]
        assert ranks.top[i] == model.words(ordered[:3])
        assert_close(ranks.top_logit[i], logits[ordered[:3]], rtol=1e-4, atol=1e-5)
        assert_close(ranks.top_probability[i], logits.softmax(-1)[ordered[:3]], rtol=1e-4, atol=1e-7)
    if not (
        model.cfg.uniform_noise or model.cfg.time_conditioning
    ):  # the chain rule tells each canvas a time of its own
        assert_close(-ranks.probability.log().sum(), chain_rule_nll(model, prompt, answer), rtol=1e-4, atol=1e-5)


def test_both_bundled_models_rank_the_answer_first(tiny):
    ranks = rank_answer(tiny, PROMPT, ANSWER, n_masks=10)
    assert ranks.rank.tolist() == [0, 0]
    assert [token.strip() for token in ranks.answer] == ["brave", "drummer"]
    assert len(ranks.top[0]) == 10
    assert str(ranks).endswith(f"Ranks of the answer tokens: {[(token, 0) for token in ranks.answer]}")
    assert ranks.record["weights_sha256"]


def test_ranks_come_back_from_their_file(tiny, tmp_path):
    ranks = rank_answer(tiny, PROMPT, ANSWER, n_masks=10, top_k=3)
    again = AnswerRanks.load(ranks.save(tmp_path / "ranks.safetensors"))
    assert again.to_text() == ranks.to_text()
    assert again.record == ranks.record
    assert (again.record["n_masks"], again.record["top_k"]) == (None if tiny.cfg.is_autoregressive else 10, 3)
    assert again.record["answer_tokens"] == tiny.to_tokens(ANSWER, prepend_bos=False)[0].tolist()


def test_what_cannot_be_ranked_is_refused(tiny):
    with pytest.raises(ValueError, match="has no answer: '' adds no token"):
        rank_answer(tiny, PROMPT, "")
    with pytest.raises(ValueError, match="n_masks=1, but the answer has 2 tokens"):
        rank_answer(tiny, PROMPT, ANSWER, n_masks=1)
    with pytest.raises(ValueError, match="top_k=0; it must be at least 1"):
        rank_answer(tiny, PROMPT, ANSWER, top_k=0)
