"""Our tensor layout, and the engine that applies a family's table of rules: to_ours in loading, to_theirs in export.

`tensor_shapes` lists our tensors, which are those of the model's `state_dict`. A `Rule` names one tensor of the
checkpoint and the tensors in our layout that it contains; `{i}` stands for the layer and `{e}` for the expert. A
`Layout` splits their tensor into ours and joins ours into theirs. Rows that can be split independently of the others
form a block, so that a large tensor is never in memory as a whole.

Rules for tensors that an architecture does not have (biases, norms of heads, an untied head) are skipped. Every tensor
is used, ignored by name, or an error; none is dropped silently.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import product

import torch
from einops import rearrange
from torch import Tensor

from weight_conversion.architecture import Architecture, Shape

PIECE_BYTES = 1 << 22
N_FREQUENCIES = 256  # of the embedding of the noise level, in all published models


def tensor_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name and shape of every tensor, in our layout (`[out, in]` for matrices, as in `torch.nn.Linear`)."""
    a = architecture
    shapes: dict[str, Shape] = {"embed.weight": (a.d_vocab, a.d_model)}
    for i in range(a.n_layers):
        block: dict[str, Shape] = {}
        for part in (_norm("ln1", a), _attention(a, i), _norm("ln2", a), _mlp(a, i), _modulation("modulation", 6, a)):
            block.update(part)
        block.update(_at_end(a))
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    shapes.update(_norm("ln_final", a))
    if not a.tied:
        shapes["unembed.weight"] = (a.d_vocab_out, a.d_model)
    if a.unembed_bias:
        shapes["unembed.bias"] = (a.d_vocab_out,)
    # Last, so that a seed draws the same other weights for every kind of positions.
    if a.positional_embedding_type == "standard":
        shapes["pos_embed.weight"] = (a.n_ctx, a.d_model)
    if a.time is not None:
        shapes.update(_linear("time_embed.hidden", a.time.d_cond, N_FREQUENCIES, bias=True))
        shapes.update(_linear("time_embed.out", a.time.d_cond, a.time.d_cond, bias=True))
        shapes.update(_modulation("final_modulation", 2, a))
    if a.self_conditioning:
        shapes["self_conditioning.norm.weight"] = (a.d_model,)
        shapes.update(_dense("self_conditioning.mlp", a.d_mlp, a))
    return shapes


def n_params(architecture: Architecture, *, active: bool = False) -> int:
    """Number of weights, including the embeddings; with `active`, of each layer's experts only the chosen number."""
    experts = architecture.experts
    unused = range(experts.n_chosen, experts.n_experts) if active and experts is not None else range(0)
    left_out = tuple(f".mlp.experts.{expert}." for expert in unused)
    return sum(
        math.prod(shape)
        for name, shape in tensor_shapes(architecture).items()
        if not any(part in name for part in left_out)
    )


