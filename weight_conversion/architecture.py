"""What a checkpoint is, as frozen facts, and the tensors that follow from them.

Every family is read into this one description. The tensor layout (names and shapes) is defined here and nowhere else;
it is the `state_dict` of `diffusion_lens.HookedDiffusionTransformer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal

Shape = tuple[int, ...]

# The largest counts that are taken for meant: what is built from them must not eat the machine before a tensor is read.
_MOST = 2**31 - 1
# Larger numbers mean nothing in a network, and an integer of JSON may be too large for a float.
LARGEST = 1e30
_COUNTS = {
    "n_layers": 10_000,
    "d_model": _MOST,
    "n_heads": _MOST,
    "n_key_value_heads": _MOST,
    "d_head": _MOST,
    "d_mlp": _MOST,
    "d_vocab": _MOST,
    "d_vocab_out": _MOST,
    "n_ctx": _MOST,
}

_CHOICES = {
    "attention_dir": ("bidirectional", "causal"),
    "readout": ("in_place", "shifted"),
    "rotary_dtype": ("float32", "bfloat16"),
    "rotation": ("float32", "activation"),
}
_FLAGS = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied")


class Variant:
    """What follows for a text from the kind of attention and from whether there is a [MASK]."""

    attention_dir: str
    mask_token_id: int | None

    @property
    def has_mask(self) -> bool:
        """Whether [MASK] stands at positions still to be written; otherwise a text grows at its end."""
        return self.mask_token_id is not None

    @property
    def is_causal(self) -> bool:
        """Whether no position sees a later one, so that what was computed of a text stays right when it grows."""
        return self.attention_dir == "causal"

    @property
    def reveals_in_order(self) -> bool:
        """Whether positions are written from left to right, each predicted from those before it."""
        return self.is_causal


@dataclass(frozen=True)
class Architecture(Variant):
    """A pre-norm Llama-style transformer: RMSNorm, rotary positions, grouped heads, gated MLP.

    `d_vocab` counts embedding rows, `d_vocab_out` columns of the head: a masked diffusion model of the lit-gpt family
    embeds one token more ([MASK]) than it can write. `rotary_dtype` is the precision to which the checkpoint's own
    cosine and sine tables were rounded in training; `rotation` that in which queries and keys are turned: "float32", or
    "activation", tables and all in the precision of the activations. `qk_norm` normalises each head's queries and keys
    before they turn. `tied` weights serve as embedding and head.
    """

    family: str
    name: str
    n_layers: int
    d_model: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_mlp: int
    d_vocab: int
    d_vocab_out: int
    n_ctx: int
    attention_dir: Literal["bidirectional", "causal"]
    readout: Literal["in_place", "shifted"]
    mask_token_id: int | None
    norm_eps: float = 1e-5
    rotary_base: float = 10000.0
    rotary_dtype: Literal["float32", "bfloat16"] = "float32"
    rotation: Literal["float32", "activation"] = "float32"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("family", "name"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a text")
        for name, most in _COUNTS.items():
            check_count(name, getattr(self, name), most)
        for name in ("norm_eps", "rotary_base"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
                raise ValueError(f"{name} is {value!r}; it must be a number above 0")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if self.tied and self.d_vocab != self.d_vocab_out:
            raise ValueError(f"tied weights cannot embed {self.d_vocab} tokens and write {self.d_vocab_out}")
        if self.n_heads % self.n_key_value_heads:
            raise ValueError(
                f"{self.n_heads} heads cannot share {self.n_key_value_heads} key/value heads: "
                "n_heads must be a multiple of n_key_value_heads"
            )
        if self.d_head % 2:
            raise ValueError(f"d_head is {self.d_head}; rotary positions turn pairs, so it must be even")
        mask = self.mask_token_id
        if mask is not None and (isinstance(mask, bool) or not isinstance(mask, int)):
            raise ValueError(f"mask_token_id is {mask!r}; it must be the whole number of a token, or null")
        if mask is not None and not 0 <= mask < self.d_vocab:
            raise ValueError(f"mask_token_id {mask} has no row in an embedding of {self.d_vocab} tokens")

    @property
    def n_params(self) -> int:
        """Number of weights, embeddings included."""
        return sum(math.prod(shape) for shape in tensor_shapes(self).values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Architecture:
        """Rebuild from `to_dict`; an unknown or missing key is a `ValueError` that names it."""
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"unknown architecture keys {unknown}; known are {sorted(known)}")
        if missing := sorted(required - set(data)):
            raise ValueError(f"the architecture lacks {missing}")
        return cls(**data)


def check_count(name: str, count: object, most: int = _MOST) -> None:
    """Raise a `ValueError` unless `count` is a whole number from 1 to `most`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} is {count!r}; it must be a whole number, at least 1")
    if count > most:
        raise ValueError(f"{name} is larger than that of any network: it must be at most {most:,}")


def tensor_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name and shape of every tensor, in our layout (`[out, in]` for matrices, as in `torch.nn.Linear`)."""
    a = architecture
    queries, keys = a.n_heads * a.d_head, a.n_key_value_heads * a.d_head
    shapes: dict[str, Shape] = {"embed.weight": (a.d_vocab, a.d_model)}
    for i in range(a.n_layers):
        block: dict[str, Shape] = {"ln1.weight": (a.d_model,)}
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            block[f"attn.{name}.weight"] = (rows, a.d_model)
            if a.qkv_bias:
                block[f"attn.{name}.bias"] = (rows,)
        if a.qk_norm:
            block |= {"attn.q_norm.weight": (a.d_head,), "attn.k_norm.weight": (a.d_head,)}
        block["attn.o.weight"] = (a.d_model, queries)
        if a.o_bias:
            block["attn.o.bias"] = (a.d_model,)
        block["ln2.weight"] = (a.d_model,)
        for name, rows, columns in (
            ("gate", a.d_mlp, a.d_model),
            ("up", a.d_mlp, a.d_model),
            ("down", a.d_model, a.d_mlp),
        ):
            block[f"mlp.{name}.weight"] = (rows, columns)
            if a.mlp_bias:
                block[f"mlp.{name}.bias"] = (rows,)
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    shapes["ln_final.weight"] = (a.d_model,)
    if not a.tied:
        shapes["unembed.weight"] = (a.d_vocab_out, a.d_model)
    return shapes


def every_tensor_name(architecture: Architecture) -> set[str]:
    """The names that our layout has for any architecture of this depth."""
    flags: dict[str, Any] = {name: name != "tied" for name in _FLAGS}
    return set(tensor_shapes(replace(architecture, **flags)))
