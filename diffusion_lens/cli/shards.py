"""Studies split among processes: checks of --shard and --merge, and the identity of a study for a dry run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusion_lens.analysis.resumable import pick_shard
from diffusion_lens.analysis.usable_facts import UsableFacts
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.config import name_with_mode
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.records import shown_model
from weight_conversion import mode_read


def share_of_work(n_facts: int, shard: str | None, merge: Sequence[Path] | None) -> int:
    """Number of facts this call will process, before rounding to whole batches; 0 when merging.

    Raises:
        ValueError: There is no such shard, or shards are to be merged.
    """
    if merge and shard is not None:
        raise ValueError("--shard computes a part of the study and --merge joins parts; give one of them")
    return 0 if merge else len(pick_shard(range(n_facts), "0/1" if shard is None else shard))


def describe_facts(
    model: HookedDiffusionTransformer, facts: Sequence[Fact], prepare: Callable[[Fact], object]
) -> dict[str, Any]:
    """The record of a study's facts and model, without the weights. It is empty for facts without texts.

    Raises:
        ValueError: Two facts have one id, or the model can be queried for none of them.
    """
    if not any(fact.prompt for fact in facts):
        return {}
    return {**UsableFacts.of(facts, prepare).describe(), "model": model.cfg.model_name}


def require_parts(merge: Sequence[Path] | None, parts: Sequence[str]) -> None:
    """Check that the folders to merge are complete, before anything is merged.

    Args:
        parts: Folders of results that each of them must contain, one per study.

    Raises:
        FileNotFoundError: A folder lacks a part; the message names both.
    """
    for folder in merge or ():
        for part in parts:
            if not (folder / part / "run.json").is_file():
                raise FileNotFoundError(
                    f"--merge {folder} contains nothing of {part} to join: give the --out folders of the shards"
                )


def require_model(model: ModelChoice, record: Mapping[str, Any]) -> None:
    """Check that the parts come from this model. The name of a hub repository cannot be checked.

    Raises:
        ValueError: Another model made them.
    """
    here = Path(model.name).expanduser().exists()
    if not here and "/" in model.name:
        return
    shape = model.known_shape()
    name = shape.name if here and shape is not None else model.name.lower()
    mode = None if shape is None else mode_read(shape.family, shape.attention_dir)
    if name != record["model"] or mode not in (None, record.get("mode")):
        raise ValueError(
            f"the parts to merge were made by {shown_model(record)!r}, not by {name_with_mode(model.name, mode)!r}"
        )
