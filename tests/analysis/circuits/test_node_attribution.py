"""Node attribution against the sum of a writer's edges, writers patched one by one, and sums that must come out."""

import pytest
import torch
from torch.testing import assert_close

from diffusion_lens.analysis.circuits import (
    EdgeScores,
    Faithfulness,
    NodeScores,
    edge_attribution,
    faithfulness,
    node_attribution,
)
from diffusion_lens.analysis.circuits.graph import Graph


def logit(logits):
    return logits[0, -1, 7]


@pytest.fixture(scope="module", params=["Dream", "qwen2"])
def model(request, specimen):
    """Two layers, with grouped heads: a masked diffusion model whose readout is shifted, and an AR baseline."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=128)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-6, rope_theta=10000.0)
    masked = {"mask_token_id": 512} if request.param == "Dream" else {}
    return specimen({"model_type": request.param, **sizes, **heads, **masked, "vocab_size": 513}).model


CLEAN, CORRUPTED = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 9, 7, 10]])


def effects(model, clean, corrupted):
    """The change of the logit when one writer's output is that of the clean run, for every writer."""
    graph, found = Graph.of(model.cfg), []
    with model.optional_hooks(use_attn_result=True), torch.no_grad():
        _, cache = model.run_with_cache(clean)
        before = logit(model(corrupted))
        for name, writers in graph.writer_points.items():
            for index in range(len(writers)):

                def patch(activation, hook, index=index):
                    if activation.dim() == 3:
                        return cache[hook.name]
                    activation[:, :, index] = cache[hook.name][:, :, index]
                    return activation

                found.append(logit(model.run_with_hooks(corrupted, fwd_hooks=[(name, patch)])) - before)
    return torch.stack(found)


def test_the_score_of_a_node_is_the_sum_of_its_edges(every, request):
    """The families take turns with the paths."""
    path, ig_steps = [("inputs", 3), ("nodes", 2), ("inputs", 1)][request.node.callspec.indices["every"] % 3]
    pair = every.tokens[:1, :6] % 500, every.tokens[1:2, :6] % 500
    nodes = node_attribution(every.model, *pair, logit, path=path, ig_steps=ig_steps)
    if every.has_shared_expert:
        with pytest.raises(ValueError, match=r"has a shared expert, .* no part of the graph|ends with a factor"):
            edge_attribution(every.model, *pair, logit, path=path, ig_steps=ig_steps)
        return
    edges = edge_attribution(every.model, *pair, logit, path=path, ig_steps=ig_steps)
    assert_close(nodes.scores, edges.nodes, rtol=1e-4, atol=1e-4)
    assert_close(
        torch.stack([nodes.clean, nodes.corrupted]), torch.stack([edges.clean, edges.corrupted]), rtol=1e-5, atol=1e-5
    )


def test_every_score_approaches_the_effect_of_patching_the_node(model):
    """The error of the midpoint rule falls with the square of the number of its terms."""
    expected = effects(model, CLEAN, CORRUPTED)
    errors = []
    for m in (8, 32):
        scores = node_attribution(model, CLEAN, CORRUPTED, logit, path="nodes", ig_steps=m).scores
        errors.append((scores - expected).abs().max().item())
    assert errors[1] < 0.25 * errors[0] + 1e-4
    assert errors[1] < 0.01 * expected.abs().max().item()


def test_the_embedding_s_score_approaches_the_difference_of_the_runs(model):
    errors = []
    for m in (24, 96):
        scores = node_attribution(model, CLEAN, CORRUPTED, logit, ig_steps=m)
        errors.append(abs(float(scores.scores[0] - (scores.clean - scores.corrupted))))
    assert errors[1] < 0.4 * errors[0] + 1e-4
    assert errors[1] < 0.05 * abs(float(scores.clean - scores.corrupted))


def test_close_runs_score_what_patching_one_node_at_a_time_gives(model, monkeypatch):
    """The error of a first-order estimate falls with the square of the distance of the runs."""
    plain, errors = model.embed.forward, []
    for share in (0.004, 0.002):
        near = torch.lerp(plain(CORRUPTED), plain(CLEAN), share)
        monkeypatch.setattr(
            model.embed, "forward", lambda tokens, near=near: near if torch.equal(tokens, CLEAN) else plain(tokens)
        )
        scores = node_attribution(model, CLEAN, CORRUPTED, logit, ig_steps=1).scores
        errors.append((scores - effects(model, CLEAN, CORRUPTED)).abs().max().item())
        assert errors[-1] < 0.05 * scores.abs().max().item()
    assert errors[1] < 0.35 * errors[0]


