"""Descriptions of networks so small that a test can train them, or write their probabilities out."""

from typing import Any


def small_architecture(**changes: Any) -> Any:
    """Two layers of width 16 over 40 tokens, bidirectional, without [MASK]; `changes` are other fields."""
    from weight_conversion import Architecture

    fields: dict[str, Any] = dict(
        family="diffusion_lens",
        name="small",
        n_layers=2,
        d_model=16,
        n_heads=2,
        n_key_value_heads=2,
        d_head=8,
        d_mlp=24,
        d_vocab=40,
        d_vocab_out=40,
        n_ctx=32,
        attention_dir="bidirectional",
        readout="in_place",
        mask_token_id=None,
    )
    return Architecture(**{**fields, **changes})


def with_time_conditioning() -> dict[str, Any]:
    """The fields of a diffusion transformer that is conditioned on the time."""
    from weight_conversion import TimeConditioning

    return {"norm": "layer", "mlp": "plain", "act_fn": "gelu_new", "time": TimeConditioning(8, conditioned=True)}


def diffusion_gemma(**text: Any) -> dict[str, Any]:
    """A small config of DiffusionGemma: two local layers and a global one, with canvases of six positions."""
    vision = {"model_type": "gemma4_vision", "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return {
        "model_type": "diffusion_gemma",
        "canvas_length": 6,
        "image_token_id": 510,
        "boi_token_id": 508,
        "eoi_token_id": 509,
        "tie_word_embeddings": True,
        "vision_config": {**vision, **sizes},
        "text_config": {
            "model_type": "diffusion_gemma_text",
            "vocab_size": 512,
            "hidden_size": 32,
            "intermediate_size": 40,
            "moe_intermediate_size": 12,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 5,
            "top_k_experts": 2,
            "head_dim": 12,
            "max_position_embeddings": 128,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "per_layer_config": {"2": {"head_dim": 16}},
            **text,
        },
    }
