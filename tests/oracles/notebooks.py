"""Runs the code cells of a Jupyter notebook with some strings replaced, and says of each cell whether it ran.

The cells run in IPython within this process, as Jupyter would run them one after the other: a cell that fails does not
stop those after it. Pictures go nowhere.
"""

import contextlib
import io
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = RUNS, WRONG, FAILS, LEFT_OUT = "runs", "wrong", "fails", "left out"


@dataclass(frozen=True)
class Cell:
    """A code cell: its number among the code cells, from 1, the heading above it, and its code."""

    number: int
    section: str
    code: str


@dataclass(frozen=True)
class Changes:
    """What is changed in a notebook before it runs. A key is a string that its code contains.

    Attributes:
        replaced: For each kind of change ("prompts"), old strings with the new ones.
        patterns: For each kind of change ("model"), regular expressions with what replaces a match.
        left_out: Cells that do not run, with the reason.
        checks: Expressions that must be true after a cell; otherwise its result is "wrong".
        reasons: Words for a failure. The key is a string of the error or of the cell.
        notes: What to know about a cell that runs.
    """

    replaced: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    patterns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def apply(self, code: str) -> tuple[str, list[str]]:
        """The changed code, and the kinds of change that it contains."""
        kinds = []
        for kind, strings in self.replaced.items():
            changed = code
            for old, new in strings.items():
                changed = changed.replace(old, new)
            kinds += [kind] * (changed != code)
            code = changed
        for kind, expressions in self.patterns.items():
            changed = code
            for pattern, new in expressions.items():
                changed = re.sub(pattern, new, changed)
            kinds += [kind] * (changed != code)
            code = changed
        return code, kinds

    def unused(self, cells: Sequence[Cell]) -> list[str]:
        """Strings that no cell contains."""
        strings = [*self.left_out, *self.checks, *self.notes, *(old for each in self.replaced.values() for old in each)]
        return [string for string in strings if not any(string in cell.code for cell in cells)]


def code_cells(path: Path) -> list[Cell]:
    """The code cells of a notebook that are not empty."""
    cells: list[Cell] = []
    section, number = "", 0
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            headings = re.findall(r"^\s*#{1,6} +(.+?)\s*$", source, re.MULTILINE)
            section = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", headings[-1]) if headings else section
        elif cell["cell_type"] == "code":
            number += 1
            if source.strip():
                cells.append(Cell(number, section, source))
    return cells


def run_notebook(cells: Sequence[Cell], changes: Changes, namespace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run the cells in one IPython shell, which begins with the names of `namespace`.

    Returns:
        For each cell its number and section, the kinds of change in it, its result ("runs", "wrong", "fails" or "left
        out"), whether an expression was checked after it, the reason if the result is not "runs", and a note.

    Raises:
        ValueError: A string of `changes` occurs in no cell: the notebook is another version than the changes are for.
    """
    from IPython.core.interactiveshell import InteractiveShell

    if unused := changes.unused(cells):
        raise ValueError(f"no cell contains {unused}: the changes were written for another version of the notebook")
    shell = InteractiveShell.instance()
    shell.extension_manager.load_extension("storemagic")  # as Jupyter does
    shell.push(dict(namespace))
    failed: list[Cell] = []
    rows = []
    for cell in cells:
        code, kinds = changes.apply(cell.code)
        result, reason, note, check = RUNS, "", "", ""
        if left_out := _found(changes.left_out, cell.code):
            result, reason, kinds = LEFT_OUT, left_out, []
        elif (error := _error_of(shell, code)) is not None:
            result = FAILS
            reason = (
                missing_name(error, failed) or _found(changes.reasons, f"{error}\n{cell.code}") or first_sentence(error)
            )
            failed.append(cell)
        else:
            note, check = _found(changes.notes, cell.code), _found(changes.checks, cell.code)
            if check and _error_of(shell, f"assert {check}") is not None:
                result, reason = WRONG, f"`{check}` is not true"
        row = {"cell": cell.number, "section": cell.section, "changed": kinds, "result": result}
        rows.append({**row, "checked": bool(check), "reason": reason, "note": note})
    return rows


def missing_name(error: BaseException, failed: Sequence[Cell]) -> str:
    """Which of the cells that failed would have made the name that a cell lacks; empty if none or no name."""
    if isinstance(error, NameError) and error.name:
        name = re.escape(error.name)
        made = re.compile(rf"^\s*(?:def |class )?(?:\w+, *)*{name}\b[\w, ]*(?::[^=\n]+)?(?:=[^=]|[(:])", re.MULTILINE)
        for cell in failed:
            if made.search(cell.code):
                return f"needs `{error.name}` of cell {cell.number}"
    return ""


def first_sentence(error: BaseException) -> str:
    """The kind of an error and the beginning of its message, in one line."""
    first = re.split(r"(?<=[a-z)\]'])[.:] ", " ".join(str(error).split()))[0]
    return f"{type(error).__name__}: {first[:160]}".rstrip(": ")


def _found(texts: Mapping[str, str], code: str) -> str:
    return next((text for string, text in texts.items() if string in code), "")


def _error_of(shell: Any, code: str) -> BaseException | None:
    """What a cell raises; its output is dropped."""
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = shell.run_cell(code, store_history=False, silent=True)
    error: BaseException | None = outcome.error_before_exec or outcome.error_in_exec
    return error
