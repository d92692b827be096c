"""Settings of a saved model that do not belong to its architecture.

The config.json that `save_pretrained` writes may contain two of them:

    trained_length        the length of the texts that the model was trained on
    layer_norm_folding    true if the norms are folded, which the weights alone cannot show: untrained norms are 1 too

The configs of other families do not have these keys. Beside such a config the length is stored in a separate file,
`trained_length.json`, which other programs ignore.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model.folding import norms_are_one
from weight_conversion import read_json, read_json_object, write_json

LENGTH_FILE = "trained_length.json"
LENGTH, FOLDED, FORMAT = "trained_length", "layer_norm_folding", "diffusion_lens"

Config = str | Path | Mapping[str, Any] | None


def trained_length_in(config: Config, folder: Path) -> int | None:
    """The trained length in our own config or, without one, in `LENGTH_FILE` beside the checkpoint.

    Args:
        config: Config that the caller passed, or `None` for the config.json of the folder.
        folder: Folder of the checkpoint.

    Raises:
        ValueError: The length is not a whole number, at least 1.
    """
    settings, path = _own(config, folder)
    if not settings and (folder / LENGTH_FILE).is_file():
        path = folder / LENGTH_FILE
        settings = read_json_object(folder / LENGTH_FILE)
    length = settings.get(LENGTH)
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"{LENGTH} is {length!r} in {path}; it must be a number of positions, at least 1, or null")
    return length


def folded_in(config: Config, folder: Path) -> bool:
    """Whether our own config says that the norms are folded; the arguments are those of `trained_length_in`.

    Raises:
        ValueError: The value is neither true nor false.
    """
    settings, path = _own(config, folder)
    folded = settings.get(FOLDED, False)
    if not isinstance(folded, bool):
        raise ValueError(f"{FOLDED} is {folded!r} in {path}; it must be true or false")
    return folded


def write_own(cfg: DiffusionConfig, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Add the settings of a model to the config.json in our own format."""
    settings: dict[str, Any] = {} if cfg.trained_length is None else {LENGTH: cfg.trained_length}
    if cfg.layer_norm_folding and norms_are_one(tensors):  # training may have changed the norms since
        settings[FOLDED] = True
    if settings:
        write_json({**read_json(folder / "config.json"), **settings}, folder / "config.json")


def write_trained_length(length: int | None, folder: Path) -> None:
    """Write the trained length into the folder's config.json if it is our own, otherwise into `LENGTH_FILE`."""
    settings, _ = _own(None, folder)
    if settings and length is not None:
        write_json({**settings, LENGTH: length}, folder / "config.json")
    elif length is not None:
        write_json({LENGTH: length}, folder / LENGTH_FILE)
    else:
        (folder / LENGTH_FILE).unlink(missing_ok=True)


def _own(config: Config, folder: Path) -> tuple[Mapping[str, Any], object]:
    """The settings of a config in our own format, empty for any other config, and its name in error messages."""
    path = folder / "config.json" if config is None else config
    if not isinstance(path, Mapping) and not Path(path).expanduser().is_file():
        return {}, path
    settings = path if isinstance(path, Mapping) else read_json(Path(path).expanduser())
    return (settings if isinstance(settings, Mapping) and settings.get("format") == FORMAT else {}), path
