"""Analyses, each built from what users have: hooks, caches, `start_at_layer`, `logits_at`."""

import warnings
from typing import Any

from diffusion_lens.analysis.attention_by_step import (
    AttentionRollout,
    QKDecomposition,
    RetrievalHeads,
    attention_rollout,
    qk_decomposition,
    retrieval_heads,
)
from diffusion_lens.analysis.attention_sinks import AttentionSinks, SinkSpan, attention_sinks
from diffusion_lens.analysis.causal_tracing import (
    AverageEffect,
    AverageSettings,
    AverageTrajectoryEffect,
    AverageTrajectorySettings,
    CausalTrace,
    Known,
    TemporalEffect,
    TraceSettings,
    TrajectoryTrace,
    average_indirect_effect,
    average_trajectory_effect,
    causal_trace,
    merge,
    noise_scale,
    recalled_facts,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.analysis.circuits import (
    Circuit,
    EdgeScores,
    Faithfulness,
    NodeScores,
    edge_attribution,
    faithfulness,
    node_attribution,
)
from diffusion_lens.analysis.dictionaries import (
    ActivationStore,
    DictionaryLoss,
    NoiseRange,
    activations,
    dictionary_loss,
    splice,
)
from diffusion_lens.analysis.directions import (
    Orthogonalization,
    Projection,
    orthogonalize,
    projection,
    writes_to_stream,
)
from diffusion_lens.analysis.engine.layout import CanvasLayout
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory
from diffusion_lens.analysis.lens import LogitLens, Translators, fit_translators, logit_lens
from diffusion_lens.analysis.over_facts.executor import LocalWorkers, Workers
from diffusion_lens.analysis.over_facts.loop_settings import LoopSettings
from diffusion_lens.analysis.patching import PatchGrid, answer_probability, patch_grid
from diffusion_lens.analysis.probes import LinearProbe, RidgeSettings, probe, probe_time
from diffusion_lens.analysis.representations import Comparison, Comparisons, compare, compare_along
from diffusion_lens.analysis.rome import (
    EditSettings,
    EditStudy,
    KeyResult,
    KeyValueSettings,
    KeyValueStudy,
    MemitEdit,
    MemitSettings,
    RankOneEdit,
    SecondMoment,
    ValueResult,
    ValueSettings,
    compute_key,
    edit_study,
    edit_success,
    key_value_study,
    memit,
    memit_study,
    optimize_value,
    second_moment,
    study_keys_and_values,
)
from diffusion_lens.analysis.signatures import (
    FactSignatures,
    GradientAlignment,
    ReversalSignatures,
    edge_cut,
    evidence,
    gradient_alignment,
    isotropic_route_correlation,
    reversal_signatures,
    routes,
)
from diffusion_lens.analysis.state_drift import (
    CacheDrift,
    LayerCosines,
    StateDrift,
    cache_drift,
    layer_cosines,
    state_drift,
)
from diffusion_lens.analysis.steering_vectors import SteeringVectors, difference_of_means
from diffusion_lens.facts.taught_pairs import TaughtCanvas, TaughtPair

__all__ = [
    "ActivationStore",
    "AttentionRollout",
    "AttentionSinks",
    "AverageEffect",
    "AverageSettings",
    "AverageTrajectoryEffect",
    "AverageTrajectorySettings",
    "CacheDrift",
    "CanvasLayout",
    "CausalTrace",
    "Circuit",
    "Comparison",
    "Comparisons",
    "DictionaryLoss",
    "EdgeScores",
    "EditSettings",
    "EditStudy",
    "FactSignatures",
    "Faithfulness",
    "GradientAlignment",
    "KeyResult",
    "KeyValueSettings",
    "KeyValueStudy",
    "Known",
    "LayerCosines",
    "LinearProbe",
    "LocalWorkers",
    "LogitLens",
    "LoopSettings",
    "MemitEdit",
    "MemitSettings",
    "NodeScores",
    "NoiseRange",
    "Orthogonalization",
    "PatchGrid",
    "Projection",
    "QKDecomposition",
    "RankOneEdit",
    "RetrievalHeads",
    "ReversalSignatures",
    "RidgeSettings",
    "SecondMoment",
    "SinkSpan",
    "StateDrift",
    "SteeringVectors",
    "TaughtCanvas",
    "TaughtPair",
    "TemporalEffect",
    "TraceSettings",
    "TracedTrajectory",
    "TrajectoryTrace",
    "Translators",
    "ValueResult",
    "ValueSettings",
    "Workers",
    "activations",
    "answer_probability",
    "attention_rollout",
    "attention_sinks",
    "average_indirect_effect",
    "average_trajectory_effect",
    "cache_drift",
    "causal_trace",
    "compare",
    "compare_along",
    "compute_key",
    "dictionary_loss",
    "difference_of_means",
    "edge_attribution",
    "edge_cut",
    "edit_study",
    "edit_success",
    "evidence",
    "faithfulness",
    "fit_translators",
    "gradient_alignment",
    "isotropic_route_correlation",
    "key_value_study",
    "layer_cosines",
    "logit_lens",
    "memit",
    "memit_study",
    "merge",
    "node_attribution",
    "noise_scale",
    "optimize_value",
    "orthogonalize",
    "patch_grid",
    "probe",
    "probe_time",
    "projection",
    "qk_decomposition",
    "recalled_facts",
    "retrieval_heads",
    "reversal_signatures",
    "routes",
    "second_moment",
    "splice",
    "state_drift",
    "study_keys_and_values",
    "temporal_effect",
    "trace_trajectory",
    "writes_to_stream",
]


def __getattr__(name: str) -> Any:
    if name == "TimeProbe":
        warnings.warn("TimeProbe will be removed; use LinearProbe", DeprecationWarning, stacklevel=2)
        return LinearProbe
    from diffusion_lens.analysis.causal_tracing.deprecated import deprecated

    return deprecated(name)
