"""Causal tracing (Meng et al. 2022, arXiv 2202.05262, section 2): which states carry the answer?

Three runs of one query. *Clean*: as it is. *Corrupted*: the subject disturbed, by default Gaussian noise on the
embeddings of its tokens, several draws, p(answer) averaged over them. *Restored*: corrupted, but with one state put
back to its clean value: the residual stream after one block ("resid"), or the MLP or attention outputs of a window of
blocks ("mlp", "attn"), at one place. The indirect effect of a state is p_restored - p_corrupted. With `severed` the MLP
or attention outputs of that place are held at their corrupted values above it, to see which path the effect takes.

What is disturbed is `analysis.corruption`; how little of each restored run is computed, `analysis.restored_runs`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.canvas_layout import as_query
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.restored_runs import AnswerRuns, RestoredRuns, RunPair
from diffusion_lens.analysis.kept_run import NetworkInput
from diffusion_lens.analysis.selection import Selection
from diffusion_lens.facts import Fact, Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.settings import Real, Whole


@dataclass(frozen=True, eq=False)
class CausalTrace:
    """One query traced.

    Attributes:
        scores: Float[pos layer], p(answer) with that state restored, mean over the draws.
        token_scores: Float[pos layer selected], the same for each token of the answer alone.
        clean_token_scores: Float[selected], of the clean run.
        corrupted_token_scores: Float[selected], of the corrupted run.
        clean: p(answer) of the clean run.
        corrupted: p(answer) of the corrupted run, mean over the draws.
        known: whether the clean run's likeliest token is the answer's at every place, all read at once from this one
            canvas; [MASK], which the loop never writes, does not count. The loop reveals some places before others and
            may write something else: `average_indirect_effect(known="recalled")` asks it.
        str_tokens: the canvas, a string a place.
        subject: first and one past the last place of the subject.
        positions: the place of each row of the grid.
        layers: the layer of each column.
        record: kind, window, severed, corruption, noise, samples, seed, answer, model, weights' hash, versions.
    """

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

    @property
    def indirect_effect(self) -> Float[Tensor, "pos layer"]:
        """How much of the answer a state brings back: scores - corrupted."""
        return self.scores - self.corrupted

    @property
    def total_effect(self) -> float:
        """How much the corruption takes away: clean - corrupted."""
        return self.clean - self.corrupted

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "causal trace", self)

    @classmethod
    def load(cls, path: str | Path) -> "CausalTrace":
        """Read what `save` wrote."""
        return load_fields(path, "causal trace", cls)

    def plot(self, ax: Any = None, title: str | None = None, limits: tuple[float, float] | None = None) -> Any:
        """ROME's heat map: tokens down, the subject's starred, layers across. Returns the matplotlib axes.

        Args:
            limits: probabilities at the ends of the colour scale; by default from corrupted to the highest score.

        Raises:
            ValueError: a trace without cells, of a fact that an average leaves out.
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
            title=title or f"{self.record['model']}\nclean {self.clean:.2f}, corrupted {self.corrupted:.2f}",
            ax=ax,
        )


