"""Analyses, each built from what users have: hooks, caches, `start_at_layer`, `logits_at`."""

from diffusion_lens.analysis.causal_tracing import CausalTrace, causal_trace, noise_scale

__all__ = ["CausalTrace", "causal_trace", "noise_scale"]
