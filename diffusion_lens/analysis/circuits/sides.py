"""The clean and the corrupted run of a circuit: their positions and their metric."""

from dataclasses import replace

import torch

from diffusion_lens.analysis.patching.metrics import UNREAD
from diffusion_lens.analysis.patching.runs import Side


def on_one_metric(clean: Side, corrupted: Side) -> tuple[Side, Side]:
    """Both sides with the metric of the clean canvas, applied to guided logits if the clean run was guided."""
    clean = clean.guided()
    return clean, replace(corrupted, reading=clean.reading)


def require_same_positions(clean: Side, corrupted: Side) -> None:
    """Raise a `ValueError` unless the two inputs have prompt, masks and padding at the same positions."""
    if clean.extent != corrupted.extent:
        raise ValueError(
            f"the clean input has {clean.n_pos} positions and the corrupted one {corrupted.n_pos}: edges connect equal "
            "positions, so give both the same length"
        )
    real = [
        torch.ones_like(side.tokens, dtype=torch.bool) if side.real is None else side.real
        for side in (clean, corrupted)
    ]
    if bool((differs := (real[0] != real[1]).any(dim=1)).any()):
        row = int(differs.nonzero()[0])
        raise ValueError(
            f"row {row} has {int(real[0][row].sum())} tokens without padding in the clean input and "
            f"{int(real[1][row].sum())} in the corrupted one: edges connect equal positions, so pad both alike"
        )
    if clean.reading is UNREAD:
        raise ValueError(
            "the two trajectories were given their prompts at different positions, so the rows of the metric mean "
            "something else in each, and edges connect equal positions: take prompts with equally many tokens"
        )
