"""The application: its commands join it, and it turns every refusal into one line and an exit code.

0  done        1  failed for a reason of ours        2  asked for what cannot be        130  stopped by Ctrl-C

`--help` has to be quick, and torch takes seconds: a command imports what it works with when it runs.
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

# As one works: what there is, what a model writes and recalls, why, what is changed in it; then the tools.
ORDER = (
    "demo",
    "models",
    "info",
    "check",
    "denoise",
    "recall",
    "trace",
    "aie",
    "rome",
    "compare",
    "finetune",
    "convert",
    "plot",
)
STOPPED = 130
RESUMABLE = {"aie", "compare", "finetune", "recall"}
STOPPED_TEXT = "Stopped. What was finished under --out is kept: the same command goes on from there."


class Teaching(TyperGroup):
    """A group of commands whose errors are one line each, unless --debug asks for the stack trace."""

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
        arguments = [each for each in given if each != "--debug"]
        try:
            with _warnings_in_one_line(self._options(arguments)):
                code = super().main(
                    arguments or ["--help"], prog_name, complete_var, False, windows_expand_args, **extra
                )
        except (typer.Abort, KeyboardInterrupt):  # Abort is what typer before 0.20 makes of Ctrl-C
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
        """The options of the command that was named, by the Python argument that each of them gives."""
        command: Any = next((self.commands[each] for each in arguments if each in self.commands), None)
        options: dict[str, str] = {}
        for parameter in getattr(command, "params", ()):
            option = max(parameter.opts, key=len)
            if option.startswith("--"):
                options |= {parameter.name: option, option.removeprefix("--").replace("-", "_"): option}
        return options


@contextmanager
def _warnings_in_one_line(options: Mapping[str, str]) -> Iterator[None]:
    """Warnings to users as one line each on standard error; others as they come."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        usual = warnings.showwarning

        def show(message: Any, category: Any, filename: str, *more: Any, **named: Any) -> None:
            if issubclass(category, UserWarning):
                typer.echo(f"Warning: {in_options(str(message), options)}", err=True)
            else:
                usual(message, category, filename, *more, **named)

        warnings.showwarning = show
        yield


app = typer.Typer(
    cls=Teaching,
    help="Mechanistic interpretability of masked diffusion language models, and of their autoregressive twins.",
    epilog="A first look: diffusion-lens demo. Every command takes --help; errors take --debug, which shows the stack.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _tell_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"diffusion-lens {version('diffusion-lens')}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """Nothing is done before a command is named."""
