"""Small random checkpoints in the formats of LLaDA's and Dream's repositories, each with a tokenizer like theirs."""

import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from weight_conversion import Architecture, export

FIRST, MASK = 266, 267
TEXT = "The mask is where Ada's 42 words go, and  déjà vu stays.\n\nSo: THE END"


def ours(folder: Path, family: str, **changes) -> HookedDiffusionTransformer:
    """A random model of a family that Hugging Face has no code for, exported in that family's format."""
    shape = Architecture(
        family=family,
        name="published",
        n_layers=2,
        d_model=32,
        n_heads=4,
        n_key_value_heads=4 if family == "llada" else 2,
        d_head=8,
        d_mlp=48,
        d_vocab=300,
        d_vocab_out=300,
        n_ctx=128,
        attention_dir="bidirectional",
        readout="in_place" if family == "llada" else "shifted",
        mask_token_id=MASK,
        qkv_bias=family == "dream",
        rotation="float32" if family == "llada" else "activation",
    )
    model = HookedDiffusionTransformer(DiffusionConfig.from_architecture(replace(shape, **changes), device="cpu"))
    export(model.state_dict(), model.cfg.architecture, folder / "model.safetensors")
    return model


def shard(folder: Path) -> None:
    """Break the one file into two with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def bytes_tokenizer(*added: str) -> Tokenizer:
    """Byte-level BPE like that of all these families: 256 bytes, then some merges, then from `FIRST` on `added`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=FIRST, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def words(folder: Path, tokenizer: Tokenizer, **settings) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


LLADA_TEMPLATE = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
LLADA_ADDED = ("<|startoftext|>", "<|mdm_mask|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def llada_words(folder: Path) -> Path:
    """As LLaDA's: a BOS that only the chat template writes, and a mask that the config alone knows for one."""
    settings = dict(add_bos_token=False, bos_token="<|startoftext|>", chat_template=LLADA_TEMPLATE)
    return words(folder, bytes_tokenizer(*LLADA_ADDED), **settings)


def dream_words(folder: Path, **changes) -> Path:
    """As Dream's: no tokenizer.json, the parts of Qwen2's, and added tokens in the config."""
    folder.mkdir(exist_ok=True)
    bytes_tokenizer().model.save(str(folder))
    names = ("<|endoftext|>", "<|mask|>", "<|beginoftext|>")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(FIRST + i): {"content": name, **flags} for i, name in enumerate(names)}
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
        **changes,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
