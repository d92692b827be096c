"""The typer application. It reports every error in one line and returns one of four exit codes.

0  success        1  failure of the program or the machine        2  invalid request        130  stopped by Ctrl-C

An invalid request (a refusal) is an error from a `raise` statement of this package, or an error of the operating system
(disk, file, connection). Every other error, such as a KeyError from a lookup, is a failure of the program, whatever its
type. A `RuntimeError` that this package raises, for example because workers died, is a failure that has a message.
Errors of the library name Python arguments, which are replaced by the command's options.

`--help` should be fast, but importing torch takes seconds. So each command imports its dependencies when it runs.
"""

import dis
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# Order of the commands in the help: models, what they write and recall, analyses, edits, tools.
# fmt: off
ORDER = (
    "demo", "models", "info", "check", "denoise", "explore", "recall", "trace", "aie", "patch",
    "lens", "rome", "compare", "signatures", "dictionary-train", "finetune", "adapt", "convert", "plot",
)
# fmt: on
STOPPED = 130
RESUMABLE = {"adapt", "aie", "compare", "finetune", "recall", "signatures"}
STOPPED_TEXT = "Stopped. Completed work is kept under --out; the same command resumes from there."
OURS = {"diffusion_lens", "weight_conversion"}
REFUSED, FAILED = 2, 1

# Options whose name differs from the library's argument, by argument. They apply if the command has the option.
OPTION_OF_ARGUMENT = {
    "max_bytes": "largest",
    "loop": "steps",
    "family": "to",
    "layers": "layer",
    "positions": "position",
}


def _each_ignored(keys: Sequence[str]) -> str:
    return " ".join(f"--ignore-config-keys {key}" for key in keys)


# Advice of the library in Python (regular expression), and the same advice for the command line.
ADVICE = (
    (r"diffusion_lens\.list_pretrained\(\)", "diffusion-lens models"),
    (r"from_pretrained\('([^']*)'(?:, tokenizer='([^']*)')?\)", r"MODEL \1, with its tokenizer beside it"),
    (r"pass token='[^']*' or run", "run"),
    (r"pass token='[^']*'", "run `hf auth login`"),
    (r"(?:known_1000|counterfact|bake)\('([^']*)'\)", r"--data \1"),
    (r"ReversalCurse\.load\(folder\)", "--data FOLDER"),
    (r"\bn_ctx=(\d+)", r"\1 positions"),
    (r"torch\.(float32|bfloat16|float16)", r"\1"),
    (r"n_masks=(-?\d+), but", r"--length leaves \1 positions after the prompt, but"),
    (r"subject_start=, one of \[[^\]]*\], or with ", ""),
    (r" or \(\d+, \d+\)", ""),
    (r", or a collection of fact ids", ""),
    (r"\bone_canvas\b", "one-canvas"),
    (r"=None: say which", "=: say which"),
    (r"ignore_config_keys=\['([^]]*)'\]", lambda found: _each_ignored(found[1].split("', '"))),
    (r"is in the folder of the call, if one was given: call again to", "is kept under --out: the same command can"),
    (r"(may show them later): call again", r"\1: repeat the command"),
    (r"pass another folder as out=", "name another folder with --out"),
    (r"pass tokenizer='folder' to from_pretrained", "name one with --tokenizer"),
    (r"tokenizer='that folder'", "it as --tokenizer"),
    (r"give it person= and asked=", 'give it the fields "person" and "asked"'),
    (r"Try a smaller lr \((.*?)\) or a lower clip in a new folder", r"Try a smaller --lr (\1) and another --out"),
)


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
        if (joined := "-".join(given[:2])) in self.commands:  # `dictionary train`
            given = [joined, *given[2:]]
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


def is_refusal(error: BaseException) -> bool:
    """Whether an error reports an invalid request."""
    if isinstance(error, OSError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    module = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
    return module in OURS and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def one_line(error: Exception, options: Mapping[str, str]) -> tuple[str, int]:
    """The error in one line, and the exit code; `options` are those of the command by Python argument."""
    format_message: Any = getattr(error, "format_message", None)  # Errors of the argument parser have this method.
    if format_message is not None:
        return _joined(format_message()), int(getattr(error, "exit_code", REFUSED))
    if is_refusal(error):
        # The text of a KeyError is the repr of its message.
        message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        return _joined(in_options(message, options)), FAILED if type(error) is RuntimeError else REFUSED
    failure = "a failure of the program or of this machine, not an invalid request; --debug shows where"
    return _joined(f"{type(error).__name__}: {error} ({failure})"), FAILED


def in_options(message: str, options: Mapping[str, str]) -> str:
    """The message with the command's options in place of Python arguments."""
    mention = r"subject_start=, one of (\[[^\]]*\]), or with occurrence=0 to \d+"
    if "occurrence" not in options:  # The fact comes from a file.
        message = re.sub(mention, r'the field "subject_start", one of \1', message)
    for python_advice, advice in ADVICE:
        message = re.sub(python_advice, advice, message)
    renamed = {argument: options[name] for argument, name in OPTION_OF_ARGUMENT.items() if name in options}
    for argument, option in {**renamed, **options}.items():
        message = re.sub(rf"(?<![\w.]){argument}=(?=[^\s),.;:])", f"{option} ", message)
        message = re.sub(rf"(?<![\w.]){argument}=(?=[\s),.;:]|$)", option, message)
        message = re.sub(rf"(?<![\w.-]){argument} (is|masks|compares) ", rf"{option} \1 ", message)
        message = re.sub(rf"(?<![\w.-])(?<!the ){argument} (?=')", f"{option} ", message)
        if "_" in argument:  # A word with an underscore is not English, so it must be the argument.
            message = re.sub(rf"(?<![\w./'\"-]){argument}(?![\w/'\"-]|\.\w)", option, message)
    return message


def _joined(message: str) -> str:
    return " ".join(message.split())
