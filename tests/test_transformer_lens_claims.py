"""What README and docs say about TransformerLens 4.3, asked of the TransformerLens that is installed."""

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformer_lens.hook_points import HookPoint


@pytest.fixture(scope="module")
def supported_architectures() -> ModuleType:
    """Imported here, since it costs two seconds."""
    from transformer_lens.model_bridge import supported_architectures

    return supported_architectures


def adapters(supported_architectures: ModuleType) -> Iterator[type]:
    for module in pkgutil.iter_modules(supported_architectures.__path__):
        loaded = importlib.import_module(f"{supported_architectures.__name__}.{module.name}")
        for adapter in vars(loaded).values():
            if inspect.isclass(adapter) and adapter.__module__ == loaded.__name__:
                yield adapter


def test_the_claims_are_about_the_installed_version() -> None:
    assert version("transformer-lens").startswith("4.3")


def test_dream_llada2_and_gidd_bring_a_sampler_along(supported_architectures: ModuleType) -> None:
    with_sampler = {
        adapter.__name__ for adapter in adapters(supported_architectures) if getattr(adapter, "native_sampler", None)
    }
    assert with_sampler == {"DreamArchitectureAdapter", "LLaDA2MoeArchitectureAdapter", "GiddArchitectureAdapter"}


def test_llada_and_bd3lm_are_wrapped_and_smdm_mdlm_sedd_are_not(supported_architectures: ModuleType) -> None:
    names = " ".join(adapter.__name__.lower() for adapter in adapters(supported_architectures))
    assert "llada" in names
    assert "bd3lm" in names
    assert not [kind for kind in ("smdm", "mdlm", "sedd") if kind in names.replace("bd3lm", "")]


def test_its_diffusion_runs_take_one_prompt_and_its_hooks_no_step() -> None:
    from transformer_lens.model_bridge import TransformerBridge

    assert "does not support batched prompts" in inspect.getsource(TransformerBridge.diffusion_generate)
    assert not hasattr(HookPoint(), "step")


def bridge(**sampler: object) -> SimpleNamespace:
    """As much of a `TransformerBridge` as `diffusion_generate` needs before it samples."""
    adapter = SimpleNamespace(native_sampler=next(iter(sampler), None))
    return SimpleNamespace(
        adapter=adapter, cfg=SimpleNamespace(architecture="A"), original_model=SimpleNamespace(**sampler)
    )


def test_diffusion_generate_refuses_llada_and_a_list_of_prompts(supported_architectures: ModuleType) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    llada = supported_architectures.LLaDAArchitectureAdapter
    assert llada.native_sampler is None
    with pytest.raises(NotImplementedError, match="A has no native sampler"):
        TransformerBridge.diffusion_generate(bridge(), "a")
    with pytest.raises(NotImplementedError, match="does not support batched prompts"):
        TransformerBridge.diffusion_generate(bridge(sample=print), ["a", "b"])


def test_diffusion_generate_passes_callbacks_and_returns_tokens() -> None:
    from transformer_lens.model_bridge import TransformerBridge

    calls = []

    def sample(tokens: torch.Tensor, **settings: object) -> SimpleNamespace:
        calls.append((settings, torch.is_grad_enabled()))
        return SimpleNamespace(sequences=torch.cat([tokens, tokens], dim=1), history=[tokens])

    model = bridge(sample=sample)
    model.cfg.device = "cpu"
    model.adapter.native_sampler_kwargs = lambda new, prompt: {"steps": new}
    tokens = torch.arange(6).view(2, 3)
    final = TransformerBridge.diffusion_generate(model, tokens, 3, generation_logits_hook_func=print)
    assert calls == [({"steps": 3, "generation_logits_hook_func": print}, False)]
    assert torch.equal(final, torch.cat([tokens, tokens], dim=1))


def test_dream_samples_one_step_for_each_token(supported_architectures: ModuleType) -> None:
    dream = supported_architectures.DreamArchitectureAdapter
    assert dream.native_sampler_kwargs(None, 8, 3) == {"max_new_tokens": 8, "steps": 8}


def test_llada_and_dream_have_neither_a_loss_nor_generate_there(supported_architectures: ModuleType) -> None:
    for adapter in (supported_architectures.LLaDAArchitectureAdapter, supported_architectures.DreamArchitectureAdapter):
        assert not adapter.supports_causal_loss
        assert not adapter.supports_generation


def test_llada_has_scores_and_patterns_there(supported_architectures: ModuleType) -> None:
    llada = importlib.import_module(f"{supported_architectures.__name__}.llada")
    assert "exposing the standard attention scores and pattern hooks" in " ".join((llada.__doc__ or "").split())
    assert "trust_remote_code=True" in (llada.LLaDAArchitectureAdapter.__doc__ or "")


def test_dream_has_no_pattern_there(supported_architectures: ModuleType) -> None:
    dream = importlib.import_module(f"{supported_architectures.__name__}.dream")
    assert "there is no reconstructed pattern hook" in " ".join((dream.__doc__ or "").split())


def test_the_table_of_the_readme_counts_the_architectures() -> None:
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"| {len(SUPPORTED_ARCHITECTURES)} architectures |" in readme
    named = {"LLaDAModelLM", "DreamModel", "LLaDA2MoeModelLM", "BD3LM", "GiddForDiffusionLM"}
    assert named <= {*SUPPORTED_ARCHITECTURES}


def test_its_list_of_models_says_that_mdlm_and_sedd_are_not_read() -> None:
    import transformer_lens.tools.model_registry

    folder = Path(transformer_lens.tools.model_registry.__file__).parent
    listed = json.loads((folder / "data" / "supported_models.json").read_text(encoding="utf-8"))["models"]
    found = {model["model_id"]: model["note"] for model in listed if re.search("mdlm|sedd", model["model_id"])}
    assert {*found} == {"kuleshov-group/mdlm-owt-noeos", "kuleshov-group/sedd-noeos-owt"}
    assert all(note.startswith("Config unavailable") for note in found.values())


def test_it_has_patching_and_neither_causal_tracing_nor_edits() -> None:
    import transformer_lens

    files = sorted(Path(transformer_lens.__file__).parent.rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    names = re.findall(r"^ *(?:def |class )?(\w+)(?=\(| = )", text, re.MULTILINE)
    assert {"get_act_patch_resid_pre", "attribution_patch"} <= set(names)
    missing = re.compile(r"causal_?trac|(?<!ch)rome|memit|rank_one|monte_carlo", re.IGNORECASE)
    assert not [name for name in names if missing.search(name)]
