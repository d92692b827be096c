"""What must hold of every hook point, whatever the numbers."""

import pytest
import torch
from parts_by_hand import gate

from diffusion_lens.hooks.names import loop_hook
from diffusion_lens.model.hooking import why_silent


def network_hooks(model):
    return [name for name in model.hook_dict if not name.startswith(loop_hook(""))]


def poke(activation, hook):
    if hook.name.endswith("hook_experts"):  # another choice
        return (activation + 1) % 4
    return activation * 1.5 + 0.1


# Attention of each direction, by blocks to each kind of context, with and without [MASK], clipped and with experts.
of_each_attention = pytest.mark.parametrize(
    "every", ["llada_moe-options", "dream", "llama", "bd3lm", "nemotron-block", "uniform"], indirect=True
)


@pytest.fixture
def tokens(every):
    return every.tokens[:2, :8]


@pytest.mark.parametrize(
    "every", ["llada", "dream", "llama", "qwen3", "llada_moe-options", "mdlm", "sedd", "radd"], indirect=True
)
def test_every_hook_point_is_alive(every, tokens):
    model = every.model
    # Blocks are built alike: of the points in blocks, those of one.
    names = {name for name in network_hooks(model) if "blocks." not in name or name.startswith("blocks.1.")}
    dead, silent = set(), names
    for flag in ({}, {"use_attn_result": True, "use_hook_mlp_in": True}, {"use_split_qkv_input": True}):
        with model.optional_hooks(**flag):
            base = model(tokens)
            passing = {name for name in names if why_silent(model, name) is None}
            if flag:  # which changes what attention and the MLP read, and what a head writes
                passing = {name for name in passing if name in silent or ".attn." in name or ".ln" in name}
            hooked = {name: model.run_with_hooks(tokens, fwd_hooks=[(name, poke)]) for name in passing}
            dead |= {name for name, logits in hooked.items() if torch.allclose(logits, base)}
            silent = silent - passing
    assert dead == set()
    assert silent == {"blocks.1.attn.hook_attn_in"}


def test_the_hook_points_are_transformer_lens_names(every):
    per_block = {
        "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out",
        "ln1.hook_scale", "ln1.hook_normalized", "ln2.hook_scale", "ln2.hook_normalized",
        "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_rot_q", "attn.hook_rot_k",
        "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z", "attn.hook_result", "attn.hook_attn_in",
        "attn.hook_q_input", "attn.hook_k_input", "attn.hook_v_input", "hook_mlp_in",
    }  # fmt: skip
    of_mlp = {"hook_pre", "hook_pre_linear", "hook_post"}
    routed = {f"hook_{name}" for name in ("router_logits", "router_weights", "experts", "expert_out")}
    model = every.model
    n_experts = 0 if model.cfg.experts is None else model.cfg.experts.n_experts
    routed |= {f"experts.{expert}.{name}" for expert in range(n_experts) for name in of_mlp}
    if every.has_shared_expert:
        routed |= {f"shared.{name}" for name in of_mlp}
    if beside := model.cfg.experts is not None and model.cfg.experts.own_norms:
        routed |= {"hook_experts_out", "hook_shared_out"}
        norms = ("experts_norm", "experts_post", "shared_post")
        routed |= {f"{norm}.hook_{what}" for norm in norms for what in ("scale", "normalized")}
    if not model.cfg.gated_mlp:
        of_mlp.remove("hook_pre_linear")
    if model.cfg.time_conditioning:
        per_block.add("hook_modulation")
    if model.cfg.qk_norm:
        per_block |= {f"attn.{of}_norm.hook_{what}" for of in "qk" for what in ("scale", "normalized")}
    expected = {f"blocks.{i}.{name}" for i in range(model.cfg.n_layers) for name in per_block}
    for i in range(model.cfg.n_layers):
        expected |= {f"blocks.{i}.mlp.{name}" for name in (of_mlp if i in every.dense_layers else routed)}
        if every.has_shared_expert and i not in every.dense_layers and not beside:
            expected.add(f"blocks.{i}.hook_shared_out")
    expected |= {"hook_embed", "ln_final.hook_scale", "ln_final.hook_normalized"}
    if model.cfg.time_conditioning:
        expected |= {"hook_time", "hook_final_modulation"}
    if model.cfg.use_normalization_before_and_after:
        norms = [f"blocks.{i}.ln{n}_post" for i in range(model.cfg.n_layers) for n in (1, 2)]
        expected |= {f"{norm}.hook_{what}" for norm in norms for what in ("scale", "normalized")}
    if model.cfg.self_conditioning:
        of_signal = {f"mlp.{name}" for name in of_mlp} | {"norm.hook_scale", "norm.hook_normalized"}
        of_signal |= {"hook_expected", "hook_self_conditioning"}
        expected |= {f"self_conditioning.{name}" for name in of_signal} | {"denoise.hook_noise"}
    expected |= {f"denoise.hook_{name}" for name in ("tokens", "logits", "candidates", "confidence", "reveal")}
    assert set(model.hook_dict) == expected
    assert all(point.name == name for name, point in model.hook_dict.items())


