"""What a folder says of a model beside its architecture.

In the config.json that `save_pretrained` wrote:

    trained_length        the length that it was trained for
    layer_norm_folding    true if its norms are folded; by the weights alone it might be a model that is not trained yet

The configs of other families have no such keys, and get none. Beside them the length stands in a file of its own,
`trained_length.json`, which other programs do not look for.
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
    """The length that a config of ours gives, of a folder its config.json, or else `LENGTH_FILE` beside the checkpoint.

    Raises:
        ValueError: a length that is none.
    """
    settings, path = _own(config, folder)
    if not settings and (folder / LENGTH_FILE).is_file():
        path = folder / LENGTH_FILE
        settings = read_json_object(folder / LENGTH_FILE)
    length = settings.get(LENGTH)
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"{LENGTH} is {length!r} in {path}; it is a number of places, at least 1, or null")
    return length


def folded_in(config: Config, folder: Path) -> bool:
    """Whether a config of ours says that the norms are folded.

    Raises:
        ValueError: neither true nor false.
    """
    settings, path = _own(config, folder)
    folded = settings.get(FOLDED, False)
    if not isinstance(folded, bool):
        raise ValueError(f"{FOLDED} is {folded!r} in {path}; it is true or false")
    return folded


def write_own(cfg: DiffusionConfig, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Add to the config.json of a folder of ours what holds of the model: training may have undone the folding."""
    said: dict[str, Any] = {} if cfg.trained_length is None else {LENGTH: cfg.trained_length}
    if cfg.layer_norm_folding and norms_are_one(tensors):
        said[FOLDED] = True
    if said:
        write_json({**read_json(folder / "config.json"), **said}, folder / "config.json")


def write_trained_length(length: int | None, folder: Path) -> None:
    """Keep it beside a checkpoint, as the folder's format has it."""
    settings, _ = _own(None, folder)
    if settings and length is not None:
        write_json({**settings, LENGTH: length}, folder / "config.json")
    elif length is not None:
        write_json({LENGTH: length}, folder / LENGTH_FILE)
    else:
        (folder / LENGTH_FILE).unlink(missing_ok=True)


def _own(config: Config, folder: Path) -> tuple[Mapping[str, Any], object]:
    """A config of ours, empty if it is none, and how to call it in an error."""
    path = folder / "config.json" if config is None else config
    if not isinstance(path, Mapping) and not Path(path).expanduser().is_file():
        return {}, path
    settings = path if isinstance(path, Mapping) else read_json(Path(path).expanduser())
    return (settings if isinstance(settings, Mapping) and settings.get("format") == FORMAT else {}), path
