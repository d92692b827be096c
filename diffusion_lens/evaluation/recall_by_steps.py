"""Recall of facts at each number of denoising steps, measured as ML-GSAI/SMDM `evaluate_reverse.py` does.

As in that script, the canvas has 52 positions: the prompt (after BOS) and masks. After the last step the text after the
prompt is decoded without special tokens, including any text after an end token. A causal model writes as the script's
`ar_sample_kvcache` does: from left to right, and its text ends at the first end token.

The authors denoise one prompt at a time. Rows of a batch are independent here, so prompts share batches. In half
precision, rounding can depend on the other rows, so the batch size is a recorded setting of the study.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from diffusion_lens.analysis.loop_settings import LoopSettings
from diffusion_lens.analysis.over_facts import Study
from diffusion_lens.analysis.resumable import Shard
from diffusion_lens.analysis.usable_facts import UsableFacts
from diffusion_lens.analysis.workers.executor import Executes
from diffusion_lens.analysis.workers.job import Compute
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.data.sources import STUDY_LENGTH, STUDY_STEPS
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.prepare import denoise, prepare
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.evaluation.batches import by_length
from diffusion_lens.evaluation.naming import cell_name
from diffusion_lens.evaluation.recall import Recall, Reply
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.identity import begins_run
from diffusion_lens.records import provenance
from diffusion_lens.settings import at_least, naming_the_nearest, whole_numbers
from weight_conversion import Architecture, Variant


@dataclass(frozen=True)
class RecallSettings:
    """How a model writes the answers that are scored.

    Attributes:
        steps: Numbers of denoising steps, each once.
        length: Length of the canvas, the prompt included; `None` is the length that the model was trained on, or SMDM's
            52.
        loop: Settings of the loop other than the number of steps.

    Raises:
        ValueError: A setting is out of range, a number of steps is given twice, or the loop has one of its own.
    """

    steps: Sequence[int]
    length: int | None
    loop: LoopSettings

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", step_columns(self.steps))
        if self.length is not None:
            object.__setattr__(self, "length", at_least(1, "length", self.length))
        if self.loop.steps is not None:
            raise ValueError(
                f"loop has steps={self.loop.steps}, but steps= gives the numbers of steps; leave out the loop's"
            )

    def columns(self, variant: Variant) -> list[int | None]:
        """Columns of the table for a model of this variant.

        `None` stands for left-to-right decoding, which takes one step per token.
        """
        return [None] if self.loop.writes_in_order(variant) else [*self.steps]

    def describe(self, shape: Architecture | DiffusionConfig | None) -> dict[str, Any]:
        """Settings for the record.

        Args:
            shape: The model's architecture. Pass `None` before the model is loaded to omit the settings that depend on
                it, such as the sampler and the guidance.
        """
        if shape is None:
            return {"length": self.length, "temperature": self.loop.temperature, "seed": self.loop.seed}
        return {
            **self.loop.describe(shape),
            "steps": self.columns(shape),
            "length": self.length,
            "batch_size": self.loop.facts_together(shape),
        }


@naming_the_nearest
def recall_by_steps(
    model: HookedDiffusionTransformer,
    facts: Sequence[Fact],
    steps: Sequence[int] = STUDY_STEPS,
    *,
    length: int | None = None,
    cfg_scale: float = 0.8,
    sampler: str | Sampler | None = None,
    temperature: float = 0.0,
    seed: int = 1234,
    batch_size: int = 32,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> Recall:
    """Let the model answer every fact at every number of steps; the defaults are those of SMDM's evaluation.

    A sampler that writes from left to right takes one step per token, so it ignores `steps` and fills one column of its
    own. A causal model has no guidance: it writes with `cfg_scale=0`. `recall_facts` takes the settings as one object,
    `RecallSettings`.

    Args:
        facts: Facts; their trained and queried directions make the cells of the table.
        steps: Numbers of denoising steps, each once.
        length: Length of the canvas, the prompt included; by default the length that the model was trained on, or
            SMDM's 52.
        cfg_scale, sampler, temperature: The same as in `model.denoise`.
        seed: Seed of the study; each fact has its own seed, made of this one and its id, the same for all steps.
        batch_size: Largest number of prompts in one batch; on a causal model only prompts of equal length share one. A
            sampler by which the runs of a batch depend on one another gets one prompt at a time, as in `LoopSettings`.
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
    loop = LoopSettings(sampler=sampler, cfg_scale=cfg_scale, temperature=temperature, seed=seed, batch_size=batch_size)
    return recall_facts(model, facts, RecallSettings(steps, length, loop), out, shard, progress, executor)


