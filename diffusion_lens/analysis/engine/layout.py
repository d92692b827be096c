"""The layout of facts on canvases, which every analysis of facts shares.

By default the canvas of a masked diffusion model is as long as the texts that the model was trained on, as in
`denoise`. On a shorter canvas the model cannot end its text where it learned to, and may recall nothing.

Some facts cannot be laid out: the tokenizer may merge an answer into its prompt, a subject may not be in its prompt, or
a sentence may be longer than the canvas. A study leaves them out, and lists them with the reasons under `set_aside`.

A query on a masked diffusion model shows the network one of many canvases on which it may have to write the answer: its
loop, and its training, also ask for the answer when other positions are revealed already. A `StateBank` has several of
these canvases, and analyses average over it as over one query.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.analysis.engine.answer import check_answer
from diffusion_lens.analysis.over_facts.folder import content, name_facts
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.denoising.settings import DenoiseSettings
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import (
    Real,
    Whole,
    at_least,
    check_seed,
    checked_arguments,
    own_seed,
    plain_number,
    whole_numbers,
)
from diffusion_lens.settings.shared import CanvasFields

L = TypeVar("L", bound="CanvasLayout")


@dataclass(frozen=True)
class CanvasLayout(CanvasFields):
    """The settings by which facts are laid out."""

    def on(self: L, model: DiffusionTransformer) -> L:
        """This layout with the length that applies to `model`. Where the trained length is unknown, and where the text
        grows, a canvas has as many positions as prompt and answer."""
        if model.cfg.is_autoregressive or self.length is not None or self.n_masks is not None:
            return self
        return replace(self, length=model.cfg.trained_length)

    def query(
        self,
        model: DiffusionTransformer,
        fact: Fact,
        check: Callable[[DiffusionTransformer, Query], object] | None = None,
        prepend_bos: bool | None = None,
    ) -> Query:
        """A fact laid out on the model's canvas; a `ValueError` if that is not possible, or if `check` raises one."""
        length, n_masks = self.on(model).length, self.n_masks
        if length is not None:
            prompt, answer = fact.tokenize(model, prepend_bos)
            n_masks = length - len(prompt)
            if n_masks < len(answer):
                origin = ", on which the model was trained," if length == model.cfg.trained_length else ""
                raise ValueError(
                    f"length={length}{origin} counts the prompt too, and {fact.prompt!r} has {len(prompt)} tokens, "
                    f"{fact.answer!r} {len(answer)}: give length={len(prompt) + len(answer)} or more"
                )
        query = fact.to_query(
            model, n_masks=n_masks, first_tokens=self.first_tokens, occurrence=self.occurrence, prepend_bos=prepend_bos
        )
        check_answer(model, query)
        if check is not None:
            check(model, query)
        return query


def as_query(model: DiffusionTransformer, fact_or_query: Fact | Query, length: int | None = None) -> Query:
    """A query as it is, or a fact laid out on the default canvas, or one of a length that is already known."""
    if isinstance(fact_or_query, Query):
        return fact_or_query
    return CanvasLayout(None if model.cfg.is_autoregressive else length).query(model, fact_or_query)


