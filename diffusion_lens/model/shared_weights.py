"""Which models have the same tensors as weights, because one was made of the other's (`weights_of=`)."""

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

_GROUPS: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()


def share(model: nn.Module, owner: nn.Module) -> None:
    """Note that the weights of `model` are those of `owner`."""
    group = _GROUPS.setdefault(owner, WeakSet([owner]))
    group.add(model)
    _GROUPS[model] = group


def sharing(model: nn.Module) -> list[Any]:
    """The other models with the weights of this one. A copy of a model has weights of its own."""
    return [other for other in _GROUPS.get(model, ()) if other is not model]


def require_own_weights(model: nn.Module, change: str) -> None:
    """Raise a `ValueError` if another model has the same weights, which would not know of this change of them."""
    if sharing(model):
        raise ValueError(
            f"{change} rewrites weights that are also those of another model, as in `load_pair` of one checkpoint, and "
            "the other model would compute something else from then on: load the checkpoint for each model "
            "(from_pretrained), or delete the other one"
        )
