"""Graphs of short runs of small models, their laws, and random transcoders."""

from typing import Any

import pytest
import torch

LENGTH = 11


def run_of(model: Any, prompt: torch.Tensor, **more: Any) -> Any:
    if model.cfg.has_mask or model.cfg.uniform_noise:
        more = {"steps": 8 if "Fast" in model.cfg.model_name or "nemotron" in model.cfg.model_name else 4, **more}
    return model.denoise(prompt[None], length=LENGTH, **more)


def prompts(one: Any) -> tuple[torch.Tensor, torch.Tensor]:
    clean = one.tokens[0, :5]
    corrupted = clean.clone()
    corrupted[[2, 4]] = (corrupted[[2, 4]] + 7) % 400
    return clean, corrupted


def last_position(run: Any) -> int:
    """A position that the last step wrote, so that all steps may have a part in it."""
    return int(run.revealed_at[0].argmax())


def graph_of(one: Any, points: int = 0, **more: Any) -> Any:
    """A graph with enough points for an error of 1e-3: the norms of some networks turn sharply on their paths."""
    from diffusion_lens.analysis import run_graph

    clean, corrupted = prompts(one)
    loop = {name: more.pop(name) for name in ("cfg_scale", "sampler") if name in more}
    run = run_of(one.model, clean, **loop)
    points = points or (64 if one.model.cfg.time_conditioning else 32)
    return run_graph(one.model, run, last_position(run), corrupted, points=points, **{"nodes_per_step": 30, **more})


def require_laws(graph: Any) -> None:
    nodes, edges = graph.nodes, graph.edges
    largest = nodes.effect.abs().max()
    # 1. The edges into a node add up to its effect. All are summed in `inflow`, whether they are kept or not.
    with_edges = nodes[nodes.inflow.notna()]
    assert (with_edges.inflow - with_edges.effect).abs().max() < 1e-3 * largest
    assert len(with_edges) > 10
    # 2. A decision passes on what it has.
    passed = edges[edges.kind == "decision"].groupby("source").weight.sum()
    for node, weight in passed.items():
        assert weight == pytest.approx(nodes.effect[node], rel=1e-6, abs=1e-9)
    assert set(nodes[nodes.kind == "decision"].index) <= set(passed.index)
    # 3. Within each step the embeddings and transcoders' errors have the whole difference of its objectives.
    for step, within, total in graph.within.tolist():
        of_transcoder = (nodes.kind == "error") & (nodes.layer >= 0)
        sources = nodes[(nodes.step == step) & (nodes.kind.isin(["token", "embed"]) | of_transcoder)]
        assert sources.effect.sum() == pytest.approx(within, rel=1e-6, abs=1e-6)
        assert within == pytest.approx(total, abs=1e-3 * largest)
    # 4. Over the steps, the given tokens and the errors have that of the target.
    sources = nodes[nodes.kind.isin(["token", "error"])]
    assert sources.effect.sum() == pytest.approx(graph.clean - graph.corrupted, abs=2e-3 * largest)


def transcoders(model: Any, layers: Any = (0, 1), conditioned: bool = False, **more: Any) -> list[Any]:
    """Random ones, whose features jump, and are active at about half of the positions."""
    from diffusion_lens.analysis import SparseDictionary

    generator, d_model, found = torch.Generator().manual_seed(0), model.cfg.d_model, []
    for layer in layers:
        W_enc, W_dec = (torch.randn(d_model, 40, generator=generator) / d_model**0.5 for _ in range(2))
        rest = {name: 0.3 * torch.randn(40, generator=generator) for name in ("b_enc", "b_noise", "density")}
        places = {"reads": f"blocks.{layer}.ln2.hook_normalized", "writes": f"blocks.{layer}.hook_mlp_out", **more}
        found.append(
            SparseDictionary(
                W_enc=W_enc,
                W_dec=W_dec.T.contiguous(),
                b_dec=torch.zeros(d_model),
                threshold=torch.rand(40, generator=generator) / 2,
                losses=torch.zeros(1),
                conditioned=conditioned,
                record={"model": "random"},
                **rest,
                **places,
            )
        )
    return found