@checked_arguments
@dataclass(frozen=True, eq=False)
class StateBank:
    """Several canvases of one query on which its answer is still masked, to be averaged over as one query.

    `causal_trace` gives the mean of the traces of all canvases, `patch_grid` with `answer_probability` that of the
    grids, `compute_key` that of the keys; `optimize_value` searches for one value for all. They share batches. A bank
    of one canvas is that query.

    Attributes:
        queries: The canvases, of one length, with one subject and one answer.
        origin: Where the canvases come from, for records.

    Raises:
        ValueError: There is no canvas, or two differ in length, subject or answer.
    """

    queries: tuple[Query, ...]
    origin: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.queries:
            raise ValueError("a bank of no canvases has no mean: give at least one query")
        first = _shared_by_canvases(self.queries[0])
        for i, query in enumerate(self.queries):
            for name, value in _shared_by_canvases(query).items():
                if value != first[name]:
                    raise ValueError(
                        f"canvas {i} of the bank has {name} {value}, and canvas 0 {first[name]}: a bank has the states "
                        "of one query, so give each query a bank of its own"
                    )

    @classmethod
    @checked_arguments
    def of(
        cls,
        model: DiffusionTransformer,
        query: Query | Fact,
        n: Whole = 8,
        shares: Real | Sequence[Real] | None = None,
        seed: Whole = 0,
    ) -> "StateBank":
        """Canvases of a query on which random other positions are revealed.

        The tokens are those that the model itself writes around the answer: `denoise`, with its default settings, of
        the canvas with the answer in its place. They are revealed in any order, as in the training of masked diffusion.

        Args:
            query: Canvas with masked positions beside those of the answer; or a fact, which is laid out as in
                `causal_trace`.
            n: Number of canvases.
            shares: Share of the other masked positions that is revealed, from 0 to 1, or several, which the canvases
                take in turn. By default each canvas has its own, drawn uniformly, as in training.
            seed: Seed of the shares and positions.

        Raises:
            ValueError: The model is causal, so that its query has one canvas; it reads more than its canvas, such as
                the time; it writes block by block; no other position is masked; or a share is not between 0 and 1.
        """
        _require_canvases(model)
        if model.cfg.opens_blocks:
            raise ValueError(
                f"{model.cfg.model_name!r} writes block by block, so it never reads a canvas with any other positions "
                "revealed: take those of a run, StateBank.from_trajectory(model, run, query)"
            )
        query, count = as_query(model, query), at_least(1, "n", n)
        check_answer(model, query)
        by_canvas = [
            _share(each) for each in (shares if isinstance(shares, Sequence) else [shares]) if each is not None
        ]
        answer = list(query.answer_positions)
        tokens = query.tokens.to(model.cfg.device)
        # 1. What the model writes around the answer. Under uniform noise a run draws the other tokens itself.
        is_open = tokens == model.cfg.blank if model.cfg.has_mask else torch.arange(len(tokens)) >= min(answer)
        is_open[answer] = False
        positions = is_open.nonzero().flatten().tolist()
        if not positions:
            raise ValueError(
                "the canvas of the query has no masked position beside those of its answer, so there is nothing to "
                "reveal: lay the fact out with more, fact.to_query(model, n_masks=...)"
            )
        text = tokens.clone()
        text[answer] = torch.tensor(query.answer_tokens, device=tokens.device)
        given = text if model.cfg.has_mask else text[: max(answer) + 1]
        text = denoise(model, lay_out(model, given[None], len(tokens)), DenoiseSettings()).tokens[0].to(tokens.device)

        # 2. Reveal a share of it on each canvas.
        queries = []
        for i in range(count):
            draws = np.random.RandomState(own_seed(check_seed("seed", seed), i, bits=32))
            share = by_canvas[i % len(by_canvas)] if by_canvas else draws.uniform()
            revealed = draws.permutation(positions)[: round(share * len(positions))].tolist()
            canvas = tokens.clone()
            canvas[revealed] = text[revealed]
            queries.append(replace(query, tokens=canvas))
        return cls(tuple(queries), {"bank": "random shares", "shares": by_canvas or None, "seed": int(seed)})

    @classmethod
    @checked_arguments
    def from_trajectory(
        cls, model: DiffusionTransformer, trajectory: Trajectory, query: Query, steps: Iterable[Whole] | None = None
    ) -> "StateBank":
        """The canvases of a run on which the answer of a query is still masked, each once.

        Args:
            trajectory: Run of the query's canvas, `model.denoise(query.tokens[None], ...)`; or of several rows, such as
                samples at a temperature, whose canvases are joined.
            query: Subject and answer.
            steps: Steps whose canvases are taken; by default all before which the whole answer is masked, in any row.

        Raises:
            ValueError: The model is causal, or reads more than its canvas, as in `of`; the run has another length or
                prompt than the query; or at a step part of the answer is revealed in every row, or in none of the steps
                it is not.
        """
        _require_canvases(model)
        canvases, answer = trajectory.canvases[:-1], list(query.answer_positions)
        given, own = trajectory.given, query.tokens.to(trajectory.tokens.device)
        if trajectory.tokens.shape[1] != len(own) or bool(((trajectory.tokens != own) & given).any()):
            raise ValueError("the run has another prompt or length than the query: denoise query.tokens[None]")
        masked = trajectory.is_open(canvases)[:, :, answer].all(dim=2)
        indices = masked.any(dim=1).nonzero().flatten().tolist()
        if steps is not None:
            indices = [step - trajectory.first_step for step in whole_numbers("steps", steps)]
            if wrong := [i for i in indices if not 0 <= i < len(canvases) or not bool(masked[i].any())]:
                raise ValueError(
                    f"before step {wrong[0] + trajectory.first_step} the answer is not wholly masked, or there is no "
                    "such step: leave steps= out for all at which it is, or trace each step with trace_trajectory"
                )
        rows = torch.cat([canvases[i][masked[i]] for i in indices]) if indices else canvases[0, :0]
        found = {tuple(row.tolist()): row for row in rows}  # each once
        if not found:
            raise ValueError("the run has no step at which the whole answer is masked: trace it with trace_trajectory")
        queries = [replace(query, tokens=model.cfg.readable(row).to(query.tokens.device)) for row in found.values()]
        return cls(tuple(queries), {"bank": "trajectory", "steps": [i + trajectory.first_step for i in indices]})

    @property
    def tokens(self) -> Int[Tensor, "canvas pos"]:
        """All canvases."""
        return torch.stack([query.tokens for query in self.queries])

    def __len__(self) -> int:
        """Number of canvases."""
        return len(self.queries)

    def __iter__(self) -> Iterator[Query]:
        """The canvases in turn."""
        return iter(self.queries)

    @checked_arguments
    def after(self, query: Query) -> "StateBank":
        """The same states behind the prompt of another query, such as the corrupted side of `patch_grid`.

        From the first position of the answer on, the canvases are those of this bank; the answer is that of `query`.

        Raises:
            ValueError: The canvas of `query` has another number of positions from its answer on, or its answer has
                other positions there.
        """
        own = self.queries[0]
        start, end = min(own.answer_positions), min(query.answer_positions)
        shift, prompt = end - start, query.tokens[:end]
        if len(query.tokens) != len(own.tokens) + shift or query.answer_positions != tuple(
            position + shift for position in own.answer_positions
        ):
            raise ValueError(
                f"the query has {len(query.tokens) - end} positions from its answer on, {len(query.answer_positions)} "
                f"of them its answer's, and the bank {len(own.tokens) - start} and {len(own.answer_positions)}: lay "
                "both out with the same n_masks= and as many tokens of the answer"
            )
        moved = [torch.cat([prompt, each.tokens[start:].to(prompt.device)]) for each in self.queries]
        return StateBank(tuple(replace(query, tokens=tokens) for tokens in moved), self.origin)

    def describe(self) -> dict[str, Any]:
        """The bank as plain data, for a record."""
        return {**self.origin, **self.queries[0].describe(), "tokens": self.tokens.tolist()}


