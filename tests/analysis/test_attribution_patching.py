"""Attribution patching: the right gradient, exact where it must be, measured where it is not."""

import copy

import pytest
import torch

from diffusion_lens.analysis.patching import PatchGrid, patch_grid
from diffusion_lens.analysis.patching.runs import PATCH_SITES

# A masked diffusion model and a causal one; with time conditioning, one by blocks and one under uniform noise; and
# experts.
every_kind = pytest.mark.parametrize(
    "every", ["lit_gpt-mdm", "lit_gpt-ar", "bd3lm", "udlm", "llada_moe-options"], indirect=True
)


def metric(logits):
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


def attribute(model, clean, corrupted, sites, **options):
    return patch_grid(model, clean, corrupted, metric, sites, method="attribution", **options)


@pytest.fixture
def runs():
    """Six positions, of which the row that is read is in the second block of four."""
    return torch.tensor([[11, 22, 33, 44, 55, 66]]), torch.tensor([[11, 99, 33, 44, 55, 66]])


def nearby(model, distance):
    """The model with its embeddings moved a little: a clean run at a small distance from the corrupted one."""
    moved = copy.deepcopy(model)
    moved.clock.time = model.clock.time
    weight = moved.embed.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.data += distance * weight.std() * direction
    return moved


@every_kind
def test_estimates_are_transformer_lenss(every, runs):
    """TransformerLens scores the writers of the residual stream: heads and MLPs, by position."""
    grids = attribute(every.model, *runs, ["z", "mlp_out"])
    from transformer_lens.tools.analysis.attribution_patching import attribution_patch  # takes a second

    theirs = attribution_patch(every.model, *runs, metric).node_scores
    for node, effect in theirs.items():
        if node.kind == "attn_head_out":
            ours = grids["z"].effect[node.layer, node.position, node.head]
        elif node.kind == "mlp_out":
            ours = grids["mlp_out"].effect[node.layer, node.position]
        else:
            continue
        assert ours.item() == pytest.approx(effect, rel=1e-4, abs=1e-4)


@every_kind
@pytest.mark.parametrize("site", ["resid_post", "mlp_out"])
def test_exact_where_the_metric_is_linear(every, runs, site):
    """After the last block only the final norm bends what is patched; with its scale fixed, nothing does."""
    fixed = [("ln_final.hook_scale", lambda scale, hook: torch.full_like(scale, 2.0))]
    with every.model.hooks(fwd_hooks=fixed):
        estimate = attribute(every.model, *runs, site, layers=[2])
        exact = patch_grid(every.model, *runs, metric, site, layers=[2])
    assert exact.effect.abs().max() > 0.01
    torch.testing.assert_close(estimate.scores, exact.scores, rtol=1e-4, atol=1e-4)
    assert estimate.error.max_abs < 1e-3 * exact.effect.abs().max()


@every_kind
def test_halving_the_distance_quarters_the_error(every, runs):
    """What a first-order estimate leaves out is of second order, at every site, through the softmax as well."""
    tokens, settings = runs[0], dict(sites=list(PATCH_SITES), positions="all", layers=[0, 2])
    model = every.tell(copy.deepcopy(every.model).double())
    far, near = (attribute(model, tokens, tokens, source_model=nearby(model, x), **settings) for x in (8e-5, 4e-5))
    for site in PATCH_SITES:
        relative = [
            float(grids[site].error.difference.norm() / grids[site].error.exact.norm()) for grids in (far, near)
        ]
        assert relative[0] < 0.02, site
        assert relative[1] / relative[0] == pytest.approx(0.5, abs=0.02), site


