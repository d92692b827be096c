"""What docs/coming_from.md says of TransformerBridge: one small Llama, loaded by both libraries."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer

PAGE = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^\| `(\S+)` \| `(\S+)` \| (both|ours) \|$", PAGE, re.MULTILINE)
ONE_NAME = ("attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_pattern", "ln1.hook_scale", "ln2.hook_normalized")


@dataclass(frozen=True)
class Both:
    """The bridge and our model, the tokens that they read, and their activations by name."""

    bridge: Any
    model: HookedDiffusionTransformer
    tokens: torch.Tensor
    theirs: Any
    ours: Any


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import LlamaConfig, LlamaForCausalLM

    baseline = HookedDiffusionTransformer.from_pretrained("site-ar", device="cpu")
    folder = baseline.save_pretrained(tmp_path_factory.mktemp("bridge") / "llama")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=baseline.cfg.d_vocab, **sizes)).save_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
    model = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    tokens = model.to_tokens("Plerrick Baupling is the")
    with torch.no_grad():
        return Both(bridge, model, tokens, bridge.run_with_cache(tokens)[1], model.run_with_cache(tokens)[1])


def test_the_page_has_a_table_of_names() -> None:
    assert len(NAMES) == 13
    assert [works for *_, works in NAMES].count("both") == 5


@pytest.mark.parametrize(("theirs", "ours", "works"), NAMES)
def test_names_in_one_row_have_the_same_numbers(theirs: str, ours: str, works: str, both: Both) -> None:
    expected = both.ours[ours]
    torch.testing.assert_close(both.theirs[theirs].reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both.theirs[ours], expected, rtol=1e-4, atol=1e-5)
    if works == "both":
        torch.testing.assert_close(both.model.run_with_cache(both.tokens, names_filter=theirs)[1][theirs], expected)
    else:
        with pytest.raises(KeyError, match="there is no hook point"):
            both.model.run_with_cache(both.tokens, names_filter=theirs)


def test_names_that_are_the_same_have_the_same_numbers(both: Both) -> None:
    for name in ONE_NAME:
        point = f"blocks.1.{name}"
        torch.testing.assert_close(both.theirs[point], both.ours[point], rtol=1e-4, atol=1e-5)
    theirs, ours = (cache["blocks.0.attn.hook_attn_scores"][0, 0] for cache in (both.theirs, both.ours))
    visible = torch.ones_like(ours, dtype=torch.bool).tril()
    torch.testing.assert_close(theirs[visible], ours[visible], rtol=1e-4, atol=1e-5)
    assert bool((ours[~visible] == -torch.inf).all())
    assert bool((theirs[~visible] == torch.finfo(torch.float32).min).all())


def test_what_only_one_of_them_has(both: Both) -> None:
    for name in ("blocks.0.attn.q.hook_in", "blocks.0.ln1.hook_in", "blocks.0.ln1.hook_out", "unembed.hook_out"):
        assert name in both.bridge.hook_dict
        assert name not in both.model.hook_dict
    assert any(name.startswith("rotary_emb.") for name in both.bridge.hook_dict)
    assert not [name for name in both.bridge.hook_dict if name.startswith("denoise.")]


def test_the_arguments_on_the_page_are_theirs(both: Both) -> None:
    def arguments(method: str) -> set[str]:
        return set(inspect.signature(getattr(type(both.bridge), method)).parameters)

    loading = "device dtype revision trust_remote_code hf_model load_weights device_map n_devices max_memory n_ctx"
    assert {*loading.split(), "offload_folder"} <= arguments("boot_transformers")
    passing = "start_at_layer stop_at_layer attention_mask loss_per_token labels past_key_values pixel_values"
    assert {*passing.split(), "input_values"} <= arguments("forward")
    writing = "max_new_tokens do_sample top_k top_p repetition_penalty output_logits return_cache return_type"
    assert set(writing.split()) <= arguments("generate")
    for method in ("boot_native", "generate_stream", "hf_generate", "list_supported_models", "check_model_support"):
        assert arguments(method)
    defaults = inspect.signature(type(both.bridge).enable_compatibility_mode).parameters
    assert all(defaults[name].default for name in ("fold_ln", "center_writing_weights", "fold_value_biases"))
    assert isinstance(both.bridge.original_model, torch.nn.Module)


def test_the_bridge_begins_texts_with_bos(both: Both) -> None:
    text = "Plerrick Baupling is the"
    n_tokens = [each.to_tokens(text).shape[1] for each in (both.bridge, both.model)]
    assert n_tokens == [5, 4]
    assert both.bridge.to_tokens(text, prepend_bos=False).shape[1] == 4


@pytest.mark.parametrize("given", ["top_k", "top_p", "repetition_penalty", "output_logits", "return_cache"])
def test_what_generate_does_not_take_is_said(given: str, both: Both) -> None:
    instead = "denoise_with_cache" if given in ("output_logits", "return_cache") else "a hook at 'denoise.hook_logits'"
    with pytest.raises(TypeError, match=instead):
        both.model.generate(both.tokens, max_new_tokens=1, **{given: 2})
