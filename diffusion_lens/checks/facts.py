"""Ten common facts, asked twice: in one pass, and by the denoising loop.

In one pass a fact counts as known when the first token of its answer is likelier than those of the nine other answers:
a model that prefers " a" to " Paris" still tells the capitals apart. Guessing gets one of ten right. By the loop it
counts when the text that the model writes contains the answer, which small base models need not.
"""

import torch
from torch import Tensor

from diffusion_lens.checks.finding import Finding
from diffusion_lens.checks.texts import Texts
from diffusion_lens.evaluation.scores import contained
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

# By guessing, five of ten or more happen once in 600 runs.
LEAST_CHOSEN = 5
# The embedded pair answers all; one may be lost to the rounding of a precision.
LEAST_OWN = 9
# Models below these sizes are not held to facts: what they know is not known here. A large one writes most capitals.
CHOOSING_SIZE = 1_000_000_000
WRITING_SIZE = 5_000_000_000
LEAST_WRITTEN = 4
NEW_TOKENS = 16
STEPS = 16
LONGEST_OWN = 6  # tokens of the longest prompt among the embedded pair's ten


def check_facts(model: HookedDiffusionTransformer, texts: Texts) -> list[Finding]:
    """Both ways of asking, a finding each."""
    facts = [fact for fact in texts.facts if _asks(model, fact)]
    if len(facts) < len(texts.facts) / 2:
        said = "the tokenizer merges most answers into their prompts, so they cannot be asked"
        return [Finding("facts, one pass", "not run", said)]
    own = texts.length is not None
    size = model.cfg.architecture.n_params
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
    numbers = {"right": n_right, "asked": len(right), "texts": texts, "each": right}
    if least is None:
        return Finding(name, "noted", f"{said}; so small a model is not held to that", numbers=numbers)
    needed = round(least * len(right) / 10)
    return Finding(name, "ok" if n_right >= needed else "off", f"{said}; {needed} are needed", numbers=numbers)


def _asks(model: HookedDiffusionTransformer, fact: Fact) -> bool:
    try:
        fact.tokenize(model)
    except ValueError:
        return False
    return True


@torch.no_grad()
def _chosen(model: HookedDiffusionTransformer, facts: list[Fact], texts: Texts) -> list[bool]:
    """Whether each fact's own answer begins likelier than those of the others."""
    asked = [fact.tokenize(model) for fact in facts]
    begins = torch.tensor([answer[0] for _, answer in asked], device=model.cfg.device)
    chosen = []
    for fact, (prompt, answer) in zip(facts, asked, strict=True):
        canvas = torch.tensor(_canvas(model, fact, prompt, answer, texts), device=model.cfg.device)
        row = model.readout.rows(torch.tensor([len(prompt)], device=model.cfg.device))
        logits: Tensor = model(canvas[None], logits_at=row)[0, 0]
        chosen.append(bool(logits[begins].max() == logits[answer[0]]))
    return chosen


def _canvas(
    model: HookedDiffusionTransformer, fact: Fact, prompt: list[int], answer: list[int], texts: Texts
) -> list[int]:
    """The prompt, and on a masked diffusion model the answer hidden, and what follows it."""
    mask = model.cfg.mask_token_id
    if mask is None:
        return prompt
    whole = [int(token) for token in model.to_tokens(fact.prompt + fact.answer + texts.ending)[0]]
    after = whole[len(prompt) + len(answer) :]
    hidden = prompt + [mask] * len(answer) + after
    fill = 0 if texts.length is None else texts.length - len(hidden)
    return hidden + [int(model.tokenizer.eos_token_id)] * fill if fill > 0 else hidden


def _written(model: HookedDiffusionTransformer, facts: list[Fact], texts: Texts) -> list[str]:
    """What the loop writes after each prompt."""
    places = NEW_TOKENS if texts.length is None else texts.length - LONGEST_OWN
    trajectory = model.denoise([fact.prompt for fact in facts], max_new_tokens=places, steps=STEPS)
    rows = zip(trajectory.tokens, trajectory.revealed_at, strict=True)
    return [model.to_string(tokens[revealed >= 0]) for tokens, revealed in rows]
