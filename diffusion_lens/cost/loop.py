"""Passes of the denoising loop, found by running the loop itself on a network too small to take time.

The stand-in has one block, a few units and the attention, readout and [MASK] of the model. So samplers, guidance,
caches, and blocks that open one after the other act as they do on the model. Where a sampler decides by the
probabilities of tokens (`threshold=`), its number of steps is that of random weights.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.analysis.batching import proposal_bytes, row_bytes
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.cost.passes import Cost, Pass
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.prepare import denoise
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

_N_TOKENS = 16


def denoising(
    cfg: DiffusionConfig,
    length: int,
    given: int,
    settings: DenoiseSettings | None = None,
    rows: int = 1,
    hooked: bool = False,
) -> Cost:
    """The cost of `model.denoise(...)`.

    Args:
        cfg: Config of the model.
        length: Number of positions of the canvas.
        given: Number of them that the prompt fills.
        settings: Settings of the loop.
        rows: Number of prompts in the batch.
        hooked: Whether hooks see the network: each step then computes the whole canvas.

    Raises:
        ValueError: The settings do not fit the model, or nothing is left to write.
    """
    settings = (settings or DenoiseSettings()).fitted_to(cfg)
    stand_in = _StandIn(cfg, length)
    prompt = torch.zeros(rows, given, dtype=torch.long)
    hooks = [("hook_embed", lambda activation, hook: None)] if hooked else []
    denoise(stand_in, lay_out(stand_in, prompt, length), settings, fwd_hooks=hooks)
    n_bytes = max(_bytes_at_once(cfg, each, settings) for each in stand_in.passes)
    return Cost(cfg, stand_in.passes, n_bytes, steps=sum(stand_in.passes.values()), records=1)


def _bytes_at_once(cfg: DiffusionConfig, each: Pass, settings: DenoiseSettings) -> int:
    """Bytes of a pass, or of the probabilities from which it proposes tokens, and of the keys and values that it keeps.

    Under guidance both branches are in one pass, and tokens are proposed from one. Where the text grows, the logits of
    the step before are as large.
    """
    n_read = round(each.rows * each.read) // (2 if settings.cfg_scale else 1)
    sampled = bool(settings.temperature) or cfg.rewrites
    kept = 0
    if cfg.final_together is not None:
        d_key_value = (cfg.n_key_value_heads or cfg.n_heads) * cfg.d_head
        kept = 2 * cfg.n_layers * each.rows * (each.past + each.positions) * d_key_value * cfg.dtype.itemsize
    of_pass = each.rows * row_bytes(cfg, each.positions, 0, each.past)
    return kept + max(of_pass, proposal_bytes(cfg, n_read, 2 if cfg.grows else 1, sampled))


class _StandIn(HookedDiffusionTransformer):
    """One block that counts its passes as those of the model."""

    def __init__(self, cfg: DiffusionConfig, length: int) -> None:
        a = cfg.architecture
        small = replace(
            a,
            n_layers=1,
            d_model=4,
            n_heads=1,
            n_key_value_heads=1,
            d_mlp=4,
            d_vocab=_N_TOKENS,
            d_vocab_out=_N_TOKENS,
            n_ctx=max(a.n_ctx, length),
            mask_token_id=None if a.mask_token_id is None else _N_TOKENS - 1,
            experts=None,
        )
        super().__init__(DiffusionConfig.from_architecture(small, device="cpu"))
        self.depth = cfg.n_layers
        self.passes: Counter[Pass] = Counter()

    def run_layers(self, input: Any, **settings: Any) -> Tensor | None:
        """Count the pass, and compute it."""
        past, rows = settings.get("past_kv_cache"), settings.get("logits_at")
        n_rows, n_positions = input.shape
        n_read = n_positions * n_rows if rows is None else len(rows[0] if isinstance(rows, tuple) else rows)
        self.passes[Pass(n_rows, n_positions, 0, self.depth, n_read / n_rows, past.n_pos if past else 0)] += 1
        return super().run_layers(input, **settings)
