"""Activations by denoising step: one of TransformerLens's `ActivationCache`s for each step requested.

`CacheFilter` says which activations; their size is estimated from the shapes at hook points before a run begins.
"""

import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities.slice import Slice

from diffusion_lens.denoising.same_network import is_same_architecture
from diffusion_lens.hooks.names import NamesFilter, loop_hook, select_names
from diffusion_lens.hooks.step import BRANCHES, StepState
from diffusion_lens.model.config import DiffusionConfig, as_device
from diffusion_lens.model.hooking import AliasedCache, PosSlice, count_positions, select_positions, why_silent
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import Result, Table, differences, open_result, provenance, save_result, shown_model
from diffusion_lens.settings import one_of, warn_user, whole_numbers
from weight_conversion import as_json

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
        record: The record of the run, with the `branch` of guidance and the `positions` that were cached (`None` for
            all); empty in files of earlier versions.
    """

    KIND = "trajectory cache"
    NO_PICTURE = "It holds activations; the results that are computed from them have pictures."

    def __init__(
        self,
        by_step: Mapping[int, dict[str, Tensor]],
        n_steps: int,
        model: Any = None,
        canvases: Tensor | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        self._by_step = {step: AliasedCache(by_step[step], model) for step in sorted(by_step)}
        self.n_steps, self.canvases, self.record = n_steps, canvases, as_json(dict(record or {}))

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
        try:
            step = operator.index(step)
        except TypeError:
            said = f"{key!r} names no step: cache[step]['resid_post', 3], or cache.stack(name) for all steps"
            raise KeyError(said) from None
        resolved = step + self.n_steps if step < 0 else step
        if resolved not in self._by_step:
            raise KeyError(f"step {step} was not cached; of the run's {self.n_steps} steps, {list(self.steps)} were")
        cache = self._by_step[resolved]
        return cache if name is None else cache[name]

    def require_fits(self, step: StepState) -> None:
        """Raise a `ValueError` if the run of a hook's step has another number of steps and is not causal, or is in the
        other branch of guidance."""
        is_causal = self.record.get("architecture", {}).get("attention_dir") == "causal"  # step i writes token i
        if step.n_steps != self.n_steps and not is_causal:
            raise ValueError(
                f"the cache is of a run of {self.n_steps} steps, and this run has {step.n_steps}, in which an index is "
                f"another time: denoise with steps={self.n_steps}, or say which step is meant, cache[step]"
            )
        if (branch := self.record.get("branch", step.branch)) != step.branch:
            raise ValueError(
                f"the cache is of the {branch} branch, and the hook is in the {step.branch} one: wrap it, "
                f"on_branch(hook, {branch!r}). To take the states of the other branch on purpose, give dict(cache)"
            )

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_step)

    def __len__(self) -> int:
        return len(self._by_step)

    def stack(self, name: str | tuple[Any, ...]) -> Float[Tensor, "step batch *rest"]:
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
        return save_result(path, self.KIND, tensors, {"n_steps": self.n_steps, **self.record})

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> "TrajectoryCache":
        """Read what `save` wrote, memory-mapped: an activation is read from disk when it is used.

        Args:
            model: Model for the methods of `ActivationCache` that need one, such as `logit_attrs`.

        Raises:
            ValueError: The file is damaged, or its activations are those of another architecture than the model's.

        Warns:
            UserWarning: The model has other weights or modules, or another dtype, than that of the activations.
        """
        tensors, record = open_result(path, cls.KIND)
        canvases, n_steps = tensors.pop(_CANVASES, None), record.pop("n_steps", None)
        if model is not None and record:
            if not is_same_architecture(record, model):
                raise ValueError(
                    f"{path} has activations of {shown_model(record)!r}, whose architecture differs from that of "
                    f"{model.cfg.name_and_mode!r}: load them with the model that they are of, or without one"
                )
            if different := differences(record, provenance(model, model.cfg), ("dtype", "weights_sha256", "modules")):
                warn_user(
                    f"{path} has activations of another network than {model.cfg.model_name!r}: {'; '.join(different)}"
                )
        by_step: dict[int, dict[str, Tensor]] = {}
        for key, x in tensors.items():
            step, _, name = key.partition(_SEPARATOR)
            if not (step.isdecimal() and name and isinstance(n_steps, int) and int(step) < n_steps):
                raise ValueError(
                    f"{path} has activations of {key!r} in a run of {n_steps} steps, where STEP{_SEPARATOR}HOOK POINT "
                    "should be. The file was changed: save the cache again"
                )
            by_step.setdefault(int(step), {})[name] = x
        return cls(by_step, n_steps or 0, model, canvases, record)

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

    def __repr__(self) -> str:
        names = sorted({name for cache in self._by_step.values() for name in cache.cache_dict})
        positions = self.record.get("positions")
        of = "" if positions is None else f"positions {positions}, "
        return f"TrajectoryCache(steps {list(self.steps)} of {self.n_steps}, {of}{self.n_bytes:,} bytes, {names})"


@dataclass(frozen=True)
class CacheFilter:
    """The activations to cache in a run, by the arguments of `HookedDiffusionTransformer.denoise_with_cache`."""

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
        one_of(*BRANCHES)("branch", self.branch)
        if self.device is not None:
            as_device(self.device)
        try:
            Slice.unwrap(self.pos_slice)
        except ValueError:
            raise ValueError(
                f"pos_slice={self.pos_slice!r} does not select positions: give a position, several, a slice or None"
            ) from None

    def on(self, model: DiffusionTransformer, n_steps: int, *, guided: bool) -> "CacheRequest":
        """The hook points and steps that the filter selects in a run of one model.

        Raises:
            KeyError: A hook point that does not exist.
            ValueError: A filter that selects nothing, or a hook point, step or branch that the run does not have.
        """
        names = select_names(self.names, model.hook_dict)
        in_loop = [name for name in names if name.startswith(loop_hook(""))]
        silent = {name: reason for name in names if name not in in_loop and (reason := why_silent(model, name))}
        if silent and not callable(self.names):
            raise ValueError("; ".join(f"{name!r} {reason}" for name, reason in silent.items()))
        if self.branch == "unconditional" and not guided:
            raise ValueError("branch='unconditional' needs guidance: without cfg_scale there is no such branch")
        if self.branch == "unconditional" and in_loop:
            raise ValueError(
                f"{in_loop} are after guidance, so they belong to neither branch: cache them with branch='conditional'"
            )
        chosen = tuple(name for name in names if name not in silent)
        return CacheRequest(self, chosen, resolve_steps(self.steps, n_steps))


@dataclass(frozen=True)
class CacheRequest:
    """The names of the hook points and the indices of the steps that a `CacheFilter` selects in one run."""

    filter: CacheFilter
    names: tuple[str, ...]
    steps: frozenset[int]

    def hooks(self, cached: dict[int, dict[str, Tensor]]) -> list[Any]:
        """Hooks that copy the activations into `cached`, by step and hook point."""
        given, pos_slice = self.filter, Slice.unwrap(self.filter.pos_slice)

        def store(activation: Tensor, hook: Any) -> None:
            if hook.step.branch != given.branch:
                return
            x = select_positions(activation.detach(), pos_slice, hook)
            dtype = given.dtype if x.is_floating_point() else None
            cached.setdefault(hook.step.index, {})[hook.name] = x.to(device=given.device, dtype=dtype, copy=True)

        return [(name, store) for name in self.names]

    def describe(self, n_pos: int) -> dict[str, Any]:
        """The branch, and the positions of the canvas, for the record; `None` for all of them."""
        selected = Slice.unwrap(self.filter.pos_slice)
        positions = None if selected.mode == "identity" else selected.indices(n_pos).tolist()
        positions = None if positions == list(range(n_pos)) else positions
        return {"branch": self.filter.branch, "positions": positions}

    def require_fits(self, cfg: DiffusionConfig, batch: int, pos: int) -> None:
        """Raise a `ValueError` with the largest activations where the estimated size exceeds `max_bytes`."""
        given, sizes = self.filter, dict[str, int]()
        kept_pos = count_positions(Slice.unwrap(given.pos_slice), pos, "the canvas")
        dtypes = {"hook_scale": torch.promote_types(cfg.dtype, torch.float32), "hook_confidence": torch.float64}
        for name in self.names:
            tail = name.rsplit(".", 1)[-1]
            item = _ITEM_BYTES.get(tail) or (given.dtype or dtypes.get(tail, cfg.dtype)).itemsize
            sizes[name] = torch.Size(activation_shape(name, cfg, batch, pos, kept_pos)).numel() * item * len(self.steps)
        total = sum(sizes.values())
        if given.max_bytes is not None and total > given.max_bytes:
            largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
            shown = ", ".join(f"{name} {size:,}" for name, size in largest)
            raise ValueError(
                f"this cache needs {total:,} bytes, but max_bytes is {given.max_bytes:,}; the largest are {shown}. "
                "Narrow names_filter, steps_filter or pos_slice, or give dtype=torch.bfloat16"
            )


def resolve_steps(steps_filter: SupportsIndex | Iterable[SupportsIndex] | None, n_steps: int) -> frozenset[int]:
    """The requested steps, negative ones counted from the end; a step outside the run is a `ValueError`."""
    if steps_filter is None:
        return frozenset(range(n_steps))
    steps = whole_numbers("steps_filter", steps_filter)
    if outside := [step for step in steps if not -n_steps <= step < n_steps]:
        raise ValueError(f"steps_filter names {outside}, and the run has steps 0 to {n_steps - 1}")
    if not steps:
        raise ValueError("steps_filter selects no step")
    return frozenset(step % n_steps for step in steps)


# Bytes of numbers whose dtype is not that of the model.
_ITEM_BYTES = {"hook_tokens": 8, "hook_candidates": 8, "hook_reveal": 1, "hook_noise": 8, "hook_experts": 8}
_IN_EXPERT = re.compile(r"\.mlp\.(experts\.\d+|shared)\.")


def activation_shape(
    name: str, cfg: DiffusionConfig, batch: int, pos: int, kept_pos: int | None = None
) -> tuple[int, ...]:
    """Shape of the activation at a hook point.

    Args:
        kept_pos: Number of positions (of scores and patterns, of queries) that are cached; by default all.
    """
    assert cfg.d_mlp is not None
    n_pos, experts = pos if kept_pos is None else kept_pos, cfg.experts
    layer = re.match(r"blocks\.(\d+)\.", name)
    d_head, kv_heads = cfg.head_sizes(int(layer[1]) if layer else 0)
    *_, module, tail = ["", *name.split(".")]
    if tail in ("hook_attn_scores", "hook_pattern"):
        return (batch, cfg.n_heads, n_pos, pos)
    if tail in ("hook_modulation", "hook_final_modulation"):
        return (batch, 6 if tail == "hook_modulation" else 2, cfg.d_model)
    if tail == "hook_time":
        assert cfg.architecture.time is not None
        return (batch, cfg.architecture.time.d_cond)
    if module in ("q_norm", "k_norm"):
        return (batch, n_pos, cfg.n_heads if module == "q_norm" else kv_heads, 1 if tail == "hook_scale" else d_head)
    d_mlp = cfg.d_mlp
    if experts is not None and (inside := _IN_EXPERT.search(name)):
        d_mlp = (experts.d_shared or 0) if inside[1] == "shared" else experts.d_expert
    widths: dict[str, tuple[int, ...]] = {
        "hook_scale": (1,),
        **dict.fromkeys(("hook_q", "hook_rot_q", "hook_z"), (cfg.n_heads, d_head)),
        **dict.fromkeys(("hook_k", "hook_rot_k", "hook_v"), (kv_heads, d_head)),
        **dict.fromkeys(("hook_result", "hook_attn_in", "hook_q_input"), (cfg.n_heads, cfg.d_model)),
        **dict.fromkeys(("hook_k_input", "hook_v_input"), (kv_heads, cfg.d_model)),
        **dict.fromkeys(("hook_pre", "hook_pre_linear", "hook_post"), (d_mlp,)),
        "hook_logits": (cfg.d_vocab_out,),
        **dict.fromkeys(("hook_tokens", "hook_candidates", "hook_confidence", "hook_reveal", "hook_noise"), ()),
    }
    if experts is not None:
        widths |= dict.fromkeys(("hook_router_logits", "hook_router_weights"), (experts.n_experts,))
        widths |= {"hook_experts": (experts.n_chosen,), "hook_expert_out": (experts.n_chosen, cfg.d_model)}
    return (batch, n_pos, *widths.get(tail, (cfg.d_model,)))
