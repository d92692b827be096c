"""Checks that the network that wrote a trajectory is the model as it is now.

An analysis of a trajectory reads canvases that were written earlier. Since then, hooks may have been attached or
removed, weights edited, or modules replaced. So a result on a trajectory records two networks: the present one and the
one that wrote the canvases (`canvas_provenance`). An analysis that compares the recorded run with new runs of the model
needs both to be the same; one that only reads the canvases warns if another network wrote them. Networks are compared
by `COMPARED`. The tokenizer is recorded but not compared, because it only converts texts to ids: it has to be the same
only if an analysis reads two trajectories, possibly of different models (`require_same_tokens`). Hooks at
`denoise.hook_tokens` are compared only where a run is made again, because the canvases contain what they wrote. A run
with an approximate cache was written by another network than one that reads its canvases: analyses read exact keys and
values. A replay of it reads those that the run read.
"""

from collections.abc import Mapping
from typing import Any

from diffusion_lens.hooks.names import loop_hook
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import NETWORK, differences, network_of, provenance, shown_model
from diffusion_lens.settings import warn_user

COMPARED = tuple(name for name in NETWORK if name != "tokenizer_sha256")
_AGAIN = "denoise the prompt again under the same hooks, weights and modules"


def require_same_model(record: Mapping[str, Any], model: DiffusionTransformer) -> None:
    """Raise a `ValueError` unless this model wrote the trajectory. Its weights may have been edited since."""
    if record["model"] != model.cfg.model_name:
        raise ValueError(
            f"the trajectory was written by {record['model']!r}, and {model.cfg.model_name!r} cannot replay it because "
            "its tokens and steps may differ. Load that model, or denoise the prompt again"
        )
    require_same_architecture(record, model)


def require_same_architecture(record: Mapping[str, Any], model: DiffusionTransformer) -> None:
    """Raise a `ValueError` unless this model, or another checkpoint of its architecture, wrote the trajectory."""
    if not is_same_architecture(record, model):
        raise ValueError(
            f"the trajectory was written by {shown_model(record)!r}, whose architecture differs from that of "
            f"{model.cfg.name_and_mode!r}, so it cannot read its tokens and steps. Load the model that wrote it, or "
            "denoise the prompt again"
        )


def is_same_architecture(record: Mapping[str, Any], model: DiffusionTransformer) -> bool:
    """Whether a record is of a model of this architecture, whatever its name."""
    recorded, current = record["architecture"], model.cfg.architecture.to_dict()
    return {**recorded, "name": None} == {**current, "name": None}


def canvas_provenance(record: Mapping[str, Any]) -> dict[str, Any]:
    """The network that wrote a trajectory's canvases: its name, dtype, weights, hooks, modules and tokenizer, and its
    approximate cache, if it had one.

    A forced replay writes nothing: its canvases are those of the run that it replays. A free replay from a later step
    keeps the earlier canvases. If another network wrote these, "earlier" is that network's provenance with the first
    step that it did not take ("before_step"). A value that the record of an older file lacks is `None`.
    """
    replay = record.get("replay")
    if replay is None:
        return _network_and_cache(record)
    replayed: dict[str, Any] = {**network_of({}), **record.get("trajectory", {})}
    if replay == "forced":
        return replayed
    begun, network = record.get("replayed_from", record["first_step"]), _network_and_cache(record)
    return network if not begun or replayed == network else {**network, "earlier": {**replayed, "before_step": begun}}


def require_same_network(record: Mapping[str, Any], model: DiffusionTransformer, where: str) -> None:
    """Raise a `ValueError` unless the model in its present state took the steps of a trajectory.

    If another network wrote only the canvases before the trajectory's first step, it is a `UserWarning`, because new
    runs begin with those canvases too.

    Args:
        record: Record of the trajectory; values that it lacks are not compared.
        where: Name of the analysis, which compares the trajectory with new runs of the model.
    """
    latest, *_ = _parts(canvas_provenance(record))
    if different := _differences(latest, record, model):
        raise ValueError(
            f"{where} compares the trajectory with new runs of {model.cfg.model_name!r}, and the trajectory was "
            f"written by another network than the model is now: {different}. The difference would be counted as an "
            f"effect. Give a trajectory of this network: {_AGAIN}, or pass trajectory=None"
        )
    warn_of_another_network({"trajectory": (record, model)})


