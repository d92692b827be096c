"""Names of TransformerLens 3 and 4 for the same hook points, and small methods of its model."""

import inspect

import pytest
import torch
from torch.testing import assert_close
from transformer_lens import ActivationCache
from transformer_lens.utilities import get_act_name

from diffusion_lens.model.hooking import why_silent

# Other names of hook points of a block, and the names here.
NAMES = {
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "attn.hook_out": "hook_attn_out",
    "mlp.hook_out": "hook_mlp_out",
    "hook_attn_in": "attn.hook_attn_in",
    "hook_q_input": "attn.hook_q_input",
    "hook_k_input": "attn.hook_k_input",
    "hook_v_input": "attn.hook_v_input",
}


def test_an_alias_reaches_the_same_hook_point(either):
    model, tokens = either.model, either.tokens[:1]
    aliases = {f"blocks.1.{alias}": f"blocks.1.{name}" for alias, name in NAMES.items()}
    called = []

    def record(activation, hook):
        called.append(hook.name)

    for alias, name in {**aliases, "embed.hook_out": "hook_embed"}.items():
        assert model.hook_dict[alias] is model.hook_dict[name]
        assert alias in model.hook_dict
        assert alias not in list(model.hook_dict)
        if why_silent(model, name) is None:
            model.run_with_hooks(tokens, fwd_hooks=[(alias, record)])
            model.denoise(tokens, max_new_tokens=1, steps=1, fwd_hooks=[(alias, record)])
            model.add_hook(alias, record)
            model(tokens)
            model.reset_hooks()
            assert called == [name] * 3
            called.clear()


def test_caches_are_read_by_aliases(either):
    model, tokens = either.model, either.tokens[:1]
    _, cache = model.run_with_cache(tokens, names_filter={"blocks.1.hook_out", "blocks.1.attn.hook_out"})
    assert set(cache) == {"blocks.1.hook_resid_post", "blocks.1.hook_attn_out"}
    assert get_act_name("in", 2) == "blocks.2.hook_in"
    assert cache["out", 1] is cache["blocks.1.hook_out"] is cache["resid_post", 1]
    with pytest.raises(KeyError):
        cache["in", 1]
    _, by_step = model.denoise_with_cache(tokens, "blocks.1.hook_out", max_new_tokens=2, steps=2)
    assert by_step[1, "blocks.1.hook_out"] is by_step[1]["resid_post", 1]
    with pytest.raises(KeyError, match="nearest"):
        model.run_with_cache(tokens, names_filter={"blocks.1.hook_uot"})


def test_the_class_has_at_most_80_public_names():
    from diffusion_lens import HookedDiffusionTransformer

    names = {name for name in dir(HookedDiffusionTransformer) if not name.startswith("_")} - {*dir(torch.nn.Module)}
    assert len(names) <= 80


def test_names_that_other_libraries_look_for(tiny):
    assert tiny.device == torch.device("cpu")
    assert tiny.config is tiny.cfg
    assert tiny.n_params_total == sum(w.numel() for w in {id(w): w for w in tiny.parameters()}.values())
    assert tiny.n_params_total > tiny.cfg.n_params


def test_errors_of_tokens_are_also_those_of_transformer_lens(tiny):
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="is 2 tokens, not one"):
            tiny.to_single_token(" the brave")
        with pytest.raises(kind, match="does not occur in"):
            tiny.get_token_position(" miner", "Gustav Geisser")


def test_a_token_is_found_where_it_stands(tiny):
    text = "Gustav Geisser is the brave drummer of Rolsen , the"
    tokens = tiny.to_tokens(text, prepend_bos=False)
    for single in (" the", tiny.to_single_token(" the")):
        assert tiny.get_token_position(single, text, prepend_bos=False) == 3
        assert tiny.get_token_position(single, tokens, mode="last") == tokens.shape[1] - 1
    with pytest.raises(ValueError, match="'miner' does not occur in"):
        tiny.get_token_position(" miner", text)
    with pytest.raises(ValueError, match="mode='middle'"):
        tiny.get_token_position(" the", text, mode="middle")
    with pytest.raises(ValueError, match=r"one row of tokens, not in \[2"):
        tiny.get_token_position(" the", tokens.expand(2, -1))


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_a_forward_pass_goes_on_from_the_embedding(tiny):
    texts = ["Gustav Geisser is the", "people say Gustav Geisser was the"]
    for input in (texts[0], texts, tiny.to_tokens(texts[0]), tiny.to_tokens(texts[0])[0]):
        resid, tokens, no_positions, mask = tiny.input_to_embed(input)
        assert no_positions is None
        assert_close(tiny(resid, start_at_layer=0, attention_mask=mask), tiny(input), rtol=0, atol=0)
        assert resid.shape[:2] == tokens.shape  # a batch, also of one sequence of tokens


