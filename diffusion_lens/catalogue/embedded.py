"""The pair that ships with the package."""

from importlib.resources import files
from pathlib import Path

EMBEDDED = ("tiny-mdm", "tiny-ar")
EMBEDDED_LENGTH = 14  # tokens of every sentence they were trained on, end tokens included


def embedded_folder() -> Path:
    """Where the pair lies."""
    return Path(str(files("diffusion_lens") / "assets" / "tiny"))
