"""Error messages in one line, which distinguish an invalid request (a refusal) from a failure of the program.

A refusal is an error from a `raise` statement of this package, or an error of the operating system (disk, file,
connection). Every other error, such as a KeyError from a lookup, is a failure of the program, whatever its type. A
`RuntimeError` that this package raises, for example because workers died, is a failure that has a message.
Errors of the library name Python arguments. This module replaces them by the command's options.
"""

import dis
import re
from collections.abc import Mapping
from typing import Any

OURS = {"diffusion_lens", "weight_conversion"}
REFUSED, FAILED = 2, 1

# Options whose name differs from the library's argument, by argument. They apply if the command has the option.
OPTION_OF_ARGUMENT = {
    "mixed_precision": "precision",
    "max_bytes": "largest",
    "loop": "steps",
    "steps": "iterations",
    "family": "to",
    "layers": "layer",
    "heads": "head",
    "positions": "position",
}
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
    (r"is in the folder of the call, if one was given: call again to", "is kept under --out: the same command can"),
    (r"(may show them later): call again", r"\1: repeat the command"),
    (r"pass another folder as out=", "name another folder with --out"),
    (r"pass tokenizer='folder' to from_pretrained", "name one with --tokenizer"),
    (r"tokenizer='that folder'", "it as --tokenizer"),
    (r"give it person= and asked=", 'give it the fields "person" and "asked"'),
    (r"Try a smaller lr \((.*?)\) or a lower clip in a new folder", r"Try a smaller --lr (\1) and another --out"),
)


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
    """The error in one line, and the exit code.

    Args:
        error: Error to describe.
        options: Options of the command by Python argument, such as {"cfg_scale": "--cfg-scale"}.
    """
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
