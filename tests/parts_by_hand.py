"""What norms, MLPs and gates do, written out from the weights and a cache, for tests of the parts beside them; and the
time of a step of the loop as a number."""

import math
from contextlib import nullcontext

import torch


def told_noise_of(model, state):
    """A context in which a time-conditioned network gets the noise of a step; the last of a block has none."""
    if not model.cfg.time_conditioning:
        return nullcontext()
    return model.at_time(min(max(1e-9, -math.expm1(-state.sigma) / (1 - 1e-3)), 1.0))


def normed(model, cache, name, normalized=None):
    """The output of a norm, "blocks.1.ln1" or "ln_final", for its normalised input; by default the cached one."""
    norm = model.get_submodule(name)
    x = cache[f"{name}.hook_normalized"] if normalized is None else normalized
    x = x * norm.w + getattr(norm, "b", 0)
    if not model.cfg.time_conditioning:
        return x
    if name == "ln_final":
        shift, scale = cache["hook_final_modulation"].unbind(1)
    else:
        first = 0 if name.endswith("ln1") else 3
        shift, scale = cache[name.rpartition(".")[0] + ".hook_modulation"][:, first : first + 2].unbind(1)
    return x * (1 + scale[:, None]) + shift[:, None]


def gate(model, cache, layer, part):
    """By what the output of "attn" or "mlp" is multiplied."""
    if not model.cfg.time_conditioning:
        return 1.0
    return cache[f"blocks.{layer}.hook_modulation"][:, {"attn": 2, "mlp": 5}[part], None]


def clipped(model, x):
    """Queries, keys or values within the bound of the network, if it has one."""
    bound = model.cfg.architecture.qkv_clip
    return x if bound is None else x.clamp(-bound, bound)


def mlp_post(mlp, normed):
    """The input of the down-projection of a dense MLP."""
    up = normed @ mlp.W_in + mlp.b_in
    if not hasattr(mlp, "gate"):
        return torch.nn.functional.gelu(up, approximate="tanh")
    gated = normed @ mlp.W_gate + mlp.b_gate
    return gated * torch.sigmoid(gated) * up
