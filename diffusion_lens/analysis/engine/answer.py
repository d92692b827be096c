"""What analyses read from logits: the probability of a query's answer, and ranks of tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.denoising.predictions import likeliest_of
from diffusion_lens.denoising.predictor import guide
from diffusion_lens.facts.fact import Query
from diffusion_lens.model.config import reached
from diffusion_lens.model.noise import HeadAt
from diffusion_lens.model.transformer import DiffusionTransformer


@dataclass(frozen=True, eq=False)
class Answer:
    """The tokens of an answer, and the rows of the logits that predict them.

    Attributes:
        tokens: Int[selected], tokens of the answer.
        rows: Int[selected], row of the logits that predicts each token.
        cfg_scale: Weight of guidance; 0 without guidance.
        unconditional: Float[#sample selected d_vocab_out], logits of the canvas with its prompt masked (one row for all
            samples, or one per sample); `None` without guidance.
        head: What the logits mean at these positions.
        settled: Float[sample selected], 1 where a sample has revealed the answer's token, 0 where it has revealed
            another, NaN where the token is still masked; `None` when all tokens are masked.
    """

    tokens: Int[Tensor, "selected"]
    rows: Int[Tensor, "selected"]
    head: HeadAt
    cfg_scale: float = 0.0
    unconditional: Float[Tensor, "#sample selected d_vocab_out"] | None = None
    settled: Float[Tensor, "sample selected"] | None = None

    @classmethod
    def of(
        cls, model: DiffusionTransformer, query: Query, canvases: Int[Tensor, "#sample pos"] | None = None
    ) -> "Answer":
        """The answer of a query on a model, in the time of the current step or of `model.at_time`, read on one canvas
        for each sample or on the query's own; a `ValueError` as of `check_answer`."""
        check_answer(model, query)
        tokens = torch.tensor(query.answer_tokens, device=model.cfg.device)
        positions = torch.tensor(query.answer_positions, device=model.cfg.device)
        head = model.head
        at = HeadAt(head)
        if head.needs_canvas:
            canvases = query.tokens[None] if canvases is None else canvases
            at = HeadAt.of(model, canvases.to(positions.device)[:, positions])
        return cls(tokens, model.readout.rows(positions), at)

    def is_likeliest(self, model: DiffusionTransformer, logits: Float[Tensor, "batch selected d_vocab_out"]) -> bool:
        """Whether each of its tokens is the likeliest of those that the model can write, in every row; [MASK] does not
        count.

        Under guidance, by the guided logits.
        """
        return bool((self.writable_logits(model, logits).argmax(dim=-1) == self.tokens).all())

    def writable_logits(
        self, model: DiffusionTransformer, logits: Float[Tensor, "batch selected d_vocab_out"]
    ) -> Float[Tensor, "batch selected d_vocab_out"]:
        """Logits of p(x_0), guided where there is guidance, with -inf at tokens that the model cannot write."""
        writable = model.cfg.writable(torch.arange(logits.shape[-1], device=logits.device))
        return self._clean_logits(logits, len(logits)).masked_fill(~writable, float("-inf"))

    def probabilities(
        self,
        logits: Float[Tensor, "batch selected d_vocab_out"],
        samples: int,
        indices: Int[Tensor, "selected"] | None = None,
    ) -> Float[Tensor, "cell sample selected"]:
        """Probability of each token of the answer, or of those with these indices, from the logits of one cell after
        the other, each with one row per sample, as the network gives them."""
        indices = torch.arange(len(self.tokens), device=self.tokens.device) if indices is None else indices
        logits = self._clean_logits(logits, samples, indices)
        probabilities: Tensor = token_probabilities(logits, self.tokens[indices]).unflatten(0, (-1, samples))
        return self.settle(probabilities, indices)

    def _clean_logits(
        self,
        logits: Float[Tensor, "batch selected d_vocab_out"],
        samples: int,
        indices: Int[Tensor, "selected"] | None = None,
    ) -> Float[Tensor, "batch selected d_vocab_out"]:
        """Logits of p(x_0), guided where there is guidance."""
        if self.unconditional is not None:
            unconditional = self.unconditional if indices is None else self.unconditional[:, indices]
            logits = guided_copies(logits, unconditional, self.cfg_scale, samples)
        return self.head.clean_logits(logits, indices)

    def settle(
        self, probabilities: Float[Tensor, "*cell sample selected"], indices: Int[Tensor, "selected"] | None = None
    ) -> Float[Tensor, "*cell sample selected"]:
        """The probabilities, with 1 or 0 for each token that a sample has already revealed."""
        if self.settled is None:
            return probabilities
        settled = (self.settled if indices is None else self.settled[:, indices]).to(probabilities.device)
        return torch.where(settled.isnan(), probabilities, settled)


def guided_copies(
    logits: Float[Tensor, "batch selected d_vocab_out"],
    unconditional: Float[Tensor, "#sample selected d_vocab_out"],
    scale: float,
    samples: int,
) -> Float[Tensor, "batch selected d_vocab_out"]:
    """The logits of copies of all samples after guidance."""
    by_copy = logits.unflatten(0, (-1, samples))
    return guide(by_copy, unconditional.expand_as(by_copy), scale).flatten(0, 1)


