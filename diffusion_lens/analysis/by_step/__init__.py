"""States by denoising step: steering vectors, probes of the denoising time, attention sinks."""

from diffusion_lens.analysis.by_step.ridge import RidgeSettings
from diffusion_lens.analysis.by_step.sinks import attention_sinks
from diffusion_lens.analysis.by_step.sinks_result import AttentionSinks, SinkSpan
from diffusion_lens.analysis.by_step.steering_vectors import difference_of_means
from diffusion_lens.analysis.by_step.time_probe import probe_time
from diffusion_lens.analysis.by_step.time_probe_result import TimeProbe
from diffusion_lens.analysis.by_step.vectors_result import SteeringVectors

__all__ = [
    "AttentionSinks",
    "RidgeSettings",
    "SinkSpan",
    "SteeringVectors",
    "TimeProbe",
    "attention_sinks",
    "difference_of_means",
    "probe_time",
]
