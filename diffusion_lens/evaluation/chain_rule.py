"""The chain rule: the tokens of an answer, each predicted from the prompt and the tokens revealed before it.

A causal model has one order, from left to right, and one forward pass. A masked diffusion model has a negative
log-likelihood (NLL), in nats, for each order in which the answer may be revealed:

    NLL(order) = - Σ_j log p(a_order(j) | prompt, a_order(1) … a_order(j-1), the rest masked)

`chain_rule_nll` takes one order, with one canvas per token, as ML-GSAI/SMDM `evaluate_diff.py` does from left to right,
and `nll_by_order` several. `likelihood.py` estimates the mean over all orders. `rank_answer` ranks a given answer after
a prompt, token by token, as TransformerLens's `test_prompt` prints it.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.engine.answer import Ranking
from diffusion_lens.evaluation.likelihood import Question, Text, check_guidance, one_seed, question_of, surprisals
from diffusion_lens.model.inputs import check_length
from diffusion_lens.model.loss import require_known_loss
from diffusion_lens.model.noise import hidden_tokens
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import Result, Saved, Table, provenance
from diffusion_lens.settings import at_least, checked_arguments


@dataclass(frozen=True, eq=False, repr=False)
class NLLByOrder(Result, Saved):
    """The negative log-likelihood of an answer, in nats, in each of several orders of revealing it.

    Columns of the data frame: order, token, rank, surprisal; a row for each order and each token of the answer, with
    the rank 0 for the token that is revealed first.

    Attributes:
        answer: Text of each token.
        orders: Positions in the answer, in the order in which each order reveals them.
        surprisal: -log p of each token of the answer, in its place of the order.
        record: Tokens of prompt and answer, seed of the orders, guidance, model, hash of the weights, hooks, versions.
    """

    KIND = "NLL by order"
    NO_PICTURE = "It is a number for each text and order, of which a table says more."
    AXES = (("answer", "answer"),)

    answer: list[str]
    orders: Int[Tensor, "order answer"]
    surprisal: Float[Tensor, "order answer"]
    record: dict[str, Any] = field(repr=False)

    @property
    def nll(self) -> Float[Tensor, "order"]:
        """The NLL in each order."""
        return self.surprisal.sum(dim=1)

    @property
    def mean(self) -> float:
        """Mean over the orders, an estimate of the bound of `monte_carlo_nll`."""
        return self.nll.mean().item()

    @property
    def standard_deviation(self) -> float:
        """Standard deviation over the orders; NaN for a single one."""
        return self.nll.std().item() if len(self.orders) > 1 else math.nan

    def _check(self) -> None:
        _check_orders(self.orders)

    def _table(self) -> Table:
        axes = {"order": range(len(self.orders)), "token": self.answer}
        return Table.of_cells(axes, {"rank": self.orders.argsort(dim=1), "surprisal": self.surprisal})


@checked_arguments
@torch.no_grad()
def chain_rule_nll(
    model: DiffusionTransformer,
    prompt: Text,
    answer: Text,
    *,
    order: Literal["left_to_right", "right_to_left", "random"] | Int[Tensor, "answer"] = "left_to_right",
    seed: int | torch.Generator = 0,
    cfg_scale: float = 0.0,
    max_batch: int = 32,
) -> Float[Tensor, ""]:
    """NLL of the answer, revealed in one order.

    On a masked diffusion model each answer token is scored on its own canvas, where this token and all that come later
    in the order are masked. Hooks see these canvases as rows of one batch. On a causal model one teacher-forced pass
    scores all tokens, from left to right. A time-conditioned network gets, for each canvas, that at which the chance of
    a mask is the share of the answer that is masked there: 1 for the first token, 1/n for the last of n.

    A model by blocks is scored as it is trained: blocks are counted from the first token of the text, and every row is
    read in place. Where the loop counts them from the end of the prompt (`cfg.counts_from_prompt`), and reads the first
    token of a block in the row before it, this is not the probability with which the loop writes the answer. The same
    is true of `monte_carlo_nll`. The blocks are revealed from left to right, and a named order is that within each.

    Args:
        prompt: Text, or Int[pos] tokens; on a masked diffusion model it may be empty or contain [MASK]s. Padding that
            the network would recognise by its tokens is left out.
        answer: Text if the prompt is text, otherwise tokens. A text is tokenized as a continuation of the prompt (see
            `Fact.tokenize`).
        order: Name of the order, or the positions in the answer, the first being 0, in the order in which they are
            revealed.
        seed: Seed of the random order, or a `torch.Generator` to take the seed from.
        cfg_scale: Weight w of unsupervised classifier-free guidance; 0 is none. Hooks see the conditional pass, then
            the unconditional one.
        max_batch: Largest number of canvases in one forward pass; it does not affect the result.

    Raises:
        ValueError: The answer is empty, contains a token that the model never writes, or is merged into the prompt;
            both together exceed the context; a setting is out of range; the model cannot reveal the answer in this
            order; a causal model is given guidance; or a time-conditioned network has no schedule (`cfg.schedule`).
    """
    question = _question_by_chain_rule(model, prompt, answer, cfg_scale, max_batch)
    orders = _orders_of(model, question, order, 1, one_seed(seed))
    return _surprisals_in_orders(model, question, orders, cfg_scale, max_batch).sum()


@begins_run
@torch.no_grad()
def nll_by_order(
    model: DiffusionTransformer,
    prompt: Text,
    answer: Text,
    *,
    n_orders: SupportsIndex = 16,
    seed: int | torch.Generator = 0,
    cfg_scale: float = 0.0,
    max_batch: int = 32,
) -> NLLByOrder:
    """The answer's NLL in random orders, all equally likely, and its spread over them.

    A canvas that several orders share is read once. The first order is that of `chain_rule_nll(order="random")` with
    the same seed. Orders that a model by blocks cannot take are left out, as there.

    Args:
        prompt, answer, seed, cfg_scale, max_batch: The same as in `chain_rule_nll`.
        n_orders: Number of orders, drawn independently, so that a short answer has some of them twice.

    Raises:
        ValueError: `chain_rule_nll` would refuse an argument.
    """
    n_orders = at_least(1, "n_orders", n_orders)
    question = _question_by_chain_rule(model, prompt, answer, cfg_scale, max_batch)
    plain = one_seed(seed)
    orders = _orders_of(model, question, "random", n_orders, plain)
    ids = {"prompt_tokens": question.prompt.tolist(), "answer_tokens": question.answer.tolist()}
    return NLLByOrder(
        answer=model.words(question.answer.tolist()),
        orders=orders,
        surprisal=_surprisals_in_orders(model, question, orders, cfg_scale, max_batch).cpu(),
        record={**ids, "seed": plain, "cfg_scale": cfg_scale, **provenance(model, model.cfg)},
    )


@dataclass(frozen=True, eq=False, repr=False)
class AnswerRanks(Result, Saved):
    """Ranks of the tokens of an answer, each predicted from the prompt and the answer's tokens before it.

    Columns of the data frame: token, rank, logit, probability, likeliest, likeliest_probability; a row for each
    token of the answer.

    Attributes:
        prompt, answer: Text of each token.
        rank: Rank of each token of the answer among all that the model can write, that is, without [MASK]: the number
            of strictly likelier tokens.
        logit, probability: Those of each token of the answer.
        top, top_logit, top_probability: Text, logits and probabilities of the likeliest tokens in its place.
        record: Tokens of prompt and answer, number of masks (`None` on a model that reads none), top_k, model, hash of
            the weights, hooks, versions.
    """

    KIND = "answer ranks"
    NO_PICTURE = "It is a rank and a few candidates for each query, of which a table says more."
    AXES = (("answer", "answer"), ("answer top", "top"))

    prompt: list[str]
    answer: list[str]
    rank: Int[Tensor, "answer"]
    logit: Float[Tensor, "answer"]
    probability: Float[Tensor, "answer"]
    top: list[list[str]]
    top_logit: Float[Tensor, "answer top"]
    top_probability: Float[Tensor, "answer top"]
    record: dict[str, Any] = field(repr=False)

    def _check(self) -> None:
        if not self.top_logit.shape[1]:
            raise ValueError("there are no likeliest tokens")

    def to_text(self) -> str:
        """The table that TransformerLens's `test_prompt` prints."""
        line = "Logit: {:5.2f} Prob: {:6.2%} Token: |{}|".format
        lines = [f"Tokenized prompt: {self.prompt}", f"Tokenized answer: {self.answer}"]
        for i, token in enumerate(self.answer):
            own = line(self.logit[i].item(), self.probability[i].item(), token)
            lines += ["Performance on answer token:", f"Rank: {int(self.rank[i]):<8} {own}"]
            ranked = zip(self.top_logit[i].tolist(), self.top_probability[i].tolist(), self.top[i], strict=True)
            lines += [f"Top {rank}th token. {line(*numbers)}" for rank, numbers in enumerate(ranked)]
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
    logits = model(canvases, attention_mask=model.padding.all_real(canvases), logits_at=rows)
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
            "n_masks": None if model.cfg.is_autoregressive else masks or len(question.answer),
            "top_k": top_k,
            **provenance(model, model.cfg),
        },
    )


