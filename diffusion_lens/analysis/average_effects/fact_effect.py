"""One fact's share of an average, and the shares of many facts side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.average_effects.token_roles import mean_by_role
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace
from diffusion_lens.analysis.causal_tracing.trajectory_trace import TrajectoryTrace
from diffusion_lens.analysis.resumable import join_parts


@dataclass(frozen=True, eq=False)
class FactEffect:
    """What the traces of one fact show, step by step; a trace of one canvas counts as one step.

    Attributes:
        averaged: whether the rule of the run counts the fact among those that the model knows.
        clean: Float[step], p(answer) of the clean run; of a fact that is not averaged, on its first canvas.
        corrupted: Float[step], of the corrupted run.
        effect: Float[step role layer], mean over the places of each role.
    """

    averaged: bool
    clean: Float[Tensor, "step"]
    corrupted: Float[Tensor, "step"]
    effect: Float[Tensor, "step role layer"]

    @classmethod
    def of(cls, trace: CausalTrace | TrajectoryTrace, wanted: Sequence[str]) -> "FactEffect":
        """A trace averaged over the places of each role that is wanted."""
        by_step = isinstance(trace, TrajectoryTrace)
        grids = trace.indirect_effect if by_step else trace.indirect_effect[None]
        roles = trace.record["roles"] if by_step else [trace.record["roles"]]
        rows = [
            mean_by_role(grid, [held[place] for place in trace.positions], wanted)
            for grid, held in zip(grids, roles, strict=True)
        ]
        return cls(
            averaged=bool(trace.positions),
            clean=torch.as_tensor(trace.clean, dtype=torch.float64).reshape(-1),
            corrupted=torch.as_tensor(trace.corrupted, dtype=torch.float64).reshape(-1),
            effect=torch.stack(rows),
        )

    def equals(self, other: "FactEffect") -> bool:
        """Whether both are the same to the bit."""
        pairs = ((self.clean, other.clean), (self.corrupted, other.corrupted), (self.effect, other.effect))
        same = all(a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)
        return same and self.averaged == other.averaged


def side_by_side(effects: Mapping[str, FactEffect], run: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an average: ids, `unknown`, and the tensors with a row a fact; steps end together, NaN before."""
    averaged = {fact_id: each for fact_id, each in effects.items() if each.averaged}
    n_steps = max((len(each.clean) for each in averaged.values()), default=1)
    shape = (len(averaged), n_steps)
    fields: dict[str, Any] = {
        "effects": torch.full((*shape, len(run["roles"]), len(run["layers"])), torch.nan),
        "clean": torch.full(shape, torch.nan, dtype=torch.float64),
        "corrupted": torch.full(shape, torch.nan, dtype=torch.float64),
    }
    for row, each in enumerate(averaged.values()):
        own = slice(n_steps - len(each.clean), None)
        fields["effects"][row, own], fields["clean"][row, own] = each.effect, each.clean
        fields["corrupted"][row, own] = each.corrupted
    left_out = {fact_id: each.clean[0].item() for fact_id, each in effects.items() if not each.averaged}
    return {**fields, "ids": list(averaged), "unknown": left_out}


def apart(
    effects: Float[Tensor, "fact step role layer"],
    clean: Float[Tensor, "fact step"],
    corrupted: Float[Tensor, "fact step"],
    ids: Sequence[str],
    unknown: Mapping[str, float],
) -> dict[str, FactEffect]:
    """The inverse of `side_by_side`."""
    found = {}
    for fact_id, effect, high, low in zip(ids, effects, clean, corrupted, strict=True):
        held = ~high.isnan()
        found[fact_id] = FactEffect(True, high[held], low[held], effect[held])
    nothing = torch.full((1, *effects.shape[2:]), torch.nan)
    nan = torch.full((1,), torch.nan, dtype=torch.float64)
    for fact_id, probability in unknown.items():
        found[fact_id] = FactEffect(False, nan.new_tensor([probability]), nan, nothing)
    return found


@runtime_checkable
class Average(Protocol):
    """What `join` asks of a result."""

    @property
    def record(self) -> dict[str, Any]: ...

    def by_fact(self) -> dict[str, FactEffect]: ...


A = TypeVar("A", bound=Average)


def join(
    parts: str | Path | A | Sequence[str | Path | A], read: Callable[[Path], A]
) -> tuple[dict[str, Any], dict[str, FactEffect]]:
    """The run that all parts belong to, and every fact of it.

    Args:
        parts: folders, saved results, or results.
        read: opens a folder or a saved result.

    Raises:
        ValueError: parts of different runs, facts that no part holds, or a fact that came out in two ways.
    """
    given = list(parts) if isinstance(parts, Sequence) and not isinstance(parts, str) else [parts]
    held = []
    for part in given:
        result = read(Path(part)) if isinstance(part, str | Path) else part
        name = str(part) if isinstance(part, str | Path) else "one of the results"
        held.append((name, result.record, result.by_fact()))
    return join_parts(held, FactEffect.equals)
