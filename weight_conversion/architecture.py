"""`Architecture`, the frozen description of a checkpoint, into which the configs of all families are read.

Every class here checks its fields as it is made (`check_fields`), because a config is a file that somebody may have
edited. `key_map.tensor_shapes` lists the tensors that follow from an architecture.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Shape = tuple[int, ...]
Direction = Literal["bidirectional", "causal", "block_causal"]
Context = Literal["blocks", "causal", "prompt"]
PositionKind = Literal["rotary", "standard", "none", "alibi"]

# Upper bounds, so that a damaged config cannot exhaust the memory before a tensor is read, and because an integer in
# JSON may be too large for a float.
MOST, MOST_LAYERS, LARGEST = 2**31 - 1, 10_000, 1e30


def _earlier(name: str, current: str) -> property:
    """The earlier name of a property, which warns."""

    def read(self: Any) -> bool:
        warnings.warn(f"{name} is now called {current}", DeprecationWarning, stacklevel=2)
        return bool(getattr(self, current))

    return property(read, doc=f"Earlier name of `{current}`.")


def _renamed(**current: str) -> Callable[[type[T]], type[T]]:
    """Let a dataclass take and give its fields by their earlier names too, which warn."""

    def decorate(cls: type[T]) -> type[T]:
        init: Any = cls.__init__

        @wraps(init)
        def made(self: Any, *values: Any, **named: Any) -> None:
            for name in current.keys() & named.keys():
                warnings.warn(f"{name}= is now called {current[name]}=", DeprecationWarning, stacklevel=2)
                named[current[name]] = named.pop(name)
            init(self, *values, **named)

        cls.__init__ = made  # type: ignore[method-assign]
        for name in current:
            setattr(cls, name, _earlier(name, current[name]))
        return cls

    return decorate


class Variant:
    """The kind of a model: its attention pattern and its noise, and what follows from these for a text."""

    attention_dir: Direction
    causal_block: int | None
    block_context: Context
    causal_first: bool
    readout: Literal["in_place", "shifted"]
    mask_token_id: int | None
    time: TimeConditioning | None
    n_heads: int
    n_key_value_heads: Any
    d_head: int
    global_layers: GlobalLayers | None

    def is_global(self, layer: int) -> bool:
        """Whether a layer is one of the `global_layers`."""
        return self.global_layers is not None and self.global_layers.layers[layer]

    def keys_as_values(self, layer: int) -> bool:
        """Whether the values of a layer are its keys, before norm and rotation."""
        return self.global_layers is not None and self.global_layers.keys_as_values and self.is_global(layer)

    def head_sizes(self, layer: int) -> tuple[int, int]:
        """Width of a head, and number of key/value heads, of a layer."""
        own = self.global_layers
        if own is None or not own.layers[layer]:
            return self.d_head, self.n_key_value_heads or self.n_heads
        return own.d_head, own.n_key_value_heads

    @property
    def block_size(self) -> int | None:
        """Number of neighbouring positions that see each other and all earlier ones; `None` for the whole text."""
        return 1 if self.attention_dir == "causal" else self.causal_block

    @property
    def final_together(self) -> int | None:
        """Number of neighbouring positions whose states become final together as a text is written; `None` if they all
        depend on the whole text, or on how much of it is the prompt."""
        if self.counts_from_prompt:
            return 1 if self.block_context == "causal" else None
        return self.block_size

    @property
    def counts_from_prompt(self) -> bool:
        """Whether blocks are counted from the end of the prompt, so that a canvas has to say where they begin."""
        return self.block_context != "blocks"

    @property
    def time_conditioning(self) -> bool:
        """Whether the network reads the time of its canvas (`model(tokens, time=...)`)."""
        return self.time is not None and self.time.conditioned

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
    def uniform_noise(self) -> bool:
        """Whether noise is another token, so that every position of a canvas has a token and may change again."""
        return self.noise == "uniform"

    @property
    def opens_blocks(self) -> bool:
        """Whether a canvas is written block after block from left to right: trained so, or as next tokens."""
        return self.is_autoregressive or self.causal_block is not None

    @property
    def is_autoregressive(self) -> bool:
        """Whether a text grows at its end, so that a canvas contains no tokens at positions still to be written."""
        return self.mask_token_id is None and self.is_causal

    grows = _earlier("grows", "is_autoregressive")
    rewrites = _earlier("rewrites", "uniform_noise")
    is_told_time = _earlier("is_told_time", "time_conditioning")


@dataclass(frozen=True)
class Experts:
    """In some layers, a router chooses for each position the few MLPs (experts) that process it.

    The router's scores are its logits after a softmax over all experts, or after a sigmoid. The experts of the highest
    scores are chosen, and the output is the sum of theirs, weighted by the scores.

    Attributes:
        n_experts: Experts in a layer.
        n_chosen: Experts that process a position.
        d_expert: Width of an expert's hidden layer.
        layers: For each layer, whether it has experts; the others have one dense MLP.
        d_shared: Width of an MLP that processes every position beside the experts; `None` without one.
        router: Function from logits to scores, "softmax" or "sigmoid".
        router_dtype: Precision of the logits and the weights: "activation", that of the activations, or "float32", if
            these are less precise. Scores and choice are always computed in float32.
        router_bias: Whether a bias of each expert is added to the scores before the choice.
        bias_weighs: Whether this bias is also a part of the weights.
        normalised: Whether the weights of the chosen experts are divided by their sum.
        scale: Factor of the weights.
        scales: Whether the weight of each expert is multiplied by a trained factor of its own.
        own_norms: Whether the router and the experts read the residual stream itself, each through a norm of its own,
            and the outputs of the experts and of the MLP beside them pass a norm each before they are added up
            (Gemma 4). Otherwise all read what the block's norm gives.
        n_groups, n_chosen_groups: Equal groups of experts, and how many of them, by the sum of their two best scores,
            the experts are chosen from; 1 and 1 without groups.
    """

    n_experts: int
    n_chosen: int
    d_expert: int
    layers: tuple[bool, ...]
    d_shared: int | None = None
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_dtype: Literal["activation", "float32"] = "activation"
    router_bias: bool = False
    bias_weighs: bool = False
    normalised: bool = False
    scale: float = 1.0
    scales: bool = False
    own_norms: bool = False
    n_groups: int = 1
    n_chosen_groups: int = 1

    @property
    def n_units(self) -> int:
        """Hidden units of all experts of a layer."""
        return self.n_experts * self.d_expert + (self.d_shared or 0)

    def has_shared(self, layer: int) -> bool:
        """Whether a layer has an MLP that processes every position beside its experts."""
        return self.d_shared is not None and self.layers[layer]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        check_fields(self)
        if any(not isinstance(layer, bool) for layer in self.layers) or not any(self.layers):
            raise ValueError(f"layers is {self.layers!r}; it must be true or false for each layer, at least once true")
        if self.n_chosen > self.n_experts:
            raise ValueError(f"n_chosen is {self.n_chosen}; it must be at most n_experts, {self.n_experts}")
        if self.own_norms and (self.d_shared is None or self.router_bias):
            raise ValueError("own_norms=True is the arrangement of Gemma 4: give d_shared, and no router_bias")
        if self.n_experts % self.n_groups or self.n_chosen_groups > self.n_groups:
            raise ValueError(
                f"{self.n_experts} experts cannot be chosen from {self.n_chosen_groups} of {self.n_groups} equal groups"
            )


@dataclass(frozen=True)
class GlobalLayers:
    """The layers whose attention has no sliding window, where they differ from the others also in their heads.

    Attributes:
        layers: For each layer, whether it is one of them.
        d_head, n_key_value_heads: As of the other layers, whose numbers the architecture has.
        rotary_base: Base of the rotary frequencies.
        rotary_share: Share of the frequencies by which heads are rotated, from the highest on; the others are 0 (type
            "proportional" of transformers, `_compute_proportional_rope_parameters`).
        keys_as_values: Whether values are the projected keys, before norm and rotation.
    """

    layers: tuple[bool, ...]
    d_head: int
    n_key_value_heads: int
    rotary_base: float
    rotary_share: float = 1.0
    keys_as_values: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        check_fields(self)
        if any(not isinstance(layer, bool) for layer in self.layers):
            raise ValueError(f"layers is {self.layers!r}; it must be true or false for each layer")
        if self.rotary_share > 1 or self.d_head % 2:
            raise ValueError(f"{self}: rotary_share must be at most 1, and d_head even")


@_renamed(told="conditioned")
@dataclass(frozen=True)
class TimeConditioning:
    """Adaptive LayerNorms (adaLN, Peebles and Xie 2023, arXiv 2212.09748): each norm is shifted and scaled, and each
    output gated, by linear functions of one vector, which an MLP computes from the noise level sigma.

    Attributes:
        d_cond: Width of that vector.
        conditioned: Whether the network is given the time. Otherwise sigma is always 0, and the vector a constant.
        folded: Whether the constant shifts, scales and gates are folded into norms and output matrices. The tensors
            from which they were computed are kept, so that an export can undo it.
    """

    d_cond: int
    conditioned: bool
    folded: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.conditioned and self.folded:
            raise ValueError("a time-conditioned network has no constant shifts, scales and gates to fold")


@dataclass(frozen=True)
class NoiseSchedule:
    """The total noise sigma(t) with which a model was trained; a token is noised with probability 1 - exp(-sigma).

    Attributes:
        kind: "log_linear", sigma = -log(1 - (1 - eps) t); "linear", the same with eps = 0, and sigma at most
            -log(eps); or "geometric", sigma = sigma_min^(1 - t) · sigma_max^t.
        eps: Number of the first two.
        sigma_min, sigma_max: Numbers of the last.
    """

    kind: Literal["log_linear", "linear", "geometric"] = "log_linear"
    eps: float = 1e-3
    sigma_min: float = 1e-4
    sigma_max: float = 20.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.eps >= 1 or self.sigma_min >= self.sigma_max:
            raise ValueError(f"{self}: eps must be below 1, and sigma_min below sigma_max")


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

    rope_type: ClassVar[str] = "llama3"
    table_factor: ClassVar[float] = 1.0

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_fields(self)
        if self.factor < 1:
            raise ValueError(f"factor is {self.factor!r}; frequencies are divided by it, so it must be at least 1")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor!r}; it must be above low_freq_factor, "
                f"{self.low_freq_factor!r}"
            )


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): frequencies that turn seldom are divided by `factor`, others are kept.

    A frequency that turns more than `beta_fast` times within the original length is kept, one that turns less than
    `beta_slow` times is divided, and between them a linear ramp over the dimensions mixes the two. Cosine and sine are
    multiplied by an attention factor. Source: type "yarn" of transformers, `_compute_yarn_parameters`.

    Attributes:
        factor: Divisor of the low frequencies. Below 1, as in one published config, it raises them.
        original_max_position_embeddings: Length of texts in pre-training, in positions.
        beta_fast, beta_slow: Turns within that length, above and below which frequencies are fast and slow.
        mscale, mscale_all_dim: Numbers of the attention factor, m(mscale) / m(mscale_all_dim) with
            m(x) = 0.1 x log(factor) + 1; unless both are given it is m(1).
        attention_factor: The attention factor itself, in place of that formula.
        truncate: Whether the ends of the ramp are rounded to whole dimensions.
    """

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast is {self.beta_fast!r}; it must be above beta_slow, {self.beta_slow!r}")

    @property
    def table_factor(self) -> float:
        """The attention factor, by which cosine and sine are multiplied."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1)

    def _magnitude(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class QueryScale:
    """Queries lengthened with the position, by 1 + beta · log(1 + floor(position / original length)) (Llama 4).

    Attributes:
        beta: The slope.
        original_max_position_embeddings: Length of texts in pre-training, below which nothing is scaled.
    """

    beta: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_fields(self)


Scaling = RotaryScaling | YarnScaling
SCALINGS: dict[str, type[RotaryScaling] | type[YarnScaling]] = {
    scaling.rope_type: scaling for scaling in (RotaryScaling, YarnScaling)
}


def scaling_from(data: object, source: str = "rotary_scaling") -> Scaling:
    """A scaling from `scaling_data`; without "rope_type" it is one of type "llama3"."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{source} is {data!r}; it must be a mapping")
    numbers = dict(data)
    rope_type = numbers.pop("rope_type", RotaryScaling.rope_type)
    if rope_type not in SCALINGS:
        raise ValueError(f"{source} is of type {rope_type!r}; it must be one of {', '.join(SCALINGS)}")
    return part_from(SCALINGS[rope_type], numbers, source)


