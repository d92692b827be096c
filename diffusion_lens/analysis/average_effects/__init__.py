"""Average indirect effects: a causal trace of every fact in a list, averaged by role of the token, and by step."""

from diffusion_lens.analysis.average_effects.average import AverageEffect, average_indirect_effect, merge
from diffusion_lens.analysis.average_effects.average_trajectory import (
    AverageTrajectoryEffect,
    average_trajectory_effect,
)
from diffusion_lens.analysis.average_effects.known import Known, recalled_facts
from diffusion_lens.analysis.average_effects.study import average_facts
from diffusion_lens.analysis.average_effects.trace_settings import TraceSettings
from diffusion_lens.analysis.loop_settings import LoopSettings

__all__ = [
    "AverageEffect",
    "AverageTrajectoryEffect",
    "Known",
    "LoopSettings",
    "TraceSettings",
    "average_facts",
    "average_indirect_effect",
    "average_trajectory_effect",
    "merge",
    "recalled_facts",
]
