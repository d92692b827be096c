"""Options of commands: each is declared once, as a setting (`diffusion_lens.settings`) with its help and its check.

    @command()
    def trace(fact: FactOptions, given: TraceFields, chosen: ModelChoice, report: FolderReport) -> None:

- `name: type = setting(default, help, check)` is an option of this command; the default `...` makes it required.
- An argument whose annotation is a dataclass, such as `ModelChoice`, is a group: its settings are options, and the
  command gets the object. An option that two groups have is that of the first; one that the command declares too is
  the command's. The groups of `diffusion_lens.settings.shared` are the settings of functions of the library.
- What a setting cannot say is written as typer has it: `name: Annotated[type, typer.Option(...)] = default`.

Groups that several commands share, and checks of their own, are at the end.
"""

import dataclasses
import re
from collections.abc import Callable
from copy import copy
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, SupportsIndex, get_args, get_origin

import typer
from typer.models import ArgumentInfo

from diffusion_lens.cli.app import app
from diffusion_lens.cli.report import Report
from diffusion_lens.settings import Settings, at_least, check_seed, fields_of, setting
from diffusion_lens.settings.shared import CanvasFields

if TYPE_CHECKING:
    from diffusion_lens.facts.fact import Fact

Command = Callable[..., None]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A published name (see `diffusion-lens models`), a checkpoint file, a folder, or a hub repository "
        "(owner/name). NAME@MODE is one mode of a checkpoint that is several models, as --mode.",
    ),
]
PROMPT = Parameter(
    "after_model",
    Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[str | None, typer.Argument(metavar="PROMPT", help="The same as --prompt.")],
)
PLAIN = (bool, float, int, str, Path)


def command(**helps: str | None) -> Callable[[Command], Command]:
    """Register a function as a command.

    Args:
        helps: Other help texts for options of groups; `None` leaves an option out.
    """

    def register(function: Command) -> Command:
        arguments = signature(function).parameters
        groups: dict[str, Any] = {
            name: each.annotation for name, each in arguments.items() if dataclasses.is_dataclass(each.annotation)
        }
        own = {name: _declared(each) for name, each in arguments.items() if name not in groups}
        declared: dict[str, Any] = {}
        for name in arguments:
            of_group = [each for each in dataclasses.fields(groups[name]) if _is_option(each)] if name in groups else []
            new = {name: own[name]} if name in own else {each.name: own.get(each.name, each) for each in of_group}
            declared |= {each: new[each] for each in new if each not in declared}
        left_out = {name for name, help in helps.items() if help is None} - own.keys()
        options = [_option(name, each, helps.get(name)) for name, each in declared.items() if name not in left_out]
        prompt_needed = any(each.name == "prompt" and each.default is Parameter.empty for each in options)
        if "prompt" in declared:
            options = [*(each.replace(default=None) if each.name == "prompt" else each for each in options), PROMPT]

        names_of = ((name, each.metadata.get("option")) for name, each in declared.items())
        spelt = {name: option for name, option in names_of if isinstance(option, str)}

        @wraps(function)
        def called(**given: Any) -> None:
            if "prompt" in declared:
                given["prompt"] = _one_prompt(given.pop(PROMPT.name), given["prompt"], prompt_needed)
            for name, each in own.items():
                check = each.metadata.get("check")
                if check is not None and given[name] is not None:
                    given[name] = check(name, given[name])
            values: dict[str, Any] = {name: given[name] for name in own}
            for name, group in groups.items():
                names = {each.name for each in dataclasses.fields(group) if each.init}
                values[name] = group(**{each: given[each] for each in given.keys() & names})
                if isinstance(values[name], Report):
                    values[name].command = function.__name__.replace("_", "-")
                    values[name].settings = {spelt.get(each, each): value for each, value in given.items()}
            function(**values)

        def place(option: Parameter) -> int:
            """Positional arguments come first, then the options of the command, then those of its groups."""
            is_argument = isinstance(option.annotation.__metadata__[0], ArgumentInfo)
            return 0 if is_argument else 1 if option.name in own else 2

        options.sort(key=place)
        vars(called)["__signature__"] = Signature(options)
        called.__annotations__ = {each.name: each.annotation for each in options}
        return app.command()(called)

    return register


def _one_prompt(argument: str | None, option: str | None, is_needed: bool) -> str | None:
    """The prompt of a command, from its argument or its option."""
    if argument is not None and option is not None:
        raise ValueError(f"two prompts are given, {argument!r} after the model and {option!r} with --prompt: give one")
    prompt = option if argument is None else argument
    if prompt is None and is_needed:
        raise typer.BadParameter("give the prompt after the model, or with --prompt", param_hint="PROMPT")
    return prompt


