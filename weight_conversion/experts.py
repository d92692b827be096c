"""`Experts`, the MLPs of a mixture of experts and the router that chooses among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weight_conversion.checks import check_choice, check_count, check_flag, check_positive


@dataclass(frozen=True)
class Experts:
    """In some layers, a router chooses for each position the few MLPs (experts) that process it.

    The router's scores are its logits after a softmax over all experts, or after a sigmoid. The experts of the highest
    scores are chosen, and the output is the sum of theirs, weighted by the scores.

    Attributes:
        n_experts: Experts in a layer.
        n_chosen: Experts that process a position.
        d_expert: Width of an expert's hidden layer.
        layers: For each layer, whether it has experts; the others have one dense MLP.
        d_shared: Width of an MLP that processes every position beside the experts; `None` without one.
        router: Function from logits to scores, "softmax" or "sigmoid".
        router_dtype: Precision of the logits and the weights: "activation", that of the activations, or "float32", if
            these are less precise. Scores and choice are always computed in float32.
        router_bias: Whether a bias of each expert is added to the scores before the choice.
        bias_weighs: Whether this bias is also a part of the weights.
        normalised: Whether the weights of the chosen experts are divided by their sum.
        scale: Factor of the weights.
        n_groups, n_chosen_groups: Equal groups of experts, and how many of them, by the sum of their two best scores,
            the experts are chosen from; 1 and 1 without groups.
    """

    n_experts: int
    n_chosen: int
    d_expert: int
    layers: tuple[bool, ...]
    d_shared: int | None = None
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_dtype: Literal["activation", "float32"] = "activation"
    router_bias: bool = False
    bias_weighs: bool = False
    normalised: bool = False
    scale: float = 1.0
    n_groups: int = 1
    n_chosen_groups: int = 1

    @property
    def n_units(self) -> int:
        """Hidden units of all experts of a layer."""
        return self.n_experts * self.d_expert + (self.d_shared or 0)

    def has_shared(self, layer: int) -> bool:
        """Whether a layer has an MLP that processes every position beside its experts."""
        return self.d_shared is not None and self.layers[layer]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        for name in ("n_experts", "n_chosen", "d_expert", "n_groups", "n_chosen_groups"):
            check_count(name, getattr(self, name))
        if self.d_shared is not None:
            check_count("d_shared", self.d_shared)
        check_choice("router", self.router, ("softmax", "sigmoid"))
        check_choice("router_dtype", self.router_dtype, ("activation", "float32"))
        for name in ("router_bias", "bias_weighs", "normalised"):
            check_flag(name, getattr(self, name))
        check_positive("scale", self.scale)
        if any(not isinstance(layer, bool) for layer in self.layers) or not any(self.layers):
            raise ValueError(f"layers is {self.layers!r}; it must be true or false for each layer, at least once true")
        if self.n_chosen > self.n_experts:
            raise ValueError(f"n_chosen is {self.n_chosen}; it must be at most n_experts, {self.n_experts}")
        if self.n_experts % self.n_groups or self.n_chosen_groups > self.n_groups:
            raise ValueError(
                f"{self.n_experts} experts cannot be chosen from {self.n_chosen_groups} of {self.n_groups} equal groups"
            )
