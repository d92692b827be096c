"""The length that a model was trained for, in the config of a folder that `save_pretrained` wrote.

It stands beside the architecture, under a key of its own. The formats of other families have no such key, and get none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weight_conversion import read_json, write_json

KEY, FORMAT = "trained_length", "diffusion_lens"


def trained_length_in(config: str | Path | Mapping[str, Any] | None, folder: Path) -> int | None:
    """The length that a config of ours gives; of a folder, that of its config.json.

    Raises:
        ValueError: a length that is none.
    """
    path = folder / "config.json" if config is None else config
    if not isinstance(path, Mapping) and not Path(path).expanduser().is_file():
        return None
    settings = path if isinstance(path, Mapping) else read_json(Path(path).expanduser())
    if not isinstance(settings, Mapping) or settings.get("format") != FORMAT:
        return None
    length = settings.get(KEY)
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"{KEY} is {length!r} in {path}; it is a number of places, at least 1, or null")
    return length


def write_trained_length(length: int | None, folder: Path) -> None:
    """Add it to the config.json of a folder of ours."""
    if length is not None:
        write_json({**read_json(folder / "config.json"), KEY: length}, folder / "config.json")
