"""Compares logits: with those that the original code computed, and with the model's own, padded or in bfloat16.

A reference is a safetensors file with

    tokens          Int[batch pos], including [MASK] tokens
    logits          Float[batch pos d_vocab_out], as the network returns them, before any shift
    attention_mask  optional, 0 at padding
    time            Float[batch], for a time-conditioned network: that of each row, as in `model(tokens, time=...)`
    before, after   optional, Int[batch pos]: the canvas before and after a step of greedy denoising without guidance;
                    for a causal model, the prompt followed by -1, and the text after its continuation; not under
                    uniform noise, nor of a time-conditioned network

Logits depend neither on the id of [MASK] nor on the readout; `before` and `after` depend on both.

In a mixture of experts both passes of a comparison with itself use the experts that the first one chose: a choice
between two that are nearly equal may fall otherwise by rounding, which is no error and changes much.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffusion_lens.checks.report import Finding
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.model.config import reached
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import checked_arguments
from weight_conversion import Architecture

# Half of the tokens are noise, so that neither the network's reading of text nor that of noise is left out. Only the
# loss has times of its own, those of its noise, and a reference may have another.
TIME = 0.5
# Largest root mean square of the difference, relative to the logits' standard deviation. Machines and kernels differ by
# 1e-6 to 1e-4 in float32.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# Least share of equal tokens among those that a step revealed. In half precision some are near ties.
LEAST_SAME = {torch.float32: 0.99, torch.bfloat16: 0.8, torch.float16: 0.9}
NAMES = ("tokens", "logits", "attention_mask", "before", "after", "time")
# Largest allowed difference of a logit, relative to the largest logit. Batches of other shapes are summed in another
# order, which makes about 1e-6 in float32.
PADDED = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
# Largest allowed root mean square of the difference, relative to the logits' standard deviation. bfloat16 has 8 bits;
# correct networks, shallow and deep, differ by 1 to 5 %.
HALF = 0.1
N_PAD = 5
N_POS = 32


def at_check_time(model: DiffusionTransformer) -> AbstractContextManager[Any]:
    """A context in which the network is given `TIME`, if it is conditioned on the time."""
    return model.at_time(TIME) if model.cfg.time_conditioning else nullcontext()


@dataclass(frozen=True)
class Distance:
    """The distance of a model from a reference.

    Attributes:
        apart: Root mean square of the difference of the logits, relative to their standard deviation.
        same: Share of the tokens that the reference reveals which the model predicts too; 1 if it reveals none.
        hidden: Share of the positions revealed by the reference at which the model has [MASK]; 1 if there are none.
    """

    apart: float
    same: float
    hidden: float


@checked_arguments
@dataclass(frozen=True, eq=False)
class Reference:
    """Logits and canvases of the original code; the docstring of the module describes the tensors."""

    tokens: Tensor
    logits: Tensor
    attention_mask: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    time: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or self.logits.dim() != 3 or self.logits.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"a reference contains tokens [batch pos] and their logits [batch pos vocabulary]; this one has "
                f"{list(self.tokens.shape)} and {list(self.logits.shape)}"
            )
        if (self.before is None) != (self.after is None):
            raise ValueError(
                "before and after go together: pass the canvas before and after a step of the original code"
            )
        if self.before is not None and self.after is not None and self.before.shape != self.after.shape:
            raise ValueError(
                f"before is {list(self.before.shape)} and after {list(self.after.shape)}; their shapes must be equal"
            )

    @classmethod
    def load(cls, path: str | Path) -> "Reference":
        """Read a file; tensors of other names are ignored. A `ValueError` names what it lacks."""
        source = Path(path).expanduser()
        if not source.is_file():
            raise FileNotFoundError(f"there is no reference at {source}; it is a safetensors file of tokens and logits")
        try:
            with safe_open(source, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in NAMES if name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{source} is not a complete safetensors file: {error}") from error
        if lacking := [name for name in NAMES[:2] if name not in tensors]:
            raise ValueError(f"the reference {source} lacks {' and '.join(lacking)}; it may contain {', '.join(NAMES)}")
        return cls(**tensors)

    def check_fits(self, a: Architecture) -> None:
        """Raise a `ValueError` if the reference does not fit a model: by its vocabulary, length or times, or by a step
        that a model of this kind does not make."""
        n_logits, n_pos = self.logits.shape[-1], self.tokens.shape[1]
        if n_logits != a.d_vocab_out or n_pos > a.n_ctx or int(self.tokens.max()) >= a.d_vocab:
            raise ValueError(
                f"the reference has {n_logits} logits for {n_pos} positions and token ids up to "
                f"{int(self.tokens.max())}; {a.name!r} predicts {a.d_vocab_out} tokens, embeds {a.d_vocab}, and has a "
                f"context of {a.n_ctx}"
            )
        if a.time_conditioning != (self.time is not None):
            raise ValueError(
                f"{a.name!r} is conditioned on the time of its canvas, and the reference does not say it: add a tensor "
                "time, a number in (0, 1] for each row"
                if a.time_conditioning
                else f"the reference has times, and {a.name!r} has no time conditioning: leave the tensor time out"
            )
        if self.before is None:
            return
        if a.time_conditioning or (a.uniform_noise and bool(reached(self.before).all())):
            why = "is conditioned on the time" if a.time_conditioning else "has no [MASK] to reveal them at"
            raise ValueError(
                "before and after are a step that reveals the likeliest tokens, whatever the time, and "
                f"{a.name!r} {why}: leave both out"
            )

    @torch.no_grad()
    def distance(self, model: DiffusionTransformer) -> Distance:
        """The distance of the model in its current state."""
        mask = self.attention_mask
        real = torch.ones_like(self.tokens, dtype=torch.bool) if mask is None else mask.bool()
        ours = model(self.tokens, attention_mask=mask, time=self.time, logits_at=real).float().cpu()
        theirs = self.logits.float()[real]
        apart = float((ours - theirs).square().mean().sqrt() / theirs.std())
        same, hidden = self._revealed(model)
        return Distance(apart, same, hidden)

    def tolerance(self, model: DiffusionTransformer) -> tuple[float, float]:
        """Largest `apart` and least `same`, by the lower precision of model and reference."""
        dtypes = [dtype for dtype in (model.cfg.dtype, self.logits.dtype) if dtype in TOLERANCE]
        return max(TOLERANCE[dtype] for dtype in dtypes), min(LEAST_SAME[dtype] for dtype in dtypes)

    def _revealed(self, model: DiffusionTransformer) -> tuple[float, float]:
        if self.before is None or self.after is None or not bool((changed := self.before != self.after).any()):
            return 1.0, 1.0
        canvas, hidden = self.after, 1.0
        if model.cfg.has_mask:
            canvas, hidden = self.before, float((self.before[changed] == model.cfg.blank).float().mean())
        logits = model(canvas, logits_at=model.readout.locate(changed)).float().cpu()
        if model.cfg.has_mask and model.cfg.blank < logits.shape[-1]:
            logits[:, model.cfg.blank] = -torch.inf
        return float((logits.argmax(-1) == self.after[changed]).float().mean()), hidden


def check_reference(model: DiffusionTransformer, reference: Reference, distance: Distance) -> Finding:
    """Compare the distance from a reference with the tolerance."""
    allowed, needed = reference.tolerance(model)
    said = f"logits differ by {distance.apart:.1e} of their spread ({allowed:.0e} is allowed)"
    if reference.before is not None:
        said += f"; {distance.same:.0%} of the tokens that the original code revealed are ours"
        if distance.hidden < 1:
            said += f"; {1 - distance.hidden:.0%} of the positions where it revealed do not contain our [MASK]"
    numbers = {"apart": distance.apart, "allowed": allowed, "same": distance.same, "hidden": distance.hidden}
    ok = distance.apart <= allowed and distance.same >= needed and distance.hidden == 1
    return Finding("reference", "ok" if ok else "off", said, numbers=numbers)


@torch.no_grad()
def check_padding(model: HookedDiffusionTransformer, row: Tensor) -> Finding:
    """Compare the logits of a text alone with those of the text padded on the left and on the right."""
    row = row[: min(N_POS, model.cfg.n_ctx - N_PAD)]
    output, experts = _with_experts(model, row[None])
    alone = output[0].float()
    pad = row.new_full((N_PAD,), model.padding.id)
    real = torch.ones(2, len(row) + N_PAD, dtype=torch.bool, device=row.device)
    real[0, :N_PAD] = real[1, len(row) :] = False
    tokens = torch.stack([torch.cat([pad, row]), torch.cat([row, pad])])
    # The same experts, at both places of the text.
    padded = model.run_with_hooks(
        tokens,
        attention_mask=real,
        logits_at=real,
        fwd_hooks=[(at, partial(_put_at, real, chosen.repeat(2, 1, 1).flatten(0, 1))) for at, chosen in experts],
    ).float()
    difference = float((padded - alone.repeat(2, 1)).abs().max() / alone.abs().max())
    allowed = PADDED[model.cfg.dtype]
    said = (
        f"padding left and right changes logits by at most {difference:.1e} of the largest ({allowed:.0e} is allowed)"
    )
    cause = "padding affects the real tokens: an error of this library or of the attention kernel; please report it"
    return _compared("padding", said, cause, {"apart": difference, "allowed": allowed})


@torch.no_grad()
def check_half_precision(model: HookedDiffusionTransformer, rows: Tensor) -> Finding:
    """Compare the float32 model with a copy of it in bfloat16, which takes half as much memory in addition."""
    if model.cfg.dtype != torch.float32:
        said = f"the weights are {str(model.cfg.dtype).removeprefix('torch.')} here; compared where they are float32"
        return Finding("bfloat16", "not run", said)
    output, experts = _with_experts(model, rows)
    wide = output.float()
    cfg = replace(model.cfg, dtype=torch.bfloat16)
    half = HookedDiffusionTransformer(cfg, model.tokenizer, tensors=model.state_dict().items())
    everywhere = torch.ones_like(rows, dtype=torch.bool)
    with at_check_time(half):
        narrow = half.run_with_hooks(
            rows,
            logits_at=range(rows.shape[1]),
            fwd_hooks=[(at, partial(_put_at, everywhere, chosen.flatten(0, 1))) for at, chosen in experts],
        ).float()
    difference = float((narrow - wide).square().mean().sqrt() / wide.std())
    same = float((narrow.argmax(-1) == wide.argmax(-1)).float().mean())
    said = (
        f"in bfloat16 logits change by {difference:.1%} of their spread ({HALF:.0%} is allowed); {same:.0%} of the "
        "likeliest tokens stay"
    )
    cause = "the weights exceed bfloat16's range or precision: run this model in float32"
    return _compared("bfloat16", said, cause, {"apart": difference, "allowed": HALF, "same_likeliest": same})


def _compared(check: str, said: str, cause: str, numbers: dict[str, float]) -> Finding:
    """The finding for a difference that is allowed up to a bound, and the cause of a larger one."""
    if numbers["apart"] <= numbers["allowed"]:
        return Finding(check, "ok", said, numbers=numbers)
    return Finding(check, "off", said, cause, numbers)


def _with_experts(model: HookedDiffusionTransformer, tokens: Tensor) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """Logits, and for each router its hook point and the experts Int[batch pos chosen] that it chose."""
    every_row = range(tokens.shape[1])  # these texts contain no [MASK]
    if model.cfg.experts is None:
        return model(tokens, logits_at=every_row), []
    logits, cache = model.run_with_cache(
        tokens, logits_at=every_row, names_filter=lambda name: name.endswith(".hook_experts")
    )
    return logits, list(cache.items())


def _put_at(positions: Tensor, values: Tensor, activation: Tensor, hook: Any) -> Tensor:
    """A hook function that replaces the activation at some positions."""
    changed = activation.clone()
    changed[positions] = values
    return changed
