"""Checks the weights themselves: values that are not finite, untrained tensors, and blocks of another network."""

from dataclasses import asdict
from typing import Any

import torch

from diffusion_lens.checks.composition import Composition, foreign_parts
from diffusion_lens.checks.finding import Finding
from diffusion_lens.model.transformer import DiffusionTransformer

SHOWN = 4


@torch.no_grad()
def check_weights(model: DiffusionTransformer, scores: list[Composition]) -> Finding:
    """Check that all weights are finite, that no matrix or norm is constant, and that no block is foreign.

    A block that is foreign by its composition scores is only noted. The diagnosis tests it: texts become less likely if
    a block that belongs to the model is omitted.

    Norms are initialised to ones, so a norm of ones shows that it was missing in the checkpoint or in the conversion.
    Training changes every norm, and never to a constant; biases may stay zero. If all norms of the residual stream are
    constant, they may have been folded into the matrices, which is exact.
    """
    name, count = "weights", 0
    not_finite: list[str] = []
    constant: list[str] = []
    norms: list[str] = []
    for tensor, weight in model.named_parameters():
        count += weight.numel()
        if tensor.endswith(("ln_final.weight", ".ln1.weight", ".ln2.weight")):
            norms.append(tensor)
        if not bool(torch.isfinite(weight).all()):
            not_finite.append(tensor)
        elif not tensor.endswith(".bias") and weight.numel() > 1 and bool((weight == weight.flatten()[0]).all()):
            constant.append(tensor)
    numbers: dict[str, Any] = {"parameters": count, "not_finite": not_finite, "constant": constant}
    if not_finite:
        cause = f"the weights of {_listed(not_finite)} are not finite: a diverged training, or damage in transfer"
        return Finding(name, "off", f"{_listed(not_finite)} contain numbers that are not finite", cause, numbers)
    numbers["composition"] = [asdict(score) for score in scores]
    folded = bool(constant) and constant == norms
    if constant and not folded:
        cause = f"{_listed(constant)}: all values are equal. A norm or matrix was not read from the checkpoint"
        return Finding(name, "off", f"{_listed(constant)}: all values are equal", cause, numbers)
    if foreign := foreign_parts(scores):
        parts = [f"the {score.part} of block {score.block} ({score.excess:.2f})" for score in foreign]
        said = f"{_listed(parts)}: composition with the other blocks is near chance (0), so it may be foreign to them"
        return Finding(name, "noted", said, numbers=numbers)
    if folded:
        said = f"{count:,} numbers, all finite; every norm is constant: folded into the matrices, or not trained"
        return Finding(name, "noted", said, numbers=numbers)
    return Finding(name, "ok", f"{count:,} numbers, all finite, no tensor constant", numbers=numbers)


def _listed(tensors: list[str]) -> str:
    more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
    return ", ".join(tensors[:SHOWN]) + more
