"""The tensor layout: names and shapes of all tensors, which are those of the model's `state_dict`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.conditioning import TimeConditioning
from weight_conversion.experts import Experts

N_FREQUENCIES = 256  # of the embedding of the noise level, in all published models


def tensor_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name and shape of every tensor, in our layout (`[out, in]` for matrices, as in `torch.nn.Linear`)."""
    a = architecture
    shapes: dict[str, Shape] = {"embed.weight": (a.d_vocab, a.d_model)}
    for i in range(a.n_layers):
        block: dict[str, Shape] = {}
        for part in (_norm("ln1", a), _attention(a), _norm("ln2", a), _mlp(a, i), _modulation("modulation", 6, a)):
            block.update(part)
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


def every_tensor_name(architecture: Architecture) -> set[str]:
    """All tensor names that our layout has for architectures with this number of layers and experts."""
    everything: dict[str, Any] = {
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "qk_norm": True,
        "tied": False,
        "norm": "layer",
        "norm_bias": True,
        "mlp": "gated",
        "unembed_bias": True,
        "positional_embedding_type": "standard",
        "rotary_scaling": None,
        "rotary_dim": None,
        "time": TimeConditioning(1, told=True),
    }
    names = set(tensor_shapes(replace(architecture, **everything, experts=None)))
    layers = (True,) * architecture.n_layers
    experts = replace(architecture.experts or Experts(1, 1, 1, layers), layers=layers, d_shared=1, router_bias=True)
    return names | set(tensor_shapes(replace(architecture, **everything, experts=experts)))


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, a: Architecture) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (a.d_model,)
    if a.norms_shift:
        yield f"{name}.bias", (a.d_model,)


def _attention(a: Architecture) -> Iterator[tuple[str, Shape]]:
    queries, keys = a.n_heads * a.d_head, a.n_key_value_heads * a.d_head
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield from _linear(f"attn.{name}", rows, a.d_model, a.qkv_bias)
    if a.qk_norm:
        yield from (("attn.q_norm.weight", (a.d_head,)), ("attn.k_norm.weight", (a.d_head,)))
    yield from _linear("attn.o", a.d_model, queries, a.o_bias)


def _mlp(a: Architecture, layer: int) -> Iterator[tuple[str, Shape]]:
    experts = a.experts
    if experts is None or not experts.layers[layer]:
        yield from _dense("mlp", a.d_mlp, a)
        return
    yield "mlp.router.weight", (experts.n_experts, a.d_model)
    if experts.router_bias:
        yield "mlp.router.bias", (experts.n_experts,)
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
