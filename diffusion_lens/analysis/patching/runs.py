"""The two sides of a patch grid, a clean and a corrupted run, and the cells patched from the one into the other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.cells import Cell, CellRuns, Patch
from diffusion_lens.analysis.kept_run import KeptRun, NetworkInput
from diffusion_lens.analysis.patching.metrics import UNREAD, AnswerProbability, Reading
from diffusion_lens.analysis.patching.sites import Cells, Site, Sweep
from diffusion_lens.config import UNREACHED
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Query
from diffusion_lens.model.inputs import check_attention_mask, check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.plots import readable
from diffusion_lens.shapes import PosMask, Tokens
from diffusion_lens.step_state import StepState


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
            real = None if real is None or bool(real.all()) else real
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

    @property
    def input(self) -> NetworkInput:
        """What its pass reads."""
        return NetworkInput(self.model, self.tokens, self.reading.rows, self.real, self.step)

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

    def word(self, place: int) -> str:
        """The text of a place in the first row, as a label."""
        return readable(self.model.words([int(self.tokens[0, place])])[0])


@dataclass(frozen=True, eq=False)
class SidePair:
    """Both sides of a grid, each run once.

    Attributes:
        side: Model and canvas of the corrupted run, and what is measured of it.
        clean: Activations of the clean run, by hook point.
        corrupted: The corrupted run.
        gradients: The metric's gradient in the corrupted run, if it is needed.
        clean_score: The metric of the clean run; NaN if its rows mean something else there.
        corrupted_score: The metric of the corrupted run.
        max_bytes: Memory to use beside the weights.
    """

    side: Side
    clean: Mapping[str, Tensor]
    corrupted: KeptRun
    gradients: Mapping[str, Tensor]
    clean_score: float
    corrupted_score: float
    max_bytes: int

    def cells(self, site: Site) -> CellRuns:
        """The engine that scores cells of a site.

        Raises:
            ValueError: `max_bytes` does not hold both runs and one cell.
        """
        dtype = torch.promote_types(self.corrupted.logits.dtype, torch.float32)
        return CellRuns(
            self.corrupted,
            self._measure,
            torch.tensor(self.corrupted_score, dtype=dtype),
            self.max_bytes,
            kept_bytes=sum(tensor.nbytes for tensor in (*self.clean.values(), *self.gradients.values())),
            more_row_bytes=site.written_out_bytes(self.side.model.cfg, self.side.n_pos),
        )

    def states(self, site: Site, layer: int) -> tuple[Tensor, Tensor]:
        """A site's clean and corrupted activation, [batch pos ...].

        Raises:
            ValueError: Shapes that do not fit into one another.
        """
        name = site.hook_point(layer)
        clean, corrupted = (site.by_place(run[name]) for run in (self.clean, self.corrupted.activations))
        if clean.shape[2:] != corrupted.shape[2:]:
            raise ValueError(
                f"{name} is {list(self.clean[name].shape)} in the clean run and "
                f"{list(self.corrupted.activations[name].shape)} in the corrupted one: states of different width "
                "cannot stand in for one another"
            )
        return clean, corrupted

    def patched_scores(
        self, site: Site, chosen: Sequence[tuple[int, Cells]], progress: str | None = None
    ) -> list[Float[Tensor, "cell"]]:
        """The metric of the corrupted run with each cell patched in turn; NaN for a cell without a position.

        Args:
            chosen: Layers, and the cells of each.
            progress: Title of a progress bar; by default none is shown.
        """
        engine = self.cells(site)
        cells = [cell for layer, of_layer in chosen for cell in self._cells(site, layer, of_layer)]
        scores = engine.scores(cells, progress).split([of_layer.n for _, of_layer in chosen])
        return [
            of_layer_scores.masked_fill(~of_layer.present.cpu(), math.nan)
            for of_layer_scores, (_, of_layer) in zip(scores, chosen, strict=True)
        ]

    def _cells(self, site: Site, layer: int, cells: Cells) -> list[Cell]:
        """The cells of a layer; those whose state is the same in both runs, or that have none, patch nothing."""
        clean, corrupted = self.states(site, layer)
        differs = (cells.from_clean(clean) != cells.from_corrupted(corrupted)).flatten(1).any(dim=1)
        changed = set(cells.cell[differs].tolist())
        moved: dict[int, list[tuple[int, int]]] = {index: [] for index in changed}
        for index, *pair in zip(cells.cell.tolist(), cells.source.tolist(), cells.target.tolist(), strict=True):
            if index in changed:
                moved[index].append((pair[0], pair[1]))
        heads = {} if cells.head is None else dict(zip(cells.cell.tolist(), cells.head.tolist(), strict=True))

        def patch(index: int) -> Patch:
            return Patch(
                block=layer,
                point=site.hook_point(layer),
                states=clean,
                source=tuple(source for source, _ in moved[index]),
                target=tuple(target for _, target in moved[index]),
                head=heads.get(index),
                heads_first=site.heads_first,
                is_local=site.is_local,
            )

        entry = layer + site.ends_block
        return [Cell(entry, (patch(index),) if index in changed else ()) for index in range(cells.n)]

    def _measure(
        self, logits: Float[Tensor, "batch selected d_vocab_out"], computed: Int[Tensor, "selected"]
    ) -> Float[Tensor, "cell"]:
        """The metric of each copy; rows that were not computed are those of the corrupted run."""
        if len(computed) < self.corrupted.logits.shape[1]:
            whole = self.corrupted.logits.repeat(len(logits) // len(self.corrupted.logits), 1, 1)
            whole[:, computed] = logits
            logits = whole
        return torch.tensor([float(self.side.reading(copy)) for copy in logits.split(len(self.side.tokens))])


def sweep_exactly(pair: SidePair, sweep: Sweep, cells: Cells, progress: bool) -> Float[Tensor, "layer *cell"]:
    """The score of every cell of a site."""
    title = f"patch {sweep.site.name}" if progress else None
    scores = pair.patched_scores(sweep.site, [(layer, cells) for layer in sweep.layers], title)
    return torch.stack(scores).view(len(sweep.layers), *cells.shape)
