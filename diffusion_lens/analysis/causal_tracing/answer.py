"""The answer of a traced run: where it is read, and how its probability follows from logits."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.denoising.predictor import guide
from diffusion_lens.facts import Query
from diffusion_lens.metrics import token_probabilities
from diffusion_lens.model.transformer import DiffusionTransformer


@dataclass(frozen=True, eq=False)
class Answer:
    """The tokens of an answer, and the rows of the logits that predict them.

    Attributes:
        tokens: Int[place], the answer.
        rows: Int[place], where each is read.
        cfg_scale: weight of guidance; 0 is none.
        unconditional: Float[sample place d_vocab_out], logits of the canvas with its prompt masked (one row for all
            samples, or one each); needed with guidance only.
        settled: Float[sample place], 1 or 0 where a draw has already revealed the right or another token, NaN where the
            token is still masked and is read; `None` when all are.
    """

    tokens: Int[Tensor, "place"]
    rows: Int[Tensor, "place"]
    cfg_scale: float = 0.0
    unconditional: Float[Tensor, "#sample place d_vocab_out"] | None = None
    settled: Float[Tensor, "sample place"] | None = None

    @classmethod
    def of(cls, model: DiffusionTransformer, query: Query) -> "Answer":
        """A query's answer on a model.

        Raises:
            ValueError: no answer, or one that the model cannot write or be asked for.
        """
        if not query.answer_tokens:
            raise ValueError("the query has no answer: there is no probability to trace")
        asked = torch.tensor(query.answer_tokens)
        if outside := asked[~model.cfg.writable(asked)].tolist():
            raise ValueError(
                f"{model.cfg.model_name!r} cannot write the answer tokens {outside}; only 0 to d_vocab_out - 1, and "
                "never [MASK]"
            )
        if model.cfg.attention_dir == "causal" and 0 in query.answer_positions:
            raise ValueError("nothing precedes place 0, so a causal model has no probability for an answer there")
        device = model.cfg.device
        rows = model.readout.rows(torch.tensor(query.answer_positions, device=device))
        if unread := [
            place for place, row in zip(query.answer_positions, rows, strict=True) if row >= len(query.tokens)
        ]:
            raise ValueError(
                f"the answer positions {unread} are outside the {len(query.tokens)} places of the canvas: "
                f"{model.cfg.model_name!r} has no row there that predicts them"
            )
        return cls(torch.tensor(query.answer_tokens, device=device), rows)

    def is_likeliest(self, model: DiffusionTransformer, logits: Float[Tensor, "1 place d_vocab_out"]) -> bool:
        """Whether each of its tokens is the likeliest of those that the model may write, so never beside [MASK]."""
        writable = model.cfg.writable(torch.arange(logits.shape[-1], device=logits.device))
        return bool((logits.masked_fill(~writable, float("-inf")).argmax(dim=-1) == self.tokens).all())

    def probabilities(
        self, logits: Float[Tensor, "batch place d_vocab_out"], samples: int, asked: Int[Tensor, "place"] | None = None
    ) -> Float[Tensor, "cell sample place"]:
        """Probability of each token; the batch holds whole runs, one after the other, each with a row a sample.

        Args:
            samples: rows of one run.
            asked: which of the answer's tokens the logits are of; by default all.
        """
        asked = torch.arange(len(self.tokens), device=self.tokens.device) if asked is None else asked
        if self.unconditional is not None:
            runs = logits.unflatten(0, (-1, samples))
            unconditional = self.unconditional[:, asked].expand_as(runs)
            logits = guide(runs, unconditional, self.cfg_scale).flatten(0, 1)
        read: Tensor = token_probabilities(logits, self.tokens[asked]).unflatten(0, (-1, samples))
        if self.settled is None:
            return read
        settled = self.settled[:, asked]
        return torch.where(settled.isnan(), read, settled)
