"""Loads tokenizers from plain files and saves them. No tokenizer class of a checkpoint is ever run.

`add_bos_token` in tokenizer_config.json decides whether BOS is prepended; without that setting, tokenizer.json does.
Thus Llama's and SMDM's tokenizers prepend BOS. LLaDA's, Dream's and Qwen's do not, although LLaDA and Dream have a BOS
token; LLaDA's chat template writes it.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diffusion_lens.model.text import MASK_TEXT
from diffusion_lens.settings import Whole
from weight_conversion import read_json_object, write_json

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token")


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of `tokenizer_config.json`; the ids of `added_tokens_decoder` are sorted and converted to int."""
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
    """The chat template, or several by name with the main one as "default". Files override the settings."""
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


# Names of tokens that a tokenizer keeps in reserve or that only texts of code contain, the likeliest first.
_SPARE = ("mask", "reserved|unused", "fim", "repo")
TOKENIZER_FILES = ("tokenizer.json", TOKENIZER_CONFIG)
PARTS = ("vocab.json", "merges.txt")
# All files of a repository that a tokenizer may need.
EVERY_FILE = (*TOKENIZER_FILES, *PARTS, CHAT_TEMPLATE, f"{MORE_TEMPLATES}/*.jinja")

# Tokenizer classes that apply byte-level BPE after this split. Dream's is Qwen2's, and has no tokenizer.json. Source:
# DreamLM/Dream `tokenization_dream.py`, transformers `models/qwen2/tokenization_qwen2.py`.
_QWEN2_CLASSES = ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def require_tokenizer(folder: Path) -> None:
    """Raise a `FileNotFoundError` that names the tokenizer files that a folder lacks."""
    needed = TOKENIZER_FILES if not has_parts(folder) else (*PARTS, TOKENIZER_CONFIG)
    if missing := [name for name in needed if not (folder / name).exists()]:
        raise FileNotFoundError(f"the tokenizer folder {folder} lacks {' and '.join(missing)}; put it there")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A fast tokenizer from `tokenizer.json`, or one of Qwen2's kind from `vocab.json` and `merges.txt`.

    Its special tokens and chat template come from `tokenizer_config.json`. `chat_template.jinja` and the files in
    `additional_chat_templates` override the templates there.

    Raises:
        FileNotFoundError: A file is missing; the message names it.
        ValueError: The content of a file does not fit its name.
    """
    require_tokenizer(folder)
    settings = read_settings(folder)
    special = {key: text_of(settings[key]) for key in SPECIAL_TOKENS if settings.get(key)}
    backend = _from_parts(folder, settings) if has_parts(folder) else _from_file(folder / TOKENIZER_FILES[0])
    for key, token in special.items():
        # The library would give it the next free id, which belongs to another row of the embedding or to none.
        if backend.token_to_id(token) is None:
            raise ValueError(
                f"{folder / TOKENIZER_CONFIG} names the {key} {token!r}, and the tokenizer beside it has no such "
                "token: fetch both again, or remove the entry"
            )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.init_kwargs["add_bos_token"] = settings.get("add_bos_token")
    tokenizer.chat_template = chat_template(folder, settings)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path, *, prepends_bos: bool) -> None:
    """Write a tokenizer with its chat template, so that `load_tokenizer` restores it.

    It replaces a tokenizer in the folder, including its chat templates.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".tokenizer.") as name:
        written = Path(name)
        try:
            tokenizer.save_pretrained(written)
        except Exception as error:  # the library raises that of a full disk without a type
            raise OSError(f"{folder / TOKENIZER_FILES[0]} was not written: {error}") from error
        settings = read_json_object(written / TOKENIZER_CONFIG)
        write_json({**settings, "add_bos_token": prepends_bos}, written / TOKENIZER_CONFIG)
        for stale in (folder / CHAT_TEMPLATE, *(folder / MORE_TEMPLATES).glob("*.jinja")):
            stale.unlink(missing_ok=True)
        for file in sorted(path for path in written.rglob("*") if path.is_file()):
            target = folder / file.relative_to(written)
            target.parent.mkdir(exist_ok=True)
            os.replace(file, target)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder contains a tokenizer."""
    return (folder / TOKENIZER_FILES[0]).exists() or has_parts(folder)


def has_parts(folder: Path) -> bool:
    """Whether a folder contains the files of Qwen2's kind of tokenizer instead of `tokenizer.json`."""
    return not (folder / TOKENIZER_FILES[0]).exists() and all((folder / name).exists() for name in PARTS)


def prepends_bos(tokenizer: Any) -> bool:
    """Whether this tokenizer prepends BOS."""
    bos, setting = tokenizer.bos_token_id, tokenizer.init_kwargs.get("add_bos_token")
    if bos is None or setting is not None:
        return bos is not None and bool(setting)
    first: list[int] = list(tokenizer("a")["input_ids"])[:1]
    return first == [bos]


