"""What `tokenizer_config.json` and the chat templates beside it say, checked before anything is made of it."""

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
    """The content of `tokenizer_config.json`, the ids of `added_tokens_decoder` in order and as numbers.

    Raises:
        ValueError: an entry is not of the form that it has in every tokenizer (names file and entry).
    """
    path = folder / TOKENIZER_CONFIG
    settings = read_json_object(path)
    for key in SPECIAL_TOKENS:
        if settings.get(key) and not isinstance(text_of(settings[key]), str):
            raise _misshapen(path, key, settings[key], 'a text, or an object with "content"')
    if not isinstance(settings.get("add_bos_token"), bool | None):
        raise _misshapen(path, "add_bos_token", settings["add_bos_token"], "true or false")
    added = settings.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(_is_added_token(*item) for item in added.items()):
        raise _misshapen(path, "added_tokens_decoder", added, 'an object of ids, each with a token\'s "content"')
    settings["added_tokens_decoder"] = {int(id_): added[id_] for id_ in sorted(added, key=int)}
    return settings


def chat_template(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """One template, or several by name with the usual one as "default"; files come before what the settings say.

    Raises:
        ValueError: a template is no text, or no Jinja template (names where it stands).
    """
    path, said = folder / TOKENIZER_CONFIG, settings.get("chat_template")
    named = said if isinstance(said, list) else [{"name": "default", "template": said or ""}]
    if not all(isinstance(each, dict) and _are_texts(each.get("name"), each.get("template")) for each in named):
        raise _misshapen(path, "chat_template", said, 'a text, or a list of objects with "name" and "template"')
    templates = {each["name"]: (each["template"], path) for each in named}
    if (folder / CHAT_TEMPLATE).exists():
        templates["default"] = _read(folder / CHAT_TEMPLATE)
    for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        templates[file.stem] = _read(file)
    for name, (template, source) in templates.items():
        check_template(name, template, source)
    kept = {name: template for name, (template, _) in templates.items() if template}
    return kept.get("default") if set(kept) <= {"default"} else kept


def check_template(name: str, template: str, source: Path) -> None:
    """Raise a `ValueError` if a template cannot be parsed; it is not run.

    Tags that the library adds to Jinja's own are let through.
    """
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except (TemplateSyntaxError, RecursionError) as error:
        reason = str(error) or "nested too deep"
        if "unknown tag" not in reason:
            raise ValueError(
                f"the chat template {name!r} in {source} is no Jinja template: {reason}; fetch it again, or take it out"
            ) from error


def text_of(token: Any) -> Any:
    """The text of a special token, which may stand in an object with its flags."""
    return token.get("content") if isinstance(token, Mapping) else token


def _is_added_token(id_: str, token: Any) -> bool:
    flags = {"lstrip", "rstrip", "normalized", "single_word", "special"}
    return (
        id_.isdecimal()
        and isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and all(key in {"content", "__type"} or (key in flags and isinstance(token[key], bool)) for key in token)
    )


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _read(path: Path) -> tuple[str, Path]:
    try:
        return path.read_text(encoding="utf-8"), path
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}; fetch it again, or delete it") from error


def _misshapen(path: Path, key: str, value: object, form: str) -> ValueError:
    return ValueError(f"{path} gives {key}={str(value)[:60]!r}; it should be {form}. Fetch the file again")
