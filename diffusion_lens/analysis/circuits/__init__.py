"""Circuits: scores of the parts of a network and of the edges between them, and what the edges with the largest scores
keep."""

from diffusion_lens.analysis.circuits.attribution import EdgeScores, NodeScores, edge_attribution, node_attribution
from diffusion_lens.analysis.circuits.faithfulness import Faithfulness, faithfulness
from diffusion_lens.analysis.circuits.graph import Circuit
from diffusion_lens.analysis.circuits.neurons import NeuronScores, neuron_attribution

__all__ = [
    "Circuit",
    "EdgeScores",
    "Faithfulness",
    "NeuronScores",
    "NodeScores",
    "edge_attribution",
    "faithfulness",
    "neuron_attribution",
    "node_attribution",
]
