"""Circuits: scores of the edges between parts of a network, and what the edges with the largest scores keep."""

from diffusion_lens.analysis.circuits.attribution import EdgeScores, NodeScores, edge_attribution, node_attribution
from diffusion_lens.analysis.circuits.faithfulness import Faithfulness, faithfulness
from diffusion_lens.analysis.circuits.graph import Circuit

__all__ = [
    "Circuit",
    "EdgeScores",
    "Faithfulness",
    "NodeScores",
    "edge_attribution",
    "faithfulness",
    "node_attribution",
]
