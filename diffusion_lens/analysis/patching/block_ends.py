"""Cells whose patch is local to its position in its block, moved to the end of that block.

What a block does with such a state at a position does not depend on the other positions' states there. So one pass of
the block in which every position is patched gives the stream after it at each position when that one alone is patched,
and the cells enter at the block after it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from diffusion_lens.analysis.cells import Cell, Patch, reaches_a_row
from diffusion_lens.analysis.kept_run import KeptRun, stream_entering


def moved_to_block_end(run: KeptRun, layer: int, cells: Sequence[Cell]) -> list[Cell]:
    """Cells of one layer, each with at most one patch at the same hook point, that enter after their block.

    They are returned as they are where two cells write different states at one position.

    Args:
        run: The corrupted run, with the streams entering this block and the next.
        cells: Cells that enter at this layer.
    """
    patches = [patch for cell in cells if reaches_a_row(run.input, cell) for patch in cell.patches]
    sources: dict[int, int] = {}
    for patch in patches:
        for source, target in zip(patch.source, patch.target, strict=True):
            if sources.setdefault(target, source) != source:
                return list(cells)
    if not patches:
        return list(cells)

    def write(activation: Tensor, hook: Any) -> Tensor:
        written = activation.clone()
        written[:, list(sources)] = patches[0].states[:, list(sources.values())].to(activation.dtype)
        return written

    after = run.resume(run.stream(layer), range(layer, layer + 1), hooks=[(patches[0].point, write)])

    def moved(patch: Patch) -> Patch:
        return replace(patch, point=stream_entering(layer + 1), states=after, source=patch.target)

    return [
        replace(cell, entry=layer + 1, patches=tuple(map(moved, cell.patches)))
        if reaches_a_row(run.input, cell)
        else replace(cell, patches=())
        for cell in cells
    ]
