"""Output of a command: lines of text or one JSON object, and a folder that records how to repeat the command."""

import math
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diffusion_lens.settings import Settings, positive, setting

if TYPE_CHECKING:
    from torch import Tensor

COMMAND = "command.json"
# Options that do not change results, and those that say where and in which parts they are computed.
OUTPUT_OPTIONS = ("out", "json", "dry_run", "flops")
PLACES = ("device", "workers", "dask", "slurm", "shard", "merge")
KEEPS = (
    "The same command goes on in its folder, and writes the same results again; a folder with the results of another "
    "command or of other settings is refused."
)
# By feature: text of the error, package, and extra of diffusion-lens that installs it.
EXTRAS = {
    "pictures": ("figures need matplotlib", "matplotlib", "plot"),
    "live pages": ("the live explorer needs starlette", "starlette", "explore"),
    "servers": ("the live explorer needs uvicorn", "uvicorn", "explore"),
    "Dask": ("a cluster of Dask needs distributed", "distributed", "cluster"),
    "Slurm": ("jobs of Slurm need submitit", "submitit", "cluster"),
    "word_bleu": ("BLEU on words needs sacrebleu", "sacrebleu", "eval"),
}


@dataclass
class Report(Settings):
    """The output of one command.

    Attributes:
        json: Whether to print one JSON object at the end and nothing else.
        out: Folder for files, or `None`.
        command: Name of the command.
        settings: Arguments and options as the command interprets them. `finish` omits `OUTPUT_OPTIONS`.
        notes: Lines that `finish` prints after the results.
        files: Paths of the written files by name.
    """

    json: bool = setting(False, "Print one JSON object to standard output, and nothing else.")
    out: Path | None = None
    command: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: dict[str, Path] = field(default_factory=dict)

    def note(self, **effective: Any) -> None:
        """Record settings as the command interprets them."""
        self.settings = {**self.settings, **effective}

    def say(self, *lines: str) -> None:
        """Print lines of text, unless the output is JSON."""
        if not self.json:
            for line in lines:
                typer.echo(line)

    def save(self, name: str, result: Any, file: str | None = None) -> None:
        """Write a result as NAME.safetensors, or as another file, if there is a folder."""
        if self.out is not None:
            path = self.out / f"{file or name}.safetensors"
            if path.exists():
                _require_same_weights(path, result)
            self._claim()
            self.files[name] = result.save(path)

    def draw(self, name: str, file: str, plot: Callable[[], Any]) -> None:
        """Write the figure that `plot` draws, if there is a folder."""
        if self.out is not None:
            from diffusion_lens.plots import save_figure

            self._claim()
            self.files[name] = save_figure(plot(), self.out / file)

    def finish(self, results: Mapping[str, Any], record: Mapping[str, Any] | None = None, **files: Path) -> None:
        """Print notes and the paths of the files, write `command.json`, and print the JSON object if requested.

        Args:
            results: Numbers for the JSON object.
            record: Provenance: model, hash of its weights, versions. Its facts are omitted, because the file of the
                result contains them.
            files: Paths of files that `save` and `draw` have not written, by name.
        """
        written = self.files | files
        report = {
            **self._described(),
            "results": _plain(results),
            "files": {name: str(path) for name, path in written.items()},
            "record": _plain({name: value for name, value in (record or {}).items() if name != "facts"}),
        }
        from weight_conversion import to_json, write_json

        self.say(*self.notes)
        if self.out is not None:
            write_json(report, self.out / COMMAND)
            self.say(*(f"wrote {path}" for path in (*written.values(), self.out / COMMAND)))
        if self.json:
            typer.echo(to_json(report))

    def _described(self) -> dict[str, Any]:
        settings = {name: value for name, value in self.settings.items() if name not in OUTPUT_OPTIONS}
        return {"command": self.command, "settings": _plain(settings)}

    def _claim(self) -> None:
        """Before the first file, write whose results the folder has, should this command be stopped."""
        if self.out is not None and not self.files:
            from weight_conversion import write_json

            write_json(self._described(), self.out / COMMAND)


