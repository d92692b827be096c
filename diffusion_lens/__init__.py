"""diffusion_lens: mechanistic interpretability of masked diffusion language models.

`HookedDiffusionTransformer.from_pretrained("smdm-1028m")` loads a model. Its hooks are TransformerLens's; inside the
denoising loop, `hook.step` describes the current step.

The public names are imported on first use, because importing torch takes seconds and `diffusion-lens --help` does not
need it.
"""

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusion_lens.facts.fact import Fact, Query
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
    from diffusion_lens.hooks.step import StepState
    from diffusion_lens.loading.catalogue import list_pretrained
    from diffusion_lens.loading.pairs import load_pair
    from diffusion_lens.model.config import DiffusionConfig
    from diffusion_lens.records.results import load

    __version__: str

__all__ = [
    "DiffusionConfig",
    "Fact",
    "HookedDiffusionTransformer",
    "Query",
    "StepState",
    "__version__",
    "list_pretrained",
    "load",
    "load_pair",
]

_MODULE_OF = {
    "DiffusionConfig": "model.config",
    "Fact": "facts",
    "HookedDiffusionTransformer": "hooked_diffusion_transformer",
    "Query": "facts",
    "StepState": "hooks.step",
    "list_pretrained": "loading.catalogue",
    "load": "records.results",
    "load_pair": "loading.pairs",
}

if "ipykernel" in sys.modules:
    # In a notebook without ipywidgets, tqdm warns when it is imported, and then writes its bars as text, which is fine.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("tqdm.auto")


def __getattr__(name: str) -> Any:
    """A public name, or a submodule, on first use."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("diffusion-lens")
    elif name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
