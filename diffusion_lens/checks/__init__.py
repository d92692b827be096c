"""Checks whether a model is what it claims to be: `check_model` returns a `CheckReport` that names likely faults."""

from diffusion_lens.checks.expected import Expected
from diffusion_lens.checks.finding import CheckReport, Finding
from diffusion_lens.checks.reference import Reference
from diffusion_lens.checks.run import check_model

__all__ = ["CheckReport", "Expected", "Finding", "Reference", "check_model"]
