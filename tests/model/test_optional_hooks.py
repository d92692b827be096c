"""Hook points that pass only under a flag: copies of the residual stream for each head, and for the MLP."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from parts_by_hand import clipped, normed
from torch.testing import assert_close
from transformer_lens.hook_points import HookPoint

from diffusion_lens.model.hooking import FLAGS, OptionalHooks

CLOSE = dict(rtol=1e-4, atol=1e-5)
BLOCK = "blocks.1"


@pytest.fixture
def tokens(every):
    return every.tokens[:2, :8]


@pytest.fixture
def change(every):
    return torch.randn(every.model.cfg.d_model, generator=torch.Generator().manual_seed(0))


def flags_of(model):
    """The flags that a model can have: grouped heads exclude `use_attn_in`."""
    grouped = model.cfg.n_key_value_heads != model.cfg.n_heads
    return sorted(set(FLAGS.values()) - ({"use_attn_in"} if grouped else set()))


def test_a_flag_without_hooks_changes_no_number_and_lets_its_points_pass(every, tokens):
    model = every.model
    expected = model(tokens)
    for flag in flags_of(model):
        with model.optional_hooks(**{flag: True}):
            logits, cache = model.run_with_cache(tokens)
        assert_close(logits, expected, **CLOSE)
        passing = {name.rpartition(".")[2] for name in cache}
        assert {FLAGS[point] for point in passing & set(FLAGS)} == {flag}
        assert {point for point in FLAGS if FLAGS[point] == flag} <= passing


@pytest.mark.parametrize("fold_ln", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "a2d-qwen3"])
def test_head_norms_and_folded_norms_see_the_copies(family, fold_ln, specimen, configs):
    """Grouped heads with norms of their own: no number changes, and a copy is the stream that enters the block."""
    built = specimen(configs[family])
    model, tokens = built.model, built.tokens[:2, :8]
    if fold_ln:
        model.enable_compatibility_mode()
    expected, plain = model.run_with_cache(tokens)
    for flag in flags_of(model):
        with model.optional_hooks(**{flag: True}):
            logits, cache = model.run_with_cache(tokens)
        assert_close(logits, expected, **CLOSE)
        for name in cache:
            if name in plain:
                assert_close(cache[name], plain[name], **CLOSE)
                continue
            point = name.rpartition(".")[2]
            if point == "hook_result":
                summed = cache[name].sum(dim=2) + model.blocks[1].attn.b_O if name.startswith("blocks.1.") else None
                if summed is not None:
                    assert_close(summed, plain["attn_out", 1], **CLOSE)
            else:
                stream = name.split(".")[1]
                read = plain["resid_mid" if point == "hook_mlp_in" else "resid_pre", int(stream)]
                assert_close(cache[name], read if point == "hook_mlp_in" else read[:, :, None].expand_as(cache[name]))


def test_a_hook_of_torch_that_a_flag_passes_over_is_refused_at_the_pass(either):
    """Also one that was attached after the flag was set."""
    model, tokens = either.model, either.tokens[:1, :6]
    double = lambda module, args, out: 2 * out  # noqa: E731
    modules = {
        "use_attn_result": "attn.o",
        "use_split_qkv_input": "attn.k",
    }
    for flag, name in modules.items():
        with model.optional_hooks(**{flag: True}):
            handle = model.blocks[1].get_submodule(name).register_forward_hook(double)
            with pytest.raises(ValueError, match=f"'blocks.1.{name}' carries a hook, and {flag} uses its weight"):
                model(tokens)
            handle.remove()
            model(tokens)


def test_a_hook_that_would_stop_passing_is_refused(either):
    model = either.model
    model.set_use_hook_mlp_in(True)
    with model.hooks([("blocks.0.hook_mlp_in", lambda activation, hook: activation)]):
        with (
            pytest.raises(ValueError, match=r"the hook at 'blocks\.0\.hook_mlp_in' would not be called here"),
            model.optional_hooks(use_attn_result=True),
        ):
            pass
        with model.optional_hooks(use_hook_mlp_in=True, use_attn_result=True):
            pass
    model.set_use_hook_mlp_in(False)


def test_changing_all_copies_alike_changes_what_attention_reads(every, tokens, change):
    """Against a run in which the stream itself changes, whose attention output is patched into the plain run."""
    model = every.model

    def add(activation, hook):
        activation += change  # in place: the residual stream itself must not change

    attn_out = f"{BLOCK}.hook_attn_out"
    with model.hooks(fwd_hooks=[(f"{BLOCK}.hook_resid_pre", lambda activation, hook: activation + change)]):
        _, cache = model.run_with_cache(tokens, names_filter=attn_out)
    expected = model.run_with_hooks(tokens, fwd_hooks=[(attn_out, lambda activation, hook: cache[attn_out])])
    copies = {"use_split_qkv_input": ["q_input", "k_input", "v_input"], "use_attn_in": ["attn_in"]}
    for flag in copies.keys() & set(flags_of(model)):
        with model.optional_hooks(**{flag: True}):
            hooks = [(f"{BLOCK}.attn.hook_{copy}", add) for copy in copies[flag]]
            assert_close(model.run_with_hooks(tokens, fwd_hooks=hooks), expected, **CLOSE)


def test_a_change_of_the_mlps_copy_is_a_change_of_what_it_reads(every, tokens, change):
    model = every.model
    outputs = [name for name in (f"{BLOCK}.hook_mlp_out", f"{BLOCK}.hook_shared_out") if name in model.hook_dict]
    with model.hooks(fwd_hooks=[(f"{BLOCK}.hook_resid_mid", lambda activation, hook: activation + change)]):
        _, cache = model.run_with_cache(tokens, names_filter=outputs)
    hooks = [(name, lambda activation, hook: cache[hook.name]) for name in outputs]
    expected = model.run_with_hooks(tokens, fwd_hooks=hooks)
    with model.optional_hooks(use_hook_mlp_in=True):
        hook = (f"{BLOCK}.hook_mlp_in", lambda activation, hook: activation.add_(change))
        assert_close(model.run_with_hooks(tokens, fwd_hooks=[hook]), expected, **CLOSE)


def test_the_copy_of_one_head_changes_the_projection_of_that_head(summed):
    model = summed.model
    tokens = summed.tokens[:2, :8]
    change = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    _, plain = model.run_with_cache(tokens)
    for of in "qkv":
        assert_only_head_1_follows(model, tokens, change, plain, of)


def assert_only_head_1_follows(model, tokens, change, plain, of):
    attn = model.blocks[1].attn

    def change_head_1(activation, hook):
        activation[:, :, 1] += change

    hooks = [(f"{BLOCK}.attn.hook_{of}_input", change_head_1)]
    with model.optional_hooks(use_split_qkv_input=True), model.hooks(fwd_hooks=hooks):
        _, cache = model.run_with_cache(tokens)
    stream = plain["resid_pre", 1] + change
    centred = stream if model.cfg.uses_rms_norm else stream - stream.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + model.cfg.eps).sqrt()
    normalized = normed(model, plain, "blocks.1.ln1", scaled)
    projected = normalized @ getattr(attn, f"W_{of.upper()}")[1] + getattr(attn, f"b_{of.upper()}")[1]
    if of == "v":  # queries and keys are clipped after their hook points
        projected = clipped(model, projected)
    assert_close(cache[of, 1][:, :, 1], projected, **CLOSE)
    for other in "qkv":
        kept = [head for head in range(plain[other, 1].shape[2]) if head != 1 or other != of]
        assert_close(cache[other, 1][:, :, kept], plain[other, 1][:, :, kept], **CLOSE)
    assert_close(cache["resid_pre", 1], plain["resid_pre", 1], **CLOSE)


def test_gradients_at_the_copies_add_up_to_that_of_what_attention_reads(either):
    """The gradient at the stream is that of the skip connection plus those of all copies."""
    model, tokens = either.model, either.tokens[:1, :6]
    gradients = {}

    def keep(gradient, hook):
        gradients[hook.name] = gradient.clone()

    names = [f"{BLOCK}.hook_resid_pre", *(f"{BLOCK}.attn.hook_{of}_input" for of in "qkv"), f"{BLOCK}.hook_resid_mid"]
    with model.optional_hooks(use_split_qkv_input=True), model.hooks(bwd_hooks=[(name, keep) for name in names]):
        model(tokens)[0, -1].logsumexp(-1).backward()
    model.zero_grad()
    stream, *copies, skipped = (gradients[name] for name in names)
    assert_close(stream, skipped + sum(copy.sum(dim=2) for copy in copies), **CLOSE)


def test_the_loop_has_the_copies_of_each_step(either):
    model = either.model
    name = f"{BLOCK}.attn.hook_k_input"
    with model.optional_hooks(use_split_qkv_input=True):
        trajectory, cache = model.denoise_with_cache(torch.tensor([[5, 6]]), name, length=5, steps=3)
    canvas = trajectory.canvases[1]
    canvas = canvas[:, : int((canvas >= 0).sum())]  # the positions that a causal model has reached
    _, expected = model.run_with_cache(canvas, names_filter=f"{BLOCK}.hook_resid_pre")
    assert cache[1][name].shape == (1, 5, model.cfg.n_key_value_heads, model.cfg.d_model)
    for head in range(model.cfg.n_key_value_heads):
        assert_close(cache[1][name][:, : canvas.shape[1], head], expected["resid_pre", 1], **CLOSE)


def test_flags_are_refused_where_they_do_not_fit(either):
    model = either.model
    assert model.cfg.n_key_value_heads != model.cfg.n_heads
    with pytest.raises(ValueError, match=r"share 2 key/value heads; use set_use_split_qkv_input"):
        model.set_use_attn_in(True)
    with pytest.raises(TypeError, match="use_hook_mlp_in='no'"):
        model.set_use_hook_mlp_in("no")
    with pytest.raises(ValueError, match=r"model\.set_use_split_qkv_input\(True\)"):
        model.run_with_cache(either.tokens, names_filter=f"{BLOCK}.attn.hook_q_input")
    now = r"model\.set_use_split_qkv_input\(False\): now each head normalises"
    with model.optional_hooks(use_split_qkv_input=True), pytest.raises(ValueError, match=now):
        model.run_with_cache(either.tokens, names_filter=f"{BLOCK}.ln1.hook_scale")
    assert OptionalHooks.of(model.cfg) == OptionalHooks()


def test_the_flags_of_before_come_back_after_an_error(specimen, configs):
    model = specimen(configs["llama"]).model
    model.set_use_attn_in(True)
    with pytest.raises(ValueError, match="exclude each other"):
        model.set_use_split_qkv_input(True)
    with model.optional_hooks(use_split_qkv_input=True, use_attn_result=True):
        assert OptionalHooks.of(model.cfg) == OptionalHooks(use_attn_result=True, use_split_qkv_input=True)
    with pytest.raises(KeyError, match="nearest"), model.optional_hooks(use_split_qkv_input=True):
        model.run_with_hooks(torch.tensor([[5]]), fwd_hooks=[("blocks.1.hook_q_inputs", print)])
    assert OptionalHooks.of(model.cfg) == OptionalHooks(use_attn_in=True)


def nothing(activation, hook):
    return activation * 0


@pytest.mark.parametrize(
    ("name", "flag"), [("ln1", "use_split_qkv_input"), ("attn.k", "use_split_qkv_input"), ("attn.o", "use_attn_result")]
)
def test_a_flag_that_would_bypass_a_hook_or_a_module_is_refused(name, flag, either):
    model = either.model
    parent, _, last = f"{BLOCK}.{name}".rpartition(".")
    module = model.get_submodule(f"{BLOCK}.{name}")
    handle = module.register_forward_hook(lambda module, inputs, out: out * 0)
    with pytest.raises(ValueError, match=f"'{BLOCK}.{name}' carries a hook, and {flag} uses its weight directly"):
        getattr(model, f"set_{flag}")(True)
    handle.remove()
    setattr(model.get_submodule(parent), last, torch.nn.Sequential(module))
    with (
        pytest.raises(ValueError, match=f"'{BLOCK}.{name}' is a module Sequential"),
        model.optional_hooks(**{flag: True}),
    ):
        pass
    setattr(model.get_submodule(parent), last, module)
    hooked = model.hooks(fwd_hooks=[(f"{BLOCK}.ln1.hook_normalized", nothing)])
    with hooked, pytest.raises(ValueError, match="carries a hook"):
        model.set_use_split_qkv_input(True)
    assert OptionalHooks.of(model.cfg) == OptionalHooks()


def test_flags_of_a_context_belong_to_one_thread(either):
    model = either.model
    with ThreadPoolExecutor(1) as pool, model.optional_hooks(use_hook_mlp_in=True):
        refused = pool.submit(model, either.tokens)
        assert "another thread" in str(refused.exception())
    model(either.tokens)


class Zero(torch.nn.Module):
    def forward(self, x):
        return 0 * x


@pytest.fixture
def put(either):
    """A function that puts a module in the place of a hook point; the hook points come back after the test."""
    model, replaced = either.model, {}

    def put_it(name, module):
        parent, _, last = name.rpartition(".")
        replaced.setdefault(name, model.get_submodule(name))
        setattr(model.get_submodule(parent), last, module)
        model.setup()

    yield put_it
    for name, point in list(replaced.items()):
        put_it(name, point)


@pytest.mark.parametrize("module", [Zero(), type("ZeroPoint", (HookPoint,), {"forward": Zero.forward})()])
def test_a_module_in_the_place_of_a_point_that_does_not_pass_is_refused(either, put, module):
    model, tokens = either.model, either.tokens[:1, :4]
    kind = type(module).__name__
    normalized = f"{BLOCK}.ln1.hook_normalized"
    point = model.get_submodule(normalized)
    put(normalized, module)
    model(tokens)
    with pytest.raises(ValueError, match=f"ln1. has in the place of .hook_normalized. a module {kind}, and use_split"):
        model.set_use_split_qkv_input(True)
    put(normalized, point)
    with model.optional_hooks(use_split_qkv_input=True):
        put(normalized, module)
        with pytest.raises(ValueError, match=f"{kind}, and use_split_qkv_input uses its weight directly"):
            model(tokens)
        put(normalized, point)
    for name in sorted(OPTIONAL_POINTS):
        point = model.get_submodule(f"{BLOCK}.{name}")
        put(f"{BLOCK}.{name}", module)
        flag = OPTIONAL_POINTS[name]
        with pytest.raises(ValueError, match=f"'{BLOCK}.{name}' is a module {kind}.*set_{flag}.True.: call it"):
            model(tokens)
        put(f"{BLOCK}.{name}", point)
    model(tokens)


OPTIONAL_POINTS = {
    "attn.hook_result": "use_attn_result",
    "attn.hook_q_input": "use_split_qkv_input",
    "attn.hook_k_input": "use_split_qkv_input",
    "attn.hook_v_input": "use_split_qkv_input",
    "attn.hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
}


@pytest.mark.parametrize("of_torch", [False, True])
def test_only_a_predicate_may_hook_a_point_that_does_not_pass(either, of_torch):
    model, tokens = either.model, either.tokens[:1, :4]

    def refused(name, message):
        point = model.get_submodule(name)
        handle = point.register_forward_hook(lambda *args: None) if of_torch else point.add_hook(nothing).hook
        with pytest.raises(ValueError, match=message):
            model(tokens)
        handle.remove()
        point.remove_hooks()

    with model.hooks(fwd_hooks=[(lambda name: True, lambda activation, hook: None)]):
        model(tokens)
        refused(f"{BLOCK}.attn.hook_result", f"'{BLOCK}.attn.hook_result' carries a hook, and passes only after")
    with model.optional_hooks(use_split_qkv_input=True):
        with model.hooks(fwd_hooks=[(lambda name: True, lambda activation, hook: None)]):
            model(tokens)
        refused(f"{BLOCK}.ln1.hook_normalized", "'blocks.1.ln1' carries a hook, and use_split_qkv_input uses")
    model.set_use_attn_result(True)
    model.add_hook(f"{BLOCK}.attn.hook_result", nothing)
    model.set_use_attn_result(False)
    with pytest.raises(ValueError, match=f"'{BLOCK}.attn.hook_result' carries a hook"):
        model(tokens)
    model.reset_hooks()
    model(tokens)