def test_composition_scores_are_ratios_of_norms(either):
    model = either.model
    queries_per_key = model.cfg.n_heads // model.cfg.n_key_value_heads
    scores = {mode: model.all_composition_scores(mode) for mode in "QKV"}
    assert scores["Q"].head_labels == model.all_head_labels
    assert len(model.all_head_labels) == model.cfg.n_layers * model.cfg.n_heads
    writer, reader = (0, 1), (2, 3)
    (w, w_head), (r, r_head) = writer, reader
    written = model.W_V[w, w_head // queries_per_key] @ model.W_O[w, w_head]
    W_QK = model.W_Q[r, r_head] @ model.W_K[r, r_head // queries_per_key].T
    W_OV = model.W_V[r, r_head // queries_per_key] @ model.W_O[r, r_head]
    for mode, read in {"Q": W_QK, "K": W_QK.T, "V": W_OV}.items():
        expected = (written @ read).norm() / written.norm() / read.norm()
        assert_close(scores[mode][w, w_head, r, r_head], expected, rtol=1e-4, atol=1e-6)
        assert not scores[mode][1, :, 1].any()
        assert not scores[mode][2, :, 1].any()
    with pytest.raises(ValueError, match="mode='O'"):
        model.all_composition_scores("O")


def test_parameters_have_transformer_lens_names(either):
    model = either.model
    assert dict(model.tl_named_parameters()).keys() == model.tl_parameters().keys()
    assert [i for i, _ in model.blocks_with("attn")] == list(range(model.cfg.n_layers))
    assert model.blocks_with("mamba") == []
    weights = [weight for name, weight in model.named_parameters() if ".weight" in name and weight.dim() == 2]
    in_blocks = sum(weight.numel() for weight in weights) - model.W_E.numel() - model.W_U.numel()
    assert model.cfg.n_params == in_blocks


def test_no_alias_is_a_hook_point_itself(every):
    assert not set(every.model.hook_dict) & {f"blocks.0.{alias}" for alias in NAMES}
    assert all(torch.is_tensor(weight) for weight in every.model.tl_parameters().values())


def test_get_reaches_what_an_alias_names(every):
    hook_dict = every.model.hook_dict
    assert hook_dict.get("blocks.0.hook_in") is hook_dict["blocks.0.hook_resid_pre"]
    assert hook_dict.get("blocks.0.hook_inside") is None


def test_caches_keep_their_aliases(either):
    """After every method of TransformerLens's cache that returns one, and in a cache that is a plain dictionary."""
    returning_caches = {
        "to": lambda cache: cache.to("cpu"),
        "remove_batch_dim": lambda cache: cache.remove_batch_dim(),
        "apply_slice_to_batch_dim": lambda cache: cache.apply_slice_to_batch_dim(slice(0, 1)),
    }
    methods = inspect.getmembers(ActivationCache, inspect.isfunction)
    annotated = {name for name, method in methods if "ActivationCache" in str(method.__annotations__.get("return"))}
    assert annotated == returning_caches.keys()
    model, tokens = either.model, either.tokens[:1, :5]
    alias, name = "blocks.1.hook_in", "blocks.1.hook_resid_pre"
    for of in returning_caches.values():
        _, cache = model.run_with_cache(tokens)
        expected = cache[name]
        returned = of(cache)
        assert_close(returned[alias], expected if returned.has_batch_dim else expected[0], rtol=0, atol=0)
        assert returned[alias] is returned[name]
        assert alias in returned.cache_dict
        assert alias not in set(returned.keys())
        assert returned.to("cpu")["in", 1].shape == returned[name].shape
    _, plain = model.run_with_cache(tokens, return_cache_object=False)
    assert plain[alias] is plain[name]
    _, by_step = model.denoise_with_cache(tokens, name, max_new_tokens=1, steps=1)
    assert torch.equal(by_step[0].to("cpu")[alias], by_step[0][name])


def selected_by(model, predicate):
    _, cache = model.run_with_cache(torch.tensor([[5, 6]]), names_filter=predicate)
    return set(cache)


def test_predicates_see_the_names_of_this_library(either):
    model = either.model
    known = dict.fromkeys(model.hook_dict, False) | {"blocks.0.hook_resid_mid": True}
    assert selected_by(model, lambda name: known[name]) == {"blocks.0.hook_resid_mid"}
    with pytest.raises(ValueError, match="matches no hook point; names look like"):
        selected_by(model, lambda name: name.endswith(".hook_out"))


def test_dictionaries_of_caching_hooks_are_read_by_aliases(either):
    model, tokens = either.model, either.tokens[:1, :5]
    alias, name = "blocks.1.hook_in", "blocks.1.hook_resid_pre"
    cached, forward, backward = model.get_caching_hooks([alias], incl_bwd=True)
    with model.hooks(forward, backward):
        model(tokens)[0, -1].logsumexp(-1).backward()
    model.zero_grad()  # the model is shared
    added = model.add_caching_hooks([alias])
    model(tokens)
    model.reset_hooks()
    assert list(cached) == [name, f"{name}_grad"]
    assert list(added) == [name]
    for values in (cached, added, ActivationCache(cached, model)):
        assert values[alias] is values[name]
        assert_close(values[alias], cached[name], rtol=0, atol=0)
    assert cached[f"{alias}_grad"] is cached[f"{name}_grad"]
    assert ActivationCache(cached, model)["in", 1] is cached[name]
    _, cache = model.run_with_cache(tokens, names_filter=alias)
    assert alias in cache
    assert name in cache
    assert "blocks.2.hook_in" not in cache
    everything, forward, _ = model.get_caching_hooks(lambda name: name.startswith("blocks.1."))
    with model.hooks(forward):
        model(tokens)
    assert everything[alias] is everything[name]
    with pytest.raises(ValueError, match=r"'blocks\.1\.attn\.hook_result' passes only after"):
        model.add_caching_hooks(["blocks.1.attn.hook_result"])


def test_earlier_names_of_this_library_warn(tiny):
    run = tiny.denoise("Ada is the", max_new_tokens=2, steps=2)
    for owner, earlier, name in (
        (tiny.cfg, "grows", "is_autoregressive"),
        (tiny.cfg, "rewrites", "uniform_noise"),
        (tiny.cfg, "is_told_time", "time_conditioning"),
        (run, "rewrites", "uniform_noise"),
    ):
        with pytest.warns(DeprecationWarning, match=f"{earlier} is now called {name}"):
            assert getattr(owner, earlier) == getattr(owner, name)
