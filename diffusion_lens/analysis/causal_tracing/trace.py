"""Causal tracing (Meng et al. 2022, arXiv 2202.05262, section 2): which states carry the answer?

Causal tracing compares three runs of one query:

    clean      the query as it is
    corrupted  the subject is corrupted as below; p(answer) is the mean over samples of the noise
    restored   the corrupted run, with one state of one position put back to its clean value: the residual stream after
               one block ("resid"), or the MLP or attention outputs of a window of blocks ("mlp", "attn")

The indirect effect of a state is p_restored - p_corrupted, and its normalized effect the share of the total effect
p_clean - p_corrupted that it recovers (Zhang and Nanda 2023, arXiv 2309.16042, section 2). With `severed`, the MLP or
attention outputs of the restored position keep their corrupted values in the blocks above, which shows the path that
the effect takes.

A cell restores the states of one position in a span of blocks. In the first block of the span only this position
changes: attention mixes positions before the state is restored, and the rest of the block acts on each position alone.
So one pass of that block with every position restored gives each cell's state there, and the cell enters at the block
after it (`engine.kept_run`). The caller's hooks may mix positions wherever they act: while there are any, cells enter
at the span's first block and are written into there too.

The corruptions make the model lose the answer (Meng et al. 2022, arXiv 2202.05262, section 2 and appendix B):

    gaussian   normal noise added to the embeddings of the subject's tokens (ROME's default)
    uniform    noise uniform in [-1, 1] added to them
    replace    normal noise instead of the embeddings
    mask       the embedding of [MASK] instead of each
    swap       the embeddings of another subject with the same number of tokens

The noise is sampled as in ROME's code, with `numpy.random.RandomState(seed)`, so that published traces are reproduced
exactly; it is scaled by `noise`. "mask" and "swap" are deterministic, so they need one sample only. All corruptions act
on the embeddings: in the denoising loop the canvas keeps its subject.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.engine.answer import Answer
from diffusion_lens.analysis.engine.kept_run import (
    Cell,
    CellBudget,
    CellRuns,
    Measure,
    NetworkInput,
    Patch,
    stream_entering,
)
from diffusion_lens.analysis.engine.layout import StateBank, as_query
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.hooks.names import attn_out, mlp_out, resid_post, shared_out
from diffusion_lens.interventions import Hook
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.inputs import check_tokens
from diffusion_lens.model.shapes import Resid
from diffusion_lens.model.text import check_known
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance, shaped, shown_model
from diffusion_lens.records.schema import require_indices
from diffusion_lens.settings import (
    INHERITED,
    Whole,
    at_least,
    checked_arguments,
    pick_indices,
    positive,
    takes,
    whole_numbers,
)
from diffusion_lens.settings.figures import styled
from diffusion_lens.settings.shared import NOISE, TraceFields

SITES = {"resid": resid_post, "mlp": mlp_out, "attn": attn_out}

T = TypeVar("T", bound="TraceSettings")
Swap = str | Sequence[Whole] | Tensor | Query | None


def swap_of(name: str, value: Any) -> "str | tuple[int, ...]":
    """A text, or the tokens of another subject: those given, or those of a query's subject."""
    if isinstance(value, str):
        return value
    tokens = value.tokens[slice(*value.subject)].tolist() if isinstance(value, Query) else value
    return tuple(at_least(0, name, token) for token in whole_numbers(name, tokens))


