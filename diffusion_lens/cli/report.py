"""What a command says and leaves: lines for people or one JSON object for programs, and a folder to repeat it from."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer

from weight_conversion import write_json

COMMAND = "command.json"


@dataclass(frozen=True)
class Report:
    """One command's output.

    Attributes:
        command: its name.
        settings: its arguments, as they were understood.
        out: where its files go, if they are wanted.
        as_json: say one JSON object in the end, and nothing before.
    """

    command: str
    settings: Mapping[str, Any]
    out: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise typer.BadParameter(f"{self.out} is a file; the results need a folder", param_hint="--out")

    def say(self, *lines: str) -> None:
        """Lines for people."""
        if not self.as_json:
            for line in lines:
                typer.echo(line)

    def part_done(self, shard: str, count: int, out: Path) -> NoReturn:
        """End after one shard of the work: what the parts make together is shown by --merge."""
        self.say(f"shard {shard}: {count} facts done in {out}; join the shards with --merge")
        self.finish({"shard": shard, "facts": count})
        raise typer.Exit

    def finish(self, results: Mapping[str, Any], record: Mapping[str, Any] | None = None, **files: Path) -> None:
        """Name the files that were written, note how to repeat the run, and end.

        Args:
            results: the numbers, for --json and for the note.
            record: provenance: model, hash of its weights, versions.
            files: what was written, by what it is.
        """
        told = {
            "command": self.command,
            "settings": _plain(self.settings),
            "results": _plain(results),
            "files": {name: str(path) for name, path in files.items()},
            "record": _plain(record or {}),
        }
        if self.out is not None:
            write_json(told, self.out / COMMAND)
            self.say(*(f"wrote {path}" for path in (*files.values(), self.out / COMMAND)))
        if self.as_json:
            typer.echo(json.dumps(told))


def progress() -> bool:
    """Whether somebody watches: bars go to a terminal, never into a log."""
    return sys.stderr.isatty()


def save_figure(axes: Any, path: Path) -> Path:
    """The figure that some axes belong to, as a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = axes if hasattr(axes, "savefig") else axes.get_figure()
    figure.savefig(path, dpi=130)
    return path


def _plain(value: Any) -> Any:
    """As JSON has it: paths and other objects by their text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | range):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
