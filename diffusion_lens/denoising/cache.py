"""Activations by denoising step: one of TransformerLens's `ActivationCache`s for each step requested."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities.slice import Slice

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.denoising.activation_shapes import ITEM_BYTES, activation_shape
from diffusion_lens.display import Result, Table
from diffusion_lens.hook_names import NamesFilter, loop_hook, select_names
from diffusion_lens.model.caching import AliasedCache, PosSlice, count_positions, select_positions
from diffusion_lens.model.hooking import Hooking
from diffusion_lens.records import open_result, save_result
from diffusion_lens.settings import whole_numbers

_SEPARATOR = "/"
_CANVASES = "canvases"


class TrajectoryCache(Result, Mapping[int, ActivationCache]):
    """Activations of the selected hook points, by step.

    Columns of the data frame: step, point, shape, dtype, bytes.

    `cache[5]["resid_post", 3]` and `cache[5, "blocks.3.hook_resid_post"]` are activations of one step; negative steps
    count from the end of the run. `cache.stack(name)` contains one hook point at all cached steps.

    Attributes:
        n_steps: Number of steps of the run.
        canvases: Int[canvas batch pos], those of the run's `Trajectory`; `None` in files of earlier versions.
    """

    def __init__(
        self,
        by_step: Mapping[int, dict[str, Tensor]],
        n_steps: int,
        model: Any = None,
        canvases: Tensor | None = None,
    ) -> None:
        self._by_step = {step: AliasedCache(by_step[step], model) for step in sorted(by_step)}
        self.n_steps, self.canvases = n_steps, canvases

    @property
    def steps(self) -> tuple[int, ...]:
        """The cached steps, in order."""
        return tuple(self._by_step)

    @property
    def n_bytes(self) -> int:
        """Size of all activations, in bytes."""
        return sum(x.nbytes for cache in self._by_step.values() for x in cache.cache_dict.values())

    def __getitem__(self, key: Any) -> Any:
        step, name = key if isinstance(key, tuple) else (key, None)
        resolved = step + self.n_steps if step < 0 else step
        if resolved not in self._by_step:
            raise KeyError(f"step {step} was not cached; of the run's {self.n_steps} steps, {list(self.steps)} were")
        cache = self._by_step[resolved]
        return cache if name is None else cache[name]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_step)

    def __len__(self) -> int:
        return len(self._by_step)

    def stack(self, name: Any) -> Float[Tensor, "step batch *rest"]:
        """The activations of one hook point at all cached steps, in order."""
        return torch.stack([cache[name] for cache in self._by_step.values()])

    def save(self, path: str | Path) -> Path:
        """Write all activations to one `.safetensors` file."""
        tensors = {
            f"{step}{_SEPARATOR}{name}": x
            for step, cache in self._by_step.items()
            for name, x in cache.cache_dict.items()
        }
        tensors |= {} if self.canvases is None else {_CANVASES: self.canvases}
        return save_result(path, "trajectory cache", tensors, {"n_steps": self.n_steps})

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> "TrajectoryCache":
        """Read what `save` wrote, memory-mapped: an activation is read from disk when it is used.

        Args:
            model: Model for the methods of `ActivationCache` that need one, such as `logit_attrs`.
        """
        tensors, record = open_result(path, "trajectory cache")
        canvases = tensors.pop(_CANVASES, None)
        by_step: dict[int, dict[str, Tensor]] = {}
        for key, x in tensors.items():
            step, name = key.split(_SEPARATOR, 1)
            by_step.setdefault(int(step), {})[name] = x
        return cls(by_step, record["n_steps"], model, canvases)

    def _table(self) -> Table:
        rows = [(step, name, x) for step, cache in self._by_step.items() for name, x in cache.cache_dict.items()]
        return Table(
            {
                "step": [step for step, _, _ in rows],
                "point": [name for _, name, _ in rows],
                "shape": [" ".join(map(str, x.shape)) for *_, x in rows],
                "dtype": [str(x.dtype).removeprefix("torch.") for *_, x in rows],
                "bytes": [x.nbytes for *_, x in rows],
            }
        )

    def _settings(self) -> Mapping[str, Any]:
        return {}

    def __repr__(self) -> str:
        names = sorted({name for cache in self._by_step.values() for name in cache.cache_dict})
        return f"TrajectoryCache(steps {list(self.steps)} of {self.n_steps}, {self.n_bytes:,} bytes, {names})"


@dataclass(frozen=True)
class CacheRequest:
    """The activations that a `CacheFilter` selects in one run.

    Attributes:
        names: Names of the hook points.
        steps: Indices of the steps.
        branch: Branch of guidance.
        pos_slice: Positions to keep.
        device: Device of the cache; `None` leaves activations where they are.
        dtype: Dtype of the cache; `None` leaves activations as they are.
    """

    names: tuple[str, ...]
    steps: frozenset[int]
    branch: str
    pos_slice: Slice
    device: str | torch.device | None
    dtype: torch.dtype | None

    def hooks(self, cached: dict[int, dict[str, Tensor]]) -> list[Any]:
        """Hooks that copy the activations into `cached`, by step and hook point."""

        def store(activation: Tensor, hook: Any) -> None:
            if hook.step.branch != self.branch:
                return
            x = select_positions(activation.detach(), self.pos_slice, hook)
            dtype = self.dtype if x.is_floating_point() else None
            cached.setdefault(hook.step.index, {})[hook.name] = x.to(device=self.device, dtype=dtype, copy=True)

        return [(name, store) for name in self.names]


@dataclass(frozen=True)
class CacheFilter:
    """The activations to cache in a run, as callers of `denoise_with_cache` give them.

    Attributes:
        names: Name, names or predicate of the hook points.
        steps: Step or steps, negative ones from the end; `None` selects all.
        pos_slice: Positions (of scores and patterns, the queries): an index, a slice, or indices; `None` selects all.
        branch: Branch of guidance, "conditional" or "unconditional".
        device: Device of the cache; `None` leaves activations where they are.
        dtype: Dtype of the cache; `None` leaves activations as they are.
        max_bytes: Largest estimated size, in bytes, that is not refused; `None` refuses none.
    """

    names: NamesFilter
    steps: SupportsIndex | Iterable[SupportsIndex] | None = None
    pos_slice: PosSlice = None
    branch: str = "conditional"
    device: str | torch.device | None = None
    dtype: torch.dtype | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.names is None:
            raise ValueError(
                "names_filter is required: name the activations to keep, because all of them at every step seldom fit "
                "in memory"
            )
        if self.branch not in ("conditional", "unconditional"):
            raise ValueError(f"branch={self.branch!r}; it must be 'conditional' or 'unconditional'")

    def on(self, model: Hooking, n_steps: int, *, guided: bool) -> CacheRequest:
        """The hook points and steps that the filter selects in a run of one model.

        Raises:
            KeyError: A hook point that does not exist.
            ValueError: A filter that selects nothing, or a hook point, step or branch that the run does not have.
        """
        names = select_names(self.names, model.hook_dict)
        in_loop = [name for name in names if name.startswith(loop_hook(""))]
        silent = {name: reason for name in names if name not in in_loop and (reason := model.why_silent(name))}
        if silent and not callable(self.names):
            raise ValueError("; ".join(f"{name!r} {reason}" for name, reason in silent.items()))
        if self.branch == "unconditional" and not guided:
            raise ValueError("branch='unconditional' needs guidance: without cfg_scale there is no such branch")
        if self.branch == "unconditional" and in_loop:
            raise ValueError(
                f"{in_loop} are after guidance, so they belong to neither branch: cache them with branch='conditional'"
            )
        return CacheRequest(
            names=tuple(name for name in names if name not in silent),
            steps=resolve_steps(self.steps, n_steps),
            branch=self.branch,
            pos_slice=Slice.unwrap(self.pos_slice),
            device=self.device,
            dtype=self.dtype,
        )


def estimate_bytes(request: CacheRequest, cfg: DiffusionConfig, batch: int, pos: int) -> dict[str, int]:
    """Bytes that each hook point will take over all requested steps."""
    width = (request.dtype or cfg.dtype).itemsize
    kept_pos = count_positions(request.pos_slice, pos, "the canvas")
    sizes = {}
    for name in request.names:
        shape = activation_shape(name, cfg, batch, pos, kept_pos)
        tail = name.rsplit(".", 1)[-1]
        if tail == "hook_scale":  # norms are computed in float32 or wider
            item = (request.dtype or torch.promote_types(cfg.dtype, torch.float32)).itemsize
        elif tail == "hook_confidence":
            item = (request.dtype or torch.float64).itemsize
        else:
            item = ITEM_BYTES.get(tail, width)
        sizes[name] = torch.Size(shape).numel() * item * len(request.steps)
    return sizes


def check_budget(sizes: Mapping[str, int], max_bytes: int | None) -> None:
    """Raise a `ValueError` with the estimate and its largest contributors where it exceeds `max_bytes`."""
    total = sum(sizes.values())
    if max_bytes is not None and total > max_bytes:
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        shown = ", ".join(f"{name} {size:,}" for name, size in largest)
        raise ValueError(
            f"this cache needs {total:,} bytes, but max_bytes is {max_bytes:,}; the largest are {shown}. "
            "Narrow names_filter, steps_filter or pos_slice, or give dtype=torch.bfloat16"
        )


def resolve_steps(steps_filter: SupportsIndex | Iterable[SupportsIndex] | None, n_steps: int) -> frozenset[int]:
    """The requested steps, negative ones counted from the end; a step outside the run is a `ValueError`."""
    if steps_filter is None:
        return frozenset(range(n_steps))
    steps = whole_numbers("steps_filter", steps_filter)
    resolved = {step + n_steps if step < 0 else step for step in steps}
    if outside := [step for step in steps if not 0 <= (step + n_steps if step < 0 else step) < n_steps]:
        raise ValueError(f"steps_filter names {outside}, and the run has steps 0 to {n_steps - 1}")
    if not resolved:
        raise ValueError("steps_filter selects no step")
    return frozenset(resolved)
