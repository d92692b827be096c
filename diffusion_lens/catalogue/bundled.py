"""The bundled models, a diffusion model and its AR baseline, which are part of the package."""

from importlib.resources import files
from pathlib import Path

BUNDLED = ("tiny-mdm", "tiny-ar")
BUNDLED_LENGTH = 14  # tokens of every sentence in their training data, including end tokens


def bundled_folder() -> Path:
    """The folder with the bundled models."""
    return Path(str(files("diffusion_lens") / "assets" / "tiny"))
