"""Checks that padding and half-precision weights do not change what a model computes.

In a mixture of experts both passes use the experts that the first one chose: a choice between two that are nearly equal
may fall otherwise by rounding, which is no error and changes much.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.checks.finding import Finding
from diffusion_lens.checks.told_time import at_check_time
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

# Largest allowed difference of a logit, relative to the largest logit. Batches of other shapes are summed in another
# order, which makes about 1e-6 in float32.
PADDED = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
# Largest allowed root mean square of the difference, relative to the logits' standard deviation. bfloat16 has 8 bits;
# correct networks, shallow and deep, differ by 1 to 5 %.
HALF = 0.1
N_PAD = 5
N_POS = 32


@torch.no_grad()
def check_padding(model: HookedDiffusionTransformer, row: Tensor) -> Finding:
    """Compare the logits of a text alone with those of the text padded on the left and on the right."""
    name = "padding"
    row = row[: min(N_POS, model.cfg.n_ctx - N_PAD)]
    output, experts = _with_experts(model, row[None])
    alone = output[0].float()
    pad = row.new_full((N_PAD,), model.pad_id)
    real = torch.ones(2, len(row) + N_PAD, dtype=torch.bool, device=row.device)
    real[0, :N_PAD] = real[1, len(row) :] = False
    tokens = torch.stack([torch.cat([pad, row]), torch.cat([row, pad])])
    # The same experts, at both places of the text.
    padded = model.run_with_hooks(
        tokens,
        attention_mask=real,
        fwd_hooks=[(at, partial(_put_at, real, chosen.repeat(2, 1, 1).flatten(0, 1))) for at, chosen in experts],
    ).float()
    scale = float(alone.abs().max())
    difference = max(float((row[text] - alone).abs().max()) for row, text in zip(padded, real, strict=True)) / scale
    allowed = PADDED[model.cfg.dtype]
    said = (
        f"padding left and right changes logits by at most {difference:.1e} of the largest ({allowed:.0e} is allowed)"
    )
    numbers = {"apart": difference, "allowed": allowed}
    if difference <= allowed:
        return Finding(name, "ok", said, numbers=numbers)
    cause = "padding affects the real tokens: an error of this library or of the attention kernel; please report it"
    return Finding(name, "off", said, cause, numbers)


@torch.no_grad()
def check_half_precision(model: HookedDiffusionTransformer, rows: Tensor) -> Finding:
    """Compare the float32 model with a copy of it in bfloat16, which takes half as much memory in addition."""
    name = "bfloat16"
    if model.cfg.dtype != torch.float32:
        said = f"the weights are {str(model.cfg.dtype).removeprefix('torch.')} here; compared where they are float32"
        return Finding(name, "not run", said)
    output, experts = _with_experts(model, rows)
    wide = output.float()
    cfg = replace(model.cfg, dtype=torch.bfloat16)
    half = HookedDiffusionTransformer(cfg, model.tokenizer, tensors=model.state_dict().items())
    everywhere = torch.ones_like(rows, dtype=torch.bool)
    with at_check_time(half):
        narrow = half.run_with_hooks(
            rows, fwd_hooks=[(at, partial(_put_at, everywhere, chosen.flatten(0, 1))) for at, chosen in experts]
        ).float()
    difference = float((narrow - wide).square().mean().sqrt() / wide.std())
    same = float((narrow.argmax(-1) == wide.argmax(-1)).float().mean())
    said = (
        f"in bfloat16 logits change by {difference:.1%} of their spread ({HALF:.0%} is allowed); {same:.0%} of the "
        "likeliest tokens stay"
    )
    numbers = {"apart": difference, "allowed": HALF, "same_likeliest": same}
    if difference <= HALF:
        return Finding(name, "ok", said, numbers=numbers)
    cause = "the weights exceed bfloat16's range or precision: run this model in float32"
    return Finding(name, "off", said, cause, numbers)


def _with_experts(model: HookedDiffusionTransformer, tokens: Tensor) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """Logits, and for each router its hook point and the experts Int[batch pos chosen] that it chose."""
    if model.cfg.experts is None:
        return model(tokens), []
    logits, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith(".hook_experts"))
    return logits, list(cache.items())


def _put_at(positions: Tensor, values: Tensor, activation: Tensor, hook: Any) -> Tensor:
    """A hook function that replaces the activation at some positions."""
    changed = activation.clone()
    changed[positions] = values
    return changed
