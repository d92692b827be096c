"""Hook points of other people, torch's own hooks, what a hook may return, and threads."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformer_lens.hook_points import HookPoint

from diffusion_lens import Fact, HookedDiffusionTransformer
from diffusion_lens.analysis import causal_trace
from diffusion_lens.data import toy_facts
from diffusion_lens.interventions import at_steps, on_branch
from diffusion_lens.model.hooking import why_silent

MLP_OUT = "blocks.0.hook_mlp_out"
ACTS = f"{MLP_OUT}.hook_sae_acts"
PROMPT = torch.tensor([[5, 6, 7, 8]])


class Autoencoder(nn.Module):
    """A sparse autoencoder as others write them: it stands where a hook point stood, with plain ones of its own."""

    def __init__(self, d_model):
        super().__init__()
        self.encode = nn.Linear(d_model, 2 * d_model, bias=False)
        self.decode = nn.Linear(2 * d_model, d_model, bias=False)
        nn.init.normal_(self.encode.weight, std=0.1, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            self.decode.weight.copy_(torch.linalg.pinv(self.encode.weight))
        self.hook_sae_acts = HookPoint()

    def forward(self, x):
        return self.decode(self.hook_sae_acts(self.encode(x)))


@pytest.fixture(scope="module", params=["tiny-mdm", "tiny-ar"])
def spliced(request):
    """The embedded model with an autoencoder that loses nothing at a hook point."""
    model = HookedDiffusionTransformer.from_pretrained(request.param, device="cpu")
    model.blocks[0].hook_mlp_out = Autoencoder(model.cfg.d_model).requires_grad_(False)
    model.setup()
    return model


@pytest.fixture
def settings(spliced):
    return dict(length=7, steps=2, cfg_scale=0.7) if spliced.cfg.has_mask else dict(length=7)


def halve(activation, hook):
    return activation / 2


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_a_plain_hook_point_is_hooked_and_cached(spliced):
    tokens = torch.arange(5, 13)[None]
    _, cache = spliced.run_with_cache(tokens, pos_slice=slice(2, 4))
    assert cache[ACTS].shape == (1, 2, 2 * spliced.cfg.d_model)
    halved = spliced.run_with_hooks(tokens, fwd_hooks=[(ACTS, halve)])
    by_hand = spliced.run_with_hooks(tokens, fwd_hooks=[("blocks.0.mlp.hook_post", halve)])
    torch.testing.assert_close(halved, by_hand, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(halved, spliced(tokens), atol=1e-2)


def test_the_loop_runs_with_plain_hook_points_and_they_know_the_step(spliced, settings):
    plain = HookedDiffusionTransformer.from_pretrained(spliced.cfg.model_name, device="cpu")
    assert torch.equal(spliced.denoise(PROMPT, **settings).tokens, plain.denoise(PROMPT, **settings).tokens)
    seen = []
    watch = lambda a, hook: seen.append((hook.step.index, hook.step.branch, a.shape[0]))  # noqa: E731
    trajectory, cache = spliced.denoise_with_cache(PROMPT, ACTS, fwd_hooks=[(ACTS, at_steps(watch, 1))], **settings)
    branches = ["conditional", "unconditional"] if spliced.cfg.has_mask else ["conditional"]
    assert seen == [(1, branch, 1) for branch in branches]
    assert cache.stack(ACTS).shape == (trajectory.n_steps, 1, 7, 2 * spliced.cfg.d_model)


def test_a_hook_at_a_plain_point_does_in_the_loop_what_it_does_at_ours(spliced, settings):
    at_ours, at_theirs = (
        spliced.denoise(PROMPT, fwd_hooks=[(name, on_branch(halve, "conditional"))], **settings)
        for name in ("blocks.0.mlp.hook_post", ACTS)
    )
    torch.testing.assert_close(at_theirs.confidence, at_ours.confidence, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_a_causal_trace_runs_under_a_hook_at_a_plain_point(spliced):
    fact = toy_facts.load().facts(trained="p2d", asked="p2d")[0]
    query = fact.to_query(spliced, first_tokens=1)
    options = dict(kind="resid", noise=0.5, samples=1, seed=1, layers=[0, 2], positions=[0, 3])
    plain = HookedDiffusionTransformer.from_pretrained(spliced.cfg.model_name, device="cpu")
    torch.testing.assert_close(
        causal_trace(spliced, query, **options).scores,
        causal_trace(plain, query, **options).scores,
        rtol=1e-3,
        atol=1e-4,
    )
    with spliced.hooks(fwd_hooks=[(ACTS, halve)]):
        hooked = causal_trace(spliced, query, **options)
    with plain.hooks(fwd_hooks=[("blocks.0.mlp.hook_post", halve)]):
        expected = causal_trace(plain, query, **options)
    torch.testing.assert_close(hooked.scores, expected.scores, rtol=1e-3, atol=1e-4)


def test_a_hook_point_added_and_never_passed_hurts_nobody(either):
    model = copy.deepcopy(either.model)
    model.blocks[0].hook_sae = HookPoint()
    model.setup()
    assert torch.equal(model.denoise(PROMPT, length=6).tokens, either.model.denoise(PROMPT, length=6).tokens)


def test_a_hook_point_of_another_kind_keeps_its_kind(either):
    class Counting(HookPoint):
        passed = 0

        def forward(self, x):
            self.passed += 1
            return x

    model = copy.deepcopy(either.model)
    model.blocks[0].hook_mlp_out = Counting()
    model.setup()
    model(PROMPT)
    assert isinstance(model.blocks[0].hook_mlp_out, Counting)
    assert model.blocks[0].hook_mlp_out.passed == 1
    assert model.hook_dict[MLP_OUT].step is None


def test_torch_sees_every_hook_point_as_the_module_it_is(either):
    passed = []
    handle = register_module_forward_hook(
        lambda module, inputs, output: passed.append(module.name) if isinstance(module, HookPoint) else None
    )
    try:
        either.model(PROMPT)
    finally:
        handle.remove()
    reached = {name for name in either.model.hook_dict if not why_silent(either.model, name)}
    assert set(passed) == reached - {name for name in reached if name.endswith(("hook_attn_scores", "hook_pattern"))}


@pytest.mark.parametrize("everywhere", [True, False])
def test_torchs_own_hooks_see_one_branch_at_a_time(everywhere):
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    point, seen = model.hook_dict[MLP_OUT], []

    def watch(module, inputs, output):
        if module is point:
            seen.append((module.step.branch, output.shape[0]))

    handle = register_module_forward_hook(watch) if everywhere else point.register_forward_hook(watch)
    try:
        model.denoise(PROMPT, length=8, steps=1, cfg_scale=0.5)
    finally:
        handle.remove()
    assert seen == [("conditional", 1), ("unconditional", 1)]


def wrong_shape(activation, hook):
    return activation[:, :1]


def no_tensor(activation, hook):
    return 0.0


def whole_numbers(activation, hook):
    return activation.long()


@pytest.mark.parametrize("name", ["hook_embed", "blocks.1.attn.hook_z", "blocks.0.mlp.hook_post"])
@pytest.mark.parametrize(
    ("hook_fn", "error", "message"),
    [
        (wrong_shape, ValueError, r"wrong_shape\) returned \[3, 1, .*; the activation is \[3, 17, "),
        (no_tensor, TypeError, r"no_tensor\) returned float; a hook returns a tensor \[3, 17, .*None"),
        (whole_numbers, TypeError, r"whole_numbers\) returned torch.int64; the activation is torch.float32"),
    ],
)
def test_what_cannot_replace_an_activation_is_refused_by_name(either, name, hook_fn, error, message):
    with pytest.raises(error, match=rf"a hook at '{name}' \({message}"):
        either.model.run_with_hooks(either.tokens, fwd_hooks=[(name, hook_fn)])


def test_a_bad_hook_is_refused_alone_and_though_the_next_one_repairs_it(either):
    def repair(activation, hook):
        return activation[:, :1].expand(-1, 17, -1)

    for second in (repair, halve):
        with pytest.raises(ValueError, match=rf"a hook at '{MLP_OUT}' \([^,]*wrong_shape\) returned \[3, 1, "):
            either.model.run_with_hooks(either.tokens, fwd_hooks=[(MLP_OUT, wrong_shape), (MLP_OUT, second)])
    with either.model.hooks(fwd_hooks=[(MLP_OUT, wrong_shape), (MLP_OUT, repair)]):
        attached = either.model.list_hooks()[MLP_OUT]
    assert [handle.user_hook for handle in attached] == [wrong_shape, repair]


def test_a_float_of_another_width_is_cast(either):
    model, tokens = either.model, either.tokens
    double = model.run_with_hooks(tokens, fwd_hooks=[(MLP_OUT, lambda a, hook: a.double() / 2)])
    assert torch.equal(double, model.run_with_hooks(tokens, fwd_hooks=[(MLP_OUT, halve)]))
    short = copy.deepcopy(model).to("bfloat16")
    assert short.run_with_hooks(tokens, fwd_hooks=[(MLP_OUT, lambda a, hook: a.float())]).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "hook_fn", "error"),
    [
        ("denoise.hook_tokens", lambda a, hook: a[:, :-1], ValueError),
        ("denoise.hook_logits", lambda a, hook: a[..., :-5], ValueError),
        ("denoise.hook_candidates", lambda a, hook: a.float(), TypeError),
        ("denoise.hook_confidence", lambda a, hook: a[0], ValueError),
        ("denoise.hook_reveal", lambda a, hook: a.long(), TypeError),
    ],
)
def test_the_loops_hook_points_refuse_too(either, name, hook_fn, error):
    with pytest.raises(error, match=f"a hook at '{name}'"):
        either.model.denoise(PROMPT, length=8, fwd_hooks=[(name, hook_fn)])


def test_a_second_thread_is_refused_while_hooks_run(either):
    model, inside, done, caught = either.model, threading.Event(), threading.Event(), []

    def hold(activation, hook):
        inside.set()
        assert done.wait(20)

    def first():
        model.run_with_hooks(PROMPT, fwd_hooks=[("hook_embed", hold)])

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    try:
        for attempt in (
            lambda: model(PROMPT),
            lambda: model.denoise(PROMPT, length=6),
            lambda: model.run_with_cache(PROMPT),
        ):
            with pytest.raises(RuntimeError, match="another thread") as error:
                attempt()
            caught.append(error)
    finally:
        done.set()
        thread.join()
    assert len(caught) == 3
    model.run_with_cache(PROMPT)


def test_a_copy_taken_inside_a_run_belongs_to_no_thread(either):
    copies, logits = [], []
    with either.model.hooks():
        copies.append(copy.deepcopy(either.model))
    thread = threading.Thread(target=lambda: logits.append(copies[0](PROMPT)))
    thread.start()
    thread.join()
    assert torch.equal(logits[0], either.model(PROMPT))


def test_a_replaced_hook_point_is_said_to_be_gone(spliced):
    fact = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")
    message = (
        r"a module Autoencoder has replaced the hook point 'blocks\.0\.hook_mlp_out'; it has the hook points "
        r"blocks\.0\.hook_mlp_out\.hook_sae_acts\. Use another"
    )
    with pytest.raises(KeyError, match=message):
        causal_trace(spliced, fact, "mlp", noise=0.1, samples=1)
    with pytest.raises(KeyError, match=message):
        spliced.run_with_cache(fact.prompt, names_filter="blocks.0.hook_mlp_out")
    with pytest.raises(KeyError, match=r"there is no hook point 'blocks\.0\.mlp'; nearest are"):
        spliced.run_with_cache(fact.prompt, names_filter=["blocks.0.mlp"])
