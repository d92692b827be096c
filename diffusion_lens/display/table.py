"""Tables of results in tidy long form: a row for each cell, fact or step, and a column for each axis and each value."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

SHOWN_ROWS = 10
LONGEST = 60  # characters of a text in the excerpt of a notebook
_CELL = "padding: .1em .6em; border: 0; border-bottom: 1px solid rgba(128, 128, 128, .35); background: none;"


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of one length.

    Attributes:
        columns: Values of each column, by its name.
        most: Column that selects the rows of the excerpt, those with its largest absolute values; by default the
            excerpt consists of the first rows.
    """

    columns: Mapping[str, Any]
    most: str | None = None

    @classmethod
    def of_cells(cls, axes: Mapping[str, Sequence[Any]], values: Mapping[str, Any], most: str | None = None) -> "Table":
        """A row for each cell of a grid, the last axis changing fastest.

        Args:
            axes: Coordinates along each axis of the grid, by the name of the axis.
            values: Numbers or texts of the cells, by name: a tensor or nested lists that broadcast to the grid.
            most: The same as in the class.
        """
        shape = tuple(map(len, axes.values()))
        columns = {}
        for i, (name, coordinates) in enumerate(axes.items()):
            along = _array(list(coordinates)).reshape([-1 if j == i else 1 for j in range(len(shape))])
            columns[name] = np.broadcast_to(along, shape).reshape(-1)
        for name, value in values.items():
            columns[name] = np.broadcast_to(_array(value), shape).reshape(-1)
        return cls(columns, most)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def where(self, keep: Any) -> "Table":
        """The rows at which `keep`, a mask of the rows, is true."""
        selected = np.asarray(keep, dtype=bool).reshape(-1)
        return Table({name: _array(column)[selected] for name, column in self.columns.items()}, self.most)

    def frame(self) -> Any:
        """The table as a `pandas.DataFrame`."""
        import pandas as pd  # TransformerLens installs it; its import takes half a second.

        return pd.DataFrame({name: _array(column) for name, column in self.columns.items()})

    def to_html(self) -> str:
        """An HTML table of a few rows, which says how many there are. It takes over the colours of the page."""
        rows = self._excerpt()
        numeric = {name: _array(column).dtype.kind in "biuf" for name, column in self.columns.items()}
        heads = "".join(_cell("th", escape(name), right) for name, right in numeric.items())
        body = "".join(
            "<tr>"
            + "".join(_cell("td", _shown(_array(self.columns[name])[row]), right) for name, right in numeric.items())
            + "</tr>"
            for row in rows
        )
        return (
            '<div style="overflow-x: auto; max-width: 100%" tabindex="0">'
            f'<table style="border-collapse: collapse; color: inherit; margin: .4em 0"><thead><tr>{heads}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>{self._rest(len(rows))}"
        )

    def _excerpt(self) -> list[int]:
        if self.most is None or len(self) <= SHOWN_ROWS:
            return list(range(min(SHOWN_ROWS, len(self))))
        sizes = np.nan_to_num(np.abs(_array(self.columns[self.most]).astype(float)), nan=-1.0)
        rows: list[int] = np.argsort(-sizes, kind="stable")[:SHOWN_ROWS].tolist()
        return rows

    def _rest(self, n_shown: int) -> str:
        """Which rows the excerpt has, if it does not have all."""
        n_more = len(self) - n_shown
        if not n_more:
            return ""
        order = "" if self.most is None else f"The rows with the largest {escape(self.most)}. "
        rows = "row" if n_more == 1 else "rows"
        return f"<div>{order}... and {n_more:,} more {rows}: <code>to_dataframe()</code></div>"


def shaped(values: Sequence[Any], *shape: int) -> Any:
    """Texts or numbers as an array of this shape, to be broadcast to the cells of a grid; -1 is the length."""
    return _array(values).reshape(shape)


def texts_of(tokens: Int[Tensor, "*rest"], words: Mapping[int, str]) -> Any:
    """The text of each token as an array of the same shape; empty where there is no token (-1)."""
    ids, indices = tokens.unique(return_inverse=True)
    texts = np.asarray([words.get(int(token), "") for token in ids], object)
    return texts[indices.numpy()]


def _array(values: Any) -> Any:
    """One column, or the values of a grid, as numpy has them."""
    if isinstance(values, Tensor):
        plain = values.detach().cpu()
        return (plain.float() if plain.dtype in (torch.bfloat16, torch.float16) else plain).numpy()
    if isinstance(values, np.ndarray):
        return values
    array = np.asarray(values)
    mixed = array.dtype.kind == "U" and not all(isinstance(value, str) for value in np.asarray(values, object).flat)
    return np.asarray(values, object) if mixed else array


def _cell(tag: str, text: str, right: bool) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    return f'<{tag}{scope} style="{_CELL} text-align: {"right" if right else "left"}; white-space: pre">{text}</{tag}>'


def _shown(value: Any) -> str:
    """A value as text of an HTML page."""
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        return "–"
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    text = str(value)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return escape("".join(char if char.isprintable() else repr(char)[1:-1] for char in text))
