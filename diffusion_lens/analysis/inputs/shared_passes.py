"""Forward passes that stand for several canvases of one input.

Where nothing is hooked, equal canvases at consecutive steps share a pass, unless the network is told the time of each.
So do the canvases of a text that grows, which continue one another, because no position sees a later one. A hook may
act by step, and sees the whole canvas as in the loop, so that every canvas has its own pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusion_lens.analysis.inputs.forward_pass import ForwardPass
from diffusion_lens.analysis.inputs.given import Inputs
from diffusion_lens.shapes import PosMask


@dataclass(frozen=True, eq=False)
class SharedPass:
    """One forward pass, and the canvases that it stands for.

    Attributes:
        read: What the network reads: the canvas, up to the last position that is reached if nothing is hooked.
        served: The canvases, by their index.
        run: Index of the trajectory; 0 for other inputs.
    """

    read: ForwardPass
    served: dict[int, ForwardPass]
    run: int = 0

    def on_read(self, selected: PosMask) -> Tensor:
        """Selected positions of a served canvas, as positions of the pass, which ends after the last that is reached.

        Returns:
            Bool[batch pos].
        """
        return selected[:, : self.read.tokens.shape[1]]


def shared_passes(canvases: Sequence[ForwardPass], is_hooked: bool) -> list[SharedPass]:
    """The forward passes that the canvases of one input need, in the order of the canvases."""
    passes: list[SharedPass] = []
    for index in reversed(range(len(canvases))):
        canvas = canvases[index]
        if passes and not is_hooked and _covers(next(iter(passes[-1].served.values())), canvas):
            passes[-1].served[index] = canvas
        else:
            passes.append(SharedPass(canvas if is_hooked else _reached_part(canvas), {index: canvas}))
    return passes[::-1]


def passes_of(inputs: Inputs, steps: Sequence[int] | None) -> Iterator[SharedPass]:
    """The passes over all inputs, which serve steps by their place in `steps`; without steps, index 0.

    The caller's hooks see the steps in their order.
    """
    if steps is None:
        yield from (SharedPass(read, {0: read}) for read in inputs.at(None))
    elif inputs.model.is_hooked:
        for index, step in enumerate(steps):
            yield from (SharedPass(read, {index: read}, run) for run, read in enumerate(inputs.at(step)))
    else:
        for run, canvases in enumerate(zip(*(inputs.at(step) for step in steps), strict=True)):
            yield from (replace(one, run=run) for one in shared_passes(canvases, is_hooked=False))


def _reached_part(canvas: ForwardPass) -> ForwardPass:
    """One canvas up to the last position that has been reached, with all of its block."""
    # Wherever blocks begin, that of a position ends before this, and what is behind it is not seen.
    n_shown = int(canvas.present.any(dim=0).nonzero().max()) + (canvas.model.cfg.block_size or 1)
    return replace(canvas, tokens=canvas.tokens[:, :n_shown], real=canvas.real[:, :n_shown])


def _covers(wide: ForwardPass, narrow: ForwardPass) -> bool:
    """Whether a pass on one canvas computes all that is read on another."""
    if wide.told_sigma != narrow.told_sigma:
        return False
    if wide.model.cfg.grows:
        return bool((wide.tokens == narrow.tokens).where(narrow.present, True).all())
    return torch.equal(wide.tokens, narrow.tokens)
