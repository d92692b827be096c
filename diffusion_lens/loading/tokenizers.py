"""Tokenizers from plain files, and back: no tokenizer class of a checkpoint is ever run.

BOS is prepended where `add_bos_token` in tokenizer_config.json says so, and where it says nothing, if tokenizer.json
does it itself. So Llama's and SMDM's tokenizers prepend it; LLaDA's, Dream's and Qwen's do not, though LLaDA and Dream
have one. LLaDA's chat template writes it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diffusion_lens.model.text import MASK_TEXT
from weight_conversion import read_json, write_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PARTS = ("vocab.json", "merges.txt")
CHAT_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
# Everything of a repository that a tokenizer may be made of.
EVERY_FILE = (*TOKENIZER_FILES, *PARTS, CHAT_TEMPLATE, f"{MORE_TEMPLATES}/*.jinja")

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token")

# Classes whose tokenizer is byte-level BPE behind this split. Dream's is Qwen2's, and has no tokenizer.json. Source:
# DreamLM/Dream `tokenization_dream.py`, transformers `models/qwen2/tokenization_qwen2.py`.
_QWEN2_CLASSES = ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A fast tokenizer from `tokenizer.json`, or of Qwen2's kind from `vocab.json` and `merges.txt`.

    Its special tokens and chat template come from `tokenizer_config.json`; `chat_template.jinja` and the files of
    `additional_chat_templates` come before what that says.

    Raises:
        FileNotFoundError: a file is missing (named).
        ValueError: a file is not what its name says.
    """
    needed = TOKENIZER_FILES if not has_parts(folder) else (*PARTS, TOKENIZER_FILES[1])
    if missing := [name for name in needed if not (folder / name).exists()]:
        raise FileNotFoundError(f"the tokenizer folder {folder} lacks {' and '.join(missing)}; put it there")
    settings = read_json(folder / TOKENIZER_FILES[1])
    special = {key: _text_of(settings[key]) for key in _SPECIAL_TOKENS if settings.get(key)}
    backend = _from_parts(folder, settings) if has_parts(folder) else _from_file(folder / TOKENIZER_FILES[0])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.init_kwargs["add_bos_token"] = settings.get("add_bos_token")
    tokenizer.chat_template = _chat_template(folder, settings)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path, *, prepends_bos: bool) -> None:
    """Write a tokenizer, its chat template included, so that `load_tokenizer` reads the same."""
    tokenizer.save_pretrained(folder)
    settings = read_json(folder / TOKENIZER_FILES[1])
    write_json({**settings, "add_bos_token": prepends_bos}, folder / TOKENIZER_FILES[1])


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies in a folder."""
    return (folder / TOKENIZER_FILES[0]).exists() or has_parts(folder)


def has_parts(folder: Path) -> bool:
    """Whether there is no `tokenizer.json`, but what Qwen2's is made of."""
    return not (folder / TOKENIZER_FILES[0]).exists() and all((folder / name).exists() for name in PARTS)


def prepends_bos(tokenizer: Any) -> bool:
    """Whether texts of this tokenizer begin with BOS."""
    bos, said = tokenizer.bos_token_id, tokenizer.init_kwargs.get("add_bos_token")
    if bos is None or said is not None:
        return bos is not None and bool(said)
    first: list[int] = list(tokenizer("a")["input_ids"])[:1]
    return first == [bos]


def read_mask(tokenizer: Any, mask_token_id: int | None) -> None:
    """Let the text "[MASK]" stand for a mask that the tokenizer knows by another name, as "<|mdm_mask|>"."""
    if mask_token_id is None or tokenizer is None or mask_token_id >= len(tokenizer):
        return
    if tokenizer(MASK_TEXT, add_special_tokens=False)["input_ids"] == [mask_token_id]:
        return
    name = str(tokenizer.convert_ids_to_tokens(mask_token_id))
    backend = tokenizer.backend_tokenizer
    steps = [normalizers.Replace(MASK_TEXT, name), *([backend.normalizer] if backend.normalizer else [])]
    backend.normalizer = normalizers.Sequence(steps)
    # Looked for in the normalised text, where it has taken the place of "[MASK]".
    backend.add_special_tokens([AddedToken(name, special=True, normalized=True)])
    tokenizer.mask_token = name


def _from_file(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"{path} is not a fast tokenizer: {error}; fetch it again") from error


def _from_parts(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Qwen2's tokenizer, its added tokens at the ids that `tokenizer_config.json` gives them."""
    if (kind := settings.get("tokenizer_class")) not in _QWEN2_CLASSES:
        raise ValueError(
            f"{folder} holds {' and '.join(PARTS)} of a {kind!r}, which are read for {', '.join(_QWEN2_CLASSES)} only; "
            f"add its {TOKENIZER_FILES[0]}"
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
    for id_, token in sorted((int(id_), token) for id_, token in settings.get("added_tokens_decoder", {}).items()):
        backend.add_tokens([AddedToken(**{key: value for key, value in token.items() if key != "__type"})])
        if backend.token_to_id(token["content"]) != id_:
            raise ValueError(
                f"{token['content']!r} has the id {id_} in {folder / TOKENIZER_FILES[1]}, but comes out as "
                f"{backend.token_to_id(token['content'])} after {PARTS[0]}; fetch both again"
            )
    return backend


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """One template, or several by name with the usual one as "default"."""
    said = settings.get("chat_template")
    templates = {each["name"]: each["template"] for each in said} if isinstance(said, list) else {"default": said}
    if (folder / CHAT_TEMPLATE).exists():
        templates["default"] = (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    kept = {name: template for name, template in templates.items() if template}
    return kept.get("default") if set(kept) <= {"default"} else kept


def _text_of(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
