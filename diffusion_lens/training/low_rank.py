"""Training of low-rank additions to the projections of every block, with all other weights frozen (Hu et al. 2021), and
of one row of the embedding.

    y = W x + (alpha / r) B A x

A begins at random and B at zero, so that the first update starts from the model itself. The additions are parameters of
the projections, `blocks.0.attn.q.lora_a`, so that the trainer updates, saves and hashes them as it does all weights.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion_lens.hooks.clock import restoring
from diffusion_lens.loading.delta import LowRank
from diffusion_lens.model.layers import Embed, Linear, Unembed, linear
from diffusion_lens.model.transformer import DiffusionTransformer


class LowRankLinear(Linear):
    """A projection with an addition of low rank. It has the weights of the projection that it stands for."""

    def __init__(self, projection: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = projection.in_features, projection.out_features
        self.weight, self.bias = projection.weight, projection.bias
        bound = 1 / math.sqrt(self.in_features)  # as torch draws the weights of a projection, and peft A
        drawn = (2 * torch.rand(rank, self.in_features, generator=generator) - 1) * bound
        self.lora_a = nn.Parameter(drawn.to(self.weight))
        self.lora_b = nn.Parameter(self.weight.new_zeros(self.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """W x + b, and the addition."""
        return super().forward(x) + F.linear(self.scale * F.linear(x, self.lora_a), self.lora_b)


class EmbedWithRow(Embed):
    """An embedding one row of which is trained, and counts `SPEED` times as fast as other weights."""

    SPEED = 5.0

    def __init__(self, embed: Embed, token: int) -> None:
        nn.Module.__init__(self)
        self.weight, self.token = embed.weight, token
        self.offset = nn.Parameter(torch.zeros_like(embed.weight[token]))

    @property
    def row(self) -> Tensor:
        """The row as it is now."""
        return self.weight[self.token] + self.SPEED * self.offset

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of tokens."""
        return torch.where(tokens.eq(self.token)[..., None], self.row, super().forward(tokens))


class UnembedWithRow(Unembed):
    """The head that is tied to such an embedding."""

    def __init__(self, unembed: Unembed, embed: EmbedWithRow) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = unembed.weight, unembed.bias
        self.of_row = (embed,)  # in a tuple, so that it is no part of the head

    def forward(self, resid: Tensor) -> Tensor:
        """Logits."""
        (embed,) = self.of_row
        row = torch.tensor([embed.token], device=resid.device)
        bias = None if self.bias is None else self.bias[row]
        return super().forward(resid).index_copy(-1, row, linear(resid, embed.row[None], bias))


@restoring
def trained_row(model: DiffusionTransformer, token: int) -> Iterator[EmbedWithRow]:
    """Let a row of the embedding be trained, whatever else is frozen, until the block ends."""
    embed, unembed = model.embed, model.unembed
    with model.clock.held():
        try:
            model.embed = made = EmbedWithRow(embed, token)
            if model.cfg.tied:
                model.unembed = UnembedWithRow(unembed, made)
            yield made
        finally:
            model.embed, model.unembed = embed, unembed


@restoring
def low_rank(
    model: DiffusionTransformer, rank: int, alpha: float, generator: torch.Generator
) -> Iterator[Mapping[str, LowRank]]:
    """Attach additions to all projections of the blocks, and freeze everything else, until the block ends.

    Gives the factors by the name of their weight; they are the parameters that a training changes. At the end, also
    after an exception, the model has its own projections, and the same weights require gradients as before.
    """
    before = {name: weight.requires_grad for name, weight in model.named_parameters()}
    replaced: list[tuple[Any, str, nn.Linear]] = []
    factors: dict[str, LowRank] = {}
    with model.clock.held():
        try:
            model.requires_grad_(False)
            for path, module in list(model.blocks.named_modules()):
                if type(module) is Linear:
                    owner, _, name = path.rpartition(".")
                    made = LowRankLinear(module, rank, alpha, generator)
                    replaced.append((model.blocks.get_submodule(owner), name, module))
                    setattr(*replaced[-1][:2], made)
                    factors[f"blocks.{path}.weight"] = LowRank(made.lora_a, made.lora_b)
            yield factors
        finally:
            for owner, name, module in replaced:
                setattr(owner, name, module)
            for name, weight in model.named_parameters():
                weight.requires_grad_(before[name])