def token_probabilities(
    logits: Float[Tensor, "batch selected d_vocab_out"], tokens: Int[Tensor, "selected"]
) -> Float[Tensor, "batch selected"]:
    """Probability of one token per row, the token given for it, from logits whose softmax it is."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    token_logits = wide.gather(-1, tokens.expand(logits.shape[0], -1)[..., None])[..., 0]
    return (token_logits - wide.logsumexp(dim=-1)).exp()


def check_answer(model: DiffusionTransformer, query: Query, name: str = "the query") -> None:
    """Raise a `ValueError` unless this model predicts the query's answer on its canvas.

    Every analysis calls this check, so that all of them refuse the same queries. A masked diffusion model predicts
    tokens at masked positions only, and under uniform noise at every position. A causal model must read the answer's
    own tokens, because other tokens would change the context of the later ones. The error calls the query `name`.
    """
    tokens, positions, cfg = query.answer_tokens, query.answer_positions, model.cfg
    if not tokens:
        raise ValueError(f"{name} has no answer: there is no probability to read")
    if outside := torch.tensor(tokens)[~cfg.writable(torch.tensor(tokens))].tolist():
        raise ValueError(
            f"{cfg.model_name!r} cannot write the answer tokens {outside} of {name}; only 0 to d_vocab_out - 1, and "
            "never [MASK]"
        )
    if len(set(positions)) < len(positions):
        twice = sorted({position for position in positions if positions.count(position) > 1})
        raise ValueError(f"{name} names the answer positions {twice} twice; give each once, with one token")
    noise = cfg.noise
    if noise is None and 0 in positions:
        raise ValueError("nothing precedes position 0, so a causal model has no probability for an answer there")
    n_pos, rows = len(query.tokens), model.readout.rows(torch.tensor(positions)).tolist()
    if max(rows) >= n_pos:
        unread = [position for position, row in zip(positions, rows, strict=True) if row >= n_pos]
        raise ValueError(
            f"the answer positions {unread} are outside the {n_pos} positions of the canvas of {name}: "
            f"{cfg.model_name!r} has no row that predicts them"
        )
    if noise == "uniform":
        return
    if (mask := cfg.mask_token_id) is not None:
        if max(positions) >= n_pos or bool(query.tokens[list(positions)].ne(mask).any()):
            unmasked = [at for at in positions if at >= n_pos or query.tokens[at] != mask]
            raise ValueError(
                f"the answer positions {unmasked} are not masked on the canvas of {name}: a masked diffusion model "
                "predicts masked tokens only. Mask these positions, as Fact.to_query does, or leave their tokens out "
                "of the answer"
            )
        return
    on_canvas = {position: token for position, token in enumerate(query.tokens.tolist()) if reached(token)}
    if others := [at for at, token in zip(positions, tokens, strict=True) if on_canvas.get(at, token) != token]:
        raise ValueError(
            f"the answer positions {others} have other tokens than the answer's on the canvas of {name}: a causal "
            "model must read the answer's own tokens. End the canvas before the answer, or continue it with the answer "
            "up to its last token, as Fact.to_query does"
        )


def clean_logits(
    model: DiffusionTransformer,
    logits: Float[Tensor, "entry d_vocab_out"],
    present: Int[Tensor, "entry"] | None = None,
    sigma: Float[Tensor, "entry"] | None = None,
) -> Float[Tensor, "entry d_vocab_out"]:
    """Logits whose softmax is p(x_0).

    Args:
        present: Token on the canvas at each position that the logits predict, for a head that needs it.
        sigma: Noise of the canvas, for the same head; by default that of the current step or of `model.at_time`.
    """
    if sigma is not None:
        return model.head.clean_logits(logits, present, sigma.to(logits.device))
    at = None if present is None else present[:, None]
    return HeadAt.of(model, at).clean_logits(logits[:, None])[:, 0]


@dataclass(frozen=True, eq=False)
class Ranking:
    """Rows of logits in which tokens are ranked, in float32 at least.

    Attributes:
        logits: Float[entry d_vocab_out], -inf at tokens that the model cannot write, such as [MASK].
        log_probabilities: Float[entry d_vocab_out], of all tokens, as the network predicts them.
        writable: Bool[d_vocab_out], the tokens that the model can write.
    """

    logits: Float[Tensor, "entry d_vocab_out"]
    log_probabilities: Float[Tensor, "entry d_vocab_out"]
    writable: Bool[Tensor, "d_vocab_out"]

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        logits: Float[Tensor, "entry d_vocab_out"],
        present: Int[Tensor, "entry"] | None = None,
    ) -> "Ranking":
        """The ranking by the logits of a model; `present` as in `clean_logits`."""
        logits = clean_logits(model, logits, present)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        writable = model.cfg.writable(torch.arange(logits.shape[-1], device=logits.device))
        return cls(wide.masked_fill(~writable, float("-inf")), wide.log_softmax(dim=-1), writable)

    def rank(self, tokens: Int[Tensor, "entry target"]) -> Int[Tensor, "entry target"]:
        """Number of strictly likelier tokens, for each token; 0 is the likeliest, and tokens that tie have one rank."""
        logits = self.logits.gather(-1, tokens)
        # One target at a time, because all comparisons together would have an axis more than the logits.
        ranks = [(self.logits > logits[:, i, None]).sum(dim=-1) for i in range(tokens.shape[1])]
        return torch.stack(ranks, dim=-1) if ranks else tokens

    def probability(self, tokens: Int[Tensor, "entry target"]) -> Float[Tensor, "entry target"]:
        """Probability of each token."""
        return self.log_probabilities.gather(-1, tokens).exp()

    def top(self, k: int) -> Int[Tensor, "entry top"]:
        """The `k` likeliest tokens, the likeliest first, and of equally likely ones that with the lowest id."""
        return likeliest_of(self.logits, k, self.writable)
