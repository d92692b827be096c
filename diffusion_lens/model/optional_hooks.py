"""Hook points that pass only where a flag of the config is on, under TransformerLens's names: they take much memory."""

from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model.hook_points import anything_listens
from diffusion_lens.model.norm import RMSNorm
from diffusion_lens.settings import yes_or_no
from diffusion_lens.step_state import StepClock

# The flag of the config under which a hook point passes.
FLAGS = {
    "hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
}
# The modules of a block whose weights are used directly under a flag: hooks at them do not run, nor does other code.
_BYPASSED = {
    "use_attn_result": ("attn.o",),
    "use_split_qkv_input": ("ln1", "attn.q", "attn.k", "attn.v"),
    "use_attn_in": ("ln1", "attn.q", "attn.k", "attn.v"),
}


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
        """
        with self.clock.held():
            before = OptionalHooks.of(self.cfg)
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
        for i, block in enumerate(self.blocks if value else ()):
            for name in _BYPASSED.get(flag, ()):
                if reason := _why_not_bypassed(block.get_submodule(name)):
                    raise ValueError(
                        f"'blocks.{i}.{name}' {reason}, and {flag} uses its weight directly, so that it would have no "
                        "effect: take it away first, or leave the flag off"
                    )
        setattr(self.cfg, flag, value)


def _why_not_bypassed(module: nn.Module) -> str | None:
    """The reason why a norm or projection may compute something else than its weight says, or `None`."""
    if type(module).forward not in (nn.Linear.forward, RMSNorm.forward):
        return f"is a module {type(module).__name__}"
    return "carries a hook" if anything_listens(module) else None
