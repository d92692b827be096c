"""Reads and checks `tokenizer_config.json` and the chat templates beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weight_conversion import read_json_object

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token")


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of `tokenizer_config.json`; the ids of `added_tokens_decoder` are sorted and converted to int.

    Raises:
        ValueError: An entry does not have the usual form; the message names the file and the entry.
    """
    path = folder / TOKENIZER_CONFIG
    settings = read_json_object(path)
    for key in SPECIAL_TOKENS:
        if settings.get(key) and not isinstance(text_of(settings[key]), str):
            raise _misshapen(path, key, settings[key], 'a string, or an object with "content"')
    if not isinstance(settings.get("add_bos_token"), bool | None):
        raise _misshapen(path, "add_bos_token", settings["add_bos_token"], "true or false")
    added = settings.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(_is_added_token(*item) for item in added.items()):
        raise _misshapen(path, "added_tokens_decoder", added, 'an object of ids, each with a token\'s "content"')
    settings["added_tokens_decoder"] = {int(id_): added[id_] for id_ in sorted(added, key=int)}
    return settings


def chat_template(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by name with the main one as "default". Files override the settings.

    Raises:
        ValueError: A template is not a string or not a Jinja template; the message names its source.
    """
    path, setting = folder / TOKENIZER_CONFIG, settings.get("chat_template")
    entries = setting if isinstance(setting, list) else [{"name": "default", "template": setting or ""}]
    if not all(isinstance(entry, dict) and _are_strings(entry.get("name"), entry.get("template")) for entry in entries):
        raise _misshapen(path, "chat_template", setting, 'a string, or a list of objects with "name" and "template"')
    templates = {entry["name"]: (entry["template"], path) for entry in entries}
    if (folder / CHAT_TEMPLATE).exists():
        templates["default"] = _read(folder / CHAT_TEMPLATE)
    for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        templates[file.stem] = _read(file)
    for name, (template, source) in templates.items():
        check_template(name, template, source)
    by_name = {name: template for name, (template, _) in templates.items() if template}
    return by_name.get("default") if set(by_name) <= {"default"} else by_name


def check_template(name: str, template: str, source: Path) -> None:
    """Raise a `ValueError` if a template cannot be parsed; it is not run.

    Unknown tags are accepted, because transformers adds tags to Jinja's.
    """
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except (TemplateSyntaxError, RecursionError) as error:
        reason = str(error) or "nested too deep"
        if "unknown tag" not in reason:
            raise ValueError(
                f"the chat template {name!r} in {source} is not a Jinja template: {reason}; fetch it again or remove it"
            ) from error


def text_of(token: Any) -> Any:
    """The text of a special token, which may be given as an object with flags."""
    return token.get("content") if isinstance(token, Mapping) else token


def _is_added_token(id_: str, token: Any) -> bool:
    flags = {"lstrip", "rstrip", "normalized", "single_word", "special"}
    return (
        id_.isdecimal()
        and isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and all(key in {"content", "__type"} or (key in flags and isinstance(token[key], bool)) for key in token)
    )


def _are_strings(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _read(path: Path) -> tuple[str, Path]:
    try:
        return path.read_text(encoding="utf-8"), path
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; fetch it again, or delete it") from error


def _misshapen(path: Path, key: str, value: object, form: str) -> ValueError:
    return ValueError(f"{path} gives {key}={str(value)[:60]!r}; it should be {form}. Fetch the file again")
