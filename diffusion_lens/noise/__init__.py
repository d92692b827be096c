"""Noise: its schedules, its two kinds, and what a head's output means under it."""

from diffusion_lens.noise.heads import Head, head_of
from diffusion_lens.noise.kinds import Absorbing, Noise, Uniform, draw, noise_of
from diffusion_lens.noise.schedules import Geometric, Linear, LogLinear, Schedule, schedule_of

__all__ = [
    "Absorbing",
    "Geometric",
    "Head",
    "Linear",
    "LogLinear",
    "Noise",
    "Schedule",
    "Uniform",
    "draw",
    "head_of",
    "noise_of",
    "schedule_of",
]