@begins_run
def recall_facts(
    model: HookedDiffusionTransformer,
    facts: Sequence[Fact],
    settings: RecallSettings,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> Recall:
    """Let the model answer every fact, like `recall_by_steps`, with settings given as one object.

    Args:
        facts: Facts; their trained and queried directions make the cells of the table.
        settings: How the answers are written.
        out: Folder for one file per fact. A call that finds facts there computes only the others. By default nothing is
            written.
        shard: (i, n) or "i/n": compute the batches i, i + n, i + 2n, ... only.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the batches; by default this process does.

    Raises:
        ValueError: The same as in `recall_by_steps`.
    """
    length = model.cfg.trained_length or STUDY_LENGTH if settings.length is None else settings.length
    settings, columns = replace(settings, length=length), settings.columns(model.cfg)
    usable = UsableFacts.of(facts, lambda fact: prompt_length(model, fact, length))
    prompt_lengths = usable.prepared
    # Check the settings against this model before a folder is made.
    first_canvas = lay_out(model, usable.facts[next(iter(prompt_lengths))].prompt, length)
    prepare(model, first_canvas, replace(settings.loop.denoise.fitted_to(model.cfg), steps=columns[0]))
    record = {
        **settings.describe(model.cfg),
        "too_long": sorted(fact_id for fact_id, fact in usable.facts.items() if _whole_length(model, fact) > length),
        **usable.describe(),
        **provenance(model, model.cfg),
    }

    # Sorted by id first, so that the batches do not depend on the order of the facts.
    ids, size = sorted(prompt_lengths), settings.loop.facts_together(model.cfg)
    batches = by_length(ids, prompt_lengths.__getitem__, size, mixed=not model.cfg.grows)
    study = Study(model, record, batches, ReplyJob(usable.facts, settings))
    return study.collect(Recall, out, shard, progress, executor)


@dataclass(frozen=True)
class ReplyJob:
    """The texts that a model writes for facts.

    Attributes:
        facts: Facts by id.
        settings: How the answers are written, with the length of the canvas.
    """

    facts: Mapping[str, Fact]
    settings: RecallSettings

    def part(self, ids: Sequence[str]) -> "ReplyJob":
        """The job with these facts."""
        return replace(self, facts={fact_id: self.facts[fact_id] for fact_id in ids})

    def on(self, model: HookedDiffusionTransformer) -> Compute:
        """The function that lets the model write the answers of a batch."""
        return partial(self._replies, model)

    def _replies(self, model: HookedDiffusionTransformer, batch: Sequence[str]) -> list[Reply]:
        texts: dict[str, list[str]] = {fact_id: [] for fact_id in batch}
        canvas = lay_out(model, [self.facts[fact_id].prompt for fact_id in batch], self.settings.length)
        for column in self.settings.columns(model.cfg):
            loop = replace(self.settings.loop.for_facts(batch, model.cfg), steps=column)
            trajectory = denoise(model, canvas, loop)
            for fact_id, written in zip(batch, trajectory.completion, strict=True):
                texts[fact_id].append(written)
        return [Reply.to(self.facts[fact_id], written) for fact_id, written in texts.items()]


def step_columns(steps: Sequence[int]) -> tuple[int, ...]:
    """The checked numbers of steps of a table, in the given order."""
    columns = whole_numbers("steps", steps)
    if not columns or min(columns) < 1 or len(set(columns)) < len(columns):
        raise ValueError(f"steps={list(steps)}; give one or more numbers of steps, each at least 1 and each once")
    return tuple(columns)


def prompt_length(model: HookedDiffusionTransformer, fact: Fact, length: int) -> int:
    """Number of tokens of a fact's prompt.

    Raises:
        ValueError: The model cannot be queried for the fact.
    """
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


def _whole_length(model: HookedDiffusionTransformer, fact: Fact) -> int:
    return len(model.encode(fact.prompt + fact.answer))
