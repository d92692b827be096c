"""Work split among processes: what --shard and --merge may ask, and how much of the work they leave."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusion_lens.analysis.fact_folder import pick_shard
from diffusion_lens.cli.loaded import ModelChoice


def share_of_work(n_facts: int, shard: str | None, merge: Sequence[Path] | None) -> int:
    """How many facts are asked here, but for the rounding to whole batches: of a shard its part, of a merge none.

    Raises:
        ValueError: no such shard, or a shard of what is only joined.
    """
    if merge and shard is not None:
        raise ValueError("--shard does a part of the work and --merge joins what is done; give one of them")
    return 0 if merge else len(pick_shard(range(n_facts), "0/1" if shard is None else shard))


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
