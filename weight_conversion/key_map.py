"""The engine that applies a family's table of rules, forwards and backwards.

A rule names one of their tensors and the tensors of ours it holds; `{i}` stands for the layer. Rules for what an
architecture does not have (biases, norms of heads, a head of its own) rest. A tensor is used, ignored by name, or an
error: nothing is dropped in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from weight_conversion.architecture import Architecture, Shape, every_tensor_name, tensor_shapes
from weight_conversion.layouts import Layout, Same

PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class Rule:
    """`theirs` holds `ours`, arranged as `layout` says."""

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = field(default_factory=Same)

    def at_layer(self, i: int) -> Rule:
        return Rule(self.theirs.format(i=i), tuple(name.format(i=i) for name in self.ours), self.layout)


class KeyMap:
    """A table of rules bound to one architecture."""

    def __init__(self, rules: Sequence[Rule], architecture: Architecture, ignored: Sequence[str] = ()) -> None:
        self.architecture = architecture
        self.ignored = tuple(ignored)
        bound = [
            each
            for rule in rules
            for each in ([rule.at_layer(i) for i in range(architecture.n_layers)] if "{i}" in rule.theirs else [rule])
        ]
        self.our_shapes = tensor_shapes(architecture)
        self.rules = tuple(rule for rule in bound if any(name in self.our_shapes for name in rule.ours))
        # A checkpoint may hold the head that is the embedding once more.
        held_in = {rule.ours: rule.theirs for rule in bound}
        tied = ("unembed.weight",) in held_in and architecture.tied
        self.repeated = {held_in["unembed.weight",]: held_in["embed.weight",]} if tied else {}
        covered = {name for rule in bound for name in rule.ours}
        if misfit := (set(self.our_shapes) - covered) | (covered - every_tensor_name(architecture)):
            raise ValueError(f"the table of {architecture.family!r} does not match our layout at {sorted(misfit)}")

    @property
    def their_shapes(self) -> dict[str, Shape]:
        """Name and shape of every tensor the checkpoint must hold."""
        return {
            rule.theirs: rule.layout.their_shape([self.our_shapes[name] for name in rule.ours], self.architecture)
            for rule in self.rules
        }

    def check(self, found: Mapping[str, Shape], source: str) -> None:
        """Raise a `ValueError` that names every missing, unknown or wrongly shaped tensor of `source`."""
        required = self.their_shapes
        expected = required | {name: required[original] for name, original in self.repeated.items()}
        missing = [name for name in required if name not in found]
        unknown = [
            name
            for name in found
            if name not in expected and not any(fnmatchcase(name, pattern) for pattern in self.ignored)
        ]
        wrong = [
            f"{name} is {list(found[name])}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in found and tuple(found[name]) != shape
        ]
        problems = []
        if missing:
            problems.append(f"missing {_listed(missing)}")
        if unknown:
            near = [f"{name} (nearest: {_nearest(name, expected)})" for name in unknown]
            problems.append(f"unknown {_listed(near)}")
        if wrong:
            problems.append(f"wrong shape: {_listed(wrong)}")
        if problems:
            raise ValueError(
                f"{source} does not hold the tensors of {self.architecture.name!r} "
                f"({self.architecture.family}): {'; '.join(problems)}. "
                "Pass the config that belongs to this checkpoint, or the checkpoint that belongs to this config."
            )

    def to_ours(
        self, read: Callable[[str, int, int], Tensor], most_bytes: int = PIECE_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in our layout, in consecutive pieces of rows, about `most_bytes` of theirs in memory at a time.

        Args:
            read: rows `start` to `stop` of their tensor, by name.
        """
        for rule in self.rules:
            n_rows, *row = rule.layout.their_shape([self.our_shapes[name] for name in rule.ours], self.architecture)
            block = rule.layout.block_rows(self.architecture)
            step = block * max(1, most_bytes // (4 * math.prod(row) * block))
            for start in range(0, n_rows, step):
                theirs = read(rule.theirs, start, min(start + step, n_rows))
                if not theirs.is_floating_point():
                    raise ValueError(
                        f"{rule.theirs} holds {theirs.dtype} numbers; weights must be floating point. A quantised "
                        "checkpoint must be turned back first."
                    )
                yield from zip(rule.ours, rule.layout.split(theirs, self.architecture), strict=True)

    def check_repeated(self, found: Mapping[str, Shape], read: Callable[[str, int, int], Tensor], source: str) -> None:
        """Raise a `ValueError` if a head that is said to be the embedding is another matrix."""
        for name, original in self.repeated.items():
            n_rows, width = found.get(name, (0, 1))
            step = max(1, PIECE_BYTES // (4 * width))
            for start in range(0, n_rows, step):
                stop = min(start + step, n_rows)
                if not torch.equal(read(name, start, stop), read(original, start, stop)):
                    raise ValueError(
                        f"{source} holds {name}, which its config ties to {original}, and the two differ: pass the "
                        "config with the tie taken out to load both"
                    )

    def to_theirs(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under the family's own name and layout."""
        for name, shape in self.our_shapes.items():
            if name not in tensors:
                raise ValueError(f"cannot export: the tensor {name!r} is missing")
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"cannot export: {name!r} is {list(tensors[name].shape)}, expected {list(shape)}")
        head = tensors.get("unembed.weight")
        if self.architecture.tied and head is not None and not torch.equal(head, tensors["embed.weight"]):
            raise ValueError(
                "cannot export: the architecture ties 'unembed.weight' to 'embed.weight', and the two differ: pass the "
                "architecture with tied=False (on a model, set cfg.tied) to keep both"
            )
        for rule in self.rules:
            yield rule.theirs, rule.layout.join([tensors[name] for name in rule.ours], self.architecture)


def all_finite(rows: Tensor) -> bool:
    """Whether no weight is NaN or infinite, in one pass and without a copy."""
    if not rows.is_floating_point() or not rows.numel():
        return True
    if rows.element_size() == 1:  # torch does not add numbers of eight bits
        rows = rows.float()
    # A sum costs a third of the extremes. NaN and infinity reach it; so do, rarely, finite weights that overflow it.
    if math.isfinite(rows.sum()):
        return True
    low, high = rows.aminmax()
    return math.isfinite(low) and math.isfinite(high)


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _nearest(name: str, known: Mapping[str, Shape]) -> str:
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.0)), "none")
