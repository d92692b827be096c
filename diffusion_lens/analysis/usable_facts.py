"""Facts that cannot be asked, set aside with the reason: one of them does not end the work on all others.

The tokenizer may merge an answer into its prompt, a subject may not be in its prompt, a sentence may be longer than the
canvas. In a list of a thousand facts a few are like that. They are left out of the run, and `set_aside` in its record
says which and why.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from diffusion_lens.facts import Fact

T = TypeVar("T")
SHOWN = 3


def sort_out(named: Mapping[str, Fact], lay_out: Callable[[Fact], T]) -> tuple[dict[str, T], dict[str, str]]:
    """What each fact becomes, and why others become nothing; both by id.

    Args:
        lay_out: makes of a fact what is asked, or raises a `ValueError`.

    Raises:
        ValueError: not one fact can be asked.
    """
    usable: dict[str, T] = {}
    set_aside: dict[str, str] = {}
    for fact_id, fact in named.items():
        try:
            usable[fact_id] = lay_out(fact)
        except ValueError as error:
            set_aside[fact_id] = str(error)
    if not usable:
        raise ValueError(f"none of the {len(named)} facts can be asked; {_first(set_aside)}")
    return usable, set_aside


def say_set_aside(set_aside: Mapping[str, str]) -> str:
    """A line for people; empty where every fact was asked."""
    if not set_aside:
        return ""
    counted = (
        "1 fact cannot be asked and is" if len(set_aside) == 1 else f"{len(set_aside)} facts cannot be asked and are"
    )
    return f"{counted} set aside; {_first(set_aside)}"


def _first(set_aside: Mapping[str, str]) -> str:
    shown = "; ".join(f"{fact_id!r}: {reason}" for fact_id, reason in list(set_aside.items())[:SHOWN])
    return shown + ("; ..." if len(set_aside) > SHOWN else "")
