"""What is asked of a session, as plain data that is checked: a `Spec` is a run, its settings and its interventions."""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from diffusion_lens.settings import (
    Settings,
    at_least,
    check_bool,
    fields_of,
    not_negative,
    one_of,
    setting,
    whole_number,
)

FORCE, CHANGES = "force", ("zero", "mean", "patch")
SITES = ("resid", "attn", "mlp", "head")
MOST_STEPS = 4096
MOST_INTERVENTIONS = 128
RUN_SETTINGS = ("length", "steps", "sampler", "cfg_scale", "temperature", "seed")  # those of `denoise`


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is no text")
    return value


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name}={value!r}; give a list of numbers, or null for all")
    return tuple(at_least(0, name, number) for number in value)


def _subject(name: str, value: Any) -> tuple[int, int]:
    subject = _numbers(name, value)
    if len(subject) != 2 or not subject[0] < subject[1]:
        raise ValueError(f"{name}={list(subject)}; give its first position and one past its last")
    return subject[0], subject[1]


def _steps(name: str, value: Any) -> int:
    steps = at_least(1, name, value)
    if steps > MOST_STEPS:  # A run holds the explorer until it ends.
        raise ValueError(f"{name}={steps}; the explorer shows each step, and takes at most {MOST_STEPS} steps")
    return steps


@dataclass(frozen=True)
class Intervention(Settings):
    """One change of a run."""

    what: str = setting(
        MISSING,
        '"force" (write a token into the canvas that a step reads, or mask a position again), "zero", "mean" (the mean '
        'of another run) or "patch" (the activation of another run).',
        one_of(FORCE, *CHANGES),
    )
    step: int | None = setting(None, "Step that reads the forced token.", partial(at_least, 0))
    position: int | None = setting(None, "Position of the forced token.", partial(at_least, 0))
    token: str | None = setting(None, "Text of the forced token; `None` masks the position.", _text)
    site: str | None = setting(None, 'Activation that is changed: "resid", "attn", "mlp" or "head".', one_of(*SITES))
    layer: int | None = setting(None, "Layer of the site.", partial(at_least, 0))
    head: int | None = setting(None, 'Head of the site "head".', partial(at_least, 0))
    positions: tuple[int, ...] | None = setting(None, "Positions that are changed; `None` for all.", _numbers)
    steps: tuple[int, ...] | None = setting(None, "Steps at which they are changed; `None` for all.", _numbers)
    source: str | None = setting(
        None,
        'Id of the run whose activations "mean" and "patch" take; `None` for the run without interventions.',
        _text,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("step", "position") if self.what == FORCE else ("site", "layer"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing: the intervention {self.what!r} needs it")
        if self.what != FORCE and (self.head is None) == (self.site == "head"):
            raise ValueError(
                f"head={self.head!r} and site={self.site!r}: the site 'head' needs the index of a head, others none"
            )

    def to_json(self) -> dict[str, Any]:
        """The entries that belong to this kind of intervention, as plain data."""
        of_force = ("step", "position", "token")
        is_force = self.what == FORCE
        return {name: x for name, x in self.describe().items() if name == "what" or (name in of_force) == is_force}

    def __str__(self) -> str:
        if self.what == FORCE:
            act = "masked again" if self.token is None else f"set to {self.token!r}"
            return f"position {self.position} {act} at step {self.step}"
        sites = {"resid": "residual stream", "attn": "attention", "mlp": "MLP", "head": f"head {self.head}"}
        acts = {"zero": "set to zero", "mean": "set to its mean", "patch": "patched"}
        where = "" if self.positions is None else f" at {_listed('position', self.positions)}"
        when = "" if self.steps is None else f" at {_listed('step', self.steps)}"
        return f"block {self.layer} {sites[str(self.site)]} {acts[self.what]}{where}{when}"


def _interventions(name: str, value: Any) -> tuple[Intervention, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name}={value!r} is no list")
    if len(value) > MOST_INTERVENTIONS:  # Each is a hook at every step.
        raise ValueError(f"{name}= has {len(value):,} entries; a run takes at most {MOST_INTERVENTIONS} interventions")
    return tuple(
        one if isinstance(one, Intervention) else read_as(Intervention, "an intervention", one) for one in value
    )


@dataclass(frozen=True)
class Spec(Settings):
    """A run: prompt, settings of `denoise`, and interventions. A run is a function of its spec."""

    model: int = setting(0, "Index of the model in the session.", partial(at_least, 0))
    prompt: str = setting("", "Text of the prompt.", _text)
    length: int | None = setting(None, "Length of the canvas; `None` for the model's default.", partial(at_least, 1))
    steps: int = setting(16, "Number of denoising steps.", _steps)
    sampler: str | None = setting(None, "Name of the sampler; `None` for the model's default.", _text)
    cfg_scale: float = setting(0.0, "Strength of guidance.", not_negative)
    temperature: float = setting(0.0, "Temperature of the sampling.", not_negative)
    seed: int = setting(0, "Seed of the run.", whole_number)
    answer: str | None = setting(
        None,
        "Text that should follow the prompt, with its leading space; it is what the lens ranks and traces follow.",
        lambda name, value: _text(name, value) or None,
    )
    subject: tuple[int, int] | None = setting(
        None, "First position of the subject and one past its last, for traces.", _subject
    )
    interventions: tuple[Intervention, ...] = setting((), "Changes of the run.", _interventions)
    base: str | None = setting(None, "Id of the run with which this one is compared.", _text)

    @classmethod
    def of(cls, given: Any) -> "Spec":
        """A spec from plain data, with the defaults for what is missing.

        Raises:
            ValueError: An unknown entry, or a number out of range.
            TypeError: An entry of the wrong type.
        """
        return given if isinstance(given, cls) else read_as(cls, "a run", given)

    def to_json(self) -> dict[str, Any]:
        """The spec as plain data; `of` is the inverse."""
        return {**self.describe(), "interventions": [one.to_json() for one in self.interventions]}

    @property
    def id(self) -> str:
        """The id of the run: a digest of all that the run depends on, so not of `base`."""
        decisive = {**self.to_json(), "base": None}
        return "r" + hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def read_as(kind: Any, what: str, given: Any) -> Any:
    """The settings of a mapping from the browser, each checked.

    Args:
        kind: Class of the settings.
        what: What they describe, for messages.

    Raises:
        ValueError: An unknown or missing entry, or a number out of range.
        TypeError: An entry of the wrong type.
    """
    known = fields_of(kind)
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is described by a JSON object, and this is {type(given).__name__}")
    if unknown := [str(name) for name in given if name not in known]:
        near = get_close_matches(unknown[0], known, n=1, cutoff=0.0)
        raise ValueError(f"{what} has no entry {unknown[0]!r}; the nearest is {near[0]!r} (all: {', '.join(known)})")
    if missing := [name for name, each in known.items() if each.default is MISSING and name not in given]:
        raise ValueError(f"{what} needs the entry {missing[0]!r}: {known[missing[0]].metadata['help']}")
    checked = {
        name: value if value is known[name].default else known[name].metadata["check"](name, value)
        for name, value in given.items()
    }
    return kind(**checked)


def _listed(noun: str, numbers: Collection[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


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
