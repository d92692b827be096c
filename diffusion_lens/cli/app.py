"""The application: its commands join it, and it turns every refusal into one line and an exit code.

0  done        1  failed for a reason of ours        2  asked for what cannot be        130  stopped by Ctrl-C
"""

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

REFUSALS = (ValueError, KeyError, OSError, ImportError, TypeError)
STOPPED = 130
RESUMABLE = {"aie", "compare", "finetune", "recall"}
STOPPED_TEXT = "Stopped. What was finished under --out is kept: the same command goes on from there."


class Teaching(TyperGroup):
    """A group of commands whose errors are one line each, unless --debug asks for the stack trace."""

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
            code = super().main(arguments or ["--help"], prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:  # what typer before 0.20 makes of Ctrl-C
            code = STOPPED
        except Exception as error:
            if arguments != given:
                raise
            sys.exit(_refuse(error))
        if code == STOPPED:
            typer.echo(STOPPED_TEXT if {*arguments} & RESUMABLE else "Stopped.", err=True)
        sys.exit(code if isinstance(code, int) else 0)


def _refuse(error: Exception) -> int:
    """Say in one line what was wrong, and return the exit code."""
    say = getattr(error, "format_message", None)  # an error of the parser of arguments
    if say is not None:
        message, code = say(), int(getattr(error, "exit_code", 2))
    elif isinstance(error, REFUSALS):
        # A KeyError's text is the repr of its message.
        message, code = str(error.args[0] if isinstance(error, KeyError) and error.args else error), 2
    else:
        message, code = f"{type(error).__name__}: {error} (--debug shows where)", 1
    typer.echo(f"Error: {' '.join(message.split())}", err=True)
    return code


app = typer.Typer(
    cls=Teaching,
    help="Mechanistic interpretability of masked diffusion language models, and of their autoregressive twins.",
    epilog="A first look: diffusion-lens demo. Every command takes --help; errors take --debug, which shows the stack.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Nothing is done before a command is named."""
