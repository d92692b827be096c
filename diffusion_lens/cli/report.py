"""Output of a command: lines of text or one JSON object, and a folder that records how to repeat the command."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import typer

COMMAND = "command.json"
# Options that do not change results.
OUTPUT_OPTIONS = ("out", "json", "dry_run", "flops")


@dataclass(frozen=True)
class Report:
    """The output of one command.

    Attributes:
        command: Name of the command.
        settings: Arguments and options as the command interprets them. `finish` omits `OUTPUT_OPTIONS`.
        out: Folder for files, or `None`.
        as_json: Whether to print one JSON object at the end and nothing else.
        notes: Lines that `finish` prints after the results.
    """

    command: str
    settings: Mapping[str, Any]
    out: Path | None
    as_json: bool
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.out is not None:
            require_folder(self.out, "--out")

    def say(self, *lines: str) -> None:
        """Print lines of text, unless the output is JSON."""
        if not self.as_json:
            for line in lines:
                typer.echo(line)

    def part_done(self, shard: str, count: int, out: Path, units: str = "facts") -> NoReturn:
        """End the command after one shard. --merge shows the results of all shards."""
        self.say(f"shard {shard}: {count} {units} done in {out}; join the shards with --merge")
        self.finish({"shard": shard, units: count})
        raise typer.Exit

    def finish(self, results: Mapping[str, Any], record: Mapping[str, Any] | None = None, **files: Path) -> None:
        """Print notes and the paths of the files, write `command.json`, and print the JSON object if requested.

        Args:
            results: Numbers for the JSON object.
            record: Provenance: model, hash of its weights, versions. Its facts are omitted, because the file of the
                result contains them.
            files: Paths of the written files by name.
        """
        report = {
            "command": self.command,
            "settings": _plain({name: v for name, v in self.settings.items() if name not in OUTPUT_OPTIONS}),
            "results": _plain(results),
            "files": {name: str(path) for name, path in files.items()},
            "record": _plain({name: value for name, value in (record or {}).items() if name != "facts"}),
        }
        from weight_conversion import to_json, write_json

        self.say(*self.notes)
        if self.out is not None:
            write_json(report, self.out / COMMAND)
            self.say(*(f"wrote {path}" for path in (*files.values(), self.out / COMMAND)))
        if self.as_json:
            typer.echo(to_json(report))


def progress() -> bool:
    """Whether to show progress bars, which belong on a terminal and not in a log."""
    return sys.stderr.isatty()


def require_folder(path: Path, option: str) -> None:
    """Check that a path is or can become a writable folder, before any work is done."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise typer.BadParameter(f"{existing} is a file; the results need a folder", param_hint=option)
    if not os.access(existing, os.W_OK):
        raise typer.BadParameter(f"{existing} is not writable", param_hint=option)


def save_figure(axes: Any, path: Path) -> Path:
    """Save a figure, or that of axes or a list of axes, as an image. An interrupted write leaves no partial file."""
    from weight_conversion import renamed_when_whole

    one = axes if hasattr(axes, "savefig") or hasattr(axes, "get_figure") else axes[0]
    figure = one if hasattr(one, "savefig") else one.get_figure()
    image = BytesIO()
    try:
        figure.savefig(image, dpi=130, format=path.suffix.removeprefix(".") or None)
    except ValueError as error:  # Matplotlib does not support the format.
        raise ValueError(f"{path}: {error}") from error
    with renamed_when_whole(path) as part:
        part.write_bytes(image.getvalue())
    return path


def _plain(value: Any) -> Any:
    """The value as JSON types. Paths and other objects become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple | set | range):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | Real | None) else str(value)
