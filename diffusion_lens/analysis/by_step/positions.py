"""The positions whose states are read.

    all         every position that contains a token or [MASK]
    masked      positions that contain [MASK]; under uniform noise those that the step may write
    unmasked    positions that contain a token
    predicting  rows whose logits predict a [MASK]; where the text grows, the row that predicts the next token
    answer      rows whose logits predict the tokens of an answer, for queries and facts
    indices     tokens of a row by number, without padding; negative numbers count from the row's last token, on a
                growing text from the last one that has been reached

Only "predicting", "answer" and negative indices mean the same on a diffusion model and on its AR baseline, whose text
has no masked positions.
"""

from collections.abc import Sequence

import torch

from diffusion_lens.analysis.inputs import ForwardPass
from diffusion_lens.hook_names import nearest
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, whole_numbers
from diffusion_lens.shapes import PosMask

NAMED = ("all", "masked", "unmasked", "predicting", "answer")
Positions = str | Whole | Sequence[Whole]


def check_positions(positions: Positions) -> str | list[int]:
    """A name, or indices as plain numbers.

    Raises:
        ValueError: An unknown name, no index, or the same index twice.
        TypeError: An index is not a whole number.
    """
    if isinstance(positions, str):
        if positions not in NAMED:
            raise ValueError(
                f"positions={positions!r}, nearest is {nearest(positions, NAMED, 1)!r}; it must be one of "
                f"{', '.join(map(repr, NAMED))}, or indices"
            )
        return positions
    numbers = whole_numbers("positions", positions)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"positions={numbers}; give at least one index, and each once")
    return numbers


def select(read: ForwardPass, positions: str | list[int]) -> PosMask:
    """Bool[batch pos], the selected positions of a pass.

    Raises:
        ValueError: An index outside a row, or "answer" for inputs without answers.
    """
    if positions == "all":
        return read.present
    if positions == "masked":
        return read.masked
    if positions == "unmasked":
        return read.present & ~read.masked
    if positions == "predicting":
        return read.predicting
    if positions == "answer":
        return read.answer_rows
    return _by_number(read, [int(index) for index in positions])


def nothing_selected(model: DiffusionTransformer, positions: Positions, where: str) -> ValueError:
    """The error for positions that none of the inputs has."""
    reason = "" if model.cfg.has_mask else f", because {model.cfg.model_name!r} has no [MASK]"
    return ValueError(
        f"positions={positions!r} selects no position of the {where}{reason if positions == 'masked' else ''}: "
        "'predicting' selects the rows that predict the next tokens on every model, 'all' every token"
    )


def _by_number(read: ForwardPass, indices: Sequence[int]) -> PosMask:
    present = read.present
    shortest = int(read.real.sum(dim=1).min())
    if outside := [index for index in indices if not -shortest <= index < shortest]:
        raise ValueError(f"positions={outside} are outside the shortest row, which has {shortest} tokens")
    number, n_present = present.cumsum(dim=1) - 1, present.sum(dim=1, keepdim=True)
    chosen = torch.zeros_like(present)
    for index in indices:
        chosen |= number == (index if index >= 0 else n_present + index)
    return chosen & present
