"""Canvases of taught pairs as one batch: where the answer is read, and where its source stands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.inputs.padding import padded
from diffusion_lens.analysis.ranking import clean_logits
from diffusion_lens.hook_names import Hook
from diffusion_lens.model.attention_patterns import AttentionPattern
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.taught_pairs import TaughtCanvas


@dataclass(frozen=True, eq=False)
class CanvasBatch:
    """One canvas of each pair.

    Attributes:
        model: The network.
        tokens: Int[batch pos], padded on the right.
        real: Bool[batch pos], false at padding; `None` without padding.
        rows: Int[batch], the row of the logits in which the answer is read.
        sources: Int[batch], the position of the source.
        answers: Int[batch], the answer token.
    """

    model: DiffusionTransformer
    tokens: Tokens
    real: PosMask | None
    rows: Int[Tensor, "batch"]
    sources: Int[Tensor, "batch"]
    answers: Int[Tensor, "batch"]

    @classmethod
    def of(cls, model: DiffusionTransformer, canvases: Sequence[TaughtCanvas]) -> "CanvasBatch":
        """The canvases as they are, each with the padding that the model sees in its own tokens."""
        device = model.main_device
        tokens, real = padded(model, [canvas.tokens.to(device) for canvas in canvases])
        for row, canvas in enumerate(canvases):
            own = model.real_positions(tokens[row : row + 1, : len(canvas.tokens)])
            if own is not None:
                real[row, : len(canvas.tokens)] = own[0]
        indices = ([getattr(canvas, name) for canvas in canvases] for name in ("row", "source", "answer_token"))
        rows, sources, answers = (torch.tensor(each, device=device) for each in indices)
        return cls(model, tokens, None if bool(real.all()) else real, rows, sources, answers)

    @property
    def each(self) -> Int[Tensor, "batch"]:
        """The indices of the rows of the batch."""
        return torch.arange(len(self.tokens), device=self.tokens.device)

    @property
    def sees_source(self) -> Bool[Tensor, "batch"]:
        """Whether the reader sees the source."""
        n_pos, device = self.tokens.shape[1], self.tokens.device
        pattern = AttentionPattern.of(self.model.cfg)
        visibility = pattern.visibility(n_pos, device, self.real, origin=self.model.origins_of(self.tokens, self.real))
        allowed = visibility.dense(n_pos, n_pos, device)
        seen: Tensor = allowed[:, 0].expand(len(self.tokens), -1, -1)[self.each, self.rows, self.sources]
        return seen

    @property
    def source_tokens(self) -> Int[Tensor, "batch"]:
        """The token of each source."""
        return self.tokens[self.each, self.sources]

    def at_rows(self, x: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch d"]:
        """The entry of each canvas at the row that is read."""
        return x[self.each, self.rows]

    def logits(
        self,
        hooks: Sequence[tuple[str, Hook]] = (),
        resid: Float[Tensor, "batch pos d_model"] | None = None,
        start_at_layer: int | None = None,
    ) -> Float[Tensor, "batch d_vocab_out"]:
        """The logits in the row of each canvas, of a whole pass or of one that starts at a layer."""
        with self.model.clock.at(None, origins=self.model.origins_of(self.tokens, self.real)):
            read: Any = self.model.run_with_hooks(
                self.tokens if resid is None else resid,
                attention_mask=self.real,
                start_at_layer=start_at_layer,
                logits_at=(self.each, self.rows),
                fwd_hooks=list(hooks),
            )
        logits: Tensor = read
        return logits

    def losses(self, logits: Float[Tensor, "batch d_vocab_out"]) -> Float[Tensor, "batch"]:
        """-log p(answer) in nats, computed in float64."""
        logits = clean_logits(self.model, logits.double(), self.tokens[self.each, self.rows])
        return -logits.log_softmax(dim=-1)[self.each, self.answers]


def other_facts(forward: CanvasBatch, reverse: CanvasBatch) -> Bool[Tensor, "fact fact"]:
    """Whether two pairs of a batch are about different facts: no answer and no source of theirs is the same token.

    Another wording about the same person is no baseline for a person.
    """
    sides = (forward, reverse)
    tokens = torch.stack([batch.answers for batch in sides] + [batch.source_tokens for batch in sides])
    return (tokens[:, :, None] != tokens[:, None, :]).all(dim=0)


def mean_where(
    table: Float[Tensor, "fact fact *rest"], chosen: Bool[Tensor, "fact fact"]
) -> Float[Tensor, "fact *rest"]:
    """The mean of the chosen entries of each row; NaN where none is."""
    where = chosen.view(*chosen.shape, *[1] * (table.dim() - 2))
    return table.masked_fill(~where, 0).sum(dim=1) / where.sum(dim=1)
