"""Which facts an average is over: those that the model knows, and what knowing means.

    recalled    the model's own loop writes the answer, at the settings given: `denoise` from the fact's canvas ends
                with the answer's tokens in their places
    one_canvas  the answer's tokens are the likeliest at all its places in one pass over the canvas, on which none of
                them is written yet; [MASK], which the loop never writes, does not count
    all         every fact, known or not
    ids         the facts named, such as those that two models know

On a masked diffusion model "recalled" and "one_canvas" are different facts: what it writes step by step it may not know
at all places at once, and the other way round. On a causal model that writes the likeliest token they are the same: its
canvas holds the answer's earlier tokens already.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.resumable import fact_seed, name_facts
from diffusion_lens.analysis.traced_trajectory import loop_prompt
from diffusion_lens.analysis.usable_facts import sort_out
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise, prepare
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.samplers import Confidence, LeftToRight, describe_sampler, resolve_sampler
from diffusion_lens.denoising.step_hooks import acts_by_step
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Fact, Query
from diffusion_lens.hook_names import loop_hook, nearest
from diffusion_lens.identity import name_of
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, plain_number, whole_number
from diffusion_lens.user_warnings import warn_user

RULES = ("recalled", "one_canvas", "all")
_CURES = {
    "recalled": "Give the canvas length that the model knows (length=) or other settings of the loop (loop=), or "
    "average by another rule: known='one_canvas', or known='all'",
    "one_canvas": "Give the canvas length that the model knows (length=), or average by another rule: "
    "known='recalled', or known='all'",
    "all": "No run of the loop writes all places of an answer: give it other settings (loop=)",
    "ids": "Name at least one of the facts that can be traced in known=, or average by a rule: known='all'",
}


@dataclass(frozen=True)
class LoopSettings:
    """How the loop writes answers.

    Attributes:
        steps, sampler, temperature: as in `HookedDiffusionTransformer.denoise`.
        cfg_scale: weight of guidance. A causal model knows none, and writes without.
        seed: each fact draws from a seed made of this one and its id.
        batch_size: most facts in one batch. Only facts whose prompts are equally long share one, as do their canvases,
            and a sampler that ranks a batch as one pool is given one fact at a time.
    """

    steps: int | None = None
    sampler: str | Sampler | None = None
    cfg_scale: float = 0.0
    temperature: float = 0.0
    seed: int = 1
    batch_size: int = 32

    def __post_init__(self) -> None:
        if self.steps is not None:
            object.__setattr__(self, "steps", whole_number("steps", self.steps))
        for name in ("cfg_scale", "temperature"):
            object.__setattr__(self, name, plain_number(name, getattr(self, name)))
        for name in ("seed", "batch_size"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}; a batch holds at least 1")

    def on(self, model: DiffusionTransformer) -> dict[str, Any]:
        """The arguments of `denoise` on this model."""
        return {
            "steps": self.steps,
            "sampler": resolve_sampler(self.sampler, model.cfg),
            "cfg_scale": self.cfg_scale if model.cfg.has_mask else 0.0,
            "temperature": self.temperature,
        }

    def describe(self, model: DiffusionTransformer) -> dict[str, Any]:
        """For a record."""
        asked = self.on(model)
        numbers = {name: asked[name] for name in ("cfg_scale", "temperature")}
        steps = None if isinstance(asked["sampler"], LeftToRight) else asked["steps"]
        described = {"sampler": describe_sampler(asked["sampler"]), "steps": steps, **numbers}
        return {**described, "seed": self.seed, "batch_size": self.batch_size}

    def check(self, model: DiffusionTransformer, query: Query) -> None:
        """Raise a `ValueError` unless the loop can be run on this canvas."""
        given, length = loop_prompt(model, query)
        prepare(model, lay_out(model, given[None], length), DenoiseSettings(**self.on(model)))


def refuse_step_hooks(model: DiffusionTransformer) -> None:
    """Raise a `ValueError` where a hook of the network acts in the loop only, and so not on a canvas outside it."""
    for name, point in model.hook_dict.items():
        for handle in () if name.startswith(loop_hook("")) else point.fwd_hooks:
            if acts_by_step(handle.user_hook):
                raise ValueError(
                    f"known='recalled' chooses facts by the loop, in which the hook {name_of(handle.user_hook)} at "
                    f"{name!r} acts, and their traces run outside it, where it does nothing. Trace the loop's steps "
                    "(average_trajectory_effect), attach a hook that acts outside the loop too, or choose facts "
                    "without the loop (known= with their ids, 'all' or 'one_canvas')"
                )


class LoopRuns:
    """What the loop makes of each fact, a run of one row by id.

    Batches are planned for all facts of a run, and a batch is run, whole, when a fact of it is first asked for. So no
    number depends on which shard asks, and a run that is taken up again asks only for what it needs.
    """

    def __init__(self, model: DiffusionTransformer, queries: Mapping[str, Query], settings: LoopSettings) -> None:
        self._model, self._settings, self._queries = model, settings, queries
        self._prompts = {fact_id: loop_prompt(model, query) for fact_id, query in queries.items()}
        sampler = settings.on(model)["sampler"]
        pooled = isinstance(sampler, Confidence) and sampler.scope != "row"
        self._batches = {
            fact_id: batch
            for batch in _equally_long(queries, self._shape, 1 if pooled else settings.batch_size)
            for fact_id in batch
        }
        self._runs: dict[str, Trajectory] = {}

    def __getitem__(self, fact_id: str) -> Trajectory:
        if fact_id not in self._runs:
            batch = self._batches[fact_id]
            prompts = torch.stack([self._prompts[each][0] for each in batch])
            seed = [fact_seed(self._settings.seed, each) for each in batch]
            trajectory = denoise(
                self._model,
                lay_out(self._model, prompts, self._prompts[fact_id][1], attention_mask=torch.ones_like(prompts)),
                DenoiseSettings(**self._settings.on(self._model), seed=seed),
            )
            self._runs |= {each: trajectory.row(row) for row, each in enumerate(batch)}
        return self._runs[fact_id]

    def recalled(self, fact_id: str) -> bool:
        """Whether the run ends with the answer."""
        query = self._queries[fact_id]
        written = self[fact_id].tokens[0, list(query.answer_positions)].tolist()
        return written == list(query.answer_tokens)

    def _shape(self, fact_id: str) -> tuple[int, int, int]:
        given, length = self._prompts[fact_id]
        mask = self._model.cfg.mask_token_id
        return length, len(given), 0 if mask is None else int((given == mask).sum())


@dataclass(frozen=True)
class Known:
    """A rule for which facts are averaged.

    Attributes:
        rule: one of `RULES`, or "ids".
        ids: the facts named, for "ids".
    """

    rule: str
    ids: frozenset[str] = frozenset()

    @classmethod
    def of(cls, asked: str | Collection[str], facts: Collection[str]) -> "Known":
        """What `known=` says.

        Args:
            facts: ids of all facts, those that cannot be asked among them.

        Raises:
            ValueError: no such rule, or an id that no fact has.
        """
        if isinstance(asked, str):
            if asked not in RULES:
                raise ValueError(
                    f"known={asked!r}, nearest is {nearest(asked, RULES, 1)}; it is one of {', '.join(RULES)}, or a "
                    "collection of fact ids"
                )
            return cls(asked)
        if strangers := sorted(set(asked) - set(facts)):
            near = nearest(strangers[0], list(facts), 1)
            raise ValueError(f"known= names {len(strangers)} ids that no fact has: {strangers[0]!r}, nearest is {near}")
        return cls("ids", frozenset(asked))

    def check_loop(self, loop: LoopSettings | None) -> None:
        """Raise a `ValueError` at settings of the loop where nothing asks it."""
        if loop is not None and self.rule != "recalled":
            raise ValueError(f"loop= goes with known='recalled'; with {self.rule!r} nothing asks the loop")

    def describe(self) -> dict[str, Any]:
        """For a record."""
        return {"known": self.rule, **({"known_ids": sorted(self.ids)} if self.rule == "ids" else {})}


def default_rule(first_tokens: Whole | None) -> str:
    """Of a question for one token, as ROME asks, what one canvas tells; of a longer answer, what the loop writes."""
    return "one_canvas" if first_tokens == 1 else "recalled"


def recalled_facts(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    loop: LoopSettings | None = None,
    *,
    answer_places: int | None = None,
    length: int | None = None,
    first_tokens: int | None = None,
    occurrence: int | None = None,
) -> list[str]:
    """The ids of the facts whose answers the model's own loop writes, in the order of `facts`.

    To average two models over the facts that both recall:

        both = set(recalled_facts(model, facts, loop)) & set(recalled_facts(twin, facts, loop))
        average_indirect_effect(model, facts, known=both)
        average_indirect_effect(twin, facts, known=both)

    Args:
        loop: settings of the loop; by default those of `denoise`.
        answer_places, length, first_tokens, occurrence: as in `average_indirect_effect`.

    Raises:
        ValueError: a setting out of range, two facts with one id, or no fact that can be asked. A single one that
            cannot is not recalled.
    """
    loop, layout = loop or LoopSettings(), CanvasLayout(length, answer_places, first_tokens, occurrence)
    queries, _ = sort_out(name_facts(facts), lambda fact: layout.query(model, fact, loop.check))
    runs = LoopRuns(model, queries, loop)
    return [fact_id for fact_id in queries if runs.recalled(fact_id)]


def say_rule(record: Mapping[str, Any], averaged: int, left_out: int) -> str:
    """How many facts of how many are averaged and by which rule, in words: "64 of 100 facts, recalled in 4 steps"."""
    steps, not_asked = record.get("loop", {}).get("steps"), len(record["set_aside"])
    said = {
        "recalled": "recalled" + (f" in {steps} step{'s' * (steps > 1)}" if steps else ""),
        "one_canvas": "known on one canvas",
        "all": "known or not",
        "ids": "chosen by id",
    }
    chosen = f"{averaged} of {averaged + left_out} facts, {said[record['known']]}"
    return chosen + (f" ({not_asked} set aside)" if not_asked else "")


@runtime_checkable
class Averaged(Protocol):
    """What `warned` asks of an average."""

    @property
    def record(self) -> dict[str, Any]: ...

    @property
    def ids(self) -> list[str]: ...

    @property
    def unknown(self) -> dict[str, float]: ...


A = TypeVar("A", bound=Averaged)


def warned(average: A) -> A:
    """An average, with a warning where a whole run leaves out every fact; a shard alone may."""
    record, averaged, left_out = average.record, len(average.ids), len(average.unknown)
    if not averaged and left_out >= len(record["facts"]):
        warn_user(f"the average is over nothing: {say_rule(record, averaged, left_out)}. {_CURES[record['known']]}")
    return average


def _equally_long(ids: Collection[str], shape: Any, size: int) -> list[list[str]]:
    """Batches of facts of one shape, by id, so that they do not depend on the order in which the facts came."""
    ordered = sorted(ids, key=lambda fact_id: (shape(fact_id), fact_id))
    groups = [list(group) for _, group in groupby(ordered, key=shape)]
    return [group[begun : begun + size] for group in groups for begun in range(0, len(group), size)]
