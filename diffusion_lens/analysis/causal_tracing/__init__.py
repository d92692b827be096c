"""Causal tracing: clean, corrupted and restored runs, of one canvas or at the steps of a denoising run."""

from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.temporal import TemporalEffect, restore_in_loop, temporal_effect
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace, causal_trace, noise_scale, trace_query
from diffusion_lens.analysis.causal_tracing.trajectory_result import TrajectoryTrace
from diffusion_lens.analysis.causal_tracing.trajectory_trace import trace_steps, trace_trajectory

__all__ = [
    "CausalTrace",
    "Corruption",
    "Restoration",
    "TemporalEffect",
    "TrajectoryTrace",
    "causal_trace",
    "noise_scale",
    "restore_in_loop",
    "temporal_effect",
    "trace_query",
    "trace_steps",
    "trace_trajectory",
]