def scaling_data(scaling: Scaling) -> dict[str, Any]:
    """A scaling as plain data; the type "llama3" is not named, as in the files of earlier versions."""
    named = {} if isinstance(scaling, RotaryScaling) else {"rope_type": scaling.rope_type}
    return {**named, **{name: value for name, value in asdict(scaling).items() if value is not None}}


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
        window: Positions that a token of a context sees in the layers that are not `global_layers`, itself included;
            the open block sees as many less one before it. `None` for all.
        global_layers: Layers without the window, with heads of their own, or `None`.
        v_norm: Presence of a norm without weights on each head's values.
        attn_scale: Divisor of the scores, under TransformerLens's name; `None` for the square root of `d_head`.
        use_normalization_before_and_after: Presence of norms on the outputs of attention and MLP before they are added
            to the stream, under TransformerLens's name.
        layer_scalars: Whether each block ends with a factor of the whole stream.
        scaled_embedding: Whether embedding vectors are multiplied by the square root of `d_model`.
        output_logits_soft_cap: The c of logits c tanh(x / c), under TransformerLens's name; `None` without it.
        self_conditioning: Whether the embedding of the open block is changed by what the step before predicted.
        unread_tokens: Ids that stand for images or other input that the network here does not read.
        causal_first: Whether the first token sees only itself, although attention is bidirectional. So it is the
            attention sink that it is in the causal model of which a twin was made.
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
    window: int | None = None
    global_layers: GlobalLayers | None = None
    v_norm: bool = False
    attn_scale: float | None = None
    use_normalization_before_and_after: bool = False
    layer_scalars: bool = False
    scaled_embedding: bool = False
    output_logits_soft_cap: float | None = None
    self_conditioning: bool = False
    unread_tokens: tuple[int, ...] = ()
    causal_first: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "unread_tokens", tuple(self.unread_tokens))
        check_count("n_layers", self.n_layers, MOST_LAYERS)
        check_fields(self, unless=("mask_token_id",))
        self._check_heads()
        if (self.attention_dir == "block_causal") != (self.causal_block is not None):
            raise ValueError(
                f"attention_dir is {self.attention_dir!r} and causal_block {self.causal_block!r}: attention by blocks "
                "needs the number of positions in a block, and no other attention has one"
            )
        if self.counts_from_prompt and self.causal_block is None:
            raise ValueError(f"block_context={self.block_context!r} needs attention_dir='block_causal'")
        if self.causal_first and self.attention_dir != "bidirectional":
            raise ValueError(
                f"causal_first=True needs attention_dir='bidirectional', and it is {self.attention_dir!r}: leave "
                "causal_first out"
            )
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
        for name, part in (("experts", self.experts), ("global_layers", self.global_layers)):
            if part is not None and len(part.layers) != self.n_layers:
                raise ValueError(
                    f"{name} says of {len(part.layers)} layers whether they are such, and n_layers is {self.n_layers}"
                )
        if self.self_conditioning and self.d_vocab != self.d_vocab_out:
            raise ValueError(
                f"self_conditioning=True embeds what was predicted, so that d_vocab_out, {self.d_vocab_out}, must be "
                f"d_vocab, {self.d_vocab}"
            )
        in_open_block = [name for name in ("window", "layer_scalars", "self_conditioning") if getattr(self, name)]
        if in_open_block and not self.counts_from_prompt:
            raise ValueError(f"{in_open_block[0]} needs a block_context, which says where the open block begins")

    def _check_heads(self) -> None:
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
        elif given := [name for name in ("rotary_scaling", "rotary_dim") if getattr(self, name) is not None]:
            raise ValueError(
                f"{given[0]} needs rotary positions, and positional_embedding_type is "
                f"{self.positional_embedding_type!r}: leave one of them out"
            )
        if self.rotary_dim is not None:
            check_count("rotary_dim", self.rotary_dim, self.d_head)
            if self.rotary_dim % 2:
                raise ValueError(
                    f"rotary_dim is {self.rotary_dim}; dimensions are rotated in pairs, so it must be even"
                )

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
            for later in ("scales", "own_norms"):
                if not data["experts"][later]:
                    del data["experts"][later]
        if self.global_layers is not None:
            data["global_layers"] |= {"layers": list(self.global_layers.layers)}
        if self.unread_tokens:
            data["unread_tokens"] = list(self.unread_tokens)
        if self.time is not None:
            data["time"] = _with_names(data["time"], {"conditioned": TIME_KEY})
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Architecture:
        """Rebuild an architecture from `to_dict`; a `ValueError` names unknown and missing keys."""
        parts: dict[str, Any] = {}
        if isinstance(data.get("time"), Mapping):
            data = {**data, "time": _with_names(data["time"], {TIME_KEY: "conditioned"})}
        for name, kind in _PARTS.items():
            if data.get(name) is not None:
                parts[name] = scaling_from(data[name]) if kind is Scaling else part_from(kind, data[name], name)
        return part_from(cls, {**data, **parts}, "the architecture")