def test_identity_hooks_change_no_bit(every, tokens):
    plain, names = every.model(tokens), network_hooks(every.model)
    for hook_fn in (lambda activation, hook: None, lambda activation, hook: activation):
        hooked = every.model.run_with_hooks(tokens, fwd_hooks=[(lambda name: name in names, hook_fn)])
        assert torch.equal(hooked, plain)
    # A copied pattern is used as given: same numbers, another order of summation.
    names = [name for name in names if not name.endswith(("hook_attn_scores", "hook_pattern"))]
    copy = lambda activation, hook: activation.clone()  # noqa: E731
    assert torch.equal(every.model.run_with_hooks(tokens, fwd_hooks=[(lambda name: name in names, copy)]), plain)


@of_each_attention
def test_a_replaced_pattern_is_used(every, tokens):
    copied = every.model.run_with_hooks(
        tokens, fwd_hooks=[(lambda name: name.endswith("hook_pattern"), lambda pattern, hook: pattern.clone())]
    )
    torch.testing.assert_close(copied, every.model(tokens), rtol=1e-5, atol=5e-5)


@of_each_attention
@pytest.mark.parametrize("site", ["hook_pattern", "hook_attn_scores"])
def test_writing_into_a_pattern_in_place_has_an_effect(every, tokens, site):
    def blind_to_first(activation, hook):
        activation[..., 0] = float("-inf") if site == "hook_attn_scores" else 0.0

    # Row 0 of a causal pattern sees only itself, so it is left out of the comparison by NaN; the rows after it count.
    hooked = every.model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.0.attn.{site}", blind_to_first)])
    assert not torch.allclose(hooked[:, 1:], every.model(tokens)[:, 1:])


@of_each_attention
def test_gradients_reach_a_hooked_pattern(every, tokens):
    seen = []

    def keep(pattern, hook):
        pattern.retain_grad()
        seen.append(pattern)

    logits = every.model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_pattern", keep)])
    logits[:, -1].sum().backward()
    every.model.zero_grad()
    assert seen[0].grad is not None
    assert seen[0].grad.abs().max() > 0


def with_open_block(every, tokens):
    """Tokens whose last three are in an open block, where a model has finished ones that see no later token."""
    opened = tokens.clone()
    if every.model.cfg.counts_from_prompt and every.model.cfg.has_mask:
        opened[:, -3] = every.model.cfg.blank
    return opened


def test_pattern_rows_sum_to_one_and_respect_the_direction(every, tokens):
    _, cache = every.model.run_with_cache(with_open_block(every, tokens))
    pattern = cache["pattern", 0]
    torch.testing.assert_close(pattern.sum(-1), torch.ones_like(pattern[..., 0]))
    above = pattern.triu(diagonal=1).abs().max().item()
    assert (above == 0) == (every.kind == "ar")


def test_a_later_token_moves_an_earlier_row_only_when_bidirectional(every, tokens):
    tokens = with_open_block(every, tokens)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 500
    moved = not torch.equal(every.model(tokens)[:, :-1], every.model(changed)[:, :-1])
    assert moved == (every.kind != "ar")


def test_head_results_sum_to_attn_out(summed):
    model = summed.model
    model.set_use_attn_result(True)
    try:
        _, cache = model.run_with_cache(summed.tokens[:2, :8])
    finally:
        model.set_use_attn_result(False)
    summed = cache["result", 1].sum(2) + model.b_O[1] * gate(model, cache, 1, "attn")
    torch.testing.assert_close(summed, cache["attn_out", 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", ["blocks.1.hook_resid_psot", "hook_embedd", "blocks.9.hook_resid_post"])
def test_an_unknown_hook_point_offers_the_nearest(either, bad):
    tokens = either.tokens
    for attempt in (
        lambda: either.model.run_with_hooks(tokens, fwd_hooks=[(bad, poke)]),
        lambda: either.model.run_with_cache(tokens, names_filter=bad),
        lambda: either.model.run_with_cache(tokens, names_filter=["hook_embed", bad]),
        lambda: either.model.add_hook(bad, poke),
    ):
        with pytest.raises(KeyError, match="nearest") as error:
            attempt()
        assert bad in str(error.value)
        assert any(name in str(error.value) for name in ("hook_resid_post", "hook_embed"))


def test_a_filter_that_matches_nothing_is_an_error(several):
    tokens = several.tokens
    nothing = lambda name: "no such" in name  # noqa: E731
    with pytest.raises(ValueError, match="matches no hook point"):
        several.model.run_with_cache(tokens, names_filter=nothing)
    with pytest.raises(ValueError, match="matches no hook point"):
        several.model.run_with_hooks(tokens, fwd_hooks=[(nothing, poke)])


def test_a_hook_point_that_a_plain_pass_never_reaches_says_so(several):
    tokens = several.tokens
    with pytest.raises(ValueError, match="set_use_attn_result"):
        several.model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_result", poke)])
    with pytest.raises(ValueError, match="inside the denoising loop"):
        several.model.run_with_cache(tokens, names_filter="denoise.hook_logits")


def test_nothing_stays_hooked_when_a_hook_raises(several):
    tokens = several.tokens

    def boom(activation, hook):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        several.model.run_with_cache(tokens, names_filter="hook_embed", stop_at_layer=None) and (
            several.model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_mlp_out", boom)])
        )
    assert not several.model.list_hooks()
    assert not several.model.is_caching


def test_outside_the_loop_there_is_no_step(several):
    tokens = several.tokens
    steps = []
    several.model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", lambda a, hook: steps.append(hook.step))])
    assert steps == [None]
