"""Hook points that pass only where a flag of the config is on, under TransformerLens's names: they take much memory."""

from abc import ABC
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from transformer_lens.hook_points import HookPoint

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model.hook_points import anything_listens, hooked_modules, listens
from diffusion_lens.model.linear import Linear
from diffusion_lens.model.norm import Norm
from diffusion_lens.settings import yes_or_no
from diffusion_lens.step_state import StepClock

# The flag of the config under which a hook point of a block passes.
_FLAGS_IN_BLOCK = {
    "attn.hook_result": "use_attn_result",
    "attn.hook_q_input": "use_split_qkv_input",
    "attn.hook_k_input": "use_split_qkv_input",
    "attn.hook_v_input": "use_split_qkv_input",
    "attn.hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
}
FLAGS = {name.rpartition(".")[2]: flag for name, flag in _FLAGS_IN_BLOCK.items()}
# The modules of a block whose weights are used directly under a flag: hooks at them do not run, nor does other code.
_BYPASSED = {
    "use_attn_result": ("attn.o",),
    "use_split_qkv_input": ("ln1", "attn.q", "attn.k", "attn.v"),
    "use_attn_in": ("ln1", "attn.q", "attn.k", "attn.v"),
}

_HOOKED = "carries a hook"


@dataclass(frozen=True)
class OptionalHooks:
    """The flags of one forward pass, with their meaning in `OptionalHookSettings`."""

    use_attn_result: bool = False
    use_split_qkv_input: bool = False
    use_attn_in: bool = False
    use_hook_mlp_in: bool = False

    @classmethod
    def of(cls, cfg: DiffusionConfig) -> "OptionalHooks":
        """The flags of a config."""
        return cls(cfg.use_attn_result, cfg.use_split_qkv_input, cfg.use_attn_in, cfg.use_hook_mlp_in)

    @property
    def copies_by_head(self) -> bool:
        """Whether every head reads a copy of the residual stream of its own."""
        return self.use_split_qkv_input or self.use_attn_in


def why_not_passed(name: str, cfg: DiffusionConfig) -> str | None:
    """The reason why a hook point does not pass under the flags of a config, or `None`."""
    flag = FLAGS.get(name.rpartition(".")[2])
    if flag is not None and not getattr(cfg, flag):
        return f"passes only after model.set_{flag}(True)"
    if ".ln1." in name and (cfg.use_split_qkv_input or cfg.use_attn_in):
        flag = "use_split_qkv_input" if cfg.use_split_qkv_input else "use_attn_in"
        return f"passes only after model.set_{flag}(False): now each head normalises its own copy of the stream"
    return None


