"""Noise: its schedules, its two kinds, and what a head's output means under it."""

from diffusion_lens.noise.heads import Head, HeadAt, head_of
from diffusion_lens.noise.hiding import hidden_tokens
from diffusion_lens.noise.kinds import Absorbing, Noise, Uniform, draw, noise_of
from diffusion_lens.noise.loss_terms import CleanCrossEntropy, LossTerm, ScoreEntropy, UniformBound
from diffusion_lens.noise.schedules import Geometric, Linear, LogLinear, Schedule, schedule_of

__all__ = [
    "Absorbing",
    "CleanCrossEntropy",
    "Geometric",
    "Head",
    "HeadAt",
    "Linear",
    "LogLinear",
    "LossTerm",
    "Noise",
    "Schedule",
    "ScoreEntropy",
    "Uniform",
    "UniformBound",
    "draw",
    "head_of",
    "hidden_tokens",
    "noise_of",
    "schedule_of",
]