@begins_run
def causal_trace(
    model: DiffusionTransformer,
    query: Query | Fact,
    kind: str | Restoration = "resid",
    *,
    window: Whole = 10,
    noise: Real | None = None,
    samples: Whole = 10,
    seed: Whole = 1,
    corruption: str | Corruption = "gaussian",
    swap: Query | Iterable[Whole] | None = None,
    severed: str | None = None,
    positions: Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> CausalTrace:
    """Trace one query on either variant.

    Args:
        query: canvas, subject and answer, or a fact, which is laid out as in `average_indirect_effect`. A longer answer
            counts as a whole: the product of its tokens' probabilities.
        kind: what is restored: "resid" the residual stream after a block, "mlp" or "attn" the outputs of a window; or a
            `Restoration`, which also says window and severed.
        window: blocks restored around each layer l, from l - window // 2 to l + ceil(window / 2) exclusive; for "resid"
            not used.
        noise: scale of the noise; `noise_scale` gives ROME's 3 standard deviations of the embeddings. "mask" and "swap"
            need none.
        samples: draws of noise.
        seed: of `numpy.random.RandomState`, as in ROME's code, so that published traces are met number for number.
        corruption: "gaussian", "uniform" or "replace" noise, "mask" or "swap"; see `causal_tracing.corruption`. Or a
            `Corruption`, which also says noise, samples, seed and swap.
        swap: for "swap", another query, whose subject's tokens are taken, or the tokens.
        severed: "mlp" or "attn" holds these outputs of the restored place, above it, at their corrupted values.
        positions: places to restore, negative ones from the end; by default all.
        layers: layers to restore, likewise.
        max_bytes: memory to use beside the weights.
        progress: show a bar.

    Raises:
        ValueError: a setting out of range, a query without an answer, a budget too small for one cell.
    """
    return trace_query(
        model,
        as_query(model, query),
        Restoration.of(kind, window, severed),
        Corruption.of(corruption, noise, samples, seed, swap),
        Selection.of(positions, layers),
        max_bytes,
        progress,
    )


@torch.no_grad()
def trace_query(
    model: DiffusionTransformer,
    query: Query,
    restoration: Restoration,
    corruption: Corruption,
    selection: Selection,
    max_bytes: int,
    progress: bool = False,
) -> CausalTrace:
    """Trace one query; `causal_trace` describes the arguments."""
    answer, canvas = Answer.of(model, query), query.tokens.to(model.cfg.device)[None]
    real = model.real_positions(canvas)
    positions, layers = selection.within(len(query.tokens), model.cfg.n_layers)
    n_rows, rows = corruption.rows, answer.rows.tolist()
    pair = RunPair(
        clean=NetworkInput(model, canvas, rows, real),
        corrupted=NetworkInput(
            model,
            canvas.expand(n_rows, -1),
            rows,
            None if real is None else real.expand(n_rows, -1),
            hooks=corruption.hooks(model, query),
        ),
        subject=query.subject,
    )
    runs = AnswerRuns(RestoredRuns(pair, restoration, layers), answer, answer, max_bytes)
    by_sample = runs.grid(positions, "trace" if progress else None)
    return CausalTrace(
        scores=by_sample.prod(dim=3).mean(dim=2),
        token_scores=by_sample.mean(dim=2),
        clean_token_scores=runs.clean_scores[0].cpu(),
        corrupted_token_scores=runs.corrupted_scores.mean(dim=0).cpu(),
        clean=runs.clean_scores.prod(dim=1).item(),
        corrupted=runs.corrupted_scores.prod(dim=1).mean().item(),
        known=answer.is_likeliest(model, runs.runs.clean.logits),
        str_tokens=model.words(query.tokens.tolist()),
        subject=query.subject,
        positions=positions,
        layers=layers,
        record={
            **restoration.describe(),
            **corruption.describe(),
            "answer": model.words(query.answer_tokens),
            **provenance(model, model.cfg),
        },
    )


@torch.no_grad()
def noise_scale(model: DiffusionTransformer, subjects: Sequence[str] | Sequence[Query], factor: float = 3.0) -> float:
    """`factor` standard deviations of the embeddings of the subjects' tokens (ROME's `collect_embedding_std`).

    Args:
        subjects: texts, or queries, whose subject tokens are taken in place.

    Raises:
        ValueError: no subjects, or a text with words that the tokenizer does not know.
    """
    if isinstance(subjects, str):
        raise TypeError(f"subjects is a list of texts or queries; [{subjects!r}] measures this one")
    if not subjects:
        raise ValueError("no subjects were given to measure the noise scale on")
    pieces = [
        _known_tokens(model, subject) if isinstance(subject, str) else subject.tokens[slice(*subject.subject)]
        for subject in subjects
    ]
    embedded = model.embed(torch.cat([piece.to(model.cfg.device) for piece in pieces])[None])
    return factor * float(embedded.float().std())


def _known_tokens(model: DiffusionTransformer, text: str) -> Tensor:
    model.check_known(text)
    return model.to_tokens(text, prepend_bos=False)[0]
