"""The three signatures with which arXiv 2602.02133 explains why masked diffusion models mitigate the reversal curse."""

from diffusion_lens.analysis.signatures.evidence import (
    correlation_of_frequencies,
    isotropic_route_correlation,
    pair_bytes,
)
from diffusion_lens.analysis.signatures.gradients import GradientAlignment
from diffusion_lens.analysis.signatures.result import FactSignatures, ReversalSignatures
from diffusion_lens.analysis.signatures.study import (
    SignaturePlan,
    edge_cut,
    evidence,
    gradient_alignment,
    reversal_signatures,
    routes,
)

__all__ = [
    "FactSignatures",
    "GradientAlignment",
    "ReversalSignatures",
    "SignaturePlan",
    "correlation_of_frequencies",
    "edge_cut",
    "evidence",
    "gradient_alignment",
    "isotropic_route_correlation",
    "pair_bytes",
    "reversal_signatures",
    "routes",
]
