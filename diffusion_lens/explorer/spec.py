"""What to compute, as plain data: a `Spec` is a run, its settings and its interventions."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from diffusion_lens.settings import at_least, not_negative, whole_number

FORCE, CHANGES = "force", ("zero", "mean", "patch")
SITES = ("resid", "attn", "mlp", "head")
MOST_STEPS = 4096


@dataclass(frozen=True)
class Intervention:
    """One change of a run.

    Attributes:
        what: "force" (write a token into the canvas that a step reads, or mask a position again), "zero", "mean" (the
            mean of another run) or "patch" (the activation of another run).
        step, position: Step that reads the forced token, and its position.
        token: Text of the forced token; `None` masks the position.
        site: Activation that is changed: "resid", "attn", "mlp" or "head".
        layer, head: Layer, and the head of the site "head".
        positions, steps: Positions and steps that are changed; `None` for all.
        source: Id of the run whose activations "mean" and "patch" take; `None` for the run without interventions.
    """

    what: str
    step: int | None = None
    position: int | None = None
    token: str | None = None
    site: str | None = None
    layer: int | None = None
    head: int | None = None
    positions: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    source: str | None = None

    @classmethod
    def of(cls, given: Any) -> "Intervention":
        """An intervention from plain data.

        Raises:
            ValueError: An unknown or missing entry.
            TypeError: An entry of the wrong type.
        """
        _require_keys("an intervention", given, cls)
        what = given.get("what")
        if what == FORCE:
            return cls(
                what,
                step=at_least(0, "step", given.get("step")),
                position=at_least(0, "position", given.get("position")),
                token=_text("token", given.get("token"), optional=True),
            )
        _one_of("what", what, (FORCE, *CHANGES))
        site = given.get("site")
        _one_of("site", site, SITES)
        head = given.get("head")
        if (head is None) == (site == "head"):
            raise ValueError(f"head={head!r} and site={site!r}: the site 'head' needs the index of a head, others none")
        return cls(
            what,
            site=site,
            layer=at_least(0, "layer", given.get("layer")),
            head=None if head is None else at_least(0, "head", head),
            positions=_numbers("positions", given.get("positions")),
            steps=_numbers("steps", given.get("steps")),
            source=_text("source", given.get("source"), optional=True),
        )

    def to_json(self) -> dict[str, Any]:
        """The entries that belong to this kind of intervention, as plain data."""
        if self.what == FORCE:
            return {"what": FORCE, "step": self.step, "position": self.position, "token": self.token}
        entries = {name: value for name, value in vars(self).items() if name not in ("step", "position", "token")}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in entries.items()}

    def __str__(self) -> str:
        if self.what == FORCE:
            act = "masked again" if self.token is None else f"set to {self.token!r}"
            return f"position {self.position} {act} at step {self.step}"
        sites = {"resid": "residual stream", "attn": "attention", "mlp": "MLP", "head": f"head {self.head}"}
        acts = {"zero": "set to zero", "mean": "set to its mean", "patch": "patched"}
        where = "" if self.positions is None else f" at {_listed('position', self.positions)}"
        when = "" if self.steps is None else f" at {_listed('step', self.steps)}"
        return f"block {self.layer} {sites[str(self.site)]} {acts[self.what]}{where}{when}"


@dataclass(frozen=True)
class Spec:
    """A run: prompt, settings of `denoise`, and interventions. A run is a function of its spec.

    Attributes:
        model: Index of the model in the session.
        prompt: Text of the prompt.
        length: Length of the canvas; `None` for the model's default.
        steps, sampler, cfg_scale, temperature, seed: Settings of `denoise`.
        answer: Text that should follow the prompt, with its leading space; it is what the lens ranks and traces follow.
        subject: First position of the subject and one past its last, for traces.
        interventions: Changes of the run.
        base: Id of the run with which this one is compared.
    """

    model: int = 0
    prompt: str = ""
    length: int | None = None
    steps: int = 16
    sampler: str | None = None
    cfg_scale: float = 0.0
    temperature: float = 0.0
    seed: int = 0
    answer: str | None = None
    subject: tuple[int, int] | None = None
    interventions: tuple[Intervention, ...] = field(default=())
    base: str | None = None

    @classmethod
    def of(cls, given: Any) -> "Spec":
        """A spec from plain data, with the defaults for what is missing.

        Raises:
            ValueError: An unknown entry, or a number out of range.
            TypeError: An entry of the wrong type.
        """
        if isinstance(given, cls):
            return given
        _require_keys("a run", given, cls)
        subject = _numbers("subject", given.get("subject"))
        if subject is not None and (len(subject) != 2 or not subject[0] < subject[1]):
            raise ValueError(f"subject={list(subject)}; give its first position and one past its last")
        interventions = given.get("interventions") or []
        if not isinstance(interventions, list | tuple):
            raise TypeError(f"interventions={interventions!r} is no list")
        readers: dict[str, Callable[[Any], Any]] = {
            "model": lambda x: at_least(0, "model", x),
            "prompt": lambda x: _text("prompt", x),
            "length": lambda x: None if x is None else at_least(1, "length", x),
            "steps": lambda x: at_least(1, "steps", x),
            "sampler": lambda x: _text("sampler", x, optional=True),
            "cfg_scale": lambda x: not_negative("cfg_scale", x),
            "temperature": lambda x: not_negative("temperature", x),
            "seed": lambda x: whole_number("seed", x),
            "answer": lambda x: _text("answer", x, optional=True) or None,
            "base": lambda x: _text("base", x, optional=True),
        }
        plain = {name: read(given[name]) for name, read in readers.items() if name in given}
        if plain.get("steps", 0) > MOST_STEPS:  # A run holds the explorer until it ends.
            raise ValueError(
                f"steps={plain['steps']}; the explorer shows each step, and takes at most {MOST_STEPS} steps"
            )
        return cls(
            **plain,
            subject=None if subject is None else (subject[0], subject[1]),
            interventions=tuple(Intervention.of(one) for one in interventions),
        )

    def to_json(self) -> dict[str, Any]:
        """The spec as plain data; `of` is the inverse."""
        subject = None if self.subject is None else list(self.subject)
        return {**vars(self), "subject": subject, "interventions": [one.to_json() for one in self.interventions]}

    @property
    def id(self) -> str:
        """The id of the run: a digest of all that the run depends on, so not of `base`."""
        decisive = {**self.to_json(), "base": None}
        return "r" + hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _require_keys(what: str, given: Any, of: Any) -> None:
    """Raise an error unless a mapping has only fields of a dataclass."""
    known = [field.name for field in fields(of)]
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is described by a JSON object, and this is {type(given).__name__}")
    if unknown := [str(name) for name in given if name not in known]:
        near = get_close_matches(unknown[0], known, n=1, cutoff=0.0)
        raise ValueError(f"{what} has no entry {unknown[0]!r}; the nearest is {near[0]!r} (all: {', '.join(known)})")


def _one_of(name: str, value: Any, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}; it must be one of {', '.join(map(repr, known))}")


def _text(name: str, value: Any, optional: bool = False) -> Any:
    if not isinstance(value, str) and not (optional and value is None):
        raise TypeError(f"{name}={value!r} is no text{' and not null' if optional else ''}")
    return value


def _numbers(name: str, value: Any) -> tuple[int, ...] | None:
    """Several positions or steps; `None` for all."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name}={value!r}; give a list of numbers, or null for all")
    return tuple(at_least(0, name, number) for number in value)


def _listed(noun: str, numbers: Collection[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
