"""Circuits: scores of the edges between parts of a network, and what the edges with the largest scores keep."""

from diffusion_lens.analysis.circuits.ablation import Faithfulness, faithfulness
from diffusion_lens.analysis.circuits.attribution import edge_attribution, node_attribution
from diffusion_lens.analysis.circuits.circuit import Circuit
from diffusion_lens.analysis.circuits.result import EdgeScores, NodeScores

__all__ = [
    "Circuit",
    "EdgeScores",
    "Faithfulness",
    "NodeScores",
    "edge_attribution",
    "faithfulness",
    "node_attribution",
]
