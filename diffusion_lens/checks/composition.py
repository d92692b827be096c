"""Composition scores: whether the attention and the MLP of a block belong to the other blocks, from the weights alone.

A trained block reads from the residual stream along directions that other parts write, and writes along directions that
other parts read. The scores measure this by ratios of traces (after the composition scores of Elhage et al. 2021, "A
Mathematical Framework for Transformer Circuits"): with G = Σ WᵀW over the matrices that read, H = Σ WWᵀ over those that
write, each term scaled to trace 1,

    reads(i)  = d tr(G_i H) / (tr G_i tr H)       i: the attention or the MLP of a block
    writes(i) = d tr(H_i G) / (tr H_i tr G)       H: the embedding and all other blocks, G: the head and these

Both are 1 on average for unrelated matrices, such as those of a block from another seed; in trained blocks both are
above 1. In an untrained network all are 1, and nothing can be concluded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_lens.model.block import Block
from diffusion_lens.model.transformer import DiffusionTransformer

# Excess of both scores together over 2. Parts of the bundled models have 0.33 to 4.4; parts of another seed up to 0.1,
# and trained parts of the other model up to 0.23; parts of the random golden checkpoints are within 0.03 of 0.
FOREIGN = 0.25
# Share of the median of the other parts, so that a part is foreign only where the others belong together. In a small
# random network excesses of a tenth occur by chance.
FOREIGN_SHARE = 0.4
LEAST_MEDIAN = 0.2
PARTS = ("attention", "MLP")


@dataclass(frozen=True)
class Composition:
    """The scores of the attention or the MLP of one block."""

    block: int
    part: str
    reads: float
    writes: float

    @property
    def excess(self) -> float:
        """Excess of both scores over chance."""
        return self.reads + self.writes - 2


@torch.no_grad()
def compositions(model: DiffusionTransformer) -> list[Composition]:
    """The scores of every attention and MLP. The time is that of a forward pass of some thousand tokens."""
    width = model.cfg.d_model
    source, target = _directions([model.embed.weight]), _directions([model.unembed.weight * model.ln_final.weight])
    for block in model.blocks:
        for read, write in _parts(block):
            target, source = target + read, source + write
    scores = []
    # The parts are computed again instead of stored: those of a large network would take some gigabytes.
    for i, block in enumerate(model.blocks):
        parts = list(_parts(block))
        others_write = source - sum(write for _, write in parts)
        others_read = target - sum(read for read, _ in parts)
        for part, (read, write) in zip(PARTS, parts, strict=True):
            scores.append(Composition(i, part, _score(read, others_write, width), _score(write, others_read, width)))
    return scores


def foreign_parts(scores: list[Composition]) -> list[Composition]:
    """The scores of the parts that do not belong to the other blocks."""
    foreign = []
    for score in scores:
        others = sorted(other.excess for other in scores if other.block != score.block)
        median = others[len(others) // 2] if others else 0.0
        if median >= LEAST_MEDIAN and score.excess < min(FOREIGN, FOREIGN_SHARE * median):
            foreign.append(score)
    return foreign


def _parts(block: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """The directions (read, written) of the attention, then those of the MLP."""
    attn, mlp = block.attn, block.mlp
    reads = [weight * block.ln1.weight for weight in (attn.q.weight, attn.k.weight, attn.v.weight)]
    yield _directions(reads), _directions([attn.o.weight.T])
    reads = [reader.weight * block.ln2.weight for reader in mlp.readers]
    yield _directions(reads), _directions([writer.weight.T for writer in mlp.writers])


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
