"""Where a model came from, and the settings of a saved model that do not belong to its architecture.

The config.json that `save_pretrained` writes may contain two of them:

    trained_length        the length of the texts that the model was trained on
    layer_norm_folding    true if the norms are folded, which the weights alone cannot show: untrained norms are 1 too

The configs of other families do not have these keys. Beside such a config the length is stored in a separate file,
`trained_length.json`, which other programs ignore.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.weights import norms_are_one
from diffusion_lens.settings import at_least
from weight_conversion import read_json, read_json_object, write_json
from weight_conversion.families.family import IGNORED_KEYS


@dataclass(frozen=True)
class Source:
    """The arguments of the `from_pretrained` call that gave a model, except its device and its access token.

    `options` are those of `given_options`. Relative paths start from
    `working_directory`. `delta` is the hash of the delta that the weights contain, if the path is that of one.
    """

    name_or_path: str | Path
    config: str | Path | Mapping[str, Any] | None = None
    tokenizer: Any = None
    dtype: Any = "float32"
    revision: str | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    fold_ln: bool = False
    device_map: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    working_directory: Path = field(default_factory=Path.cwd)
    delta: str | None = None

    def to_open(self) -> dict[str, Any]:
        """Keywords for `open_pretrained`."""
        left_out = ("fold_ln", "device_map", "working_directory", "delta")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def in_mode(self, mode: str) -> "Source":
        """The same checkpoint in another mode, with the same unknown keys of its config and no other option."""
        kept = {name: value for name, value in self.options.items() if name == IGNORED_KEYS}
        return replace(self, options={**kept, "mode": mode})

    def anywhere(self) -> "Source":
        """The same with absolute paths, for a process with another working directory."""
        names = ("name_or_path", "config", "tokenizer", "cache_dir")
        return replace(self, **{name: self._absolute(getattr(self, name)) for name in names})

    def _absolute(self, value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        path = self.working_directory / Path(value).expanduser()
        return path if path.exists() else value


LENGTH_FILE = "trained_length.json"
LENGTH, FOLDED, FORMAT = "trained_length", "layer_norm_folding", "diffusion_lens"

Config = str | Path | Mapping[str, Any] | None


def trained_length_in(config: Config, folder: Path) -> int | None:
    """The trained length in our own config or, without one, in `LENGTH_FILE` beside the checkpoint.

    `config` is the config that the caller passed, or `None` for the config.json of the checkpoint's folder.
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
    """Whether our own config says that the norms are folded; the arguments are those of `trained_length_in`."""
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


MODES = ("bidirectional", "block", "ar")


def given_options(
    mode: Any = None, block_size: Any = None, mask_token_id: Any = None, ignore_config_keys: Any = None
) -> dict[str, Any]:
    """The options that are not `None`, by their name. Whether the checkpoint has them is checked when it is read."""
    if mode is not None and not isinstance(mode, str):
        raise TypeError(f"mode={mode!r} is not the name of a mode; the modes are {', '.join(map(repr, MODES))}")
    given: dict[str, Any] = {} if mode is None else {"mode": mode}
    if block_size is not None:
        given["block_size"] = at_least(1, "block_size", block_size, "a block has at least one position")
    if mask_token_id is not None:
        given["mask_token_id"] = at_least(0, "mask_token_id", mask_token_id, "it is the id of a token")
    if ignore_config_keys is not None:
        keys = [ignore_config_keys] if isinstance(ignore_config_keys, str) else ignore_config_keys
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            raise TypeError(f"{IGNORED_KEYS}={keys!r}; it must be a list of names of the config's keys")
        given |= {IGNORED_KEYS: list(keys)} if keys else {}
    return given
