"""What the weights themselves show: numbers that are none, tensors that nobody trained, blocks of another network."""

from dataclasses import asdict
from typing import Any

import torch

from diffusion_lens.checks.composition import Composition, foreign_parts
from diffusion_lens.checks.finding import Finding
from diffusion_lens.model.transformer import DiffusionTransformer

SHOWN = 4


@torch.no_grad()
def check_weights(model: DiffusionTransformer, scores: list[Composition]) -> Finding:
    """Finite numbers everywhere, no matrix or norm that is one constant; whether a block looks foreign to the others.

    A foreign look is a suspicion, which the diagnosis tests: leaving out what belongs to the model makes its texts less
    likely.

    A norm of ones is what a network begins with, so a checkpoint that lacks it, or a loader that left it out, ends with
    one. Training moves every norm, and moves none to one number; biases may stay zero. Where every norm of the stream
    is constant, they may have been folded into the matrices, which is exact.
    """
    name, count = "weights", 0
    wild: list[str] = []
    constant: list[str] = []
    norms: list[str] = []
    for tensor, weight in model.named_parameters():
        count += weight.numel()
        if tensor.endswith(("ln_final.weight", ".ln1.weight", ".ln2.weight")):
            norms.append(tensor)
        if not bool(torch.isfinite(weight).all()):
            wild.append(tensor)
        elif not tensor.endswith(".bias") and weight.numel() > 1 and bool((weight == weight.flatten()[0]).all()):
            constant.append(tensor)
    numbers: dict[str, Any] = {"parameters": count, "not_finite": wild, "constant": constant}
    if wild:
        cause = f"the weights of {_named(wild)} are not finite: a diverged training run, or damaged in transfer"
        return Finding(name, "off", f"{_named(wild)} hold numbers that are not finite", cause, numbers)
    numbers["composition"] = [asdict(score) for score in scores]
    folded = bool(constant) and constant == norms
    if constant and not folded:
        cause = f"{_named(constant)}: one number only. A norm or matrix was left out, and not read from the checkpoint"
        return Finding(name, "off", f"{_named(constant)} hold one number only", cause, numbers)
    if foreign := foreign_parts(scores):
        parts = [f"the {score.part} of block {score.block} ({score.excess:.2f})" for score in foreign]
        said = f"{_named(parts)}: reads and writes what the other blocks do not, 0 by chance; is it foreign to them?"
        return Finding(name, "noted", said, numbers=numbers)
    if folded:
        said = f"{count:,} numbers, all finite; every norm is one constant: folded into the matrices, or not trained"
        return Finding(name, "noted", said, numbers=numbers)
    return Finding(name, "ok", f"{count:,} numbers, all finite, no tensor constant", numbers=numbers)


def _named(tensors: list[str]) -> str:
    more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
    return ", ".join(tensors[:SHOWN]) + more
