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
