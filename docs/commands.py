"""Sphinx directives for the command line: `{commands}` shows the help of all commands, `{exit-codes}` exit codes."""

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import markdown, parsed
from typer.main import get_command

from diffusion_lens.cli import app as application


def commands() -> dict[str, Any]:
    """The commands by name, in the order of the application's help."""
    group: Any = get_command(application)
    return {name: group.commands[name] for name in group.list_commands(None)}


def command_lines(name: str, command: Any) -> Iterator[str]:
    """The help of one command in Markdown: description, example, arguments and options."""
    *description, example = command.help.split("\n\n")
    yield from (f"### {name}", "")
    for paragraph in description:
        yield from (plain(paragraph.replace("\n", " ")), "")
    yield from ("```sh", _broken(example.removeprefix("Example: ").replace("\n", " ")), "```", "")
    context = command.make_context(name, [], resilient_parsing=True)
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [(f"`{option}`", plain(meaning)) for option, meaning in filter(None, records)]
    if rows:
        yield from (*markdown(("argument or option", "meaning"), rows), "")


def exit_codes() -> list[tuple[str, str]]:
    """Exit codes and their meanings, from the docstring of the application's module."""
    docstring = import_module("diffusion_lens.cli.app").__doc__
    return re.findall(r"(?:^|\s{4,})(\d+)  (\S.*?)(?=\s{4,}|$)", str(docstring), re.MULTILINE)


def plain(text: str) -> str:
    """Text with all markup escaped, except `code`."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<>|\[\]])", r"\\\1", p) for p in pieces)


def _broken(command: str, width: int = 88) -> str:
    """A long command on several lines, broken before options."""
    lines = [""]
    for piece in re.split(r" (?=--)", command):
        if lines[-1] and len(f"{lines[-1]} {piece}") > width:
            lines[-1] += " \\"
            lines.append(f"    {piece}")
        else:
            lines[-1] = f"{lines[-1]} {piece}".strip() if len(lines) == 1 else f"{lines[-1]} {piece}"
    return "\n".join(lines)


class Commands(SphinxDirective):
    """`{commands}`: a section for each command."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, [line for name, command in commands().items() for line in command_lines(name, command)])


class ExitCodes(SphinxDirective):
    """`{exit-codes}`: a table."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, markdown(("code", "meaning"), [(f"`{code}`", meaning) for code, meaning in exit_codes()]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("commands", Commands)
    app.add_directive("exit-codes", ExitCodes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