def _shared_by_canvases(query: Query) -> dict[str, Any]:
    """What is the same on all canvases of a bank."""
    return {
        "the length": len(query.tokens),
        "the subject": query.subject,
        "the subject's tokens": query.tokens[slice(*query.subject)].tolist(),
        "the answer positions": query.answer_positions,
        "the answer tokens": query.answer_tokens,
    }


def _share(value: Real) -> float:
    if not 0 <= (share := plain_number("shares", value)) <= 1:
        raise ValueError(f"shares={share}; a share of the masked positions is between 0 and 1")
    return share


def _require_canvases(model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if a canvas is not all that a step reads, or is always the same."""
    cfg = model.cfg
    beside = {
        "the time": cfg.time_conditioning,
        "the prediction of the step before": cfg.self_conditioning,
        "where the open block begins": cfg.counts_from_prompt,
    }
    if more := " and ".join(what for what, is_read in beside.items() if is_read):
        raise ValueError(
            f"{cfg.model_name!r} reads {more} beside its canvas, and a bank has canvases only, so it would not be read "
            "as in the loop: trace each step of a run with trace_trajectory"
        )
    if cfg.is_autoregressive:
        raise ValueError(
            f"{cfg.model_name!r} is a causal model: what precedes its answer is always complete, and it sees "
            "nothing behind it, so a query has one canvas. Use the query itself"
        )


Queries = Query | Fact | StateBank | Sequence[Query | Fact]


def as_queries(model: DiffusionTransformer, given: Queries) -> list[Query]:
    """One fact or query or several as queries, at least one."""
    several = [given] if isinstance(given, Query | Fact) else list(given)
    if not several:
        raise ValueError("there is no query: give a Fact or a Query, or several")
    return [as_query(model, each) for each in several]


T = TypeVar("T")
SHOWN = 3


@dataclass(frozen=True)
class UsableFacts(Generic[T]):
    """The facts of a study, by id: those that the model can be queried for, and why the others are left out."""

    facts: dict[str, Fact]
    prepared: dict[str, T]  # what `prepare` returned for each of them, such as a query on a canvas
    set_aside: dict[str, str]

    @classmethod
    def of(cls, facts: Sequence[Fact], prepare: Callable[[Fact], T]) -> "UsableFacts[T]":
        """The facts that `prepare` accepts; those for which it raises a `ValueError` are set aside. A `ValueError` if
        no fact is usable, or two facts have one id."""
        named, usable = name_facts(facts), {}
        prepared: dict[str, T] = {}
        set_aside: dict[str, str] = {}
        for fact_id, fact in named.items():
            try:
                prepared[fact_id], usable[fact_id] = prepare(fact), fact
            except ValueError as error:
                set_aside[fact_id] = str(error)
        if not prepared:
            raise ValueError(f"the model can be queried for none of the {len(named)} facts; {_first(set_aside)}")
        return cls(usable, prepared, set_aside)

    def describe(self) -> dict[str, Any]:
        """The facts and the reasons, for the record of a study."""
        facts = {fact_id: content(fact) for fact_id, fact in self.facts.items()}
        return {"facts": facts, "set_aside": self.set_aside}


def say_set_aside(set_aside: Mapping[str, str]) -> str:
    """A line with the number of facts set aside and the first reasons; empty if there are none."""
    if not set_aside:
        return ""
    facts = "1 fact is" if len(set_aside) == 1 else f"{len(set_aside)} facts are"
    return f"{facts} set aside, because the model cannot be queried for them; {_first(set_aside)}"


def _first(set_aside: Mapping[str, str]) -> str:
    shown = "; ".join(f"{fact_id!r}: {reason}" for fact_id, reason in list(set_aside.items())[:SHOWN])
    return shown + ("; ..." if len(set_aside) > SHOWN else "")
