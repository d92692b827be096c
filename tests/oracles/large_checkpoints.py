"""Checkpoints with constant weights, as large as published ones, whose loading is measured."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from weight_conversion import Architecture, Experts, export, open_checkpoint, tensor_shapes, write_json
from weight_conversion.files import INDEX
from weight_conversion.key_map import KeyMap
from weight_conversion.registry import FAMILIES

LLADA_8B = Architecture(
    family="llada",
    name="two layers of LLaDA-8B",
    n_layers=2,
    d_model=4096,
    n_heads=32,
    n_key_value_heads=32,
    d_head=128,
    d_mlp=12288,
    d_vocab=126464,
    d_vocab_out=126464,
    n_ctx=4096,
    attention_dir="bidirectional",
    readout="in_place",
    mask_token_id=126336,
    rotary_base=500000.0,
)

# Five of the 64 experts, at their width.
LLADA_MOE = Architecture(
    family="llada_moe",
    name="two layers of LLaDA-MoE-7B-A1B",
    n_layers=2,
    d_model=2048,
    n_heads=16,
    n_key_value_heads=16,
    d_head=128,
    d_mlp=8192,
    d_vocab=4000,
    d_vocab_out=4000,
    n_ctx=4096,
    attention_dir="bidirectional",
    readout="in_place",
    mask_token_id=3999,
    rotary_base=50000.0,
    rotation="activation",
    qk_norm=True,
    experts=Experts(n_experts=5, n_chosen=4, d_expert=1024, layers=(True, True)),
)


def write_checkpoint(architecture: Architecture, path: Path) -> Path:
    """Write a checkpoint with constant weights and its config. A `.pth` file has the weights under "model"."""
    plain = path.with_suffix(".safetensors")
    shapes = tensor_shapes(architecture)
    export({name: torch.ones(shape) for name, shape in shapes.items()}, architecture, plain)
    if path.suffix != ".safetensors":
        source = open_checkpoint(plain).source
        torch.save({"model": {name: source.read(name).clone() for name in source.shapes()}}, path)
        plain.unlink()
    return path


def write_shards(architecture: Architecture, folder: Path, most_bytes: int = 10**9) -> Path:
    """Write a checkpoint in bfloat16 in shards of at most `most_bytes` (a tensor is never split), with their index."""
    family = FAMILIES[architecture.family]
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    shard_bytes = total = 0
    for name, shape in KeyMap(family.rules, architecture).their_shapes.items():
        size = 2 * torch.Size(shape).numel()
        if shards[-1] and shard_bytes + size > most_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = shape
        shard_bytes, total = shard_bytes + size, total + size
    weight_map: dict[str, str] = {}
    for i, shapes in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shapes, file)
        tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, folder / INDEX)
    write_json(family.write_config(architecture), folder / family.config_file)
    return folder
