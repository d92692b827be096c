"""Whether a block belongs to the others, from the weights alone.

A trained block reads from the residual stream along directions that other parts write, and writes along those that
others read. How far is a ratio of traces (after the composition scores of Elhage et al. 2021, "A Mathematical
Framework for Transformer Circuits"): with G = Σ WᵀW over the matrices that read, H = Σ WWᵀ over those that write, each
term scaled to trace 1,

    reads(i)  = d tr(G_i H) / (tr G_i tr H)       H: the embedding and all other blocks
    writes(i) = d tr(H_i G) / (tr H_i tr G)       G: the head and all other blocks

Both are 1 on average for matrices that do not know of each other, such as a block of another seed; in trained blocks
both are above 1. In a network that nobody trained all are 1, and nothing follows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_lens.model.transformer import DiffusionTransformer

# Excess over 1, of both scores together. Blocks of the embedded pair have 0.4 to 3, those of another seed up to 0.11.
FOREIGN = 0.2
# Of the median of the other blocks, so that a block is foreign only where these know each other. In a small network of
# random weights chance makes excesses of a tenth.
FOREIGN_SHARE = 0.3
LEAST_MEDIAN = 0.3


@dataclass(frozen=True)
class Composition:
    """One block's scores."""

    reads: float
    writes: float

    @property
    def excess(self) -> float:
        """What is above chance."""
        return self.reads + self.writes - 2


@torch.no_grad()
def compositions(model: DiffusionTransformer) -> list[Composition]:
    """The scores of every block; it takes as long as a text of some thousand tokens."""
    width = model.cfg.d_model
    reading, writing = [], []
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        reads = [weight * block.ln1.weight for weight in (attn.q.weight, attn.k.weight, attn.v.weight)]
        reads += [weight * block.ln2.weight for weight in (mlp.gate.weight, mlp.up.weight)]
        reading.append(_directions(reads))
        writing.append(_directions([attn.o.weight.T, mlp.down.weight.T]))
    source = _directions([model.embed.weight]) + sum(writing)
    target = _directions([model.unembed.weight * model.ln_final.weight]) + sum(reading)
    return [
        Composition(_score(read, source - write, width), _score(write, target - read, width))
        for read, write in zip(reading, writing, strict=True)
    ]


def foreign_blocks(scores: list[Composition]) -> list[int]:
    """The blocks that do not belong to the others."""
    found = []
    for i, score in enumerate(scores):
        others = sorted(each.excess for j, each in enumerate(scores) if j != i)
        median = others[len(others) // 2] if others else 0.0
        if median >= LEAST_MEDIAN and score.excess < min(FOREIGN, FOREIGN_SHARE * median):
            found.append(i)
    return found


def _directions(weights: list[Tensor]) -> Tensor:
    """Σ WᵀW [d_model d_model] over matrices [row d_model], each of trace 1."""
    total = torch.zeros(())
    for weight in weights:
        wide = weight.float()
        gram = wide.T @ wide
        total = total.to(gram) + gram / gram.trace()
    return total


def _score(one: Tensor, other: Tensor, width: int) -> float:
    return float(width * (one * other).sum() / (one.trace() * other.trace()))