def answer_canvases(
    model: DiffusionTransformer, question: Question, n_masks: int | None = None
) -> tuple[Tokens, PosMask]:
    """The canvases on which each token of an answer is predicted from those before it, and the positions to read.

    `n_masks` positions after the prompt are masked before any is revealed; a causal model does not see them.
    """
    start, n_answer = len(question.prompt), len(question.answer)
    if n_masks is not None and n_masks < n_answer:
        raise ValueError(f"n_masks={n_masks}, but the answer has {n_answer} tokens")
    if model.cfg.is_autoregressive:
        if not start:
            raise ValueError(
                f"the prompt is empty, and {model.cfg.model_name!r} predicts each token from those before it: give a "
                "prompt of at least one token, such as BOS"
            )
        tokens = question.tokens[None]
        return tokens, torch.arange(tokens.shape[1], device=tokens.device)[None] >= start
    one = torch.eye(n_answer, dtype=torch.bool, device=question.tokens.device)
    return _revealed(model, question, torch.ones_like(one).tril(-1), n_masks or n_answer, scored=one)


def _revealed(
    model: DiffusionTransformer,
    question: Question,
    shown: Bool[Tensor, "sample answer"],
    n_masks: int,
    scored: Bool[Tensor, "sample answer"],
) -> tuple[Tokens, PosMask]:
    """Canvases that show some tokens of the answer and hide the others, and the positions to read on each."""
    start, n_answer = len(question.prompt), len(question.answer)
    hidden = question.tokens.new_tensor(hidden_tokens(model.cfg, n_masks, str(question.tokens.tolist())))
    canvases = torch.cat([question.prompt, hidden]).repeat(len(shown), 1)
    check_length(canvases.shape[1], model.cfg)
    canvases[:, start : start + n_answer] = torch.where(shown, question.answer, hidden[:n_answer])
    positions = torch.zeros_like(canvases, dtype=torch.bool)
    positions[:, start : start + n_answer] = scored
    return canvases, positions