class Layout(ABC):
    """An invertible operation between one of their tensors and one or more of ours."""

    def their_shape(self, our_shapes: Sequence[Shape], architecture: Architecture) -> Shape:
        """The shape their tensor must have: by default, the rows of all of ours."""
        return (sum(shape[0] for shape in our_shapes), *our_shapes[0][1:])

    @abstractmethod
    def block_rows(self, architecture: Architecture) -> int:
        """Rows of theirs in one block."""

    @abstractmethod
    def split(self, theirs: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
        """Split their tensor, or whole blocks of its rows, into ours, in the order of the rule."""

    @abstractmethod
    def join(self, ours: Sequence[Tensor], architecture: Architecture) -> Tensor:
        """Join our tensors into theirs: the exact inverse of `split`."""


class Same(Layout):
    """The same tensor under another name."""

    def block_rows(self, architecture: Architecture) -> int:
        return 1

    def split(self, theirs: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
        return (theirs,)

    def join(self, ours: Sequence[Tensor], architecture: Architecture) -> Tensor:
        (tensor,) = ours
        return tensor


class GroupMajorQKV(Layout):
    """lit-gpt's fused projection: for each key/value group the rows of its queries, then of its key, then of its value.

    Source: ML-GSAI/SMDM `lit_gpt/diffmodel.py`, the view `(B, T, n_query_groups, q_per_kv + 2, head_size)`.
    """

    def block_rows(self, architecture: Architecture) -> int:
        a = architecture
        return (a.n_heads // a.n_key_value_heads + 2) * a.d_head

    def split(self, theirs: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
        heads = architecture.n_heads // architecture.n_key_value_heads
        grouped = rearrange(theirs, "(group row d) ... -> group row d ...", row=heads + 2, d=architecture.d_head)
        queries, key, value = grouped.split([heads, 1, 1], dim=1)
        return tuple(rearrange(part, "group row d ... -> (group row d) ...") for part in (queries, key, value))

    def join(self, ours: Sequence[Tensor], architecture: Architecture) -> Tensor:
        a = architecture
        grouped = [
            rearrange(part, "(group row d) ... -> group row d ...", group=a.n_key_value_heads, d=a.d_head)
            for part in ours
        ]
        return rearrange(torch.cat(grouped, dim=1), "group row d ... -> (group row d) ...")


class Stacked(Layout):
    """A fused projection whose rows are those of our projections, one after the other: all queries, keys, values."""

    def block_rows(self, architecture: Architecture) -> int:
        return sum(self._rows(architecture))

    def split(self, theirs: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
        queries, keys, values = theirs.split(self._rows(architecture))
        return queries, keys, values

    def join(self, ours: Sequence[Tensor], architecture: Architecture) -> Tensor:
        return torch.cat(list(ours))

    def _rows(self, architecture: Architecture) -> list[int]:
        a = architecture
        keys = a.n_key_value_heads * a.d_head
        return [a.n_heads * a.d_head, keys, keys]


@dataclass(frozen=True)
class ByExpert(Layout):
    """The matrices of all experts of a layer in one tensor [expert row column], as transformers 5 has them.

    Attributes:
        parts: Number of our matrices of an expert that one of theirs has, one below the other.
    """

    parts: int = 1

    def their_shape(self, our_shapes: Sequence[Shape], architecture: Architecture) -> Shape:
        n_experts = self.block_rows(architecture)
        rows, columns = sum(shape[0] for shape in our_shapes) // n_experts, our_shapes[0][1]
        return n_experts, rows, columns

    def block_rows(self, architecture: Architecture) -> int:
        assert architecture.experts is not None
        return architecture.experts.n_experts

    def split(self, theirs: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
        return tuple(matrix for part in theirs.chunk(self.parts, dim=1) for matrix in part)

    def join(self, ours: Sequence[Tensor], architecture: Architecture) -> Tensor:
        n_experts = self.block_rows(architecture)
        names = [torch.stack(list(ours[start : start + n_experts])) for start in range(0, len(ours), n_experts)]
        return torch.cat(names, dim=1)


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
            # Without a placeholder of theirs, their tensor contains those of all experts.
            ours = [
                name.format(i=i, e=expert)
                for name in self.ours
                for expert in (range(n_experts) if "{e}" in name and "{e}" not in self.theirs else (e,))
            ]
            yield Rule(self.theirs.format(i=i, e=e), tuple(ours), self.layout)


OUR_NAMES: tuple[Rule, ...] = ()  # The table of a checkpoint whose tensors have our names already.


class KeyMap:
    """A family's table of rules, written out for one architecture.

    Attributes:
        rules: Rules with layer and expert filled in, of the tensors that the architecture has.
        our_shapes, their_shapes: Shape of every tensor by its name in our layout, and by that in the checkpoint.
        repeated: Names of tensors that the checkpoint may contain a second time, with the name of the original.
    """

    def __init__(self, rules: Sequence[Rule], architecture: Architecture, ignored: Sequence[str] = ()) -> None:
        self.architecture = architecture
        self.ignored = tuple(ignored)
        self.our_shapes = tensor_shapes(architecture)
        if rules == OUR_NAMES:
            rules = [Rule(name, (name,)) for name in dict.fromkeys((*self.our_shapes, "unembed.weight"))]
        n_experts = 0 if architecture.experts is None else architecture.experts.n_experts
        all_rules = [each for rule in rules for each in rule.written_out(architecture.n_layers, n_experts)]
        covered = {name for rule in all_rules for name in rule.ours}
        if misfit := set(self.our_shapes) - covered:
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
        if missing or unknown or wrong:
            nearest = {name: get_close_matches(name, expected, n=1, cutoff=0.0) for name in unknown}
            near = [f"{name} (nearest: {', '.join(nearest[name]) or 'none'})" for name in unknown]
            problems = {"missing ": missing, "unknown ": near, "wrong shape: ": wrong}
            listed = "; ".join(f"{problem}{_listed(names)}" for problem, names in problems.items() if names)
            raise ValueError(
                f"{source} does not contain the tensors of {self.architecture.name!r} "
                f"({self.architecture.family}): {listed}. "
                "Pass the config that belongs to this checkpoint, or the checkpoint that belongs to this config."
            )

    def to_ours(
        self, read: Callable[[str, int, int], Tensor], most_bytes: int = PIECE_BYTES, source: str = "the checkpoint"
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


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, a: Architecture) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (a.d_model,)
    if a.norms_shift:
        yield f"{name}.bias", (a.d_model,)


def _at_end(a: Architecture) -> Iterator[tuple[str, Shape]]:
    """What changes the outputs of a block's parts, and that of the block."""
    if a.use_normalization_before_and_after:
        yield from (*_norm("ln1_post", a), *_norm("ln2_post", a))
    if a.layer_scalars:
        yield from (("scale_context", (1,)), ("scale_open", (1,)))


def _attention(a: Architecture, layer: int) -> Iterator[tuple[str, Shape]]:
    d_head, n_kv_heads = a.head_sizes(layer)
    queries, keys = a.n_heads * d_head, n_kv_heads * d_head
    for name, rows in (("q", queries), ("k", keys), *(() if a.keys_as_values(layer) else (("v", keys),))):
        yield from _linear(f"attn.{name}", rows, a.d_model, a.qkv_bias)
    if a.qk_norm:
        yield from (("attn.q_norm.weight", (d_head,)), ("attn.k_norm.weight", (d_head,)))
    yield from _linear("attn.o", a.d_model, queries, a.o_bias)


def _mlp(a: Architecture, layer: int) -> Iterator[tuple[str, Shape]]:
    experts = a.experts
    if experts is None or not experts.layers[layer]:
        yield from _dense("mlp", a.d_mlp, a)
        return
    yield "mlp.router.weight", (experts.n_experts, a.d_model)
    if experts.router_bias:
        yield "mlp.router.bias", (experts.n_experts,)
    if experts.scales:
        yield "mlp.router.expert_scale", (experts.n_experts,)
    if experts.own_norms:
        yield "mlp.router.scale", (a.d_model,)
        for name in ("experts_norm", "experts_post", "shared_post"):
            yield f"mlp.{name}.weight", (a.d_model,)
    for expert in range(experts.n_experts):
        yield from _dense(f"mlp.experts.{expert}", experts.d_expert, a)
    if experts.d_shared is not None:
        yield from _dense("mlp.shared", experts.d_shared, a)


def _dense(name: str, width: int, a: Architecture) -> Iterator[tuple[str, Shape]]:
    for part in ("gate", "up") if a.mlp == "gated" else ("up",):
        yield from _linear(f"{name}.{part}", width, a.d_model, a.mlp_bias)
    yield from _linear(f"{name}.down", a.d_model, width, a.mlp_bias)


def _modulation(name: str, vectors: int, a: Architecture) -> Iterator[tuple[str, Shape]]:
    if a.time is not None:
        yield from _linear(name, vectors * a.d_model, a.time.d_cond, bias=True)


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
