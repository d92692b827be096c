"""The typer application. It reports every error in one line and returns one of four exit codes.

0  success        1  failure of the program or the machine        2  invalid request        130  stopped by Ctrl-C

`--help` should be fast, but importing torch takes seconds. So each command imports its dependencies when it runs.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from diffusion_lens.cli.refusals import in_options, one_line

# Order of the commands in the help: models, what they write and recall, analyses, edits, tools.
ORDER = (
    "demo",
    "models",
    "info",
    "check",
    "denoise",
    "explore",
    "recall",
    "trace",
    "aie",
    "patch",
    "lens",
    "rome",
    "compare",
    "signatures",
    "one-layer",
    "finetune",
    "convert",
    "plot",
)
STOPPED = 130
RESUMABLE = {"aie", "compare", "finetune", "one-layer", "recall", "signatures"}
STOPPED_TEXT = "Stopped. Completed work is kept under --out; the same command resumes from there."


class OneLineErrors(TyperGroup):
    """A group of commands that prints each error in one line, or with its stack trace under --debug."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands in `ORDER`."""
        return [*filter(self.commands.__contains__, ORDER), *(set(self.commands) - set(ORDER))]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        arguments = [argument for argument in given if argument != "--debug"]
        try:
            with _warnings_in_one_line(self._options(arguments)):
                code = super().main(
                    arguments or ["--help"], prog_name, complete_var, False, windows_expand_args, **extra
                )
        except (typer.Abort, KeyboardInterrupt):  # Before version 0.20, typer converts Ctrl-C to Abort.
            code = STOPPED
        except Exception as error:
            if arguments != given:
                raise
            message, code = one_line(error, self._options(arguments))
            typer.echo(f"Error: {message}", err=True)
            sys.exit(code)
        if code == STOPPED:
            typer.echo(STOPPED_TEXT if {*arguments} & RESUMABLE else "Stopped.", err=True)
        sys.exit(code if isinstance(code, int) else 0)

    def _options(self, arguments: Sequence[str]) -> dict[str, str]:
        """The options of the command in `arguments`, by their Python argument."""
        command: Any = next((self.commands[name] for name in arguments if name in self.commands), None)
        options: dict[str, str] = {}
        for parameter in getattr(command, "params", ()):
            option = max(parameter.opts, key=len)
            if option.startswith("--"):
                options |= {parameter.name: option, option.removeprefix("--").replace("-", "_"): option}
        return options


@contextmanager
def _warnings_in_one_line(options: Mapping[str, str]) -> Iterator[None]:
    """Print each `UserWarning` in one line on standard error, and other warnings as usual."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        show_as_usual = warnings.showwarning

        def show(message: Any, category: Any, filename: str, *more: Any, **named: Any) -> None:
            if issubclass(category, UserWarning):
                typer.echo(f"Warning: {in_options(str(message), options)}", err=True)
            else:
                show_as_usual(message, category, filename, *more, **named)

        warnings.showwarning = show
        yield


app = typer.Typer(
    cls=OneLineErrors,
    help="Mechanistic interpretability of masked diffusion language models and their autoregressive baselines.",
    epilog="First steps: diffusion-lens demo. Every command has --help. --debug shows the stack trace of an error.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(requested: bool) -> bool:
    if requested:
        typer.echo(f"diffusion-lens {version('diffusion-lens')}")
        raise typer.Exit
    return requested


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Declare the options of the application. It does nothing without a command."""
