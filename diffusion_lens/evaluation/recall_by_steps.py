"""Asking facts of a model, at each number of denoising steps; as ML-GSAI/SMDM `evaluate_reverse.py` does it.

There the canvas has 52 places, the prompt (after BOS) and masks; what stands behind the prompt after the last step is
decoded without special tokens, also what may follow an end token. A causal model is asked as SMDM's `ar_sample_kvcache`
asks it: from left to right, and its text ends with the first end token.

The authors ask one prompt at a time. Rows of a batch are independent here, so prompts share batches; in half precision
rounding may depend on the company, which is why the size of the batches is a setting of the run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusion_lens.analysis.resumable import (
    FactFolder,
    Shard,
    content,
    fact_seed,
    name_facts,
    pick_shard,
    work_through_batches,
)
from diffusion_lens.analysis.usable_facts import sort_out
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import prepare
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.samplers import Confidence, LeftToRight, describe_sampler, resolve_sampler
from diffusion_lens.evaluation.batches import by_length
from diffusion_lens.evaluation.naming import cell_name
from diffusion_lens.evaluation.recall import Recall, Reply
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.identity import begins_run
from diffusion_lens.records import provenance
from diffusion_lens.settings import not_negative, whole_numbers

STEPS = (1, 2, 4, 8, 16, 32)
LENGTH = 52


@begins_run
def recall_by_steps(
    model: HookedDiffusionTransformer,
    data: Sequence[Fact],
    steps: Sequence[int] = STEPS,
    *,
    length: int | None = None,
    cfg_scale: float = 0.8,
    sampler: str | Sampler | None = None,
    temperature: float = 0.0,
    seed: int = 1234,
    batch_size: int = 32,
    folder: str | Path | None = None,
    shard: Shard | None = None,
    progress: bool = False,
) -> Recall:
    """Ask every fact at every number of steps; the defaults are those of SMDM's evaluation.

    A sampler that writes from left to right takes as many steps as there are tokens to write: the facts are asked once,
    in a column of its own, whatever `steps` says. A causal model knows no guidance: it is asked with `cfg_scale=0`.

    Args:
        data: facts; their trained and asked directions make the cells of the table.
        steps: numbers of denoising steps, each once.
        length: places in all, the prompt included; by default those that the model was trained on, or SMDM's 52.
        cfg_scale, sampler, temperature: as in `model.denoise`.
        seed: each fact draws from a seed made of this one and its id, the same for all steps.
        batch_size: most prompts in one batch; on a causal model only those of equal length share one. A sampler that
            ranks a batch as one pool is given one prompt at a time.
        folder: for a file a fact, `Reply.load` reads it. A run that finds its facts there goes on after them. By
            default nothing is written.
        shard: (i, n) or "i/n": ask only the batches i, i + n, i + 2n, ... of the run; `Recall.merge` joins the shards.
        progress: show a bar.

    Raises:
        ValueError: a setting out of range, two facts with one id, a folder that holds another run, or no fact that can
            be asked. A single one that cannot (no answer, a prompt that leaves no place for it, words that the
            tokenizer does not know) is set aside, with the reason in `Recall.set_aside`.
    """
    cfg_scale = not_negative("cfg_scale", cfg_scale)
    masked = model.cfg.has_mask
    chosen = resolve_sampler(sampler, model.cfg)
    columns: list[int | None] = [None] if isinstance(chosen, LeftToRight) else [*step_columns(steps)]
    if isinstance(chosen, Confidence) and chosen.scope != "row":
        batch_size = 1
    if length is None:
        length = model.cfg.trained_length or LENGTH
    settings: dict[str, Any] = {
        "length": length,
        "cfg_scale": cfg_scale if masked else 0.0,
        "temperature": float(temperature),
    }
    named = name_facts(data)
    prompts, set_aside = sort_out(named, lambda fact: prompt_length(model, fact, length))
    # Sorted by id first, so that the batches do not depend on the order in which the facts came.
    batches = by_length(sorted(prompts), prompts.__getitem__, batch_size, mixed=masked)
    mine = pick_shard(batches, (0, 1) if shard is None else shard)
    # Refuses what this model cannot be asked, before a folder is made.
    canvas = lay_out(model, named[next(iter(prompts))].prompt, length)
    prepare(model, canvas, DenoiseSettings(columns[0], chosen, settings["cfg_scale"], temperature))
    run = {
        "steps": columns,
        **settings,
        "sampler": describe_sampler(chosen),
        "seed": seed,
        "batch_size": batch_size,
        "too_long": sorted(fact_id for fact_id in prompts if _whole_length(model, named[fact_id]) > length),
        "set_aside": set_aside,
        "facts": {fact_id: content(named[fact_id]) for fact_id in prompts},
        **provenance(model, model.cfg),
    }
    started = FactFolder.start(folder, run) if folder is not None else None

    def ask(batch: Sequence[str]) -> list[Reply]:
        written: dict[str, list[str]] = {fact_id: [] for fact_id in batch}
        for column in columns:
            trajectory = model.denoise(
                [named[fact_id].prompt for fact_id in batch],
                steps=column,
                sampler=chosen,
                seed=[fact_seed(seed, fact_id) for fact_id in batch],
                **settings,
            )
            for fact_id, row in zip(batch, trajectory.tokens.tolist(), strict=True):
                written[fact_id].append(_decode(model, row[prompts[fact_id] :]))
        return [Reply.to(named[fact_id], texts) for fact_id, texts in written.items()]

    replies = dict(work_through_batches(mine, ask, Reply.load, started, progress))
    return Recall.of({fact_id: replies[fact_id] for fact_id in prompts if fact_id in replies}, run)


def step_columns(steps: Sequence[int]) -> list[int]:
    """The columns of a table, in the order given."""
    given = whole_numbers("steps", steps)
    if not given or min(given) < 1 or len(set(given)) < len(given):
        raise ValueError(f"steps={list(steps)}; give one or more numbers of steps, from 1 on, each once")
    return list(given)


def prompt_length(model: HookedDiffusionTransformer, fact: Fact, length: int) -> int:
    """Tokens of a prompt that can be asked."""
    cell_name(fact.trained, fact.asked)  # refuses directions that no table could name
    if not fact.answer.strip():
        raise ValueError(f"the fact {fact.id!r} has no answer: any text would contain it")
    fact.check_words(model)
    n_prompt = model.to_tokens(fact.prompt, truncate=False).shape[1]
    if n_prompt >= length:
        raise ValueError(
            f"length={length} counts the prompt too, and that of the fact {fact.id!r} has {n_prompt} tokens: no place "
            "is left for the answer"
        )
    return n_prompt


def _whole_length(model: HookedDiffusionTransformer, fact: Fact) -> int:
    return len(model.encode(fact.prompt + fact.answer))


def _decode(model: HookedDiffusionTransformer, tokens: list[int]) -> str:
    """The text of what was written, special tokens left out; on a causal model it ends with the first end token."""
    end = model.tokenizer.eos_token_id
    if not model.cfg.has_mask and end in tokens:
        tokens = tokens[: tokens.index(end)]
    text: str = model.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
