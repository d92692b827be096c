"""Results that a session keeps, within a bound on memory."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memory:
    """Results within a bound on memory, in bytes; those that were not used for longest are dropped first.

    A result that is larger than the bound is computed at every request.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """The result of a key, which is computed if it is not kept."""
        if key not in self._kept:
            result = compute()
            self._kept[key] = (result, size(result))
            self.n_bytes += size(result)
            while self.n_bytes > self.max_bytes:
                _, (_, dropped) = self._kept.popitem(last=False)
                self.n_bytes -= dropped
            return result
        self._kept.move_to_end(key)
        kept: T = self._kept[key][0]
        return kept

    def kept(self, key: Hashable) -> Any:
        """The result of a key if it is kept, else `None`."""
        return self._kept[key][0] if key in self._kept else None
