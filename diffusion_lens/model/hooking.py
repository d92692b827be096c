"""Hooking and caching as in TransformerLens, with checked names and hook points that know the denoising step."""

from abc import ABC
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.slice import Slice

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.hook_names import ByHookPoint, NamesFilter, hook_pairs, loop_hook, select_names
from diffusion_lens.model.caching import AliasedCache, PosSlice, caching_hooks
from diffusion_lens.model.hook_points import StepHookPoint, anything_listens, hooked_modules, lend_clock
from diffusion_lens.model.optional_hooks import why_not_passed
from diffusion_lens.settings import check_keywords, keywords_of, takes_any_keyword
from diffusion_lens.step_state import StepClock


@cache
def _keywords(method: str, forward: Callable[..., Any]) -> Collection[str] | None:
    """Keywords of `run_with_hooks` or `run_with_cache` of a model; `None` if its `forward` takes any keyword."""
    if takes_any_keyword(forward):
        return None
    return keywords_of(getattr(Hooking, method), getattr(HookedRootModule, method), forward)


class LoopHooks(nn.Module):
    """The denoising loop's own hook points, reached as `denoise.hook_*`."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_tokens = StepHookPoint()
        self.hook_logits = StepHookPoint()
        self.hook_candidates = StepHookPoint()
        self.hook_confidence = StepHookPoint()
        self.hook_reveal = StepHookPoint()


class Hooking(HookedRootModule, ABC):
    """The hooking methods of a model.

    Hooks and the step belong to the model. While one thread is inside `hooks`, `run_with_hooks`, `run_with_cache` or
    the denoising loop, a forward pass of another thread is a `RuntimeError`, and so is attaching or removing hooks
    there. The latter is refused also while a thread is in a plain forward pass. Plain forward passes may run in several
    threads at once.
    """

    cfg: DiffusionConfig

    def __init__(self) -> None:
        super().__init__()
        self.loop_hooks = LoopHooks()
        self.clock = StepClock()

    def setup(self) -> None:
        """Name the hook points and give them this model's clock; call it again after adding hook points."""
        with self.clock.held():
            self._set_up()

    def _set_up(self) -> None:
        super().setup()
        self.hook_dict, self.mod_dict = ByHookPoint(self.hook_dict), ByHookPoint(self.mod_dict)
        # `model.denoise` is the method that runs the loop, so the loop's hook points are stored as `model.loop_hooks`
        # and renamed here.
        for name, _ in self.loop_hooks.named_children():
            point: Any = self.hook_dict.pop(f"loop_hooks.{name}")
            del self.mod_dict[f"loop_hooks.{name}"]
            point.name = loop_hook(name)
            self.hook_dict[point.name] = self.mod_dict[point.name] = point
        for hook_point in self.hook_points():
            lend_clock(hook_point, self.clock)

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """As in TransformerLens: the output and an `ActivationCache` of the hook points that `names_filter` selects.

        Raises:
            TypeError: An argument that neither this method nor the model takes; the message gives the nearest.
        """
        self._check_keywords("run_with_cache", kwargs)
        names = self._select_passing(names_filter, in_loop=False)
        out, cache = super().run_with_cache(
            *model_args, names_filter=names, remove_batch_dim=remove_batch_dim, **kwargs
        )
        if return_cache_object:
            return out, AliasedCache(cache, self, has_batch_dim=not remove_batch_dim)
        return out, ByHookPoint(cache)

    @property
    def is_hooked(self) -> bool:
        """Whether a hook is attached anywhere in the network; the loop's own hook points do not count.

        A hook of torch on a module, `model.blocks[0].mlp.register_forward_hook(...)`, counts as one at a hook point.
        """
        return anything_listens(self, skip=self.loop_hooks)

    @property
    def loop_is_hooked(self) -> bool:
        """Whether a hook is attached to the loop's own hook points."""
        return anything_listens(self.loop_hooks)

    @property
    def has_module_hooks(self) -> bool:
        """Whether a hook of torch is attached to a module that is no hook point."""
        return any(not isinstance(module, StepHookPoint) for module in hooked_modules(self, skip=self.loop_hooks))

    def add_hook(self, name: str | Callable[[str], bool], hook: Any, *args: Any, **kwargs: Any) -> None:
        """As in TransformerLens; a name or predicate that selects nothing is an error with the nearest names."""
        self._attach(name, hook, *args, **kwargs)

    def reset_hooks(self, *args: Any, **kwargs: Any) -> None:
        """As in TransformerLens."""
        with self.clock.held():
            super().reset_hooks(*args, **kwargs)

    def _check_keywords(self, method: str, given: Mapping[str, Any]) -> None:
        forward = vars(self).get("forward") or type(self).forward
        if given and (known := _keywords(method, forward)) is not None:
            check_keywords(method, given, known)

    def _enable_hook(self, name: str | Callable[[str], bool], hook: Any, dir: Literal["fwd", "bwd"]) -> None:
        self._attach(name, hook, dir, level=self.context_level)

    def _attach(self, name: str | Callable[[str], bool], hook: Any, *args: Any, **kwargs: Any) -> None:
        points = self._check_hookable(name)
        with self.clock.held():
            for point in points:
                handle: Any = self.hook_dict[point].add_hook(hook, *args, **kwargs)
                # A predicate may select points that do not pass, beside others; a name says that the hook matters.
                handle.by_predicate = callable(name)

    def run_with_hooks(
        self, *model_args: Any, fwd_hooks: Sequence[Any] = (), bwd_hooks: Sequence[Any] = (), **kwargs: Any
    ) -> Any:
        """As in TransformerLens; a hook that the forward pass would never reach is an error."""
        for name, _ in [*hook_pairs(fwd_hooks), *hook_pairs(bwd_hooks)]:
            self._check_hookable(name, in_loop=False)
        self._check_keywords("run_with_hooks", kwargs)
        return super().run_with_hooks(*model_args, fwd_hooks=list(fwd_hooks), bwd_hooks=list(bwd_hooks), **kwargs)

    @contextmanager
    def hooks(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As in TransformerLens; inside, no other thread may use the model."""
        for given in (*args[:2], kwargs.get("fwd_hooks", ()), kwargs.get("bwd_hooks", ())):
            hook_pairs(given)
        with self.clock.held(), super().hooks(*args, **kwargs) as model:
            yield model

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: PosSlice = None,
    ) -> Any:
        """As in TransformerLens: a dict to be filled, and the forward and backward hooks that fill it.

        Other names of a hook point (`hook_names.BLOCK_ALIASES`) reach what the dict has, unless `cache` is a plain one.

        Args:
            pos_slice: Positions to cache (of scores and patterns, the queries): an index (its axis stays), a slice, or
                indices.

        Raises:
            ValueError: A filter that matches nothing, or a named hook point that does not pass.
        """
        self.is_caching = True
        points = {name: self.hook_dict[name] for name in self._select_passing(names_filter)}
        cached: dict[str, Tensor] = ByHookPoint() if cache is None else cache
        return cached, *caching_hooks(points, cached, incl_bwd, device, remove_batch_dim, Slice.unwrap(pos_slice))

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> Any:
        """As in TransformerLens, and as in `get_caching_hooks`; a filter that matches nothing is an error."""
        selected = self._select_passing(names_filter)
        cached: dict[str, Tensor] = ByHookPoint() if cache is None else cache
        with self.clock.held():
            return super().add_caching_hooks(selected, incl_bwd, device, remove_batch_dim, cached)

    def _select_passing(self, names_filter: NamesFilter, in_loop: bool = True) -> list[str]:
        """The hook points of a filter that pass; without any, or if a name is among the others, a `ValueError`."""
        selected = self._select(names_filter)
        silent = {name: reason for name in selected if (reason := self._why_not_reached(name, in_loop))}
        names = [name for name in selected if name not in silent]
        if not names or (silent and not callable(names_filter) and names_filter is not None):
            raise ValueError("; ".join(f"{name!r} {reason}" for name, reason in silent.items()))
        return names

    def _check_hookable(self, name: str | Callable[[str], bool], in_loop: bool = True) -> list[str]:
        """The hook points of a filter; it may not select only those that this kind of call never reaches."""
        points = self._select(name)
        reasons = [self._why_not_reached(point, in_loop) for point in points]
        if all(reasons):
            raise ValueError(f"{points[0]!r} {reasons[0]}")
        return points

    def _why_not_reached(self, name: str, in_loop: bool) -> str | None:
        return None if in_loop and name.startswith(loop_hook("")) else self.why_silent(name)

    def _select(self, names_filter: NamesFilter) -> list[str]:
        """The hook points that a filter selects; one that is no longer in the network is a `RuntimeError`."""
        named = [names_filter] if isinstance(names_filter, str) else names_filter
        for name in named if isinstance(named, Sequence | Set) else ():
            self._refuse_replaced(name)
        selected = select_names(names_filter, self.hook_dict)
        for name in selected:
            if not name.startswith(loop_hook("")) and not self._is_in_network(name):
                raise RuntimeError(
                    f"{name!r} is no longer the hook point that this model knows by that name: call model.setup() "
                    "after adding modules"
                )
        return selected

    def _refuse_replaced(self, name: str) -> None:
        """Raise a `KeyError` if a module of another kind has replaced a hook point of the network."""
        if name in self.hook_dict:
            return
        try:
            module = self.get_submodule(name)
        except AttributeError:
            return
        if not name.rpartition(".")[2].startswith("hook_") or isinstance(module, HookPoint):
            return
        inside = [known for known in self.hook_dict if known.startswith(f"{name}.")]
        raise KeyError(
            f"a module {type(module).__name__} has replaced the hook point {name!r}; it has "
            f"{'the hook points ' + ', '.join(inside) if inside else 'no hook points'}. Use another hook point, or "
            "put a HookPoint back there and call model.setup()"
        )

    def _is_in_network(self, name: str) -> bool:
        """Whether the hook point of this name is the module of this name.

        `nn.Module.get_submodule` finds the same module, and takes several times as long.
        """
        module: nn.Module | None = self
        for part in name.split("."):
            module = None if module is None else module._modules.get(part)
        return module is self.hook_dict[name]

    def require_set_up(self) -> None:
        """Raise a `RuntimeError` if a hook is at a hook point added since `setup`, which would not know the step."""
        for point in hooked_modules(self):
            if isinstance(point, HookPoint) and vars(point).get("clock") is not self.clock:
                name = next(name for name, module in self.named_modules() if module is point)
                raise RuntimeError(
                    f"the hook at {name!r} cannot read the step, because its hook point was added after the last "
                    "call of model.setup(): call model.setup()"
                )

    def why_silent(self, name: str) -> str | None:
        """The reason why a plain forward pass never reaches a hook point, or `None`."""
        if name.startswith(loop_hook("")):
            return "passes only inside the denoising loop: model.denoise(..., fwd_hooks=[...])"
        return why_not_passed(name, self.cfg)
