"""A prompt and its answer as tokens, and the canvases on which the answer is predicted token by token."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.facts import Fact
from diffusion_lens.model.inputs import check_length, check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.noise import hidden_tokens
from diffusion_lens.shapes import PosMask, Tokens

Text = str | Tensor


@dataclass(frozen=True)
class Question:
    """Tokens of a prompt and of the answer after it."""

    prompt: Int[Tensor, "pos"]
    answer: Int[Tensor, "selected"]

    @property
    def tokens(self) -> Int[Tensor, "pos"]:
        return torch.cat([self.prompt, self.answer])


def question_of(model: DiffusionTransformer, prompt: Text, answer: Text) -> Question:
    """The tokens of a prompt and of its answer; errors as in `chain_rule_nll`."""
    if isinstance(prompt, str) and isinstance(answer, str):
        ids = Fact(prompt, subject="", answer=answer).tokenize(model)
        before, after = (torch.tensor(part, device=model.cfg.device) for part in ids)
    elif isinstance(prompt, Tensor) and isinstance(answer, Tensor):
        before, after = model.without_padding(_one_row(model, "prompt", prompt)), _one_row(model, "answer", answer)
    else:
        given = f"the prompt is {type(prompt).__name__}, the answer {type(answer).__name__}"
        raise TypeError(f"{given}; give both as text, or both as tokens")
    if not len(after):
        raise ValueError("the answer is empty: there is nothing to score")
    if bool((unwritable := ~model.cfg.writable(after)).any()):
        token = int(after[position := int(unwritable.nonzero()[0])])
        name = "[MASK]" if token == model.cfg.mask_token_id else f"token {token}"
        raise ValueError(
            f"answer[{position}] is {name}: {model.cfg.model_name!r} never writes it, so it has no likelihood"
        )
    check_length(len(before) + len(after), model.cfg)
    return Question(before, after)


def answer_canvases(
    model: DiffusionTransformer, question: Question, n_masks: int | None = None
) -> tuple[Tokens, PosMask]:
    """The canvases on which each token of an answer is predicted from those before it, and the positions to read.

    Args:
        n_masks: Number of masked positions after the prompt, before any is revealed; by default as many as the answer
            has tokens. A causal model does not see them.

    Raises:
        ValueError: The answer has more tokens than `n_masks`; or the prompt is empty, and the model is causal.
    """
    start, n_answer = len(question.prompt), len(question.answer)
    if n_masks is not None and n_masks < n_answer:
        raise ValueError(f"n_masks={n_masks}, but the answer has {n_answer} tokens")
    if model.cfg.grows:
        if not start:
            raise ValueError(
                f"the prompt is empty, and {model.cfg.model_name!r} predicts each token from those before it: give a "
                "prompt of at least one token, such as BOS"
            )
        tokens = question.tokens[None]
        return tokens, torch.arange(tokens.shape[1], device=tokens.device)[None] >= start
    hidden = question.tokens.new_tensor(hidden_tokens(model.cfg, n_masks or n_answer, str(question.tokens.tolist())))
    canvases = torch.cat([question.tokens, hidden[n_answer:]]).repeat(n_answer, 1)
    scored = torch.zeros_like(canvases, dtype=torch.bool)
    scored[:, start : start + n_answer] = torch.eye(n_answer, dtype=torch.bool, device=canvases.device)
    check_length(canvases.shape[1], model.cfg)
    later = torch.ones_like(scored[:, start:]).triu()
    canvases[:, start:] = torch.where(later, hidden, canvases[:, start:])
    return canvases, scored


def _one_row(model: DiffusionTransformer, name: str, tokens: Tensor) -> Int[Tensor, "pos"]:
    tokens = tokens[0] if tokens.dim() == 2 and tokens.shape[0] == 1 else tokens
    if tokens.dim() != 1:
        raise ValueError(f"{name} has shape {list(tokens.shape)}; give one row, [pos] or [1 pos]")
    if not len(tokens):
        return torch.zeros(0, dtype=torch.long, device=model.cfg.device)
    return check_tokens(tokens, model.cfg)[0]
