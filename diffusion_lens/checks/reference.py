"""Logits of the original code on some tokens, and how near a model comes to them.

A reference is a safetensors file with

    tokens          Int[batch pos], [MASK]s included
    logits          Float[batch pos d_vocab_out], row by row as the network gives them, before any shift
    attention_mask  optional, 0 at padding
    before, after   optional, Int[batch pos]: the canvas before and after a step of greedy denoising without guidance,
                    or, of a causal model, the prompt with -1 behind it and the text it was continued to

Logits do not depend on which id is taken for [MASK], nor on the row in which a token is read; `before` and `after` do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffusion_lens.checks.finding import Finding
from diffusion_lens.model.transformer import DiffusionTransformer
from weight_conversion import Architecture

# Root mean square of the difference, of the logits' spread. Two machines or kernels differ by 1e-6 to 1e-4 in float32.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# Of the tokens that a step revealed, in half precision some are near ties.
LEAST_SAME = {torch.float32: 0.99, torch.bfloat16: 0.8, torch.float16: 0.9}
NAMES = ("tokens", "logits", "attention_mask", "before", "after")


@dataclass(frozen=True)
class Distance:
    """How far a model is from a reference.

    Attributes:
        apart: root mean square of the difference of the logits, of their standard deviation.
        same: of the tokens that the reference reveals, the share that the model would write; 1 where there are none.
        hidden: of the places where it reveals, the share that holds the model's [MASK]; 1 where there are none.
    """

    apart: float
    same: float
    hidden: float

    def within(self, apart: float, same: float) -> bool:
        """Whether that is near enough."""
        return self.apart <= apart and self.same >= same and self.hidden == 1


@dataclass(frozen=True, eq=False)
class Reference:
    """What the original code computed; the module says what each tensor is."""

    tokens: Tensor
    logits: Tensor
    attention_mask: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or self.logits.dim() != 3 or self.logits.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"a reference holds tokens [batch pos] and their logits [batch pos vocabulary]; this one has "
                f"{list(self.tokens.shape)} and {list(self.logits.shape)}"
            )
        if (self.before is None) != (self.after is None):
            raise ValueError("before and after belong together: a canvas before and after a step of the original code")
        if self.before is not None and self.after is not None and self.before.shape != self.after.shape:
            raise ValueError(
                f"before is {list(self.before.shape)} and after {list(self.after.shape)}; one shape is meant"
            )

    @classmethod
    def load(cls, path: str | Path) -> "Reference":
        """Read a file; tensors of other names are left alone.

        Raises:
            FileNotFoundError: not there.
            ValueError: no safetensors file, or without tokens or logits, or with shapes that do not fit.
        """
        source = Path(path).expanduser()
        if not source.is_file():
            raise FileNotFoundError(f"there is no reference at {source}; it is a safetensors file of tokens and logits")
        try:
            with safe_open(source, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in NAMES if name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{source} is not a whole safetensors file: {error}") from error
        if lacking := [name for name in NAMES[:2] if name not in found]:
            raise ValueError(f"the reference {source} lacks {' and '.join(lacking)}; it holds {', '.join(NAMES)}")
        return cls(**found)

    def check_fits(self, a: Architecture) -> None:
        """Refuse a reference of another vocabulary, or of texts longer than the context.

        Raises:
            ValueError: it does not fit the architecture.
        """
        widest, n_pos = self.logits.shape[-1], self.tokens.shape[1]
        if widest != a.d_vocab_out or n_pos > a.n_ctx or int(self.tokens.max()) >= a.d_vocab:
            raise ValueError(
                f"the reference has {widest} logits for {n_pos} places and token ids up to {int(self.tokens.max())}; "
                f"{a.name!r} writes {a.d_vocab_out} tokens, embeds {a.d_vocab}, and has a context of {a.n_ctx}"
            )

    @torch.no_grad()
    def distance(self, model: DiffusionTransformer) -> Distance:
        """Of a model, as it is now."""
        real = self.attention_mask
        kept = torch.ones_like(self.tokens, dtype=torch.bool) if real is None else real.bool()
        ours = model(self.tokens, attention_mask=real).float().cpu()[kept]
        theirs = self.logits.float()[kept]
        apart = float((ours - theirs).square().mean().sqrt() / theirs.std())
        same, hidden = self._revealed(model)
        return Distance(apart, same, hidden)

    def tolerance(self, model: DiffusionTransformer) -> tuple[float, float]:
        """What is allowed of `apart`, and needed of `same`: by the coarser precision of model and reference."""
        dtypes = [dtype for dtype in (model.cfg.dtype, self.logits.dtype) if dtype in TOLERANCE]
        return max(TOLERANCE[dtype] for dtype in dtypes), min(LEAST_SAME[dtype] for dtype in dtypes)

    def _revealed(self, model: DiffusionTransformer) -> tuple[float, float]:
        if self.before is None or self.after is None:
            return 1.0, 1.0
        changed = self.before != self.after
        if not bool(changed.any()):
            return 1.0, 1.0
        mask = model.cfg.mask_token_id
        canvas = self.after if mask is None else self.before
        hidden = 1.0 if mask is None else float((self.before[changed] == mask).float().mean())
        logits = model(canvas, logits_at=model.readout.locate(changed)).float().cpu()
        if mask is not None and mask < logits.shape[-1]:
            logits[:, mask] = -torch.inf
        return float((logits.argmax(-1) == self.after[changed]).float().mean()), hidden


def check_reference(model: DiffusionTransformer, reference: Reference, found: Distance) -> Finding:
    """The logits, and the tokens that a step revealed."""
    allowed, needed = reference.tolerance(model)
    said = f"logits differ by {found.apart:.1e} of their spread ({allowed:.0e} is allowed)"
    wrong: Sequence[str] = []
    if reference.before is not None:
        said += f"; {found.same:.0%} of the tokens that the original code revealed are ours"
        if found.hidden < 1:
            wrong = [f"{1 - found.hidden:.0%} of the places where it revealed do not hold our [MASK]"]
    numbers = {"apart": found.apart, "allowed": allowed, "same": found.same, "hidden": found.hidden}
    ok = found.within(allowed, needed)
    return Finding("reference", "ok" if ok else "off", "; ".join([said, *wrong]), numbers=numbers)
