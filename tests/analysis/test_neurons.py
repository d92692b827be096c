"""Single neurons of MLPs, patched and attributed: by ordinary hooks, sums that must come out, and what has none."""

import copy

import pytest
import torch
from torch.testing import assert_close

from diffusion_lens.analysis import NeuronScores, PatchGrid, neuron_attribution, node_attribution, patch_grid
from diffusion_lens.model.noise import HeadAt

CLOSE = dict(rtol=1e-4, atol=1e-5)
dense = pytest.mark.parametrize("every", ["lit_gpt-mdm", "lit_gpt-ar", "dream", "mdlm", "bd3lm", "udlm"], indirect=True)


def metric(logits):
    return logits[..., -1, 7].mean()


def pair_of(every):
    """Two rows of six tokens each, which end alike, because scores of a head may depend on the token that is read."""
    clean, corrupted = every.tokens[:2, :6] % 500, every.tokens[1:3, 6:12] % 500
    return clean, torch.cat([corrupted[:, :5], clean[:, 5:]], dim=1)


def test_a_neuron_is_patched_as_by_an_ordinary_hook(summed):
    model, (clean, corrupted), layer = summed.model, pair_of(summed), summed.dense_layers[0]
    name = f"blocks.{layer}.mlp.hook_post"
    _, cache = model.run_with_cache(clean)
    n_neurons = cache[name].shape[-1]
    cells = [3, -1, [0, 5, 9]]
    grid = patch_grid(model, clean, corrupted, metric, "post", layers=[layer], neurons=cells)
    assert grid.axes == ("layer", "pos", "neuron")
    assert grid.coordinates["neuron"] == [3, n_neurons - 1, [0, 5, 9]]
    for position in range(6):
        for i, of_cell in enumerate(cells):

            def put(activation, hook, position=position, of_cell=of_cell):
                written = activation.clone()
                written[:, position, of_cell] = cache[name][:, position, of_cell]
                return written

            output = model.run_with_hooks(corrupted, fwd_hooks=[(name, put)])
            expected = metric(HeadAt.of(model, corrupted).clean_logits(output))
            assert_close(grid.scores[0, position, i], expected, **CLOSE)
    assert grid.effect.abs().max() > 1e-5


def test_all_neurons_together_are_the_whole_state_and_the_mlp_s_output(several):
    model, pair, layers = several.model, pair_of(several), several.dense_layers
    settings = dict(layers=layers, positions=[1, 5])
    whole = patch_grid(model, *pair, metric, "post", **settings)
    assert whole.axes == ("layer", "pos")
    n_neurons = model.run_with_cache(pair[0])[1][f"blocks.{layers[0]}.mlp.hook_post"].shape[-1]
    together = patch_grid(model, *pair, metric, "post", neurons=[range(n_neurons)], **settings)
    assert_close(together.scores[..., 0], whole.scores, **CLOSE)
    if not several.has_shared_expert:
        assert_close(whole.scores, patch_grid(model, *pair, metric, "mlp_out", **settings).scores, **CLOSE)
    at_once = patch_grid(model, *pair, metric, "post", layers=layers, positions="all", neurons=[1, 2])
    assert at_once.axes == ("layer", "neuron")


def test_attributions_are_the_estimates_of_patching(summed):
    model, pair, layers = summed.model, pair_of(summed), summed.dense_layers
    found = neuron_attribution(model, *pair, metric, top=40, ig_steps=1, positions=[0, 2, 5])
    neurons = sorted(set(found.cells[:, 3].tolist()))
    settings = dict(layers=layers, positions=[0, 2, 5], neurons=neurons, method="attribution", check=0)
    estimate = patch_grid(model, *pair, metric, "post", **settings)
    for score, (_, layer, position, neuron) in zip(found.scores, found.cells.tolist(), strict=True):
        cell = layers.index(layer), [0, 2, 5].index(position), neurons.index(neuron)
        assert_close(estimate.effect[cell], score, **CLOSE)
    sizes = found.scores.abs()
    assert len(sizes) == 40
    assert bool((sizes.diff() <= 0).all())
    everything = neuron_attribution(model, *pair, metric, top=10**6, ig_steps=1, positions=[0, 2, 5])
    assert_close(everything.scores[:40], found.scores, **CLOSE)
    assert float(everything.kept) == pytest.approx(1)
    assert float(found.kept) == pytest.approx(float(sizes.sum() / everything.scores.abs().sum()), rel=1e-4)


def test_the_scores_of_all_neurons_of_a_block_are_that_of_its_mlp(several):
    model, pair = several.model, pair_of(several)
    nodes = node_attribution(model, *pair, metric, ig_steps=2)
    for layer in several.dense_layers:
        of_layer = neuron_attribution(model, *pair, metric, layers=[layer], top=3, ig_steps=2)
        mlp = nodes.scores[nodes.writers.index(f"m{layer}")]
        assert_close(of_layer.total, mlp.double(), rtol=1e-3, atol=1e-5)
        assert {cell[1] for cell in of_layer.cells.tolist()} == {layer}
    assert_close(of_layer.clean, nodes.clean, **CLOSE)


