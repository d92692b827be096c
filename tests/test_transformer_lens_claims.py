"""What README and docs say about TransformerLens 4.3, asked of the TransformerLens that is installed."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from importlib.metadata import version

from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge, supported_architectures


def adapters() -> Iterator[type]:
    for module in pkgutil.iter_modules(supported_architectures.__path__):
        loaded = importlib.import_module(f"{supported_architectures.__name__}.{module.name}")
        for each in vars(loaded).values():
            if inspect.isclass(each) and each.__module__ == loaded.__name__:
                yield each


def test_the_claims_are_about_the_installed_version() -> None:
    assert version("transformer-lens").startswith("4.3")


def test_dream_llada2_and_gidd_bring_a_sampler_along() -> None:
    with_sampler = {each.__name__ for each in adapters() if getattr(each, "native_sampler", None)}
    assert with_sampler == {"DreamArchitectureAdapter", "LLaDA2MoeArchitectureAdapter", "GiddArchitectureAdapter"}


def test_llada_and_bd3lm_are_wrapped_and_smdm_mdlm_sedd_are_not() -> None:
    names = " ".join(each.__name__.lower() for each in adapters())
    assert "llada" in names
    assert "bd3lm" in names
    assert not [kind for kind in ("smdm", "mdlm", "sedd") if kind in names.replace("bd3lm", "")]


def test_its_diffusion_runs_take_one_prompt_and_its_hooks_no_step() -> None:
    assert "does not support batched prompts" in inspect.getsource(TransformerBridge.diffusion_generate)
    assert not hasattr(HookPoint(), "step")


def test_dream_has_no_pattern_there() -> None:
    dream = importlib.import_module(f"{supported_architectures.__name__}.dream")
    assert "there is no reconstructed pattern hook" in " ".join((dream.__doc__ or "").split())
