"""Analyses, each built from what users have: hooks, caches, `start_at_layer`, `logits_at`."""

import warnings
from typing import Any

from diffusion_lens.analysis import beliefs, causal_tracing, circuits, lens, patching, probes
from diffusion_lens.analysis.attention_by_step import (
    AttentionRollout,
    QKDecomposition,
    RetrievalHeads,
    attention_rollout,
    qk_decomposition,
    retrieval_heads,
)
from diffusion_lens.analysis.attention_sinks import AttentionSinks, SinkSpan, attention_sinks
from diffusion_lens.analysis.beliefs import *
from diffusion_lens.analysis.causal_tracing import *
from diffusion_lens.analysis.circuits import *
from diffusion_lens.analysis.dictionaries import (
    ActivationStore,
    DictionaryLoss,
    FeatureExamples,
    NoiseRange,
    SparseDictionary,
    activations,
    dictionary_loss,
    feature_examples,
    splice,
    train_dictionary,
)
from diffusion_lens.analysis.directions import (
    Orthogonalization,
    Projection,
    orthogonalize,
    projection,
    writes_to_stream,
)
from diffusion_lens.analysis.engine.layout import CanvasLayout, StateBank
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory
from diffusion_lens.analysis.graphs import (
    AverageRunGraph,
    GraphFaithfulness,
    GraphInterventions,
    GraphOverlap,
    RunGraph,
    average_run_graph,
    run_graph,
)
from diffusion_lens.analysis.lens import *
from diffusion_lens.analysis.over_facts.executor import LocalWorkers, Workers
from diffusion_lens.analysis.over_facts.study import LoopSettings
from diffusion_lens.analysis.patching import *
from diffusion_lens.analysis.probes import *
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
    "AverageRunGraph",
    "CacheDrift",
    "CanvasLayout",
    "Comparison",
    "Comparisons",
    "DictionaryLoss",
    "EditSettings",
    "EditStudy",
    "FactSignatures",
    "FeatureExamples",
    "GradientAlignment",
    "GraphFaithfulness",
    "GraphInterventions",
    "GraphOverlap",
    "KeyResult",
    "KeyValueSettings",
    "KeyValueStudy",
    "LayerCosines",
    "LocalWorkers",
    "LoopSettings",
    "MemitEdit",
    "MemitSettings",
    "NoiseRange",
    "Orthogonalization",
    "Projection",
    "QKDecomposition",
    "RankOneEdit",
    "RetrievalHeads",
    "ReversalSignatures",
    "RunGraph",
    "SecondMoment",
    "SinkSpan",
    "SparseDictionary",
    "StateBank",
    "StateDrift",
    "SteeringVectors",
    "TaughtCanvas",
    "TaughtPair",
    "TracedTrajectory",
    "ValueResult",
    "ValueSettings",
    "Workers",
    "activations",
    "attention_rollout",
    "attention_sinks",
    "average_run_graph",
    "cache_drift",
    "compare",
    "compare_along",
    "compute_key",
    "dictionary_loss",
    "difference_of_means",
    "edge_cut",
    "edit_study",
    "edit_success",
    "evidence",
    "feature_examples",
    "gradient_alignment",
    "isotropic_route_correlation",
    "key_value_study",
    "layer_cosines",
    "memit",
    "memit_study",
    "optimize_value",
    "orthogonalize",
    "projection",
    "qk_decomposition",
    "retrieval_heads",
    "reversal_signatures",
    "routes",
    "run_graph",
    "second_moment",
    "splice",
    "state_drift",
    "study_keys_and_values",
    "train_dictionary",
    "writes_to_stream",
]
__all__ += beliefs.__all__
__all__ += causal_tracing.__all__
__all__ += circuits.__all__
__all__ += lens.__all__
__all__ += patching.__all__
__all__ += probes.__all__


def __getattr__(name: str) -> Any:
    if name == "TimeProbe":
        warnings.warn("TimeProbe will be removed; use LinearProbe", DeprecationWarning, stacklevel=2)
        return probes.LinearProbe
    return causal_tracing.deprecated(name)
