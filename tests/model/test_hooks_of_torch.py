"""A hook of torch on a module does what the same hook does at the hook point that the module's output passes."""

import copy

import pytest
import torch
from torch import nn

from diffusion_lens import Query
from diffusion_lens.analysis import causal_trace, patch_grid, trace_trajectory
from diffusion_lens.model.build import build_parts
from diffusion_lens.model.hooking import has_module_hooks

POSITION = 4
# The module, and the hook point that what it returns passes next.
PASSES = {
    "embed": "hook_embed",
    "blocks.1.attn": "blocks.1.hook_attn_out",
    "blocks.1.mlp": "blocks.1.hook_mlp_out",
    "blocks.2.mlp": "blocks.2.hook_mlp_out",
}

everywhere = pytest.mark.parametrize("path", PASSES)
on_mdm = pytest.mark.parametrize("either", ["mdm"], indirect=True)


def query_of(source):
    """Two answer tokens after six tokens of a prompt."""
    blank = [source.model.cfg.mask_token_id] * 2 if source.kind == "mdm" else [31]
    return Query(torch.cat([source.tokens[0, :6], torch.tensor(blank)]), (1, 3), (6, 7), (31, 32))


def turned(activation):
    """Position 4 turned round, so that a hook that sees other rows, or fewer, does something else."""
    assert activation.shape[1] > POSITION
    changed = activation.clone()
    changed[:, POSITION] = -changed[:, POSITION].flip(-1)
    return changed


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


@everywhere
def test_rows_that_are_picked(either, path):
    tokens = query_of(either).tokens[None]

    def run():
        with torch.no_grad():
            return either.model(tokens, logits_at=[POSITION, 6])

    assert_alike(*alike(either.model, path, run))


@pytest.mark.parametrize("rows", [[2, 6], (torch.tensor([0, 0, 1]), torch.tensor([6, 2, 4]))])
def test_a_hook_on_the_head_sees_every_row(either, rows):
    tokens = either.tokens[:2, :8]

    def weighted(module, given, out):
        return out * torch.arange(out.shape[1])[:, None]

    handle = either.model.unembed.register_forward_hook(weighted)
    try:
        with torch.no_grad():
            whole, picked = either.model(tokens), either.model(tokens, logits_at=rows)
    finally:
        handle.remove()
    expected = whole[rows] if isinstance(rows, tuple) else whole[:, rows]
    torch.testing.assert_close(picked, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("either", "cfg_scale", "path"),
    [("mdm", 0.0, "embed"), ("mdm", 1.5, "blocks.1.attn"), ("mdm", 1.5, "blocks.2.mlp"), ("ar", 0.0, "blocks.1.mlp")],
    indirect=["either"],
)
def test_the_loop(either, cfg_scale, path):
    prompt = either.tokens[:1, :4]
    runs = alike(either.model, path, lambda: either.model.denoise(prompt, length=8, steps=3, cfg_scale=cfg_scale))
    assert torch.equal(runs[0].canvases, runs[1].canvases)
    assert_alike(*(run.confidence for run in runs))


@on_mdm
def test_one_branch_of_guidance_at_a_time(either):
    prompt = either.tokens[:1, :4]
    seen = []
    handle = either.model.blocks[1].mlp.register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape)))
    try:
        run = either.model.denoise(prompt, length=8, steps=2, cfg_scale=1.0)
    finally:
        handle.remove()
    assert {shape[0] for shape in seen} == {1}
    assert len(seen) == run.forward_passes == 4


@pytest.mark.parametrize(("path", "kind"), [("blocks.1.attn", "mlp"), ("blocks.1.mlp", "resid")])
def test_a_causal_trace(either, path, kind):
    query = query_of(either)

    def run():
        cells = dict(positions=[1, 5], layers=[0, 2])
        return causal_trace(either.model, query, kind=kind, window=1, noise=1.0, samples=1, **cells)

    assert_alike(*(trace.token_scores for trace in alike(either.model, path, run)))


def test_the_traces_of_a_trajectory(either):
    query = query_of(either)

    def run():
        return trace_trajectory(either.model, query, noise=1.0, samples=1, positions=[1], layers=[0])

    assert_alike(*(trace.clean_token_scores for trace in alike(either.model, "blocks.1.mlp", run)))


@pytest.mark.parametrize("method", ["exact", "attribution"])
def test_a_patch_grid(either, method):
    clean, corrupted = either.tokens[:2, None, :6]

    def run():
        return patch_grid(
            either.model,
            clean,
            corrupted,
            lambda logits: logits[:, -1].log_softmax(-1)[:, 40].sum(),
            sites="resid_pre",
            method=method,
        )

    assert_alike(*(grid.scores for grid in alike(either.model, "blocks.1.mlp", run)))


@pytest.fixture
def own(either):
    """A model of the test's own."""
    return copy.deepcopy(either.model)


@on_mdm
def test_hooks_on_a_module_added_later_act(own):
    block = build_parts(own.cfg.architecture)["blocks"][0]
    own.blocks[1].mlp = block.mlp
    assert not own.is_hooked
    own.blocks[1].mlp.register_forward_hook(lambda module, given, out: None)
    assert own.is_hooked


@on_mdm
@pytest.mark.parametrize(
    "attach", ["register_forward_pre_hook", "register_full_backward_hook", "register_forward_hook"]
)
def test_every_kind_counts_until_it_is_removed(own, attach):
    handle = getattr(own.blocks[2].mlp, attach)(lambda *given: None)
    assert own.is_hooked
    assert has_module_hooks(own)
    handle.remove()
    assert not own.is_hooked
    with own.hooks(fwd_hooks=[("denoise.hook_logits", lambda activation, hook: None)]):
        assert not own.is_hooked
    with own.hooks(fwd_hooks=[("blocks.2.hook_mlp_out", lambda activation, hook: None)]):
        assert own.is_hooked
        assert not has_module_hooks(own)


class Probe(nn.Module):
    """Holds the model that it belongs to, a list with a gap, and a name that a hook point might have."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_module("later", None)
        self.hook_here = nn.Linear(2, 2)


@on_mdm
def test_modules_of_the_users_in_the_model_are_no_hooks(own):
    own.probe = Probe(own)
    assert not own.is_hooked
    own.probe.hook_here.register_forward_hook(lambda module, given, out: None)
    assert own.is_hooked
