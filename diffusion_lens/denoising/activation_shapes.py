"""Shapes of the activations at hook points, and their bytes per number where these do not follow from the dtype."""

import re

from diffusion_lens.config import DiffusionConfig

ITEM_BYTES = {"hook_tokens": 8, "hook_candidates": 8, "hook_reveal": 1, "hook_experts": 8}
_IN_EXPERT = re.compile(r"\.mlp\.(experts\.\d+|shared)\.")


def activation_shape(
    name: str, cfg: DiffusionConfig, batch: int, pos: int, kept_pos: int | None = None
) -> tuple[int, ...]:
    """Shape of the activation at a hook point.

    Args:
        kept_pos: Number of positions (of scores and patterns, of queries) that are cached; by default all.
    """
    n_pos = pos if kept_pos is None else kept_pos
    kv_heads = cfg.n_key_value_heads or cfg.n_heads
    tail = name.rsplit(".", 1)[-1]
    if tail in ("hook_attn_scores", "hook_pattern"):
        return (batch, cfg.n_heads, n_pos, pos)
    if tail in ("hook_modulation", "hook_final_modulation"):
        return (batch, 6 if tail == "hook_modulation" else 2, cfg.d_model)
    if tail == "hook_time":
        assert cfg.architecture.time is not None
        return (batch, cfg.architecture.time.d_cond)
    of_heads = {"q_norm": cfg.n_heads, "k_norm": kv_heads}
    if (normed := name.split(".")[-2:][0]) in of_heads:
        return (batch, n_pos, of_heads[normed], 1 if tail == "hook_scale" else cfg.d_head)
    d_mlp = _hidden_units(name, cfg)
    widths: dict[str, tuple[int, ...]] = {
        "hook_scale": (1,),
        "hook_q": (cfg.n_heads, cfg.d_head),
        "hook_rot_q": (cfg.n_heads, cfg.d_head),
        "hook_z": (cfg.n_heads, cfg.d_head),
        "hook_k": (kv_heads, cfg.d_head),
        "hook_rot_k": (kv_heads, cfg.d_head),
        "hook_v": (kv_heads, cfg.d_head),
        "hook_result": (cfg.n_heads, cfg.d_model),
        "hook_attn_in": (cfg.n_heads, cfg.d_model),
        "hook_q_input": (cfg.n_heads, cfg.d_model),
        "hook_k_input": (kv_heads, cfg.d_model),
        "hook_v_input": (kv_heads, cfg.d_model),
        "hook_pre": (d_mlp,),
        "hook_pre_linear": (d_mlp,),
        "hook_post": (d_mlp,),
        "hook_logits": (cfg.d_vocab_out,),
        "hook_tokens": (),
        "hook_candidates": (),
        "hook_confidence": (),
        "hook_reveal": (),
    }
    if cfg.experts is not None:
        widths |= {
            "hook_router_logits": (cfg.experts.n_experts,),
            "hook_router_weights": (cfg.experts.n_experts,),
            "hook_experts": (cfg.experts.n_chosen,),
            "hook_expert_out": (cfg.experts.n_chosen, cfg.d_model),
        }
    return (batch, n_pos, *widths.get(tail, (cfg.d_model,)))


def _hidden_units(name: str, cfg: DiffusionConfig) -> int:
    """The width of the MLP or of the expert that a hook point is in."""
    assert cfg.d_mlp is not None
    if cfg.experts is None or not (inside := _IN_EXPERT.search(name)):
        return cfg.d_mlp
    return (cfg.experts.d_shared or 0) if inside[1] == "shared" else cfg.experts.d_expert
