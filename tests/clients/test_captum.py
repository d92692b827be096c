"""captum's integrated gradients at hook points: they sum to the difference, and equal a path integral by hooks."""

from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import LayerIntegratedGradients

POINTS = {"hook_embed": lambda model: model.hook_embed, "resid": lambda model: model.blocks[1].hook_resid_post}
STEPS = 64


def path_integral(prompts: Any, name: str) -> torch.Tensor:
    """Gradients at the Gauss-Legendre points of the straight line between two activations, one pass for each."""
    activations = []
    for tokens in (prompts.other, prompts.tokens):
        activations.append(prompts.model.run_with_cache(tokens, names_filter=name)[1][name].detach())
    start, end = activations
    nodes, weights = np.polynomial.legendre.leggauss(STEPS)
    total = torch.zeros_like(end)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        state = (start + float(node) * (end - start)).requires_grad_()
        with prompts.model.hooks(fwd_hooks=[(name, lambda x, hook, state=state: state)]):
            (gradient,) = torch.autograd.grad(prompts.logit(prompts.tokens).sum(), state)
        total += float(weight) * gradient
    return total * (end - start)


@pytest.mark.parametrize("point", POINTS)
def test_layer_integrated_gradients_are_complete_and_a_path_integral(prompts: Any, point: str) -> None:
    layer = POINTS[point](prompts.model)
    method = LayerIntegratedGradients(prompts.logit, layer)
    found = method.attribute(prompts.tokens, prompts.other, n_steps=STEPS)
    difference = prompts.logit(prompts.tokens) - prompts.logit(prompts.other)
    assert difference.item() > 5
    torch.testing.assert_close(found.sum((1, 2)), difference, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found, path_integral(prompts, layer.name), rtol=1e-3, atol=1e-3)
    assert not prompts.model.list_hooks()
