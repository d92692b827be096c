"""Whether a checkpoint is what it says: `check_model` asks, a `CheckReport` answers, with what is likely wrong."""

from diffusion_lens.checks.expected import Expected
from diffusion_lens.checks.finding import CheckReport, Finding
from diffusion_lens.checks.reference import Reference
from diffusion_lens.checks.run import check_model

__all__ = ["CheckReport", "Expected", "Finding", "Reference", "check_model"]
