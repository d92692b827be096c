"""circuitsvis draws cached patterns and tokens: the page contains our numbers."""

import json
import re
from typing import Any

import circuitsvis
import torch


def drawn(html: str) -> dict[str, Any]:
    """The arguments that the page hands to its component."""
    (arguments,) = re.findall(r"render\(\s*\"[^\"]+\",\s*\w+,\s*(\{.*\})\s*\)", html, re.DOTALL)
    found: dict[str, Any] = json.loads(arguments)
    return found


def test_attention_heads_show_the_cached_pattern_and_the_tokens(prompts: Any) -> None:
    _, cache = prompts.model.run_with_cache(prompts.tokens, remove_batch_dim=True)
    words = prompts.model.to_str_tokens(prompts.tokens)
    page = drawn(circuitsvis.attention.attention_heads(attention=cache["pattern", 1], tokens=words).show_code())
    assert page["tokens"] == words
    torch.testing.assert_close(torch.tensor(page["attention"]), cache["pattern", 1], rtol=0, atol=1e-4)


def test_one_pattern_and_values_of_tokens_are_drawn(prompts: Any) -> None:
    logits, cache = prompts.model.run_with_cache(prompts.tokens, remove_batch_dim=True)
    words = prompts.model.to_str_tokens(prompts.tokens)
    pattern = cache["pattern", 2][3]
    page = drawn(circuitsvis.attention.attention_pattern(tokens=words, attention=pattern).show_code())
    assert torch.allclose(torch.tensor(page["attention"]), pattern, atol=1e-4)
    values = logits[0, :, prompts.answer].sigmoid()
    page = drawn(circuitsvis.tokens.colored_tokens(words, values).show_code())
    assert torch.allclose(torch.tensor(page["values"]), values, atol=1e-4)
