"""Facts that a model can be queried for, and facts that a study sets aside, with the reasons.

The tokenizer may merge an answer into its prompt, a subject may not be in its prompt, or a sentence may be longer than
the canvas. In a list of a thousand facts there are usually a few of these. They do not stop the study: it leaves them
out, and lists them with the reasons under `set_aside` in its record.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from diffusion_lens.analysis.resumable import content, name_facts
from diffusion_lens.facts import Fact

T = TypeVar("T")
SHOWN = 3


@dataclass(frozen=True)
class UsableFacts(Generic[T]):
    """The facts of a study, by id.

    Attributes:
        facts: Facts that the model can be queried for.
        prepared: Value that `prepare` returned for each of them, such as a query on a canvas.
        set_aside: Reasons why the other facts are left out.
    """

    facts: dict[str, Fact]
    prepared: dict[str, T]
    set_aside: dict[str, str]

    @classmethod
    def of(cls, facts: Sequence[Fact], prepare: Callable[[Fact], T]) -> "UsableFacts[T]":
        """The facts that `prepare` accepts. Those for which it raises a `ValueError` are set aside.

        Raises:
            ValueError: No fact is usable, or two facts have one id.
        """
        named = name_facts(facts)
        prepared: dict[str, T] = {}
        set_aside: dict[str, str] = {}
        for fact_id, fact in named.items():
            try:
                prepared[fact_id] = prepare(fact)
            except ValueError as error:
                set_aside[fact_id] = str(error)
        if not prepared:
            raise ValueError(f"the model can be queried for none of the {len(named)} facts; {_first(set_aside)}")
        return cls({fact_id: named[fact_id] for fact_id in prepared}, prepared, set_aside)

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
