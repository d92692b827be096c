"""Edge attribution against TransformerLens's tool, edges patched one by one, and sums that must come out."""

import pytest
import torch
from parts_by_hand import told_noise_of
from torch.testing import assert_close
from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch

from diffusion_lens.analysis import answer_probability
from diffusion_lens.analysis.circuits import EdgeScores, edge_attribution
from diffusion_lens.analysis.circuits.graph import OPTIONAL, Graph
from diffusion_lens.data import toy_facts

ROW = -2


def logit(logits):
    return logits[0, ROW, 7]


@pytest.fixture
def pair(every):
    clean, corrupted = (every.tokens[row, :6] % 500 for row in (0, 1))
    if every.model.cfg.has_mask:
        clean[ROW] = corrupted[ROW] = every.model.cfg.mask_token_id
    return clean[None], corrupted[None]


def named(node):
    if node.kind in ("embed", "logits"):
        return node.kind
    if node.kind == "attn_head_out":
        return f"a{node.layer}.h{node.head}"
    return f"m{node.layer}" if node.head is None else f"a{node.layer}.h{node.head}<{node.kind[0]}>"


@pytest.mark.parametrize("every", ["llada", "llama", "bd3lm", "udlm"], indirect=True)
def test_plain_scores_are_transformer_lenss(every, pair):
    assert_transformer_lenss(every.model, pair)


def test_plain_scores_with_experts_are_transformer_lenss(specimen, configs):
    """Theirs takes a key for each query head only."""
    few = specimen({**configs["llada_moe"], "num_key_value_heads": 4})
    assert_transformer_lenss(few.model, (few.tokens[:1, :6], few.tokens[1:2, :6]))


def assert_transformer_lenss(model, pair):
    ours = edge_attribution(model, *pair, logit, ig_steps=1)
    theirs = attribution_patch(model, *pair, logit, EdgeAttributionConfig(granularity="edge"))
    expected = torch.zeros_like(ours.scores)
    for (writer, reader), score in theirs.edge_scores.items():  # one for each position
        expected[ours.writers.index(named(writer)), ours.readers.index(named(reader))] += score
    assert_close(ours.scores, expected, rtol=1e-4, atol=1e-5)
    assert int(ours.exists.sum()) == len({(named(u), named(v)) for u, v in theirs.edge_scores})


def patched_by_edge(model, pair, edge_scores):
    """The change of the logit when one reader gets one writer's clean output, for every edge, by ordinary hooks."""
    corrupted = pair[1]
    graph = Graph.of(model.cfg)
    points = {
        column: (point.name, column - point.columns.start) for point in graph.reader_points for column in point.columns
    }
    changes = torch.zeros_like(edge_scores.scores)
    with model.optional_hooks(**OPTIONAL), torch.no_grad():
        caches = [model.run_with_cache(tokens)[1] for tokens in pair]
        before = logit(model(corrupted))
        change = graph.written(caches[0]) - graph.written(caches[1])
        for writer, reader in edge_scores.exists.nonzero().tolist():
            name, head = points[reader]

            def add(activation, hook, added=change[:, :, writer], head=head):
                into = activation if activation.dim() == 3 else activation[:, :, head]
                into += added

            changes[writer, reader] = logit(model.run_with_hooks(corrupted, fwd_hooks=[(name, add)])) - before
    return changes


@pytest.mark.parametrize("family", ["dream", "qwen2"])
def test_close_runs_score_what_patching_one_edge_at_a_time_gives(family, specimen, configs, monkeypatch):
    """The error of a first-order estimate falls with the square of the distance of the runs."""
    model = specimen({**configs[family], "num_hidden_layers": 2}).model
    clean, corrupted = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 9, 7, 10]])
    plain = model.embed.forward
    errors = []
    for share in (0.004, 0.002):
        near = torch.lerp(plain(corrupted), plain(clean), share)

        def embed(tokens, near=near):
            return near if torch.equal(tokens, clean) else plain(tokens)

        monkeypatch.setattr(model.embed, "forward", embed)
        scores = edge_attribution(model, clean, corrupted, logit, ig_steps=1)
        errors.append((scores.scores - patched_by_edge(model, (clean, corrupted), scores)).abs().max().item())
        assert errors[-1] < 0.05 * scores.scores.abs().max().item()
    assert errors[1] < 0.35 * errors[0]


@pytest.mark.parametrize("every", ["lit_gpt-mdm", "llama", "bd3lm", "udlm", "llada_moe"], indirect=True)
def test_edges_of_the_embedding_add_up_to_the_difference_of_the_runs(every, pair):
    """The error of a Riemann sum falls with the number of its terms. The choice of experts, which jumps, is fixed."""
    errors = []
    _, cache = every.model.run_with_cache(pair[0])
    chosen = [name for name in cache if name.endswith(("hook_experts", "hook_router_weights"))]
    with every.model.hooks(fwd_hooks=[(name, lambda x, hook: cache[hook.name].expand_as(x)) for name in chosen]):
        for m in (24, 96):
            scores = edge_attribution(every.model, *pair, logit, ig_steps=m)
            errors.append(abs(float(scores.nodes[0] - (scores.clean - scores.corrupted))))
        clean, corrupted = (logit(every.model(tokens)).item() for tokens in pair)
    assert (float(scores.clean), float(scores.corrupted)) == pytest.approx((clean, corrupted), abs=1e-4)
    assert errors[1] < 0.4 * errors[0] + 1e-4
    assert errors[1] < 0.1 * abs(clean - corrupted)


