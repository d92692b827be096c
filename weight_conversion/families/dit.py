"""The diffusion transformer (DiT) of MDLM, SEDD and their relatives: one table of tensors and one architecture.

Bidirectional blocks (block-causal in BD3LM) with LayerNorms, a fused projection of queries, keys and values, rotary
positions, a plain GELU MLP with biases, and a head with a bias. All but RADD have adaptive LayerNorms that read the
noise level; where the config switches that off, the level is always 0. Sources: kuleshov-group/mdlm `models/dit.py`;
louaaron/Score-Entropy-Discrete-Diffusion `model/transformer.py`; ML-GSAI/RADD `model/transformer.py`.
"""

from __future__ import annotations

from typing import Any

from weight_conversion.architecture import Architecture
from weight_conversion.key_map import Rule
from weight_conversion.layouts import Stacked

_BLOCK = "blocks.{i}."
_TABLE = (
    Rule("vocab_embed.embedding", ("embed.weight",)),
    Rule("sigma_map.mlp.0.weight", ("time_embed.hidden.weight",)),
    Rule("sigma_map.mlp.0.bias", ("time_embed.hidden.bias",)),
    Rule("sigma_map.mlp.2.weight", ("time_embed.out.weight",)),
    Rule("sigma_map.mlp.2.bias", ("time_embed.out.bias",)),
    Rule(_BLOCK + "norm1.weight", (_BLOCK + "ln1.weight",)),
    Rule(_BLOCK + "norm1.bias", (_BLOCK + "ln1.bias",)),
    Rule(
        _BLOCK + "attn_qkv.weight",
        (_BLOCK + "attn.q.weight", _BLOCK + "attn.k.weight", _BLOCK + "attn.v.weight"),
        Stacked(),
    ),
    Rule(_BLOCK + "attn_out.weight", (_BLOCK + "attn.o.weight",)),
    Rule(_BLOCK + "norm2.weight", (_BLOCK + "ln2.weight",)),
    Rule(_BLOCK + "norm2.bias", (_BLOCK + "ln2.bias",)),
    Rule(_BLOCK + "mlp.0.weight", (_BLOCK + "mlp.up.weight",)),
    Rule(_BLOCK + "mlp.0.bias", (_BLOCK + "mlp.up.bias",)),
    Rule(_BLOCK + "mlp.2.weight", (_BLOCK + "mlp.down.weight",)),
    Rule(_BLOCK + "mlp.2.bias", (_BLOCK + "mlp.down.bias",)),
    Rule(_BLOCK + "adaLN_modulation.weight", (_BLOCK + "modulation.weight",)),
    Rule(_BLOCK + "adaLN_modulation.bias", (_BLOCK + "modulation.bias",)),
    Rule("output_layer.norm_final.weight", ("ln_final.weight",)),
    Rule("output_layer.norm_final.bias", ("ln_final.bias",)),
    Rule("output_layer.linear.weight", ("unembed.weight",)),
    Rule("output_layer.linear.bias", ("unembed.bias",)),
    Rule("output_layer.adaLN_modulation.weight", ("final_modulation.weight",)),
    Rule("output_layer.adaLN_modulation.bias", ("final_modulation.bias",)),
)
# Rotary frequencies, and the range of noise on which a block-diffusion model was last trained.
_BUFFERS = ("rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max")


def rules(prefix: str = "") -> tuple[Rule, ...]:
    """The table, with what stands before every name in the checkpoint."""
    return tuple(Rule(prefix + rule.theirs, rule.ours, rule.layout) for rule in _TABLE)


def ignored(prefix: str = "") -> tuple[str, ...]:
    """Names of the buffers, which the network does not need; those of the wrapping class have no prefix."""
    return tuple(dict.fromkeys(name for buffer in _BUFFERS for name in (prefix + buffer, buffer)))


def architecture(
    *, family: str, name: str, width: int, n_heads: int, n_layers: int, d_vocab: int, n_ctx: int, **more: Any
) -> Architecture:
    """The architecture, from the numbers that every config gives.

    Args:
        more: Further fields: the time, the noise, [MASK] and the attention pattern.
    """
    # [MASK] has a column, which takes no part in the softmax.
    head = "logits" if more.get("mask_token_id") is None else "subs"
    if width % n_heads:
        raise ValueError(f"a stream of width {width} cannot be divided among {n_heads} heads")
    return Architecture(
        **{"attention_dir": "bidirectional", "head": head, **more},
        family=family,
        name=name,
        n_layers=n_layers,
        d_model=width,
        n_heads=n_heads,
        n_key_value_heads=n_heads,
        d_head=width // n_heads,
        d_mlp=4 * width,
        d_vocab=d_vocab,
        d_vocab_out=d_vocab,
        n_ctx=n_ctx,
        readout="in_place",
        mlp_bias=True,
        norm="layer",
        mlp="plain",
        act_fn="gelu_new",
        unembed_bias=True,
    )
