"""Mutations of saved results, as a careless program or a damaged disk makes them, and what a reader then meets."""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from weight_conversion.files import write_safetensors

HEADER = "diffusion_lens"
OTHERS: tuple[Any, ...] = (None, "x", 3, -1, 10**9, 1e300, True, [], {}, [[1], "y"], {"x": 1}, [3, 4])


class Mutator:
    """Writes one mutation after the other of a saved file, drawn from a seed."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.draw = path, random.Random(seed)
        with safe_open(path, framework="pt") as file:
            self.record = json.loads(file.metadata()[HEADER])
            self.tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        self.bytes = path.read_bytes()

    def write(self, target: Path) -> str:
        """Writes a mutation without a checksum, as files of earlier versions are; returns what was done."""
        record, tensors = deepcopy(self.record), dict(self.tensors)
        of_tensors = tensors and (self.draw.random() < 0.4 or record.keys() == {"kind"})
        done = self._tensors(tensors) if of_tensors else self._record(record)
        write_safetensors(tensors, target, {HEADER: json.dumps(record)})
        return done

    def flip(self, target: Path) -> str:
        """Writes the file with one byte changed."""
        at, content = self.draw.randrange(len(self.bytes)), bytearray(self.bytes)
        content[at] ^= 1 << self.draw.randrange(8)
        target.write_bytes(content)
        return f"byte {at} of {len(content)} flipped"

    def _record(self, record: Any) -> str:
        """Drops, renames, retypes or enlarges an entry, wherever in the record."""
        places = [place for place in _places(record) if place[1] != "kind"]
        container, key, where = self.draw.choice(places)
        value, action = container[key], self.draw.choice(("drop", "rename", "retype", "retype", "enlarge"))
        if action == "drop":
            del container[key]
        elif action == "rename" and isinstance(container, dict):
            container[f"{key}_"] = container.pop(key)
        elif action == "enlarge" and isinstance(value, list | str | int):
            container[key] = value * 2 if isinstance(value, list | str) else 10**9
        else:
            action, container[key] = "retype", self.draw.choice(OTHERS)
        return f"{action} {where}"

    def _tensors(self, tensors: dict[str, Tensor]) -> str:
        """Drops, renames, cuts, turns, casts, empties or swaps a tensor."""
        name, other = self.draw.choice(list(tensors)), self.draw.choice(list(tensors))
        changes: dict[str, Callable[[Tensor], Tensor]] = {
            "cut": lambda x: x[:-1] if x.dim() else x[None],
            "cut at the end": lambda x: x[..., :-1] if x.dim() else x[None],
            "turn": lambda x: x.movedim(0, -1) if x.dim() > 1 else x[None],
            "cast to int": lambda x: x.bool() if x.dtype == torch.int64 else x.nan_to_num().long(),
            "cast to bool": lambda x: x.float() if x.dtype == torch.bool else x.bool(),
            "flatten": lambda x: x.flatten() if x.dim() != 1 else x[0] if len(x) else x[None],
            "empty": lambda x: x.new_empty((0, *x.shape[1:])),
            "huge empty": lambda x: x.new_empty((10**9, 0)),
        }
        action = self.draw.choice(("drop", "rename", "swap", *changes))
        if action == "swap":
            tensors[name], tensors[other] = tensors[other], tensors[name]
        elif action in changes:
            tensors[name] = changes[action](tensors[name]).contiguous()
        else:
            value = tensors.pop(name)
            tensors |= {f"{name}_": value} if action == "rename" else {}
        return f"{action} {name}"


def _places(data: Any, where: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Entries of a document, with the mapping or list and the key; of long lists and mappings the first ones."""
    items = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    for key, value in items[:40]:
        yield data, key, f"{where}/{key}"
        yield from list(_places(value, f"{where}/{key}"))[:12]