@every_kind
def test_the_error_is_measured_on_the_largest_cells(every, runs):
    grid, exact = attribute(every.model, *runs, "z", check=5), patch_grid(every.model, *runs, metric, "z")
    error = grid.error
    chosen = tuple(error.cells.T)
    assert len(error.cells) == 5
    largest = grid.effect.abs().flatten().sort(descending=True).values
    assert set(grid.effect[chosen].abs().tolist()) == set(largest[:5].tolist())
    torch.testing.assert_close(error.exact, exact.effect[chosen], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(error.estimated, grid.effect[chosen], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(error.difference, grid.scores[chosen] - exact.scores[chosen], rtol=1e-4, atol=1e-4)
    assert error.max_abs == pytest.approx(float((grid.scores - exact.scores)[chosen].abs().max()), rel=1e-3)
    table = torch.stack([grid.scores[chosen], exact.scores[chosen]])
    assert error.correlation == pytest.approx(float(torch.corrcoef(table)[0, 1]), abs=1e-4)
    assert attribute(every.model, *runs, "z", check=0).error is None
    assert len(attribute(every.model, *runs, "mlp_out", check=1000).error.cells) == 18


def test_one_forward_pass_of_each_input_and_one_backward_pass(either, runs):
    passes = []
    count = ("hook_embed", lambda embedding, hook: passes.append(len(embedding)))
    blocks = ("blocks.0.hook_mlp_out", lambda out, hook: passes.append(0))
    with either.model.hooks(fwd_hooks=[count, blocks]):
        attribute(either.model, *runs, list(PATCH_SITES), check=0)
    assert passes == [1, 0, 1, 0]


@every_kind
def test_parameters_and_grad_mode_play_no_part(every, runs):
    """Estimates are the same under no_grad, in inference mode and with frozen weights, and leave no gradient."""
    model, sites = every.model, ["q", "pattern", "resid_pre"]
    expected = attribute(model, *runs, sites, check=2)
    with torch.no_grad():
        quiet = attribute(model, *runs, sites, check=2)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        inferred = attribute(model, *(run.clone() for run in runs), sites, check=2)
    model.requires_grad_(False)
    try:
        frozen = attribute(model, *runs, sites, check=2)
        assert not any(parameter.requires_grad for parameter in model.parameters())
    finally:
        model.requires_grad_(True)
    for site in sites:
        for other in (quiet, inferred, frozen):
            assert torch.equal(other[site].scores, expected[site].scores)
        assert not expected[site].scores.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_pairs_are_estimated_position_by_position(either, runs):
    """A longer clean run: the estimates of a group are the sum of those of its pairs."""
    clean = torch.tensor([[7, 11, 22, 33, 44, 55, 66, 77]])
    grid = attribute(either.model, clean, runs[1], "v", positions=[(4, 1), (5, 2), [(4, 1), (5, 2)]])
    apart, together = grid.effect[:, :2].sum(dim=1), grid.effect[:, 2]
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    assert apart.abs().min() > 0


@every_kind
def test_steps_are_estimated_one_by_one(every, tmp_path):
    model, steps = every.model, [0, 1]
    clean, corrupted = (model.denoise(torch.tensor([[11, token, 22]]), max_new_tokens=2, steps=2) for token in (33, 44))
    grid = attribute(model, clean, corrupted, "mlp_out", steps=steps, check=3)
    singly = [attribute(model, clean, corrupted, "mlp_out", steps=[step], check=3) for step in steps]
    for index, alone in enumerate(singly):
        n_pos = alone.scores.shape[2]
        torch.testing.assert_close(grid.scores[index, :, :n_pos], alone.scores[0], equal_nan=True)
        assert grid.scores[index, :, n_pos:].isnan().all()
        of_step = grid.error.cells[:, 0] == index
        assert torch.equal(grid.error.cells[of_step, 1:], alone.error.cells[:, 1:])
        torch.testing.assert_close(grid.error.exact[of_step], alone.error.exact)
    torch.testing.assert_close(grid.error.estimated, grid.effect[tuple(grid.error.cells.T)], rtol=1e-4, atol=1e-4)
    again = PatchGrid.load(grid.save(tmp_path / "grid.safetensors"))
    assert torch.equal(again.error.cells, grid.error.cells)
    assert torch.equal(again.error.difference, grid.error.difference)
    assert again.record["method"] == "attribution"


@pytest.mark.parametrize(
    "number", [lambda logits: logits[0, -1, 3].item(), lambda logits: logits.detach().sum(), lambda logits: 1.0]
)
def test_a_metric_without_a_gradient(either, runs, number):
    with pytest.raises(ValueError, match="needs the metric's gradient, and it has none"):
        patch_grid(either.model, *runs, number, "z", method="attribution")


def test_the_correlation_of_one_cell_is_not_a_number(either, runs):
    assert attribute(either.model, *runs, "mlp_out", check=1).error.correlation != pytest.approx(1)
