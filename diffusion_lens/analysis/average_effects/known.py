"""Rules that select the facts of an average, by whether the model recalls them.

    recalled    the denoising loop writes the answer: with the given settings, `denoise` from the fact's canvas ends
                with the answer's tokens at their positions
    one_canvas  in one pass over the canvas with the whole answer masked, the answer's tokens are the likeliest at all
                its positions; [MASK], which the loop never writes, is not counted
    all         every fact
    ids         facts given by id, such as those that two models recall

On a masked diffusion model "recalled" and "one_canvas" select different facts: the loop reveals some positions before
others, and each prediction depends on what is revealed. On a causal model that writes the likeliest token they select
the same facts, because its sequence contains the answer's earlier tokens in both cases.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_lens.analysis.average_effects.loop_runs import LoopRuns
from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.loop_settings import LoopSettings
from diffusion_lens.analysis.usable_facts import UsableFacts
from diffusion_lens.analysis.workers.executor import Executes
from diffusion_lens.analysis.workers.job import Compute
from diffusion_lens.analysis.workers.spread import Work, spread
from diffusion_lens.facts import Fact, Query
from diffusion_lens.hook_names import nearest
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, naming_the_nearest
from diffusion_lens.user_warnings import warn_user

RULES = ("recalled", "one_canvas", "all")
_CURES = {
    "recalled": "Give the canvas length of the model's training (length=) or other settings of the loop (loop=), or "
    "use another rule: known='one_canvas', or known='all'",
    "one_canvas": "Give the canvas length of the model's training (length=), or use another rule: "
    "known='recalled', or known='all'",
    "all": "No denoising run writes all positions of an answer: give the loop other settings (loop=)",
    "ids": "Give at least one fact that can be traced in known=, or use a rule: known='all'",
}


@dataclass(frozen=True)
class Known:
    """A rule that selects the facts of an average.

    Attributes:
        rule: One of `RULES`, or "ids".
        ids: Ids of the facts, for "ids"; `None` for the other rules.

    Raises:
        ValueError: There is no such rule.
    """

    rule: str
    ids: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.rule not in (RULES if self.ids is None else ("ids",)):
            raise ValueError(
                f"known={self.rule!r}, nearest is {nearest(str(self.rule), RULES, 1)}; it must be one of "
                f"{', '.join(RULES)}, or a collection of fact ids"
            )
        if self.ids is not None:
            object.__setattr__(self, "ids", frozenset(self.ids))

    @classmethod
    def of(cls, known: str | Collection[str]) -> "Known":
        """The rule with a name, or for a collection of fact ids."""
        return cls(known) if isinstance(known, str) else cls("ids", frozenset(known))

    def check_ids(self, facts: Collection[str]) -> None:
        """Raise a `ValueError` if the rule names an id that none of these facts has."""
        if unknown := sorted((self.ids or frozenset()) - set(facts)):
            near = nearest(unknown[0], list(facts), 1)
            raise ValueError(f"known= has {len(unknown)} ids that no fact has: {unknown[0]!r}, nearest is {near}")

    def describe(self) -> dict[str, Any]:
        """The rule for a record."""
        return {"known": self.rule, **({} if self.ids is None else {"known_ids": sorted(self.ids)})}


def default_rule(first_tokens: Whole | None) -> str:
    """The default rule: "one_canvas" for the first token alone, as in ROME, and "recalled" for a longer answer."""
    return "one_canvas" if first_tokens == 1 else "recalled"


@naming_the_nearest
def recalled_facts(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    loop: LoopSettings | None = None,
    *,
    n_masks: int | None = None,
    length: int | None = None,
    first_tokens: int | None = None,
    occurrence: int | None = None,
    executor: Executes | None = None,
) -> list[str]:
    """The ids of the facts whose answers the model's own loop writes, in the order of `facts`.

    To average two models over the facts that both recall:

        both = set(recalled_facts(model, facts, loop)) & set(recalled_facts(baseline, facts, loop))
        average_indirect_effect(model, facts, known=both)
        average_indirect_effect(baseline, facts, known=both)

    Args:
        loop: Settings of the loop; by default those of `denoise`.
        n_masks, length, first_tokens, occurrence: The same as in `average_indirect_effect`.
        executor: `concurrent.futures.Executor`, or `Workers`, that runs the loop; by default this process does.

    Raises:
        ValueError: A setting is out of range, two facts have one id, a worker does not get the network, or the model
            can be queried for none of the facts. A single fact that it cannot be queried for is not recalled.
        RuntimeError: A fact failed on a worker, or a task was given up after its workers died.
    """
    loop, layout = loop or LoopSettings(), CanvasLayout(length, n_masks, first_tokens, occurrence)
    usable = UsableFacts.of(facts, lambda fact: layout.query(model, fact, loop.check))
    runs = LoopRuns(model, usable.prepared, loop)
    if executor is None:
        return [fact_id for fact_id in usable.prepared if runs.recalled(fact_id)]
    results, failed = spread(Work(model, RecalledJob(usable.prepared, loop), runs.batches), executor)
    if failed:
        first = next(iter(failed))
        raise RuntimeError(f"{len(failed)} facts failed on the workers; {first!r}: {failed[first]}")
    recalled = dict(results)
    return [fact_id for fact_id in usable.prepared if recalled[fact_id]]


@dataclass(frozen=True)
class RecalledJob:
    """Whether the loop writes the answers of facts.

    Attributes:
        queries: The facts on their canvases, by id.
        loop: Settings of the loop.
    """

    queries: Mapping[str, Query]
    loop: LoopSettings

    def part(self, ids: Sequence[str]) -> "RecalledJob":
        """The job with these facts."""
        return RecalledJob({fact_id: self.queries[fact_id] for fact_id in ids}, self.loop)

    def on(self, model: DiffusionTransformer) -> Compute:
        """The function that tells of each fact of a batch whether it is recalled."""
        runs = LoopRuns(model, self.queries, self.loop)
        return lambda batch: [runs.recalled(fact_id) for fact_id in batch]


def say_rule(record: Mapping[str, Any], n_averaged: int, n_left_out: int) -> str:
    """The number of averaged facts and the rule in words, such as "64 of 100 facts, recalled in 4 steps"."""
    steps, n_set_aside = record.get("loop", {}).get("steps"), len(record["set_aside"])
    rules = {
        "recalled": "recalled" + (f" in {steps} step{'s' * (steps > 1)}" if steps else ""),
        "one_canvas": "known on one canvas",
        "all": "known or not",
        "ids": "chosen by id",
    }
    averaged = f"{n_averaged} of {n_averaged + n_left_out} facts, {rules[record['known']]}"
    return averaged + (f" ({n_set_aside} set aside)" if n_set_aside else "")


def warn_of_nothing(record: Mapping[str, Any], n_left_out: int) -> None:
    """Warn that a rule leaves out every fact, and suggest other settings."""
    warn_user(f"the average has no facts: {say_rule(record, 0, n_left_out)}. {_CURES[record['known']]}")
