"""The logit lens: what the network would predict if it ended after each layer, at each step of the loop.

The state h of the residual stream at a layer is read through the last norm and the unembedding, logits = W_U ln(h), as
if no block followed (nostalgebraist 2020, "interpreting GPT: the logit lens"). In the denoising loop every step reads
another canvas, so the predictions are a table by step, layer and position.

The states of early layers are in other bases than the last norm expects. A tuned lens (Belrose et al. 2023, arXiv
2303.08112) reads W_U ln(h + h W + b) instead, with an affine map for each layer that `fit_translators` fits.

Layer l is the state that enters block l ("0_pre", "1_pre", ...), and layer `n_layers` is the state after the last block
("final_post"), whose logits are those of the network. The labels are those of TransformerLens's lens.

Positions are those of the predicted tokens. Where the state is, in the row of the position itself or in the row
before, depends on the model's readout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.engine.answer import Ranking
from diffusion_lens.analysis.engine.inputs import Inputs, Readable, SharedPass, shared_passes
from diffusion_lens.analysis.lens.tuned import (
    NOTHING,
    Budget,
    Canvases,
    Translators,
    divergence,
    logits_of,
    require_plain_readout,
)
from diffusion_lens.hooks.names import FwdHooks, resid_entering
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import run_of
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance, shaped, shown_model, texts_of
from diffusion_lens.settings import Whole, one_of, pick_indices, takes, whole_number
from diffusion_lens.settings.figures import styled
from diffusion_lens.settings.shared import LensSettings

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
class LogitLens(PicturedResult, Saved):
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

    KIND = "logit lens"
    SHOWS = "what each layer predicts at each position, with the entropy of the prediction"
    _SAID = ("show", "target")
    ENTRIES: ClassVar[Mapping[str, Any]] = {"model": str, "blank": int | None}
    AXES = (("*step", "steps"), ("layer", "layers"), ("layer", "labels"), ("selected", "positions"))

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
        """The tables of one step, without the step axis; a `ValueError` if the step was not read."""
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

    @styled
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
        of a step. Returns the matplotlib axes.

        Args:
            position: Position to draw at every step. Give either this or `step`; without steps, neither.
            step: Step to draw at every position.
            row: Row of the batch.
            show: What the colour shows: "entropy", "kl", "rank" (of a target, as a logarithm) or "probability".
            target: Index of the target.

        Raises:
            ValueError: The step or the position was not read, or the choice is not unique.
        """
        one_of(*SHOWN)("show", show)
        if self.steps is not None and (position is None) == (step is None):
            raise ValueError("the lens has several steps: give either step=, or position= to draw it at every step")
        if step is not None:
            return self.at_step(step).plot(row=row, show=show, target=target, ax=ax, title=title or f"step {step}")
        index: Any = slice(None)
        if position is None:
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

    def _shows(self, show: str = "entropy", target: int = 0) -> str:
        of = {
            "entropy": "entropy of the prediction",
            "kl": "KL divergence from the last layer",
            "rank": f"rank of target {target}",
            "probability": f"probability of target {target}",
        }
        return self.SHOWS.replace("entropy of the prediction", of[one_of(*SHOWN)("show", show)])

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
        rows, limits = lens._row_labels(0), (0.0, float(values.nan_to_num().max()))
        return plots.labelled_map(
            values, rows=rows, layers=self.labels, xlabel=XLABEL, hue=hue, limits=limits, bar=bar, title=title
        )

    def _row_labels(self, row: int) -> list[str]:
        """Each position with its token."""
        tokens = self.tokens[row].tolist()
        return [f"{i}  {plots.readable(self.words[t])}" for i, t in zip(self.positions, tokens, strict=True)]

    def __repr__(self) -> str:
        steps = "" if self.steps is None else f"{len(self.steps)} steps, "
        size = f"{steps}{len(self.layers)} layers, {len(self.targets)} x {len(self.positions)} positions"
        return f"LogitLens({shown_model(self.record)}, {size}, top {self.top_tokens.shape[-1]})"


Targets = str | int | Sequence[str | int] | Tensor | None