def warn_of_another_network(trajectories: Mapping[str, tuple[Mapping[str, Any], DiffusionTransformer]]) -> None:
    """Warn if the network that wrote a trajectory differs from the model that reads its canvases now.

    Args:
        trajectories: Record of each trajectory and the model that reads it, by the trajectory's name in the analysis.
            Values that a record lacks are not compared. Trajectories that differ in the same way share a warning.
    """
    # 1. Describe the differences of each trajectory, and group the trajectories whose descriptions are equal.
    names_of: dict[tuple[str, str], list[str]] = {}
    for name, (record, model) in trajectories.items():
        described = []
        for part in _parts(canvas_provenance(record)):
            different = _differences(part, record, model, is_read=True)
            before = f"before step {part['before_step']}, " if "before_step" in part else ""
            described += [before + different] if different else []
        if described:
            names_of.setdefault((str(model.cfg.model_name), "; ".join(described)), []).append(name)

    # 2. Warn once for each group.
    for (reader, difference), names in names_of.items():
        one = len(names) == 1
        warn_user(
            f"the {' and the '.join(names)} {'was' if one else 'were'} written by another network than {reader!r} is "
            f"now: {difference}. `known`, `revealed_at` and the canvases come from the earlier network; all scores "
            f"come from the current model. To use one network only, {_AGAIN}"
        )


def require_same_tokens(record: Mapping[str, Any], model: DiffusionTransformer) -> None:
    """Raise a `ValueError` unless a model can read a trajectory's canvases; another checkpoint of its kind can."""
    require_same_architecture(record, model)
    recorded, current = record.get("tokenizer_sha256"), provenance(model, model.cfg)["tokenizer_sha256"]
    if recorded is not None and current is not None and recorded != current:
        raise ValueError(
            f"the trajectory was written by {record['model']!r} with another tokenizer than that of "
            f"{model.cfg.model_name!r}, so its token ids are those of other words. Load both with one tokenizer "
            "(set_tokenizer), or denoise the prompt with the model that reads it"
        )


def without_canvas_hooks(network: Mapping[str, Any]) -> dict[str, Any]:
    """A network, or a record of one, without the hooks at `denoise.hook_tokens`."""
    hooks = network.get("hooks")
    kept = hooks and {point: names for point, names in hooks.items() if point != loop_hook("hook_tokens")}
    return {**network, "hooks": kept}


def _network_and_cache(record: Mapping[str, Any]) -> dict[str, Any]:
    """The network of a run, with the approximate cache from which it read keys and values, if it had one."""
    kind = record.get("sampler", {}).get("approximate_cache")
    return {**network_of(record), **({} if kind is None else {"approximate_cache": kind})}


def _parts(network: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The networks that wrote a trajectory, the latest first."""
    return [network, *(_parts(network["earlier"]) if "earlier" in network else [])]


def _differences(
    recorded: Mapping[str, Any], record: Mapping[str, Any], model: DiffusionTransformer, is_read: bool = False
) -> str:
    """Differences between the network that wrote ("there") and the model ("here") in words; empty if there are none.

    Args:
        is_read: Whether the canvases are only read.
    """
    current = provenance(model, model.cfg)
    if is_read:
        recorded, current = without_canvas_hooks(recorded), without_canvas_hooks(current)
    compared = [name for name in COMPARED if recorded.get(name) is not None]
    differing = differences(recorded, current, compared)
    if differing and "versions" in record:
        differing += differences(record, current, ["versions"])
    if kind := recorded.get("approximate_cache"):
        differing.append(
            f"its approximate cache {kind!r} held keys and values of earlier canvases, and here all are exact"
        )
    return "; ".join(differing)
