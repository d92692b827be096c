"""A clean and a corrupted run of one canvas, and cells patched from the one into the other.

Patching a state of block l changes nothing before block l. So each run is taken once, what enters each block of the
corrupted one is kept, and a cell starts from there; many cells go through as one batch, each in rows of its own. On a
causal model a batch also leaves out the places before its first patched one: their keys and values are kept as well.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.batching import in_batches, row_bytes, rows_at_once
from diffusion_lens.analysis.patching.metrics import UNREAD, AnswerProbability, Reading
from diffusion_lens.analysis.patching.sites import Cells, Site, Sweep
from diffusion_lens.config import UNREACHED
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Query
from diffusion_lens.hook_names import resid_post
from diffusion_lens.model.inputs import check_attention_mask, check_tokens
from diffusion_lens.model.kv_cache import KeyValueCache, LayerKeyValues
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.plots import readable
from diffusion_lens.shapes import PosMask, Resid, Tokens
from diffusion_lens.step_state import StepState

FIRST = "hook_embed"


def keys_and_values(layer: int) -> tuple[str, str]:
    """The hook points of what a block keeps for places to come."""
    return f"blocks.{layer}.attn.hook_rot_k", f"blocks.{layer}.attn.hook_v"


def stream_entering(block: int) -> str:
    """The hook point that the residual stream passes last before a block (`n_layers`: before the final norm)."""
    return resid_post(block - 1) if block else FIRST


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a pair: a model, what it reads, and what is measured there.

    Attributes:
        tokens: what the network is shown.
        real: false at padding; `None` where there is none.
        reading: `UNREAD` where the metric's rows would mean something else.
        n_held: places of the canvas; the network may be shown more, an answer that has not been reached, or the whole
            canvas where hooks of the caller see it.
        unprompted: the canvas of a run with everything given masked.
        cfg_scale: weight of guidance, 0 where there is none or the metric sees to it itself.
        step: what hooks are told of the step that the canvas belongs to.
    """

    model: DiffusionTransformer
    tokens: Tokens
    real: PosMask | None
    reading: Reading
    n_held: int
    unprompted: Tokens | None = None
    cfg_scale: float = 0.0
    step: StepState | None = None

    @classmethod
    def of(cls, model: DiffusionTransformer, given: str | Sequence[str] | Tensor | Query, reading: Reading) -> "Side":
        """Text, tokens or a query. Of tokens the network reads padding off, so a run from a residual is told it too."""
        given = given.tokens if isinstance(given, Query) else given
        if isinstance(given, Tensor):
            tokens = check_tokens(given, model.cfg)
            real = model.real_positions(tokens)
        else:
            tokens, real = model.tokenize(given)
        return cls(model, tokens, real, reading, tokens.shape[1])

    @classmethod
    def at_step(cls, model: DiffusionTransformer, trajectory: Trajectory, step: int, reading: Reading) -> "Side":
        """The canvas before a step, up to the last place that any row has reached, and what the metric is there.

        Hooks of the caller are shown the whole canvas, as in the loop; the metric is not.
        """
        state = trajectory.state_at(step, model.cfg.device)
        canvas, real, watched = state.tokens, trajectory.real.to(model.cfg.device), model.is_hooked
        n_held = int(((canvas != UNREACHED) & real).any(dim=0).nonzero().max()) + 1
        n_shown, metric = canvas.shape[1] if watched else n_held, reading.function
        if isinstance(metric, AnswerProbability):
            run = metric.asked_of(model, trajectory)
            n_shown = max(n_shown, int(metric.rows.max()) + 1)
            reading = replace(reading, function=replace(metric, answer=run.answer(step, canvas)))
            seen = check_tokens(run.seen(canvas)[:, :n_shown], model.cfg)
            return cls(model, seen, None, reading, n_held, step=state)
        tokens = check_tokens(canvas[:, :n_shown].clamp(min=0), model.cfg)
        return cls(
            model,
            tokens,
            check_attention_mask(real[:, :n_shown], len(tokens), n_shown, tokens.device),
            reading.within(n_held) if n_held < n_shown else reading,
            n_held,
            unprompted=tokens.masked_fill(state.given[:, :n_shown], trajectory.record["blank"]),
            cfg_scale=trajectory.record["cfg_scale"],
            step=state,
        )

    def lent(self, copies: int = 1) -> AbstractContextManager[None]:
        """The step lent to runs of so many copies of this side's rows."""
        return self.model.clock.at(self.step, copies)

    def guided(self) -> "Side":
        """This side with a metric of guided logits, if its run was guided."""
        if not self.cfg_scale or self.reading is UNREAD:
            return self
        with self.model.clock.at(self.step and replace(self.step, branch="unconditional")):
            unconditional = self.model(self.unprompted, attention_mask=self.real, logits_at=self.reading.rows)
        return replace(self, reading=self.reading.guided(unconditional, self.cfg_scale))

    @property
    def n_pos(self) -> int:
        """Places that the network is shown."""
        return self.tokens.shape[1]

    @property
    def extent(self) -> tuple[int, int]:
        """Places shown, and of these the places of the canvas."""
        return self.n_pos, self.n_held

    @property
    def resumes(self) -> bool:
        """Whether places before a patched one stay as they are, so that they need not run again."""
        return self.model.cfg.is_causal and self.real is None and not self.model.is_hooked

    @property
    def past_points(self) -> list[str]:
        """Where to keep what a run needs that resumes behind the first places."""
        return [name for layer in range(self.model.cfg.n_layers) for name in keys_and_values(layer) if self.resumes]

    def word(self, place: int) -> str:
        """The text of a place in the first row, as a label."""
        return readable(self.model.words([int(self.tokens[0, place])])[0])

    def embed(self) -> Resid:
        """What enters the first block."""
        with self.lent():
            resid: Resid = self.model(self.tokens, attention_mask=self.real, stop_at_layer=0)
        return resid

    def run(self, embedded: Resid, names: Iterable[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """From what enters the first block: the logits that are read, and the activations at these hook points."""
        kept = {FIRST: embedded}

        def keep(activation: Tensor, hook: Any) -> None:
            kept[hook.name] = activation

        with self.lent():
            logits: Tensor = self.model.run_with_hooks(
                embedded,
                start_at_layer=0,
                attention_mask=self.real,
                logits_at=self.reading.rows,
                fwd_hooks=[(name, keep) for name in names if name != FIRST],
            )
        return logits, kept


@dataclass(frozen=True, eq=False)
class Pair:
    """Both runs, taken.

    Attributes:
        side: model and canvas of the corrupted run, and what is measured of it.
        clean: activations of the clean run, by hook point.
        corrupted: activations of the corrupted run, those that enter its blocks included; where it `resumes`, the keys
            and values of all blocks as well.
        gradients: the metric's gradient in the corrupted run, if it was asked for.
        logits: of the corrupted run, the rows that are read.
        clean_score: the metric of the clean run; NaN if its rows mean something else there.
        corrupted_score: the metric of the corrupted run.
        max_bytes: memory to use beside the weights.
    """

    side: Side
    clean: Mapping[str, Tensor]
    corrupted: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    logits: Float[Tensor, "batch selected d_vocab_out"]
    clean_score: float
    corrupted_score: float
    max_bytes: int

    def cells_at_once(self, site: Site) -> int:
        """Cells of a site that one forward pass may hold.

        Raises:
            ValueError: not even one fits.
        """
        cfg, (batch, n_pos) = self.side.model.cfg, self.side.tokens.shape
        n_read = self.logits.shape[1]
        one_row = row_bytes(cfg, n_pos, n_read) + site.written_out_bytes(cfg, n_pos)
        one_row += sum(self.corrupted[name].nbytes for name in self.side.past_points) // batch
        tensors = (*self.clean.values(), *self.corrupted.values(), *self.gradients.values(), self.logits)
        kept = sum(tensor.nbytes for tensor in tensors)
        if self.max_bytes < kept + batch * one_row:
            raise ValueError(
                f"max_bytes={self.max_bytes:,} is too little: the clean and the corrupted run keep {kept:,} bytes, and "
                f"one cell of {site.name!r} takes {batch * one_row:,} more in {batch} rows"
            )
        left = self.max_bytes - kept
        return max(1, min(rows_at_once(cfg, n_pos, n_read, left), left // one_row) // batch)

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
        scores = torch.full((cells.n,), math.nan, dtype=torch.promote_types(self.logits.dtype, torch.float32))
        scores[cells.present.cpu()] = self.corrupted_score
        differs = (cells.from_clean(clean) != cells.from_corrupted(corrupted)).flatten(1).any(dim=1)
        changed: list[int] = cells.cell[differs].unique().tolist()

        def run(batch_of_cells: Sequence[int]) -> list[float]:
            picked = torch.tensor(batch_of_cells, device=cells.cell.device)
            logits = self._run_patched(site, layer, cells.pick(picked), clean)
            return [float(self.side.reading(each)) for each in logits.split(len(self.side.tokens))]

        for done, values in in_batches(run, changed, self.cells_at_once(site)):
            scores[list(done)] = torch.tensor(values, dtype=scores.dtype)
        return scores

    def _run_patched(self, site: Site, layer: int, cells: Cells, clean: Tensor) -> Tensor:
        """Logits of the corrupted run in one copy a cell, [cell*batch ...].

        Where the run resumes, what stands before the first patched place is that of the corrupted run.
        """
        side, start = self.side, layer + site.ends_block
        begin = int(cells.target.min()) if side.resumes else 0
        at = cells.moved(begin)

        def patch(activation: Tensor, hook: Any = None) -> Tensor:
            patched = activation.clone()
            at.put(clean.to(patched.dtype), site.by_place(patched))
            return patched

        rows = list(range(side.n_pos)) if side.reading.rows is None else [row % side.n_pos for row in side.reading.rows]
        moved = [i for i, row in enumerate(rows) if row >= begin]
        if not moved:
            return self.logits.repeat(cells.n, 1, 1)
        resid = self.corrupted[stream_entering(start)][:, begin:].repeat(cells.n, 1, 1)
        with side.lent(cells.n):
            logits: Tensor = side.model.run_with_hooks(
                patch(resid) if site.ends_block else resid,
                start_at_layer=start,
                attention_mask=None if side.real is None else side.real.repeat(cells.n, 1),
                logits_at=None if side.reading.rows is None else [rows[i] - begin for i in moved],
                past_kv_cache=self._past(begin, start, cells.n) if begin else None,
                fwd_hooks=[] if site.ends_block else [(site.hook_point(layer), patch)],
            )
        if len(moved) == len(rows):
            return logits
        whole = self.logits.repeat(cells.n, 1, 1)
        whole[:, moved] = logits
        return whole

    def _past(self, begin: int, start: int, n_cells: int) -> KeyValueCache:
        """Keys and values of the places before `begin` in the blocks from `start` on."""
        cache = KeyValueCache(self.side.model.cfg.n_layers)
        for layer in range(start, len(cache.layers)):
            held = (self.corrupted[name][:, :begin] for name in keys_and_values(layer))
            cache.layers[layer] = LayerKeyValues(*(each.repeat(n_cells, 1, 1, 1) for each in held))
        return cache


def sweep_exactly(pair: Pair, sweep: Sweep, cells: Cells, progress: bool) -> Float[Tensor, "layer *cell"]:
    """The score of every cell of a site."""
    layers = tqdm(sweep.layers, desc=f"patch {sweep.site.name}", unit="layer", disable=not progress)
    scores = torch.stack([pair.patched_scores(sweep.site, layer, cells) for layer in layers])
    return scores.view(len(sweep.layers), *cells.shape)
