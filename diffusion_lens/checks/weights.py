"""What the weights themselves show: numbers that are none, and tensors that nobody trained."""

import torch
from torch import nn

from diffusion_lens.checks.finding import Finding

SHOWN = 4


@torch.no_grad()
def check_weights(model: nn.Module) -> Finding:
    """Finite numbers everywhere, and no matrix or norm that is one constant.

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
    numbers = {"parameters": count, "not_finite": wild, "constant": constant}
    if wild:
        cause = f"the weights of {_named(wild)} are not finite: a diverged training run, or damaged in transfer"
        return Finding(name, "off", f"{_named(wild)} hold numbers that are not finite", cause, numbers)
    if constant and constant == norms:
        said = f"{count:,} numbers, all finite; every norm is one constant: folded into the matrices, or not trained"
        return Finding(name, "noted", said, numbers=numbers)
    if constant:
        cause = f"{_named(constant)}: one number only. A norm or matrix was left out, and not read from the checkpoint"
        return Finding(name, "off", f"{_named(constant)} hold one number only", cause, numbers)
    return Finding(name, "ok", f"{count:,} numbers, all finite, no tensor constant", numbers=numbers)


def _named(tensors: list[str]) -> str:
    more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
    return ", ".join(tensors[:SHOWN]) + more
