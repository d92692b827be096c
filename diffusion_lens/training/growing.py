"""A trained model with more blocks, to be trained further (stacking after the lower blocks)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model.build import random_tensors
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import not_negative, whole_number

INTO_STREAM = (".o.weight", ".down.weight")
Model = TypeVar("Model", bound=DiffusionTransformer)


def grow(model: Model, n_layers: int, scale: float = 0.3, *, std: float = 0.02, seed: int = 0) -> Model:
    """A new model with the blocks of `model` followed by fresh ones.

    Embedding, unembedding and final norm are copied too. Because the fresh blocks write little to the residual stream
    at first, the grown model begins close to the given one: with `scale=0` it computes the same logits.

    Args:
        model: Model to copy. It is not changed.
        n_layers: Number of blocks of the new model.
        scale: Factor of the fresh blocks' projections into the residual stream.
        std: Standard deviation of the fresh blocks' other matrices. Their norms are 1 and their biases 0.
        seed: Seed of the fresh weights.

    Raises:
        ValueError: There are fewer blocks than `model` has, or a number is negative or not finite.
    """
    old = model.cfg.architecture
    if whole_number("n_layers", n_layers) < old.n_layers:
        raise ValueError(
            f"n_layers={n_layers}, but {model.cfg.model_name!r} has {old.n_layers} blocks; give at least as many"
        )
    shape = replace(old, n_layers=n_layers)
    given = dict(model.named_parameters())
    scale, std = not_negative("scale", scale), not_negative("std", std)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        # `random_tensors` divides the projections into the stream by sqrt(2 n_layers); here `scale` says how small.
        undo = (2 * n_layers) ** 0.5
        for name, fresh in random_tensors(shape, seed, std):
            if name in given:
                yield name, given[name].detach()
            else:
                yield name, fresh * (scale * undo) if name.endswith(INTO_STREAM) else fresh

    cfg = DiffusionConfig.from_architecture(
        shape,
        device=model.cfg.device,
        dtype=model.cfg.dtype,
        default_prepend_bos=model.cfg.default_prepend_bos,
        trained_length=model.cfg.trained_length,
        folded=model.cfg.layer_norm_folding,
    )
    return type(model)(cfg, model.tokenizer, tensors=tensors())
