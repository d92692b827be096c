"""The contribution of one fact to an average, and the contributions of many facts together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.average_effects.token_roles import mean_by_role
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace
from diffusion_lens.analysis.causal_tracing.trajectory_result import TrajectoryTrace


@dataclass(frozen=True, eq=False)
class FactEffect:
    """The effects in one fact, step by step; a trace of one canvas counts as one step.

    Attributes:
        averaged: Whether the rule of the study counts the fact among those that the model knows.
        clean: Float[step], p(answer) of the clean run; for a fact that is not averaged, on its first canvas.
        corrupted: Float[step], p(answer) of the corrupted run.
        effect: Float[step role layer], indirect effect, mean over the positions of each role.
    """

    averaged: bool
    clean: Float[Tensor, "step"]
    corrupted: Float[Tensor, "step"]
    effect: Float[Tensor, "step role layer"]

    @classmethod
    def of(cls, trace: CausalTrace | TrajectoryTrace, roles: Sequence[str]) -> "FactEffect":
        """A trace averaged over the positions of each of these roles."""
        by_step = isinstance(trace, TrajectoryTrace)
        grids = trace.indirect_effect if by_step else trace.indirect_effect[None]
        role_rows = trace.record["roles"] if by_step else [trace.record["roles"]]
        effects = [
            mean_by_role(grid, [role_row[position] for position in trace.positions], roles)
            for grid, role_row in zip(grids, role_rows, strict=True)
        ]
        return cls(
            averaged=bool(trace.positions),
            clean=torch.as_tensor(trace.clean, dtype=torch.float64).reshape(-1),
            corrupted=torch.as_tensor(trace.corrupted, dtype=torch.float64).reshape(-1),
            effect=torch.stack(effects),
        )

    def equals(self, other: "FactEffect") -> bool:
        """Whether both are the same to the bit."""
        pairs = ((self.clean, other.clean), (self.corrupted, other.corrupted), (self.effect, other.effect))
        same = all(a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)
        return same and self.averaged == other.averaged


def side_by_side(effects: Mapping[str, FactEffect], record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an average: ids, `unknown`, and tensors with one row per fact.

    The last steps of all facts are aligned; values before the first step of a fact are NaN.
    """
    averaged = {fact_id: effect for fact_id, effect in effects.items() if effect.averaged}
    n_steps = max((len(effect.clean) for effect in averaged.values()), default=1)
    shape = (len(averaged), n_steps)
    fields: dict[str, Any] = {
        "effects": torch.full((*shape, len(record["roles"]), len(record["layers"])), torch.nan),
        "clean": torch.full(shape, torch.nan, dtype=torch.float64),
        "corrupted": torch.full(shape, torch.nan, dtype=torch.float64),
    }
    for row, fact in enumerate(averaged.values()):
        steps = slice(n_steps - len(fact.clean), None)
        fields["effects"][row, steps], fields["clean"][row, steps] = fact.effect, fact.clean
        fields["corrupted"][row, steps] = fact.corrupted
    unknown = {fact_id: effect.clean[0].item() for fact_id, effect in effects.items() if not effect.averaged}
    return {**fields, "ids": list(averaged), "unknown": unknown}


def one_by_one(
    effects: Float[Tensor, "fact step role layer"],
    clean: Float[Tensor, "fact step"],
    corrupted: Float[Tensor, "fact step"],
    ids: Sequence[str],
    unknown: Mapping[str, float],
) -> dict[str, FactEffect]:
    """The inverse of `side_by_side`."""
    facts = {}
    for fact_id, effect, p_clean, p_corrupted in zip(ids, effects, clean, corrupted, strict=True):
        steps = ~p_clean.isnan()
        facts[fact_id] = FactEffect(True, p_clean[steps], p_corrupted[steps], effect[steps])
    no_effect = torch.full((1, *effects.shape[2:]), torch.nan)
    nan = torch.full((1,), torch.nan, dtype=torch.float64)
    for fact_id, probability in unknown.items():
        facts[fact_id] = FactEffect(False, nan.new_tensor([probability]), nan, no_effect)
    return facts
