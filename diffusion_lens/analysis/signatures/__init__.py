"""The three signatures with which arXiv 2602.02133 explains why masked diffusion models mitigate the reversal curse."""

from diffusion_lens.analysis.signatures.alignment import GradientAlignment
from diffusion_lens.analysis.signatures.batches import pair_bytes
from diffusion_lens.analysis.signatures.fact_result import FactSignatures
from diffusion_lens.analysis.signatures.measures import edge_cut, evidence, gradient_alignment, routes
from diffusion_lens.analysis.signatures.plan import SignaturePlan, signature_passes
from diffusion_lens.analysis.signatures.result import ReversalSignatures
from diffusion_lens.analysis.signatures.routes import correlation_of_frequencies, isotropic_route_correlation
from diffusion_lens.analysis.signatures.study import reversal_signatures

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
    "signature_passes",
]
