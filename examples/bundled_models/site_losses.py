"""Losses that say where in the network something is computed, not only what is predicted.

`EarlyExit` asks a lower block for an answer: its residual stream, read by the model's own final norm and unembedding,
should predict given tokens at given positions. `EdgeDropout` hides given tokens from given others in some blocks while
training, so that what these need has to be composed elsewhere first. `ShapedLoss` adds either to the model's own loss.
Both leave nothing on the model: a trained model is used without them.

The loss that asks for a person at the end of a name: the cross-entropy with the values of the person's relations.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diffusion_lens.data.site_facts import SiteFacts
from diffusion_lens.hooks.names import Hook
from diffusion_lens.model.loss import loss_batch
from diffusion_lens.model.shapes import Resid, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import not_negative, plain_number

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
            own.tokens,
            attention_mask=model.padding.all_real(own.tokens),
            logits_at=own.rows,
            fwd_hooks=hooks,
            **own.beside,
        )
        loss = own.loss(logits)
        if self.exit is not None:
            loss = loss + self.exit.loss(model, kept[0][:, : own.tokens.shape[1]], own.tokens)
        return loss


VALUES_MASKED = 0.9
NAMES_MASKED = 0.15  # Times t; other tokens are masked with probability t.


@dataclass(frozen=True, eq=False)
class PersonTargets:
    """The values of a person as equally likely targets at the last token of each visible name.

    Attributes:
        world: Seed of the world.
        person: Int[d_vocab d_vocab], number of the person with these two names, or -1.
        values: Int[entry candidate], ids of each person's values.
    """

    world: int
    person: Int[Tensor, "d_vocab d_vocab"] = field(repr=False)
    values: Int[Tensor, "entry candidate"] = field(repr=False)

    @classmethod
    def of(cls, world: SiteFacts, tokenizer: PreTrainedTokenizerFast) -> "PersonTargets":
        """The targets of a world."""
        n_tokens = len(tokenizer) + 1  # The last is [MASK].
        names = torch.tensor([tokenizer(person.name)["input_ids"] for person in world.people])
        person = torch.full((n_tokens, n_tokens), -1)
        person[names[:, 0], names[:, 1]] = torch.arange(len(names))
        values = [tokenizer(" ".join(person.values))["input_ids"] for person in world.people]
        return cls(world.seed, person, torch.tensor(values))

    def __call__(self, tokens: Tokens) -> Targets:
        """The targets of an input of the network."""
        person = self.person.to(tokens.device)[tokens[:, :-1], tokens[:, 1:]]
        batch, first = (person >= 0).nonzero(as_tuple=True)
        return Targets((batch, first + 1), self.values.to(tokens.device)[person[batch, first]])


@dataclass(frozen=True)
class PersonLoss:
    """An objective of `train`: values at names, in texts whose values are mostly masked.

    A value is masked with probability .9, a name with .15 t, and another token with t, where t ~ U(0, 1) is the row's.

    Attributes:
        exit: The loss, after the last block.
        values: Ids of all values.
        names: Ids of all names.
    """

    exit: EarlyExit
    values: tuple[int, ...] = field(repr=False)
    names: tuple[int, ...] = field(repr=False)

    def __call__(
        self, model: DiffusionTransformer, tokens: Tokens, generator: torch.Generator | None
    ) -> Float[Tensor, ""]:
        """The loss of a batch."""
        noisy = self.hide(tokens, model.cfg.blank, generator)
        resid = model(noisy, attention_mask=model.padding.all_real(noisy), stop_at_layer=self.exit.layer + 1)
        return self.exit.loss(model, resid, noisy)

    def hide(self, tokens: Tokens, mask_token_id: int, generator: torch.Generator | None) -> Tokens:
        """The tokens with some of them masked."""
        clean = tokens.cpu()
        p = torch.rand(len(clean), 1, generator=generator).expand(clean.shape)
        p = torch.where(torch.isin(clean, torch.tensor(self.names)), NAMES_MASKED * p, p)
        p = torch.where(torch.isin(clean, torch.tensor(self.values)), VALUES_MASKED, p)
        masked = torch.rand(clean.shape, generator=generator) < p
        return tokens.masked_fill(masked.to(tokens.device), mask_token_id)
