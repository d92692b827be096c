"""`DiffusionConfig`: TransformerLens's config with the fields that a masked diffusion model adds."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, overload

import torch
from torch import Tensor
from transformer_lens.config import TransformerLensConfig

from weight_conversion import (
    Architecture,
    Experts,
    GlobalLayers,
    NoiseSchedule,
    QueryScale,
    RotaryScaling,
    TimeConditioning,
    Variant,
    YarnScaling,
    mode_read,
    tensor_shapes,
)

# Not a token id: it marks positions of a causal canvas that the text has not reached.
UNREACHED = -1
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Fields of an architecture that the config has under another name or as another type.
_RENAMED = {"name", "family", "norm_eps", "norm", "mlp", "rotary_dtype"}


@dataclass(repr=False)
class DiffusionConfig(Variant, TransformerLensConfig):
    """Config of a model, under TransformerLens's names.

    Fields that an `Architecture` has under the same name mean what they mean there.

    Attributes:
        model_name: Name under which results record the model.
        family: Family of its checkpoint, and default format of an export.
        use_attn_in, use_hook_mlp_in: Whether these optional hook points pass (see `model.optional_hooks`).
        trained_length: Length in positions of the texts that it was last trained on, if it is shorter than `n_ctx`;
            `None` if unknown. It is the default length of a canvas, and not part of the architecture.
    """

    d_vocab_out: int = -1
    mask_token_id: int | None = None
    attention_dir: Literal["bidirectional", "causal", "block_causal"] = "bidirectional"
    causal_block: int | None = None
    block_context: Literal["blocks", "causal", "prompt"] = "blocks"
    readout: Literal["in_place", "shifted"] = "in_place"
    rotary_base: float = 10000.0
    rotary_dtype: torch.dtype = torch.float32
    rotation: Literal["float32", "activation"] = "float32"
    rotary_dim: int | None = None
    query_scale: QueryScale | None = None
    qkv_clip: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    unembed_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    positional_embedding_type: str = "rotary"
    rotary_scaling: RotaryScaling | YarnScaling | None = None
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
    model_name: str = "custom"
    family: str = "diffusion_lens"
    trained_length: int | None = None
    use_attn_in: bool = False
    use_hook_mlp_in: bool = False

    @classmethod
    def from_architecture(
        cls,
        architecture: Architecture,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = torch.float32,
        model_name: str | None = None,
        default_prepend_bos: bool = True,
        trained_length: int | None = None,
        folded: bool = False,
    ) -> "DiffusionConfig":
        """The config of a checkpoint."""
        a, rms = architecture, architecture.norm == "rms"
        return cls(
            **{name: getattr(a, name) for name in _SHARED},
            rotary_dtype=DTYPES[a.rotary_dtype],
            eps=a.norm_eps,
            device=None if device is None else str(as_device(device)),
            dtype=as_dtype(dtype),
            default_prepend_bos=default_prepend_bos,
            model_name=model_name or a.name,
            family=a.family,
            trained_length=trained_length,
            normalization_type=("RMS" if rms else "LN") + ("Pre" if folded else ""),
            layer_norm_folding=folded,
            uses_rms_norm=rms,
            final_rms=rms,
            gated_mlp=a.mlp == "gated",
            num_experts=None if a.experts is None else a.experts.n_experts,
            experts_per_token=None if a.experts is None else a.experts.n_chosen,
        )

    @property
    def architecture(self) -> Architecture:
        """The architecture, for `save_pretrained` and export."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in _SHARED}
        # TransformerLens's config leaves these out where they have their usual value.
        shared["n_key_value_heads"] = self.n_key_value_heads or self.n_heads
        shared["d_vocab_out"] = self.d_vocab_out if self.d_vocab_out > 0 else self.d_vocab
        return Architecture(
            **shared,
            family=self.family,
            name=self.model_name,
            norm_eps=self.eps,
            norm="rms" if self.uses_rms_norm else "layer",
            mlp="gated" if self.gated_mlp else "plain",
            rotary_dtype="bfloat16" if self.rotary_dtype == torch.bfloat16 else "float32",
        )

    @property
    def mode(self) -> str | None:
        """The mode of `from_pretrained(mode=)` in which a checkpoint was read that is several models, else `None`."""
        return mode_read(self.family, self.attention_dir)

    @property
    def name_and_mode(self) -> str:
        """The name under which results and pages show the model: `model_name`, or `model_name@mode`."""
        return name_with_mode(self.model_name, self.mode)

    @property
    def n_params(self) -> int:
        """Number of weights in attention and MLPs, as TransformerLens counts: no embeddings, head, norms or biases."""
        return sum(
            math.prod(shape)
            for name, shape in tensor_shapes(self.architecture).items()
            if ".attn." in name or ".mlp." in name
            if len(shape) == 2
        )

    @property
    def most_units(self) -> int:
        """Hidden units of the widest layer: of its MLP, or of all its experts."""
        return max(self.d_mlp or 0, 0 if self.experts is None else self.experts.n_units)

    @property
    def sizes(self) -> "DiffusionConfig":
        """The config by whose sizes memory is planned: this one, or that of the model for which a narrow network stands
        (`analysis.planned_work`)."""
        sizes: DiffusionConfig = vars(self).get("stands_for", self)
        return sizes

    @property
    def is_on_cpu(self) -> bool:
        """Whether the weights are on the CPU."""
        return torch.device(self.sizes.device or "cpu").type == "cpu"

    @property
    def main_device(self) -> torch.device:
        """The device of tokens, logits and residual streams that are passed and returned."""
        return torch.device(self.device or "cpu")

    @property
    def blank(self) -> int:
        """The id at a position of a canvas that is not yet revealed: the id of [MASK], or `UNREACHED`.

        Raises:
            ValueError: The model is bidirectional and has no [MASK], so every position of its canvas contains a token.
        """
        if self.mask_token_id is not None:
            return self.mask_token_id
        if self.is_autoregressive:
            return UNREACHED
        raise ValueError(
            f"{self.model_name!r} is bidirectional and has no [MASK], so its noise is uniform: every position of its "
            "canvas has a token, and no id marks positions still to be written. What hides tokens behind [MASK] does "
            'not apply to it. If its checkpoint has a [MASK], add its id to the config as "mask_token_id" (within '
            '"architecture" in a config that save_pretrained wrote), and pass this config to from_pretrained(..., '
            "config=)"
        )

    def readable(self, tokens: Tensor) -> Tensor:
        """A canvas for the network, with ids that it embeds where the text has not reached; no position sees them."""
        return tokens.masked_fill(tokens == UNREACHED, self.mask_token_id or 0)

    def writable(self, tokens: Tensor) -> Tensor:
        """True at ids that the model can predict: those with a column in the head, except [MASK]."""
        known = (tokens >= 0) & (tokens < self.d_vocab_out)
        return known if self.mask_token_id is None else known & (tokens != self.mask_token_id)

    def __repr__(self) -> str:
        return super().__repr__().replace("TransformerLensConfig", "DiffusionConfig", 1)


