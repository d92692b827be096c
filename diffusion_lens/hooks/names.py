"""Names of hook points: TransformerLens's and those of the denoising loop. Errors name the nearest ones."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from torch import nn
from transformer_lens.hook_points import HookPoint

from diffusion_lens.settings.arguments import kind_of, shown

# A hook, `fn(activation, hook)`, and the hooks of a call: pairs of a hook point's name, or a predicate, and a hook.
Hook = Callable[..., Any]
FwdHooks = Annotated[Sequence[tuple[Any, Any]], "a list of pairs, [(name, function), ...]"]
NamesFilter = str | Sequence[str] | Set[str] | Callable[[str], bool] | None

# Other names that TransformerLens 3 and 4 have for a hook point of a block, or of the whole model.
BLOCK_ALIASES = {
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "attn.hook_out": "hook_attn_out",
    "mlp.hook_out": "hook_mlp_out",
    "hook_attn_in": "attn.hook_attn_in",
    "hook_q_input": "attn.hook_q_input",
    "hook_k_input": "attn.hook_k_input",
    "hook_v_input": "attn.hook_v_input",
}
ALIASES = {"embed.hook_out": "hook_embed", "pos_embed.hook_out": "hook_pos_embed"}
_GRADIENT = "_grad"  # the end of the names under which caches store gradients

Value = TypeVar("Value")


def hook_pairs(hooks: Any) -> list[tuple[Any, Any]]:
    """The hooks of a call as a list; a `TypeError` if they are not pairs, such as one pair without its list."""
    if not isinstance(hooks, Iterable) or hasattr(hooks, "dtype"):
        raise TypeError(f"hooks are a list of pairs, [(name, function), ...], not {hooks!r:.100}")
    pairs = list(hooks)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"hooks are a list of pairs, [(name, function), ...], not {hooks!r:.100}")
        if callable(pair[0]) and isinstance(pair[1], str):
            raise TypeError(f"hooks are pairs (name, function), and {pair[1]!r} comes second: exchange the two")
    return pairs


def own_name(name: str) -> str:
    """The name of a hook point in this library, or of its gradient: that of an alias; any other name as it is."""
    if name.endswith(_GRADIENT):
        return own_name(name.removesuffix(_GRADIENT)) + _GRADIENT
    if match := re.fullmatch(r"(blocks\.\d+\.)(.+)", name):
        return match[1] + BLOCK_ALIASES.get(match[2], match[2])
    return ALIASES.get(name, name)


class ByHookPoint(dict[str, Value]):
    """Values by the names of hook points; an alias reaches the value too, and is no key of its own."""

    def __missing__(self, name: str) -> Value:
        if (own := own_name(name)) == name:
            raise KeyError(f"there is no {name!r} here; nearest are: {nearest(name, self)}" if self else name)
        return self[own]

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, super().get(own_name(name), default))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and super().__contains__(own_name(name)))


def loop_hook(name: str) -> str:
    """Full name of one of the denoising loop's hook points."""
    return f"denoise.{name}"


def resid_pre(layer: int) -> str:
    """Residual stream entering block `layer`."""
    return f"blocks.{layer}.hook_resid_pre"


def resid_post(layer: int) -> str:
    """Residual stream after block `layer`."""
    return f"blocks.{layer}.hook_resid_post"


def resid_entering(layer: int, n_layers: int) -> str:
    """Residual stream entering block `layer`, or for `n_layers`, after the last block."""
    return f"blocks.{layer}.hook_resid_pre" if layer < n_layers else f"blocks.{n_layers - 1}.hook_resid_post"


def attn_out(layer: int) -> str:
    """Output of the attention of block `layer`, which is added to the residual stream."""
    return f"blocks.{layer}.hook_attn_out"


def mlp_out(layer: int) -> str:
    """Output of the MLP of block `layer`, which is added to the residual stream."""
    return f"blocks.{layer}.hook_mlp_out"


def shared_out(layer: int) -> str:
    """Output of the shared expert of block `layer`, if it has one, which is added to the residual stream beside that
    of the MLP."""
    return f"blocks.{layer}.hook_shared_out"


def nearest(name: str, known: Collection[str], most: int = 3) -> str:
    """The known names closest to `name`, joined by commas."""
    last_part = name.rsplit(".", 1)[-1]
    close = get_close_matches(name, known, n=most, cutoff=0.5)
    close += [other for other in known if other.rsplit(".", 1)[-1] == last_part and other not in close]
    return ", ".join(close[:most] or list(known)[:most])


def require_hook_point(name: str, hook_dict: Mapping[str, HookPoint]) -> None:
    """Raise a `KeyError` with the nearest names unless `name` is a hook point."""
    if name not in hook_dict:
        raise KeyError(f"there is no hook point {name!r}; nearest are: {nearest(name, hook_dict)}")


def select_names(names_filter: NamesFilter, hook_dict: Mapping[str, HookPoint]) -> list[str]:
    """The hook points that a filter (a name, names, a predicate, `None` for all) selects, by their names here.

    A predicate is called with the names here; aliases work by name.

    Raises:
        KeyError: A name is not a hook point.
        TypeError: The filter is something else, such as a generator, a module, or a list of predicates.
        ValueError: The filter selects no hook point.
    """
    if names_filter is None:
        return list(hook_dict)
    if isinstance(names_filter, str):
        require_hook_point(names_filter, hook_dict)
        return [hook_dict[names_filter].name or names_filter]
    if isinstance(names_filter, Sequence | Set):
        for name in names_filter:
            if not isinstance(name, str):
                raise TypeError(f"a list of hook points has their names, not {name!r}; pass one predicate by itself")
            require_hook_point(name, hook_dict)
        requested = {hook_dict[name].name for name in names_filter}
        selected = [name for name in hook_dict if name in requested]
    elif callable(names_filter) and not isinstance(names_filter, nn.Module):
        predicate: Callable[[str], bool] = names_filter
        selected = [name for name in hook_dict if predicate(name)]
    else:
        given = kind_of(names_filter) if isinstance(names_filter, nn.Module) else shown(names_filter)
        raise TypeError(f"{given} is no filter of hook points; pass a name, a list of names, or one predicate")
    if not selected:
        raise ValueError(
            f"the filter {names_filter!r} matches no hook point; names look like {next(iter(hook_dict))!r}, "
            f"{resid_post(0)!r} (all of them: model.hook_dict)"
        )
    return selected
