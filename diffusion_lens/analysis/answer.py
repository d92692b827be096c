"""The answer of a traced run: where it is read, and how its probability follows from logits."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.config import UNREACHED
from diffusion_lens.denoising.predictor import guide
from diffusion_lens.facts import Query
from diffusion_lens.model.transformer import DiffusionTransformer


@dataclass(frozen=True, eq=False)
class Answer:
    """The tokens of an answer, and the rows of the logits that predict them.

    Attributes:
        tokens: Int[selected], the answer.
        rows: Int[selected], where each is read.
        cfg_scale: weight of guidance; 0 is none.
        unconditional: Float[sample selected d_vocab_out], logits of the canvas with its prompt masked (one row for all
            samples, or one each); needed with guidance only.
        settled: Float[sample selected], 1 where a sample has revealed the right token, 0 where it has
            revealed another, NaN where the token is still masked and is read; `None` when all are.
    """

    tokens: Int[Tensor, "selected"]
    rows: Int[Tensor, "selected"]
    cfg_scale: float = 0.0
    unconditional: Float[Tensor, "#sample selected d_vocab_out"] | None = None
    settled: Float[Tensor, "sample selected"] | None = None

    @classmethod
    def of(cls, model: DiffusionTransformer, query: Query) -> "Answer":
        """A query's answer on a model.

        Raises:
            ValueError: what `check_answer` refuses.
        """
        check_answer(model, query)
        tokens, places = (
            torch.tensor(each, device=model.cfg.device) for each in (query.answer_tokens, query.answer_positions)
        )
        return cls(tokens, model.readout.rows(places))

    def is_likeliest(self, model: DiffusionTransformer, logits: Float[Tensor, "1 selected d_vocab_out"]) -> bool:
        """Whether each of its tokens is the likeliest of those that the model may write, so never beside [MASK]."""
        writable = model.cfg.writable(torch.arange(logits.shape[-1], device=logits.device))
        return bool((logits.masked_fill(~writable, float("-inf")).argmax(dim=-1) == self.tokens).all())

    def probabilities(
        self,
        logits: Float[Tensor, "batch selected d_vocab_out"],
        samples: int,
        asked: Int[Tensor, "selected"] | None = None,
    ) -> Float[Tensor, "cell sample selected"]:
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
        return self.settle(read, asked)

    def settle(
        self, read: Float[Tensor, "*cell sample selected"], asked: Int[Tensor, "selected"] | None = None
    ) -> Float[Tensor, "*cell sample selected"]:
        """Probabilities as read, with 1 or 0 where a sample has revealed the token already.

        Args:
            asked: Which of the answer's tokens the probabilities are of; by default all.
        """
        if self.settled is None:
            return read
        settled = (self.settled if asked is None else self.settled[:, asked]).to(read.device)
        return torch.where(settled.isnan(), read, settled)


def token_probabilities(
    logits: Float[Tensor, "batch selected d_vocab_out"], tokens: Int[Tensor, "selected"]
) -> Float[Tensor, "batch selected"]:
    """Probability of each place's own token."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = wide.gather(-1, tokens.expand(logits.shape[0], -1)[..., None])[..., 0]
    return (own - wide.logsumexp(dim=-1)).exp()


def check_answer(model: DiffusionTransformer, query: Query, name: str = "the query") -> None:
    """Raise a `ValueError` unless a query's answer can be asked of this model on its canvas.

    Every analysis asks here, so that all of them refuse the same queries: of masked places a masked diffusion model
    predicts what stands there, of others it does not; what a causal model is shown must be the answer that it is asked
    for, or the later tokens would be read in another context than their own.

    Args:
        name: what the error calls the query.
    """
    tokens, places, cfg = query.answer_tokens, query.answer_positions, model.cfg
    if not tokens:
        raise ValueError(f"{name} has no answer: there is no probability to trace")
    if outside := torch.tensor(tokens)[~cfg.writable(torch.tensor(tokens))].tolist():
        raise ValueError(
            f"{cfg.model_name!r} cannot write the answer tokens {outside} of {name}; only 0 to d_vocab_out - 1, and "
            "never [MASK]"
        )
    if twice := sorted({place for place in places if places.count(place) > 1}):
        raise ValueError(f"{name} names the answer positions {twice} twice; each holds one token")
    if cfg.is_causal and 0 in places:
        raise ValueError("nothing precedes place 0, so a causal model has no probability for an answer there")
    rows = model.readout.rows(torch.tensor(places)).tolist()
    if unread := [place for place, row in zip(places, rows, strict=True) if row >= len(query.tokens)]:
        raise ValueError(
            f"the answer positions {unread} are outside the {len(query.tokens)} places of the canvas of {name}: "
            f"{cfg.model_name!r} has no row there that predicts them"
        )
    on_canvas = dict(enumerate(query.tokens.tolist()))
    shown = {place: (on_canvas.get(place, UNREACHED), token) for place, token in zip(places, tokens, strict=True)}
    if cfg.has_mask:
        if held := [place for place, (there, _) in shown.items() if there != cfg.mask_token_id]:
            raise ValueError(
                f"the answer positions {held} hold no [MASK] on the canvas of {name}: a masked diffusion model is "
                "asked only for what is masked, as Fact.to_query lays it out; put the mask there, or leave what is "
                "shown out of the answer"
            )
    elif others := [place for place, (there, token) in shown.items() if there not in (token, UNREACHED)]:
        raise ValueError(
            f"the answer positions {others} hold other tokens than the answer's on the canvas of {name}: a causal "
            "model is shown the answer but for its last token, as Fact.to_query lays it out; end the canvas before "
            "the answer, or let it go on with it"
        )
