"""What must not matter: padding beside a text, and half the precision of the weights."""

from dataclasses import replace

import torch
from torch import Tensor

from diffusion_lens.checks.finding import Finding
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

# Largest difference, of the largest logit. Another shape of batch sums in another order: about 1e-6 in float32.
PADDED = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
# Root mean square of the difference, of the logits' standard deviation. bfloat16 keeps 8 bits, and shallow and deep
# networks differ by 1 to 5 %.
HALF = 0.1
N_PAD = 5
N_POS = 32


@torch.no_grad()
def check_padding(model: HookedDiffusionTransformer, row: Tensor) -> Finding:
    """A text alone, and with padding on the left and on the right."""
    name = "padding"
    row = row[: min(N_POS, model.cfg.n_ctx - N_PAD)]
    alone = model(row[None])[0].float()
    pad = row.new_full((N_PAD,), model.pad_id)
    real = torch.ones(2, len(row) + N_PAD, dtype=torch.bool, device=row.device)
    real[0, :N_PAD] = real[1, len(row) :] = False
    padded = model(torch.stack([torch.cat([pad, row]), torch.cat([row, pad])]), attention_mask=real).float()
    scale = float(alone.abs().max())
    apart = max(float((side[kept] - alone).abs().max()) for side, kept in zip(padded, real, strict=True)) / scale
    within = PADDED[model.cfg.dtype]
    said = f"padding left and right changes logits by at most {apart:.1e} of the largest ({within:.0e} is allowed)"
    numbers = {"apart": apart, "allowed": within}
    if apart <= within:
        return Finding(name, "ok", said, numbers=numbers)
    cause = "padding reaches the real tokens: an error of this library or of the attention kernel; please report it"
    return Finding(name, "off", said, cause, numbers)


@torch.no_grad()
def check_half_precision(model: HookedDiffusionTransformer, rows: Tensor) -> Finding:
    """The float32 model beside a copy of it in bfloat16, which takes half as much memory again."""
    name = "bfloat16"
    if model.cfg.dtype != torch.float32:
        said = f"the weights are {str(model.cfg.dtype).removeprefix('torch.')} here; compared where they are float32"
        return Finding(name, "not run", said)
    wide = model(rows).float()
    cfg = replace(model.cfg, dtype=torch.bfloat16)
    half = HookedDiffusionTransformer(cfg, model.tokenizer, tensors=model.state_dict().items())
    narrow = half(rows).float()
    apart = float((narrow - wide).square().mean().sqrt() / wide.std())
    same = float((narrow.argmax(-1) == wide.argmax(-1)).float().mean())
    said = (
        f"in bfloat16 logits move by {apart:.1%} of their spread ({HALF:.0%} is allowed); {same:.0%} of the likeliest "
    )
    numbers = {"apart": apart, "allowed": HALF, "same_likeliest": same}
    if apart <= HALF:
        return Finding(name, "ok", said + "tokens stay", numbers=numbers)
    cause = "the weights do not fit into bfloat16's range or precision: run this model in float32"
    return Finding(name, "off", said + "tokens stay", cause, numbers)
