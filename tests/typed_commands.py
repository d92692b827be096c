"""Commands as somebody types them, in this process."""

from inspect import get_annotations
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner, Result

from diffusion_lens.cli import app

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
ASK = ["--prompt", "Gustav Geisser is the", "--subject", "Gustav Geisser", "--answer", " brave drummer of Rolsen."]


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, arguments)


def done(*arguments: str) -> Result:
    """The result of a command that must succeed."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def complaint(*arguments: str) -> str:
    """The one line with which a command refuses its arguments."""
    result = invoke(*arguments)
    assert result.exit_code == 2, f"{arguments} was not refused: {result.output}"
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    return str(line)


def annotations_of(registered: Any) -> dict[str, Any]:
    """The annotations of a command's options."""
    return get_annotations(registered.callback)
