"""Writes a model in the format in which transformers has it, or the authors of a diffusion model, with its tokenizer.

transformers has classes of its own for causal models of the kinds in `CAUSAL`. So an AR baseline of another format,
such as SMDM's, is written as one of these if only its rotary tables differ: lit-gpt rounds them to bfloat16, and these
formats do not. How far that moves the logits is measured.

With `"is_causal": false` in their config, these classes attend in both directions (transformers 5). So a twin that
`adapt` made, whose readout is still shifted, is written for them too: row i - 1 of the logits predicts token i.
"""

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from diffusion_lens.loading.tokenizers import save_tokenizer
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.settings import warn_user
from weight_conversion import Architecture, check_export, export, read_json_object

WEIGHTS = "model.safetensors"
CAUSAL = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def export_hf(model: Any, folder: str | Path) -> Path:
    """See `model.export_hf`."""
    target, cfg, tokenizer = Path(folder).expanduser().absolute(), model.cfg, model.tokenizer
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; export_hf needs a folder")
    architecture, family = cfg.architecture, cfg.family
    if cfg.is_autoregressive and family not in CAUSAL:
        architecture, family = _as_causal(architecture, target)
    # null where there is none: without a key, transformers takes the default of its kind.
    beside: dict[str, Any] = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")
    }
    in_transformers = family in CAUSAL and cfg.readout == "shifted"
    if in_transformers and cfg.attention_dir == "block_causal":
        raise ValueError(
            f"{cfg.model_name!r} attends by blocks, and transformers' classes of the {family} family see the whole "
            "canvas or earlier positions only: model.save_pretrained(folder) writes it for this library. Nothing was "
            "written"
        )
    if in_transformers:
        beside |= {"architectures": [CAUSAL[family]], "torch_dtype": str(cfg.dtype).removeprefix("torch.")}

    # Everything is written elsewhere first, so that an error leaves the folder as it was.
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        part = Path(name)
        export(model.state_dict(), architecture, part / WEIGHTS, family, beside)
        config = part / "config.json"
        model_type = read_json_object(config).get("model_type") if config.exists() else None
        if model_type is None:
            raise ValueError(
                f"{cfg.model_name!r} is a diffusion model of the family {family!r}, for which neither transformers nor "
                "code of its authors reads a folder: model.save_pretrained(folder) writes one for this library, and "
                "weight_conversion.export(model.state_dict(), model.cfg.architecture, path) the file of its family. "
                "Nothing was written"
            )
        if tokenizer is not None:
            save_tokenizer(tokenizer, part, prepends_bos=cfg.default_prepend_bos)
        written = {path.relative_to(part) for path in part.rglob("*") if path.is_file()}
        there = {path.relative_to(target) for path in target.rglob("*") if path.is_file()}
        if stray := sorted(map(str, there - written)):
            raise ValueError(
                f"{target} contains other files ({', '.join(stray[:3])}): name another folder. Nothing was written"
            )
        for path in sorted(written):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(part / path, target / path)

    if cfg.unread_tokens:
        warn_user(
            f"{target} has the text network of {cfg.model_name!r} alone: HookedDiffusionTransformer.from_pretrained "
            "reads it, and the class of transformers would begin with a vision tower of random weights"
        )
    elif not (cfg.is_autoregressive or in_transformers):
        warn_user(
            f"transformers has no class for {model_type!r}: {target} has config, weights and tokenizer in the format "
            f"of the {family} family. HookedDiffusionTransformer.from_pretrained reads it, and so does the code of its "
            "authors (AutoModel with trust_remote_code=True, with their modeling files beside it)"
        )
    elif architecture != cfg.architecture:
        moved, largest = _change(model, architecture)
        warn_user(
            f"{cfg.model_name!r} rounds its rotary tables to bfloat16, and the {family} format does not: the logits of "
            f"the written model differ by at most {moved:.2g} from those of this one, which are at most {largest:.2g} "
            "(measured on 4 rows of random tokens)"
        )
    return target


def _as_causal(architecture: Architecture, target: Path) -> tuple[Architecture, str]:
    """The architecture with the rotary tables of `CAUSAL`, and the first of these formats that expresses it."""
    plain, reasons = replace(architecture, rotary_dtype="float32", rotation="activation"), []
    for family in CAUSAL:
        try:
            check_export(plain, target / WEIGHTS, family)
            return plain, family
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(f"transformers has no class for {architecture.name!r}: {'; '.join(reasons)}")


@torch.no_grad()
def _change(model: Any, architecture: Architecture) -> tuple[float, float]:
    """How far the logits of another architecture with the same weights are from the model's, and the largest of these
    in absolute value."""
    n_pos = min(model.cfg.trained_length or model.cfg.n_ctx, 256)
    tokens = torch.randint(model.cfg.d_vocab, (4, n_pos), generator=torch.Generator().manual_seed(0))
    written = DiffusionConfig.from_architecture(architecture, device=model.cfg.device, dtype=model.cfg.dtype)
    # Without the hooks of the model, and without its tokenizer, since random tokens are no text.
    before, after = (type(model)(cfg, weights_of=model)(tokens).float() for cfg in (model.cfg, written))
    return float((after - before).abs().max()), float(before.abs().max())
