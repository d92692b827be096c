"""Diffusion transformers of the golden data: loaded from their file, or drawn by the rule of the README beside them;
and the canvases of a run as the golden data has them."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent / "golden"
SEEDS = {"sedd": 711, "duo": 9300, "bd3lm/b4_sigma": 6110, "bd3lm/full": 6120}


@cache
def authors_network(name: str, **changes: Any) -> Any:
    """The network of a folder of the golden data in float32; `changes` replace values of its config."""
    from diffusion_lens import HookedDiffusionTransformer

    config = {**json.loads((GOLDEN / name / "config.json").read_text()), **changes}
    how: dict[str, Any] = dict(config=config, device="cpu", dtype=torch.float32)
    if name not in SEEDS:
        return HookedDiffusionTransformer.from_pretrained(str(GOLDEN / name), **how)
    with tempfile.TemporaryDirectory() as folder:
        save_file(drawn_weights(config, SEEDS[name]), f"{folder}/model.safetensors")
        return HookedDiffusionTransformer.from_pretrained(f"{folder}/model.safetensors", **how)


def drawn_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The weights of the authors' network, by the rule of the golden data's README.md."""
    from weight_conversion.key_map import KeyMap
    from weight_conversion.registry import recognise

    family = recognise(config, {}, "the config")
    shapes = KeyMap(family.rules, family.read_architecture(config, {})).their_shapes
    biases = {"output_layer.linear": 0.5, "": 0.3}
    gains = {"output_layer.linear": 1.1, "adaLN": 0.9, "sigma_map.mlp.0": 2.0, "": 1.0}
    tensors = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, shape in sorted(shapes.items()):
            if name.endswith("bias"):
                tensors[name] = torch.randn(shape) * next(scale for part, scale in biases.items() if part in name)
            elif "norm" in name:
                tensors[name] = torch.rand(shape) + 0.5
            elif "embedding" in name:
                tensors[name] = torch.randn(shape) * 0.02
            else:
                gain = next(gain for part, gain in gains.items() if part in name)
                tensors[name] = torch.randn(shape) * (gain / shape[-1] ** 0.5)
    return tensors


def distinct(canvases: torch.Tensor) -> torch.Tensor:
    """The canvases of one row without repetitions."""
    kept = [canvases[0]]
    for canvas in canvases[1:]:
        if not torch.equal(canvas, kept[-1]):
            kept.append(canvas)
    return torch.stack(kept)