def _declared(argument: Parameter) -> Any:
    """An argument of a command as a field."""
    default = ... if argument.default is Parameter.empty else argument.default
    each: Any = copy(default) if isinstance(default, dataclasses.Field) else dataclasses.field(default=default)
    each.name, each.type = argument.name, argument.annotation
    return each


def _is_option(each: Any) -> bool:
    return get_origin(each.type) is Annotated or ("help" in each.metadata and each.metadata["option"])


def _option(name: str, each: Any, help: str | None) -> Parameter:
    """The option of a field. One that is a sequence takes values with commas, or several options."""
    default = Parameter.empty if each.default in (..., dataclasses.MISSING) else each.default
    declare = partial(Parameter, name, Parameter.KEYWORD_ONLY, default=default)
    if get_origin(each.type) is Annotated:
        return declare(annotation=each.type)
    # Python's help has quotation marks around names, which a shell does not need.
    spelt, help = each.metadata["option"], re.sub(r'"(\w+)"', r"\1", help or each.metadata["help"])
    option = f"--{(spelt if isinstance(spelt, str) else name).replace('_', '-')}"
    kinds = {get_origin(kind) or kind for kind in (*get_args(each.type), each.type)}
    if list in kinds:
        return declare(annotation=Annotated[each.type, typer.Option(option, help=help)])
    if plain := [kind for kind in PLAIN if kind in kinds]:
        optional: Any = plain[0] | None if default is None else plain[0]
        if plain[0] is bool and default is not False:
            option = f"{option}/--no-{option.removeprefix('--')}"
        return declare(annotation=Annotated[optional, typer.Option(option, help=help)])
    entry: Any = int if any({int, SupportsIndex} & {*get_args(kind)} for kind in get_args(each.type)) else str
    several = f"{help} Several: with commas, or the option again."
    made = typer.Option(option, option.removesuffix("s"), help=several, callback=_split_as(entry))
    return declare(annotation=Annotated[list[str] | None, made])


def _split_as(entry: Callable[[str], Any]) -> Callable[[Any, Any, Any], Any]:
    """Turn texts such as "0,3,-1" into the values that they list."""

    def split(context: Any, parameter: Any, texts: Any) -> Any:  # Signature of a typer callback.
        listed = [text.strip() for each in texts or () for text in each.split(",")]
        try:
            return [entry(text) for text in listed] or None
        except ValueError:
            raise ValueError(
                f"{parameter.name}={','.join(listed)!r}; give whole numbers, with commas between"
            ) from None

    return split


def each_from_0(name: str, values: list[int]) -> list[int]:
    """Numbers of which each is at least 0."""
    return [at_least(0, name, value) for value in values]


# Settings of several commands.
LENGTH: Any = fields_of(CanvasFields)["length"]
LENGTH_OF_STUDY = (
    "Number of positions of the canvas, including the prompt. Default: that of the data set, or the training length of "
    "the model if it is shorter."
)
SEED = setting(0, "Seed of the random number generator.", check_seed)


@dataclasses.dataclass(frozen=True)
class FactOptions(Settings):
    """A fact."""

    prompt: str = setting(..., 'Text before the answer, e.g. "Gustav Geisser is the".')
    subject: str = setting(..., "Subject of the fact, a part of the prompt.")
    answer: str = setting(..., 'Answer with its leading space, e.g. " brave drummer of Rolsen.".')

    def fact(self, occurrence: int | None, answer: str | None = None) -> "Fact":
        """The fact, with another answer if one is given; `occurrence` says which mention of the subject is meant."""
        from diffusion_lens.facts.fact import Fact

        fact = Fact(self.prompt, self.subject, answer or self.answer)
        start, _ = fact.subject_characters(occurrence)
        return fact if occurrence is None else dataclasses.replace(fact, subject_start=start)


@dataclasses.dataclass(frozen=True)
class FactsOptions(Settings):
    """The facts of a study."""

    data: str | None = setting(
        None,
        "site, site-attributes, toy, reversal-curse, known-1000, parent-child, poems, or a path: a .json, .jsonl or "
        ".csv file of facts, a folder of such files, parent_child_pairs.csv, poem_data.json, files of GenWiki, "
        "known_1000.json or counterfact.json. Default: the facts of a bundled model's training, otherwise "
        "reversal-curse.",
    )
    trained: str | None = setting(None, "Only facts trained in this direction: p2d, d2p or both.")
    asked: str | None = setting(None, "Only queries in this direction: p2d or d2p.")
    limit: int | None = setting(
        None, "Largest number of facts per pair of directions (trained, queried), evenly spread.", partial(at_least, 1)
    )

    def source(self, model: str, outline_only: bool) -> Any:
        """The data set; by default that of a model's training."""
        from diffusion_lens.data.fact_files import default_source, open_source

        return open_source(self.data or default_source(model), outline_only=outline_only)
