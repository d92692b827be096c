"""The effect of masking a written token again, on itself and on others.

One written position i of a canvas x is masked at a time. On itself, the effect is log p(x_i | x without i): how sure
the network is of the token when it no longer sees it. On another position j, it is the change of the prediction there,

    KL(p_j before || p_j after)    and    log p_j(x_j) after - log p_j(x_j) before.

A network predicts masked positions, so a written j is masked too, before and after (others="masked"); "present" reads
the output at j with its token in place, for which networks are not trained. A position that is still masked on the
canvas is read as it is, and x_j is the token that the run writes there in the end. Lu 2026 (arXiv 2604.23235) masks
tokens again in the course of a run, and finds that the effect is largest in the middle, and almost all of it direct.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.beliefs.runs import title_of
from diffusion_lens.analysis.engine.answer import clean_logits
from diffusion_lens.analysis.engine.batching import in_batches, rows_at_once
from diffusion_lens.analysis.engine.inputs import Inputs
from diffusion_lens.denoising.same_network import canvas_provenance
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance, shown_model
from diffusion_lens.settings import Whole, one_of, pick_indices, whole_number
from diffusion_lens.settings.figures import styled


@dataclass(frozen=True, eq=False)
class RemaskEffect(PicturedResult, Saved):
    """How predictions change when one written token is masked again.

    Columns of the data frame: masked, read, masked_token, read_token, kl, change, a row for each pair of positions.

    Attributes:
        own: Float[selected], log p of the token at the position that is masked.
        kl: Float[selected target] in nats, of the prediction before from that after; NaN at the masked position itself.
        change: Float[selected target] in nats, of log p of the token at the position that is read, or if that is
            masked, of the one that the run writes there; NaN at the masked position itself, and if there is no token.
        masked: Positions that are masked again.
        read: Positions that are read: all that were not given.
        str_tokens: Text of these tokens at each position of the canvas.
        record: Step, row, how written positions are read, trajectory, model, hash of the weights, hooks, versions.
    """

    KIND = "effect of masking again"
    SHOWS = (
        "how much the prediction at one position changes, as a KL divergence, when the token at another is masked again"
    )
    AXES = (("selected", "masked"), ("target", "read"))

    own: Float[Tensor, "selected"]
    kl: Float[Tensor, "selected target"]
    change: Float[Tensor, "selected target"]
    masked: list[int]
    read: list[int]
    str_tokens: list[str]
    record: dict[str, Any]

    def _check(self) -> None:
        if outside := [each for each in (*self.masked, *self.read) if not 0 <= each < len(self.str_tokens)]:
            raise ValueError(f"position {outside[0]} is outside the {len(self.str_tokens)} tokens")

    @property
    def collateral(self) -> Float[Tensor, "selected"]:
        """Sum of the KL over all other positions, in nats."""
        return self.kl.nansum(dim=1)

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The KL of each pair, a row for each masked position; returns the matplotlib axes."""
        return plots.labelled_map(
            self.kl,
            rows=self._words(self.masked),
            layers=self._words(self.read),
            xlabel="position that is read",
            hue="Purples",
            limits=(0.0, float(self.kl.nan_to_num().max())),
            bar="KL (nats)",
            title=title or title_of(self.record, "effect of masking a token again"),
            ax=ax,
        )

    def _words(self, positions: Sequence[int]) -> list[str]:
        return [f"{pos} {plots.readable(self.str_tokens[pos])}" for pos in positions]

    def _table(self) -> Table:
        words = [[self.str_tokens[pos] for pos in positions] for positions in (self.masked, self.read)]
        values = {
            "masked_token": [[word] * len(self.read) for word in words[0]],
            "read_token": [words[1]] * len(self.masked),
            "kl": self.kl,
            "change": self.change,
        }
        return Table.of_cells({"masked": self.masked, "read": self.read}, values, most="kl")

    def __repr__(self) -> str:
        direct, other = float(self.own.exp().mean()), float(self.collateral.mean())
        return (
            f"RemaskEffect({shown_model(self.record)}, {len(self.masked)} positions masked, p of the own token "
            f"{direct:.3f}, KL of all others {other:.3g} nats)"
        )


