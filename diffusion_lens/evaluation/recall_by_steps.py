"""Recall of facts at each number of denoising steps, measured as ML-GSAI/SMDM `evaluate_reverse.py` does.

As in that script, the canvas has 52 positions: the prompt (after BOS) and masks. After the last step the text after the
prompt is decoded without special tokens, including any text after an end token. A causal model writes as the script's
`ar_sample_kvcache` does: from left to right, and its text ends at the first end token.

The authors denoise one prompt at a time. Rows of a batch are independent here, so prompts share batches. In half
precision, rounding can depend on the other rows, so the batch size is a recorded setting of the study.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from diffusion_lens.analysis.engine.layout import UsableFacts
from diffusion_lens.analysis.over_facts.executor import Executes
from diffusion_lens.analysis.over_facts.folder import Shard
from diffusion_lens.analysis.over_facts.study import Compute, LoopSettings, Study
from diffusion_lens.data.fact_files import STUDY_LENGTH, STUDY_STEPS
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise, prepare
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.evaluation.recall import Recall, Reply, cell_name
from diffusion_lens.facts.fact import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import provenance
from diffusion_lens.settings import INHERITED, checked_arguments, takes
from diffusion_lens.settings.shared import RecallFields
from weight_conversion import Architecture, Variant

_LOOP = ("sampler", "cfg_scale", "temperature", "seed", "batch_size")
_OF_SHAPE = ("steps", "sampler", "cfg_scale", "batch_size")  # settings that depend on the kind of model


@dataclass(frozen=True)
class RecallSettings(RecallFields):
    """How a model writes the answers that are scored; see `recall_by_steps`."""

    sampler: str | Sampler | None = INHERITED

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update({name: getattr(self.loop, name) for name in _LOOP})

    @cached_property
    def loop(self) -> LoopSettings:
        """The settings of the loop, without a number of steps; they are checked when they are made."""
        return LoopSettings(None, self.sampler, self.cfg_scale or 0.0, self.temperature, self.seed, self.batch_size)

    def columns(self, variant: Variant) -> list[int | None]:
        """Columns of the table for a model of this variant; `None` is from left to right, one step per token."""
        return [None] if self.loop.writes_in_order(variant) else [*(self.steps or STUDY_STEPS)]

    def describe_on(self, shape: Architecture | DiffusionConfig | None) -> dict[str, Any]:
        """The settings for the record of a study, before the model is loaded without those that depend on its shape."""
        described = self.describe()
        if shape is None:
            return {name: value for name, value in described.items() if name not in _OF_SHAPE}
        together = {"steps": self.columns(shape), "batch_size": self.loop.facts_together(shape)}
        return {**described, **self.loop.describe_on(shape), **together}


@takes(RecallSettings)
@begins_run
def recall_by_steps(
    model: HookedDiffusionTransformer,
    facts: Sequence[Fact],
    settings: RecallSettings,
    *,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> Recall:
    """Let the model answer every fact at every number of steps; the defaults are those of SMDM's evaluation.

    A sampler that writes from left to right takes one step per token, so it ignores `steps` and fills one column of its
    own. A causal model has no guidance: it writes with `cfg_scale=0`.

    Args:
        facts: Facts; their trained and queried directions make the cells of the table.
        settings: How the answers are written.
        out: Folder for one file per fact, which `Reply.load` reads. A call that finds facts there computes only the
            others. By default nothing is written.
        shard: (i, n) or "i/n": compute the batches i, i + n, i + 2n, ... only; `Recall.merge` joins the shards.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the batches; by default this process does.

    Raises:
        ValueError: A setting is out of range, two facts have one id, the folder contains another study, or the model
            can be queried for none of the facts. A single fact that it cannot be queried for (no answer, a prompt that
            leaves no position for it, words that the tokenizer does not know) is set aside, with the reason in
            `Recall.set_aside`.
    """
    length = model.cfg.trained_length or STUDY_LENGTH if settings.length is None else settings.length
    settings, columns = replace(settings, length=length), settings.columns(model.cfg)
    usable = UsableFacts.of(facts, lambda fact: prompt_length(model, fact, length))
    prompt_lengths = usable.prepared
    # Check the settings against this model before a folder is made.
    first_canvas = lay_out(model, usable.facts[next(iter(prompt_lengths))].prompt, length)
    prepare(model, first_canvas, replace(settings.loop.denoise.fitted_to(model.cfg), steps=columns[0]))
    record = {
        **settings.describe_on(model.cfg),
        "too_long": sorted(
            fact_id for fact_id, fact in usable.facts.items() if len(model.encode(fact.prompt + fact.answer)) > length
        ),
        **usable.describe(),
        **provenance(model, model.cfg),
    }

    # Sorted by id first, so that the batches do not depend on the order of the facts. Those of a causal model have
    # prompts of one length.
    ids, size = sorted(prompt_lengths), settings.loop.facts_together(model.cfg)
    ordered = sorted(ids, key=prompt_lengths.__getitem__)
    groups = [list(group) for _, group in groupby(ordered, key=prompt_lengths.__getitem__)]
    groups = groups if model.cfg.is_autoregressive else [ordered]
    batches = [group[start : start + size] for group in groups for start in range(0, len(group), size)]
    study = Study(model, record, batches, ReplyJob(usable.facts, settings))
    return study.collect(Recall, out, shard, progress, executor)


@checked_arguments
def recall_facts(
    model: HookedDiffusionTransformer, facts: Sequence[Fact], settings: RecallSettings, *args: Any, **more: Any
) -> Recall:
    """The same as `recall_by_steps(model, facts, settings, ...)`; will be removed."""
    warnings.warn(
        "recall_facts will be removed; use recall_by_steps(model, facts, settings, ...)",
        DeprecationWarning,
        stacklevel=2,
    )
    given = dict(zip(("out", "shard", "progress", "executor"), args, strict=False))
    return recall_by_steps(model, facts, settings=settings, **given, **more)


@dataclass(frozen=True)
class ReplyJob:
    """The texts that a model writes for facts, by id."""

    facts: Mapping[str, Fact]
    settings: RecallSettings

    def part(self, ids: Sequence[str]) -> "ReplyJob":
        """The job with these facts."""
        return replace(self, facts={fact_id: self.facts[fact_id] for fact_id in ids})

    def on(self, model: HookedDiffusionTransformer) -> Compute:
        """The function that lets the model write the answers of a batch."""
        return partial(self._replies, model)

    def _replies(self, model: HookedDiffusionTransformer, batch: Sequence[str]) -> list[Reply]:
        facts = [self.facts[fact_id] for fact_id in batch]
        canvas = lay_out(model, [fact.prompt for fact in facts], self.settings.length)
        loop = self.settings.loop.for_facts(batch, model.cfg)
        columns = [
            denoise(model, canvas, replace(loop, steps=steps)).completion for steps in self.settings.columns(model.cfg)
        ]
        return [Reply.to(fact, written) for fact, *written in zip(facts, *columns, strict=True)]


def prompt_length(model: HookedDiffusionTransformer, fact: Fact, length: int) -> int:
    """Number of tokens of a fact's prompt; a `ValueError` if the model cannot be queried for the fact."""
    cell_name(fact.trained, fact.asked)  # Raises a ValueError for unknown directions.
    if not fact.answer.strip():
        raise ValueError(f"the fact {fact.id!r} has no answer, and every text contains an empty one; give it an answer")
    fact.check_words(model)
    n_prompt = model.to_tokens(fact.prompt, truncate=False).shape[1]
    if n_prompt >= length:
        raise ValueError(
            f"length={length} counts the prompt too, and the prompt of the fact {fact.id!r} has {n_prompt} tokens: no "
            f"position is left for the answer; give length={n_prompt + 1} or more"
        )
    return n_prompt
