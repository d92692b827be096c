"""lit-gpt: SMDM's masked diffusion models and their autoregressive (AR) baselines (`nieshen/SMDM`).

Both variants have the same tensor names and shapes, but the embedding of a masked diffusion model has one row more than
its head has columns: the last row is [MASK]. Rotary tables were rounded to bfloat16 in training. Sources: ML-GSAI/SMDM
`lit_gpt/config.py`, `lit_gpt/diffmodel.py` (bidirectional), `lit_gpt/model.py` (causal).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families.family import IGNORED_KEYS, Config, ConfigKeys, Family
from weight_conversion.key_map import GroupMajorQKV, Rule

# name: (n_layer, n_head, n_embd, intermediate_size); every size has n_query_groups = n_head, vocabulary 32000 and
# block_size 2048.
PUBLISHED_SIZES: dict[str, tuple[int, int, int, int]] = {
    "6M": (6, 4, 256, 1024),
    "19M": (8, 6, 384, 1536),
    "34M": (8, 8, 512, 2048),
    "48M": (9, 9, 576, 2304),
    "66M": (10, 10, 640, 2560),
    "85M": (13, 10, 640, 2560),
    "75M": (16, 8, 640, 1600),
    "113M": (12, 12, 768, 3072),
    "142M": (15, 12, 768, 3072),
    "170M": (18, 12, 768, 3072),
    "180M": (14, 14, 896, 3584),
    "206M": (16, 14, 896, 3584),
    "231M": (18, 14, 896, 3584),
    "268M": (16, 16, 1024, 4096),
    "302M": (18, 16, 1024, 4096),
    "336M": (20, 16, 1024, 4096),
    "472M": (18, 10, 1280, 5120),
    "551M": (21, 10, 1280, 5120),
    "571M": (18, 11, 1408, 5632),
    "629M": (24, 10, 1280, 5120),
    "666M": (21, 11, 1408, 5632),
    "717M": (19, 12, 1536, 6144),
    "761M": (24, 11, 1408, 5632),
    "831M": (22, 12, 1536, 6144),
    "944M": (25, 12, 1536, 6144),
    "1028M": (20, 14, 1792, 7168),
    "1233M": (24, 14, 1792, 7168),
    "1476M": (22, 16, 2048, 8192),
    "1678M": (25, 16, 2048, 8192),
    "2121M": (28, 17, 2176, 8704),
}

KEYS = ConfigKeys(
    family="lit-gpt",
    counts={
        "n_layer": "n_layers",
        "n_head": "n_heads",
        "n_embd": "d_model",
        "intermediate_size": "d_mlp",
        "block_size": "n_ctx",
    },
    optional={
        "n_query_groups": "n_key_value_heads",
        "padded_vocab_size": "d_vocab_out",
        "vocab_size": "d_vocab_out",
        "padding_multiple": None,
    },
    read=("norm_eps", "name"),
    name="name",
    fixed={
        "rotary_percentage": (1.0,),
        "parallel_residual": (False,),
        "bias": (False,),
        "shared_attention_norm": (False,),
        "_norm_class": ("FusedRMSNorm", "RMSNorm"),
        "_mlp_class": ("LLaMAMLP",),
        "condense_ratio": (1,),
    },
    ignored=("org",),
)

RULES = (
    Rule("transformer.wte.weight", ("embed.weight",)),
    Rule("transformer.h.{i}.norm_1.weight", ("blocks.{i}.ln1.weight",)),
    Rule(
        "transformer.h.{i}.attn.attn.weight",
        ("blocks.{i}.attn.q.weight", "blocks.{i}.attn.k.weight", "blocks.{i}.attn.v.weight"),
        GroupMajorQKV(),
    ),
    Rule("transformer.h.{i}.attn.proj.weight", ("blocks.{i}.attn.o.weight",)),
    Rule("transformer.h.{i}.norm_2.weight", ("blocks.{i}.ln2.weight",)),
    Rule("transformer.h.{i}.mlp.swiglu.w1.weight", ("blocks.{i}.mlp.gate.weight",)),
    Rule("transformer.h.{i}.mlp.swiglu.w2.weight", ("blocks.{i}.mlp.up.weight",)),
    Rule("transformer.h.{i}.mlp.swiglu.w3.weight", ("blocks.{i}.mlp.down.weight",)),
    Rule("transformer.ln_f.weight", ("ln_final.weight",)),
    Rule("lm_head.weight", ("unembed.weight",)),
)


def recognises(config: Config | None, shapes: Mapping[str, Shape]) -> bool:
    return any(re.fullmatch(r"transformer\.h\.\d+\.norm_1\.weight", name) for name in shapes)


def read_architecture(config: Config | None, shapes: Mapping[str, Shape]) -> Architecture:
    """The architecture in a `lit_config.json`; without a config, the published size with these shapes."""
    if config is None:
        config = _config_of_shapes(shapes)
    KEYS.check(config)
    if config["n_embd"] % config["n_head"]:
        raise ValueError(f"n_embd {config['n_embd']} is not a multiple of n_head {config['n_head']}")
    if not (head := config.get("padded_vocab_size")):
        if not config.get("vocab_size"):
            raise ValueError("the lit-gpt config lacks 'padded_vocab_size' (or 'vocab_size')")
        multiple = config.get("padding_multiple") or 1
        head = -(-config["vocab_size"] // multiple) * multiple
    rows = shapes["transformer.wte.weight"][0] if "transformer.wte.weight" in shapes else head
    return _architecture(config, head, "mdm" if rows == head + 1 else "ar")


def published_architecture(size: str, kind: Literal["mdm", "ar"]) -> Architecture:
    """The architecture of a published size, "1028M" or "Diff_LLaMA_1028M"."""
    return _architecture(_published_config(size), 32000, kind)


def write_config(architecture: Architecture) -> dict[str, Any]:
    """The `lit_config.json` of an exported checkpoint."""
    return {**KEYS.of(architecture), "norm_eps": architecture.norm_eps, **KEYS.written}


def _architecture(config: Config, head: int, kind: Literal["mdm", "ar"]) -> Architecture:
    masked = kind == "mdm"
    sizes = {**KEYS.fields(config), "d_vocab": head + masked, "d_vocab_out": head}
    return Architecture(
        **sizes,
        family="lit_gpt",
        attention_dir="bidirectional" if masked else "causal",
        readout="in_place" if masked else "shifted",
        mask_token_id=head if masked else None,
        norm_eps=config.get("norm_eps", 1e-5),
        rotary_base=10000.0,
        rotary_dtype="bfloat16",
    )


def _published_config(size: str) -> Config:
    key = size.removeprefix("Diff_LLaMA_")
    if key not in PUBLISHED_SIZES:
        near = get_close_matches(key, PUBLISHED_SIZES, n=3, cutoff=0.0)
        raise ValueError(f"{size!r} is not a published size; nearest are {', '.join(near)}")
    sizes = dict(zip(("n_layer", "n_head", "n_embd", "intermediate_size"), PUBLISHED_SIZES[key], strict=True))
    return {"name": f"Diff_LLaMA_{key}", **sizes, "block_size": 2048, "vocab_size": 32000}


def _config_of_shapes(shapes: Mapping[str, Shape]) -> Config:
    """The config of the published size with as many layers and the same MLP.

    The most frequent MLP shape counts, so that a single wrong tensor is found by the check that names it.
    """
    layers = {int(match[1]) for name in shapes if (match := re.match(r"transformer\.h\.(\d+)\.", name))}
    mlps = Counter(shape for name, shape in shapes.items() if name.endswith(".mlp.swiglu.w1.weight"))
    n_layer, mlp = max(layers) + 1, max(mlps, key=lambda shape: mlps[shape], default=())
    for size, (published_layers, _, width, hidden) in PUBLISHED_SIZES.items():
        if (published_layers, (hidden, width)) == (n_layer, mlp):
            return _published_config(size)
    raise ValueError(
        f"no published size has {n_layer} layers with an MLP of {list(mlp)}, and the tensors alone do not give the "
        "number of heads: pass config='lit_config.json'"
    )


FAMILIES = (
    Family(
        "lit_gpt",
        RULES,
        recognises,
        read_architecture,
        write_config,
        config_file="lit_config.json",
        options=(IGNORED_KEYS,),
    ),
)
