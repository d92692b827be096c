"""What went wrong, in one line: a refusal of what was asked, or a fault.

A refusal is an error that this package raised by a `raise` of its own, or one of the system (a disk, a file, a
connection). Whatever else arrives, such as a KeyError out of a lookup, is a fault of the program, even if its type is
that of a refusal. The library names its Python arguments in its errors; a command names its options instead.
"""

import dis
import re
from collections.abc import Mapping
from typing import Any

OURS = {"diffusion_lens", "weight_conversion"}
REFUSED, FAILED = 2, 1

# Arguments that the library calls otherwise than the option that gives them, where a command has it.
CALLED = {
    "mixed_precision": "precision",
    "max_bytes": "largest",
    "loop": "steps",
    "steps": "iterations",
    "family": "to",
}
# What the library advises in Python, and what the command line has for it.
ADVICE = (
    (r"diffusion_lens\.list_pretrained\(\)", "diffusion-lens models"),
    (r"from_pretrained\('([^']*)'(?:, tokenizer='([^']*)')?\)", r"MODEL \1, with its tokenizer beside it"),
    (r"pass token='[^']*' or run", "run"),
    (r"pass token='[^']*'", "run `hf auth login`"),
    (r"(?:known_1000|counterfact|bake)\('([^']*)'\)", r"--data \1"),
    (r"ReversalCurse\.load\(folder\)", "--data FOLDER"),
    (r"\bn_ctx=(\d+)", r"\1 places"),
    (r"torch\.(float32|bfloat16|float16)", r"\1"),
    (r"answer_places=(-?\d+), but", r"--length leaves \1 places after the prompt, but"),
    (r"subject_start=, one of \[[^\]]*\], or with ", ""),
    (r" or \(\d+, \d+\)", ""),
    (r", or a collection of fact ids", ""),
    (r"\bone_canvas\b", "one-canvas"),
    (r"pass another folder as out=", "name another folder with --out"),
    (r"pass tokenizer='folder' to from_pretrained", "name one with --tokenizer"),
    (r"tokenizer='that folder'", "it as --tokenizer"),
    (r"give it person= and asked=", 'give it the fields "person" and "asked"'),
    (r"Try a smaller lr \((.*?)\) or a lower clip in a new folder", r"Try a smaller --lr (\1) and another --out"),
)


def is_refusal(error: BaseException) -> bool:
    """Whether an error says what was wrong with what was asked."""
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
        options: of the command, by the Python argument that each gives: {"cfg_scale": "--cfg-scale"}.
    """
    say: Any = getattr(error, "format_message", None)  # an error of the parser of arguments
    if say is not None:
        return _joined(say()), int(getattr(error, "exit_code", REFUSED))
    if is_refusal(error):
        # A KeyError's text is the repr of its message.
        message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        return _joined(in_options(message, options)), REFUSED
    fault = "a fault of the program or of this machine, not of what was asked; --debug shows where"
    return _joined(f"{type(error).__name__}: {error} ({fault})"), FAILED


def in_options(message: str, options: Mapping[str, str]) -> str:
    """A message with the command's options in place of Python arguments."""
    mention = r"subject_start=, one of (\[[^\]]*\]), or with occurrence=0 to \d+"
    if "occurrence" not in options:  # the fact stands in a file
        message = re.sub(mention, r'the field "subject_start", one of \1', message)
    for said, meant in ADVICE:
        message = re.sub(said, meant, message)
    named = {called: options[ours] for called, ours in CALLED.items() if ours in options}
    for argument, option in {**named, **options}.items():
        message = re.sub(rf"(?<![\w.]){argument}=(?=[^\s),.;:])", f"{option} ", message)
        message = re.sub(rf"(?<![\w.]){argument}=(?=[\s),.;:]|$)", option, message)
        message = re.sub(rf"(?<![\w.-]){argument} (is|masks|compares) ", rf"{option} \1 ", message)
        message = re.sub(rf"(?<![\w.-])(?<!the ){argument} (?=')", f"{option} ", message)
        if "_" in argument:  # such a word is no English one
            message = re.sub(rf"(?<![\w./'\"-]){argument}(?![\w/'\"-]|\.\w)", option, message)
    return message


def _joined(message: str) -> str:
    return " ".join(message.split())
