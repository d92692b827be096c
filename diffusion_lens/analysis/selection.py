"""The positions and layers that a grid covers."""

from collections.abc import Iterable
from dataclasses import dataclass

from diffusion_lens.settings import Whole, pick_indices, whole_numbers


@dataclass(frozen=True, init=False)
class Selection:
    """The rows and columns of a grid.

    Attributes:
        positions: Positions, negative ones from the end; `None` selects all of them.
        layers: Layers, negative ones from the end; `None` selects all of them.
    """

    positions: tuple[int, ...] | None
    layers: tuple[int, ...] | None

    def __init__(self, positions: Iterable[Whole] | None = None, layers: Iterable[Whole] | None = None) -> None:
        """Check the indices, which may be any iterables of whole numbers, NumPy's and torch's among them.

        Raises:
            ValueError: A selection is empty, or names an index twice.
            TypeError: An index is not a whole number.
        """
        vars(self).update(positions=unique_indices("positions", positions), layers=unique_indices("layers", layers))

    def within(self, n_pos: int, n_layers: int) -> tuple[list[int], list[int]]:
        """The selected positions and layers, counted from 0, of a canvas and a model of these sizes.

        Raises:
            ValueError: An index out of range, or one that is named from both ends.
        """
        return pick_indices("positions", self.positions, n_pos), pick_indices("layers", self.layers, n_layers)


def unique_indices(name: str, given: Iterable[Whole] | None) -> tuple[int, ...] | None:
    """Indices as plain numbers, each given once; `None` stays `None`.

    Raises:
        ValueError: There is no index, or one is given twice.
        TypeError: An index is not a whole number.
    """
    if given is None:
        return None
    if not isinstance(given, Iterable):
        raise TypeError(f"{name}={given!r} is one number; give a sequence, {name}=[{given!r}]")
    numbers = whole_numbers(name, given)
    if not numbers:
        raise ValueError(f"{name}=[]; give one index or more, or leave {name}= out to select all")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{name}={numbers} contains duplicates; give each once")
    return tuple(numbers)
