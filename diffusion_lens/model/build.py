"""From an architecture to a network: its parts, its weights, and where these are. No other file of model/ does it.

With `device_map=`, weights are on several GPUs, in the CPU's memory or in a file (`Placement`). Parameters are ordinary
tensors at the place that the map gives them, never on "meta", as after `accelerate.dispatch_model`: views of weights,
edits in place, hashes and exports read and write them there. The modules bring weights and activations together
(`model/layers.py`). Blocks on a GPU run on it; all others run on the main device, the first GPU of the map or else the
CPU, as with accelerate. Tokens, logits and residual streams are passed and returned on the main device,
`model.cfg.device`; an activation at a hook point is on the device of its block. A weight "on disk" is a mapped file
without a name in the folder for temporary files, which the system reads when it is used and may drop from memory.
"""

import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from diffusion_lens.model.attention import Attention
from diffusion_lens.model.block import Block
from diffusion_lens.model.config import DTYPES, as_device
from diffusion_lens.model.hook_points import NO_POSITIONS, StepHookPoint
from diffusion_lens.model.layers import Embed, LayerNorm, Linear, Norm, PosEmbed, RMSNorm, Unembed
from diffusion_lens.model.mlp import ACTIVATIONS, ExpertsBesideMLP, GatedMLP, MixtureOfExperts, PlainMLP, Router
from diffusion_lens.model.positions import LinearBiases, OutsideAttention, Positions, Rotary
from diffusion_lens.model.time import SelfConditioning, TimeEmbedding
from weight_conversion import ALIGNMENT, N_FREQUENCIES, Architecture, tensor_shapes

DISK = "disk"
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
DeviceMap = str | int | torch.device | Mapping[str, str | int | torch.device]

# The parts, without weights (on the meta device)


def build_parts(a: Architecture) -> dict[str, nn.Module]:
    """The modules of a network by name."""
    parts: dict[str, nn.Module] = {
        "embed": Embed(a.d_vocab, a.d_model, a.scaled_embedding),
        "hook_embed": StepHookPoint(),
        "blocks": nn.ModuleList(_build_block(a, layer) for layer in range(a.n_layers)),
        "ln_final": _build_norm(a),
        "unembed": Unembed(a.d_model, a.d_vocab_out, a.unembed_bias, a.output_logits_soft_cap),
    }
    if a.self_conditioning:
        parts["self_conditioning"] = SelfConditioning(RMSNorm(a.d_model, a.norm_eps), _build_gated(a, a.d_mlp))
    if a.positional_embedding_type == "standard":
        parts |= {"pos_embed": PosEmbed(a.n_ctx, a.d_model), "hook_pos_embed": StepHookPoint()}
    if a.time is not None:  # An export of a folded network needs these weights too.
        hidden, out = (_linear(width, a.time.d_cond, bias=True) for width in (N_FREQUENCIES, a.time.d_cond))
        parts |= {"time_embed": TimeEmbedding(hidden, out), "final_modulation": _build_modulation(a, 2)}
    if a.time_conditioning:
        parts |= {name: StepHookPoint(NO_POSITIONS) for name in ("hook_time", "hook_final_modulation")}
    return parts


def _build_norm(a: Architecture) -> Norm:
    """A norm of the residual stream."""
    if a.norm == "rms":
        return RMSNorm(a.d_model, a.norm_eps)
    return LayerNorm(a.d_model, a.norm_eps, bias=a.norms_shift, modulated=a.time_conditioning)


def _build_modulation(a: Architecture, vectors: int) -> nn.Linear:
    """The map from the vector of the time to so many vectors of the width of the stream."""
    assert a.time is not None
    return _linear(a.time.d_cond, vectors * a.d_model, bias=True)


def build_positions(a: Architecture) -> Positions:
    positions = _POSITIONS[a.positional_embedding_type](a)
    if a.query_scale is not None:
        positions.query_scale = a.query_scale
    return positions


