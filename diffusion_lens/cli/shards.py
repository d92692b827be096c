"""Work split among processes: what --shard and --merge may ask, and how much of the work they leave."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusion_lens.analysis.resumable import content, name_facts, pick_shard
from diffusion_lens.analysis.usable_facts import sort_out
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer


def share_of_work(n_facts: int, shard: str | None, merge: Sequence[Path] | None) -> int:
    """How many facts are asked here, but for the rounding to whole batches: of a shard its part, of a merge none.

    Raises:
        ValueError: no such shard, or a shard of what is only joined.
    """
    if merge and shard is not None:
        raise ValueError("--shard does a part of the work and --merge joins what is done; give one of them")
    return 0 if merge else len(pick_shard(range(n_facts), "0/1" if shard is None else shard))


def asked_facts(
    model: HookedDiffusionTransformer, facts: Sequence[Fact], lay_out: Callable[[Fact], object], folder: Path
) -> dict[str, Any]:
    """What the run of a folder records of its facts and its model, weights apart; nothing where no run was begun.

    An outline of facts, which has no words, says nothing.

    Raises:
        ValueError: two facts with one id, or none that can be asked.
    """
    if not any(fact.prompt for fact in facts):
        return {}
    named = name_facts(facts)
    if not (folder / "run.json").exists() and any(_can_be_asked(fact, lay_out) for fact in named.values()):
        return {}
    usable, set_aside = sort_out(named, lay_out)
    kept = {fact_id: content(named[fact_id]) for fact_id in usable}
    return {"facts": kept, "set_aside": set_aside, "model": model.cfg.model_name}


def _can_be_asked(fact: Fact, lay_out: Callable[[Fact], object]) -> bool:
    try:
        lay_out(fact)
    except ValueError:
        return False
    return True


def require_parts(merge: Sequence[Path] | None, parts: Sequence[str]) -> None:
    """Refuse folders to join that lack a part, before anything is joined.

    Args:
        parts: folders of results in each of them, of the facts or of the models.

    Raises:
        FileNotFoundError: one of them, by its name.
    """
    for folder in merge or ():
        for part in parts:
            if not (folder / part / "run.json").is_file():
                raise FileNotFoundError(
                    f"--merge {folder} holds nothing of {part} to join: name the folders that were --out of its shards"
                )


def require_model(model: ModelChoice, record: Mapping[str, Any]) -> None:
    """Refuse parts that another model made. The name of a repository says nothing of the model in it.

    Raises:
        ValueError: they are of another one.
    """
    here = Path(model.name).expanduser().exists()
    if not here and "/" in model.name:
        return
    name = model.shape().name if here else model.name.lower()
    if name != record["model"]:
        raise ValueError(f"the parts to merge were made by {record['model']!r}, not by {model.name!r}")
