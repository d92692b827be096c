"""Whether attention and MLP of a block belong to the other blocks, from the weights alone.

A trained block reads from the residual stream along directions that other parts write, and writes along those that
others read. How far is a ratio of traces (after the composition scores of Elhage et al. 2021, "A Mathematical
Framework for Transformer Circuits"): with G = Σ WᵀW over the matrices that read, H = Σ WWᵀ over those that write, each
term scaled to trace 1,

    reads(i)  = d tr(G_i H) / (tr G_i tr H)       i: the attention or the MLP of a block
    writes(i) = d tr(H_i G) / (tr H_i tr G)       H: the embedding and all other blocks, G: the head and these

Both are 1 on average for matrices that do not know of each other, such as a block of another seed; in trained blocks
both are above 1. In a network that nobody trained all are 1, and nothing follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_lens.model.block import Block
from diffusion_lens.model.transformer import DiffusionTransformer

# Excess over 1, of both scores together. Attention and MLPs of the embedded pair have 0.33 to 4.4, those of another
# seed up to 0.1, trained ones of the twin up to 0.23; those of the golden checkpoints, random, are within 0.03 of 0.
FOREIGN = 0.25
# Of the median of the others, so that a part is foreign only where these know each other. In a small network of
# random weights chance makes excesses of a tenth.
FOREIGN_SHARE = 0.4
LEAST_MEDIAN = 0.2
PARTS = ("attention", "MLP")


@dataclass(frozen=True)
class Composition:
    """The scores of one part of a block."""

    block: int
    part: str
    reads: float
    writes: float

    @property
    def excess(self) -> float:
        """What is above chance."""
        return self.reads + self.writes - 2


@torch.no_grad()
def compositions(model: DiffusionTransformer) -> list[Composition]:
    """The scores of every attention and MLP; it takes as long as a text of some thousand tokens."""
    width = model.cfg.d_model
    source, target = _directions([model.embed.weight]), _directions([model.unembed.weight * model.ln_final.weight])
    for block in model.blocks:
        for read, write in _parts(block):
            target, source = target + read, source + write
    scores = []
    # Computed twice, not kept: of a large network they would take some gigabytes.
    for i, block in enumerate(model.blocks):
        parts = list(_parts(block))
        others_write = source - sum(write for _, write in parts)
        others_read = target - sum(read for read, _ in parts)
        for part, (read, write) in zip(PARTS, parts, strict=True):
            scores.append(Composition(i, part, _score(read, others_write, width), _score(write, others_read, width)))
    return scores


def foreign_parts(scores: list[Composition]) -> list[Composition]:
    """Those that do not belong to the other blocks."""
    found = []
    for score in scores:
        others = sorted(each.excess for each in scores if each.block != score.block)
        median = others[len(others) // 2] if others else 0.0
        if median >= LEAST_MEDIAN and score.excess < min(FOREIGN, FOREIGN_SHARE * median):
            found.append(score)
    return found


def _parts(block: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """The directions that attention reads and writes, then those of the MLP."""
    attn, mlp = block.attn, block.mlp
    reads = [weight * block.ln1.weight for weight in (attn.q.weight, attn.k.weight, attn.v.weight)]
    yield _directions(reads), _directions([attn.o.weight.T])
    reads = [weight * block.ln2.weight for weight in (mlp.gate.weight, mlp.up.weight)]
    yield _directions(reads), _directions([mlp.down.weight.T])


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