@pytest.mark.parametrize("family", ["dream", "qwen2"])
def test_edges_of_every_writer_add_up_to_its_own_effect(family, specimen, configs):
    model = specimen({**configs[family], "num_hidden_layers": 2}).model
    clean, corrupted = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 9, 7, 10]])
    scores = edge_attribution(model, clean, corrupted, logit, ig_steps=40, path="nodes")
    graph = Graph.of(model.cfg)
    with model.optional_hooks(**OPTIONAL), torch.no_grad():
        _, cache = model.run_with_cache(clean)
        for name, writers in graph.writer_points.items():
            for index, writer in enumerate(writers):

                def patch(activation, hook, index=index):
                    if activation.dim() == 3:
                        return cache[hook.name]
                    activation[:, :, index] = cache[hook.name][:, :, index]
                    return activation

                effect = logit(model.run_with_hooks(corrupted, fwd_hooks=[(name, patch)])) - logit(model(corrupted))
                assert_close(scores.nodes[writer], effect, rtol=0.02, atol=5e-3)


def test_a_small_budget_splits_the_runs_of_the_nodes_and_changes_no_score(either):
    model, (clean, corrupted) = either.model, (either.tokens[:1, :6], either.tokens[1:2, :6])
    settings = dict(ig_steps=2, path="nodes")
    whole = edge_attribution(model, clean, corrupted, logit, **settings)
    with pytest.raises(ValueError, match=r"max_bytes=10 is too small: one run takes [\d,]+ bytes") as raised:
        edge_attribution(model, clean, corrupted, logit, max_bytes=10, **settings)
    least = int(str(raised.value).split("takes ")[1].split(" bytes")[0].replace(",", ""))
    assert_close(edge_attribution(model, clean, corrupted, logit, max_bytes=least, **settings).scores, whole.scores)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar", "tiny-block", "tiny-uniform"], indirect=True)
def test_steps_of_trajectories_are_attributed_one_by_one(tiny):
    assert_steps_are_attributed_alone(tiny)


@pytest.mark.parametrize("family", ["bd3lm", "udlm", "llada_moe"])
def test_steps_with_times_or_experts_are_attributed_one_by_one(in_words, family):
    assert_steps_are_attributed_alone(in_words(family))


def assert_steps_are_attributed_alone(model):
    prompts = ["Gustav Geisser is the", "Tilda Drusser is the"]
    runs = [model.denoise(prompt, max_new_tokens=5, steps=5) for prompt in prompts]
    metric = lambda logits: logits[0, -1, 7]  # noqa: E731
    scores = edge_attribution(model, *runs, metric, steps=[0, 3], ig_steps=2)
    assert scores.scores.shape == (2, len(scores.writers), len(scores.readers))
    for step in (0, 3):
        canvases = [run.canvases[step] for run in runs]
        reached = int((canvases[0] >= 0).sum())
        with told_noise_of(model, runs[1].state_at(step)):
            alone = edge_attribution(model, *(canvas[:, :reached] for canvas in canvases), metric, ig_steps=2)
        assert_close(scores.at_step(step).scores, alone.scores, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="step 1 was not attributed"):
        scores.at_step(1)
    with pytest.raises(ValueError, match="take one of them by at_step"):
        scores.top(3)


def test_the_answer_of_a_query_is_a_metric(tiny):
    facts = toy_facts.load().facts("p2d", "p2d")
    queries = [facts[row].to_query(tiny, n_masks=5, first_tokens=1) for row in (0, 5)]
    scores = edge_attribution(tiny, *queries, answer_probability(tiny, queries[0]), ig_steps=50)
    assert float(scores.clean) > 0.9
    assert float(scores.nodes[0]) == pytest.approx(float(scores.clean - scores.corrupted), abs=0.05)
    assert all(parameter.grad is None for parameter in tiny.parameters())


def test_scores_come_back_from_their_file(either, tmp_path):
    scores = edge_attribution(either.model, either.tokens[:1, :5], either.tokens[1:2, :5], logit, ig_steps=1)
    again = EdgeScores.load(scores.save(tmp_path / "scores.safetensors"))
    assert torch.equal(again.scores, scores.scores)
    assert (again.writers, again.readers, again.record) == (scores.writers, scores.readers, scores.record)
    assert torch.equal(again.exists, Graph.of(either.model.cfg).edges)


def test_what_cannot_be_attributed_is_refused(either):
    model, tokens = either.model, either.tokens[:1, :6]
    refused = {
        "path='embeddings' is unknown; it must be one of inputs, nodes": dict(path="embeddings"),
        "ig_steps=0; it must be at least 1": dict(ig_steps=0),
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            edge_attribution(model, tokens, tokens, logit, **options)
    with pytest.raises(ValueError, match="the clean input has 5 positions and the corrupted one 6"):
        edge_attribution(model, tokens[:, :5], tokens, logit)
    with pytest.raises(ValueError, match="the metric has no gradient"):
        edge_attribution(model, tokens, tokens, lambda logits: logits[0, 0].argmax().double())
    assert not model.cfg.use_attn_result
    assert torch.is_grad_enabled()
