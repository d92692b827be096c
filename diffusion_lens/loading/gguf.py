"""GGUF files, in which llama.cpp keeps config, tokenizer and weights, usually rounded to a few bits.

A file of a Llama, Qwen2 or Qwen3 is converted once, into a folder of float32 safetensors, config.json and tokenizer,
which is then loaded like any other. The folders are in a cache beside the hub's (`HF_ASSETS_CACHE`, or `cache_dir`),
under the version of the conversion and the SHA-256 of the file, so that a changed file is converted again. The package
`gguf` reads and dequantises, and transformers builds the tokenizer.

What a file says and this module does not read is an error: scaled rotary frequencies (Llama 3.1 and later have a tensor
`rope_freqs.weight`), sliding windows, experts, another rule by which text is split before the merges. llama.cpp
permutes the rows of Llama's queries and keys for its interleaved rotation, which is undone here. Sources: llama.cpp
`convert_hf_to_gguf.py`, `gguf-py/gguf/constants.py`, `src/llama-vocab.cpp`.
"""

import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from huggingface_hub import cached_assets_path
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diffusion_lens.loading.catalogue import PUBLISHED, PackagedFile, Repository
from diffusion_lens.loading.tokenizers import prepends_bos, save_tokenizer
from weight_conversion import sha256_of_file, write_json, write_safetensors
from weight_conversion.files import WHOLE
from weight_conversion.key_map import KeyMap
from weight_conversion.registry import recognise

GGUF = ".gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Keys of a file, after the name of its architecture, with those of config.json.
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Keys that have to repeat the length of a head, and one that counts the rows of the embedding, whose shape is known.
HEAD_LENGTHS, COUNTED = ("attention.value_length", "rope.dimension_count"), "vocab_size"
CONVERSION = "float32-1"  # folder of the cache; its number rises when files are converted otherwise
ARCHITECTURE, TOKENIZER, SPLIT = "general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"


def installed_file(packaged: PackagedFile) -> Path | None:
    """The file in the installed package, which is not imported; `None` if the package is not installed."""
    try:
        file = Path(str(distribution(packaged.package).locate_file(packaged.file)))
    except PackageNotFoundError:
        return None
    return file if file.is_file() else None


def packaged_file(name: str) -> Path | None:
    """The file of a published name in an installed package; `None` if there is none."""
    entry = PUBLISHED.get(name.lower())
    packaged = entry.packaged if isinstance(entry, Repository) else None
    return None if packaged is None else installed_file(packaged)


def converted(file: Path, cache_dir: str | Path | None = None, sha256: str | None = None) -> Path:
    """The folder with the converted content of a GGUF file; it is written on the first call, whole or not at all.

    Args:
        cache_dir: Folder for the converted files instead of `HF_ASSETS_CACHE`.
        sha256: SHA-256 that the file should have; any other is refused.

    Raises:
        ValueError: The file is truncated or no GGUF file, of another architecture, or says what is not read.
        ImportError: The package `gguf` is not installed.
    """
    found = sha256_of_file(file)
    if sha256 not in (None, found):
        raise ValueError(f"the SHA-256 of {file} is {found}, expected {sha256}: install its package again")
    folder = cached_assets_path("diffusion_lens", "gguf", CONVERSION, assets_dir=cache_dir) / found
    if not folder.exists():
        with TemporaryDirectory(dir=folder.parent, prefix=".part.") as part:
            whole = Path(part) / "whole"
            _convert(file, whole)
            try:
                os.rename(whole, folder)
            except OSError:
                if not folder.exists():  # otherwise another process has written it meanwhile
                    raise
    return folder


