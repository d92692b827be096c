"""Likely mistakes, undone one at a time: each is a cheap change of (architecture, tensors).

A checkpoint that was read wrongly is right again under the alternative that undoes the mistake: its loss falls, or its
logits become those of a reference. Tensors that a change does not touch are left out of what it returns; the layout is
`weight_conversion.tensor_shapes`'s.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from weight_conversion import Architecture
from weight_conversion.layouts import GroupMajorQKV

Tensors = Mapping[str, Tensor]
Change = Callable[[Tensors, Architecture], dict[str, Tensor]]
# Of the published models, and between them.
BASES = (1_000.0, 10_000.0, 20_000.0, 100_000.0, 500_000.0, 1_000_000.0, 10_000_000.0)
EPSILONS = (1e-5, 1e-6)
# How rows that have to be moved by so many stand.
WAYS = {-1: "late", 1: "early"}


@dataclass(frozen=True)
class Alternative:
    """One mistake undone.

    Attributes:
        name: what is changed, "with gate and up exchanged".
        cause: what is likely wrong if that helps.
        architecture: as it then is.
        change: the tensors that then differ.
    """

    name: str
    cause: str
    architecture: Architecture
    change: Change = lambda tensors, architecture: {}


def alternatives(a: Architecture, mask_ids: Sequence[int] = ()) -> list[Alternative]:
    """All that make sense for an architecture.

    Args:
        mask_ids: ids that may be [MASK]'s.
    """
    return [*_readings(a, mask_ids), *_layouts(a), *_vocabularies(a)]


def without(a: Architecture, block: int, part: str | None = None) -> Alternative:
    """The network with a block, or its attention or MLP, adding nothing. It hurts, unless what it adds is foreign."""
    outputs = {"attention": f"blocks.{block}.attn.o.", "MLP": f"blocks.{block}.mlp.down."}
    zeroed = tuple(outputs.values()) if part is None else (outputs[part],)
    what = f"block {block}" if part is None else f"the {part} of block {block}"

    def change(tensors: Tensors, architecture: Architecture) -> dict[str, Tensor]:
        return {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name.startswith(zeroed)}

    cause = f"the weights of {what} are foreign to the others: of another checkpoint or seed, or damaged"
    if part is None and block:
        # What comes after a foreign block reads what is wrong, so leaving it out may help as much.
        cause = (
            f"the weights of block {block}, or of one before it, are foreign: of another checkpoint or seed, or damaged"
        )
    return Alternative(f"without {what}", cause, a, change)


def exchanged_in(a: Architecture, block: int) -> Alternative:
    """The gate and up projections of one block exchanged."""
    cause = f"gate and up projections of block {block} were read as each other"
    return Alternative(
        f"with gate and up of block {block} exchanged", cause, a, _exchanged("mlp.gate", "mlp.up", block)
    )


def vocabulary_ends(a: Architecture) -> dict[str, str]:
    """The matrices with a row for each token, and what they are called."""
    return {"embed": "embedding"} if a.tied else {"embed": "embedding", "unembed": "head"}


def moved_from(a: Architecture, end: str, shift: int, first: int, round_the_end: bool) -> Alternative:
    """The rows of one end of the vocabulary, from an id on, moved by one; the last row stays, or comes round."""
    word = vocabulary_ends(a)[end]
    cause = (
        f"the rows of the {word} stand one too {WAYS[shift]} from about id {first} on: an off-by-one in the vocabulary"
    )
    change = _rolled((end,), shift, first) if round_the_end else _moved_along(end, shift, first)
    way = " round the end" if round_the_end else ""
    return Alternative(f"with {word} rows from {first} on moved by {shift:+d}{way}", cause, a, change)


def _readings(a: Architecture, mask_ids: Sequence[int]) -> Iterator[Alternative]:
    """Other facts about the same tensors."""
    turned: Literal["bidirectional", "causal"] = "causal" if a.attention_dir == "bidirectional" else "bidirectional"
    moved: Literal["in_place", "shifted"] = "in_place" if a.readout == "shifted" else "shifted"
    seen = f"the config makes attention {a.attention_dir}, and the weights were trained with {turned} attention"
    read = f"the config reads tokens {a.readout}, and the weights predict them {moved}: the readout is off by one"
    other_way, other_row = replace(a, attention_dir=turned), replace(a, readout=moved)
    yield Alternative(f"with {turned} attention", seen, other_way)
    yield Alternative(f"with readout {moved}", read, other_row)
    yield Alternative(f"with {turned} attention, readout {moved}", f"{seen}; {read}", replace(other_way, readout=moved))
    for mask in dict.fromkeys(mask_ids):
        if mask != a.mask_token_id and 0 <= mask < a.d_vocab:
            cause = f"the mask id is wrong: the config says {a.mask_token_id}, and the weights know [MASK] as {mask}"
            yield Alternative(f"with mask id {mask}", cause, replace(a, mask_token_id=mask))
    for base in BASES:
        if base != a.rotary_base:
            cause = f"the rotary base is wrong: the config says {a.rotary_base:g}, and the weights fit {base:g}"
            yield Alternative(f"with rotary base {base:g}", cause, replace(a, rotary_base=base))
    for eps in EPSILONS:
        if eps != a.norm_eps:
            cause = f"the norms' epsilon is wrong: the config says {a.norm_eps:g}, and the weights fit {eps:g}"
            yield Alternative(f"with norm epsilon {eps:g}", cause, replace(a, norm_eps=eps))


def _layouts(a: Architecture) -> Iterator[Alternative]:
    """Other orders of the rows inside a block's matrices, and matrices taken for one another."""
    halves = torch.arange(a.d_head).view(2, -1).T.flatten()
    turns = "rotary positions turn other pairs of dimensions than in training"
    interleaved = f"{turns}: the weights are for half-split rotation, and their rows were interleaved on the way"
    half_split = f"{turns}: the weights are for interleaved rotation, and their rows were not rearranged for it"
    yield Alternative("with rotary rows de-interleaved", interleaved, a, _by_dimension(halves.argsort()))
    yield Alternative("with rotary rows interleaved", half_split, a, _by_dimension(halves))
    gate = "gate and up projections of the MLP were read as each other"
    yield Alternative("with gate and up exchanged", gate, a, _exchanged("mlp.gate", "mlp.up"))
    keys = "query and key heads were read as each other"
    yield Alternative("with query and key heads swapped", keys, a, _swap_key_with_first_query)
    if a.qk_norm:
        yield Alternative("with query and key heads swapped, and their norms", keys, a, _swap_norms_too)
    if a.n_heads > 1:
        order = "the query heads stand in another order than the output projection and the keys expect"
        backwards = torch.arange(a.n_heads).flip(0)
        neighbours = torch.arange(a.n_heads - a.n_heads % 2).view(-1, 2).flip(1).flatten()
        neighbours = torch.cat([neighbours, torch.arange(len(neighbours), a.n_heads)])
        yield Alternative("with query heads reversed", order, a, _by_head(backwards, ("q",)))
        yield Alternative("with neighbouring query heads swapped", order, a, _by_head(neighbours, ("q",)))
    if 1 < a.n_key_value_heads < a.n_heads:
        tiled = torch.arange(a.n_heads).view(a.n_key_value_heads, -1).T.flatten()
        shared = "query heads use other key/value heads than in training: tiled where they should be grouped"
        yield Alternative("with query heads regrouped", shared, a, _by_head(tiled, ("q", "o")))
        yield Alternative("with query heads tiled", shared, a, _by_head(tiled.argsort(), ("q", "o")))
    fused = "the fused projection of queries, keys and values was split in the wrong order of rows"
    yield Alternative("with the fused projection read as stacked", fused, a, _stacked)
    yield Alternative("with the fused projection read group by group", fused, a, _grouped)


