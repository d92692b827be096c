"""GPUs that exist only on paper: tensors stay in the CPU's memory, and a mode of torch notes the device of each.

Inside `PretendedDevices()`, `tensor.to("cuda:1")` gives a copy that says it is there, what is computed of tensors is
where they are, and an operation on tensors of several devices is an error, as with real GPUs. Numbers of one dimension
or more count; torch lets single numbers of the CPU take part anywhere. The backward pass is not watched.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
GET_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
# What moves or reads a tensor, and takes others of any device.
MOVES = (
    "to",
    "cpu",
    "copy_",
    "tolist",
    "numpy",
    "untyped_storage",
    "data_ptr",
    "__set__",
    "__get__",
    "grad",
    "backward",
)


class PretendedDevices(TorchFunctionMode):
    """Notes devices by storage; all storages are kept, so that none is mistaken for an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, torch.device] = {}
        self.kept: list[Tensor] = []
        self.used: set[torch.device] = set()

    def place_of(self, tensor: Tensor) -> torch.device:
        return self.places.get(tensor.untyped_storage().data_ptr(), CPU)

    def put(self, out: Any, device: torch.device) -> None:
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.numel():
                self.kept.append(tensor)
                self.used.add(device)
                self.places[tensor.untyped_storage().data_ptr()] = device

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """The backward pass is not watched, but may copy weights to a device again."""
        to = torch.Tensor.to
        with patch.object(torch.Tensor, "to", lambda *args, **kwargs: self.__torch_function__(to, (), args, kwargs)):
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == GET_DEVICE:
            return self.place_of(args[0])
        given = kwargs.pop("device", None)
        if name == "to":
            given = next((each for each in args[1:] if isinstance(each, str | torch.device)), given)
            if isinstance(other := next(iter(args[1:]), None), Tensor):
                given, args = self.place_of(other), (args[0], other.dtype)
            here, device = self.place_of(args[0]), torch.device(given) if given is not None else None
            args = tuple(each for each in args if not isinstance(each, str | torch.device))
            out = func(*args, **kwargs) if len(args) > 1 or kwargs else args[0]
            if device is not None and device != here and out is args[0]:
                out = out.clone()
            self.put(out, here if device is None else device)
            return out
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        places = {self.place_of(each) for each in tensors if each.dim() > 0 and each.numel()}
        if name in ("__getitem__", "__setitem__"):
            # Indices may be on the CPU, and single numbers and slices are written from any device.
            index = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor)]
            indexed = {self.place_of(each) for each in [args[0], *index]} - ({CPU} if index else set())
            if name == "__getitem__" or not index:
                places = indexed | ({self.place_of(args[0])} if index else set())
        if len(places) > 1 and name not in MOVES:
            raise RuntimeError(f"{name} of tensors on {sorted(map(str, places))}")
        with self._moving() if name in ("backward", "grad") else nullcontext():
            out = func(*args, **kwargs)
        if name == "grad":
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            for tensor, gradient in zip(tree_leaves(inputs), tree_leaves(out), strict=True):
                self.put(gradient, self.place_of(tensor))
            return out
        if name == "cpu":
            out = out.clone()
            given = CPU
        if name not in ("untyped_storage", "data_ptr", "__set__"):
            at = self.place_of(tensors[0]) if tensors and given is None else torch.device(given or CPU)
            self.put(out, at)
        return out