class OptionalHookSettings(ABC):
    """The methods of a model that switch optional hook points on and off."""

    cfg: DiffusionConfig
    clock: StepClock
    blocks: Any
    hook_dict: dict[str, Any]

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Compute each head's result Float[batch pos head d_model] at `attn.hook_result`, as in TransformerLens.

        Raises:
            ValueError: The output projection has been replaced, or carries a hook of torch, which would not run.
        """
        self._set("use_attn_result", use_attn_result)

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Give queries, keys and values of each head their own copy of the residual stream, as in TransformerLens.

        The copies, before the norm, are at `attn.hook_q_input` Float[batch pos head d_model], `attn.hook_k_input` and
        `attn.hook_v_input` Float[batch pos kv_head d_model]. The hook points of `ln1` do not pass while this is on.

        Raises:
            ValueError: `use_attn_in` is on; or `ln1` or a projection has been replaced, or carries a hook.
        """
        self._set_copies("use_split_qkv_input", use_split_qkv_input, other="use_attn_in")

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Give each head its own copy of the residual stream, as in TransformerLens.

        The copies, before the norm, are at `attn.hook_attn_in` Float[batch pos head d_model]. The hook points of `ln1`
        do not pass while this is on.

        Raises:
            ValueError: `use_split_qkv_input` is on; query heads share key/value heads; or `ln1` or a projection has
                been replaced, or carries a hook.
        """
        if use_attn_in and self.cfg.n_key_value_heads not in (None, self.cfg.n_heads):
            raise ValueError(
                f"use_attn_in gives every head one input, but here {self.cfg.n_heads} query heads share "
                f"{self.cfg.n_key_value_heads} key/value heads; use set_use_split_qkv_input(True)"
            )
        self._set_copies("use_attn_in", use_attn_in, other="use_split_qkv_input")

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Give the MLP its own copy of the residual stream, before the norm: `hook_mlp_in` Float[batch pos d_model]."""
        self._set("use_hook_mlp_in", use_hook_mlp_in)

    @contextmanager
    def optional_hooks(
        self,
        *,
        use_attn_result: bool = False,
        use_split_qkv_input: bool = False,
        use_attn_in: bool = False,
        use_hook_mlp_in: bool = False,
    ) -> Iterator[None]:
        """Inside, exactly these optional hook points pass; afterwards, those that passed before.

        Inside, no other thread may use the model.

        Raises:
            ValueError: A flag would pass over a hook or a replaced module, as in the methods above; or a hook is at a
                hook point that would no longer pass.
        """
        with self.clock.held():
            before = OptionalHooks.of(self.cfg)
            inside = {
                "use_attn_result": use_attn_result,
                "use_split_qkv_input": use_split_qkv_input,
                "use_attn_in": use_attn_in,
                "use_hook_mlp_in": use_hook_mlp_in,
            }
            self._refuse_hooks_that_would_stop(flag for flag, value in asdict(before).items() if value > inside[flag])
            try:
                self.cfg.use_split_qkv_input = self.cfg.use_attn_in = False  # they exclude each other
                self.set_use_attn_result(use_attn_result)
                self.set_use_split_qkv_input(use_split_qkv_input)
                self.set_use_attn_in(use_attn_in)
                self.set_use_hook_mlp_in(use_hook_mlp_in)
                yield
            finally:
                for flag, value in asdict(before).items():
                    setattr(self.cfg, flag, value)

    def _set_copies(self, flag: str, value: bool, other: str) -> None:
        if yes_or_no(flag, value) and getattr(self.cfg, other):
            raise ValueError(f"{flag} and {other} exclude each other; call model.set_{other}(False) first")
        self._set(flag, value)

    def _set(self, flag: str, value: bool) -> None:
        value = yes_or_no(flag, value)
        if value:
            self._refuse_bypassed(flag)
        setattr(self.cfg, flag, value)

    def optional_hooks_of_pass(self) -> OptionalHooks:
        """The flags of the config, for a forward pass; hooks at modules may have been attached after they were set.

        Raises:
            ValueError: A flag would pass over a hook or a replaced module, or a hook or another module is at a hook
                point that does not pass. Hooks that a predicate attached, with others, do not count.
        """
        flags = OptionalHooks.of(self.cfg)
        is_on = asdict(flags)
        for flag, value in is_on.items():
            if value:
                self._refuse_bypassed(flag, by_predicate_too=False)
        absent = [(name, flag) for name, flag in _FLAGS_IN_BLOCK.items() if not is_on[flag]]
        for i, block in enumerate(self.blocks):
            for name, flag in absent:
                if reason := _why_it_matters(_module_at(block, name), by_predicate_too=False):
                    raise ValueError(
                        f"'blocks.{i}.{name}' {reason}, and passes only after model.set_{flag}(True): call it, or take "
                        "it away"
                    )
        return flags

    def _refuse_bypassed(self, flag: str, by_predicate_too: bool = True) -> None:
        """Raise a `ValueError` if a flag would pass over a hook or a replaced module.

        Args:
            by_predicate_too: Whether hooks count that a predicate attached, at these hook points with others.
        """
        for i, block in enumerate(self.blocks):
            for name in _BYPASSED.get(flag, ()):
                if reason := _why_not_bypassed(block.get_submodule(name), by_predicate_too):
                    raise ValueError(
                        f"'blocks.{i}.{name}' {reason}, and {flag} uses its weight directly, so that it would have no "
                        "effect: take it away first, or leave the flag off"
                    )

    def _refuse_hooks_that_would_stop(self, flags: Iterable[str]) -> None:
        stopping = set(flags)
        for name, point in self.hook_dict.items():
            if FLAGS.get(name.rpartition(".")[2]) in stopping and anything_listens(point):
                raise ValueError(f"the hook at {name!r} would not be called here: remove it first")


def _why_not_bypassed(module: nn.Module, by_predicate_too: bool) -> str | None:
    """The reason why a norm or projection may compute something else than its weight says, or `None`."""
    if type(module).forward not in (Linear.forward, nn.Linear.forward, Norm.forward):
        return f"is a module {type(module).__name__}"
    for name, inside in module._modules.items():
        if name.startswith("hook_") and (reason := _why_it_matters(inside, by_predicate_too)):
            return reason if reason == _HOOKED else f"has in the place of {name!r} a module {type(inside).__name__}"
    hooked = any(not isinstance(each, HookPoint) for each in hooked_modules(module))
    return _HOOKED if hooked else None


def _why_it_matters(point: nn.Module | None, by_predicate_too: bool) -> str | None:
    """The reason why what is at a hook point may change an activation, or read it, or `None`."""
    if point is None:
        return None
    if not isinstance(point, HookPoint) or type(point).forward is not HookPoint.forward:
        return f"is a module {type(point).__name__}"
    if not listens(point):
        return None
    hooks = (point._forward_hooks, point._forward_pre_hooks, point._backward_hooks, point._backward_pre_hooks)
    handles = point.fwd_hooks + point.bwd_hooks
    passed_over = 0 if by_predicate_too else sum(getattr(handle, "by_predicate", False) for handle in handles)
    return _HOOKED if sum(map(len, hooks)) > passed_over else None


def _module_at(block: nn.Module, name: str) -> nn.Module | None:
    module: nn.Module | None = block
    for part in name.split("."):
        module = None if module is None else module._modules.get(part)
    return module