def _vocabularies(a: Architecture) -> Iterator[Alternative]:
    """Rows of the vocabulary moved by one."""
    ends = vocabulary_ends(a)
    for end, word in ends.items():
        for shift, way in WAYS.items():
            cause = f"the rows of the {word} stand one too {way}: an off-by-one in the vocabulary"
            yield Alternative(f"with {word} rows moved by {shift:+d}", cause, a, _rolled((end,), shift))
    if not a.tied:
        for shift in WAYS:
            cause = "the rows of the embedding and of the head are off by one, both alike"
            yield Alternative(f"with embedding and head rows moved by {shift:+d}", cause, a, _rolled(ends, shift))


def _blocks(tensors: Tensors, parts: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these parts of every block, "attn.q"."""
    for name, tensor in tensors.items():
        if name.startswith("blocks.") and name.split(".", 2)[2].rpartition(".")[0] in parts:
            yield name, tensor


def _by_dimension(order: Tensor) -> Change:
    """Rows of queries and keys, and of their norms, in another order inside each head."""

    def change(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
        parts = ("attn.q", "attn.k", "attn.q_norm", "attn.k_norm")
        return {
            name: tensor.unflatten(0, (-1, a.d_head))[:, order.to(tensor.device)].flatten(0, 1)
            for name, tensor in _blocks(tensors, parts)
        }

    return change


def _by_head(order: Tensor, parts: Sequence[str]) -> Change:
    """Heads in another order: rows of the queries, columns of the output."""

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


def _exchanged(one: str, other: str, only: int | None = None) -> Change:
    """Two parts of every block, or of one, in each other's place."""

    def change(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
        swapped = {one: other, other: one}
        changed = {}
        for name, _ in _blocks(tensors, (one, other)):
            block, part, kind = name.split(".", 2)[1], *name.split(".", 2)[2].rsplit(".", 1)
            if only is not None and int(block) != only:
                continue
            changed[name] = tensors[f"blocks.{block}.{swapped[part]}.{kind}"]
        return changed

    return change


def _swap_key_with_first_query(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Each key head with the first of the query heads that share it; without groups, all queries with all keys."""
    changed = {}
    for name, query in _blocks(tensors, ("attn.q",)):
        key_name = name.replace("attn.q", "attn.k")
        queries = query.unflatten(0, (a.n_key_value_heads, -1, a.d_head)).clone()
        keys = tensors[key_name].unflatten(0, (a.n_key_value_heads, a.d_head))
        changed[key_name] = queries[:, 0].clone().flatten(0, 1)
        queries[:, 0] = keys
        changed[name] = queries.flatten(0, 2)
    return changed


def _swap_norms_too(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """The same, with the norms of queries and keys."""
    return {**_swap_key_with_first_query(tensors, a), **_exchanged("attn.q_norm", "attn.k_norm")(tensors, a)}


def _stacked(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """What was split group by group, split as all queries, all keys, all values."""
    return _resplit(tensors, a, lambda parts: GroupMajorQKV().join(parts, a), lambda fused, sizes: fused.split(sizes))


def _grouped(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """The other way round."""
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
        parts = [tensors[each] for each in names]
        changed |= dict(zip(names, split(join(parts), [len(part) for part in parts]), strict=True))
    return changed


def _rolled(ends: Iterable[str], shift: int, first: int = 0) -> Change:
    """Rows from `first` on moved by some, round the end."""

    def change(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
        names = [f"{end}.weight" for end in ends]
        return {name: torch.cat([tensors[name][:first], tensors[name][first:].roll(shift, dims=0)]) for name in names}

    return change


def _moved_along(end: str, shift: int, first: int) -> Change:
    """Rows from `first` on moved by one; the last, which is often [MASK]'s, and the one left over stay as they are."""

    def change(tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
        rows = tensors[f"{end}.weight"]
        moved = rows.clone()
        if shift < 0:
            moved[first:-2] = rows[first + 1 : -1]
        else:
            moved[first + 1 : -1] = rows[first:-2]
        return {f"{end}.weight": moved}

    return change
