"""Alternatives, each of which undoes one likely mistake by a cheap change of architecture or tensors.

A checkpoint that was read wrongly becomes right under the alternative that undoes the mistake: its loss falls, or its
logits become those of a reference. A change returns only the tensors that it changes, in our layout
(`weight_conversion.tensor_shapes`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from weight_conversion import Architecture
from weight_conversion.key_map import GroupMajorQKV

Tensors = Mapping[str, Tensor]
Change = Callable[[Tensors, Architecture], dict[str, Tensor]]
# Rotary bases of published models, and some between them.
BASES = (1_000.0, 10_000.0, 20_000.0, 100_000.0, 500_000.0, 1_000_000.0, 10_000_000.0)
BLOCK_SIZES = (4, 8, 16, 32, 64)
EPSILONS = (1e-5, 1e-6)
# A correcting shift of rows, and where the rows are before it.
WAYS = {-1: "late", 1: "early"}


@dataclass(frozen=True)
class Alternative:
    """A change that undoes one likely mistake.

    Attributes:
        name: Description of the change, such as "with gate and up exchanged".
        cause: Mistake that the change undoes.
        architecture: Architecture after the change.
        change: Function (tensors, architecture) that returns the changed tensors.
        sees_more: Whether tokens are predicted from more of the clean text, which may lower the loss of a correct model
            too: only an exact measure tells whether it undoes a mistake.
    """

    name: str
    cause: str
    architecture: Architecture
    change: Change = lambda tensors, architecture: {}
    sees_more: bool = False


def alternatives(a: Architecture, mask_ids: Sequence[int] = ()) -> list[Alternative]:
    """All alternatives that apply to an architecture; `mask_ids` are candidates for the id of [MASK]."""
    return [*_readings(a, mask_ids), *_layouts(a), *_vocabularies(a)]


def without(a: Architecture, block: int, part: str | None = None) -> Alternative:
    """The network without a block, or without its attention or MLP; this helps only if that part is foreign."""
    outputs = {"attention": (f"blocks.{block}.attn.", ".o."), "MLP": (f"blocks.{block}.mlp.", ".down.")}
    zeroed = list(outputs.values()) if part is None else [outputs[part]]
    what = f"block {block}" if part is None else f"the {part} of block {block}"
    foreign = f"{what} are foreign to the others"
    if part is None and block:
        # Blocks after a foreign one read its wrong output, so omitting one of these may help as much.
        foreign = f"{what}, or of one before it, are foreign"
    cause = f"the weights of {foreign}: of another checkpoint or seed, or damaged"
    return Alternative(f"without {what}", cause, a, partial(zeros, zeroed))


def exchanged_in_each(a: Architecture) -> list[Alternative]:
    """The network with gate and up projections of one block exchanged, for each block; none if MLPs have no gate."""
    return [
        Alternative(
            f"with gate and up of block {block} exchanged",
            f"gate and up projections of block {block} were read as each other",
            a,
            partial(gate_with_up, f"blocks.{block}."),
        )
        for block in range(a.n_layers)
        if a.mlp == "gated"
    ]


def vocabulary_ends(a: Architecture) -> dict[str, str]:
    """The matrices with a row for each token, with their names in messages."""
    return {"embed": "embedding"} if a.tied else {"embed": "embedding", "unembed": "head"}


def moved_from(a: Architecture, end: str, shift: int, first: int, round_the_end: bool) -> Alternative:
    """The network with the rows of "embed" or "unembed" shifted by -1 or 1 from an id on.

    The last row takes part in the shift with `round_the_end`; otherwise it stays.
    """
    word, way = vocabulary_ends(a)[end], " round the end" if round_the_end else ""
    cause = f"the rows of the {word} are one too {WAYS[shift]} from about id {first} on"
    name = f"with {word} rows from {first} on moved by {shift:+d}{way}"
    change = partial(moved, (end,), shift, first, round_the_end)
    return Alternative(name, f"{cause}: an off-by-one in the vocabulary", a, change)


def _readings(a: Architecture, mask_ids: Sequence[int]) -> Iterator[Alternative]:
    """Other settings for the same tensors."""
    direction: Literal["bidirectional", "causal"] = "causal" if a.attention_dir == "bidirectional" else "bidirectional"
    readout: Literal["in_place", "shifted"] = "in_place" if a.readout == "shifted" else "shifted"
    sees, reads = a.attention_dir, a.readout
    wrong_direction = f"the config makes attention {sees}, and the weights were trained with {direction} attention"
    wrong_readout = (
        f"the config reads tokens {reads}, and the weights predict them {readout}: the readout is off by one"
    )
    other = replace(a, attention_dir=direction, causal_block=None, block_context="blocks")
    both = f"{wrong_direction}; {wrong_readout}"
    for name, cause, reading in (
        (f"with {direction} attention", wrong_direction, other),
        (f"with readout {readout}", wrong_readout, replace(a, readout=readout)),
        (f"with {direction} attention, readout {readout}", both, replace(other, readout=readout)),
    ):
        # Where clean text is predicted in the rows that read it, the loss tells nothing, because it is copied.
        if not (reading.is_autoregressive and reading.readout == "in_place"):
            yield Alternative(name, cause, reading)
    for mask in dict.fromkeys(mask_ids):
        if mask != a.mask_token_id and 0 <= mask < a.d_vocab:
            cause = f"the mask id is wrong: the config says {a.mask_token_id}, and the weights use {mask} as [MASK]"
            yield Alternative(f"with mask id {mask}", cause, replace(a, mask_token_id=mask))
    numbers: dict[str, tuple[str, str, Sequence[float]]] = {
        "rotary_base": ("rotary base", "rotary base", BASES if a.positional_embedding_type == "rotary" else ()),
        "norm_eps": ("norms' epsilon", "norm epsilon", EPSILONS),
        "causal_block": ("block size", "blocks of", BLOCK_SIZES if a.causal_block else ()),
    }
    for name, (what, words, values) in numbers.items():
        for value in (value for value in values if value != getattr(a, name)):
            cause = f"the {what} is wrong: the config says {getattr(a, name):g}, and the weights fit {value:g}"
            changed: dict[str, Any] = {name: value}
            sees_more = name == "causal_block" and value < getattr(a, name)
            yield Alternative(f"with {words} {value:g}", cause, replace(a, **changed), sees_more=sees_more)


def _layouts(a: Architecture) -> Iterator[Alternative]:
    """Other orders of the rows in a block's matrices, and exchanged matrices."""
    if a.positional_embedding_type == "rotary":
        n_turned = a.rotary_dim or a.d_head
        halves = torch.cat([torch.arange(n_turned).view(2, -1).T.flatten(), torch.arange(n_turned, a.d_head)])
        pairs = "rotary positions rotate other pairs of dimensions than in training"
        interleaved = (
            f"{pairs}: the weights are for half-split rotation, and their rows were interleaved in a conversion"
        )
        half_split = f"{pairs}: the weights are for interleaved rotation, and their rows were not rearranged for it"
        yield Alternative("with rotary rows de-interleaved", interleaved, a, partial(by_dimension, halves.argsort()))
        yield Alternative("with rotary rows interleaved", half_split, a, partial(by_dimension, halves))
    if a.mlp == "gated":
        gate = "gate and up projections of the MLP were read as each other"
        yield Alternative("with gate and up exchanged", gate, a, partial(gate_with_up, "blocks."))
    keys = "query and key heads were read as each other"
    yield Alternative("with query and key heads swapped", keys, a, partial(swap_key_with_first_query, False))
    if a.qk_norm:
        swap = partial(swap_key_with_first_query, True)
        yield Alternative("with query and key heads swapped, and their norms", keys, a, swap)
    if a.n_heads > 1:
        order = "the query heads are in another order than the output projection and the keys expect"
        reversed_order = torch.arange(a.n_heads).flip(0)
        neighbours = torch.arange(a.n_heads - a.n_heads % 2).view(-1, 2).flip(1).flatten()
        neighbours = torch.cat([neighbours, torch.arange(len(neighbours), a.n_heads)])
        yield Alternative("with query heads reversed", order, a, partial(by_head, reversed_order, ("q",)))
        yield Alternative("with neighbouring query heads swapped", order, a, partial(by_head, neighbours, ("q",)))
    if 1 < a.n_key_value_heads < a.n_heads:
        tiled = torch.arange(a.n_heads).view(a.n_key_value_heads, -1).T.flatten()
        shared = "query heads use other key/value heads than in training: tiled where they should be grouped"
        yield Alternative("with query heads regrouped", shared, a, partial(by_head, tiled, ("q", "o")))
        yield Alternative("with query heads tiled", shared, a, partial(by_head, tiled.argsort(), ("q", "o")))
    fused = "the fused projection of queries, keys and values was split in the wrong order of rows"
    yield Alternative("with the fused projection read as stacked", fused, a, partial(resplit, False))
    yield Alternative("with the fused projection read group by group", fused, a, partial(resplit, True))