@dense
def test_scores_of_first_order_leave_an_error_of_second_order(every):
    """Half the distance between the runs, a quarter of the error of the largest neuron."""
    model, tokens = every.tell(copy.deepcopy(every.model).double()), every.tokens[:1, :6] % 500
    errors = []
    for distance in (1e-3, 5e-4):
        moved = copy.deepcopy(model)
        every.tell(moved)
        direction = torch.randn(moved.embed.weight.shape, generator=torch.Generator().manual_seed(0)).double()
        moved.embed.weight.data += distance * direction
        grid = patch_grid(
            model, tokens, tokens, metric, "post", source_model=moved, layers=[0], neurons=[4], positions=[5]
        )
        estimate = patch_grid(
            model, tokens, tokens, metric, "post", source_model=moved, layers=[0], neurons=[4], positions=[5],
            method="attribution", check=0,
        )  # fmt: skip
        errors.append(abs(float(grid.effect - estimate.effect)) / abs(float(grid.effect)))
    assert errors[0] < 0.05
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.1, abs=1e-7)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar", "tiny-block", "tiny-uniform"], indirect=True)
def test_steps_are_scored_one_by_one(tiny, tmp_path):
    runs = [
        tiny.denoise(prompt, max_new_tokens=5, steps=5) for prompt in ("Gustav Geisser is the", "Tilda Drusser is the")
    ]
    scores = neuron_attribution(tiny, *runs, metric, steps=[0, 3], top=7, ig_steps=2)
    nodes = node_attribution(tiny, *runs, metric, steps=[0, 3], ig_steps=2)
    mlps = [nodes.writers.index(f"m{layer}") for layer in range(tiny.cfg.n_layers)]
    assert_close(scores.total, nodes.scores[:, mlps].sum(dim=1).double(), rtol=1e-3, atol=1e-5)
    assert scores.cells[:, 0].tolist() == [0] * 7 + [1] * 7
    again = NeuronScores.load(scores.save(tmp_path / "scores.safetensors"))
    assert torch.equal(again.cells, scores.cells)
    frame = scores.to_dataframe()
    assert frame.columns.tolist() == ["step", "layer", "pos", "neuron", "token", "score"]
    assert frame.step.tolist() == [0] * 7 + [3] * 7
    assert float(scores.by_position(3).sum()) == pytest.approx(float(scores.scores[7:].sum()), abs=1e-5)
    assert scores.plot(0).get_title().startswith("7 neurons")
    with pytest.raises(ValueError, match=r"step=1; the steps of these scores are \[0, 3\]"):
        scores.plot(1)


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_a_position_that_a_step_has_not_reached_has_no_scores_there(tiny):
    """As `patch_grid`, which has NaN there."""
    runs = [tiny.denoise(prompt, max_new_tokens=4) for prompt in ("Gustav Geisser is the", "Tilda Drusser is the")]
    position, neurons = runs[0].given.sum() + 1, range(tiny.cfg.d_mlp)  # the second position that the run writes
    settings = dict(steps=[0, 3], layers=[0], positions=[int(position)])
    scores = neuron_attribution(tiny, *runs, metric, ig_steps=1, top=tiny.cfg.d_mlp, **settings)
    grid = patch_grid(tiny, *runs, metric, "post", neurons=neurons, method="attribution", check=0, **settings)
    assert grid.scores[0].isnan().all()
    assert set(scores.cells[:, 0].tolist()) == {1}
    assert_close(scores.total[1], grid.effect[1].double().sum(), rtol=1e-3, atol=1e-5)
    assert scores.kept[0].isnan()
    assert scores.plot(0).get_title() == "0 neurons, nan% of all"


@pytest.mark.parametrize("every", ["llada_moe", "sdar"], indirect=True)
def test_experts_have_no_neurons_that_could_be_compared(every):
    model, pair = every.model, pair_of(every)
    if model.cfg.experts is None:
        with pytest.raises(ValueError, match=r"neurons=\[3\], but z has no neurons: their site is 'post'"):
            patch_grid(model, *pair, metric, "z", neurons=[3])
        for neurons, said in (
            ([3, 3], "duplicates"),
            ([[1, 1]], "duplicates"),
            ([[3, 4], [4, 3]], "duplicates"),
            ([3, [3]], "duplicates"),
            ([9999], "give numbers from 0 to"),
            ([], "give one index"),
        ):
            with pytest.raises(ValueError, match=said):
                patch_grid(model, *pair, metric, "post", neurons=neurons)
        with pytest.raises(TypeError, match=r"neurons=3 is one number; give a sequence, neurons=\[3\]"):
            patch_grid(model, *pair, metric, "post", neurons=3)
        with pytest.raises(ValueError, match="top=0; it must be at least 1"):
            neuron_attribution(model, *pair, metric, top=0)
        return
    for call in (
        lambda: patch_grid(model, *pair, metric, "post"),
        lambda: neuron_attribution(model, *pair, metric, layers=[1]),
    ):
        with pytest.raises(
            ValueError, match=r"layer 1 of 'llada_moe' has experts in place .*: choose among layers=\[0, 2\]"
        ):
            call()
    assert {cell[1] for cell in neuron_attribution(model, *pair, metric).cells.tolist()} <= {0, 2}


@pytest.mark.parametrize("every", ["lit_gpt-mdm"], indirect=True)
def test_a_grid_of_neurons_is_shown_and_saved(every, tmp_path):
    grid = patch_grid(every.model, *pair_of(every), metric, "post", neurons=[2, [4, 5]])
    again = PatchGrid.load(grid.save(tmp_path / "grid.safetensors"))
    assert again.coordinates == grid.coordinates
    frame = grid.to_dataframe()
    assert sorted(set(frame.neuron)) == ["2", "4, 5"]
    assert grid.plot(neuron=[4, 5]) is not None
    with pytest.raises(ValueError, match="say which neuron to draw"):
        grid.plot()
    together = patch_grid(every.model, *pair_of(every), metric, "post", neurons=[2, 3], positions="all")
    assert [label.get_text() for label in together.plot().get_yticklabels()] == ["neuron 2", "neuron 3"]
