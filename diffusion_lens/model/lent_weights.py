"""Temporarily replaces a model's weights, or settings that interpret them, without building or copying a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model import build
from diffusion_lens.model.attention_patterns import AttentionPattern
from diffusion_lens.model.norm import Norm
from diffusion_lens.model.transformer import DiffusionTransformer


@contextmanager
def lent_weights(
    model: DiffusionTransformer, cfg: DiffusionConfig, tensors: Mapping[str, Tensor]
) -> Iterator[DiffusionTransformer]:
    """Use `model` with another config and with some weights replaced; afterwards both are restored.

    Args:
        model: Model to change.
        cfg: Config that may differ in attention direction, readout, [MASK], rotary positions and the norms' epsilon.
        tensors: Weights to replace, by name and in the shapes of our layout. A tied head follows the embedding.
    """
    before = (model.cfg, model.positions, model._pattern)
    parameters = {name: model.get_parameter(name) for name in tensors}
    # Finding the norms takes long, and the epsilon is seldom another.
    norms = [] if cfg.eps == model.cfg.eps else [norm for norm in model.modules() if isinstance(norm, Norm)]
    epsilons = {norm: norm.eps for norm in norms}
    try:
        model.cfg = cfg
        model.positions = build.build_positions(cfg.architecture)
        model._pattern = AttentionPattern.of(cfg)
        for norm in epsilons:
            norm.eps = cfg.eps
        for name, tensor in tensors.items():
            _put(model, name, nn.Parameter(tensor, requires_grad=torch.is_floating_point(tensor)))
        yield model
    finally:
        model.cfg, model.positions, model._pattern = before
        for norm, eps in epsilons.items():
            norm.eps = eps
        for name, parameter in parameters.items():
            _put(model, name, parameter)


def _put(model: DiffusionTransformer, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)
    model._tie()
