"""The changes of tensors by which alternatives undo mistakes.

A change returns only the tensors that it changes, in our layout (`weight_conversion.tensor_shapes`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from weight_conversion import Architecture
from weight_conversion.layouts import GroupMajorQKV

Tensors = Mapping[str, Tensor]
Change = Callable[[Tensors, Architecture], dict[str, Tensor]]


def _blocks(tensors: Tensors, parts: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of some parts of every block, such as "attn.q"."""
    for name, tensor in tensors.items():
        if name.startswith("blocks.") and name.split(".", 2)[2].rpartition(".")[0] in parts:
            yield name, tensor


def by_dimension(order: Tensor) -> Change:
    """Reorders the rows of queries and keys, and of their norms, in each head."""

    def change(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
        parts = ("attn.q", "attn.k", "attn.q_norm", "attn.k_norm")
        return {
            name: tensor.unflatten(0, (-1, a.d_head))[:, order.to(tensor.device)].flatten(0, 1)
            for name, tensor in _blocks(tensors, parts)
        }

    return change


def by_head(order: Tensor, parts: Sequence[str]) -> Change:
    """Reorders heads: rows of the queries, columns of the output projection."""

    def change(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
        changed = {}
        for name, tensor in _blocks(tensors, [f"attn.{part}" for part in parts]):
            heads = order.to(tensor.device)
            if ".attn.q." in name:
                changed[name] = tensor.unflatten(0, (-1, a.d_head))[heads].flatten(0, 1)
            elif name.endswith("weight"):
                changed[name] = tensor.unflatten(1, (-1, a.d_head))[:, heads].flatten(1, 2)
        return changed

    return change


def gate_with_up(only: int | None = None) -> Change:
    """Exchanges gate and up projections of the MLPs and experts of every block, or of one block."""
    blocks = "blocks." if only is None else f"blocks.{only}.mlp."

    def change(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
        gates = [name for name in tensors if name.startswith(blocks) and ".mlp." in name and ".gate." in name]
        pairs = [(gate, gate.replace(".gate.", ".up.")) for gate in gates]
        return {name: tensors[other] for gate, up in pairs for name, other in ((gate, up), (up, gate))}

    return change


def swap_key_with_first_query(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Exchange each key head with the first query head of its group; without groups, all keys with all queries."""
    changed = {}
    for name, query in _blocks(tensors, ("attn.q",)):
        key_name = name.replace("attn.q", "attn.k")
        queries = query.unflatten(0, (a.n_key_value_heads, -1, a.d_head)).clone()
        keys = tensors[key_name].unflatten(0, (a.n_key_value_heads, a.d_head))
        changed[key_name] = queries[:, 0].clone().flatten(0, 1)
        queries[:, 0] = keys
        changed[name] = queries.flatten(0, 2)
    return changed


def swap_norms_too(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Exchange key and query heads, and also their norms."""
    norms = {"q_norm": "k_norm", "k_norm": "q_norm"}
    exchanged = {name: tensors[name.replace(of, norms[of])] for name in tensors for of in norms if f".{of}." in name}
    return {**swap_key_with_first_query(tensors, a), **exchanged}


def stacked(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Split the fused projection into all queries, all keys, all values, instead of group by group."""
    return _resplit(tensors, a, lambda parts: GroupMajorQKV().join(parts, a), lambda fused, sizes: fused.split(sizes))


def grouped(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Split the fused projection group by group, instead of into all queries, all keys, all values."""
    return _resplit(tensors, a, torch.cat, lambda fused, sizes: GroupMajorQKV().split(fused, a))


def _resplit(
    tensors: Tensors,
    a: Architecture,
    join: Callable[[list[Tensor]], Tensor],
    split: Callable[[Tensor, list[int]], Sequence[Tensor]],
) -> dict[str, Tensor]:
    changed: dict[str, Tensor] = {}
    for name, _ in _blocks(tensors, ("attn.q",)):
        names = [name.replace("attn.q", f"attn.{part}") for part in "qkv"]
        parts = [tensors[part_name] for part_name in names]
        changed |= dict(zip(names, split(join(parts), [len(part) for part in parts]), strict=True))
    return changed


def rolled(ends: Iterable[str], shift: int, first: int = 0) -> Change:
    """Shifts the rows from `first` on cyclically."""

    def change(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
        return {
            name: torch.cat([rows[:first], rows[first:].roll(shift, dims=0)])
            for end in ends
            for name, rows in _rows(tensors, end)
        }

    return change


def moved_along(end: str, shift: int, first: int) -> Change:
    """Shifts the rows from `first` on by one, except the last row (often [MASK]'s); the row left over stays."""

    def change(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
        changed = {}
        for name, rows in _rows(tensors, end):
            changed[name] = moved = rows.clone()
            if shift < 0:
                moved[first:-2] = rows[first + 1 : -1]
            else:
                moved[first + 1 : -1] = rows[first:-2]
        return changed

    return change


def _rows(tensors: Tensors, end: str) -> list[tuple[str, Tensor]]:
    """The tensors of the embedding or the head that have a row for each token."""
    return [(name, tensors[name]) for name in (f"{end}.weight", f"{end}.bias") if name in tensors]
