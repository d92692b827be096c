"""Graphs of whole runs: the parts, steps and decisions by which given tokens make a run write its target."""

from diffusion_lens.analysis.graphs.average import AverageRunGraph, FactGraph, GraphOverlap, average_run_graph
from diffusion_lens.analysis.graphs.faithful import GraphFaithfulness
from diffusion_lens.analysis.graphs.interventions import GraphInterventions
from diffusion_lens.analysis.graphs.result import RunGraph
from diffusion_lens.analysis.graphs.run_graph import GraphSettings, run_graph

__all__ = [
    "AverageRunGraph",
    "FactGraph",
    "GraphFaithfulness",
    "GraphInterventions",
    "GraphOverlap",
    "GraphSettings",
    "RunGraph",
    "average_run_graph",
    "run_graph",
]