@takes(LensSettings)
@torch.no_grad()
def logit_lens(
    model: DiffusionTransformer,
    inputs: Readable,
    *,
    settings: LensSettings,
    steps: Iterable[Whole] | None = None,
    branch: str = "conditional",
    targets: Targets = None,
    translators: Translators | None = None,
    attention_mask: Tensor | None = None,
    fwd_hooks: FwdHooks = (),
    max_bytes: int = 2**30,
    progress: bool = False,
) -> LogitLens:
    """What each layer predicts at each position, and at each step of a trajectory.

    A trajectory is read on its recorded canvases, as in a forced replay: hooks that are attached to the model, or given
    as `fwd_hooks`, see the step and the whole canvas, and change what is read after them. Without hooks, steps with the
    same canvas share a forward pass; a causal model takes a single one. The unembedding goes over blocks of rows, and
    only the states that are read are stored, for one pass at a time.

    Probabilities, entropy and KL are those of all logits of the network. Ranks and likeliest tokens are among the
    tokens that the model can write, that is, without [MASK].

    Args:
        model: Model, of either variant.
        inputs: A trajectory, read at every step; or texts, tokens, queries or facts, read in one pass outside the
            loop.
        settings: What is read.
        steps: Steps of the trajectory; by default all.
        branch: Branch of guidance, "conditional" or "unconditional". KL compares a layer with the last layer of the
            same branch, not with guided logits.
        targets: Tokens whose rank and probability are read. A token or several, as text or id, are read at every
            position; Int[batch selected] has one for each selected position, -1 for none. By default the token at each
            position: of a trajectory the one that it ends with, of a query the answer's, otherwise the input's own.
        translators: Maps of a tuned lens; by default the lens is direct.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        fwd_hooks: Pairs (hook point or predicate, function), attached to every pass.
        max_bytes: Memory to use in addition to the weights. With less memory the lens unembeds smaller blocks and,
            where the states of a canvas do not fit, takes several passes.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A layer, position, step, branch or target does not exist; a hook is attached to the last norm or the
            unembedding; the translators were fitted on other weights; or the budget is too small.

    Warns:
        UserWarning: Another network wrote the trajectory.
    """
    given = Inputs.of(model, inputs, attention_mask=attention_mask, fwd_hooks=fwd_hooks)
    is_hooked = model.is_hooked or bool(fwd_hooks)
    with run_of(model, fwd_hooks, edits=False):
        if is_hooked:
            require_plain_readout(model, fwd_hooks)
        canvases = Canvases.of(given, steps, branch)
        selected = canvases.pick_positions(settings.positions)
        picked = pick_indices("layers", settings.layers, model.cfg.n_layers + 1)
        if translators is not None:
            translators.require_for(model, picked)
        n_top = min(settings.top_k, int(model.cfg.writable(torch.arange(model.cfg.d_vocab_out)).sum()))
        rows, chosen = canvases.rows(selected), _targets(canvases, targets, selected)
        tables = _Tables(model, canvases, selected, rows, picked, chosen, n_top, translators)
        tables.fill(fwd_hooks, is_hooked, max_bytes, progress)
        record = {
            "branch": branch,
            "targets": "at each position" if targets is None or isinstance(targets, Tensor) else targets,
            "steps": canvases.steps,
            "forward_passes": tables.forward_passes,
            "blank": None if model.cfg.uniform_noise else model.cfg.blank,
            "translators": None if translators is None else translators.record,
            "cfg_scale": None if given.trajectory is None else given.trajectory.record["cfg_scale"],
            "inputs": given.describe(),
            **provenance(model, model.cfg),
        }
        return tables.result(record)


def _targets(canvases: Canvases, targets: Targets, positions: list[int]) -> Int[Tensor, "batch selected target"]:
    """The target tokens at each position; -1 for none."""
    model, known = canvases.canvases[0].model, canvases.known[:, positions]
    if targets is None:
        return known[..., None]
    if isinstance(targets, Tensor):
        if targets.shape != known.shape or targets.is_floating_point():
            raise ValueError(
                f"targets are {targets.dtype} {list(targets.shape)}; a tensor has one token for each row and selected "
                f"position, Int{list(known.shape)}. Give ids that apply to every position as a list"
            )
        chosen = targets.to(known)[..., None]
    else:
        several = [targets] if isinstance(targets, str | int) else targets
        ids = [model.to_single_token(x) if isinstance(x, str) else whole_number("targets", x) for x in several]
        if not ids or NOTHING in ids:
            raise ValueError(f"targets={targets!r}; give at least one token, and none below 0")
        chosen = torch.tensor(ids, device=known.device).expand(*known.shape, -1)
    if outside := chosen[(chosen != NOTHING) & ~model.cfg.writable(chosen)].unique().tolist():
        raise ValueError(
            f"{model.cfg.model_name!r} cannot write the target tokens {outside}; only 0 to d_vocab_out - 1, and never "
            "[MASK]"
        )
    return chosen