def _vocabularies(a: Architecture) -> Iterator[Alternative]:
    """Rows of the vocabulary shifted by one."""
    ends = vocabulary_ends(a)
    for end, word in ends.items():
        for shift, way in WAYS.items():
            cause = f"the rows of the {word} are one too {way}: an off-by-one in the vocabulary"
            yield Alternative(f"with {word} rows moved by {shift:+d}", cause, a, partial(moved, (end,), shift, 0, True))
    for shift in () if a.tied else WAYS:
        cause = "the rows of the embedding and of the head are off by one, both alike"
        yield Alternative(
            f"with embedding and head rows moved by {shift:+d}", cause, a, partial(moved, ends, shift, 0, True)
        )


# The changes. Each takes what selects it first, then the tensors and the architecture.


def _blocks(tensors: Tensors, parts: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of some parts of every block, such as "attn.q"."""
    for name, tensor in tensors.items():
        if name.startswith("blocks.") and name.split(".", 2)[2].rpartition(".")[0] in parts:
            yield name, tensor


def zeros(outputs: Sequence[tuple[str, str]], tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Empties the matrices that write the outputs of some modules, each given by its prefix and the matrix's name."""
    return {
        name: torch.zeros_like(tensor)
        for name, tensor in tensors.items()
        if any(name.startswith(module) and matrix in name for module, matrix in outputs)
    }


def by_dimension(order: Tensor, tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Reorders the rows of queries and keys, and of their norms, in each head."""
    return {
        name: tensor.unflatten(0, (-1, a.d_head))[:, order.to(tensor.device)].flatten(0, 1)
        for name, tensor in _blocks(tensors, ("attn.q", "attn.k", "attn.q_norm", "attn.k_norm"))
    }


def by_head(order: Tensor, parts: Sequence[str], tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Reorders heads: rows of the queries, columns of the output projection."""
    changed = {}
    for name, tensor in _blocks(tensors, [f"attn.{part}" for part in parts]):
        heads = order.to(tensor.device)
        if ".attn.q." in name:
            changed[name] = tensor.unflatten(0, (-1, a.d_head))[heads].flatten(0, 1)
        elif name.endswith("weight"):
            changed[name] = tensor.unflatten(1, (-1, a.d_head))[:, heads].flatten(1, 2)
    return changed


def gate_with_up(blocks: str, tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Exchanges gate and up projections of the MLPs and experts of the blocks whose names begin so."""
    gates = [name for name in tensors if name.startswith(blocks) and ".mlp." in name and ".gate." in name]
    pairs = [(gate, gate.replace(".gate.", ".up.")) for gate in gates]
    return {name: tensors[other] for gate, up in pairs for name, other in ((gate, up), (up, gate))}


def swap_key_with_first_query(norms_too: bool, tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Exchanges each key head with the first query head of its group; without groups, all keys with all queries."""
    changed = {}
    for name, query in _blocks(tensors, ("attn.q",)):
        key_name = name.replace("attn.q", "attn.k")
        queries = query.unflatten(0, (a.n_key_value_heads, -1, a.d_head)).clone()
        keys = tensors[key_name].unflatten(0, (a.n_key_value_heads, a.d_head))
        changed[key_name] = queries[:, 0].clone().flatten(0, 1)
        queries[:, 0] = keys
        changed[name] = queries.flatten(0, 2)
    for name, norm in _blocks(tensors, ("attn.q_norm",)) if norms_too else ():
        key_name = name.replace("q_norm", "k_norm")
        changed[name], changed[key_name] = tensors[key_name], norm
    return changed


def resplit(by_group: bool, tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Splits the fused projection again: group by group, or into all queries, all keys, all values."""
    changed: dict[str, Tensor] = {}
    for name, _ in _blocks(tensors, ("attn.q",)):
        names = [name.replace("attn.q", f"attn.{part}") for part in "qkv"]
        parts = [tensors[part] for part in names]
        if by_group:
            rows = GroupMajorQKV().split(torch.cat(parts), a)
        else:
            rows = GroupMajorQKV().join(parts, a).split([len(part) for part in parts])
        changed |= dict(zip(names, rows, strict=True))
    return changed


def moved(
    ends: Iterable[str], shift: int, first: int, round_the_end: bool, tensors: Tensors, a: Architecture
) -> dict[str, Tensor]:
    """Shifts the rows from `first` on by one. With `round_the_end`, the row left over takes the place at the other
    end; otherwise it stays, and so does the last row (often [MASK]'s)."""
    changed = {}
    stays = slice(-1, None) if shift < 0 else slice(1)
    names = [f"{end}.{kind}" for end in ends for kind in ("weight", "bias")]
    for name in (name for name in names if name in tensors):
        changed[name] = rows = tensors[name].clone()
        shifted = rows[first:] if round_the_end else rows[first:-1]
        left_over = shifted[stays].clone()
        shifted.copy_(shifted.roll(shift, dims=0))
        if not round_the_end:
            shifted[stays] = left_over
    return changed
