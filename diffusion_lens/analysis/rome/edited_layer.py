"""The layers that can be edited: those with one MLP."""

from collections.abc import Iterable

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, pick_indices, pick_layer


def pick_edited_layer(model: DiffusionTransformer, layer: Whole) -> int:
    """The number of a block, counted from 0, whose MLP has keys and values.

    Raises:
        ValueError: The layer is out of range; or it has experts, of which each position has other ones, so that no one
            down-projection answers a key.
    """
    layer = pick_layer(layer, model.cfg.n_layers)
    experts = model.cfg.experts
    if experts is not None and experts.layers[layer]:
        dense = [i for i, has_experts in enumerate(experts.layers) if not has_experts]
        others = f"its layers with one MLP are {dense}" if dense else "all of its layers have experts"
        raise ValueError(
            f"layer {layer} of {model.cfg.model_name!r} has {experts.n_experts} experts, and keys and values are those "
            f"of one MLP; {others}. Hooks at blocks.{layer}.mlp.hook_expert_out and hook_router_weights change what "
            "its experts say"
        )
    return layer


def pick_edited_layers(model: DiffusionTransformer, layers: Iterable[Whole]) -> list[int]:
    """The numbers of several blocks, in ascending order; see `pick_edited_layer`."""
    chosen = sorted(pick_indices("layers", layers, model.cfg.n_layers))
    return [pick_edited_layer(model, layer) for layer in chosen]