@dataclass(eq=False)
class _Tables:
    """The tables of all canvases, layers and positions; NaN and -1 where nothing is read."""

    model: DiffusionTransformer
    canvases: Canvases
    positions: list[int]
    rows: Int[Tensor, "canvas batch selected"]  # at which the positions are read
    layers: list[int]
    targets: Int[Tensor, "batch selected target"]
    top_k: int
    translators: Translators | None
    forward_passes: int = 0
    tables: dict[str, Tensor] = field(default_factory=dict)

    def fill(self, fwd_hooks: FwdHooks, is_hooked: bool, max_bytes: int, progress: bool) -> None:
        """Run all passes: the states of one are stored, unembedded in blocks, and dropped."""
        cfg, left = self.model.cfg, max_bytes
        shape = (len(self.canvases.canvases), len(self.layers), *self.targets.shape[:2])
        wide = torch.promote_types(cfg.dtype, torch.float32)
        axes = {"": (), "top": (self.top_k,), "target": (self.targets.shape[2],)}
        for name, (axis, is_token) in TABLES.items():
            absent, dtype = (NOTHING, torch.long) if is_token else (float("nan"), wide)
            self.tables[name] = torch.full((*shape, *axes[axis]), absent, dtype=dtype)
            left -= self.tables[name].nbytes
        shared = shared_passes(self.canvases.canvases, is_hooked)
        n_pos, n_read = 1, int((self.rows != NOTHING).sum(dim=(1, 2)).max())
        for one in shared:
            n_pos = max(n_pos, one.read.tokens.shape[1])
        budget = Budget.of(cfg, len({*self.layers, cfg.n_layers}), (len(self.targets), n_pos), left, max(n_read, 1))
        for one in tqdm(shared, desc="logit lens", unit="pass", disable=not progress):
            batch, selected = (self.rows[next(iter(one.served))] != NOTHING).nonzero(as_tuple=True)
            for block in torch.arange(len(batch)).split(budget.entries_per_pass) if len(batch) else ():
                self._fill_from(one, (batch[block], selected[block]), budget, fwd_hooks)

    def _fill_from(self, one: SharedPass, entries: tuple[Tensor, Tensor], budget: Budget, fwd_hooks: FwdHooks) -> None:
        """Fill some entries from one forward pass."""
        (batch, selected), n_layers = entries, self.model.cfg.n_layers
        rows = self.rows[next(iter(one.served))][entries]
        read = (*self.layers, n_layers)
        points = dict(zip(read, map(resid_entering, read, repeat(n_layers)), strict=True))
        states = one.read.states(points.values(), (batch, rows), fwd_hooks)
        self.forward_passes += 1
        for block in torch.arange(len(batch), device=batch.device).split(budget.entries_at_once):
            at = (batch[block], selected[block])
            present = None
            if self.model.head.needs_canvas:
                present = one.read.tokens[at[0], torch.tensor(self.positions, device=batch.device)[at[1]]]
            step = one.read.step
            if step is not None and isinstance(step.sigma, tuple):
                step = replace(step, sigma=tuple(step.sigma[row] for row in at[0].tolist()))
            with self.model.clock.at(step):
                by_layer = self._read(
                    {layer: states[name][block] for layer, name in points.items()}, self.targets[at], present
                )
            for index in one.served:
                is_read = self.rows[index][at] != NOTHING
                b, p, kept = at[0][is_read].cpu(), at[1][is_read].cpu(), is_read.cpu()
                for name, table in self.tables.items():
                    table[index][:, b, p] = by_layer[name][:, kept]

    def _read(
        self,
        states: dict[int, Float[Tensor, "entry d_model"]],
        targets: Int[Tensor, "entry target"],
        present: Int[Tensor, "entry"] | None,
    ) -> dict[str, Tensor]:
        """What each layer predicts at some entries, [layer entry ...], from the states of these layers and the last one
        and the token on the canvas at each position that is predicted."""
        model, some, is_absent = self.model, targets.clamp(min=0), targets == NOTHING
        last = Ranking.of(model, logits_of(model, states[model.cfg.n_layers]), present).log_probabilities

        def reading(layer: int) -> dict[str, Tensor]:
            # A function, so that nothing of the vocabulary's size outlives the reading of its layer.
            seen = states[layer] if self.translators is None else self.translators.translate(states[layer], layer)
            ranking = Ranking.of(model, logits_of(model, seen), present)
            log_p, top = ranking.log_probabilities, ranking.top(self.top_k)
            return {
                "top_tokens": top,
                "top_probabilities": ranking.probability(top),
                "entropy": -(log_p.exp() * log_p).sum(dim=-1),
                "kl": divergence(last, log_p),
                "target_ranks": ranking.rank(some).masked_fill(is_absent, NOTHING),
                "target_probabilities": ranking.probability(some).masked_fill(is_absent, float("nan")),
            }

        by_layer = [reading(layer) for layer in self.layers]
        return {name: torch.stack([each[name] for each in by_layer]).cpu() for name in TABLES}

    def result(self, record: dict[str, Any]) -> LogitLens:
        """The finished result."""
        canvases, n_layers = self.canvases, self.model.cfg.n_layers
        tables, tokens = self.tables, canvases.on_canvas(self.positions).cpu()
        rows = self.rows.cpu()
        if canvases.steps is None:
            tables, tokens, rows = {name: table[0] for name, table in tables.items()}, tokens[0], rows[0]
        ids = torch.cat([x.flatten().cpu() for x in (tables["top_tokens"], tokens, self.targets)]).unique().tolist()
        return LogitLens(
            **tables,
            targets=self.targets.cpu(),
            tokens=tokens,
            rows=rows,
            positions=self.positions,
            layers=self.layers,
            labels=[f"{layer}_pre" if layer < n_layers else "final_post" for layer in self.layers],
            steps=canvases.steps,
            words=dict(zip(ids, self.model.words(ids), strict=True)),
            record=record,
        )
