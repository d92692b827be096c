"""A hook of torch on a module does what the same hook does at the hook point that the module's output passes."""

import copy

import pytest
import torch
from torch import nn

from diffusion_lens.analysis import causal_trace, patch_grid, trace_trajectory
from diffusion_lens.data import toy_facts
from diffusion_lens.model.build import build_blocks

PLACE = 4
FACTS = toy_facts.load().facts(trained="p2d", asked="p2d")
# The module, and the hook point that what it returns passes next.
PASSES = {
    "embed": "hook_embed",
    "blocks.1.attn": "blocks.1.hook_attn_out",
    "blocks.1.mlp": "blocks.1.hook_mlp_out",
    "blocks.3.mlp": "blocks.3.hook_mlp_out",
}

everywhere = pytest.mark.parametrize("path", PASSES)
both = pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar"], indirect=True)


def turned(activation):
    """Place 4 turned round, so that a hook that sees other rows, or fewer, does something else."""
    assert activation.shape[1] > PLACE
    shown = activation.clone()
    shown[:, PLACE] = -shown[:, PLACE].flip(-1)
    return shown


def alike(model, path, run):
    """What a run gives under the hook of torch, under the hook at the point, and without."""
    handle = model.get_submodule(path).register_forward_hook(lambda module, given, out: turned(out))
    try:
        of_torch = run()
    finally:
        handle.remove()
    with model.hooks(fwd_hooks=[(PASSES[path], lambda activation, hook: turned(activation))]):
        at_point = run()
    return of_torch, at_point, run()


def assert_alike(of_torch, at_point, plain):
    torch.testing.assert_close(of_torch, at_point, rtol=0, atol=1e-5, equal_nan=True)
    assert not torch.allclose(of_torch, plain, atol=1e-4, equal_nan=True)


@both
@everywhere
def test_rows_that_are_picked(tiny, path):
    tokens = FACTS[0].to_query(tiny).tokens[None]

    def run():
        with torch.no_grad():
            return tiny(tokens, logits_at=[PLACE, 6])

    assert_alike(*alike(tiny, path, run))


@both
@pytest.mark.parametrize("rows", [[2, 6], (torch.tensor([0, 0, 1]), torch.tensor([6, 2, 4]))])
def test_a_hook_on_the_head_sees_every_row(tiny, rows):
    tokens = FACTS[0].to_query(tiny).tokens[None].repeat(2, 1)
    tokens = torch.cat([tokens, tokens], dim=1)[:, :12]

    def backwards(module, given, out):
        return out * torch.arange(out.shape[1])[:, None]

    handle = tiny.unembed.register_forward_hook(backwards)
    try:
        with torch.no_grad():
            whole, picked = tiny(tokens), tiny(tokens, logits_at=rows)
    finally:
        handle.remove()
    expected = whole[rows] if isinstance(rows, tuple) else whole[:, rows]
    torch.testing.assert_close(picked, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("tiny", "cfg_scale"), [("tiny-mdm", 0.0), ("tiny-mdm", 1.5), ("tiny-ar", 0.0)], indirect=["tiny"]
)
@everywhere
def test_the_loop(tiny, path, cfg_scale):
    prompt = tiny.to_tokens([fact.prompt for fact in FACTS[:1]])
    runs = alike(tiny, path, lambda: tiny.denoise(prompt, length=14, steps=4, cfg_scale=cfg_scale))
    assert torch.equal(runs[0].canvases, runs[1].canvases)
    assert_alike(*(run.confidence for run in runs))


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_one_branch_of_guidance_at_a_time(tiny):
    prompt = tiny.to_tokens([FACTS[0].prompt])
    seen = []
    handle = tiny.blocks[1].mlp.register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape)))
    try:
        run = tiny.denoise(prompt, length=14, steps=2, cfg_scale=1.0)
    finally:
        handle.remove()
    assert {shape[0] for shape in seen} == {1}
    assert len(seen) == run.forward_passes == 4


@both
@pytest.mark.parametrize("path", ["blocks.1.attn", "blocks.1.mlp"])
@pytest.mark.parametrize("kind", ["resid", "mlp"])
def test_a_causal_trace(tiny, path, kind):
    query = FACTS[0].to_query(tiny)

    def run():
        return causal_trace(tiny, query, kind=kind, window=1, noise=1.0, samples=2, positions=[1, 5], layers=[0, 2])

    assert_alike(*(trace.token_scores for trace in alike(tiny, path, run)))


@both
def test_the_traces_of_a_trajectory(tiny):
    query = FACTS[0].to_query(tiny)

    def run():
        return trace_trajectory(tiny, query, noise=1.0, samples=2, positions=[1, 5], layers=[0, 2])

    assert_alike(*(trace.clean_token_scores for trace in alike(tiny, "blocks.1.mlp", run)))


@both
@pytest.mark.parametrize("method", ["exact", "attribution"])
def test_a_patch_grid(tiny, method):
    clean, corrupted = (fact.to_query(tiny).tokens for fact in FACTS[:2])
    n_pos = min(len(clean), len(corrupted))

    def run():
        return patch_grid(
            tiny,
            clean[None, :n_pos],
            corrupted[None, :n_pos],
            lambda logits: logits[:, -1].log_softmax(-1)[:, 40].sum(),
            sites="resid_pre",
            method=method,
        )

    assert_alike(*(grid.scores for grid in alike(tiny, "blocks.1.mlp", run)))


@pytest.fixture
def own(tiny):
    """A model of the test's own."""
    return copy.deepcopy(tiny)


def test_a_module_put_in_since_is_heard(own):
    block = next(iter(build_blocks(own.cfg.architecture)))
    own.blocks[1].mlp = block.mlp
    assert not own.is_hooked
    own.blocks[1].mlp.register_forward_hook(lambda module, given, out: None)
    assert own.is_hooked


@pytest.mark.parametrize(
    "attach", ["register_forward_pre_hook", "register_full_backward_hook", "register_forward_hook"]
)
def test_every_kind_counts_until_it_is_removed(own, attach):
    handle = getattr(own.blocks[2].mlp, attach)(lambda *given: None)
    assert own.is_hooked
    assert own.has_module_hooks
    handle.remove()
    assert not own.is_hooked
    with own.hooks(fwd_hooks=[("denoise.hook_logits", lambda activation, hook: None)]):
        assert not own.is_hooked
    with own.hooks(fwd_hooks=[("blocks.2.hook_mlp_out", lambda activation, hook: None)]):
        assert own.is_hooked
        assert not own.has_module_hooks


class Probe(nn.Module):
    """Holds the model that it belongs to, a list with a gap, and a name that a hook point might have."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_module("later", None)
        self.hook_here = nn.Linear(2, 2)


def test_modules_of_the_users_in_the_model_are_no_hooks(own):
    own.probe = Probe(own)
    assert not own.is_hooked
    own.probe.hook_here.register_forward_hook(lambda module, given, out: None)
    assert own.is_hooked
