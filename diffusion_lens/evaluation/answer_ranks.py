"""How a model ranks a given answer after a prompt, token by token, as TransformerLens's `test_prompt` prints it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.ranking import Ranking
from diffusion_lens.display import Result, Table
from diffusion_lens.evaluation.question import Text, answer_canvases, question_of
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.settings import at_least


@dataclass(frozen=True, eq=False, repr=False)
class AnswerRanks(Result):
    """Ranks of the tokens of an answer, each predicted from the prompt and the answer's tokens before it.

    Columns of the data frame: token, rank, logit, probability, likeliest, likeliest_probability; a row for each
    token of the answer.

    Attributes:
        prompt: Text of each token of the prompt.
        answer: Text of each token of the answer.
        rank: Int[answer], rank of each token among all that the model can write, that is, without [MASK]: the number
            of strictly likelier tokens.
        logit: Float[answer], logit of each token.
        probability: Float[answer], probability of each token.
        top: Text of the likeliest tokens, for each token of the answer.
        top_logit: Float[answer top], their logits.
        top_probability: Float[answer top], their probabilities.
        record: Tokens of prompt and answer, number of masks (`None` on a model that reads none), top_k, model, hash of
            the weights, hooks, versions.
    """

    prompt: list[str]
    answer: list[str]
    rank: Int[Tensor, "answer"]
    logit: Float[Tensor, "answer"]
    probability: Float[Tensor, "answer"]
    top: list[list[str]]
    top_logit: Float[Tensor, "answer top"]
    top_probability: Float[Tensor, "answer top"]
    record: dict[str, Any] = field(repr=False)

    def to_text(self) -> str:
        """The table that TransformerLens's `test_prompt` prints."""
        lines = [f"Tokenized prompt: {self.prompt}", f"Tokenized answer: {self.answer}"]
        for i, token in enumerate(self.answer):
            own = _numbers(self.logit[i], self.probability[i], token)
            lines += ["Performance on answer token:", f"Rank: {int(self.rank[i]):<8} {own}"]
            ranked = zip(self.top_logit[i], self.top_probability[i], self.top[i], strict=True)
            lines += [f"Top {rank}th token. {_numbers(*numbers)}" for rank, numbers in enumerate(ranked)]
        ranks = [(token, int(rank)) for token, rank in zip(self.answer, self.rank, strict=True)]
        return "\n".join([*lines, f"Ranks of the answer tokens: {ranks}"])

    def _table(self) -> Table:
        return Table(
            {
                "token": self.answer,
                "rank": self.rank,
                "logit": self.logit,
                "probability": self.probability,
                "likeliest": [words[0] for words in self.top],
                "likeliest_probability": self.top_probability[:, 0],
            }
        )

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "answer ranks", self)

    @classmethod
    def load(cls, path: str | Path) -> "AnswerRanks":
        """Read what `save` wrote."""
        return load_fields(path, "answer ranks", cls)

    def __str__(self) -> str:
        return self.to_text()


@begins_run
@torch.no_grad()
def rank_answer(
    model: DiffusionTransformer,
    prompt: Text,
    answer: Text,
    *,
    n_masks: SupportsIndex | None = None,
    top_k: SupportsIndex = 10,
) -> AnswerRanks:
    """Rank an answer after a prompt, on either variant.

    A masked diffusion model reads one canvas for each token: the prompt, the answer's tokens before it, and [MASK] at
    this token and all after it. A causal model reads prompt and answer once. `chain_rule_nll` sums the logarithms of
    the same probabilities.

    Args:
        prompt: Text, or tokens Int[pos].
        answer: Text that continues the prompt, with its leading space; or tokens Int[pos].
        n_masks: Number of masked positions after the prompt; by default as many as the answer has tokens. A masked
            diffusion model sees them: give as many as in its training texts.
        top_k: Number of likeliest tokens to list for each token of the answer.

    Raises:
        ValueError: The answer is empty, is merged into the prompt, or contains a token that the model never writes.
    """
    top_k = min(at_least(1, "top_k", top_k), model.cfg.d_vocab_out - 1)
    question = question_of(model, prompt, answer)
    masks = None if n_masks is None else at_least(1, "n_masks", n_masks)
    canvases, scored = answer_canvases(model, question, masks)
    rows = model.readout.locate(scored)
    logits = model(canvases, attention_mask=model.all_real(canvases), logits_at=rows)
    ranking, own = Ranking.of(model, logits, canvases[scored]), question.answer[:, None]
    top = ranking.top(top_k)
    return AnswerRanks(
        prompt=model.words(question.prompt.tolist()),
        answer=model.words(question.answer.tolist()),
        rank=ranking.rank(own)[:, 0],
        logit=ranking.logits.gather(1, own)[:, 0],
        probability=ranking.probability(own)[:, 0],
        top=[model.words(ids) for ids in top.tolist()],
        top_logit=ranking.logits.gather(1, top),
        top_probability=ranking.probability(top),
        record={
            "prompt_tokens": question.prompt.tolist(),
            "answer_tokens": question.answer.tolist(),
            "n_masks": None if model.cfg.grows else masks or len(question.answer),
            "top_k": top_k,
            **provenance(model, model.cfg),
        },
    )


def _numbers(logit: Tensor, probability: Tensor, token: str) -> str:
    return f"Logit: {logit.item():5.2f} Prob: {probability.item():6.2%} Token: |{token}|"
