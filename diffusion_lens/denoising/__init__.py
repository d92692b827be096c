"""The denoising loop: canvas, schedule, predictor, samplers, trajectory."""

from diffusion_lens.denoising.cache import TrajectoryCache
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.denoising.samplers import Sampler
from diffusion_lens.denoising.settings import DenoiseSettings
from diffusion_lens.denoising.trajectory import Trajectory

__all__ = ["DenoiseSettings", "Sampler", "Trajectory", "TrajectoryCache", "denoise", "lay_out"]
