"""Losses that say where in the network something is computed, not only what is predicted.

`EarlyExit` asks a lower block for an answer: its residual stream, read by the model's own final norm and unembedding,
should predict given tokens at given positions. `EdgeDropout` hides given tokens from given others in some blocks while
training, so that what these need has to be composed elsewhere first. `ShapedLoss` adds either to the model's own loss.
Both leave nothing on the model: a trained model is used without them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.hook_names import Hook
from diffusion_lens.losses import loss_batch
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import not_negative, plain_number
from diffusion_lens.shapes import Resid, Tokens

HIDDEN = -1e4  # Score of an edge that is dropped. exp(HIDDEN) is 0 in every precision.


@dataclass(frozen=True)
class Targets:
    """Tokens that a block should predict.

    Attributes:
        rows: Batch index and position of each prediction, Int[selected] each.
        tokens: Int[selected candidate], ids that should be equally likely there.
    """

    rows: tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]]
    tokens: Int[Tensor, "selected candidate"]


@dataclass(frozen=True)
class EarlyExit:
    """The cross-entropy of a block's residual stream with given tokens.

    Attributes:
        layer: Block after which the residual stream is read.
        targets: Function from the network's input to what should be predicted. Records name it by its `repr`.
        weight: Weight of this loss.

    Raises:
        ValueError: The weight is negative or not finite.
    """

    layer: int
    targets: Callable[[Tokens], Targets]
    weight: float = 1.0

    def __post_init__(self) -> None:
        not_negative("weight", self.weight)

    def loss(self, model: DiffusionTransformer, resid: Resid, tokens: Tokens) -> Float[Tensor, ""]:
        """The weighted loss of the residual stream after the block; 0 if nothing is to be predicted."""
        targets = self.targets(tokens)
        if not len(targets.tokens):
            return resid.sum() * 0.0
        logits: Tensor = model.unembed(model.ln_final(resid[targets.rows]))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return -self.weight * wide.log_softmax(dim=-1).gather(1, targets.tokens).mean()


@dataclass(frozen=True)
class EdgeDropout:
    """Attention edges that are cut in some rows of a batch.

    Attributes:
        layers: Blocks in which they are cut.
        readers: Ids of the tokens at whose positions attention loses edges, such as [MASK].
        sources: Ids of the tokens that these positions do not see. A position always sees itself.
        share: Probability that the edges of a row are cut.

    Raises:
        ValueError: The share is not between 0 and 1.
    """

    layers: tuple[int, ...]
    readers: tuple[int, ...]
    sources: tuple[int, ...]
    share: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= plain_number("share", self.share) <= 1:
            raise ValueError(f"share={self.share}; it must be between 0 and 1")

    def hooks(self, tokens: Tokens, generator: torch.Generator | None = None) -> list[tuple[str, Hook]]:
        """Hooks that cut the edges of these tokens, in the rows that `generator` draws."""
        rows = (torch.rand(len(tokens), generator=generator) < self.share).to(tokens.device)
        readers, sources = (torch.isin(tokens, torch.tensor(ids).to(tokens)) for ids in (self.readers, self.sources))
        cut = rows[:, None, None] & readers[:, :, None] & sources[:, None, :]
        cut = cut & ~torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)

        def hide(scores: Tensor, hook: Any) -> Tensor:
            return scores.masked_fill(cut[:, None], HIDDEN)

        return [(f"blocks.{layer}.attn.hook_attn_scores", hide) for layer in self.layers]


@dataclass(frozen=True)
class ShapedLoss:
    """The model's own loss with an early exit, edge dropout, or both: an `objective` of `train`.

    Attributes:
        exit: Loss of a lower block that is added.
        dropout: Edges that are cut while training.
    """

    exit: EarlyExit | None = None
    dropout: EdgeDropout | None = None

    def __call__(
        self, model: DiffusionTransformer, tokens: Tokens, generator: torch.Generator | None
    ) -> Float[Tensor, ""]:
        """The loss of a batch; noise and cut rows come from `generator`."""
        own = loss_batch(model, tokens, None, generator)
        kept: list[Tensor] = []
        hooks: list[tuple[str, Hook]] = []
        if self.dropout is not None:
            hooks += self.dropout.hooks(own.tokens, generator)
        if self.exit is not None:
            hooks.append((f"blocks.{self.exit.layer}.hook_resid_post", lambda resid, hook: kept.append(resid)))
        logits = model.run_with_hooks(
            own.tokens, attention_mask=model.all_real(own.tokens), logits_at=own.rows, fwd_hooks=hooks, **own.beside
        )
        loss = own.loss(logits)
        if self.exit is not None:
            loss = loss + self.exit.loss(model, kept[0][:, : own.tokens.shape[1]], own.tokens)
        return loss
