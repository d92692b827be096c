"""Checks ten common facts in two ways: in one forward pass, and by the denoising loop.

In one pass a fact is known if the first token of its answer is likelier than the first tokens of the nine other
answers: a model that prefers " a" to " Paris" can still distinguish the capitals. A guess is right for one in ten. On
the canvas the answer is hidden by the model's noise, [MASK] or random tokens. By
the loop a fact is known if the text that the model writes contains the answer, which small base models may fail.
"""

import torch
from torch import Tensor

from diffusion_lens.checks.finding import Finding
from diffusion_lens.checks.texts import Texts
from diffusion_lens.evaluation.scores import contained
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.noise import hidden_tokens
from weight_conversion import n_params

# By guessing, five or more of ten are right once in 600 checks.
LEAST_CHOSEN = 5
# The bundled models answer all ten; one may be lost by rounding in half precision.
LEAST_OWN = 9
# Numbers of parameters below which no number of facts is required, because it is unknown what such models know.
CHOOSING_SIZE = 1_000_000_000
WRITING_SIZE = 5_000_000_000
LEAST_WRITTEN = 4
NEW_TOKENS = 16
STEPS = 16
LONGEST_OWN = 6  # tokens of the longest of the ten prompts for the bundled models


def check_facts(model: HookedDiffusionTransformer, texts: Texts) -> list[Finding]:
    """The findings for one pass and for the loop."""
    facts = [fact for fact in texts.facts if _can_query(model, fact)]
    if len(facts) < len(texts.facts) / 2:
        said = "the tokenizer merges most answers into their prompts, so they cannot be queried"
        return [Finding("facts, one pass", "not run", said)]
    own = texts.length is not None
    size = n_params(model.cfg.architecture)
    chosen = _chosen(model, facts, texts)
    written = _written(model, facts, texts)
    right = [contained(fact.answer, text) for fact, text in zip(facts, written, strict=True)]
    return [
        _finding(
            "facts, one pass",
            "prefers the right answer to the others",
            [fact.answer for fact in facts],
            chosen,
            LEAST_OWN if own else LEAST_CHOSEN if size >= CHOOSING_SIZE else None,
        ),
        _finding(
            "facts, by the loop",
            "writes the right answer",
            written,
            right,
            LEAST_OWN if own else LEAST_WRITTEN if size >= WRITING_SIZE else None,
        ),
    ]


def _finding(name: str, what: str, texts: list[str], right: list[bool], least: int | None) -> Finding:
    n_right = sum(right)
    said = f"{what} to {n_right} of {len(right)} questions"
    numbers = {"right": n_right, "queried": len(right), "texts": texts, "each": right}
    if least is None:
        return Finding(name, "noted", f"{said}; no number is required of so small a model", numbers=numbers)
    needed = round(least * len(right) / 10)
    return Finding(name, "ok" if n_right >= needed else "off", f"{said}; {needed} are needed", numbers=numbers)


def _can_query(model: HookedDiffusionTransformer, fact: Fact) -> bool:
    try:
        fact.tokenize(model)
    except ValueError:
        return False
    return True


@torch.no_grad()
def _chosen(model: HookedDiffusionTransformer, facts: list[Fact], texts: Texts) -> list[bool]:
    """For each fact, whether the first token of its answer is likelier than those of the other answers."""
    tokenized = [fact.tokenize(model) for fact in facts]
    first_tokens = torch.tensor([answer[0] for _, answer in tokenized], device=model.cfg.device)
    chosen = []
    for fact, (prompt, answer) in zip(facts, tokenized, strict=True):
        canvas = torch.tensor(_canvas(model, fact, prompt, answer, texts), device=model.cfg.device)
        at_answer = torch.tensor([len(prompt)], device=model.cfg.device)
        output: Tensor = model(canvas[None], logits_at=model.readout.rows(at_answer))
        # The next token of a text that grows is not on the canvas.
        present = None if model.cfg.grows else canvas[at_answer][None]
        logits = model.head_at(present).clean_logits(output)[0, 0]
        chosen.append(bool(logits[first_tokens].max() == logits[answer[0]]))
    return chosen


def _canvas(
    model: HookedDiffusionTransformer, fact: Fact, prompt: list[int], answer: list[int], texts: Texts
) -> list[int]:
    """The prompt; for a diffusion model followed by the answer, hidden by noise, and the rest of the text."""
    if model.cfg.grows:
        return prompt
    tokens = [int(token) for token in model.to_tokens(fact.prompt + fact.answer + texts.ending)[0]]
    rest = tokens[len(prompt) + len(answer) :]
    canvas = prompt + hidden_tokens(model.cfg, len(answer), fact.prompt) + rest
    n_end = 0 if texts.length is None else texts.length - len(canvas)
    return canvas + [int(model.tokenizer.eos_token_id)] * n_end if n_end > 0 else canvas


def _written(model: HookedDiffusionTransformer, facts: list[Fact], texts: Texts) -> list[str]:
    """The text that the loop writes after each prompt."""
    n_new = NEW_TOKENS if texts.length is None else texts.length - LONGEST_OWN
    trajectory = model.denoise([fact.prompt for fact in facts], max_new_tokens=n_new, steps=STEPS)
    rows = zip(trajectory.tokens, trajectory.revealed_at, strict=True)
    return [model.to_string(tokens[revealed >= 0]) for tokens, revealed in rows]
