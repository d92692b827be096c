"""Which network wrote the canvases of a trajectory, and whether the model is that network still.

An analysis on a trajectory reads canvases that were written earlier. Since then hooks may have been attached or
removed, weights edited, modules replaced. What the network is now says nothing about the canvases then, and nothing
about whether their run wrote the answer, so a result on a trajectory records both networks (`canvas_provenance`). Where
an analysis compares the recorded run itself with new runs of the model, the network has to be one
(`require_same_network`); where it only reads the canvases, it warns that another network wrote them
(`warn_of_another_network`).

Networks are compared by `COMPARED`. The tokenizer is recorded beside these and not compared: it turns texts into ids
and takes no part in a run. Only where two trajectories, which may be of different models, are read side by side must it
be the same (`require_same_tokens`).
"""

import re
from collections.abc import Mapping
from typing import Any

from diffusion_lens.denoising.run import require_same_architecture
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import NETWORK, differences, network_of, provenance
from diffusion_lens.user_warnings import warn_user

COMPARED = tuple(name for name in NETWORK if name != "tokenizer_sha256")
_AGAIN = "denoise the prompt again under the same hooks, weights and modules"
_DIGEST = re.compile(r" #[0-9a-f]+")


def canvas_provenance(record: Mapping[str, Any]) -> dict[str, Any]:
    """The network that wrote a trajectory's canvases: its name, dtype, weights, hooks, modules and tokenizer.

    A forced replay writes nothing: its canvases are those of the run that it replays. A free replay from the middle
    keeps what was written before: where another network wrote that, "earlier" holds the provenance of that part, and
    the first step ("before_step") that is not of it. `None` stands for what the record of an older file does not hold.
    """
    replay = record.get("replay")
    if replay is None:
        return network_of(record)
    replayed: dict[str, Any] = {**network_of({}), **record.get("trajectory", {})}
    if replay == "forced":
        return replayed
    begun, network = record.get("replayed_from", record["first_step"]), network_of(record)
    return network if not begun or replayed == network else {**network, "earlier": {**replayed, "before_step": begun}}


def require_same_network(record: Mapping[str, Any], model: DiffusionTransformer, where: str) -> None:
    """Raise a `ValueError` unless the steps of a trajectory were taken by the model as it is now.

    What another network wrote before the first step held is a `UserWarning`: new runs begin with it too, so it counts
    as no effect.

    Args:
        record: the trajectory's; what it does not hold is not compared.
        where: the analysis, which compares the trajectory with new runs of the model.
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
    """Warn unless the networks that wrote trajectories are the models, which read the canvases, as they are now.

    Args:
        trajectories: by what it is called in the analysis, each trajectory's record and the model that reads it; what
            a record does not hold is not compared. Trajectories that differ in the same way share a warning.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for name, (record, model) in trajectories.items():
        said = []
        for part in _parts(canvas_provenance(record)):
            different = _differences(part, record, model)
            before = f"before step {part['before_step']}, " if "before_step" in part else ""
            said += [before + different] if different else []
        if said:
            alike.setdefault((str(model.cfg.model_name), "; ".join(said)), []).append(name)
    for (reader, difference), names in alike.items():
        one = len(names) == 1
        warn_user(
            f"the {' and the '.join(names)} {'was' if one else 'were'} written by another network than {reader!r} is "
            f"now: {difference}. The canvases and what a result says of them (`known`, `revealed_at`) are that "
            f"network's; all scores are of the model as it is now. To ask one network only, {_AGAIN}"
        )


def require_same_tokens(record: Mapping[str, Any], model: DiffusionTransformer) -> None:
    """Raise a `ValueError` unless a model can read a trajectory's canvases; another checkpoint of its kind can."""
    require_same_architecture(record, model)
    recorded, current = record.get("tokenizer_sha256"), provenance(model, model.cfg)["tokenizer_sha256"]
    if recorded is not None and current is not None and recorded != current:
        raise ValueError(
            f"the trajectory was made by {record['model']!r} with another tokenizer than that of "
            f"{model.cfg.model_name!r}, where its token ids mean other words. Load both with one tokenizer "
            "(set_tokenizer), or denoise the prompt with the model that reads it"
        )


def _parts(network: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The networks that wrote a trajectory, the latest first."""
    return [network, *(_parts(network["earlier"]) if "earlier" in network else [])]


def _differences(recorded: Mapping[str, Any], record: Mapping[str, Any], model: DiffusionTransformer) -> str:
    """In what a network that wrote ("there") and the model ("here") differ, in words; empty where they are one."""
    current = provenance(model, model.cfg)
    compared = [name for name in COMPARED if recorded.get(name) is not None]
    found = differences(recorded, current, compared)
    if found and "versions" in record:  # other versions may tell the same hooks and modules by other digests
        found += differences(record, current, ["versions"])
    said = "; ".join(found)
    if point := _told_by_digest(recorded.get("hooks") or {}, current["hooks"]):
        said += (
            f". The hooks at {point!r} differ by their digests only, and so does a hook whose own values change from "
            'call to call. If it is the same hook, name it before the run: interventions.named(hook, "...")'
        )
    return said


def _told_by_digest(recorded: Mapping[str, list[str]], current: Mapping[str, list[str]]) -> str | None:
    """The first hook point at which hooks of the same functions differ by their digests only."""
    for point, hooks in recorded.items():
        others = current.get(point, [])
        if hooks != others and [_DIGEST.sub("", hook) for hook in hooks] == [_DIGEST.sub("", hook) for hook in others]:
            return point
    return None
