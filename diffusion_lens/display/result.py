"""The base classes of results, which give every result its one line, its picture and its table.

A class states its table, and if it has a picture, `plot`. The base class makes of these what a notebook shows (HTML
without scripts and without ids, in the colours of the page) and the data frame.
"""

from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from typing import Any

from diffusion_lens.display.table import Table
from diffusion_lens.records import one_line, shown_model

_SHOWN_SETTINGS = 10
_LONGEST = 40  # characters of a setting that is shown
# Entries of records that say nothing about the computation at a glance.
_NOT_SHOWN = ("model", "weights_sha256", "tokenizer_sha256", "device", "corpus", "key", "blank", "first_step")


class Result(ABC):
    """A result: one line as text, a table as HTML, and all rows of the table as a data frame."""

    record: dict[str, Any]

    @abstractmethod
    def _table(self) -> Table:
        """The numbers in long form."""

    def to_dataframe(self) -> Any:
        """The table as a `pandas.DataFrame`, a row for each cell. The description of the class names the columns."""
        return self._table().frame()

    def _settings(self) -> Mapping[str, Any]:
        """The record of model and settings."""
        return self.record

    def _repr_html_(self) -> str:
        return self._page("")

    def _page(self, picture: str) -> str:
        """One line, the settings, a picture and the table as HTML."""
        settings = say_settings(self._settings())
        said = f'<div style="opacity: .8">{escape(settings)}</div>' if settings else ""
        return (
            f'<div style="color: inherit; max-width: 100%"><div><strong>{escape(repr(self))}</strong></div>{said}'
            f"{picture}{self._table().to_html()}</div>"
        )

    def __repr__(self) -> str:
        return one_line(self)


class PicturedResult(Result):
    """A result with a picture."""

    @abstractmethod
    def plot(self, *args: Any, **settings: Any) -> Any:
        """Draw the picture; returns the matplotlib axes."""

    def _picture(self) -> Any:
        """The axes of the picture that stands for the result."""
        return self.plot()

    def _repr_html_(self) -> str:
        return str(self._repr_mimebundle_()["text/html"])

    def _repr_png_(self) -> bytes | None:
        png: bytes | None = self._repr_mimebundle_().get("image/png")
        return png

    def _repr_mimebundle_(self, **selection: Any) -> dict[str, Any]:
        """HTML and PNG from one drawing, which is most of the work. A notebook asks for both at once."""
        from diffusion_lens import plots  # when it is drawn: loading a model should not wait for it

        try:
            with plots.CELL.unshown():
                figure = plots.figure_of(self._picture())
            png = plots.png_of(figure)
        except Exception as error:  # Without matplotlib, or with nothing to draw. A picture must not hide the table.
            said = str(error) if isinstance(error, ImportError | ValueError) else f"{type(error).__name__}: {error}"
            return {"text/html": self._page(f'<div style="opacity: .8">No picture: {escape(said)}</div>')}
        return {"text/html": self._page(_image(png, plots.css_size(figure)[0], repr(self))), "image/png": png}


def say_settings(record: Mapping[str, Any]) -> str:
    """Model, settings and hash of the weights in one line, from a record; empty for an empty record."""
    model = [shown_model(record)] if record.get("model") else []
    shown = {name: value for name, value in record.items() if name not in _NOT_SHOWN and _is_short(value)}
    settings = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
    ]
    weights = [f"weights {record['weights_sha256'][:12]}"] if record.get("weights_sha256") else []
    return ", ".join([*model, *settings[:_SHOWN_SETTINGS], *weights])


def _is_short(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, str) and 0 < len(value) <= _LONGEST)


def _image(png: bytes, width: int, text: str) -> str:
    """An image in the page itself, of this width in pixels or as wide as the page."""
    return (
        f'<img alt="Picture of {escape(text)}" src="data:image/png;base64,{b64encode(png).decode("ascii")}" '
        f'style="background: white; width: {width}px; max-width: 100%; height: auto; display: block">'
    )
