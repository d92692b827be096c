"""Hugging Face's Llama with the weights of one of our models: an independent reference for numbers and speed."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from diffusion_lens import HookedDiffusionTransformer

_TOP = {"embed": "model.embed_tokens", "ln_final": "model.norm", "unembed": "lm_head"}
_BLOCK = {
    "ln1": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "ln2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def hugging_face_llama(model: HookedDiffusionTransformer, attn_implementation: str = "sdpa") -> LlamaForCausalLM:
    """Hugging Face's implementation of the same network. It is causal; `everything_visible` makes it bidirectional."""
    cfg = model.cfg
    if cfg.d_vocab != cfg.d_vocab_out or cfg.rotary_dtype != torch.float32:
        raise ValueError("Hugging Face's Llama has no mask row and no rounded rotary tables")
    scaled = cfg.rotary_scaling
    scaling = {"rope_type": "default"} if scaled is None else {"rope_type": "llama3", **asdict(scaled)}
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=cfg.d_vocab,
            hidden_size=cfg.d_model,
            intermediate_size=cfg.d_mlp,
            num_hidden_layers=cfg.n_layers,
            num_attention_heads=cfg.n_heads,
            num_key_value_heads=cfg.n_key_value_heads,
            head_dim=cfg.d_head,
            max_position_embeddings=cfg.n_ctx,
            rms_norm_eps=cfg.eps,
            rope_parameters={"rope_theta": cfg.rotary_base, **scaling},
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation=attn_implementation,
        )
    )
    llama.load_state_dict({_their_name(name): weight for name, weight in model.state_dict().items()})
    return llama.eval()


def everything_visible(tokens: Tensor) -> Tensor:
    """A 4-d additive attention mask with which every position attends to every position."""
    batch, pos = tokens.shape
    return torch.zeros(batch, 1, pos, pos)


def run_with_edited_mlp(
    llama: LlamaForCausalLM,
    visible: bool,
    tokens: Tensor,
    real: Tensor,
    layer: int,
    edit: Callable[[Tensor, Any], Tensor],
) -> Tensor:
    """The logits with a hook of PyTorch on the output of one MLP; with `visible`, every position sees all real ones."""
    n_pos = tokens.shape[1]
    mask = torch.where(real.bool(), 0.0, -torch.inf)[:, None, None].expand(-1, 1, n_pos, -1) if visible else real.long()
    handle = llama.model.layers[layer].mlp.register_forward_hook(lambda module, args, out: edit(out, None))
    try:
        logits: Tensor = llama(tokens, attention_mask=mask).logits
    finally:
        handle.remove()
    return logits


def _their_name(name: str) -> str:
    if not name.startswith("blocks."):
        return f"{_TOP[name.removesuffix('.weight')]}.weight"
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_BLOCK[rest.removesuffix('.weight')]}.weight"