def _convert(file: Path, folder: Path) -> None:
    try:
        from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install 'diffusion-lens[real]'") from error
    try:
        reader = GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
        names = {key: reader.fields[key].contents() for key in (TOKENIZER, SPLIT) if key in reader.fields}
    except Exception as error:  # the package raises nothing narrower for bytes that make no sense
        raise ValueError(
            f"{file} is not a whole GGUF file ({file.stat().st_size:,} bytes): {error}. It may have been truncated "
            "while it was copied: delete it and fetch it again"
        ) from error

    # 1. What the network is, and whether every tensor fits it.
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    config = _config(fields, shapes, file)
    family = recognise(config, {}, str(file))
    key_map = KeyMap(family.rules, family.read_architecture(config, {}))
    name_map = get_tensor_name_map(MODEL_ARCH[config["model_type"].upper()], config["num_hidden_layers"])
    theirs = {name_map.get_name(name, (".weight", ".bias")): name for name in key_map.their_shapes}
    key_map.check({theirs.get(name, name): shape for name, shape in shapes.items()}, str(file))

    # 2. The tokenizer, which may be refused, before the weights, which take longest.
    folder.mkdir()
    if names.get(TOKENIZER, "none") not in ("none", "no_vocab"):
        tokenizer = _tokenizer(file, names)
        save_tokenizer(tokenizer, folder, prepends_bos=prepends_bos(tokenizer))

    # 3. The weights.
    tensors = {}
    for tensor in reader.tensors:
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(f"{tensor.name} of {file} is stored in a way that is not read: {error}") from error
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}.get(tensor.name.partition(".attn_")[2][:1])
        if config["model_type"] == "llama" and heads is not None:
            halves = values.reshape(config[heads], -1, 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        tensors[theirs[tensor.name]] = torch.from_numpy(np.array(values, dtype=np.float32))
    write_safetensors(tensors, folder / WHOLE, {"format": "pt"})
    write_json(config, folder / "config.json")


def _config(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], file: Path) -> dict[str, Any]:
    """The file's config as a config.json; a `ValueError` for what it says and `KEYS` does not have."""
    if (architecture := fields.get(ARCHITECTURE)) not in ARCHITECTURES:
        raise ValueError(
            f"{file} contains a model of the architecture {architecture!r}; of GGUF files those of "
            f"{', '.join(ARCHITECTURES)} are read. Pass the model's safetensors instead"
        )
    said = {
        key.removeprefix(f"{architecture}."): _shortest(value)
        for key, value in fields.items()
        if key.startswith(f"{architecture}.")
    }
    if unknown := sorted(set(said) - {*KEYS, *HEAD_LENGTHS, COUNTED}):
        raise ValueError(
            f"{file} gives {', '.join(f'{architecture}.{key}={said[key]!r}' for key in unknown[:4])}, which is not "
            "read from GGUF files: pass the model's safetensors instead"
        )
    if missing := [key for key in ("block_count", "embedding_length", "attention.head_count") if key not in said]:
        raise ValueError(f"{file} does not give {architecture}.{missing[0]}; fetch it again")
    if said["block_count"] > len(shapes):
        raise ValueError(f"{file} contains {len(shapes)} tensors, too few for its {said['block_count']} blocks")
    config = {theirs: said[key] for key, theirs in KEYS.items() if key in said}
    config.setdefault("num_key_value_heads", said["attention.head_count"])
    config.setdefault("head_dim", said["embedding_length"] // said["attention.head_count"])
    if other := [key for key in HEAD_LENGTHS if said.get(key, config["head_dim"]) != config["head_dim"]]:
        raise ValueError(
            f"{file} gives {architecture}.{other[0]}={said[other[0]]}, and its heads have {config['head_dim']} "
            "dimensions; heads that rotate in part, or whose values have another length, are not read"
        )
    biased = architecture != "qwen2" and "blk.0.attn_q.bias" in shapes
    return {
        "model_type": architecture,
        **config,
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "hidden_act": "silu",
        **({"attention_bias": True} if biased else {}),
    }


def _shortest(value: Any) -> Any:
    """A number that is stored in float32 as it was written, 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _digits_apart(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _composed(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()


def _whole_words_first(tokenizer: Tokenizer) -> None:
    tokenizer.model.ignore_merges = True


# How text is split before the merges, with what the published tokenizers have and transformers leaves out.
_SPLITS: dict[str, Callable[[Tokenizer], None]] = {
    "gpt-2": lambda _: None,
    "llama-bpe": _whole_words_first,
    "qwen2": _composed,
    "smollm": _digits_apart,
}


def _tokenizer(file: Path, names: Mapping[str, str]) -> PreTrainedTokenizerFast:
    """The file's tokenizer as it was published."""
    split = names.get(SPLIT)
    if names[TOKENIZER] == "gpt2" and split not in _SPLITS:
        raise ValueError(
            f"{file} splits text by the rule {split!r}; known are {', '.join(_SPLITS)}, and another would give other "
            "tokens. Pass the model's safetensors, with its tokenizer.json, instead"
        )
    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # a vocabulary that makes no sense raises whatever it meets
        raise ValueError(f"{file} contains no tokenizer that transformers can build: {error}") from error
    if names[TOKENIZER] == "gpt2":
        _SPLITS[str(split)](tokenizer.backend_tokenizer)
    return tokenizer