def build_global_positions(a: Architecture) -> Positions | None:
    """The positions of the global layers, where they have their own."""
    own = a.global_layers
    if own is None:
        return None
    return Rotary(own.d_head, own.rotary_base, DTYPES[a.rotary_dtype], a.rotation, share=own.rotary_share)


def _build_block(a: Architecture, layer: int) -> Block:
    d_head, n_kv_heads = a.head_sizes(layer)
    k = _linear(a.d_model, n_kv_heads * d_head, a.qkv_bias)
    block = Block(
        ln1=_build_norm(a),
        attn=Attention(
            q=_linear(a.d_model, a.n_heads * d_head, a.qkv_bias),
            k=k,
            v=k if a.keys_as_values(layer) else _linear(a.d_model, n_kv_heads * d_head, a.qkv_bias),
            o=_linear(a.n_heads * d_head, a.d_model, a.o_bias),
            d_head=d_head,
            q_norm=RMSNorm(d_head, a.norm_eps) if a.qk_norm else None,
            k_norm=RMSNorm(d_head, a.norm_eps) if a.qk_norm else None,
            clip=a.qkv_clip,
            scale=a.attn_scale,
            v_norm_eps=a.norm_eps if a.v_norm else None,
            is_global=a.is_global(layer),
        ),
        ln2=_build_norm(a),
        mlp=_build_mlp(a, layer),
        modulation=_build_modulation(a, 6) if a.time_conditioning else None,
        posts=_build_norms(a, 2) if a.use_normalization_before_and_after else None,
        scaled=a.layer_scalars,
    )
    if a.time is not None and a.time.folded:
        block.modulation = _build_modulation(a, 6)  # which nothing reads; an export needs it
    return block


def _build_mlp(a: Architecture, layer: int) -> GatedMLP | PlainMLP | MixtureOfExperts:
    experts = a.experts
    if experts is None or not experts.layers[layer]:
        if (a.mlp, a.act_fn) not in _MLPS:
            known = ", ".join(f"mlp={mlp!r} with act_fn={act_fn!r}" for mlp, act_fn in _MLPS)
            raise ValueError(f"there is no MLP of mlp={a.mlp!r} with act_fn={a.act_fn!r}; there are {known}")
        return _MLPS[a.mlp, a.act_fn](a, a.d_mlp)
    router = Router(a.d_model, experts, a.norm_eps)
    mlps = [_build_gated(a, experts.d_expert) for _ in range(experts.n_experts)]
    shared = None if experts.d_shared is None else _build_gated(a, experts.d_shared)
    if experts.own_norms:
        assert shared is not None
        return ExpertsBesideMLP(experts, router, mlps, shared, _build_norms(a, 3))
    return MixtureOfExperts(experts, router, mlps, shared)


def _build_norms(a: Architecture, n: int) -> Any:
    """So many RMSNorms of the residual stream."""
    return tuple(RMSNorm(a.d_model, a.norm_eps) for _ in range(n))


def _build_gated(a: Architecture, width: int) -> GatedMLP:
    gate, up = (_linear(a.d_model, width, a.mlp_bias) for _ in range(2))
    return GatedMLP(gate, up, _linear(width, a.d_model, a.mlp_bias), a.act_fn)


def _build_plain(a: Architecture, width: int) -> PlainMLP:
    return PlainMLP(up=_linear(a.d_model, width, a.mlp_bias), down=_linear(width, a.d_model, a.mlp_bias))


def _linear(d_in: int, d_out: int, bias: bool) -> nn.Linear:
    return Linear(d_in, d_out, bias=bias, device="meta")


_MLPS: dict[tuple[str, str], Callable[[Architecture, int], GatedMLP | PlainMLP]] = {
    **dict.fromkeys((("gated", act_fn) for act_fn in ACTIVATIONS), _build_gated),
    ("plain", "gelu_new"): _build_plain,
}
_POSITIONS: dict[str, Callable[[Architecture], Positions]] = {
    "rotary": lambda a: Rotary(
        a.rotary_dim or a.d_head, a.rotary_base, DTYPES[a.rotary_dtype], a.rotation, a.rotary_scaling
    ),
    "standard": lambda a: OutsideAttention(learned=True),
    "none": lambda a: OutsideAttention(learned=False),
    "alibi": lambda a: LinearBiases(a.n_heads),
}

