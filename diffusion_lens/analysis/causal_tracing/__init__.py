"""Causal tracing: of one canvas, at the steps of a denoising run, of the final text, and averaged over facts; and how
alike averages rank their sites.
"""

from diffusion_lens.analysis.causal_tracing.average import (
    AverageSettings,
    AverageTrajectorySettings,
    average_indirect_effect,
    average_trajectory_effect,
    merge,
    recalled_facts,
)
from diffusion_lens.analysis.causal_tracing.average_result import AverageEffect, AverageTrajectoryEffect, Known
from diffusion_lens.analysis.causal_tracing.rank_stability import RankStability, rank_stability
from diffusion_lens.analysis.causal_tracing.temporal import TemporalEffect, temporal_effect
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace, TraceSettings, causal_trace, noise_scale
from diffusion_lens.analysis.causal_tracing.trajectory import TrajectoryTrace, trace_trajectory

__all__ = [
    "AverageEffect",
    "AverageSettings",
    "AverageTrajectoryEffect",
    "AverageTrajectorySettings",
    "CausalTrace",
    "Known",
    "RankStability",
    "TemporalEffect",
    "TraceSettings",
    "TrajectoryTrace",
    "average_indirect_effect",
    "average_trajectory_effect",
    "causal_trace",
    "merge",
    "noise_scale",
    "rank_stability",
    "recalled_facts",
    "temporal_effect",
    "trace_trajectory",
]
