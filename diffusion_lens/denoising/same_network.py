"""Which network wrote the canvases of a trajectory, and whether the model is that network still.

An analysis on a trajectory reads canvases that were written earlier. Since then hooks may have been attached or
removed, weights edited, modules replaced. What the network is now says nothing about the canvases then, and nothing
about whether their run wrote the answer, so a result on a trajectory records both networks (`writer_of`). Where it
compares the recorded run itself with new runs of the model, the two have to be one (`require_same_network`); where it
only reads the canvases, the reader is told that they are another network's (`warn_of_another_network`).
"""

import warnings
from collections.abc import Mapping
from typing import Any

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import differences, network_of, provenance

COMPARED = ("weights_sha256", "hooks", "modules")
_AGAIN = (
    "denoise the prompt again under the same hooks, weights and modules (a hook that only looks counts; one whose own "
    "values change from call to call needs a name to be known again, interventions.named)"
)


def writer_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The network that wrote a trajectory's canvases, by its weights, hooks, modules and tokenizer, from its record.

    A forced replay writes nothing: its canvases are those of the run that it replays. `None` stands for what the record
    of an older file does not hold.
    """
    return network_of(record.get("trajectory", {}) if record.get("replay") == "forced" else record)


def require_same_network(record: Mapping[str, Any], model: DiffusionTransformer, where: str) -> None:
    """Raise a `ValueError` unless the network that wrote a trajectory is the model as it is now.

    Args:
        record: the trajectory's; what it does not hold is not compared.
        where: the analysis, which compares the trajectory with new runs of the model.
    """
    if different := _told_apart(record, model):
        raise ValueError(
            f"{where} compares the trajectory with new runs of {model.cfg.model_name!r}, and the trajectory was "
            f"written by another network than the model is now ({different}): what differs between the two networks "
            f"would be counted as an effect. Give it a trajectory of this network: {_AGAIN}, or pass trajectory=None"
        )


def warn_of_another_network(record: Mapping[str, Any], model: DiffusionTransformer, trajectory: str) -> None:
    """Warn unless the network that wrote a trajectory is the model, which reads its canvases, as it is now.

    Args:
        record: the trajectory's; what it does not hold is not compared.
        trajectory: what the trajectory is called in the analysis.
    """
    if different := _told_apart(record, model):
        warnings.warn(
            f"the {trajectory} was written by another network than {model.cfg.model_name!r} is now ({different}). Its "
            "canvases and what a result says of them (`known`, `revealed_at`) are that network's; all scores are of "
            f"the model as it is now. The result's record holds both networks. To ask one network only, {_AGAIN}",
            UserWarning,
            stacklevel=3,
        )


def _told_apart(record: Mapping[str, Any], model: DiffusionTransformer) -> str:
    """In what a trajectory's writer ("there") and the model ("here") differ, in words; empty where they are one."""
    wrote, present = writer_of(record), provenance(model, model.cfg)
    compared = [name for name in COMPARED if wrote[name] is not None]
    found = differences(wrote, present, compared)
    if found and "versions" in record:  # other versions may tell the same hooks and modules by other digests
        found += differences(record, present, ["versions"])
    return "; ".join(found)
