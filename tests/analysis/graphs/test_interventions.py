"""Interventions on nodes of a graph: predictions are exact where the network is linear; the runs are those of hooks."""

from typing import Any

import pytest
import torch
from test_run_graph import graph_of, last_position, prompts, run_of


def linear_graph(specimen: Any, configs: Any) -> tuple[Any, Any]:
    """A graph of a network without norms and MLPs, under even attention, which is linear in its embeddings."""
    from diffusion_lens.analysis import run_graph

    model = specimen({**configs["llada"], "n_layers": 1}).model
    block = model.blocks[0]
    block.ln1, block.ln2, model.ln_final = (torch.nn.Identity() for _ in range(3))
    with torch.no_grad():
        block.attn.q.weight.zero_()
        block.attn.v.weight *= 20  # so that what is given decides all three words
        next(each for name, each in block.mlp.named_parameters() if each.shape[0] == model.cfg.d_model).zero_()
    clean = torch.arange(5) + 20
    corrupted = torch.where(torch.arange(5) == 3, clean + 9, clean)
    run = model.denoise(clean[None], length=8, sampler="left_to_right")
    return model, run_graph(model, run, 7, corrupted, points=1, metric="margin")


def test_try(specimen: Any, configs: Any) -> None:
        model, graph = linear_graph(specimen, configs)
        print(graph.runs["clean"].tokens, graph.runs["corrupted"].tokens)
        print(graph.nodes.to_string())
        found = graph.interventions(model, scales=(1.0, 0.0, -1.0, 2.0))
        print(found.to_dataframe().to_string())
