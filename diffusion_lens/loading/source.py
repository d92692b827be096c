"""Where a model came from, so that another process can load the same weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from weight_conversion import Checkpoint, SafetensorsFile


@dataclass(frozen=True)
class Source:
    """The arguments of the `from_pretrained` call that gave a model, except its device and its access token.

    Attributes:
        name_or_path, config, tokenizer, dtype, revision, cache_dir, local_files_only, fold_ln, device_map: The
            arguments.
        options: Its `block_size`, `mode` and `mask_token_id`, as far as they were given.
        working_directory: Folder from which relative paths start.
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

    def to_open(self) -> dict[str, Any]:
        """Keywords for `open_pretrained`."""
        left_out = ("fold_ln", "device_map", "working_directory")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def in_mode(self, mode: str) -> "Source":
        """The same checkpoint in another mode, which takes no other option."""
        return replace(self, options={"mode": mode})

    def anywhere(self) -> "Source":
        """The same with absolute paths, for a process with another working directory."""
        names = ("name_or_path", "config", "tokenizer", "cache_dir")
        return replace(self, **{name: self._absolute(getattr(self, name)) for name in names})

    def _absolute(self, value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        path = self.working_directory / Path(value).expanduser()
        return path if path.exists() else value


def tensors_of(checkpoint: Checkpoint, mapped: bool | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model; in pieces, unless they should stay mapped from a file.

    Args:
        mapped: Whether they should stay mapped from the checkpoint, or another file, which has them by our names.
    """
    if isinstance(mapped, Path):
        file = SafetensorsFile(mapped)
        return ((name, file.read(name)) for name in file.shapes())
    return checkpoint.tensors() if mapped else checkpoint.pieces()
