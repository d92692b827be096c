"""Builds the parts of a model from an architecture, and fills them with weights. No other file of model/ does."""

import math
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from diffusion_lens.config import ROTARY_DTYPES
from diffusion_lens.model.attention import Attention
from diffusion_lens.model.block import Block
from diffusion_lens.model.embed import Embed, PosEmbed, Unembed
from diffusion_lens.model.experts import MixtureOfExperts, Router
from diffusion_lens.model.linear import Linear
from diffusion_lens.model.mlp import GatedMLP, PlainMLP
from diffusion_lens.model.modulation import TimeEmbedding
from diffusion_lens.model.norm import LayerNorm, Norm, RMSNorm
from diffusion_lens.model.placement import Placement
from diffusion_lens.model.positions import LinearBiases, OutsideAttention, Positions
from diffusion_lens.model.rotary import Rotary
from diffusion_lens.model.shared_weights import share
from weight_conversion import ALIGNMENT, N_FREQUENCIES, Architecture, tensor_shapes


def build_embed(a: Architecture) -> Embed:
    return Embed(a.d_vocab, a.d_model)


def build_unembed(a: Architecture) -> Unembed:
    return Unembed(a.d_model, a.d_vocab_out, a.unembed_bias)


_NORMS: dict[str, Callable[[Architecture], Norm]] = {
    "rms": lambda a: RMSNorm(a.d_model, a.norm_eps),
    "layer": lambda a: LayerNorm(a.d_model, a.norm_eps, bias=a.norms_shift, modulated=a.is_told_time),
}


def build_norm(a: Architecture) -> Norm:
    """A norm of the residual stream."""
    return _NORMS[a.norm](a)


def build_time_embed(a: Architecture) -> TimeEmbedding:
    assert a.time is not None
    return TimeEmbedding(
        hidden=_linear(N_FREQUENCIES, a.time.d_cond, bias=True), out=_linear(a.time.d_cond, a.time.d_cond, bias=True)
    )


def build_modulation(a: Architecture, vectors: int) -> nn.Linear:
    """The map from the vector of the time to so many vectors of the width of the stream."""
    assert a.time is not None
    return _linear(a.time.d_cond, vectors * a.d_model, bias=True)


_POSITIONS: dict[str, Callable[[Architecture], Positions]] = {
    "rotary": lambda a: Rotary(
        a.rotary_dim or a.d_head, a.rotary_base, ROTARY_DTYPES[a.rotary_dtype], a.rotation, a.rotary_scaling
    ),
    "standard": lambda a: OutsideAttention(learned=True),
    "none": lambda a: OutsideAttention(learned=False),
    "alibi": lambda a: LinearBiases(a.n_heads),
}


def build_positions(a: Architecture) -> Positions:
    positions = _POSITIONS[a.positional_embedding_type](a)
    if a.query_scale is not None:
        positions.query_scale = a.query_scale
    return positions


def build_pos_embed(a: Architecture) -> PosEmbed:
    return PosEmbed(a.n_ctx, a.d_model)


def build_blocks(a: Architecture) -> list[Block]:
    """The blocks without weights (on the meta device); `load_tensors` fills them."""
    queries, keys = a.n_heads * a.d_head, a.n_key_value_heads * a.d_head
    blocks = [
        Block(
            ln1=build_norm(a),
            attn=Attention(
                q=_linear(a.d_model, queries, a.qkv_bias),
                k=_linear(a.d_model, keys, a.qkv_bias),
                v=_linear(a.d_model, keys, a.qkv_bias),
                o=_linear(queries, a.d_model, a.o_bias),
                d_head=a.d_head,
                q_norm=RMSNorm(a.d_head, a.norm_eps) if a.qk_norm else None,
                k_norm=RMSNorm(a.d_head, a.norm_eps) if a.qk_norm else None,
                clip=a.qkv_clip,
            ),
            ln2=build_norm(a),
            mlp=_build_mlp(a, layer),
            modulation=build_modulation(a, 6) if a.is_told_time else None,
        )
        for layer in range(a.n_layers)
    ]
    if a.time is not None and a.time.folded:
        for block in blocks:
            block.modulation = build_modulation(a, 6)  # which nothing reads; an export needs it
    return blocks


def _build_mlp(a: Architecture, layer: int) -> GatedMLP | PlainMLP | MixtureOfExperts:
    experts = a.experts
    if experts is None or not experts.layers[layer]:
        if (a.mlp, a.act_fn) not in _MLPS:
            known = ", ".join(f"mlp={mlp!r} with act_fn={act_fn!r}" for mlp, act_fn in _MLPS)
            raise ValueError(f"there is no MLP of mlp={a.mlp!r} with act_fn={a.act_fn!r}; there are {known}")
        return _MLPS[a.mlp, a.act_fn](a, a.d_mlp)
    return MixtureOfExperts(
        experts,
        Router(a.d_model, experts.n_experts, experts.router_bias, experts.router_dtype),
        [_build_gated(a, experts.d_expert) for _ in range(experts.n_experts)],
        None if experts.d_shared is None else _build_gated(a, experts.d_shared),
    )


