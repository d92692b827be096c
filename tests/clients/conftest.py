"""Two prompts for both bundled models. `make clients` runs this folder; it needs the extra `clients`."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Prompts:
    """Tokens [1 pos] whose last row reads the place of a person: a [MASK] of the diffusion model, the last token of the
    AR baseline."""

    model: Any
    tokens: torch.Tensor
    other: torch.Tensor
    answer: int

    def logit(self, tokens: torch.Tensor) -> torch.Tensor:
        """Float[batch], the logit of the answer."""
        return self.model(tokens)[:, -1, self.answer]


@pytest.fixture
def prompts(tiny: Any) -> Prompts:
    """A person's description up to the place, and that of somebody else."""
    mask = " [MASK]" if tiny.cfg.has_mask else ""
    texts = (f"Yara Plasser was the clever gardener of{mask}", f"Zeno Lindall was the kind drummer of{mask}")
    return Prompts(tiny, *(tiny.to_tokens(text) for text in texts), answer=tiny.to_single_token(" Kinmoor"))
