"""`LossBatch`: what a network reads for a loss, where its logits are read, and how they are scored there."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.noise import LossTerm
from diffusion_lens.shapes import PosMask, Tokens


@dataclass(frozen=True)
class LossBatch:
    """Input and targets of a loss.

    Attributes:
        tokens: Int[batch pos], input of the network.
        rows: Batch index and row of the logits to read, Int[selected] each.
        targets: Int[selected], tokens to predict there.
        weights: Float[selected], weight of each term; the loss is their weighted sum.
        predicted: Bool[batch pos], positions of the targets; `rows`, `targets`, `weights` follow their reading order.
        n_counted: Number of positions over which the loss is a mean.
        clean: Int[batch pos], clean text that the network reads beside the tokens, of a model that attends by blocks.
        term: The loss at each position; `None` for the cross-entropy of the logits as they are.
        t, sigma: Time and noise of each position, Float[batch pos] each; `None` without a schedule of noise.
        tells: Whether the network is told the noise of each row, which is that of its first position.
    """

    tokens: Tokens
    rows: tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]]
    targets: Int[Tensor, "selected"]
    weights: Float[Tensor, "selected"]
    predicted: PosMask
    n_counted: int
    clean: Tokens | None = None
    term: LossTerm | None = None
    t: Float[Tensor, "batch pos"] | None = None
    sigma: Float[Tensor, "batch pos"] | None = None
    tells: bool = False

    @property
    def beside(self) -> dict[str, Any]:
        """What the network is given beside the tokens, as arguments."""
        given = {"clean": self.clean, "sigma": self.sigma[:, 0] if self.tells and self.sigma is not None else None}
        return {name: value for name, value in given.items() if value is not None}

    def loss(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, ""]:
        """Weighted loss of the logits read at `rows`."""
        return self._weighted(logits).sum()

    def by_position(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, "batch pos"]:
        """Contribution of each position to the loss, which is their mean; 0 where nothing is predicted."""
        weighted = self._weighted(logits) * self.n_counted
        return weighted.new_zeros(self.predicted.shape).masked_scatter(self.predicted, weighted)

    def _weighted(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, "selected"]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.term is None or self.t is None or self.sigma is None:
            return F.cross_entropy(wide, self.targets, reduction="none") * self.weights
        present, t, sigma = (x[self.predicted] for x in (self.tokens, self.t, self.sigma))
        return self.term(wide, self.targets, present, t, sigma) * self.weights

    def part(self, start: int, stop: int) -> "LossBatch":
        """Rows `start` to `stop` of the batch, with unchanged weights: the losses of all parts add up to the whole."""
        batch, pos = self.rows
        inside = (batch >= start) & (batch < stop)
        rows = (batch[inside] - start, pos[inside])
        return LossBatch(
            self.tokens[start:stop],
            rows,
            self.targets[inside],
            self.weights[inside],
            self.predicted[start:stop],
            self.n_counted,
            None if self.clean is None else self.clean[start:stop],
            self.term,
            None if self.t is None else self.t[start:stop],
            None if self.sigma is None else self.sigma[start:stop],
            self.tells,
        )
