"""Analyses, each built from what users have: hooks, caches, `start_at_layer`, `logits_at`."""

from diffusion_lens.analysis.average_effects import (
    AverageEffect,
    AverageTrajectoryEffect,
    LoopSettings,
    average_indirect_effect,
    average_trajectory_effect,
    merge,
    recalled_facts,
)
from diffusion_lens.analysis.causal_tracing import (
    CausalTrace,
    Corruption,
    Restoration,
    TemporalEffect,
    TrajectoryTrace,
    causal_trace,
    noise_scale,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.analysis.patching import PatchGrid, answer_probability, patch_grid
from diffusion_lens.analysis.representations import Comparison, Comparisons, compare, compare_along
from diffusion_lens.analysis.rome import (
    KeyResult,
    KeyValueStudy,
    RankOneEdit,
    SecondMoment,
    ValueResult,
    compute_key,
    edit_success,
    key_value_study,
    optimize_value,
    second_moment,
)
from diffusion_lens.analysis.selection import Selection

__all__ = [
    "AverageEffect",
    "AverageTrajectoryEffect",
    "CausalTrace",
    "Comparison",
    "Comparisons",
    "Corruption",
    "KeyResult",
    "KeyValueStudy",
    "LoopSettings",
    "PatchGrid",
    "RankOneEdit",
    "Restoration",
    "SecondMoment",
    "Selection",
    "TemporalEffect",
    "TrajectoryTrace",
    "ValueResult",
    "answer_probability",
    "average_indirect_effect",
    "average_trajectory_effect",
    "causal_trace",
    "compare",
    "compare_along",
    "compute_key",
    "edit_success",
    "key_value_study",
    "merge",
    "noise_scale",
    "optimize_value",
    "patch_grid",
    "recalled_facts",
    "second_moment",
    "temporal_effect",
    "trace_trajectory",
]
