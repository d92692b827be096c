"""How results show themselves: as one line of text, as a picture with a table in a notebook, and as a data frame."""

from diffusion_lens.display.result import PicturedResult, Result
from diffusion_lens.display.table import Table, shaped, texts_of

__all__ = ["PicturedResult", "Result", "Table", "shaped", "texts_of"]
