"""Hook points that pass only where a flag of the config is on, under TransformerLens's names: they take much memory."""

from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.settings import yes_or_no

# The flag of the config under which a hook point passes.
FLAGS = {
    "hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
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

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Compute each head's result Float[batch pos head d_model] at `attn.hook_result`, as in TransformerLens."""
        self.cfg.use_attn_result = yes_or_no("use_attn_result", use_attn_result)

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Give queries, keys and values of each head their own copy of the residual stream, as in TransformerLens.

        The copies, before the norm, are at `attn.hook_q_input` Float[batch pos head d_model], `attn.hook_k_input` and
        `attn.hook_v_input` Float[batch pos kv_head d_model]. The hook points of `ln1` do not pass while this is on.

        Raises:
            ValueError: `use_attn_in` is on.
        """
        self._set_copies("use_split_qkv_input", use_split_qkv_input, other="use_attn_in")

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Give each head its own copy of the residual stream, as in TransformerLens.

        The copies, before the norm, are at `attn.hook_attn_in` Float[batch pos head d_model]. The hook points of `ln1`
        do not pass while this is on.

        Raises:
            ValueError: `use_split_qkv_input` is on, or query heads share key/value heads.
        """
        if use_attn_in and self.cfg.n_key_value_heads not in (None, self.cfg.n_heads):
            raise ValueError(
                f"use_attn_in gives every head one input, but here {self.cfg.n_heads} query heads share "
                f"{self.cfg.n_key_value_heads} key/value heads; use set_use_split_qkv_input(True)"
            )
        self._set_copies("use_attn_in", use_attn_in, other="use_split_qkv_input")

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Give the MLP its own copy of the residual stream, before the norm: `hook_mlp_in` Float[batch pos d_model]."""
        self.cfg.use_hook_mlp_in = yes_or_no("use_hook_mlp_in", use_hook_mlp_in)

    @contextmanager
    def optional_hooks(
        self,
        *,
        use_attn_result: bool = False,
        use_split_qkv_input: bool = False,
        use_attn_in: bool = False,
        use_hook_mlp_in: bool = False,
    ) -> Iterator[None]:
        """Inside, exactly these optional hook points pass; afterwards, those that passed before."""
        before = OptionalHooks.of(self.cfg)
        try:
            self._set_all(OptionalHooks(use_attn_result, use_split_qkv_input, use_attn_in, use_hook_mlp_in))
            yield
        finally:
            self._set_all(before)

    def _set_all(self, flags: OptionalHooks) -> None:
        self.cfg.use_split_qkv_input = self.cfg.use_attn_in = False  # they exclude each other
        for name, value in asdict(flags).items():
            getattr(self, f"set_{name}")(value)

    def _set_copies(self, flag: str, value: bool, other: str) -> None:
        if yes_or_no(flag, value) and getattr(self.cfg, other):
            raise ValueError(f"{flag} and {other} exclude each other; call model.set_{other}(False) first")
        setattr(self.cfg, flag, value)