_PARTS: dict[str, Any] = {
    "rotary_scaling": Scaling,
    "query_scale": QueryScale,
    "time": TimeConditioning,
    "schedule": NoiseSchedule,
    "experts": Experts,
    "global_layers": GlobalLayers,
}
TIME_KEY = "told"  # Key of `TimeConditioning.conditioned` in files and records, which stays that of earlier versions.
# Files and records do not name these where a model has none of them, so that those of earlier versions stay the same.
_LATER = fields(Architecture)[[field.name for field in fields(Architecture)].index("positional_embedding_type") :]


def _with_names(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in data.items()}


def check_fields(part: Any, unless: tuple[str, ...] = ()) -> None:
    """Raise a `ValueError` unless the fields of a dataclass fit their annotations, and numbers are positive.

    An int must be a whole number from 1 to `MOST`, a float a finite number above 0.
    """
    cls: Any = type(part)
    for name, (kinds, optional) in _annotations(cls).items():
        value = getattr(part, name)
        if name in unless or (optional and value is None):
            continue
        if get_origin(kinds[0]) is Literal:
            if value not in (allowed := get_args(kinds[0])):
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        elif kinds == (int,):
            check_count(name, value)
        elif kinds == (float,):
            if not is_positive(value):
                raise ValueError(f"{name} is {value!r}; it must be a number above 0")
        elif not get_args(kinds[0]) and not isinstance(value, kinds):
            wanted = {bool: "true or false", str: "a string"}.get(kinds[0])
            wanted = wanted or " or ".join([*(f"a {kind.__name__}" for kind in kinds), "None"])
            raise ValueError(f"{name} is {value!r}; it must be {wanted}")