@dataclass(frozen=True)
class TraceSettings(TraceFields):
    """What a causal trace corrupts and restores."""

    swap: Swap = INHERITED

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update(swap=None if self.swap is None else swap_of("swap", self.swap))

    @property
    def is_noisy(self) -> bool:
        """Whether the corruption is random."""
        return self.corruption in NOISE

    @property
    def rows(self) -> int:
        """Number of rows of the corrupted run: one per sample, or one for a deterministic corruption."""
        return self.samples if self.corruption in NOISE else 1

    def span(self, layer: int, n_layers: int) -> range:
        """The blocks that are restored around `layer`."""
        if self.kind == "resid":
            return range(layer, layer + 1)
        return range(max(0, layer - self.window // 2), min(n_layers, layer + math.ceil(self.window / 2)))

    def with_noise(self: T, model: DiffusionTransformer, queries: Sequence[Query]) -> T:
        """The settings with ROME's scale of the noise on these queries, if they need one and have none."""
        return replace(self, noise=noise_scale(model, queries)) if self.is_noisy and self.noise is None else self

    def swapped(self, model: DiffusionTransformer) -> list[int]:
        """The tokens that replace the subject's; none without a swap."""
        if isinstance(self.swap, str):
            return list(_known_tokens(model, self.swap).tolist())
        return whole_numbers("swap", self.swap) if isinstance(self.swap, tuple) else []

    def hooks(self, model: DiffusionTransformer, query: Query, runs: int = 1) -> list[tuple[str, Hook]]:
        """The hook that corrupts the subject's embeddings, in a batch with so many copies of the corrupted run; row r
        gets sample r modulo `samples`.

        Raises:
            ValueError: "mask" on a model without [MASK], or a swap of another length.
        """
        (start, stop), adds = query.subject, self.corruption in ("gaussian", "uniform")
        noise = self.with_noise(model, [query]).noise
        if self.corruption == "mask":
            if not model.cfg.has_mask:
                raise ValueError(f"{model.cfg.model_name!r} has no [MASK]; corrupt with noise or swap instead")
            states = model.W_E[model.cfg.blank].detach()
        elif self.corruption == "swap":
            if len(tokens := self.swapped(model)) != stop - start:
                raise ValueError(
                    f"swap has {len(tokens)} tokens and the subject {stop - start}: take another subject of the same "
                    "length"
                )
            other = torch.tensor(tokens, device=model.cfg.device)[None]
            states = model.embed(check_tokens(other, model.cfg)).detach()
        else:
            assert noise is not None
            shape, generator = (self.samples, stop - start, model.cfg.d_model), np.random.RandomState(self.seed)
            drawn = generator.uniform(-1, 1, shape) if self.corruption == "uniform" else generator.randn(*shape)
            states = torch.from_numpy(noise * drawn).repeat(runs, 1, 1)

        def corrupt(embedded: Tensor, hook: Any) -> Tensor:
            corrupted, new = embedded.clone(), states.to(embedded)
            corrupted[:, start:stop] = embedded[:, start:stop] + new if adds else new
            return corrupted

        return [("hook_embed", corrupt)]

    def describe(self, positions: Sequence[int] | None = None, layers: Sequence[int] | None = None) -> dict[str, Any]:
        """The settings for a record, with positions and layers counted from 0; those that are not used are `None`."""
        unused = {"window"} if self.kind == "resid" else set()
        unused |= set() if self.is_noisy else {"noise", "samples"}
        described = {name: None if name in unused else value for name, value in super().describe().items()}
        return {**described, "positions": positions, "layers": layers}


def points_of(kind: str | None, block: int, cfg: DiffusionConfig) -> list[str]:
    """The hook points of a kind of state in a block, if any. The output of its shared expert is a part of the MLP's."""
    if kind is None:
        return []
    experts = cfg.experts if kind == "mlp" else None
    # With norms of their own, experts and shared one have one output, which is that of the MLP.
    adds_beside = experts is not None and experts.has_shared(block) and not experts.own_norms
    return [SITES[kind](block), *([shared_out(block)] if adds_beside else [])]


@torch.no_grad()
@checked_arguments
def noise_scale(model: DiffusionTransformer, subjects: Sequence[str | Fact | Query], factor: float = 3.0) -> float:
    """`factor` standard deviations of the embeddings of the tokens of these texts, or of the subjects of these facts or
    queries (ROME's `collect_embedding_std`).

    Raises:
        ValueError: No subjects, or a text with words that the tokenizer does not know.
    """
    if not subjects:
        raise ValueError("subjects is empty; the noise scale is measured on one text or query, or on more")
    pieces = [
        _known_tokens(model, subject) if isinstance(subject, str) else _subject_tokens(as_query(model, subject))
        for subject in subjects
    ]
    embedded = model.embed(torch.cat([piece.to(model.cfg.device) for piece in pieces])[None])
    return positive("factor", factor) * float(embedded.float().cpu().std())  # the same bits for any device


def _subject_tokens(query: Query) -> Tensor:
    return query.tokens[slice(*query.subject)]


def _known_tokens(model: DiffusionTransformer, text: str) -> Tensor:
    check_known(model, text)
    return model.to_tokens(text, prepend_bos=False)[0]


Scores = Float[Tensor, "sample selected"]
LEAST_TOTAL_EFFECT = 0.01  # of which shares are given: the noise of ten samples may be as large as a smaller one


@dataclass(frozen=True, eq=False, repr=False)
class CausalTrace(PicturedResult, Saved):
    """The causal trace of one query.

    Columns of the data frame: pos, layer, token, score, indirect_effect.

    Attributes:
        scores: Float[pos layer], p(answer) with that state restored, mean over the samples.
        token_scores: Float[pos layer selected], probability of each token of the answer, mean over the samples.
        clean_token_scores, corrupted_token_scores: Float[selected], probability of each token in these runs.
        clean, corrupted: p(answer) in the clean run, and in the corrupted one, mean over the samples.
        known: Whether the clean run's likeliest token is the answer's at every position, all read from this one canvas
            (of a bank, from each); [MASK], which the loop never writes, does not count. The loop reveals some positions
            before others and may write something else: `average_indirect_effect(known="recalled")` tests what the loop
            writes.
        str_tokens: Text at each position of the canvas.
        subject: First position of the subject and one past the last.
        positions: Position of each row of the grid.
        layers: Layer of each column of the grid.
        record: The settings, answer, query, model, hash of the weights, versions.
    """

    KIND = "causal trace"
    SHOWS = "p(answer) when one state is restored in a corrupted run, by position and layer"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"model": str, "kind": str, "answer": list[str]}
    AXES = (("pos", "positions"), ("layer", "layers"))

    scores: Float[Tensor, "pos layer"]
    token_scores: Float[Tensor, "pos layer selected"]
    clean_token_scores: Float[Tensor, "selected"]
    corrupted_token_scores: Float[Tensor, "selected"]
    clean: float
    corrupted: float
    known: bool
    str_tokens: list[str]
    subject: tuple[int, int]
    positions: list[int]
    layers: list[int]
    record: dict[str, Any]

    def _check(self) -> None:
        require_indices("positions", self.positions, len(self.str_tokens))

    @property
    def indirect_effect(self) -> Float[Tensor, "pos layer"]:
        """Rise of p(answer) when a state is restored: scores - corrupted."""
        return self.scores - self.corrupted

    @property
    def total_effect(self) -> float:
        """Fall of p(answer) under the corruption: clean - corrupted."""
        return self.clean - self.corrupted

    @property
    def normalized_effect(self) -> Float[Tensor, "pos layer"]:
        """Share of the total effect that a restored state recovers: indirect_effect / total_effect. NaN where the total
        effect is below 0.01: the corruption takes nothing away that could be recovered."""
        return share_of_total(self.indirect_effect, torch.tensor(self.total_effect))

    def _table(self) -> Table:
        return Table.of_cells(
            {"pos": self.positions, "layer": self.layers},
            {
                "token": shaped([self.str_tokens[pos] for pos in self.positions], -1, 1),
                "score": self.scores,
                "indirect_effect": self.indirect_effect,
            },
            most="indirect_effect",
        )

    @styled
    def plot(self, ax: Any = None, title: str | None = None, limits: tuple[float, float] | None = None) -> Any:
        """ROME's heat map: tokens down, the subject's starred, layers across. Returns the matplotlib axes.

        Args:
            limits: Probabilities at the ends of the colour scale; by default from corrupted to the highest score.

        Raises:
            ValueError: A trace without cells, of a fact that an average leaves out.
        """
        if not self.positions:
            raise ValueError(
                "this trace has no cells: the fact was left out of an average as one that the model does not know "
                f"(p(answer) = {self.clean:.2g} in the clean run)"
            )
        return plots.heat_map(
            self.scores,
            str_tokens=self.str_tokens,
            subject=self.subject,
            positions=self.positions,
            layers=self.layers,
            kind=self.record["kind"],
            answer=self.record["answer"],
            limits=limits or (self.corrupted, float(self.scores.nan_to_num().max())),
            title=title or f"{shown_model(self.record)}\nclean {self.clean:.2f}, corrupted {self.corrupted:.2f}",
            ax=ax,
        )


@takes(TraceSettings)
@torch.no_grad()
def causal_trace(
    model: DiffusionTransformer,
    query: Query | Fact | StateBank,
    settings: TraceSettings,
    *,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> CausalTrace:
    """Score every (position, layer) cell of one query by restoring it in a corrupted run.

    Args:
        model: Masked diffusion model or causal model.
        query: Canvas, subject and answer; or a fact, which is laid out as in `average_indirect_effect`. The probability
            of an answer of several tokens is the product of the tokens' probabilities. Of a `StateBank`, all numbers
            are means over its canvases, which have the same noise; positions at which they differ have the text "…".
        settings: What is corrupted and restored.
        max_bytes: Memory to use in addition to the weights.

    Raises:
        ValueError: A setting out of range, a query without an answer, a budget too small for one cell.
    """
    # 1. Lay out the inputs of the clean and the corrupted run: of each canvas one row, and one for each sample.
    bank: StateBank | None = None
    if isinstance(query, StateBank):
        bank, query = query, query.queries[0]
    elif not isinstance(query, Query):
        query = as_query(model, query)
    settings = settings.with_noise(model, [query])
    canvas = (query.tokens[None] if bank is None else bank.tokens).to(model.cfg.device)
    by_sample = canvas.repeat_interleave(settings.rows, dim=0)
    clean_answer = answer = Answer.of(model, query, canvas)
    if len(canvas) > 1:
        answer = Answer.of(model, query, by_sample)
    real = model.padding.real(canvas)
    positions = pick_indices("positions", settings.positions, len(query.tokens))
    layers = pick_indices("layers", settings.layers, model.cfg.n_layers)
    rows = answer.rows.tolist()
    clean = NetworkInput(model, canvas, rows, real)
    real = None if real is None else real.repeat_interleave(settings.rows, dim=0)
    hooks = settings.hooks(model, query, len(canvas))
    corrupted = NetworkInput(model, by_sample, rows, real, hooks=hooks)

    # 2. Run both, and score every cell.
    try:
        restored = RestoredRuns(clean, corrupted, query.subject, settings, layers, max_bytes)
    except ValueError:
        if bank is None or len(canvas) == 1:
            raise
        return _of_parts(model, bank, settings, max_bytes, progress)
    runs = AnswerRuns(restored, clean_answer, answer)
    scores = runs.grid(positions, "trace" if progress else None)

    # 3. Average over the samples; an answer's probability is the product of its tokens' probabilities.
    return CausalTrace(
        scores=scores.prod(dim=3).mean(dim=2),
        token_scores=scores.mean(dim=2),
        clean_token_scores=runs.clean_scores.mean(dim=0).cpu(),
        corrupted_token_scores=runs.corrupted_scores.mean(dim=0).cpu(),
        clean=runs.clean_scores.prod(dim=1).mean().item(),
        corrupted=runs.corrupted_scores.prod(dim=1).mean().item(),
        known=clean_answer.is_likeliest(model, restored.clean.logits),
        str_tokens=model.words(query.tokens.tolist()) if bank is None else _common_words(model, bank),
        subject=query.subject,
        positions=positions,
        layers=layers,
        record={
            **record_of_trace(model, query, settings, positions, layers),
            **({"query": query.describe()} if bank is None else {"bank": bank.describe()}),
        },
    )


def _of_parts(
    model: DiffusionTransformer, bank: StateBank, settings: TraceSettings, max_bytes: int, progress: bool
) -> CausalTrace:
    """The trace of a bank whose canvases do not fit into the memory together: the mean of those of its halves."""
    half, shared = len(bank) // 2, {"settings": settings, "max_bytes": max_bytes, "progress": progress}
    parts = StateBank(bank.queries[:half], bank.origin), StateBank(bank.queries[half:], bank.origin)
    one, other = (causal_trace(model, part, **shared) for part in parts)
    shares = len(parts[0]) / len(bank), len(parts[1]) / len(bank)
    means: dict[str, Any] = {
        name: shares[0] * getattr(one, name) + shares[1] * getattr(other, name)
        for name in ("scores", "token_scores", "clean_token_scores", "corrupted_token_scores", "clean", "corrupted")
    }
    return replace(
        one,
        **means,
        known=one.known and other.known,
        str_tokens=_common_words(model, bank),
        record={**one.record, "bank": bank.describe()},
    )


def _common_words(model: DiffusionTransformer, bank: StateBank) -> list[str]:
    """The text at each position of a bank's canvases."""
    tokens = bank.tokens
    is_common = (tokens == tokens[0]).all(dim=0).tolist()
    return [word if same else "…" for word, same in zip(model.words(tokens[0].tolist()), is_common, strict=True)]


def record_of_trace(
    model: DiffusionTransformer, query: Query, settings: TraceSettings, positions: Sequence[int], layers: Sequence[int]
) -> dict[str, Any]:
    """Settings, answer and model, for the record of a trace."""
    answer = {"answer": model.words(query.answer_tokens)}
    return {**settings.describe(positions, layers), **answer, **provenance(model, model.cfg)}


def share_of_total(effect: Float[Tensor, "*rest"], total: Float[Tensor, "*#rest"]) -> Float[Tensor, "*rest"]:
    """Indirect effects as shares of total effects; NaN where these are below `LEAST_TOTAL_EFFECT`."""
    return torch.where(total >= LEAST_TOTAL_EFFECT, effect / total, torch.nan).to(effect.dtype)


class RestoredRuns:
    """The clean and the corrupted run of a canvas, or of several, and the cells that are restored in the corrupted one.

    The clean input has a row for each canvas, the corrupted one a row for each sample of each, those of a canvas one
    after the other; both read the same rows of logits. The corruption touches `subject`. A row takes at least
    `least_by_row` bytes after its pass.

    Raises:
        ValueError: `max_bytes` is too small for the two runs and one cell. Nothing has been run then.
    """

    def __init__(
        self,
        clean: NetworkInput,
        corrupted: NetworkInput,
        subject: tuple[int, int],
        settings: TraceSettings,
        layers: Sequence[int],
        max_bytes: int,
        least_by_row: int = 0,
    ) -> None:
        # 1. If no position sees later ones, drop those that affect neither the rows read nor the corruption.
        resumes, self.first_touched = corrupted.resumes_at_positions, 0
        if resumes:
            self.first_touched = corrupted.seen_from(subject[0])
            if corrupted.rows:
                n_pos = corrupted.sees_up_to(max(*corrupted.read_rows, subject[1] - 1))
                clean, corrupted = (replace(run, tokens=run.tokens[:, :n_pos]) for run in (clean, corrupted))
        self.settings, self.cfg, self.samples = settings, corrupted.model.cfg, corrupted.n_rows
        self.n_layers, self.is_hooked = self.cfg.n_layers, corrupted.is_hooked

        # 2. What the runs keep: the clean states, the streams that cells start from, and severed outputs.
        self.spans: dict[int, range] = {}
        starts, states, entered, left, severed = [], [], [], [], []
        for layer in layers:
            span = self.spans[layer] = settings.span(layer, self.n_layers)
            starts.append(span.start)
            entered.append(stream_entering(span.start))
            left.append(stream_entering(span.start + 1))
            for block in span:
                states += points_of(settings.kind, block, self.cfg)
        if settings.severed:
            for block in range(min(starts) + 1, self.n_layers):
                severed += points_of(settings.severed, block, self.cfg)
        names, streams = list(dict.fromkeys(states)), list(dict.fromkeys([*entered, *left, *severed]))

        # 3. Refuse a budget that is too small before anything is run.
        n_restored = 0 if self.is_hooked or settings.kind == "resid" else len(set(starts))
        kept_bytes = clean.kept_bytes(len(names)) + corrupted.kept_bytes(len(streams) + n_restored)
        copies = self.samples // clean.n_rows if clean.n_rows > 1 else 1  # One row stands for all samples.
        if copies > 1:
            kept_bytes += corrupted.kept_bytes(len(names))
        if resumes:
            kept_bytes += self.samples * corrupted.past_bytes_by_row
            streams += corrupted.past_points
        self.budget = CellBudget.of(corrupted, kept_bytes, max_bytes, least_by_row)

        # 4. Run both, and the first block of each span with every position restored.
        self.clean, self.corrupted = clean.run(names), corrupted.run(streams)
        self._states: Mapping[str, Tensor] = self.clean.activations
        if copies > 1:
            self._states = {name: self._states[name].repeat_interleave(copies, dim=0) for name in names}
        self._restored = {} if self.is_hooked else {start: self._restore(start) for start in dict.fromkeys(starts)}

    def grid(
        self, positions: Sequence[int], measure: Measure, unchanged: Tensor, progress: str | None = None
    ) -> Float[Tensor, "pos layer ..."]:
        """The score of every cell, with a progress bar of this title; `measure` and `unchanged` as in `CellRuns`."""
        # Windows that are cut off at the first or last block may be the same for several layers.
        spans = list(dict.fromkeys(self.spans.values()))
        cells = [self._cell(position, span) for position in positions for span in spans]
        engine = CellRuns(self.corrupted, measure, unchanged, self.budget)
        scores: Tensor = engine.scores(cells, progress).unflatten(0, (len(positions), len(spans)))
        return scores[:, [spans.index(span) for span in self.spans.values()]].cpu()

    def _cell(self, position: int, span: range) -> Cell:
        """The cell that restores one position in these blocks."""
        # On a causal model positions before the corrupted ones are those of the clean run.
        if not self.first_touched <= position < self.corrupted.input.n_pos:
            return Cell(span.start, ())
        return Cell(span.start + (not self.is_hooked), tuple(self._patches(position, span)))

    def _patches(self, position: int, span: range) -> Iterator[Patch]:
        at = ((position,), (position,))
        if not self.is_hooked:
            yield Patch(span.start, stream_entering(span.start + 1), self._restored[span.start], *at)
        for block in span if self.is_hooked else span[1:]:
            for point in points_of(self.settings.kind, block, self.cfg):
                yield Patch(block, point, self._states[point], *at)
        for block in range(span.start + 1, self.n_layers):
            for point in points_of(self.settings.severed, block, self.cfg):
                yield Patch(block, point, self.corrupted.activations[point], *at)

    def _restore(self, block: int) -> Resid:
        """The stream after the first block of a span, at each position when this position alone is restored there."""
        points = points_of(self.settings.kind, block, self.cfg)
        if self.settings.kind == "resid":
            stream: Resid = self._states[points[0]]
            return stream
        everywhere = {point: self._states[point].expand(self.samples, -1, -1) for point in points}
        return self.corrupted.resume(
            self.corrupted.stream(block),
            range(block, block + 1),
            hooks=[(point, lambda activation, hook: everywhere[hook.name].to(activation.device)) for point in points],
        )


class AnswerRuns:
    """Restored runs in which the probability of an answer is measured, which the clean run may read elsewhere."""

    def __init__(self, restored: RestoredRuns, clean_answer: Answer, answer: Answer) -> None:
        self.restored, self.clean_answer, self.answer, self.samples = restored, clean_answer, answer, restored.samples
        self.clean_scores: Scores = clean_answer.probabilities(restored.clean.logits, len(restored.clean.logits))[0]
        self.corrupted_scores: Scores = answer.probabilities(restored.corrupted.logits, self.samples)[0]

    def grid(self, positions: Sequence[int], progress: str | None = None) -> Float[Tensor, "pos layer sample selected"]:
        """Probability of each token of the answer in every cell, by sample."""
        return self.restored.grid(positions, self._measure, self.corrupted_scores, progress)

    def _measure(
        self, logits: Float[Tensor, "batch selected d_vocab_out"], computed: Int[Tensor, "selected"]
    ) -> Float[Tensor, "cell sample answer"]:
        """Probabilities of the answer's tokens; those that were not computed are taken from the corrupted run."""
        probabilities = self.answer.probabilities(logits, self.samples, computed)
        scores = self.corrupted_scores.expand(len(probabilities), -1, -1).clone()
        scores[:, :, computed] = probabilities
        return scores
