"""A mixture of experts, one position after the other, written from the papers' equations."""

import torch
from torch import Tensor

from weight_conversion import Experts


def mixture(weights: dict[str, Tensor], settings: Experts, x: Tensor) -> Tensor:
    """The weighted sum of the chosen experts for the vector of one position, in float64.

    Args:
        weights: Tensors of one layer in our layout, without "blocks.{i}.mlp.".
        x: Float[d_model].
    """
    weights, x = {name: tensor.double() for name, tensor in weights.items()}, x.double()
    logits = weights["router.weight"] @ x
    scores = logits.softmax(0) if settings.router == "softmax" else 1 / (1 + (-logits).exp())
    biased = scores + weights.get("router.bias", torch.zeros(()))
    size = settings.n_experts // settings.n_groups
    groups = [range(g * size, (g + 1) * size) for g in range(settings.n_groups)]
    strength = [sum(sorted((float(biased[e]) for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(len(groups)), key=lambda g: -strength[g])[: settings.n_chosen_groups]
    candidates = [e for g in best for e in groups[g]]
    chosen = sorted(candidates, key=lambda e: -float(biased[e]))[: settings.n_chosen]
    weight = {e: float((biased if settings.bias_weighs else scores)[e]) for e in chosen}
    total = sum(weight.values()) if settings.normalised else 1.0
    out = torch.zeros_like(x)
    for e in chosen:
        gate, up, down = (weights[f"experts.{e}.{part}.weight"] for part in ("gate", "up", "down"))
        hidden = gate @ x
        out += settings.scale * weight[e] / total * (down @ (hidden * torch.sigmoid(hidden) * (up @ x)))
    return out