@begins_run
@torch.no_grad()
def remask_effect(
    model: DiffusionTransformer,
    trajectory: Trajectory,
    *,
    positions: Iterable[Whole] | None = None,
    step: Whole = -1,
    row: Whole = 0,
    others: str = "masked",
    max_bytes: Whole = 2**30,
    progress: bool = False,
) -> RemaskEffect:
    """The effect of masking written positions of a canvas again, one at a time, on themselves and on all others.

    The caller's hooks act. A time-conditioned network is given the time of the step, at the final canvas that of the
    last one. Under guidance it is the conditional branch.

    Args:
        model: A model with full attention that writes [MASK] away.
        trajectory: Run whose canvas is read.
        positions: Written positions to mask, by default all; negative ones from the end.
        step: Index of the canvas in `trajectory.canvases`; by default the final one.
        row: Row of the batch.
        others: How another written position is read: "masked" too, which takes a forward pass for each pair, or
            "present", as it is, which takes one for each position.
        max_bytes: Most memory for one batch of forward passes and the predictions before.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The model has no [MASK], or writes block after block; a position was given or is masked; or the
            budget is too small.
    """
    one_of("masked", "present")("others", others)
    limit = whole_number("max_bytes", max_bytes)
    _require_remaskable(model)
    Inputs.of(model, trajectory)  # which refuses canvases that the model cannot read
    (row_index,) = pick_indices("row", [row], len(trajectory))
    (index,) = pick_indices("step", [step], len(trajectory.canvases))
    run = trajectory.row(row_index)
    canvas = run.canvases[index, 0]
    tokens = torch.where(run.is_masked(canvas), run.tokens[0], canvas)
    read = (~run.given & run.real)[0].nonzero()[:, 0].tolist()
    still_masked = {pos for pos in read if bool(run.is_masked(canvas)[pos])}
    written = [pos for pos in read if pos not in still_masked]
    chosen = written if positions is None else pick_indices("positions", positions, len(canvas))
    if unfit := [pos for pos in chosen if pos not in written]:
        why = "is masked on this canvas" if unfit[0] in still_masked else "was given, or is padding"
        raise ValueError(f"position {unfit[0]} {why}; mask positions again that the run has written: {written}")
    if not chosen:
        raise ValueError("nothing is written on this canvas, so nothing can be masked again: give a later step")

    passes = _Passes(model, run, min(index, run.n_steps - 1) + run.first_step, canvas, limit, len(read))
    # 1. The predictions before: of a written position with it masked alone, or as it is.
    alone = [frozenset() if pos in still_masked or others == "present" else frozenset({pos}) for pos in read]
    before = torch.empty(len(read), model.cfg.d_vocab_out)
    own: dict[int, float] = {}
    asked = {(masked, pos): place for place, (masked, pos) in enumerate(zip(alone, read, strict=True))}
    asked |= {(frozenset({pos}), pos): asked.get((frozenset({pos}), pos), -1) for pos in chosen}
    for (masked, pos), log_p in passes.log_p(list(asked), progress):
        place = asked[masked, pos]
        if place >= 0:
            before[place] = log_p
        if masked == {pos}:
            own[pos] = float(log_p[tokens[pos]])
    # 2. The predictions after.
    shape = (len(chosen), len(read))
    kl, change = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    pairs: dict[tuple[frozenset[int], int], list[tuple[int, int]]] = {}
    for i, pos in enumerate(chosen):
        for j, other in enumerate(read):
            if other != pos:
                pairs.setdefault((alone[j] | {pos}, other), []).append((i, j))
    is_known = model.cfg.writable(tokens)
    for key, after in passes.log_p(list(pairs), progress):
        for i, j in pairs[key]:
            p = before[j].exp()
            kl[i, j] = torch.where(p > 0, p * (before[j] - after), 0.0).sum()
            if bool(is_known[read[j]]):
                change[i, j] = after[tokens[read[j]]] - before[j, tokens[read[j]]]
    record = {
        "step": index + run.first_step,
        "row": row_index,
        "others": others,
        "trajectory": canvas_provenance(run.record),
        **provenance(model, model.cfg),
    }
    texts = [run.words[token] for token in tokens.tolist()]
    return RemaskEffect(torch.tensor([own[pos] for pos in chosen]), kl, change, chosen, read, texts, record)


class _Passes:
    """Forward passes over variants of one canvas, in which some positions are masked."""

    def __init__(
        self,
        model: DiffusionTransformer,
        run: Trajectory,
        step: int,
        canvas: Int[Tensor, "pos"],
        limit: int,
        n_read: int,
    ) -> None:
        self.model, self.run, self.step, self.canvas = model, run, step, canvas
        kept = 4 * n_read * model.cfg.d_vocab_out
        self.size = rows_at_once(model.cfg, len(canvas), n_read, limit - kept) if limit > kept else 0
        if not self.size:
            raise ValueError(
                f"the predictions at {n_read} positions take {kept:,} bytes beside one forward pass, and max_bytes is "
                f"{limit:,}: raise it, or give a shorter run"
            )

    def log_p(
        self, asked: Sequence[tuple[frozenset[int], int]], progress: bool
    ) -> Iterable[tuple[tuple[frozenset[int], int], Float[Tensor, "d_vocab_out"]]]:
        """log p of all tokens at a position with others masked, for each of these pairs."""
        variants: dict[frozenset[int], list[int]] = {}
        for masked, pos in asked:
            variants.setdefault(masked, []).append(pos)
        with tqdm(total=len(variants), desc="masking again", unit="canvas", disable=not progress) as bar:
            for some, found in in_batches(partial(self._run, variants), list(variants), self.size):
                yield from found
                bar.update(len(some))

    def _run(self, variants: dict[frozenset[int], list[int]], some: Sequence[frozenset[int]]) -> list[Any]:
        model, device = self.model, self.model.cfg.device
        tokens: Tokens = self.canvas.repeat(len(some), 1)
        positions = torch.zeros_like(tokens, dtype=torch.bool)
        for i, masked in enumerate(some):
            tokens[i, list(masked)] = self.run.blank
            positions[i, variants[masked]] = True
        state = self.run.repeat(len(some)).state_at(self.step, device, tokens)
        real = self.run.real.to(device).expand_as(state.tokens)
        with model.clock.at(state):
            rows = model.readout.locate(positions.to(device), real, state.block)
            logits = model.forward(state.tokens, attention_mask=real, logits_at=rows)
            log_p = clean_logits(model, logits.float(), state.tokens[positions.to(device)]).log_softmax(dim=-1).cpu()
        places = positions.nonzero().tolist()
        return [((some[i], pos), of_position) for (i, pos), of_position in zip(places, log_p, strict=True)]


def _require_remaskable(model: DiffusionTransformer) -> None:
    cfg = model.cfg
    if not cfg.has_mask:
        raise ValueError(
            f"{cfg.model_name!r} has no [MASK] to write over a token: give a masked diffusion model, such as 'site-mdm'"
        )
    if cfg.opens_blocks:
        raise ValueError(
            f"{cfg.model_name!r} writes block after block, and no step reads a [MASK] in a block that is filled: give "
            "a model with full attention"
        )