_SHARED = tuple(field.name for field in fields(Architecture) if field.name not in _RENAMED)


@overload
def reached(tokens: int) -> bool: ...
@overload
def reached(tokens: Tensor) -> Tensor: ...
def reached(tokens: int | Tensor) -> bool | Tensor:
    """Whether a position of a canvas contains a token or [MASK]; false where the text has not reached the position."""
    return tokens != UNREACHED


def name_with_mode(name: str, mode: str | None) -> str:
    """`name@mode`, or the name alone where a checkpoint is one model."""
    return name if mode is None else f"{name}@{mode}"


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype of weights, given as a dtype or by name; a `ValueError` for any other."""
    resolved = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if resolved is None or resolved not in DTYPES.values():
        raise ValueError(f"weights cannot have the dtype {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return resolved


def device_named(device: str | torch.device) -> torch.device:
    """A device by name, present on this machine or not; a `ValueError` if the name is unknown or is 'meta'."""
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is unknown; it must be 'cpu', 'cuda', 'cuda:1' or 'mps'") from error
    if resolved.type == "meta":
        raise ValueError("the device 'meta' has no values, so nothing can run there; use 'cpu' or 'cuda'")
    return resolved


def kind_of_device(name: str | None) -> str:
    """Torch's name of a kind of device, such as "cuda", by default the best here; a `ValueError` if it is unknown."""
    if name is not None:
        return device_named(name).type
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def as_device(device: str | torch.device) -> torch.device:
    """A device of this machine, given as a device or by name; a `ValueError` for any other."""
    resolved = device_named(device)
    available = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if resolved.type in available and (resolved.index or 0) >= available[resolved.type]:
        raise ValueError(
            f"device {str(resolved)!r} is not available: torch finds 'cpu' and {available['cuda']} GPUs on this machine"
        )
    if resolved.type not in available:
        try:
            torch.empty(0, device=resolved)
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ValueError(
                f"device {str(resolved)!r} is not available: torch has no backend for it, or there is no such device"
            ) from error
    return resolved
