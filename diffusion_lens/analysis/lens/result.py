"""`LogitLens`: what each layer predicts, by step and position."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.display import PicturedResult, Table, shaped, texts_of
from diffusion_lens.records import as_dataclass, load_result, save_result, shown_model, split_fields
from diffusion_lens.settings import Whole, whole_number

# Name of each table, its last axis if it has one after [step layer batch selected], and whether it contains integers.
TABLES = {
    "top_tokens": ("top", True),
    "top_probabilities": ("top", False),
    "entropy": ("", False),
    "kl": ("", False),
    "target_ranks": ("target", True),
    "target_probabilities": ("target", False),
}
XLABEL = "state read by the lens"
_MOST_WRITTEN = 20  # positions
# What `plot` can show: the title of the colour bar, and the colours.
SHOWN = {
    "entropy": ("entropy (nats)", "viridis_r"),
    "kl": ("KL to last (nats)", "viridis_r"),
    "rank": ("log10(rank + 1)", "viridis_r"),
    "probability": ("p(target)", "viridis"),
}


@dataclass(frozen=True, eq=False)
class LogitLens(PicturedResult):
    """What each layer predicts for the token at each position.

    The position axis is that of the predicted tokens. Entries that cannot be read are NaN in tables of numbers and -1
    in tables of tokens and ranks: padding, and on a causal model positions whose preceding token is not yet written.
    On a masked diffusion model, positions that are revealed are read like the others, although the model was not
    trained to predict what it sees; `masked` tells them apart.

    Columns of the data frame: step (of a trajectory), layer, batch, pos, state, token, masked, likeliest,
    probability, entropy, kl; then target, target_rank and target_probability of the first target, target_1 and so
    on of the others.

    Attributes:
        top_tokens: Int[*step layer batch selected top], the likeliest tokens, the likeliest first.
        top_probabilities: Float[*step layer batch selected top], their probabilities.
        entropy: Float[*step layer batch selected] in nats, entropy of the prediction.
        kl: Float[*step layer batch selected] in nats, KL(last layer || this layer).
        target_ranks: Int[*step layer batch selected target], rank of each target; 0 is the likeliest.
        target_probabilities: Float[*step layer batch selected target], probability of each target.
        targets: Int[batch selected target], the target tokens; -1 where there is none.
        tokens: Int[*step batch selected], the token on the canvas at each position; -1 where there is none.
        rows: Int[*step batch selected], row of the network at which each position is read; -1 where none is. It is the
            same at all steps at which the position is read, except in blocks whose first token is read in the row
            before while they are open (`OpenBlock.first_shifted`).
        positions: Position of each entry of `selected`.
        layers: Number of each layer: l is the state that enters block l, the highest that after the last block.
        labels: Name of each layer, "0_pre" to "final_post".
        steps: Step of each entry of `step`; `None` (and no such axis) if the input was no trajectory.
        words: Text of every id that occurs.
        record: Branch, targets, forward passes, translators, the network that wrote the canvases, model, hash of the
            weights, hooks, versions.
    """

    top_tokens: Int[Tensor, "*step layer batch selected top"]
    top_probabilities: Float[Tensor, "*step layer batch selected top"]
    entropy: Float[Tensor, "*step layer batch selected"]
    kl: Float[Tensor, "*step layer batch selected"]
    target_ranks: Int[Tensor, "*step layer batch selected target"]
    target_probabilities: Float[Tensor, "*step layer batch selected target"]
    targets: Int[Tensor, "batch selected target"]
    tokens: Int[Tensor, "*step batch selected"]
    rows: Int[Tensor, "*step batch selected"]
    positions: list[int]
    layers: list[int]
    labels: list[str]
    steps: list[int] | None
    words: dict[int, str] = field(repr=False)
    record: dict[str, Any] = field(repr=False)

    @property
    def masked(self) -> Bool[Tensor, "*step batch selected"]:
        """True where the token is not yet revealed, and where the position is after the end of a causal text."""
        blank = self.record["blank"]
        return torch.zeros_like(self.tokens, dtype=torch.bool) if blank is None else self.tokens == blank

    def at_step(self, step: Whole) -> "LogitLens":
        """The tables of one step, without the step axis.

        Raises:
            ValueError: The step was not read.
        """
        step = whole_number("step", step)
        if self.steps is None or step not in self.steps:
            raise ValueError(f"step {step} was not read; the steps are {self.steps}")
        index = self.steps.index(step)
        tables = {name: getattr(self, name)[index] for name in (*TABLES, "tokens", "rows")}
        return replace(self, **tables, steps=None, record={**self.record, "steps": None, "step": step})

    def first_layer(self, rank: Whole = 0) -> Int[Tensor, "*step batch selected target"]:
        """The first layer from which on the target's rank is at most `rank`, in all layers that were read after it.

        -1 where the rank is higher even at the last of them, and where nothing is read.
        """
        order = torch.tensor(self.layers).argsort()
        axis = self.entropy.dim() - 3
        ranks = self.target_ranks.index_select(axis, order)
        reached = (ranks >= 0) & (ranks <= whole_number("rank", rank))
        # From the last layer back, as long as every layer has it.
        n_layers = reached.flip(axis).long().cumprod(dim=axis).sum(dim=axis)
        layers = torch.tensor([*(self.layers[i] for i in order.flip(0).tolist()), -1])
        return torch.where(n_layers > 0, layers[n_layers - 1], -1)

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_result(path, "logit lens", *split_fields(self))

    @classmethod
    def load(cls, path: str | Path) -> "LogitLens":
        """Read what `save` wrote.

        Raises:
            ValueError: The file is damaged, or gives the rows of all steps of a run together.
        """
        tensors, record = load_result(path, "logit lens")
        if tensors["rows"].shape != tensors["tokens"].shape:
            raise ValueError(
                f"{path} gives one row for all steps of a run, and a position may be read in another row at another "
                "step: apply logit_lens to the run again"
            )
        words = {int(token): word for token, word in record["words"].items()}  # JSON's keys are strings
        return as_dataclass(cls, {**tensors, **record, "words": words})

    def plot(
        self,
        position: Whole | None = None,
        step: Whole | None = None,
        *,
        row: int = 0,
        show: str = "entropy",
        target: int = 0,
        ax: Any = None,
        title: str | None = None,
    ) -> Any:
        """Heat map with the likeliest token in each cell: layers across; down, the steps of a position or the positions
        of a step.

        Args:
            position: Position to draw at every step. Give either this or `step`; without steps, neither.
            step: Step to draw at every position.
            row: Row of the batch.
            show: What the colour shows: "entropy", "kl", "rank" (of a target, as a logarithm) or "probability".
            target: Index of the target.
            ax: Matplotlib axes to draw on; by default new ones.
            title: Title of the figure.

        Returns:
            The matplotlib axes.

        Raises:
            ValueError: The step or the position was not read, or the choice is not unique.
        """
        if show not in SHOWN:
            raise ValueError(f"show={show!r}; it must be one of {', '.join(SHOWN)}")
        if self.steps is not None and (position is None) == (step is None):
            raise ValueError("the lens has several steps: give either step=, or position= to draw it at every step")
        if step is not None:
            return self.at_step(step).plot(row=row, show=show, target=target, ax=ax, title=title or f"step {step}")
        if position is None:
            index: Any = slice(None)
            labels = self._row_labels(row)
        else:
            if self.steps is None or position not in self.positions:
                raise ValueError(f"position {position} is not at several steps of this lens: {self.positions}")
            index = self.positions.index(whole_number("position", position))
            labels = [f"step {number}" for number in self.steps]
        # [layer selected], or [step layer] of one position.
        values, likeliest = self._values(show, target)[..., row, index], self.top_tokens[..., row, index, 0]
        if position is None:
            values, likeliest = values.T, likeliest.T
        known = values[~values.isnan()]
        bar, hue = SHOWN[show]
        highest = 1.0 if show == "probability" else float(known.max()) if len(known) else 0.0
        return plots.token_map(
            values,
            [[self.words[token] if token >= 0 else "" for token in entries] for entries in likeliest.tolist()],
            rows=labels,
            layers=self.labels,
            xlabel=XLABEL,
            hue=hue,
            limits=(0.0, highest),
            bar=bar,
            title=title or (f"{shown_model(self.record)}" if position is None else f"position {position}"),
            ax=ax,
        )

    def _values(self, show: str, target: int) -> Float[Tensor, "*step layer batch selected"]:
        """The numbers that a figure shows."""
        if show == "rank":
            ranks = self.target_ranks[..., target]
            return (ranks + 1).float().log10().masked_fill(ranks < 0, torch.nan)
        return self.target_probabilities[..., target] if show == "probability" else getattr(self, show)

    def _table(self) -> Table:
        n_layers, batch, _ = self.entropy.shape[-3:]
        steps = {} if self.steps is None else {"step": self.steps}
        axes = {**steps, "layer": self.layers, "batch": range(batch), "pos": self.positions}
        values: dict[str, Any] = {
            "state": shaped(self.labels, n_layers, 1, 1),
            "token": texts_of(self.tokens.unsqueeze(-3), self.words),
            "masked": self.masked.unsqueeze(-3),
            "likeliest": texts_of(self.top_tokens[..., 0], self.words),
            "probability": self.top_probabilities[..., 0],
            "entropy": self.entropy,
            "kl": self.kl,
        }
        for i in range(self.targets.shape[-1]):
            own = f"_{i}" if i else ""
            values |= {
                f"target{own}": texts_of(self.targets[..., i], self.words),
                f"target{own}_rank": self.target_ranks[..., i],
                f"target{own}_probability": self.target_probabilities[..., i],
            }
        return Table.of_cells(axes, values)

    def _picture(self) -> Any:
        """All positions, of the first step where there are several; without the tokens of many, which take long."""
        lens = self if self.steps is None else self.at_step(self.steps[0])
        title = shown_model(self.record) if self.steps is None else f"step {self.steps[0]}"
        if len(self.positions) <= _MOST_WRITTEN:
            return lens.plot(title=title)
        values, (bar, hue) = lens.entropy[:, 0].T, SHOWN["entropy"]
        highest = float(values.nan_to_num().max())
        return plots.labelled_map(
            values,
            rows=lens._row_labels(0),
            layers=self.labels,
            xlabel=XLABEL,
            hue=hue,
            limits=(0.0, highest),
            bar=bar,
            title=title,
        )

    def _row_labels(self, row: int) -> list[str]:
        """Each position with its token."""
        tokens = self.tokens[row].tolist()
        return [f"{i}  {plots.readable(self.words[t])}" for i, t in zip(self.positions, tokens, strict=True)]

    def __repr__(self) -> str:
        steps = "" if self.steps is None else f"{len(self.steps)} steps, "
        size = f"{steps}{len(self.layers)} layers, {len(self.targets)} x {len(self.positions)} positions"
        return f"LogitLens({shown_model(self.record)}, {size}, top {self.top_tokens.shape[-1]})"
