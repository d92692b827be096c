"""`Architecture`, the frozen description of a checkpoint, and the tensors that follow from it.

The configs of all families are read into this one description. The tensor layout (names and shapes) is defined here
and nowhere else; it is the `state_dict` of `diffusion_lens.HookedDiffusionTransformer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

Shape = tuple[int, ...]
PositionKind = Literal["rotary", "standard", "none", "alibi"]

# Upper bounds of the counts, so that a damaged config cannot exhaust the memory before a tensor is read.
_MOST = 2**31 - 1
# Upper bound of the other numbers: an integer in JSON may be too large for a float.
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
    "positional_embedding_type": get_args(PositionKind),
}
_FLAGS = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied")


class Variant:
    """The kind of a model: its attention pattern and its noise, and what follows from these for a text."""

    attention_dir: str
    mask_token_id: int | None

    @property
    def block_size(self) -> int | None:
        """Number of neighbouring positions that see each other and all earlier ones; `None` for the whole text."""
        return 1 if self.attention_dir == "causal" else None

    @property
    def noise(self) -> Literal["absorbing", "uniform"] | None:
        """Noise that training adds: "absorbing" hides tokens behind [MASK]; "uniform" replaces them by other tokens;
        `None` for next-token prediction."""
        if self.mask_token_id is not None:
            return "absorbing"
        return None if self.is_causal else "uniform"

    @property
    def is_causal(self) -> bool:
        """Whether no position sees a later one, so that cached activations stay valid as a text grows."""
        return self.block_size == 1

    @property
    def has_mask(self) -> bool:
        """Whether [MASK] stands at positions still to be written."""
        return self.noise == "absorbing"

    @property
    def grows(self) -> bool:
        """Whether a text grows at its end, so that a canvas contains no tokens at positions still to be written."""
        return self.noise is None


@dataclass(frozen=True)
class RotaryScaling:
    """Rotary frequencies lowered by wavelength, for texts longer than those of pre-training.

    With n for `original_max_position_embeddings`: wavelengths below n / high_freq_factor are kept, those above
    n / low_freq_factor become `factor` times as long, and the frequencies between are interpolated. Nothing depends on
    the length of a text. Source: type "llama3" of transformers, `modeling_rope_utils.py::_compute_llama3_parameters`.

    Attributes:
        factor: Divisor of the low frequencies.
        low_freq_factor, high_freq_factor: Turns within n positions, below and above which frequencies are low and high.
        original_max_position_embeddings: Length of texts in pre-training, in positions.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        if self.factor < 1:
            raise ValueError(f"factor is {self.factor!r}; frequencies are divided by it, so it must be at least 1")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor!r}; it must be above low_freq_factor, "
                f"{self.low_freq_factor!r}"
            )
        check_count("original_max_position_embeddings", self.original_max_position_embeddings)

    @classmethod
    def from_dict(cls, data: object, source: str = "rotary_scaling") -> RotaryScaling:
        """Rebuild a scaling from its fields; a `ValueError` names unknown and missing keys of `source`."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, Mapping):
            raise ValueError(f"{source} is {data!r}; it must be a mapping of {sorted(names)}")
        if unknown := sorted(map(str, set(data) - names)):
            raise ValueError(f"{source} has keys that are not understood: {unknown}")
        if missing := sorted(names - set(data)):
            raise ValueError(f"{source} lacks {missing}; add them")
        return cls(**data)


@dataclass(frozen=True)
class Architecture(Variant):
    """A pre-norm Llama-style transformer: RMSNorm, grouped heads, gated MLP.

    Attributes:
        family: Family of the checkpoint.
        name: Name of the model.
        n_layers, d_model, n_heads, n_key_value_heads, d_head, d_mlp, n_ctx: As in TransformerLens.
        d_vocab: Rows of the embedding. A masked diffusion model of the lit-gpt family embeds one token more, [MASK],
            than it can predict.
        d_vocab_out: Columns of the head.
        attention_dir: Attention pattern.
        readout: Row of the logits that predicts token i: row i ("in_place") or row i - 1 ("shifted").
        mask_token_id: Id of [MASK], or `None`.
        norm_eps: Epsilon of every RMSNorm.
        rotary_base: Base of the rotary frequencies.
        rotary_dtype: Precision to which the cosine and sine tables were rounded in training.
        rotation: Precision in which queries and keys are rotated: "float32", or "activation", the precision of the
            activations for the tables too.
        qkv_bias, o_bias, mlp_bias: Presence of biases in these projections.
        qk_norm: Presence of norms on each head's queries and keys, before the rotation.
        tied: Whether embedding and head are one matrix.
        positional_embedding_type: Kind of positions: "rotary", which all families have; "standard", a learned vector
            of each position; "none"; or "alibi", scores lowered by the distance.
        rotary_scaling: Scaling of the rotary frequencies, or `None`.
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
    positional_embedding_type: PositionKind = "rotary"
    rotary_scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        for name in ("family", "name"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a string")
        for name, most in _COUNTS.items():
            check_count(name, getattr(self, name), most)
        for name in ("norm_eps", "rotary_base"):
            check_positive(name, getattr(self, name))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if self.tied and self.d_vocab != self.d_vocab_out:
            raise ValueError(
                f"tied=True needs as many embedding rows as head columns; d_vocab is {self.d_vocab} and d_vocab_out "
                f"{self.d_vocab_out}"
            )
        if self.n_heads % self.n_key_value_heads:
            raise ValueError(
                f"{self.n_heads} heads cannot share {self.n_key_value_heads} key/value heads: "
                "n_heads must be a multiple of n_key_value_heads"
            )
        if self.d_head % 2 and self.positional_embedding_type == "rotary":
            raise ValueError(
                f"d_head is {self.d_head}; rotary positions rotate pairs of dimensions, so it must be even"
            )
        if not isinstance(self.rotary_scaling, RotaryScaling | None):
            raise ValueError(f"rotary_scaling is {self.rotary_scaling!r}; it must be a RotaryScaling or None")
        if self.rotary_scaling is not None and self.positional_embedding_type != "rotary":
            raise ValueError(
                f"rotary_scaling needs rotary positions, and positional_embedding_type is "
                f"{self.positional_embedding_type!r}: leave one of them out"
            )
        mask = self.mask_token_id
        if mask is not None and (isinstance(mask, bool) or not isinstance(mask, int)):
            raise ValueError(f"mask_token_id is {mask!r}; it must be a token id, a whole number, or null")
        if mask is not None and not 0 <= mask < self.d_vocab:
            raise ValueError(f"mask_token_id {mask} has no row in an embedding of {self.d_vocab} tokens")

    @property
    def n_params(self) -> int:
        """Number of weights, including the embeddings."""
        return sum(math.prod(shape) for shape in tensor_shapes(self).values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `from_dict` is the inverse."""
        data = asdict(self)
        # Files and records of models with rotary positions do not name the kind, nor a scaling that there is not.
        if self.positional_embedding_type == "rotary":
            del data["positional_embedding_type"]
        if self.rotary_scaling is None:
            del data["rotary_scaling"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Architecture:
        """Rebuild an architecture from `to_dict`; a `ValueError` names unknown and missing keys."""
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"unknown architecture keys {unknown}; known are {sorted(known)}")
        if missing := sorted(required - set(data)):
            raise ValueError(f"the architecture lacks {missing}")
        if (scaling := data.get("rotary_scaling")) is not None:
            data = {**data, "rotary_scaling": RotaryScaling.from_dict(scaling)}
        return cls(**data)


def check_positive(name: str, value: object) -> None:
    """Raise a `ValueError` unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0")


def check_count(name: str, count: object, most: int = _MOST) -> None:
    """Raise a `ValueError` unless `count` is a whole number from 1 to `most`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} is {count!r}; it must be a whole number, at least 1")
    if count > most:
        raise ValueError(f"{name} is too large; it must be at most {most:,}")


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
    # Last, so that a seed draws the same other weights for every kind of positions.
    if a.positional_embedding_type == "standard":
        shapes["pos_embed.weight"] = (a.n_ctx, a.d_model)
    return shapes


def every_tensor_name(architecture: Architecture) -> set[str]:
    """All tensor names that our layout has for architectures with this number of layers."""
    flags: dict[str, Any] = {name: name != "tied" for name in _FLAGS}
    flags |= {"positional_embedding_type": "standard", "rotary_scaling": None}
    return set(tensor_shapes(replace(architecture, **flags)))
