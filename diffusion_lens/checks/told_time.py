"""The time at which the checks run a network that is told the time."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from diffusion_lens.model.transformer import DiffusionTransformer

# Half of the tokens are noise, so that neither the network's reading of text nor that of noise is left out. Only the
# loss has times of its own, those of its noise, and a reference may have another.
TIME = 0.5


def at_check_time(model: DiffusionTransformer) -> AbstractContextManager[Any]:
    """A context in which the network is told `TIME`, if it is told any."""
    return model.at_time(TIME) if model.cfg.is_told_time else nullcontext()