def test_hooks_and_flags_of_the_caller_stay(either):
    model, pair = either.model, (either.tokens[:1, :6], either.tokens[1:2, :6])
    halve = lambda result, hook: result / 2  # noqa: E731
    with model.optional_hooks(use_attn_result=True), model.hooks([("blocks.0.attn.hook_result", halve)]):
        inside = node_attribution(model, *pair, logit, ig_steps=2)
        edges = edge_attribution(model, *pair, logit, ig_steps=2)
    assert_close(inside.scores, edges.nodes, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(inside.scores, node_attribution(model, *pair, logit, ig_steps=2).scores, atol=1e-3)


def test_scores_of_steps_come_back_from_their_file(tiny, tmp_path):
    runs = [tiny.denoise(f"{name} is the", max_new_tokens=5, steps=5) for name in ("Gustav Geisser", "Tilda Drusser")]
    scores = node_attribution(tiny, *runs, logit, steps=[1, 3], ig_steps=2)
    again = NodeScores.load(scores.save(tmp_path / "scores.safetensors"))
    assert torch.equal(again.scores, scores.scores)
    assert (again.writers, again.record) == (scores.writers, scores.record)
    edges = edge_attribution(tiny, *runs, logit, steps=[1, 3], ig_steps=2)
    assert_close(again.at_step(3).scores, edges.at_step(3).nodes, rtol=1e-3, atol=1e-4)


def test_figures_show_the_scores():
    graph = Graph(n_layers=2, n_heads=2, n_key_value_heads=1)
    scores = torch.arange(1.0, len(graph.writers) * len(graph.readers) + 1).view(len(graph.writers), -1) * graph.edges
    edges = EdgeScores(scores, torch.tensor(2.0), torch.tensor(1.0), graph, {"steps": None})
    ax = edges.plot(title="edges")
    shown = torch.as_tensor(ax.images[0].get_array().filled(float("nan")))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["embed", "a0", "m0", "a1", "m1"]
    columns = ["a0<q>", "a0<k>", "a0<v>", "m0", "a1<q>", "a1<k>", "a1<v>", "m1", "logits"]
    assert [label.get_text() for label in ax.get_xticklabels()] == columns
    assert shown[0, 0] == scores[0, :2].sum()
    assert shown[1, 8] == scores[1:3, -1].sum()
    assert shown.isnan().equal(torch.tensor([[*range(9)]]) < torch.tensor([[0], [3], [4], [7], [8]]))

    nodes = NodeScores(edges.nodes, edges.clean, edges.corrupted, graph, {"steps": None})
    ax = nodes.plot()
    shown = torch.as_tensor(ax.images[0].get_array().filled(float("nan")))
    assert shown.equal(nodes.scores[[1, 4, 2, 5, 3, 6]].view(3, 2))
    assert f"{nodes.scores[0]:.2g}" in ax.get_title()
    with pytest.raises(ValueError, match="take one of them by at_step"):
        NodeScores(nodes.scores[None], torch.ones(1), torch.ones(1), graph, {"steps": [3]}).plot()


def test_the_curve_of_faithfulness_has_a_logarithmic_axis():
    record = {"steps": [0, 4]}
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 4.0, 1.0]])
    curve = Faithfulness((100, 0, 10), scores, torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]), record)
    ax = curve.plot()
    lines = [line for line in ax.lines if line.get_marker() not in ("None", "")]
    assert [line.get_label() for line in lines] == ["step 0", "step 4"]
    assert [list(line.get_xdata()) for line in lines] == [[0, 10, 100]] * 2
    assert [list(line.get_ydata()) for line in lines] == [[0.0, 0.5, 1.0], [1.0, 0.25, 0.0]]
    assert ax.get_xscale() == "symlog"


def test_gradients_are_taken_at_k_of_m(either):
    """EAP-IG, eq. 3 of Hanna et al.: with m = 2, halfway between the inputs and in the clean run."""
    model, pair = either.model, (either.tokens[:1, :6], either.tokens[1:2, :6])
    clean, corrupted = (model.embed(tokens).detach() for tokens in pair)
    expected = 0.0
    for share in (0.5, 1.0):
        leaf = torch.lerp(corrupted, clean, share).requires_grad_()
        (gradient,) = torch.autograd.grad(logit(model(leaf, start_at_layer=0)), leaf)
        expected += ((clean - corrupted) * gradient).sum().item() / 2
    assert node_attribution(model, *pair, logit, ig_steps=2).scores[0].item() == pytest.approx(expected, rel=1e-3)


def test_hooks_between_writers_and_readers_are_refused_for_edges_only(either):
    model, pair = either.model, (either.tokens[:1, :6], either.tokens[1:2, :6])
    scores = edge_attribution(model, *pair, logit, ig_steps=1)
    bend = lambda stream, hook: 2 * stream.tanh()  # noqa: E731
    stream = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_in", "hook_resid_post")
    copies = ("attn.hook_q_input", "attn.hook_k_input", "attn.hook_v_input")
    with model.optional_hooks(use_split_qkv_input=True, use_hook_mlp_in=True):
        for name in (*stream, *copies):
            with (
                model.hooks(fwd_hooks=[(f"blocks.1.{name}", bend)]),
                pytest.raises(ValueError, match=f"a hook or another module is at 'blocks.1.{name}'"),
            ):
                edge_attribution(model, *pair, logit)
    for module, name in ((model.blocks[1], "blocks.1"), (model.blocks[1].attn, "blocks.1.attn")):
        handle = module.register_forward_hook(lambda module, given, out: 2 * out)
        with pytest.raises(ValueError, match=f"another module is at '{name}', between"):
            faithfulness(model, *pair, logit, scores, [3])
        handle.remove()
    inside = [("blocks.1.hook_mlp_out", bend), ("blocks.1.ln2.hook_normalized", bend), ("blocks.0.attn.hook_z", bend)]
    with model.hooks(fwd_hooks=inside):
        edges, nodes = (call(model, *pair, logit, ig_steps=2) for call in (edge_attribution, node_attribution))
        assert_close(edges.nodes, nodes.scores, rtol=1e-3, atol=1e-4)
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", bend)]):
        nodes = node_attribution(model, *pair, logit, ig_steps=96)
    assert nodes.scores[0].item() == pytest.approx(float(nodes.clean - nodes.corrupted), rel=0.1, abs=0.02)
