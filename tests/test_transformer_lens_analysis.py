"""The tools of `transformer_lens.tools.analysis`, one by one, on a diffusion model and its AR baseline.

The page about TransformerLens shows docs/transformer_lens_tools.json. Each row is tested here: "holds" means that a law
of the tool holds on both models, "refuses" that the tool raises the quoted error, and "tensors" that the tool takes
tensors, whatever model they come from.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformer_lens.tools import analysis

ROWS = {
    row["tool"]: row
    for row in json.loads((Path(__file__).parents[1] / "docs" / "transformer_lens_tools.json").read_text("utf-8"))
}
LAWS: dict[str, Callable[["Case"], None]] = {}
LAYER, POINT = 1, "blocks.1.hook_resid_post"


class Case:
    """Two prompts of equal length whose answer is read in the last row: it is a [MASK] of the diffusion model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        mask = " [MASK]" if model.cfg.has_mask else ""
        self.clean = model.to_tokens(f"Yara Plasser was the clever gardener of{mask}")
        self.corrupted = model.to_tokens(f"Zeno Lindall was the kind drummer of{mask}")
        self.answer, self.other = model.to_single_token(" Kinmoor"), model.to_single_token(" Ravik")
        self.last = torch.tensor([self.clean.shape[1] - 1])

    def metric(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, self.answer] - logits[0, -1, self.other]

    def row(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)[:, -1]

    def caches(self) -> tuple[Any, Any]:
        return self.model.run_with_cache(self.clean)[1], self.model.run_with_cache(self.corrupted)[1]


