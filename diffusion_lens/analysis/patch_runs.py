"""A clean and a corrupted run of one canvas, and cells patched from the one into the other.

Patching a state of block l changes nothing before block l. So each run is taken once, what enters each block of the
corrupted one is kept, and a cell starts from there; many cells go through as one batch, each in rows of its own.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.batching import in_batches
from diffusion_lens.analysis.patch_sites import Cells, Site, Sweep
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Query
from diffusion_lens.hook_names import resid_post
from diffusion_lens.model.inputs import check_tokens
from diffusion_lens.model.text import UNREACHED
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.plots import readable
from diffusion_lens.shapes import Places, Resid, Tokens

FIRST = "hook_embed"


def stream_entering(block: int) -> str:
    """The hook point that the residual stream passes last before a block (`n_layers`: before the final norm)."""
    return resid_post(block - 1) if block else FIRST


@runtime_checkable
class RowMetric(Protocol):
    """A metric that says itself which rows of the logits it reads."""

    rows: Int[Tensor, "place"]

    def __call__(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Reading:
    """What is measured: a function of the logits, and the rows that it is shown (`None`: all)."""

    function: Callable[[Tensor], Any]
    rows: list[int] | None

    @classmethod
    def of(cls, metric: Callable[[Tensor], Any], logits_at: Sequence[int] | Tensor | None) -> "Reading":
        """The metric with its own rows, or with those given."""
        if isinstance(metric, RowMetric):
            if logits_at is not None:
                raise ValueError("the metric brings its own rows, so logits_at= must be left out")
            logits_at = metric.rows
        rows = None if logits_at is None else torch.as_tensor(logits_at)
        if rows is not None and (rows.dim() != 1 or not rows.numel() or rows.dtype not in (torch.int64, torch.int32)):
            raise ValueError(f"logits_at is {rows.dtype} {list(rows.shape)}; it must be a list of rows")
        return cls(metric, None if rows is None else rows.tolist())

    def __call__(self, logits: Float[Tensor, "batch place d_vocab_out"]) -> Tensor:
        value = self.function(logits)
        if not isinstance(value, Tensor | float | int) or torch.as_tensor(value).dim():
            given = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"the metric returned {given}; it must return one number, a scalar tensor, for one cell's logits "
                f"{list(logits.shape)}: take the mean over the batch, or pick an entry"
            )
        return torch.as_tensor(value)


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a pair: a model, and what it reads."""

    model: DiffusionTransformer
    tokens: Tokens
    real: Places | None

    @classmethod
    def of(cls, model: DiffusionTransformer, given: str | Sequence[str] | Tensor | Query) -> "Side":
        """Text, tokens or a query."""
        if isinstance(given, Query):
            given = given.tokens
        if isinstance(given, Tensor):
            return cls(model, check_tokens(given, model.cfg), None)
        return cls(model, *model.tokenize(given))

    @classmethod
    def at_step(cls, model: DiffusionTransformer, trajectory: Trajectory, step: int) -> "Side":
        """The canvas before a step, up to the last place that any row has reached."""
        first, last = trajectory.first_step, trajectory.first_step + trajectory.n_steps - 1
        if not first <= step <= last:
            raise ValueError(f"step {step} is not one of the steps {first} to {last} of the trajectory")
        canvas = trajectory.canvases[step - first]
        reached = ((canvas != UNREACHED) & trajectory.real).any(dim=0)
        reach = int(reached.nonzero().max()) + 1
        tokens = check_tokens(canvas[:, :reach].clamp(min=0), model.cfg)
        return cls(model, tokens, trajectory.real[:, :reach].to(tokens.device))

    @property
    def n_pos(self) -> int:
        """Places of the canvas."""
        return self.tokens.shape[1]

    def word(self, place: int) -> str:
        """The text of a place in the first row, as a label."""
        return readable(self.model.words([int(self.tokens[0, place])])[0])

    def embed(self) -> Resid:
        """What enters the first block."""
        resid: Resid = self.model(self.tokens, attention_mask=self.real, stop_at_layer=0)
        return resid

    def run(
        self, embedded: Resid, names: Iterable[str], rows: Sequence[int] | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """From what enters the first block: logits of some rows, and the activations at these hook points."""
        kept = {FIRST: embedded}

        def keep(activation: Tensor, hook: Any) -> None:
            kept[hook.name] = activation

        logits: Tensor = self.model.run_with_hooks(
            embedded,
            start_at_layer=0,
            attention_mask=self.real,
            logits_at=rows,
            fwd_hooks=[(name, keep) for name in names if name != FIRST],
        )
        return logits, kept


@dataclass(frozen=True, eq=False)
class Pair:
    """Both runs, taken.

    Attributes:
        side: model and canvas of the corrupted run.
        clean: activations of the clean run, by hook point.
        corrupted: activations of the corrupted run, those that enter its blocks included.
        gradients: the metric's gradient in the corrupted run, if it was asked for.
        clean_score: the metric of the clean run; NaN if its rows mean something else there.
        corrupted_score: the metric of the corrupted run.
        max_batch: rows per forward pass.
    """

    side: Side
    reading: Reading
    clean: Mapping[str, Tensor]
    corrupted: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    clean_score: float
    corrupted_score: float
    max_batch: int

    def states(self, site: Site, layer: int) -> tuple[Tensor, Tensor]:
        """A site's clean and corrupted activation, [batch pos ...].

        Raises:
            ValueError: shapes that do not fit into one another.
        """
        name = site.hook_point(layer)
        clean, corrupted = (site.by_place(kept[name]) for kept in (self.clean, self.corrupted))
        if clean.shape[2:] != corrupted.shape[2:]:
            raise ValueError(
                f"{name} is {list(self.clean[name].shape)} in the clean run and {list(self.corrupted[name].shape)} in "
                "the corrupted one: states of different width cannot stand in for one another"
            )
        return clean, corrupted

    def patched_scores(self, site: Site, layer: int, cells: Cells) -> Float[Tensor, "cell"]:
        """The metric of the corrupted run with each cell patched in turn; NaN for a cell without a place.

        Where both runs hold the same state there is nothing to run.
        """
        clean, corrupted = self.states(site, layer)
        scores = torch.full((cells.n,), math.nan)
        scores[cells.present.cpu()] = self.corrupted_score
        differs = (cells.from_clean(clean) != cells.from_corrupted(corrupted)).flatten(1).any(dim=1)
        batch = self.side.tokens.shape[0]
        changed: list[int] = cells.cell[differs].unique().tolist()

        def run(batch_of_cells: Sequence[int]) -> list[float]:
            picked = torch.tensor(batch_of_cells, device=cells.cell.device)
            logits = self._run_patched(site, layer, cells.pick(picked), clean)
            return [float(self.reading(each)) for each in logits.split(batch)]

        for done, values in in_batches(run, changed, self.max_batch // batch):
            scores[list(done)] = torch.tensor(values)
        return scores

    def _run_patched(self, site: Site, layer: int, cells: Cells, clean: Tensor) -> Tensor:
        """Logits of the corrupted run in one copy a cell, [cell*batch ...]."""

        def patch(activation: Tensor, hook: Any = None) -> Tensor:
            patched = activation.clone()
            cells.put(clean.to(patched.dtype), site.by_place(patched))
            return patched

        start = layer + site.ends_block
        resid = self.corrupted[stream_entering(start)].repeat(cells.n, 1, 1)
        real = self.side.real
        logits: Tensor = self.side.model.run_with_hooks(
            patch(resid) if site.ends_block else resid,
            start_at_layer=start,
            attention_mask=None if real is None else real.repeat(cells.n, 1),
            logits_at=self.reading.rows,
            fwd_hooks=[] if site.ends_block else [(site.hook_point(layer), patch)],
        )
        return logits


def sweep_exactly(pair: Pair, sweep: Sweep, cells: Cells, progress: bool) -> Float[Tensor, "layer *cell"]:
    """The score of every cell of a site."""
    layers = tqdm(sweep.layers, desc=f"patch {sweep.site.name}", unit="layer", disable=not progress)
    scores = torch.stack([pair.patched_scores(sweep.site, layer, cells) for layer in layers])
    return scores.view(len(sweep.layers), *cells.shape)
