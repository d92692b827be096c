"""What a command says and leaves: lines for people or one JSON object for programs, and a folder to repeat it from."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import typer

COMMAND = "command.json"
HOW_IT_IS_TOLD = ("out", "json", "dry_run", "flops")


@dataclass(frozen=True)
class Report:
    """One command's output.

    Attributes:
        command: its name.
        settings: every argument and option, as it was understood; those that do not change the numbers are left out.
        out: where its files go, if they are wanted.
        as_json: say one JSON object in the end, and nothing before.
    """

    command: str
    settings: Mapping[str, Any]
    out: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        if self.out is not None:
            require_folder(self.out, "--out")

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
            record: provenance: model, hash of its weights, versions. Facts in it are left to the result's own file.
            files: what was written, by what it is.
        """
        told = {
            "command": self.command,
            "settings": _plain({k: each for k, each in self.settings.items() if k not in HOW_IT_IS_TOLD}),
            "results": _plain(results),
            "files": {name: str(path) for name, path in files.items()},
            "record": _plain({k: each for k, each in (record or {}).items() if k != "facts"}),
        }
        from weight_conversion import to_json, write_json

        if self.out is not None:
            write_json(told, self.out / COMMAND)
            self.say(*(f"wrote {path}" for path in (*files.values(), self.out / COMMAND)))
        if self.as_json:
            typer.echo(to_json(told))


def progress() -> bool:
    """Whether somebody watches: bars go to a terminal, never into a log."""
    return sys.stderr.isatty()


def require_folder(path: Path, option: str) -> None:
    """Refuse what cannot become a folder before anything is computed for it."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is a file; the results need a folder", param_hint=option)
    if not os.access(there, os.W_OK):
        raise typer.BadParameter(f"{there} may not be written to", param_hint=option)


def save_figure(axes: Any, path: Path) -> Path:
    """The figure that some axes belong to, as a picture that is there whole or not at all."""
    from weight_conversion import renamed_when_whole

    figure = axes if hasattr(axes, "savefig") else axes.get_figure()
    drawn = BytesIO()
    try:
        figure.savefig(drawn, dpi=130, format=path.suffix.removeprefix(".") or None)
    except ValueError as error:  # a format that matplotlib does not write
        raise ValueError(f"{path}: {error}") from error
    with renamed_when_whole(path) as part:
        part.write_bytes(drawn.getvalue())
    return path


def _plain(value: Any) -> Any:
    """As JSON has it: paths and other objects by their text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | range):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | Real | None) else str(value)