def _question_by_chain_rule(
    model: DiffusionTransformer, prompt: Text, answer: Text, cfg_scale: float, max_batch: int
) -> Question:
    """The tokens, after the checks that all orders share."""
    at_least(1, "max_batch", max_batch)
    require_known_loss(model)
    if model.cfg.uniform_noise:
        raise ValueError(
            f"the noise of {model.cfg.model_name!r} is uniform, so none of its tokens can be hidden while others are "
            "revealed, and there is no chain rule: monte_carlo_nll estimates the bound under uniform noise"
        )
    question = question_of(model, prompt, answer)
    check_guidance(model, cfg_scale)
    return question


def _orders_of(
    model: DiffusionTransformer, question: Question, order: str | Int[Tensor, "answer"], n_orders: int, seed: int
) -> Int[Tensor, "order answer"]:
    """Positions in the answer in the order in which they are revealed: one order, or `n_orders` random ones."""
    n, given = len(question.answer), isinstance(order, Tensor)
    ascending = torch.arange(n)
    if isinstance(order, Tensor):
        orders = order.cpu().long()[None]
        if orders.shape[1] != n:
            raise ValueError(f"order has {orders.shape[1]} positions, and the answer has {n} tokens: give each once")
        _check_orders(orders)
    elif order == "random":
        generator = torch.Generator().manual_seed(seed)
        orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(n_orders)])
    else:
        orders = (ascending if order == "left_to_right" else ascending.flip(0))[None]
    causal, size = model.cfg.is_autoregressive, model.cfg.causal_block
    if causal and n > 1 and (order == "random" or bool((orders != ascending).any())):
        raise ValueError(
            f"{model.cfg.model_name!r} is causal and predicts each token from those before it, so it has one "
            "likelihood, from left to right: call chain_rule_nll without order=, or take a masked diffusion model"
        )
    if size is not None and not causal:
        block = (len(question.prompt) + orders) // size
        if given and bool((block.diff(dim=1) < 0).any()):
            raise ValueError(
                f"order={orders[0].tolist()} reveals a token before one of an earlier block, and "
                f"{model.cfg.model_name!r} writes blocks of {size} positions of the text from left to right (the "
                f"answer begins at {len(question.prompt)}): exchange only positions of one block"
            )
        orders = orders.gather(1, block.argsort(dim=1, stable=True))
    return orders


def _check_orders(orders: Int[Tensor, "order answer"]) -> None:
    n = orders.shape[1]
    if bool((wrong := (orders.sort(dim=1).values != torch.arange(n)).any(dim=1)).any()):
        raise ValueError(
            f"order={orders[wrong][0].tolist()} is no order of the answer's {n} tokens: give each position from 0 to "
            f"{n - 1} once, first the one that is revealed first"
        )


def _surprisals_in_orders(
    model: DiffusionTransformer,
    question: Question,
    orders: Int[Tensor, "order answer"],
    cfg_scale: float,
    max_batch: int,
) -> Float[Tensor, "order answer"]:
    """-log p of each token of the answer, given those that its order reveals before it."""
    n, orders = len(question.answer), orders.to(model.cfg.device)
    if model.cfg.is_autoregressive:
        canvases, scored = answer_canvases(model, question)
        shares = torch.ones(1, device=canvases.device)
        return surprisals(model, question, canvases, scored, shares, cfg_scale, max_batch).expand(len(orders), n)
    rank, step = orders.argsort(dim=1), torch.arange(n, device=orders.device)[:, None]
    shown, canvas = (rank[:, None] < step).flatten(0, 1).unique(dim=0, return_inverse=True)
    at = canvas.view_as(orders).gather(1, rank), step.T.expand_as(orders)  # the canvas and the position of each token
    scored = torch.zeros_like(shown).index_put(at, torch.ones_like(shown[0, 0]))
    canvases, positions = _revealed(model, question, shown, n, scored)
    shares = 1 - shown.float().mean(dim=1)
    losses = surprisals(model, question, canvases, positions, shares, cfg_scale, max_batch)
    table = losses.new_zeros(shown.shape).masked_scatter(scored, losses)
    return table[at]
