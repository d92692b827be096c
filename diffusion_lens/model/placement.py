"""Where the weights of a model are: on one device or several GPUs, in the CPU's memory, or in a file (`device_map=`).

Parameters are ordinary tensors at the place that the map gives them, never on "meta", as after
`accelerate.dispatch_model`: views of weights, edits in place, hashes and exports read and write them there. The
modules bring weights and activations together (`model/linear.py`).

Blocks on a GPU run on it. All others run on the main device, the first GPU of the map or else the CPU, as with
accelerate. Tokens, logits and residual streams are passed and returned on the main device, `model.cfg.device`; an
activation at a hook point is on the device of its block.

A weight "on disk" is a mapped file without a name in the folder for temporary files, which the system reads when it is
used and may drop from memory afterwards. The space is freed with the tensor.
"""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_lens.config import as_device

DISK = "disk"
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
DeviceMap = str | int | torch.device | Mapping[str, str | int | torch.device]


@dataclass(frozen=True)
class Placement:
    """The place of every part of a model.

    Attributes:
        homes: Device of each part by the beginning of its parameters' names, or "disk"; "" for all other parts.
        main: Device of tokens and logits, and of all parts that are not on a GPU.
    """

    homes: Mapping[str, torch.device | str]
    main: torch.device

    @classmethod
    def on(cls, device: str | torch.device) -> "Placement":
        """All parts on one device."""
        return cls({"": torch.device(device)}, torch.device(device))

    @classmethod
    def of(cls, device_map: DeviceMap, model: nn.Module, dtype: torch.dtype) -> "Placement":
        """The placement for a `device_map` of `from_pretrained`.

        Args:
            model: The modules of the model; their parameters may be on "meta".
            dtype: Precision of the weights, by which "auto" and the like count their bytes.

        Raises:
            ValueError: A strategy, device or part is unknown, or a parameter gets no place.
        """
        if isinstance(device_map, str) and device_map in STRATEGIES:
            device_map = _inferred(device_map, model, dtype)
        elif not isinstance(device_map, Mapping):
            device_map = {"": device_map}
        homes = {part: _home(place) for part, place in device_map.items()}
        _check_parts(homes, model)
        gpus = [home for home in homes.values() if isinstance(home, torch.device) and home.type != "cpu"]
        return cls(homes, gpus[0] if gpus else torch.device("cpu"))

    @property
    def is_one_device(self) -> bool:
        """Whether all weights are on the main device."""
        return set(self.homes.values()) == {self.main}

    def home(self, name: str) -> torch.device | str:
        """The device of a part or parameter, or "disk"."""
        return self.homes[max((part for part in self.homes if _is_within(name, part)), key=len)]

    def runs_on(self, name: str) -> torch.device:
        """The device on which a parameter is used."""
        home = self.home(name)
        return home if isinstance(home, torch.device) and home.type != "cpu" else self.main

    def empty(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for a parameter at its place."""
        home = self.home(name)
        if isinstance(home, torch.device):
            return torch.empty(shape, device=home, dtype=dtype)
        # The file loses its name at once, so that nothing is left of it, however the process ends.
        with tempfile.TemporaryDirectory(prefix="diffusion-lens-", ignore_cleanup_errors=True) as folder:
            path = str(Path(folder) / "weight")
            return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def _is_within(name: str, part: str) -> bool:
    return part == "" or name == part or name.startswith(f"{part}.")


def _home(place: Any) -> torch.device | str:
    if place == DISK:
        return DISK
    if isinstance(place, int) and not isinstance(place, bool):
        place = f"{'cuda' if torch.cuda.is_available() or not torch.backends.mps.is_available() else 'mps'}:{place}"
    if not isinstance(place, str | torch.device):
        raise ValueError(
            f"device_map puts a part on {place!r}; a place is the number of a GPU, a device such as 'cpu' or 'cuda:1', "
            f"or {DISK!r}"
        )
    try:
        device = as_device(place)
    except ValueError as error:
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(f"device_map: {error}; or {DISK!r} in a map, or as the whole map {known}") from None
    return torch.device(device.type, 0) if device.type == "cuda" and device.index is None else device


def _check_parts(homes: Mapping[str, Any], model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    if homeless := [name for name in names if not any(_is_within(name, part) for part in homes)]:
        raise ValueError(
            f"device_map has no place for {', '.join(homeless[:3])}{' and others' if len(homeless) > 3 else ''}: name "
            'the parts that lack one, or give all others a place with the key ""'
        )
    parts = {name for name, _ in model.named_modules()} | set(names)
    if unknown := [part for part in homes if part not in parts]:
        near = get_close_matches(unknown[0], parts, n=3, cutoff=0.0)
        raise ValueError(f"device_map places {unknown[0]!r}, and the model has no such part; nearest are {near}")


def _inferred(strategy: str, model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    # Importing it takes a second.
    from accelerate import infer_auto_device_map  # type: ignore[import-untyped]
    from accelerate.utils import get_balanced_memory, get_max_memory  # type: ignore[import-untyped]

    settings: dict[str, Any] = {"no_split_module_classes": ["Block"], "dtype": dtype}
    most = get_max_memory()
    if strategy != "sequential" and len(most) > 1:
        most = get_balanced_memory(model, most, low_zero=strategy == "balanced_low_0", **settings)
    inferred: dict[str, Any] = infer_auto_device_map(model, max_memory=most, **settings)
    return inferred
