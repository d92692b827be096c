"""Causal tracing (Meng et al. 2022, arXiv 2202.05262, section 2): which states carry the answer?

Causal tracing compares three runs of one query:

    clean      the query as it is
    corrupted  the subject is corrupted, by default with Gaussian noise on the embeddings of its tokens; p(answer) is
               the mean over several samples of the noise
    restored   the corrupted run, with one state of one position put back to its clean value: the residual stream after
               one block ("resid"), or the MLP or attention outputs of a window of blocks ("mlp", "attn")

The indirect effect of a state is p_restored - p_corrupted. With `severed`, the MLP or attention outputs of the restored
position keep their corrupted values in the blocks above, which shows the path that the effect takes.

`causal_tracing.corruption` describes the corruptions. `causal_tracing.restored_runs` describes which part of each
restored run is computed.
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
from diffusion_lens.display import PicturedResult, Table, shaped
from diffusion_lens.facts import Fact, Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields, shown_model
from diffusion_lens.settings import Real, Whole, naming_the_nearest


@dataclass(frozen=True, eq=False, repr=False)
class CausalTrace(PicturedResult):
    """The causal trace of one query.

    Columns of the data frame: pos, layer, token, score, indirect_effect.

    Attributes:
        scores: Float[pos layer], p(answer) with that state restored, mean over the samples.
        token_scores: Float[pos layer selected], probability of each token of the answer, mean over the samples.
        clean_token_scores: Float[selected], probability of each token in the clean run.
        corrupted_token_scores: Float[selected], probability of each token in the corrupted run.
        clean: Value of p(answer) in the clean run.
        corrupted: Value of p(answer) in the corrupted run, mean over the samples.
        known: Whether the clean run's likeliest token is the answer's at every position, all read from this one canvas;
            [MASK], which the loop never writes, does not count. The loop reveals some positions before others and may
            write something else: `average_indirect_effect(known="recalled")` tests what the loop writes.
        str_tokens: Text at each position of the canvas.
        subject: First position of the subject and one past the last.
        positions: Position of each row of the grid.
        layers: Layer of each column of the grid.
        record: Kind, window, severed, corruption, noise, samples, seed, answer, query, model, hash of the weights,
            versions.
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
        """Rise of p(answer) when a state is restored: scores - corrupted."""
        return self.scores - self.corrupted

    @property
    def total_effect(self) -> float:
        """Fall of p(answer) under the corruption: clean - corrupted."""
        return self.clean - self.corrupted

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

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "causal trace", self)

    @classmethod
    def load(cls, path: str | Path) -> "CausalTrace":
        """Read what `save` wrote."""
        return load_fields(path, "causal trace", cls)

    def plot(self, ax: Any = None, title: str | None = None, limits: tuple[float, float] | None = None) -> Any:
        """ROME's heat map: tokens down, the subject's starred, layers across.

        Args:
            ax: Matplotlib axes to draw on; by default new ones.
            title: Title of the figure.
            limits: Probabilities at the ends of the colour scale; by default from corrupted to the highest score.

        Returns:
            The matplotlib axes.

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
    """Score every (position, layer) cell of one query by restoring it in a corrupted run.

    `trace_query` takes the settings as objects: a `Restoration`, a `Corruption` and a `Selection`.

    Args:
        model: Masked diffusion model or causal model.
        query: Canvas, subject and answer; or a fact, which is laid out as in `average_indirect_effect`. The probability
            of an answer of several tokens is the product of the tokens' probabilities.
        kind: State to restore: "resid", the residual stream after a block; "mlp" or "attn", the outputs of a window of
            blocks. Or a `Restoration`, which includes window and severed.
        window: Number of blocks restored around each layer l, from l - window // 2 to l + ceil(window / 2) exclusive;
            not used for "resid".
        noise: Scale of the noise; `noise_scale` gives ROME's 3 standard deviations of the embeddings. "mask" and "swap"
            need none.
        samples: Number of samples of the noise.
        seed: Seed of `numpy.random.RandomState`, as in ROME's code, so that published traces are reproduced exactly.
        corruption: "gaussian", "uniform" or "replace" noise, "mask" or "swap"; see `causal_tracing.corruption`. Or a
            `Corruption`, which includes noise, samples, seed and swap.
        swap: For "swap", another query, whose subject's tokens are used, or the tokens.
        severed: "mlp" or "attn", outputs of the restored position that keep their corrupted values in the blocks above.
        positions: Positions to restore, negative ones from the end; by default all.
        layers: Layers to restore, negative ones from the end; by default all.
        max_bytes: Memory to use in addition to the weights.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A setting out of range, a query without an answer, a budget too small for one cell.
    """
    return trace_query(
        model,
        as_query(model, query),
        Restoration.of(kind, window, severed),
        Corruption.of(corruption, noise, samples, seed, swap),
        Selection(positions, layers),
        max_bytes=max_bytes,
        progress=progress,
    )


@begins_run
@torch.no_grad()
def trace_query(
    model: DiffusionTransformer,
    query: Query,
    restoration: Restoration,
    corruption: Corruption,
    selection: Selection | None = None,
    *,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> CausalTrace:
    """Score every (position, layer) cell of one query, like `causal_trace`, with settings given as objects.

    Args:
        model: Masked diffusion model or causal model.
        query: Canvas, subject and answer; `fact.to_query(model)` makes one.
        restoration: States that each cell restores.
        corruption: Corruption of the subject.
        selection: Positions and layers of the cells; by default all.
        max_bytes: Memory to use in addition to the weights.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The selection or the corruption does not fit the model or the query, the query has no answer, or the
            budget is too small for one cell.
    """
    # 1. Lay out the inputs of the clean and the corrupted run.
    answer, canvas = Answer.of(model, query), query.tokens.to(model.cfg.device)[None]
    real = model.real_positions(canvas)
    positions, layers = (selection or Selection()).within(len(query.tokens), model.cfg.n_layers)
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

    # 2. Run both, and score every cell.
    restored = RestoredRuns(pair, restoration, layers, max_bytes)
    runs = AnswerRuns(restored, clean_answer=answer, answer=answer)
    by_sample = runs.grid(positions, "trace" if progress else None)

    # 3. Average over the samples; an answer's probability is the product of its tokens' probabilities.
    return CausalTrace(
        scores=by_sample.prod(dim=3).mean(dim=2),
        token_scores=by_sample.mean(dim=2),
        clean_token_scores=runs.clean_scores[0].cpu(),
        corrupted_token_scores=runs.corrupted_scores.mean(dim=0).cpu(),
        clean=runs.clean_scores.prod(dim=1).item(),
        corrupted=runs.corrupted_scores.prod(dim=1).mean().item(),
        known=answer.is_likeliest(model, restored.clean.logits),
        str_tokens=model.words(query.tokens.tolist()),
        subject=query.subject,
        positions=positions,
        layers=layers,
        record={
            **restoration.describe(),
            **corruption.describe(),
            "answer": model.words(query.answer_tokens),
            "query": query.describe(),
            **provenance(model, model.cfg),
        },
    )


@torch.no_grad()
@naming_the_nearest
def noise_scale(model: DiffusionTransformer, subjects: Sequence[str] | Sequence[Query], factor: float = 3.0) -> float:
    """`factor` standard deviations of the embeddings of the subjects' tokens (ROME's `collect_embedding_std`).

    Args:
        model: Model whose embeddings are measured.
        subjects: Texts, or queries whose subject tokens are used.
        factor: Number of standard deviations.

    Raises:
        ValueError: No subjects, or a text with words that the tokenizer does not know.
    """
    if isinstance(subjects, str):
        raise TypeError(f"subjects must be a list of texts or queries, such as [{subjects!r}]")
    if not subjects:
        raise ValueError("subjects is empty; the noise scale is measured on one text or query, or on more")
    pieces = [
        _known_tokens(model, subject) if isinstance(subject, str) else subject.tokens[slice(*subject.subject)]
        for subject in subjects
    ]
    embedded = model.embed(torch.cat([piece.to(model.cfg.device) for piece in pieces])[None])
    return factor * float(embedded.float().cpu().std())  # the same bits for any device


def _known_tokens(model: DiffusionTransformer, text: str) -> Tensor:
    model.check_known(text)
    return model.to_tokens(text, prepend_bos=False)[0]
