"""Noise: its schedules, its two kinds, and what a head's output means under it."""

from diffusion_lens.noise.heads import Head, HeadAt, head_of
from diffusion_lens.noise.hiding import hidden_tokens
from diffusion_lens.noise.kinds import Absorbing, Noise, Uniform, draw, noise_of
from diffusion_lens.noise.schedules import Geometric, Linear, LogLinear, Schedule, schedule_of

__all__ = [
    "Absorbing",
    "Geometric",
    "Head",
    "HeadAt",
    "Linear",
    "LogLinear",
    "Noise",
    "Schedule",
    "Uniform",
    "draw",
    "head_of",
    "hidden_tokens",
    "noise_of",
    "schedule_of",
]
