"""Figures of the tests: blank files, because drawing takes long."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

PNG = b"\x89PNG\r\n\x1a\n"


@contextmanager
def blank_figures(drawn: str | None = None) -> Iterator[None]:
    """Saved figures are blank files, except where a name matches `drawn`. Each of their panels must show something."""
    from matplotlib.figure import Figure

    draw = Figure.savefig

    def save(figure: Any, target: Any, **options: Any) -> None:
        assert figure.axes
        assert all(axes.has_data() for axes in figure.axes if axes.axison), "a panel shows nothing"
        if drawn is not None and isinstance(target, Path) and target.match(drawn):
            draw(figure, target, **options)
        else:
            (Path(target).write_bytes if isinstance(target, str | Path) else target.write)(PNG)

    with patch.object(Figure, "savefig", save):
        yield
