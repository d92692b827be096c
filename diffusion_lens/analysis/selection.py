"""The positions and layers that a grid covers."""

from collections.abc import Iterable
from dataclasses import dataclass

from diffusion_lens.settings import Whole, pick_indices, whole_number


@dataclass(frozen=True)
class Selection:
    """The rows and columns of a grid.

    Attributes:
        positions: Positions, negative ones from the end; `None` selects all of them.
        layers: Layers, negative ones from the end; `None` selects all of them.
    """

    positions: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, positions: Iterable[Whole] | None = None, layers: Iterable[Whole] | None = None) -> "Selection":
        """From any iterables of whole numbers, NumPy's and torch's among them."""
        return cls(_indices("positions", positions), _indices("layers", layers))

    def within(self, n_pos: int, n_layers: int) -> tuple[list[int], list[int]]:
        """The selected positions and layers, counted from 0, of a canvas and a model of these sizes.

        Raises:
            ValueError: An index out of range, one that is named twice, or an empty selection.
        """
        return pick_indices("positions", self.positions, n_pos), pick_indices("layers", self.layers, n_layers)


def _indices(name: str, given: Iterable[Whole] | None) -> tuple[int, ...] | None:
    return None if given is None else tuple(whole_number(name, index) for index in given)
