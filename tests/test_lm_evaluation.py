"""The adapter of `examples/lm_evaluation`, with the parts of lm-eval that it uses written here."""

import importlib
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from diffusion_lens.evaluation import chain_rule_nll

PROMPT, ANSWER = "Gustav Geisser is the", " brave drummer of Rolsen."


def rolling(tokens, prefix, longest, context_len):
    """`lm_eval.utils.get_rolling_token_windows` for a context of one token: what each window is predicted from."""
    assert context_len == 1
    for start in range(0, len(tokens), longest):
        predicted = tokens[start : start + longest]
        yield ([prefix] if not start else tokens[start - 1 : start] + predicted[:-1]), predicted


@pytest.fixture
def adapter(tiny, monkeypatch):
    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.utils")}
    modules["lm_eval.api.model"].LM = object
    modules["lm_eval.utils"].get_rolling_token_windows = rolling
    modules["lm_eval.utils"].make_disjoint_window = lambda pair: (pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "lm_evaluation.adapter", raising=False)
    return importlib.import_module("lm_evaluation.adapter").DiffusionLensLM(tiny, steps=8)


def requests(*args):
    return [SimpleNamespace(args=each) for each in args]


def test_continuations_have_their_likelihood_and_whether_they_are_the_likeliest(tiny, adapter):
    answers = adapter.loglikelihood(requests((PROMPT, ANSWER), (PROMPT, " brave miner of Rolsen.")))
    assert answers[0][0] > answers[1][0]
    if tiny.cfg.is_autoregressive:  # the diffusion model was trained on longer canvases, and is less certain here
        assert [likeliest for _, likeliest in answers] == [True, False]
    for (value, _), answer in zip(answers, (ANSWER, " brave miner of Rolsen."), strict=True):
        assert value == pytest.approx(-chain_rule_nll(tiny, PROMPT, answer).item(), rel=1e-5)
    assert adapter.loglikelihood(requests(("", PROMPT)))[0][0] < 0


def test_a_text_longer_than_the_context_is_read_in_windows(tiny, adapter, monkeypatch):
    tokens = tiny.encode(PROMPT)
    whole = adapter.loglikelihood_rolling(requests((PROMPT,)))[0]
    assert whole == pytest.approx(adapter._log_likelihood([adapter.first], tokens))
    if tiny.cfg.is_autoregressive:  # by hand, from one pass
        row = torch.tensor([[adapter.first, *tokens]])
        by_hand = tiny(row).log_softmax(dim=-1)[0, :-1].gather(1, row[0, 1:, None]).sum()
        assert whole == pytest.approx(by_hand.item(), rel=1e-5)
    adapter.longest = 3
    parts = [adapter._log_likelihood([adapter.first], tokens[:2]), adapter._log_likelihood(tokens[1:2], tokens[2:])]
    assert adapter.loglikelihood_rolling(requests((PROMPT,)))[0] == pytest.approx(sum(parts))
    assert math.isfinite(sum(parts))


def test_generated_text_ends_before_what_it_is_to_stop_at(adapter):
    until = {"until": ["drummer", "\n"], "max_gen_toks": 8}
    assert adapter.generate_until(requests((PROMPT, until))) == ["brave "]
