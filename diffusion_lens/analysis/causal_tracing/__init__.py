"""Causal tracing: of one canvas, at the steps of a denoising run, of the final text, and averaged over facts; and how
alike averages rank their sites.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory

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


def deprecated(name: str) -> Any:
    """The object with an old name of `diffusion_lens.analysis`, which will go with the next version: one of several
    objects with settings, or a function of these. An `AttributeError` if there is none."""
    if name not in _INSTEAD:
        raise AttributeError(f"module 'diffusion_lens.analysis' has no attribute {name!r}")
    made, instead = _INSTEAD[name]
    warnings.warn(f"{name} will be removed; use {instead}", DeprecationWarning, stacklevel=3)
    return made


def _restoration(kind: str = "resid", window: Any = 10, severed: str | None = None) -> TraceSettings:
    return TraceSettings(kind=kind, window=window, severed=severed)


def _corruption(
    kind: str = "gaussian", noise: Any = None, samples: Any = 10, seed: Any = 1, swap: Any = None
) -> TraceSettings:
    return TraceSettings(corruption=kind, noise=noise, samples=samples, seed=seed, swap=swap)


def _selection(positions: Any = None, layers: Any = None) -> TraceSettings:
    return TraceSettings(positions=positions, layers=layers)


def _joined(restoration: TraceSettings, corruption: TraceSettings, selection: TraceSettings | None) -> TraceSettings:
    restored = {name: getattr(restoration, name) for name in ("kind", "window", "severed")}
    chosen = selection or TraceSettings()
    return replace(corruption, **restored, positions=chosen.positions, layers=chosen.layers)


def _trace_query(model: Any, query: Any, restoration: Any, corruption: Any, selection: Any = None, **more: Any) -> Any:
    return causal_trace(model, query, settings=_joined(restoration, corruption, selection), **more)


def _trace_steps(
    run: TracedTrajectory,
    steps: Any,
    canvas: str,
    restoration: Any,
    corruption: Any,
    selection: Any = None,
    **more: Any,
) -> Any:
    settings = _joined(restoration, corruption, selection)
    return trace_trajectory(run.model, run.query, steps, canvas, trajectory=run.trajectory, settings=settings, **more)


def _restore_in_loop(
    run: TracedTrajectory, steps: Any, restoration: Any, corruption: Any, selection: Any = None, **more: Any
) -> Any:
    settings = _joined(restoration, corruption, selection)
    return temporal_effect(run.model, run.query, steps, trajectory=run.trajectory, settings=settings, **more)


_INSTEAD: dict[str, tuple[Callable[..., Any], str]] = {
    "Restoration": (_restoration, "TraceSettings"),
    "Corruption": (_corruption, "TraceSettings"),
    "Selection": (_selection, "TraceSettings"),
    "trace_query": (_trace_query, "causal_trace(model, query, settings=...)"),
    "trace_steps": (_trace_steps, "trace_trajectory(model, query, trajectory=..., settings=...)"),
    "restore_in_loop": (_restore_in_loop, "temporal_effect(model, query, trajectory=..., settings=...)"),
}
