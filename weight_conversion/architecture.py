"""`Architecture`, the frozen description of a checkpoint.

The configs of all families are read into this one description. The tensors that follow from it are listed in
`tensor_shapes`, and counted by `n_params`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, get_args

from weight_conversion.checks import MOST, check_choice, check_count, check_flag, check_positive, part_from
from weight_conversion.conditioning import NoiseSchedule, TimeConditioning
from weight_conversion.experts import Experts
from weight_conversion.rotary_scaling import QueryScale, RotaryScaling, Scaling, YarnScaling, scaling_data, scaling_from
from weight_conversion.variant import Context, Direction, Variant

Shape = tuple[int, ...]
PositionKind = Literal["rotary", "standard", "none", "alibi"]

MOST_LAYERS = 10_000
_COUNTS = {
    "n_layers": MOST_LAYERS,
    "d_model": MOST,
    "n_heads": MOST,
    "n_key_value_heads": MOST,
    "d_head": MOST,
    "d_mlp": MOST,
    "d_vocab": MOST,
    "d_vocab_out": MOST,
    "n_ctx": MOST,
}

_CHOICES: dict[str, tuple[str, ...]] = {
    "attention_dir": get_args(Direction),
    "block_context": get_args(Context),
    "readout": ("in_place", "shifted"),
    "rotary_dtype": ("float32", "bfloat16"),
    "rotation": ("float32", "activation"),
    "positional_embedding_type": get_args(PositionKind),
    "norm": ("rms", "layer"),
    "mlp": ("gated", "plain"),
    "act_fn": ("silu", "gelu_new"),
    "head": ("logits", "subs", "log_scores"),
}
_FLAGS = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied", "norm_bias", "unembed_bias")
_PARTS: dict[str, type[Any] | tuple[type[Any], ...]] = {
    "rotary_scaling": (RotaryScaling, YarnScaling),
    "query_scale": QueryScale,
    "time": TimeConditioning,
    "schedule": NoiseSchedule,
    "experts": Experts,
}


@dataclass(frozen=True)
class Architecture(Variant):
    """A pre-norm transformer: norms, grouped heads, dense MLPs or experts.

    Attributes:
        family: Family of the checkpoint.
        name: Name of the model.
        n_layers, d_model, n_heads, n_key_value_heads, d_head, d_mlp, n_ctx: As in TransformerLens.
        d_vocab: Rows of the embedding. A masked diffusion model of the lit-gpt family embeds one token more, [MASK],
            than it can predict.
        d_vocab_out: Columns of the head.
        attention_dir: Attention pattern. "block_causal": a position sees its own block of positions and all earlier
            ones.
        readout: Row of the logits that predicts token i: row i ("in_place") or row i - 1 ("shifted").
        mask_token_id: Id of [MASK], or `None`.
        norm_eps: Epsilon of every norm.
        rotary_base: Base of the rotary frequencies.
        rotary_dtype: Precision to which the cosine and sine tables were rounded in training.
        rotation: Precision in which queries and keys are rotated: "float32", or "activation", the precision of the
            activations for the tables too.
        qkv_bias, o_bias, mlp_bias, unembed_bias: Presence of biases in these projections.
        qk_norm: Presence of norms on each head's queries and keys, before the rotation.
        tied: Whether embedding and head are one matrix.
        positional_embedding_type: Kind of positions: "rotary", which all families have; "standard", a learned vector
            of each position; "none"; or "alibi", scores lowered by the distance.
        rotary_scaling: Scaling of the rotary frequencies, or `None`.
        causal_block: Positions in a block of "block_causal" attention; `None` for the other patterns.
        block_context: How text before the open block is read in "block_causal" attention: "blocks", in blocks that are
            counted from the first token; "causal", every token sees earlier ones only, and blocks are counted from the
            end of the prompt; or "prompt", the prompt is one block of any length, and blocks are counted from its end.
        rotary_dim: Dimensions of each head that are rotated, from the first one on; `None` for all.
        query_scale: Scaling of the queries by position, or `None`.
        qkv_clip: Bound to which queries, keys and values are clipped, before the rotation; `None` for none.
        norm: Kind of the norms: "rms" (RMSNorm) or "layer" (LayerNorm).
        norm_bias: Presence of biases in the LayerNorms.
        mlp: "gated", down(act(gate x) · up x), or "plain", down(act(up x)).
        act_fn: Activation function, under TransformerLens's name; "gelu_new" is GELU by tanh.
        experts: The experts in place of the MLP, or `None`.
        time: How the network is conditioned on the time, or `None` where it is not.
        schedule: Schedule of noise of the training, where samplers and losses depend on it; `None` if unknown.
        head: Meaning of the head's output: "logits" of the clean tokens; "subs", the same where a softmax without
            [MASK] gives their probabilities (MDLM, Sahoo et al. 2024, arXiv 2406.07524); or "log_scores", logarithms of
            the ratios p_t(y) / p_t(x) of the noised distribution (SEDD, Lou et al. 2023, arXiv 2310.16834).
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
    attention_dir: Direction
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
    rotary_scaling: Scaling | None = None
    causal_block: int | None = None
    block_context: Context = "blocks"
    rotary_dim: int | None = None
    query_scale: QueryScale | None = None
    qkv_clip: float | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    mlp: Literal["gated", "plain"] = "gated"
    act_fn: Literal["silu", "gelu_new"] = "silu"
    unembed_bias: bool = False
    experts: Experts | None = None
    time: TimeConditioning | None = None
    schedule: NoiseSchedule | None = None
    head: Literal["logits", "subs", "log_scores"] = "logits"

    def __post_init__(self) -> None:
        for name in ("family", "name"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a string")
        for name, most in _COUNTS.items():
            check_count(name, getattr(self, name), most)
        for name in ("norm_eps", "rotary_base"):
            check_positive(name, getattr(self, name))
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        for name, types in _PARTS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, types):
                known = types if isinstance(types, tuple) else (types,)
                a = " or ".join(f"a {kind.__name__}" for kind in known)
                raise ValueError(f"{name} is {value!r}; it must be {a} or None")
        self._check_heads()
        self._check_attention()
        mask = self.mask_token_id
        if mask is not None and (isinstance(mask, bool) or not isinstance(mask, int)):
            raise ValueError(f"mask_token_id is {mask!r}; it must be a token id, a whole number, or null")
        if mask is not None and not 0 <= mask < self.d_vocab:
            raise ValueError(f"mask_token_id {mask} has no row in an embedding of {self.d_vocab} tokens")
        if self.tied and self.d_vocab != self.d_vocab_out:
            raise ValueError(
                f"tied=True needs as many embedding rows as head columns; d_vocab is {self.d_vocab} and d_vocab_out "
                f"{self.d_vocab_out}"
            )
        if self.norm == "rms" and (self.norm_bias or self.time is not None):
            given = "norm_bias=True" if self.norm_bias else "time="
            raise ValueError(f"{given} needs norm='layer': an RMSNorm has no bias, and the time shifts none")
        if self.experts is not None and len(self.experts.layers) != self.n_layers:
            raise ValueError(
                f"experts says of {len(self.experts.layers)} layers whether they have experts, and n_layers is "
                f"{self.n_layers}"
            )

    def _check_heads(self) -> None:
        """Raise a `ValueError` unless heads and rotary positions fit each other."""
        if self.n_heads % self.n_key_value_heads:
            raise ValueError(
                f"{self.n_heads} heads cannot share {self.n_key_value_heads} key/value heads: "
                "n_heads must be a multiple of n_key_value_heads"
            )
        if self.positional_embedding_type == "rotary":
            if self.d_head % 2:
                raise ValueError(
                    f"d_head is {self.d_head}; rotary positions rotate pairs of dimensions, so it must be even"
                )
        else:
            for name in ("rotary_scaling", "rotary_dim"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} needs rotary positions, and positional_embedding_type is "
                        f"{self.positional_embedding_type!r}: leave one of them out"
                    )
        if self.rotary_dim is not None:
            check_count("rotary_dim", self.rotary_dim, self.d_head)
            if self.rotary_dim % 2:
                raise ValueError(
                    f"rotary_dim is {self.rotary_dim}; dimensions are rotated in pairs, so it must be even"
                )
        if self.qkv_clip is not None:
            check_positive("qkv_clip", self.qkv_clip)

    def _check_attention(self) -> None:
        """Raise a `ValueError` unless a block size is given for attention by blocks, and for no other."""
        if (self.attention_dir == "block_causal") != (self.causal_block is not None):
            raise ValueError(
                f"attention_dir is {self.attention_dir!r} and causal_block {self.causal_block!r}: attention by blocks "
                "needs the number of positions in a block, and no other attention has one"
            )
        if self.causal_block is not None:
            check_count("causal_block", self.causal_block)
        if self.counts_from_prompt and self.causal_block is None:
            raise ValueError(f"block_context={self.block_context!r} needs attention_dir='block_causal'")

    @property
    def norms_shift(self) -> bool:
        """Whether the norms have biases, their own or folded shifts."""
        return self.norm_bias or (self.time is not None and self.time.folded)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `from_dict` is the inverse."""
        data = asdict(self)
        for field in _LATER:
            if getattr(self, field.name) == field.default:
                del data[field.name]
        if self.rotary_scaling is not None:
            data["rotary_scaling"] = scaling_data(self.rotary_scaling)
        if self.experts is not None:
            data["experts"] |= {"layers": list(self.experts.layers)}
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
        parts: dict[str, Any] = {}
        for name, kind in _PARTS.items():
            if data.get(name) is not None:
                parts[name] = part_from(kind, data[name], name) if isinstance(kind, type) else scaling_from(data[name])
        return cls(**{**data, **parts})


# Files and records do not name these where a model has none of them, so that those of earlier versions stay the same.
_LATER = fields(Architecture)[[field.name for field in fields(Architecture)].index("positional_embedding_type") :]
