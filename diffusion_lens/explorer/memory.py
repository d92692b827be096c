"""Computed results within a bound on memory; the ones that were not used for longest are dropped first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memory:
    """Results by key.

    Args:
        max_bytes: Largest size of all results together, in bytes. A larger result is computed at every request.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """The result of a key, which is computed if it is not kept.

        Args:
            size: Number of bytes of a result.
        """
        if key not in self._kept:
            result = compute()
            self.keep(key, result, size(result))
            return result
        self._kept.move_to_end(key)
        kept: T = self._kept[key][0]
        return kept

    def keep(self, key: Hashable, result: Any, n_bytes: int) -> None:
        """Keep a result, and drop the oldest ones while all together are too large."""
        self.n_bytes += n_bytes - self._kept.pop(key, (None, 0))[1]
        self._kept[key] = (result, n_bytes)
        while self.n_bytes > self.max_bytes:
            _, (_, dropped) = self._kept.popitem(last=False)
            self.n_bytes -= dropped
