"""The engine that applies a family's table of rules: to_ours in loading, to_theirs in export.

A rule names one tensor of the checkpoint and the tensors in our layout that it contains; `{i}` stands for the layer and
`{e}` for the expert.
Rules for tensors that an architecture does not have (biases, norms of heads, an untied head) are skipped. Every tensor
is used, ignored by name, or an error; none is dropped silently.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import product

import torch
from torch import Tensor

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.layouts import Layout, Same
from weight_conversion.tensor_shapes import every_tensor_name, tensor_shapes

PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class Rule:
    """Their tensor `theirs` contains our tensors `ours`, arranged by `layout`."""

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = field(default_factory=Same)

    def written_out(self, n_layers: int, n_experts: int) -> Iterator[Rule]:
        """The rule for each layer and each expert; it has as many of a kind as its names have placeholders."""
        layers = range(n_layers) if "{i}" in self.theirs else range(1)
        experts = range(n_experts) if "{e}" in self.theirs else range(1)
        for i, e in product(layers, experts):
            yield Rule(self.theirs.format(i=i, e=e), tuple(name.format(i=i, e=e) for name in self.ours), self.layout)


class KeyMap:
    """A family's table of rules, written out for one architecture.

    Attributes:
        rules: Rules with layer and expert filled in, of the tensors that the architecture has.
        our_shapes: Shape of every tensor, by its name in our layout.
        their_shapes: Shape of every tensor that the checkpoint must contain, by its name there.
        repeated: Names of tensors that the checkpoint may contain a second time, with the name of the original.
    """

    def __init__(self, rules: Sequence[Rule], architecture: Architecture, ignored: Sequence[str] = ()) -> None:
        self.architecture = architecture
        self.ignored = tuple(ignored)
        n_experts = 0 if architecture.experts is None else architecture.experts.n_experts
        all_rules = [each for rule in rules for each in rule.written_out(architecture.n_layers, n_experts)]
        self.our_shapes = tensor_shapes(architecture)
        covered = {name for rule in all_rules for name in rule.ours}
        if misfit := (set(self.our_shapes) - covered) | (covered - every_tensor_name(architecture)):
            raise ValueError(f"the table of {architecture.family!r} does not match our layout at {sorted(misfit)}")
        self.rules = tuple(rule for rule in all_rules if any(name in self.our_shapes for name in rule.ours))
        self.their_shapes = {
            rule.theirs: rule.layout.their_shape([self.our_shapes[name] for name in rule.ours], architecture)
            for rule in self.rules
        }
        # A checkpoint with tied weights may store the head as a copy of the embedding.
        their_name = {rule.ours: rule.theirs for rule in all_rules}
        has_copy = ("unembed.weight",) in their_name and architecture.tied
        self.repeated = {their_name["unembed.weight",]: their_name["embed.weight",]} if has_copy else {}

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
                f"{source} does not contain the tensors of {self.architecture.name!r} "
                f"({self.architecture.family}): {'; '.join(problems)}. "
                "Pass the config that belongs to this checkpoint, or the checkpoint that belongs to this config."
            )

    def to_ours(
        self,
        read: Callable[[str, int, int], Tensor],
        most_bytes: int = PIECE_BYTES,
        source: str = "the checkpoint",
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in our layout, as consecutive pieces of rows.

        Args:
            read: Function that returns rows `start` to `stop` of one of their tensors, by name.
            most_bytes: Approximate size of the rows of theirs that are in memory at a time, in bytes.
            source: Name of the checkpoint in messages.

        Warns:
            UserWarning: Weights are NaN or infinite.
        """
        not_finite: list[str] = []
        for rule in self.rules:
            n_rows, *row = self.their_shapes[rule.theirs]
            block = rule.layout.block_rows(self.architecture)
            step = block * max(1, most_bytes // (4 * math.prod(row) * block))
            for start in range(0, n_rows, step):
                theirs = read(rule.theirs, start, min(start + step, n_rows))
                if not theirs.is_floating_point():
                    raise ValueError(
                        f"{rule.theirs} contains {theirs.dtype} numbers; weights must be floating point. Convert a "
                        "quantised checkpoint back to floating point first."
                    )
                if rule.theirs not in not_finite and not _all_finite(theirs):
                    not_finite.append(rule.theirs)
                yield from zip(rule.ours, rule.layout.split(theirs, self.architecture), strict=True)
        if not_finite:
            warnings.warn(
                f"{source} contains weights that are NaN or infinite, in {_listed(not_finite)}: outputs of the model "
                "will be NaN or infinite too. The training may have diverged, or the file is damaged: fetch it again, "
                "or take an earlier checkpoint",
                stacklevel=2,
            )

    def check_repeated(self, found: Mapping[str, Shape], read: Callable[[str, int, int], Tensor], source: str) -> None:
        """Raise a `ValueError` if the head of a checkpoint with tied weights differs from its embedding."""
        for name, original in self.repeated.items():
            n_rows, width = found.get(name, (0, 1))
            step = max(1, PIECE_BYTES // (4 * width))
            for start in range(0, n_rows, step):
                stop = min(start + step, n_rows)
                if not torch.equal(read(name, start, stop), read(original, start, stop)):
                    raise ValueError(
                        f"{source} contains {name}, which its config ties to {original}, and the two differ: pass the "
                        "config without the tie to load both"
                    )

    def to_theirs(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under the family's name and in its layout."""
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


def _all_finite(rows: Tensor) -> bool:
    """Whether no weight is NaN or infinite, in one pass and without a copy."""
    if not rows.numel():
        return True
    if rows.element_size() == 1:  # torch cannot add 8-bit numbers
        rows = rows.float()
    # The sum takes a third of the time of the extremes. It is finite unless a weight is not, or the sum overflows.
    if math.isfinite(rows.sum()):
        return True
    low, high = rows.aminmax()
    return math.isfinite(low) and math.isfinite(high)


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _nearest(name: str, known: Mapping[str, Shape]) -> str:
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.0)), "none")