# Their weights


def load_tensors(
    module: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    placement: "Placement",
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
        if piece.is_meta and not weights[name].is_meta:
            raise ValueError(
                f"{name!r} is on the meta device, as all tensors that are made inside `with torch.device('meta')`, and "
                "has no values: build the model outside; weight_conversion.tensor_shapes(cfg.architecture) gives the "
                "shapes alone"
            )
        if assign and _can_replace(piece, weights[name]):
            weights[name] = piece.detach()
        else:
            weights[name][start:stop].copy_(piece.detach())
        filled[name] = stop
    if missing := [name for name, weight in weights.items() if filled[name] < len(weight)]:
        raise ValueError(f"the tensors lack {', '.join(missing[:4])}, or some of its rows")
    for name, weight in weights.items():
        put_parameter(module, name, nn.Parameter(weight))


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Let a parameter be the one of this name."""
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, parameter)


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


def zero_shifts(a: Architecture) -> Iterator[tuple[str, Tensor]]:
    """The biases of the norms before constants are folded into them."""
    for name, shape in tensor_shapes(a).items():
        if re.search(r"(^|\.)ln\w+\.bias$", name):
            yield name, torch.zeros(shape)


def _can_replace(piece: Tensor, weight: Tensor) -> bool:
    """Whether a tensor can take the place of a weight, and no bit of a result depends on it."""
    kinds = [(each.shape, each.stride(), each.dtype, each.device) for each in (piece, weight)]
    return kinds[0] == kinds[1] and piece.data_ptr() % ALIGNMENT == 0


# Models with the same tensors as weights

_GROUPS: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()


def share_tensors(module: nn.Module, other: nn.Module) -> None:
    """Let the parameters of `module` be those of `other`; a `ValueError` if their names or shapes differ."""
    shapes, theirs = (
        {name: tuple(parameter.shape) for name, parameter in network.named_parameters(remove_duplicate=False)}
        for network in (module, other)
    )
    if different := sorted(shapes.items() ^ theirs.items()):
        raise ValueError(f"networks of different shapes cannot share weights; first at {different[0][0]!r}")
    for name, parameter in list(other.named_parameters(remove_duplicate=False)):
        put_parameter(module, name, parameter)
    group = _GROUPS.setdefault(other, WeakSet([other]))
    group.add(module)
    _GROUPS[module] = group


def sharing(model: nn.Module) -> list[Any]:
    """The other models with the weights of this one. A copy of a model has weights of its own."""
    return [other for other in _GROUPS.get(model, ()) if other is not model]


def require_own_weights(model: nn.Module, change: str) -> None:
    """Raise a `ValueError` if another model has the same weights, which would not know of this change of them."""
    if sharing(model):
        raise ValueError(
            f"{change} rewrites weights that are also those of another model, as in `load_pair` of one checkpoint, and "
            "the other model would compute something else from then on: load the checkpoint for each model "
            "(from_pretrained), or delete the other one"
        )


# Where the weights are


@dataclass(frozen=True)
class Placement:
    """The place of every part of a model.

    Attributes:
        homes: Device of each part by the beginning of its parameters' names, or "disk"; "" for all other parts.
        main: Device of tokens and logits, and of all parts that are not on a GPU.
    """

    homes: Mapping[str, torch.device | str]
    main: torch.device

    @classmethod
    def on(cls, device: str | torch.device) -> "Placement":
        """All parts on one device."""
        return cls({"": torch.device(device)}, torch.device(device))

    @classmethod
    def of(cls, device_map: DeviceMap, model: nn.Module, dtype: torch.dtype) -> "Placement":
        """The placement for a `device_map` of `from_pretrained`; "auto" and the like count bytes in this dtype.

        Raises:
            ValueError: A strategy, device or part is unknown, or a parameter gets no place.
        """
        if isinstance(device_map, str) and device_map in STRATEGIES:
            device_map = _inferred(device_map, model, dtype)
        elif not isinstance(device_map, Mapping):
            device_map = {"": device_map}
        homes = {part: _home(place) for part, place in device_map.items()}
        _check_parts(homes, model)
        gpus = [home for home in homes.values() if isinstance(home, torch.device) and home.type != "cpu"]
        return cls(homes, gpus[0] if gpus else torch.device("cpu"))

    @property
    def is_one_device(self) -> bool:
        """Whether all weights are on the main device."""
        return set(self.homes.values()) == {self.main}

    def home(self, name: str) -> torch.device | str:
        """The device of a part or parameter, or "disk"."""
        return self.homes[max((part for part in self.homes if _is_within(name, part)), key=len)]

    def block_devices(self, blocks: Any) -> tuple[torch.device, ...] | None:
        """The device on which each block runs; `None` if all run on the main device."""
        firsts = [next(block.named_parameters())[0] for block in blocks]
        devices = tuple(self.runs_on(f"blocks.{i}.{name}") for i, name in enumerate(firsts))
        return None if set(devices) == {self.main} else devices

    def runs_on(self, name: str) -> torch.device:
        """The device on which a parameter is used."""
        home = self.home(name)
        return home if isinstance(home, torch.device) and home.type != "cpu" else self.main

    def empty(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for a parameter at its place."""
        home = self.home(name)
        if isinstance(home, torch.device):
            return torch.empty(shape, device=home, dtype=dtype)
        # The file loses its name at once, so that nothing is left of it, however the process ends.
        with tempfile.TemporaryDirectory(prefix="diffusion-lens-", ignore_cleanup_errors=True) as folder:
            path = str(Path(folder) / "weight")
            return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def _is_within(name: str, part: str) -> bool:
    return part == "" or name == part or name.startswith(f"{part}.")


def _home(place: Any) -> torch.device | str:
    if place == DISK:
        return DISK
    if isinstance(place, int) and not isinstance(place, bool):
        place = f"{'cuda' if torch.cuda.is_available() or not torch.backends.mps.is_available() else 'mps'}:{place}"
    if not isinstance(place, str | torch.device):
        raise ValueError(
            f"device_map puts a part on {place!r}; a place is the number of a GPU, a device such as 'cpu' or 'cuda:1', "
            f"or {DISK!r}"
        )
    try:
        device = as_device(place)
    except ValueError as error:
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(f"device_map: {error}; or {DISK!r} in a map, or as the whole map {known}") from None
    return torch.device(device.type, 0) if device.type == "cuda" and device.index is None else device


def _check_parts(homes: Mapping[str, Any], model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    if homeless := [name for name in names if not any(_is_within(name, part) for part in homes)]:
        raise ValueError(
            f"device_map has no place for {', '.join(homeless[:3])}{' and others' if len(homeless) > 3 else ''}: name "
            'the parts that lack one, or give all others a place with the key ""'
        )
    parts = {name for name, _ in model.named_modules()} | set(names)
    if unknown := [part for part in homes if part not in parts]:
        near = get_close_matches(unknown[0], parts, n=3, cutoff=0.0)
        raise ValueError(f"device_map places {unknown[0]!r}, and the model has no such part; nearest are {near}")


def _inferred(strategy: str, model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    # Importing it takes a second.
    from accelerate import infer_auto_device_map  # type: ignore[import-untyped]
    from accelerate.utils import get_balanced_memory, get_max_memory  # type: ignore[import-untyped]

    settings: dict[str, Any] = {"no_split_module_classes": ["Block"], "dtype": dtype}
    most = get_max_memory()
    if strategy != "sequential" and len(most) > 1:
        most = get_balanced_memory(model, most, low_zero=strategy == "balanced_low_0", **settings)
    inferred: dict[str, Any] = infer_auto_device_map(model, max_memory=most, **settings)
    return inferred
