"""Denoising times: t falls from 1 (all is noise) to almost 0 in equal steps.

Sources: ML-GSAI/SMDM `eval/gen_model_answer.py::diff_sample`, `linspace(1, 1e-5, steps + 1)`; DreamLM/Dream
`generation_utils.py::_sample`, to 1e-3. The arithmetic is in float32, as there, because the number of revealed
positions is a product rounded down.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def linear_times(steps: int, eps: float) -> Float[Tensor, "canvas"]:
    """The `steps + 1` times from 1 to `eps`."""
    return torch.linspace(1, eps, steps + 1)


def check_eps(eps: float) -> None:
    """Raise a `ValueError` unless a run can end at this time."""
    if not 0 <= eps < 1:
        raise ValueError(
            f"eps={eps}; the time at which a run ends must be at least 0 and below 1, the time of its start"
        )


def revealed_share(t: float, s: float) -> float:
    """Share of the masked positions to be revealed between t and s, 1 - s/t, in float32."""
    return float(1 - torch.tensor(s) / torch.tensor(t))
