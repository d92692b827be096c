"""Fenced blocks of a Markdown page, and a runner of the Python among them."""

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

# Pages whose Python takes longest. The build of the site runs it, and `make test` does not.
LONG = {"api/logit_lens.md", "circuits.md", "dictionaries.md", "finetune.md", "write_a_hook.md"}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: what follows the opening backticks, such as "python" or "{toctree}".
        text: what stands between the fences.
        line: the line of the page on which the text begins.
        output: the text of a block of the language "output" right after it, `None` if there is none.
    """

    language: str
    text: str
    line: int
    output: str | None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = list(re.finditer(r"^(`{3,})(\S*)[^\n]*\n(.*?)^\1$", text, re.MULTILINE | re.DOTALL))
    kept = []
    for i, block in enumerate(found):
        right_after = [
            other[3]
            for other in found[i + 1 : i + 2]
            if other[2] == "output" and not text[block.end() : other.start()].strip()
        ]
        line = text[: block.start(3)].count("\n") + 1
        kept.append(Block(block[2], block[3], line, right_after[0] if right_after else None))
    return kept


def shown_files(page: Path) -> dict[str, str]:
    """Text of each file that a session of the page shows with `cat`, or a block under its name, by this name."""
    sessions = "".join(block.text for block in blocks(page) if block.language == "console")
    captioned = (re.match(r":caption: (\S+)\n\n?", block.text) for block in blocks(page))
    return {
        **dict(re.findall(r"^\$ cat (\S+)\n((?:(?!\$ ).*\n)*)", sessions, re.MULTILINE)),
        **{named[1]: named.string[named.end() :] for named in captioned if named and "." in named[1]},
    }


def run_python(page: Path) -> Iterator[tuple[Block, str]]:
    """Run the Python of a page in order, in one namespace and the current folder; yields what each block prints.

    The files that the page shows are there.
    """
    for name, text in shown_files(page).items():
        Path(name).write_text(text, encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            # Empty lines before it make a traceback point into the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with redirect_stdout(io.StringIO()) as said:
                exec(code, namespace)
            yield block, said.getvalue()


_DECIMAL = re.compile(r" *-?\d+\.\d+(?:e[+-]\d+)?")


def same_output(printed: str, shown: str) -> bool:
    """Whether a page shows what its code prints: the same text, and decimal numbers to one unit of their last place.

    Sums are rounded otherwise on another CPU, and so a few last places, and the sign of a zero.
    """
    if _DECIMAL.sub("#", printed) != _DECIMAL.sub("#", shown):
        return False
    for one, other in zip(_DECIMAL.findall(printed), _DECIMAL.findall(shown), strict=True):
        ours, theirs = Decimal(one.strip()), Decimal(other.strip())
        unit = max(number.as_tuple().exponent for number in (ours, theirs))
        if abs(ours - theirs) > Decimal(1).scaleb(unit):
            return False
    return True