@dataclass
class FolderReport(Report):
    """The output of a command that can write results to a folder, or estimate its own cost."""

    out: Path | None = setting(
        None, f"Folder for results, figures and command.json, which records how to repeat the run. {KEEPS}"
    )
    dry_run: bool = setting(False, "Estimate token-layers, operations, time and memory, and do nothing else.")
    flops: float | None = setting(
        None,
        "For --dry-run: operations per second of the device, e.g. 3e14. Default: a pass is timed, if the weights are "
        "on this machine.",
        positive,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None:
            require_folder(self.out, "--out")

    def begin(self, compared: Collection[str] | None = None) -> None:
        """Refuse a folder that has the results of another command or of other settings, before anything is computed.

        Args:
            compared: Settings to compare, by default all; a study compares the others with the record of its parts.
        """
        if self.out is None or self.dry_run:
            return
        described, file = self._described(), self.out / COMMAND
        if not file.exists():
            if found := min(self.out.glob("*.safetensors"), default=None):
                raise ValueError(
                    f"{found} is there, and no {COMMAND} says how it was made: name another folder with --out"
                )
            return
        from diffusion_lens.records.results import read_run, require_same_run

        saved = read_run(file)
        there, here = saved.get("settings", {}), described["settings"]
        names = [name for name in (here if compared is None else compared) if name in there and name not in PLACES]
        if there.get("merge") and here.get("merge"):
            names.append("merge")
        require_same_run(
            {"command": saved.get("command"), **{name: there[name] for name in names}},
            {"command": self.command, **{name: here[name] for name in names}},
            str(self.out),
        )


def _require_same_weights(path: Path, result: Any) -> None:
    """Raise a `ValueError` if the result that is there was computed with other weights or another tokenizer."""
    from diffusion_lens.records.results import load

    there, here = (getattr(each, "record", {}) for each in (load(path), result))
    if other := [name for name in ("weights_sha256", "tokenizer_sha256") if there.get(name) != here.get(name)]:
        raise ValueError(f"{path} was made with another {' and '.join(other)}: name another folder with --out")


@dataclass
class PictureReport(FolderReport):
    """The output of a command that draws figures if it has a folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None:
            require("pictures")


@dataclass
class StudyReport(FolderReport):
    """The output of a study over facts, which always has a folder."""

    out: Path | None = setting(
        None,
        f"Folder for results and command.json. Default: a name made of command and model. An interrupted run resumes "
        f"from it. {KEEPS}",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require("pictures")

    def folder(self, default: Path) -> Path:
        """The folder for the results."""
        if self.out is None:
            require_folder(default, "--out")
            self.out = default
        return self.out


def require(*features: str) -> None:
    """Check that the packages of these features, keys of `EXTRAS`, are installed, before long work that needs them."""
    for need, package, extra in map(EXTRAS.__getitem__, features):
        if find_spec(package) is None:
            raise ValueError(f"{need}, which is not installed: pip install 'diffusion-lens[{extra}]'")


def strongest(effects: "Tensor", n: int) -> list[tuple[int, ...]]:
    """Indices of the cells with the largest effects, the largest first; cells that are NaN are left out."""
    import torch

    flat = effects.nan_to_num(nan=-math.inf).flatten()
    n_cells = min(n, int((~effects.isnan()).sum()))
    indices = torch.unravel_index(flat.argsort(descending=True)[:n_cells], effects.shape)
    return [tuple(cell) for cell in torch.stack(indices, dim=1).tolist()]


def progress() -> bool:
    """Whether to show progress bars: on a terminal, and in a log if they are rare there, as `main` makes them."""
    return sys.stderr is not None and (sys.stderr.isatty() or "TQDM_DELAY" in os.environ)


def require_folder(path: Path, option: str) -> None:
    """Check that a path is or can become a writable folder, before any work is done."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise typer.BadParameter(f"{existing} is a file; the results need a folder", param_hint=option)
    if not os.access(existing, os.W_OK):
        raise typer.BadParameter(f"{existing} is not writable", param_hint=option)


def _plain(value: Any) -> Any:
    """The value as JSON types. Paths and other objects become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple | set | range):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | Real | None) else str(value)