def read_mask(tokenizer: Any, mask_token_id: int | None) -> None:
    """Make the text "[MASK]" encode to the mask token where the tokenizer names it otherwise ("<|mdm_mask|>")."""
    if mask_token_id is None or tokenizer is None or mask_token_id >= len(tokenizer):
        return
    ids = tokenizer(MASK_TEXT, add_special_tokens=False)["input_ids"]
    if ids == [mask_token_id]:
        return
    # Where training took an ordinary token for [MASK], no text may turn into it by accident: it is written by its id.
    if mask_token_id not in tokenizer.added_tokens_decoder:
        if len(ids) == 1 and ids[0] in tokenizer.added_tokens_decoder and ids[0] != tokenizer.unk_token_id:
            raise ValueError(_other_mask(ids, mask_token_id))
        return
    name = str(tokenizer.convert_ids_to_tokens(mask_token_id))
    backend = tokenizer.backend_tokenizer
    steps = [normalizers.Replace(MASK_TEXT, name), *([backend.normalizer] if backend.normalizer else [])]
    backend.normalizer = normalizers.Sequence(steps)
    # The token is matched in the normalised text, where it has replaced "[MASK]".
    backend.add_special_tokens([AddedToken(name, special=True, normalized=True)])
    tokenizer.mask_token = name
    if (ids := tokenizer(MASK_TEXT, add_special_tokens=False)["input_ids"]) != [mask_token_id]:
        raise ValueError(_other_mask(ids, mask_token_id))


def _other_mask(ids: list[int], mask_token_id: int) -> str:
    return (
        f"the tokenizer encodes the text {MASK_TEXT!r} to the tokens {ids}, and the model's mask has the id "
        f"{mask_token_id}. Give the id of the tokenizer's [MASK] as mask_token_id, or leave it out, so that the "
        "tokenizer gives it; or pass the tokenizer that belongs to this id"
    )


def mask_token_of(tokenizer: Any, n_rows: int, given: str | Whole | None = None) -> int:
    """The id of the token that becomes [MASK] in a model of so many rows; see `AdaptSettings.mask_token`.

    Raises:
        ValueError: The tokenizer has no such token, the embedding no such row, or the token has another meaning.
    """
    added = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items()}
    used = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk", "sep", "cls")}
    used |= {id_ for id_, token in added.items() if token in str(tokenizer.chat_template or "")}
    free = len(tokenizer)  # the tokenizer gets [MASK] as its next token
    named = [id_ for name in _SPARE for id_ in sorted(added) if re.search(name, added[id_], re.IGNORECASE)]
    spare = [id_ for id_ in dict.fromkeys(named) if id_ not in used and id_ < n_rows]
    chosen: Any = [*spare, free][0] if given is None else given
    if isinstance(given, str):
        chosen = {MASK_TEXT: free, **tokenizer.get_vocab()}.get(given)
    wrong = ""
    if chosen is None:
        wrong = "no token of the tokenizer"
    elif chosen in used or (chosen < free and chosen not in added):
        wrong = "a token that texts contain"
    elif chosen > n_rows:
        wrong = f"beyond the {n_rows} rows of the embedding"
    if wrong:
        such = f", such as {[added[id_] for id_ in spare[:3]]}" if spare else ""
        raise ValueError(
            f"mask_token={given!r} is {wrong}: give a special token that is not used otherwise{such}, the id of one or "
            f"of an unused row, or {MASK_TEXT!r} for a new one"
        )
    return int(chosen)


def check_special_ids(tokenizer: Any, d_vocab: int) -> None:
    """Raise a `ValueError` that names a special token whose id has no row in the model's embedding."""
    for key in SPECIAL_TOKENS:
        id_ = getattr(tokenizer, f"{key}_id", None)
        if key != "mask_token" and id_ is not None and not 0 <= id_ < d_vocab:
            raise ValueError(
                f"the tokenizer's {key} {getattr(tokenizer, key)!r} has the id {id_}, and the model embeds {d_vocab} "
                "tokens: pass the tokenizer that belongs to this checkpoint"
            )


def _from_file(path: Path) -> Tokenizer:
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"{path} is not a fast tokenizer: {error}; fetch it again") from error
    ids = backend.get_vocab()
    if len(set(ids.values())) < len(ids):
        shared = next(id_ for id_, n in Counter(ids.values()).items() if n > 1)
        tokens = sorted(token for token, id_ in ids.items() if id_ == shared)
        raise ValueError(f"{path} gives the id {shared} to {len(tokens)} tokens, {tokens[:3]}; fetch it again")
    for added in read_json_object(path).get("added_tokens") or ():
        _check_id(backend, added["content"], added["id"], path)
    return backend


def _check_id(backend: Tokenizer, token: str, id_: int, source: Path) -> None:
    """Raise a `ValueError` if an added token has not the id that its file gives.

    The library ignores that id and assigns the next one after the vocabulary.
    """
    if (actual := backend.token_to_id(token)) != id_:
        raise ValueError(
            f"{token!r} has the id {id_} in {source}, but after the vocabulary it gets the id {actual}; fetch the "
            "files of the tokenizer again"
        )


def _from_parts(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Qwen2's tokenizer, with the added tokens of `tokenizer_config.json` at their ids."""
    if (kind := settings.get("tokenizer_class")) not in _QWEN2_CLASSES:
        raise ValueError(
            f"{folder} contains {' and '.join(PARTS)} of a {kind!r}; these files are read for "
            f"{', '.join(_QWEN2_CLASSES)} only: add its {TOKENIZER_FILES[0]}"
        )
    try:
        bpe = models.BPE.from_file(*(str(folder / name) for name in PARTS))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"{' and '.join(PARTS)} in {folder} do not fit together: {error}; fetch them again") from error
    backend = Tokenizer(bpe)
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    for id_, token in settings.get("added_tokens_decoder", {}).items():
        backend.add_tokens([AddedToken(**{key: value for key, value in token.items() if key != "__type"})])
        _check_id(backend, token["content"], id_, folder / TOKENIZER_CONFIG)
    return backend
