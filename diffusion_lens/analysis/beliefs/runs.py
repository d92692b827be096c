"""The runs of which a question is asked: one or several with their predictions, read one after the other.

Rows of all runs form one batch. Tables of runs of different lengths and numbers of steps are filled at the end.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.denoising.predictions import Predictions
from diffusion_lens.denoising.trajectory import NoPredictions, Trajectory
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.records.results import network_of, shown_model
from diffusion_lens.settings import Whole, pick_indices
from diffusion_lens.settings.arguments import kind_of

Run = Trajectory | NoPredictions | Predictions
Runs = Run | Iterable[Run]
Answer = Iterable[Whole] | PosMask


class Read:
    """The predictions of runs, and what a result says about these.

    Attributes:
        n_rows, n_pos: Number of rows of the runs so far, and of positions of the longest.
        words: Text of every id in the runs so far.
        networks: What the records say about the network, which all runs share.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs: Iterable[Any] = [runs] if isinstance(runs, Run) else runs
        self.n_runs = self.n_rows = self.n_pos = 0
        self.words: dict[int, str] = {}
        self._network: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Predictions]:
        """The predictions of one run after the other.

        Raises:
            ValueError: There is no run, one has no predictions, or two were written by different networks.
            TypeError: An entry is no run.
        """
        for run in self._runs:
            predictions = _predictions_of(run, self.n_runs)
            network = network_of(predictions.record)
            if self.n_runs and network != self._network:
                which = [name for name in network if network[name] != self._network.get(name)]
                raise ValueError(
                    f"run {self.n_runs} was written by another network than run 0: {', '.join(which)} differ. Ask the "
                    "question of the runs of each network by themselves"
                )
            self._network = network
            yield predictions
            self.n_runs += 1
            self.n_rows += len(predictions)
            self.n_pos = max(self.n_pos, predictions.written.shape[1])
            self.words |= predictions.words
        if not self.n_runs:
            raise ValueError("there is no run; give a trajectory with predictions, model.denoise(..., predictions=5)")

    def require_rows(self, name: str, given: Any) -> None:
        """Raise a `ValueError` if a tensor that was given has other rows or positions than the runs."""
        if not isinstance(given, Tensor) or given.dim() not in (1, 2):
            return
        fitting = (self.n_rows, self.n_pos)[: given.dim()]
        if tuple(given.shape) != fitting:
            raise ValueError(
                f"{name} is of shape {list(given.shape)}, but the runs need {list(fitting)}: a row for each row"
            )

    def record(self, **settings: Any) -> dict[str, Any]:
        """The settings of a question, the number of runs, and the network that wrote them."""
        return {**settings, "runs": self.n_runs, **self._network}


def answer_of(answer: Answer | None, predictions: Predictions, first_row: int) -> PosMask:
    """Bool[batch pos], the positions of an answer in a run whose rows begin at `first_row` of all; by default all
    positions that the run predicted.

    Args:
        answer: Positions in every row, or Bool[batch pos] with the rows of all runs one after the other.

    Raises:
        ValueError: A position does not exist, or was never predicted, such as one of the prompt; or a row has none.
    """
    predicted = predictions.masked.any(dim=0)
    if answer is None:
        return predicted
    n_rows, n_pos = predicted.shape
    if isinstance(answer, Tensor) and answer.dtype == torch.bool:
        last = first_row + n_rows
        if answer.dim() != 2 or len(answer) < last or answer.shape[1] < n_pos:
            raise ValueError(
                f"answer is of shape {list(answer.shape)}, but the runs have {last} rows or more, of up to {n_pos} "
                "positions: give Bool[batch pos] with the rows of all runs, or positions"
            )
        chosen = answer[first_row:last, :n_pos].cpu()
    else:
        chosen = torch.zeros_like(predicted)
        chosen[:, pick_indices("answer", answer, n_pos)] = True
    if bool((given := chosen & ~predicted).any()):
        row, pos = given.nonzero()[0].tolist()
        raise ValueError(
            f"answer contains position {pos} of row {first_row + row}, where nothing was predicted: it was given, or "
            f"is beyond the text. Row {first_row + row} predicts {predicted[row].nonzero()[:, 0].tolist()}"
        )
    if not bool(chosen.any(dim=1).all()):
        raise ValueError(f"row {first_row + int((~chosen.any(dim=1)).nonzero()[0])} has no position of the answer")
    return chosen


def stacked(parts: Sequence[Tensor], fill: float | int | bool) -> Tensor:
    """Tables whose rows are those of a batch, one below the other, with `fill` where one has fewer columns."""
    n_columns = max(part.shape[1] for part in parts)
    padded = [part.new_full((len(part), n_columns, *part.shape[2:]), fill) for part in parts]
    for whole, part in zip(padded, parts, strict=True):
        whole[:, : part.shape[1]] = part
    return torch.cat(padded)


def _predictions_of(run: Any, index: int) -> Predictions:
    if isinstance(run, Trajectory):
        run = run.predictions
    if isinstance(run, NoPredictions):
        raise ValueError(
            f"run {index} recorded no predictions: give trajectory.predictions(model, top_k=5), which takes its steps "
            "again, or denoise with predictions=5"
        )
    if not isinstance(run, Predictions):
        raise TypeError(f"run {index} is {kind_of(run)}; give trajectories or predictions")
    return run


def title_of(record: dict[str, Any], text: str) -> str:
    """The title of a picture."""
    return f"{shown_model(record)}: {text}"
