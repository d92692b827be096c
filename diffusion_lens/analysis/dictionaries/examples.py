"""What excites a feature: its strongest examples, how often it is active by the share of masks, and what it promotes.

A feature of a dictionary is a direction; what it stands for is read off the positions at which it is largest, with the
words around them as the network saw them, [MASK] included. On a masked diffusion model it may be active only at masked
positions, or only late in a run: each example has the share of its canvas that was masked, and its noise level or its
denoising step.

The tokens that a feature promotes are those of the largest entries of W_dec[feature] · diag(w) · W_U, its direct effect
on the logits by way of the last norm (of weight w), up to the scale that this norm divides by, less its mean over the
vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.dictionaries.canvases import Canvases, Mask, Noise, NoiseRange, check_mask, spans_of
from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary, warn_of_other_weights
from diffusion_lens.analysis.dictionaries.splice import vectors
from diffusion_lens.analysis.dictionaries.store import run_to
from diffusion_lens.analysis.engine.inputs import CleanTexts, Inputs, TextsOrRuns, readable_points, texts_or_runs
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run, value_in_words
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance, shown_model
from diffusion_lens.settings import Whole, at_least, pick_indices, whole_number
from diffusion_lens.settings.figures import styled

_BINS = 10
_PROMOTED = 8
_AROUND = 6  # words on each side
_ENTRIES = 2**24  # features times positions that are encoded at once


@dataclass(frozen=True, eq=False)
class FeatureExamples(PicturedResult, Saved):
    """The positions at which features are largest.

    Columns of the data frame: feature, example, activation, text, pos, step, t, share, words, promotes; a row for each
    example at which the feature is active. In `words` the position itself is between « and ».

    Attributes:
        values: Float[feature example], the activation at each example, the largest first; 0 where there is no more.
        texts: Int[feature example], index of the text, or of the row of all runs.
        positions: Int[feature example], position on the canvas.
        steps: Int[feature example], step of the run; -1 for texts.
        t: Float[feature example], noise level of the canvas, or time of the step.
        share: Float[feature example], share of the canvas's positions that are masked.
        around: Int[feature example pos], the canvas around the position, which is in the middle; -1 outside.
        density: Float[feature bin], share of the positions at which the feature is active, by the share of masks of
            their canvas, in equal bins from 0 to 1; NaN in bins without positions.
        n_rows: Int[bin], number of these positions.
        promoted: Int[feature top], tokens whose logits the feature raises most; -1 if it does not write to the stream.
        effects: Float[feature top], by how much, for an activation of 1 and a last norm that divides by 1.
        features: Index of each feature.
        words: Text of every id that occurs.
        record: Dictionary, positions (`mask`), seed, texts or runs, model, hash of the weights, hooks, versions.
    """

    KIND: ClassVar[str] = "feature examples"
    SHOWS: ClassVar[str] = "the examples at which a feature of a dictionary is largest, with the words around them"
    _SAID: ClassVar[tuple[str, ...]] = ("show",)
    ENTRIES: ClassVar[Mapping[str, Any]] = {"model": str, "writes": str}

    values: Float[Tensor, "feature example"]
    texts: Int[Tensor, "feature example"]
    positions: Int[Tensor, "feature example"]
    steps: Int[Tensor, "feature example"]
    t: Float[Tensor, "feature example"]
    share: Float[Tensor, "feature example"]
    around: Int[Tensor, "feature example pos"]
    density: Float[Tensor, "feature bin"]
    n_rows: Int[Tensor, "bin"]
    promoted: Int[Tensor, "feature top"]
    effects: Float[Tensor, "feature top"]
    features: list[int]
    words: dict[int, str] = field(repr=False)
    record: dict[str, Any] = field(repr=False)

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("feature", self.features),)

    def promotes(self, feature: Whole) -> list[str]:
        """The words of the tokens that a feature promotes, the most first."""
        return [self.words[token] for token in self.promoted[self._index(feature)].tolist() if token >= 0]

    @styled
    def plot(
        self, feature: Whole | None = None, show: str = "examples", ax: Any = None, title: str | None = None
    ) -> Any:
        """The examples of a feature as bars with the words around them. Returns the axes.

        Args:
            feature: Feature; by default the one with the largest activation.
            show: "examples", or "density" by the share of masks.
            ax: Axes of a figure, by default of a new one.
            title: Title.
        """
        chosen = self.features[int(self.values.max(dim=1).values.argmax())] if feature is None else feature
        index = self._index(chosen)
        promoted = ", ".join(map(plots.readable, self.promotes(chosen)[:3]))
        title = title or f"feature {self.features[index]}\npromotes {promoted or 'nothing'}"
        if show == "density":
            bins = [f"{(i + 0.5) / _BINS:.2f}" for i in range(_BINS)]
            columns = "share of masked positions", "share of positions where it is active"
            return plots.labelled_lines(self.density[index, None], [""], bins, *columns, title, ax)
        if show != "examples":
            raise ValueError(f"show={show!r}; it must be 'examples' or 'density'")
        active = int((self.values[index] > 0).sum())
        if not active:
            raise ValueError(f"feature {chosen} is active at no position that was read")
        labels = [self._sentence(index, example, 1) for example in range(active)]
        return plots.paired_bars({"": self.values[index, :active]}, labels, "activation", ax, title)

    def _index(self, feature: Whole) -> int:
        number = whole_number("feature", feature)
        if number not in self.features:
            raise ValueError(f"feature={number} was not read; the features are {self.features[:8]} ...")
        return self.features.index(number)

    def _sentence(self, index: int, example: int, most: int = _AROUND) -> str:
        """At most so many words on both sides of an example, with its own in « and »."""
        tokens = self.around[index, example, _AROUND - most : _AROUND + most + 1].tolist()
        texts = [plots.readable(self.words[token]) if token >= 0 else "" for token in tokens]
        texts[len(texts) // 2] = f"«{texts[len(texts) // 2]}»"
        return " ".join(filter(None, texts))

    def _table(self) -> Table:
        rows, examples = self.values.gt(0).nonzero(as_tuple=True)
        where = list(zip(rows.tolist(), examples.tolist(), strict=True))
        cells = {"text": self.texts, "pos": self.positions, "step": self.steps, "t": self.t, "share": self.share}
        return Table(
            {
                "feature": [self.features[row] for row, _ in where],
                "example": examples,
                "activation": self.values[rows, examples],
                **{name: cell[rows, examples] for name, cell in cells.items()},
                "words": [self._sentence(*each) for each in where],
                "promotes": [" ".join(map(plots.readable, self.promotes(self.features[row])[:3])) for row, _ in where],
            }
        )

    def __repr__(self) -> str:
        n_active = int((self.values[:, :1] > 0).sum())
        return (
            f"FeatureExamples({self.record['writes']} of {shown_model(self.record)}, {len(self.features)} features, "
            f"{n_active} of them active, at {int(self.n_rows.sum()):,} positions)"
        )


class _Read(NamedTuple):
    """Some canvases and what the dictionary reads there."""

    x: Float[Tensor, "batch pos d"]
    tokens: Tokens
    selected: PosMask
    share: Float[Tensor, "batch"]
    t: Float[Tensor, "batch"]
    texts: Int[Tensor, "batch"]
    step: int


@begins_run
@torch.no_grad()
def feature_examples(
    model: DiffusionTransformer,
    dictionary: SparseDictionary,
    texts: TextsOrRuns,
    features: Iterable[Whole] | None = None,
    *,
    most: Whole = 10,
    mask: str = "all",
    t: Noise = None,
    seed: Whole = 0,
    batch_size: Whole = 32,
    attention_mask: Tensor | None = None,
    progress: bool = False,
) -> FeatureExamples:
    """The canvases, positions and noise levels or steps at which features are largest.

    Memory holds the `most` best examples of each feature and the activations of one batch.

    Args:
        model: Model on which the dictionary was trained.
        dictionary: Sparse dictionary.
        texts: Texts, facts or tokens, which are masked as in `activations`; or trajectories, whose canvases are read
            step by step.
        features: Features to read, negative ones from the end; by default all.
        most: Number of examples of each feature.
        mask: Positions to read: "masked", "unmasked" or "all".
        t: Noise levels of texts, as in `activations`. By default four quarters of the range from 0.001 to 1.
        seed: Seed of the noise.
        batch_size: Number of canvases in one forward pass, of texts.
        attention_mask: [batch pos], 0 at the padding of token rows.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A setting is out of range or does not fit the model or the inputs, or no position is selected.

    Warns:
        UserWarning: The dictionary was trained on other weights.
    """
    n_most, size, seed = at_least(1, "most", most), at_least(1, "batch_size", batch_size), whole_number("seed", seed)
    warn_of_other_weights(model, dictionary)
    (point,) = readable_points(model, [dictionary.reads])
    chosen = pick_indices("features", features, len(dictionary.b_enc))
    source = texts_or_runs(model, texts, attention_mask)
    if isinstance(source, CleanTexts):
        model.time.require_own("feature_examples")
        spans = spans_of(model, t, NoiseRange(samples=4))
        canvases = Canvases(model, source, spans, seed)
        selection, total = check_mask(model, mask, spans), len(canvases)
        reads = _of_texts(model, canvases, point, selection, size)
    else:
        if t is not None:
            raise ValueError("t= is for texts; the canvases of trajectories are read as they are")
        selection = check_mask(model, mask, ((0.0, 1.0),))
        total = sum(run.n_steps * len(run.tokens) for run in source.trajectories)
        reads = _of_runs(model, source, point, selection)
    best = _Best(dictionary, chosen, n_most)
    with tqdm(total=total, desc="features", unit="canvas", disable=not progress) as bar:
        for read in reads:
            best.add(read)
            bar.update(len(read.tokens))
    if not best.n_rows.sum():
        raise ValueError(f"mask={mask!r} selects no position; give another mask, or more texts")
    promoted, effects = _promoted(model, dictionary, chosen)
    ids = [i for i in torch.cat([best.kept["around"].flatten(), promoted.flatten()]).unique().tolist() if i >= 0]
    return FeatureExamples(
        **best.kept,
        density=best.fired / best.n_rows,
        n_rows=best.n_rows,
        promoted=promoted,
        effects=effects,
        features=chosen,
        words=dict(zip(ids, model.words(ids), strict=True)),
        record={
            "reads": dictionary.reads,
            "writes": dictionary.writes,
            "dictionary": value_in_words(dictionary),
            "mask": selection,
            "seed": seed,
            "inputs": source.describe(),
            **provenance(model, model.cfg),
        },
    )


def _of_texts(model: DiffusionTransformer, canvases: Canvases, point: str, mask: Mask, size: int) -> Iterator[_Read]:
    for batch in canvases.batches(size):
        x = run_to(model, batch, [point])[point]
        yield _Read(x, batch.noisy, batch.selected(mask), batch.share, batch.t, batch.texts, -1)


def _of_runs(model: DiffusionTransformer, inputs: Inputs, point: str, mask: Mask) -> Iterator[_Read]:
    for step in inputs.pick_steps(None) or ():
        n_before = 0
        for read in inputs.at(step):
            assert read.step is not None
            x = vectors(read.states([point])[point], model.hook_dict[point])
            chosen = {"all": read.present, "masked": read.masked, "unmasked": read.present & ~read.masked}[mask]
            share, n_rows = read.masked.sum(dim=1) / read.present.sum(dim=1), len(read.tokens)
            rows, t = torch.arange(n_before, n_before + n_rows), torch.full((n_rows,), read.step.t)
            yield _Read(x, read.tokens, chosen, share, t, rows, step)
            n_before += n_rows


class _Best:
    """The largest activations of each feature so far, and how often it was active."""

    def __init__(self, dictionary: SparseDictionary, features: list[int], most: int) -> None:
        self.dictionary, self.features, self.most = dictionary, features, most
        shape = (len(features), most)
        self.kept = {
            "values": torch.zeros(shape),
            **{name: torch.full(shape, -1) for name in ("texts", "positions", "steps")},
            **{name: torch.zeros(shape) for name in ("t", "share")},
            "around": torch.full((*shape, 2 * _AROUND + 1), -1),
        }
        self.fired, self.n_rows = torch.zeros(len(features), _BINS), torch.zeros(_BINS, dtype=torch.long)

    def add(self, read: _Read) -> None:
        """Add the selected positions of some canvases."""
        canvas, position = read.selected.nonzero(as_tuple=True)
        x = read.x[canvas, position].to(self.dictionary.W_enc)
        share = read.share.to(x)[canvas]
        canvas, position, step = canvas.cpu(), position.cpu(), torch.full((len(x),), read.step)
        # The canvas around each position, with places outside it on both sides.
        wide = pad(read.tokens.cpu(), (_AROUND, _AROUND), value=-1)
        around = wide[canvas[:, None], position[:, None] + torch.arange(2 * _AROUND + 1)]
        rows = {
            "texts": read.texts[canvas],
            "positions": position,
            "steps": step,
            "t": read.t.cpu().float()[canvas],
            "share": share.cpu().float(),
            "around": around,
        }
        for part in torch.arange(len(x)).split(max(1, _ENTRIES // len(self.dictionary.b_enc))):
            values = self.dictionary.encode(x[part], share[part])[:, self.features].float().cpu()
            self._count(values, rows["share"][part])
            self._merge(values, {name: row[part] for name, row in rows.items()})

    def _count(self, values: Float[Tensor, "entry feature"], share: Float[Tensor, "entry"]) -> None:
        bins = one_hot((share * _BINS).long().clamp(max=_BINS - 1), _BINS)
        self.n_rows += bins.sum(dim=0)
        self.fired += (values > 0).float().T @ bins.float()

    def _merge(self, values: Float[Tensor, "entry feature"], rows: Mapping[str, Tensor]) -> None:
        """Keep the largest of those that were kept and these."""
        top = values.T.topk(min(self.most, len(values)), dim=1)
        order = torch.cat([self.kept["values"], top.values], dim=1).topk(self.most, dim=1)
        new = {"values": top.values, **{name: row[top.indices] for name, row in rows.items()}}
        for name, kept in self.kept.items():
            both = torch.cat([kept, new[name]], dim=1)
            at = order.indices if both.dim() == 2 else order.indices[..., None].expand(-1, -1, both.shape[-1])
            self.kept[name] = both.gather(1, at)


def _promoted(
    model: DiffusionTransformer, dictionary: SparseDictionary, features: list[int]
) -> tuple[Int[Tensor, "feature top"], Float[Tensor, "feature top"]]:
    """The tokens whose logits each feature raises most, and by how much."""
    W_dec = dictionary.W_dec[features].to(model.W_U)
    if W_dec.shape[1] != len(model.W_U):
        return torch.full((len(features), 1), -1), torch.zeros(len(features), 1)
    tops = []
    for rows in W_dec.split(max(1, _ENTRIES // model.cfg.d_vocab)):
        effects = (rows * model.ln_final.w) @ model.W_U
        tops.append((effects - effects.mean(dim=1, keepdim=True)).topk(min(_PROMOTED, effects.shape[1]), dim=1))
    return torch.cat([top.indices for top in tops]).cpu(), torch.cat([top.values for top in tops]).float().cpu()
