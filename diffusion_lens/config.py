"""`DiffusionConfig`: TransformerLens's config with the fields that a masked diffusion model adds."""

from dataclasses import dataclass
from typing import Literal, cast, overload

import torch
from torch import Tensor
from transformer_lens.config import TransformerLensConfig

from weight_conversion import Architecture, PositionKind, RotaryScaling, Variant

# Not a token id: it marks positions of a causal canvas that the text has not reached.
UNREACHED = -1
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
ROTARY_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(repr=False)
class DiffusionConfig(Variant, TransformerLensConfig):
    """Config of a model, under TransformerLens's names.

    Attributes:
        d_vocab_out: Columns of the head. SMDM embeds [MASK] (counted in `d_vocab`) but has no column for it; no family
            ever predicts it.
        mask_token_id: Id of [MASK]; `None` for a model without it.
        attention_dir: Attention direction, "bidirectional" or "causal".
        readout: Row of the logits that predicts token i: "in_place" (row i) or "shifted" (row i-1).
        rotary_base: Base of the rotary frequencies.
        rotary_dtype: Precision to which the cosine and sine tables are rounded before use.
        rotation: Precision in which queries and keys are rotated: "float32", or "activation" for the activations'.
        qkv_bias, o_bias, mlp_bias: Presence of biases in these projections.
        qk_norm: Presence of norms on each head's queries and keys, before the rotation.
        tied: Whether embedding and head are one matrix.
        positional_embedding_type: Kind of positions, "rotary", "standard" (learned vectors), "none" or "alibi".
        rotary_scaling: Scaling of the rotary frequencies, or `None`.
        model_name: Name under which results record the model.
        family: Family of its checkpoint, and default format of an export.
        use_attn_in, use_hook_mlp_in: Whether these optional hook points pass (see `model.optional_hooks`).
        trained_length: Length in positions of the texts that it was last trained on, if it is shorter than `n_ctx`;
            `None` if unknown. It is the default length of a canvas, and not part of the architecture.
    """

    d_vocab_out: int = -1
    mask_token_id: int | None = None
    attention_dir: Literal["bidirectional", "causal"] = "bidirectional"
    readout: Literal["in_place", "shifted"] = "in_place"
    rotary_base: float = 10000.0
    rotary_dtype: torch.dtype = torch.float32
    rotation: Literal["float32", "activation"] = "float32"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    positional_embedding_type: str = "rotary"
    rotary_scaling: RotaryScaling | None = None
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
        """The config of a checkpoint.

        Args:
            architecture: Architecture of the checkpoint.
            device: Device of the model; by default the GPU if there is one.
            dtype: Precision of the weights.
            model_name: Name under which results record the model; by default the architecture's.
            default_prepend_bos: Whether texts begin with BOS by default.
            trained_length: Trained length, as in the attribute.
            folded: Whether the norms' weights are folded into the projections (`layer_norm_folding`).

        Raises:
            ValueError: Weights cannot have this dtype, or this machine does not have the device.
        """
        a = architecture
        return cls(
            d_model=a.d_model,
            d_head=a.d_head,
            n_layers=a.n_layers,
            n_ctx=a.n_ctx,
            n_heads=a.n_heads,
            n_key_value_heads=a.n_key_value_heads,
            d_mlp=a.d_mlp,
            d_vocab=a.d_vocab,
            d_vocab_out=a.d_vocab_out,
            mask_token_id=a.mask_token_id,
            attention_dir=a.attention_dir,
            readout=a.readout,
            rotary_base=a.rotary_base,
            rotary_dtype=ROTARY_DTYPES[a.rotary_dtype],
            rotation=a.rotation,
            qkv_bias=a.qkv_bias,
            o_bias=a.o_bias,
            mlp_bias=a.mlp_bias,
            qk_norm=a.qk_norm,
            tied=a.tied,
            eps=a.norm_eps,
            device=None if device is None else str(as_device(device)),
            dtype=as_dtype(dtype),
            default_prepend_bos=default_prepend_bos,
            model_name=model_name or a.name,
            family=a.family,
            trained_length=trained_length,
            positional_embedding_type=a.positional_embedding_type,
            rotary_scaling=a.rotary_scaling,
            normalization_type="RMSPre" if folded else "RMS",
            layer_norm_folding=folded,
            uses_rms_norm=True,
            final_rms=True,
            gated_mlp=True,
            act_fn="silu",
        )

    @property
    def architecture(self) -> Architecture:
        """The architecture, for `save_pretrained` and export."""
        assert self.d_mlp is not None
        return Architecture(
            family=self.family,
            name=self.model_name,
            n_layers=self.n_layers,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_key_value_heads=self.n_key_value_heads or self.n_heads,
            d_head=self.d_head,
            d_mlp=self.d_mlp,
            d_vocab=self.d_vocab,
            d_vocab_out=self.d_vocab_out if self.d_vocab_out > 0 else self.d_vocab,
            n_ctx=self.n_ctx,
            attention_dir=self.attention_dir,
            readout=self.readout,
            mask_token_id=self.mask_token_id,
            norm_eps=self.eps,
            rotary_base=self.rotary_base,
            rotary_dtype="bfloat16" if self.rotary_dtype == torch.bfloat16 else "float32",
            rotation=self.rotation,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            tied=self.tied,
            positional_embedding_type=cast(PositionKind, self.positional_embedding_type),
            rotary_scaling=self.rotary_scaling,
        )

    @property
    def n_params(self) -> int:
        """Number of weights in attention and MLPs, as TransformerLens counts: no embeddings, head, norms or biases."""
        a = self.architecture
        return a.n_layers * a.d_model * (2 * (a.n_heads + a.n_key_value_heads) * a.d_head + 3 * a.d_mlp)

    @property
    def is_on_cpu(self) -> bool:
        """Whether the weights are on the CPU."""
        return torch.device(self.device or "cpu").type == "cpu"

    @property
    def blank(self) -> int:
        """The id at a position of a canvas that is not yet revealed: the id of [MASK], or `UNREACHED`.

        Raises:
            ValueError: The model is bidirectional and has no [MASK], so every position of its canvas contains a token.
        """
        if self.mask_token_id is not None:
            return self.mask_token_id
        if self.grows:
            return UNREACHED
        raise ValueError(
            f"{self.model_name!r} is bidirectional and has no [MASK], so no id marks positions still to be written. If "
            'its checkpoint has a [MASK], add its id to the config as "mask_token_id" (within "architecture" in a '
            "config that save_pretrained wrote), and pass this config to from_pretrained(..., config=)"
        )

    def writable(self, tokens: Tensor) -> Tensor:
        """True at ids that the model can predict: those with a column in the head, except [MASK]."""
        known = (tokens >= 0) & (tokens < self.d_vocab_out)
        return known & (tokens != self.blank) if self.has_mask else known

    def __repr__(self) -> str:
        return super().__repr__().replace("TransformerLensConfig", "DiffusionConfig", 1)


@overload
def reached(tokens: int) -> bool: ...
@overload
def reached(tokens: Tensor) -> Tensor: ...
def reached(tokens: int | Tensor) -> bool | Tensor:
    """Whether a position of a canvas contains a token or [MASK]; false where the text has not reached the position."""
    return tokens != UNREACHED


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
