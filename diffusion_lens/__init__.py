"""diffusion_lens: mechanistic interpretability of masked diffusion language models.

`HookedDiffusionTransformer.from_pretrained("smdm-1028m")` is the door; its hooks are TransformerLens's, and inside the
denoising loop they know the step.
"""

from importlib.metadata import version

from diffusion_lens.catalogue import list_pretrained
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.facts import Fact, Query
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.pairs import load_pair
from diffusion_lens.step_state import StepState

__version__ = version("diffusion-lens")

__all__ = [
    "DiffusionConfig",
    "Fact",
    "HookedDiffusionTransformer",
    "Query",
    "StepState",
    "__version__",
    "list_pretrained",
    "load_pair",
]
