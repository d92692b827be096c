"""Mistakes made on purpose, by hand on the tensors: none shares a line with the alternatives that undo them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

Made = tuple[Any, dict[str, torch.Tensor]]


def _each_layer(a, tensors, change):
    out = dict(tensors)
    for i in range(a.n_layers):
        change(out, f"blocks.{i}.")
    return out


def swapped_heads(a, tensors):
    """The key head of each group read as the group's first query head; without groups, q and k."""

    def change(out, block):
        for kind in ("weight", "bias"):
            if f"{block}attn.q.{kind}" not in out:
                continue
            q, k = out[f"{block}attn.q.{kind}"].clone(), out[f"{block}attn.k.{kind}"].clone()
            per_group = a.n_heads // a.n_key_value_heads
            for group in range(a.n_key_value_heads):
                query = slice(group * per_group * a.d_head, (group * per_group + 1) * a.d_head)
                key = slice(group * a.d_head, (group + 1) * a.d_head)
                q[query], k[key] = k[key].clone(), q[query].clone()
            out[f"{block}attn.q.{kind}"], out[f"{block}attn.k.{kind}"] = q, k

    return a, _each_layer(a, tensors, change)


def permuted_heads(a, tensors):
    """Query heads in reverse order, the output projection as it was."""

    def change(out, block):
        for kind in ("weight", "bias"):
            if f"{block}attn.q.{kind}" in out:
                heads = out[f"{block}attn.q.{kind}"].split(a.d_head)
                out[f"{block}attn.q.{kind}"] = torch.cat(heads[::-1])

    return a, _each_layer(a, tensors, change)


def interleaved(a, tensors):
    """Row 2i and 2i+1 of a head hold what rows i and i + d/2 held."""

    def change(out, block):
        for part in ("q.weight", "k.weight", "q.bias", "k.bias", "q_norm.weight", "k_norm.weight"):
            name = block + "attn." + part
            if name in out:
                heads = []
                for head in out[name].split(a.d_head):
                    first, second = head.split(a.d_head // 2)
                    heads.append(torch.stack([first, second], dim=1).flatten(0, 1))
                out[name] = torch.cat(heads)

    return a, _each_layer(a, tensors, change)


def other_base(a, tensors):
    return replace(a, rotary_base=10_000.0 if a.rotary_base > 10_000 else 500_000.0), dict(tensors)


def gate_for_up(a, tensors):
    def change(out, block):
        for kind in ("weight", "bias"):
            gate, up = f"{block}mlp.gate.{kind}", f"{block}mlp.up.{kind}"
            if gate in out:
                out[gate], out[up] = out[up], out[gate]

    return a, _each_layer(a, tensors, change)


def wrong_mask(a, tensors):
    return replace(a, mask_token_id=a.mask_token_id - 1), dict(tensors)


def shifted_readout(a, tensors):
    return replace(a, readout="in_place" if a.readout == "shifted" else "shifted"), dict(tensors)


def other_direction(a, tensors):
    return replace(a, attention_dir="causal" if a.attention_dir == "bidirectional" else "bidirectional"), dict(tensors)


def norm_left_out(a, tensors):
    return a, {**tensors, "blocks.1.ln2.weight": torch.ones(a.d_model)}


def layer_of_another_seed(a, tensors):
    draw = torch.Generator().manual_seed(3)
    foreign = {
        name: torch.randn(tensor.shape, generator=draw) * tensor.std(correction=0) + tensor.mean()
        for name, tensor in tensors.items()
        if name.startswith("blocks.1.")
    }
    return a, {**tensors, **foreign}


def rows_off_by_one(a, tensors):
    return a, {**tensors, "embed.weight": tensors["embed.weight"].roll(1, dims=0)}


def head_off_by_one(a, tensors):
    return a, {**tensors, "unembed.weight": tensors["unembed.weight"].roll(-1, dims=0)}


# Each with words that the cause must have.
FAULTS: dict[str, tuple[Callable[[Any, dict[str, torch.Tensor]], Made], str]] = {
    "query and key heads swapped": (swapped_heads, "query and key heads"),
    "query heads permuted": (permuted_heads, "query heads are in another order"),
    "rotary interleaved": (interleaved, "their rows were interleaved"),
    "another rotary base": (other_base, "base"),
    "gate and up exchanged": (gate_for_up, "gate and up"),
    "wrong mask id": (wrong_mask, "mask id is wrong"),
    "readout shifted": (shifted_readout, "readout is off by one"),
    "causal for bidirectional": (other_direction, "attention"),
    "a norm left out": (norm_left_out, "blocks.1.ln2.weight"),
    "a layer of another seed": (layer_of_another_seed, "of block 1"),
    "embedding rows off by one": (rows_off_by_one, "rows of the embedding"),
    "head rows off by one": (head_off_by_one, "rows of the head"),
}


def faulty(model, fault):
    """The model with a mistake in it."""
    from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer

    architecture, tensors = FAULTS[fault][0](model.cfg.architecture, dict(model.state_dict()))
    cfg = DiffusionConfig.from_architecture(
        architecture, device="cpu", model_name="faulty", default_prepend_bos=model.cfg.default_prepend_bos
    )
    if cfg.tied:
        tensors.pop("unembed.weight", None)
    return HookedDiffusionTransformer(cfg, model.tokenizer, tensors=tensors.items())
