"""The layout of facts on canvases, which every analysis of facts shares.

By default the canvas of a masked diffusion model is as long as the texts that the model was trained on, as in
`denoise`. On a shorter canvas the model cannot end its text where it learned to, and may recall nothing.

Some facts cannot be laid out: the tokenizer may merge an answer into its prompt, a subject may not be in its prompt, or
a sentence may be longer than the canvas. A study leaves them out, and lists them with the reasons under `set_aside`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from diffusion_lens.analysis.engine.answer import check_answer
from diffusion_lens.analysis.over_facts.folder import content, name_facts
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer
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


Queries = Query | Fact | Sequence[Query | Fact]


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