def is_positive(value: object) -> bool:
    """Whether this is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST


def check_count(name: str, count: object, most: int = MOST) -> None:
    """Raise a `ValueError` unless `count` is a whole number from 1 to `most`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} is {count!r}; it must be a whole number, at least 1")
    if count > most:
        raise ValueError(f"{name} is too large; it must be at most {most:,}")


def part_from(cls: type[T], data: object, source: str) -> T:
    """A dataclass from a mapping of its fields; a `ValueError` names unknown and missing keys of `source`."""
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    required = {field.name for field in fields(cls) if field.default is MISSING}  # type: ignore[arg-type]
    if not isinstance(data, Mapping):
        raise ValueError(f"{source} is {data!r}; it must be a mapping of {sorted(names)}")
    if unknown := sorted(map(str, set(data) - names)):
        raise ValueError(f"{source} has keys that are not understood: {unknown}")
    if missing := sorted(required - set(data)):
        raise ValueError(f"{source} lacks {missing}; add them")
    values: dict[str, Any] = dict(data)
    return cls(**values)


@cache
def _annotations(cls: type) -> dict[str, tuple[tuple[Any, ...], bool]]:
    """For each field its types without None, and whether it may be None."""
    hints = get_type_hints(cls)
    found = {}
    for field in fields(cls):
        hint = hints[field.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
        found[field.name] = tuple(kind for kind in kinds if kind is not NoneType), NoneType in kinds
    return found
