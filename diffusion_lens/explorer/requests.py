"""What a browser asks of a session beside runs and chunks, as plain data that is checked."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any

from diffusion_lens.explorer.spec import read_as
from diffusion_lens.settings import Settings, at_least, check_bool, setting

LONGEST_PROMPT = 2**16  # characters
LARGEST_STATE = 2**16  # bytes of JSON
MOST_PAGE_RUNS = 64
MOST_PAGE_FACTS = 256


def _prompt(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r:.60} is no text")
    if len(value) > LONGEST_PROMPT:
        raise ValueError(f"{name}= has {len(value):,} characters; give at most {LONGEST_PROMPT:,}")
    return value


def _runs(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name}={value!r:.60}; give a list with the id of each run")
    if len(value) > MOST_PAGE_RUNS:
        raise ValueError(f"{name}= has {len(value):,} entries; a page contains at most {MOST_PAGE_RUNS} runs")
    return tuple(dict.fromkeys(value))


def _layers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name}={value!r:.60} is no list of layers")
    return tuple(sorted({at_least(0, name, layer) for layer in value}))


def _facts(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name}={value!r:.60} is no list of facts")
    if len(value) > MOST_PAGE_FACTS:
        raise ValueError(
            f"{len(value):,} facts are measured or selected, and a page contains at most {MOST_PAGE_FACTS} of them: "
            "select fewer rows of the table of facts, or close it"
        )
    return tuple(sorted({at_least(0, name, fact) for fact in value}))


def check_state(name: str, value: Any) -> dict[str, Any] | None:
    """What a page shows, which its front end writes and reads; a `TypeError` or `ValueError` unless it is plain data
    within a bound."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r:.60} is no JSON object")
    try:
        text = json.dumps(value, allow_nan=False)
    except TypeError as error:
        raise TypeError(f"{name}= is no plain data: {error}") from None
    if len(text) > LARGEST_STATE:
        raise ValueError(f"{name}= has {len(text):,} bytes; give at most {LARGEST_STATE:,}")
    plain: dict[str, Any] = json.loads(text)
    return plain


@dataclass(frozen=True)
class FactRequest(Settings):
    """The run of a fact of the table on one model."""

    id: int = setting(MISSING, "Index of the fact in the table.", partial(at_least, 0))
    model: int = setting(0, "Index of the model in the session.", partial(at_least, 0))
    effect: bool = setting(False, "Whether to corrupt the subject too.", check_bool)

    @classmethod
    def of(cls, given: Any) -> "FactRequest":
        """The request from plain data; errors are those of `read_as`."""
        request: FactRequest = read_as(cls, "a request for a fact", given)
        return request


@dataclass(frozen=True)
class SuggestionRequest(Settings):
    """Subjects and answers for a prompt."""

    prompt: str = setting(MISSING, "Text of the prompt.", _prompt)

    @classmethod
    def of(cls, given: Any) -> "SuggestionRequest":
        """The request from plain data; errors are those of `read_as`."""
        request: SuggestionRequest = read_as(cls, "a request for suggestions", given)
        return request


@dataclass(frozen=True)
class PageRequest(Settings):
    """A page with some runs."""

    runs: tuple[str, ...] = setting(MISSING, "Ids of the runs, the first one shown first.", _runs)
    state: dict[str, Any] | None = setting(
        None, "What the page shows at first, as its front end writes it.", check_state
    )
    attention: tuple[int, ...] = setting((), "Layers whose attention patterns the page contains.", _layers)
    facts: tuple[int, ...] = setting((), "Index of each fact that the page contains.", _facts)

    @classmethod
    def of(cls, given: Any) -> "PageRequest":
        """The request from plain data; errors are those of `read_as`."""
        request: PageRequest = read_as(cls, "a request for a page", given)
        return request
