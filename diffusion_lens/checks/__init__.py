"""Checks whether a model is what it claims to be: `check_model` returns a `CheckReport` that names likely faults."""

from diffusion_lens.checks.reference import Reference
from diffusion_lens.checks.report import CheckReport, Finding
from diffusion_lens.checks.run import check_model
from diffusion_lens.checks.weights import Expected

__all__ = ["CheckReport", "Expected", "Finding", "Reference", "check_model"]
