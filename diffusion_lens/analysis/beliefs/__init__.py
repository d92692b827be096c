"""Questions of what runs predicted at every step: commitment, order of revealing, calibration, masking again."""

from diffusion_lens.analysis.beliefs.calibration import Calibration, calibration
from diffusion_lens.analysis.beliefs.commitment import Commitment, EarlyCommit, commitment
from diffusion_lens.analysis.beliefs.order import RevealOrder, reveal_order
from diffusion_lens.analysis.beliefs.remasking import RemaskEffect, remask_effect

__all__ = [
    "Calibration",
    "Commitment",
    "EarlyCommit",
    "RemaskEffect",
    "RevealOrder",
    "calibration",
    "commitment",
    "remask_effect",
    "reveal_order",
]