def _build_gated(a: Architecture, width: int) -> GatedMLP:
    return GatedMLP(
        gate=_linear(a.d_model, width, a.mlp_bias),
        up=_linear(a.d_model, width, a.mlp_bias),
        down=_linear(width, a.d_model, a.mlp_bias),
    )


def _build_plain(a: Architecture, width: int) -> PlainMLP:
    return PlainMLP(up=_linear(a.d_model, width, a.mlp_bias), down=_linear(width, a.d_model, a.mlp_bias))


_MLPS: dict[tuple[str, str], Callable[[Architecture, int], GatedMLP | PlainMLP]] = {
    ("gated", "silu"): _build_gated,
    ("plain", "gelu_new"): _build_plain,
}


def load_tensors(
    module: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    placement: Placement,
    dtype: torch.dtype,
    assign: bool = False,
) -> None:
    """Copy each tensor into its parameter at its place; a tensor may come in several pieces of consecutive rows.

    With `assign`, a whole tensor of this dtype on the device of its place becomes the parameter itself, if it begins
    where torch would let it begin: matrix products of another alignment may differ in their last bits.

    A tied weight may come a second time under its other name, as in a `state_dict`.

    Raises:
        ValueError: A tensor is unknown, has another shape, or is missing; or the two copies of a tied weight differ.
    """
    # All parameters are allocated before the first piece is read, so that the pieces leave no gaps in memory.
    weights = {name: placement.empty(name, meta.shape, dtype) for name, meta in module.named_parameters()}
    first_name = {parameter: name for name, parameter in module.named_parameters()}
    original = {name: first_name[parameter] for name, parameter in module.named_parameters(remove_duplicate=False)}
    filled = dict.fromkeys(original, 0)
    for name, piece in tensors:
        if name in original and name not in weights:
            weight = weights[original[name]][filled[name] : filled[name] + len(piece)]
            if weight.shape != piece.shape or not torch.equal(weight, piece.to(weight)):
                raise ValueError(f"{name!r} is tied to {original[name]!r}, and the two differ")
            filled[name] += len(piece)
            continue
        if name not in weights:
            raise ValueError(f"the model has no weight {name!r}; it has {', '.join(list(weights)[:4])} and so on")
        start, stop = filled[name], filled[name] + len(piece)
        if piece.shape[1:] != weights[name].shape[1:] or stop > len(weights[name]):
            raise ValueError(
                f"rows {start}:{stop} of {name!r} are {list(piece.shape)}; it is {list(weights[name].shape)}"
            )
        if assign and _can_replace(piece, weights[name]):
            weights[name] = piece.detach()
        else:
            weights[name][start:stop].copy_(piece.detach())
        filled[name] = stop
    if missing := [name for name, weight in weights.items() if filled[name] < len(weight)]:
        raise ValueError(f"the tensors lack {', '.join(missing[:4])}, or some of its rows")
    for name, weight in weights.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, nn.Parameter(weight))


def _can_replace(piece: Tensor, weight: Tensor) -> bool:
    """Whether a tensor can take the place of a weight, and no bit of a result depends on it."""
    kinds = [(each.shape, each.stride(), each.dtype, each.device) for each in (piece, weight)]
    return kinds[0] == kinds[1] and piece.data_ptr() % ALIGNMENT == 0


def share_tensors(module: nn.Module, other: nn.Module) -> None:
    """Let the parameters of `module` be those of `other`.

    Raises:
        ValueError: The two networks have parameters of different names or shapes.
    """
    shapes, theirs = (
        {name: tuple(parameter.shape) for name, parameter in network.named_parameters(remove_duplicate=False)}
        for network in (module, other)
    )
    if different := sorted(shapes.items() ^ theirs.items()):
        raise ValueError(f"networks of different shapes cannot share weights; first at {different[0][0]!r}")
    for name, parameter in list(other.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, parameter)
    share(module, other)


def zero_shifts(a: Architecture) -> Iterator[tuple[str, Tensor]]:
    """The biases of the norms before constants are folded into them."""
    for name, shape in tensor_shapes(a).items():
        if re.search(r"(^|\.)ln\w+\.bias$", name):
            yield name, torch.zeros(shape)


def random_tensors(a: Architecture, seed: int, std: float = 0.02) -> Iterator[tuple[str, Tensor]]:
    """Random weights: matrices from N(0, std), norms 1, biases 0.

    Projections into the residual stream are divided by sqrt(2 n_layers).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in tensor_shapes(a).items():
        if len(shape) == 1:
            yield name, torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        else:
            into_stream = name.endswith((".o.weight", ".down.weight"))
            scale = std / math.sqrt(2 * a.n_layers) if into_stream else std
            yield name, torch.randn(shape, generator=generator) * scale


def _linear(d_in: int, d_out: int, bias: bool) -> nn.Linear:
    return Linear(d_in, d_out, bias=bias, device="meta")