def law(*tools: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Register a function as the law of these tools."""

    def register(function: Callable[[Case], None]) -> Callable[[Case], None]:
        LAWS.update(dict.fromkeys(tools, function))
        return function

    return register


def close(a: Any, b: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@law("logit_lens")
@torch.no_grad()
def _last_entry_is_the_model(case: Case) -> None:
    lens = analysis.logit_lens(case.model, case.clean, positions=[int(case.last)])
    entropy = torch.distributions.Categorical(logits=case.row(case.clean)).entropy()
    close(lens.readout.entropy.flatten()[-1:], entropy)


@law("logit_readout")
@torch.no_grad()
def _reads_the_logits_from_the_last_residual(case: Case) -> None:
    logits, cache = case.model.run_with_cache(case.clean)
    read = analysis.logit_readout(case.model, cache["resid_post", -1][0, -1], apply_ln=True)
    close(read.values, logits[0, -1])


@law("direct_logit_attribution")
@torch.no_grad()
def _contributions_sum_to_the_logit(case: Case) -> None:
    for unit in ("component", "head"):
        found = analysis.direct_logit_attribution(case.model, case.clean, case.answer, case.other, unit=unit)
        close(found.attribution.sum(), case.metric(case.model(case.clean)))


@law("attribution_patch", "Node", "EdgeAttributionConfig")
def _edges_of_a_node_sum_to_its_gradient_times_difference(case: Case) -> None:
    model, config = case.model, analysis.EdgeAttributionConfig
    nodes = analysis.attribution_patch(model, case.clean, case.corrupted, case.metric).node_scores
    edges = analysis.attribution_patch(model, case.clean, case.corrupted, case.metric, config(granularity="edge"))
    assert {node.hook_name for node in nodes} <= set(model.hook_dict)
    assert set(nodes) == set(edges.node_scores)
    for node, score in nodes.items():
        assert edges.node_scores[node] == pytest.approx(score, abs=1e-3)
    kept = {}
    with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: kept.update(corrupted=x))]):
        (gradient,) = torch.autograd.grad(case.metric(model(case.corrupted)), kept["corrupted"])
    clean = model.run_with_cache(case.clean)[1]["mlp_out", 1]
    expected = ((clean - kept["corrupted"]) * gradient).sum(-1)[0]
    for position, value in enumerate(expected.tolist()):
        assert nodes[analysis.Node("mlp_out", position, 1)] == pytest.approx(value, abs=1e-3)
    with pytest.raises(NotImplementedError, match="ig_steps>1"):
        config(ig_steps=5)


@law("faithfulness", "FaithfulnessConfig")
def _the_whole_graph_recovers_all_and_no_edge_nothing(case: Case) -> None:
    # Two positions, because the graph has edges for each position.
    clean, corrupted = case.clean[:, :2], case.corrupted[:, :2]
    config = analysis.EdgeAttributionConfig(granularity="edge")
    edges = analysis.attribution_patch(case.model, clean, corrupted, case.metric, config).edge_scores
    whole = analysis.faithfulness(case.model, clean, corrupted, case.metric, list(edges))
    nothing = analysis.faithfulness(case.model, clean, corrupted, case.metric, [])
    assert whole.recovered == pytest.approx(1, abs=1e-3)
    assert nothing.recovered == pytest.approx(0, abs=1e-3)
    mean = analysis.FaithfulnessConfig(ablation="mean")
    others = case.model.to_tokens("Ada Lorrick")
    whole = analysis.faithfulness(case.model, clean, corrupted, case.metric, list(edges), mean, mean_tokens=others)
    assert whole.recovered == pytest.approx(1, abs=1e-3)


@law("get_act_patch_direct_path", "get_act_patch_direct_path_all_sources")
@torch.no_grad()
def _a_path_is_the_sources_difference_added_to_one_input(case: Case) -> None:
    model, (clean, corrupted) = case.model, case.caches()
    arguments = (model, case.corrupted, clean, corrupted, case.metric)
    grid = analysis.get_act_patch_direct_path(*arguments, src_layer=2, src_head=1, component="k", verbose=False)
    difference = (clean["z", 2] - corrupted["z", 2])[:, :, 1] @ model.W_O[2, 1]

    def patch(x: torch.Tensor, hook: Any) -> torch.Tensor:
        x = x.clone()
        x[:, :, 3] += difference
        return x

    with model.optional_hooks(use_split_qkv_input=True):
        logits = model.run_with_hooks(case.corrupted, fwd_hooks=[("blocks.3.attn.hook_k_input", patch)])
    close(grid[3, 3], case.metric(logits))
    assert not grid[:3].any()


@law("collect_activations", "run_with_intervention", "intervened_logits", "SubspaceInterchange", "NormMatchedPlacebo")
@torch.no_grad()
def _interchanging_everything_at_the_last_layer_gives_the_sources_row(case: Case) -> None:
    model, point = case.model, f"blocks.{case.model.cfg.n_layers - 1}.hook_resid_post"
    source = analysis.collect_activations(model, point, case.clean, case.row, positions=case.last)
    close(source, model.run_with_cache(case.clean)[1][point][:, -1])
    everything = analysis.SubspaceInterchange(torch.eye(model.cfg.d_model))
    for run in (analysis.run_with_intervention, analysis.intervened_logits):
        logits = run(model, point, everything, case.corrupted, source, case.row, positions=case.last)
        close(logits, case.row(case.clean))
    base = analysis.collect_activations(model, point, case.corrupted, case.row, positions=case.last)
    one = analysis.SubspaceInterchange(analysis.random_basis(model.cfg.d_model, 1, seed=0))
    placebo = analysis.NormMatchedPlacebo(one, analysis.random_basis(model.cfg.d_model, 1, seed=1))
    close((placebo(base, source) - base).norm(), (one(base, source) - base).norm())
    loop = lambda tokens: model(tokens) + model(tokens)  # noqa: E731
    with pytest.raises(RuntimeError, match="fired 2 times"):
        analysis.run_with_intervention(model, point, everything, case.corrupted, source, loop, positions=case.last)


@law("fit_das", "LearnedSubspace")
def _das_learns_the_source_and_leaves_the_model_as_it_was(case: Case) -> None:
    ids = torch.tensor([case.answer, case.other])
    base, source = torch.cat([case.clean, case.corrupted]), torch.cat([case.corrupted, case.clean])
    positions = case.last.expand(2)
    fitted = analysis.fit_das(
        case.model,
        "blocks.3.hook_resid_post",
        base,
        source,
        torch.tensor([1, 0]),
        lambda tokens: case.row(tokens)[:, ids],
        rank=2,
        base_positions=positions,
        source_positions=positions,
        epochs=25,
        lr=0.1,
    )
    assert fitted.losses[-1] < 0.1 < fitted.losses[0]
    close(fitted.basis.T @ fitted.basis, torch.eye(2))
    assert all(p.requires_grad for p in case.model.parameters())
    assert not case.model.list_hooks()


@law("attention_head_subspace_affinity")
@torch.no_grad()
def _affinity_is_the_overlap_of_two_projections(case: Case) -> None:
    found = analysis.attention_head_subspace_affinity(case.model, target_role="Q")
    written, read = case.model.W_O[0, 1].T, case.model.W_Q[2, 3]
    projections = [basis @ basis.T for basis in (torch.linalg.qr(written)[0], torch.linalg.qr(read)[0])]
    close(found.scores[0, 1, 2, 3], (projections[0] @ projections[1]).trace())


@law("reinitialized")
def _reinitialized(case: Case) -> None:
    analysis.reinitialized(case.model, seed=0)


@law("random_init_bridge")
def _random_init_bridge(case: Case) -> None:
    analysis.random_init_bridge(case.model.cfg.model_name, seed=0)


@law("JacobianLens")
def _jacobian_lens(case: Case) -> None:
    analysis.JacobianLens.fit(case.model, ["Yara Plasser was the clever gardener"], corpus="x", show_progress=False)


@law(*(tool for tool, row in ROWS.items() if row["result"] == "tensors"))
@torch.no_grad()
def _tools_on_tensors_accept_activations_and_weights(case: Case) -> None:
    model = case.model
    people = torch.cat([case.clean, case.corrupted]).repeat(8, 1)
    features = model.run_with_cache(people)[1]["resid_post", LAYER][:, -1]
    labels = torch.tensor([0, 1]).repeat(8)
    direction = features[1] - features[0]
    for basis in (
        analysis.mean_difference_basis(features, labels.tolist()),
        analysis.probe_basis(direction[None]),
        analysis.orthonormal_subspace(direction[:, None]).basis,
    ):
        close((basis[:, 0] @ direction).abs(), direction.norm())
    neurons = analysis.neuron_basis(model.cfg.d_mlp, [3, 5])
    assert neurons.nonzero().tolist() == [[3, 0], [5, 1]]
    assert not (analysis.random_neuron_basis(model.cfg.d_mlp, 4, seed=0, exclude=[3, 5]) * neurons[:, :1]).any()
    assert len(analysis.arbitrary_targets(["a", "b", "a"], 2, seed=0)) == 3

    subspace = analysis.orthonormal_subspace(model.W_O[0, 1].T)
    assert isinstance(subspace, analysis.SubspaceBasis)
    assert analysis.projection_kernel(subspace, subspace).normalized == pytest.approx(1, abs=1e-4)
    assert analysis.random_projection_kernel_moments(model.cfg.d_model, 4).mean == 16 / model.cfg.d_model

    atoms = model.W_U.T[:40]
    sparse = analysis.get_sparse_decomposition(3 * atoms[7], atoms, k=2)
    assert isinstance(sparse, analysis.JSpaceDecomposition)
    assert (sparse.support.tolist(), sparse.coordinates.tolist()) == ([7], [pytest.approx(3, abs=1e-3)])
    patched = analysis.solve_coordinate_patch(3 * atoms[7], atoms, 7, 9, k=2)
    assert patched is not None

    scale = features.std()
    probe = analysis.fit_sparse_probe(features / scale, labels, k=2)
    swept = analysis.sweep_sparse_probe(features / scale, labels, ks=[1, 2])
    assert probe.metrics.accuracy == 1
    assert swept is not None
    assert issubclass(analysis.SparseProbeConvergenceError, RuntimeError)


def test_each_public_tool_has_a_row_and_a_law() -> None:
    assert set(analysis.__all__) == set(ROWS) == set(LAWS)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@pytest.mark.parametrize("name", sorted({rule.__name__ for rule in LAWS.values()}))
def test_the_row_says_what_the_tool_does(tiny: Any, name: str) -> None:
    (rule,) = {rule for rule in LAWS.values() if rule.__name__ == name}
    (refusal,) = {
        (ROWS[tool]["result"] == "refuses", ROWS[tool].get("error", "")) for tool in LAWS if LAWS[tool] is rule
    }
    if refusal[0]:
        with pytest.raises((TypeError, ValueError, OSError), match=refusal[1]):
            rule(Case(tiny))
    else:
        rule(Case(tiny))


def test_edges_and_paths_into_keys_need_a_key_for_each_head(specimen: Any, configs: dict[str, Any]) -> None:
    dream = specimen(configs["dream"])
    clean, corrupted = dream.tokens[:1, :4], dream.tokens[1:2, :4]
    metric = lambda logits: logits[0, -1, 3]  # noqa: E731
    edges = analysis.EdgeAttributionConfig(granularity="edge")
    assert analysis.attribution_patch(dream.model, clean, corrupted, metric).node_scores
    with pytest.raises(ValueError, match=r"n_key_value_heads|K/V head"):
        analysis.attribution_patch(dream.model, clean, corrupted, metric, edges)
    caches = [dream.model.run_with_cache(tokens)[1] for tokens in (clean, corrupted)]
    for component, fits in (("q", True), ("k", False)):
        path = lambda component=component: analysis.get_act_patch_direct_path(  # noqa: E731
            dream.model, corrupted, *caches, metric, 0, 1, component, verbose=False
        )
        if fits:
            assert path().any()
        else:
            with pytest.raises(ValueError, match=r"GQA|key-value|K/V"):
                path()
