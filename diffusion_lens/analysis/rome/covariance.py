"""The second moment of keys, C = E[k kᵀ], with which an edit preserves the other contents of a memory.

ROME's edit changes W along (C⁻¹ k*)ᵀ. Of all changes that give k* its new value, this one changes the values of the
corpus' keys least (Meng et al. 2022, arXiv 2202.05262, section 3.1 and appendix A).

Keys are taken at every position of a corpus that is not padding. A masked diffusion model sees the corpus as in
training: each text samples t ~ U(0, 1) and each of its tokens is masked with probability p = (1 - eps) t + eps
(`hide`). So keys of masked and of unmasked positions have the same proportions as in training. A time-conditioned
network gets the time of each text, and one that attends by blocks reads each block after the clean ones before it.
The noise does not depend on the batch: text i has its own seed, derived from the given seed and i.

Keys of one text are similar, so texts are the independent units of the error. With T texts, n keys, and S_t = Σ k kᵀ
over the m_t keys of text t, C_n = Σ S_t / n is a ratio of sums over texts, and in Frobenius norms

    E ‖C_n − C‖²  ≈  T / (T − 1) · Σ_t ‖S_t − m_t C_n‖² / n²
                  =  T / (T − 1) · (Σ_t ‖S_t‖² − 2 ⟨Σ_t m_t S_t, C_n⟩ + Σ_t m_t² ‖C_n‖²) / n²

which decreases as 1/n.

A panel is a fixed number of consecutive batches of texts. Each is summed from zero, and the sums of the panels are
added in their order. So it does not change a bit of the total which process sums which panel.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.engine.inputs import ForwardPass, padded
from diffusion_lens.analysis.over_facts.executor import Executes, Workers, run_tasks, with_device
from diffusion_lens.analysis.rome.keys import key_site, pick_edited_layer, require_same_model
from diffusion_lens.model.inputs import check_tokens
from diffusion_lens.model.loss import noised
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run, require_named_hooks
from diffusion_lens.records.results import Result, Saved, Table, network_of, provenance
from diffusion_lens.settings import Whole, at_least, own_seed, warn_user, whole_number
from weight_conversion import as_json

Corpus = Sequence[str] | Sequence[Tensor] | Int[Tensor, "batch pos"]
_WAITING_BYTES = 2**32  # of sums that wait for an earlier one, by default


@dataclass(frozen=True, eq=False, repr=False)
class SecondMoment(Result, Saved):
    """C over a corpus, or over the part of it that was processed so far.

    Columns of the data frame: layer, keys, texts.

    Attributes:
        total: Float[d_mlp d_mlp], Σ k kᵀ.
        count: Number of keys so far.
        texts: Number of texts so far.
        layer: Number of the block.
        record: Content key, corpus' hash and size, seed, sizes of batches and panels (`None` if it was continued with
            others), model, weights' hash, versions.
        by_length: Float[d_mlp d_mlp], Σ m_t S_t over the texts, for the error.
        text_squares: Σ ‖S_t‖² over the texts, for the error.
        length_squares: Σ m_t² over the texts, for the error.
    """

    KIND = "second moment"
    NO_PICTURE = "It is a matrix that edits are computed with; the report of an edit has a picture."

    total: Float[Tensor, "d_mlp d_mlp"]
    count: int
    texts: int
    layer: int
    record: dict[str, Any]
    by_length: Float[Tensor, "d_mlp d_mlp"] | None = None
    text_squares: float | None = None
    length_squares: int | None = None

    @property
    def matrix(self) -> Float[Tensor, "d_mlp d_mlp"]:
        """C."""
        return self.total / self.count

    def relative_error(self, count: Whole | None = None) -> float:
        """Expected ‖C_n − C‖ / ‖C‖ for `count` keys, by default the number of keys here; NaN for fewer than two texts.

        Raises:
            ValueError: The moment was saved without the sums for its error.
        """
        if self.by_length is None or self.text_squares is None or self.length_squares is None:
            raise ValueError(
                "this second moment has no error estimate: it was saved without the sums over texts; compute it again, "
                "in another folder"
            )
        n_keys = self.count if count is None else at_least(1, "count", count)
        if self.texts < 2:
            return math.nan
        square = float(self.matrix.square().sum())
        crossed = float((self.by_length * self.matrix).sum())
        spread = max(0.0, self.text_squares - 2 * crossed + self.length_squares * square)
        return math.sqrt(spread * self.texts / (self.texts - 1) / square / self.count / n_keys)

    def _table(self) -> Table:
        return Table({"layer": [self.layer], "keys": [self.count], "texts": [self.texts]})


@begins_run
@torch.no_grad()
def second_moment(
    model: DiffusionTransformer,
    corpus: Corpus,
    layer: Whole,
    *,
    folder: str | Path | None = None,
    seed: Whole = 0,
    batch_size: Whole = 16,
    save_every: Whole = 64,
    progress: bool = False,
    executor: Executes | None = None,
) -> SecondMoment:
    """C of one layer over a corpus.

    The corpus is summed in panels of `save_every` batches, whose sums are added in order. The result is the same to the
    bit on any number of workers.

    Args:
        corpus: Texts (cut at the context's length), a list of rows of tokens, or Int[batch pos]. Padding that the
            network would recognise by its tokens (`model.padding.own_id` around a text) is left out.
        layer: Number of the block; negative ones count from the end.
        folder: Folder for the result, in a file named after the weights, the hooks on the model, layer, corpus and
            seed. A finished file is read, and an unfinished one continued.
        seed: Seed of the noise that masks tokens of a masked diffusion model.
        batch_size: Number of texts in one forward pass. It affects the result by rounding only.
        save_every: Number of batches in a panel, after each of which the state is saved. It affects the result by
            rounding only.
        executor: `concurrent.futures.Executor`, or `Workers`, that sums the panels; by default this process does. A
            task is a panel, and its result two matrices, 16 d_mlp² bytes: with a larger `save_every` fewer travel.

    Raises:
        TypeError: The corpus is one text instead of several.
        ValueError: The layer is out of range, the corpus is empty or contains [MASK], the padding of Int[batch pos] is
            ambiguous, a file in the folder is truncated or belongs to another corpus, network or seed, or the call is
            inside `model.at_time`; or a worker does not get the network.
        RuntimeError: A task was given up after its workers died. What was summed before is in the folder.

    Warns:
        UserWarning: An unfinished file was begun with another `batch_size` or `save_every`.
    """
    model.time.require_own("second_moment")
    layer, seed = pick_edited_layer(model, layer), whole_number("seed", seed)
    batch_size, save_every = at_least(1, "batch_size", batch_size), at_least(1, "save_every", save_every)
    rows = _rows(model, corpus)
    settings = {"batch_size": batch_size, "save_every": save_every}
    record = with_device({**_describe(model, rows, layer, seed), **settings}, executor)
    if folder is not None:
        require_named_hooks(record, str(folder))
    path = None if folder is None else Path(folder) / f"second-moment-{record['key'][:16]}.safetensors"
    if path is not None and path.exists():
        so_far = _load_moment(path, record)
    else:
        size = model.blocks[layer].mlp.W_out.shape[0]
        nothing = torch.zeros(2, size, size, dtype=torch.float64)
        so_far = SecondMoment(nothing[0], 0, 0, layer, record, nothing[1], 0.0, 0)
    starts = range(so_far.texts, len(rows), batch_size * save_every)
    parts = [(first, rows[first : first + starts.step]) for first in starts]
    panels = [KeyPanel(layer, i, torch.cat(part), [*map(len, part)], batch_size, seed) for i, part in parts]
    n_done, n_left = -(-so_far.texts // batch_size), sum(panel.size for panel in panels)
    title = f"second moment of layer {layer}"
    with tqdm(total=n_done + n_left, initial=n_done, desc=title, unit="batch", disable=not progress) as bar:
        for panel, sums in zip(panels, _sums(model, panels, executor, bar), strict=True):
            so_far = _added(so_far, panel, sums)
            if path is not None:
                so_far.save(path)
    return replace(
        so_far, total=so_far.total.cpu(), by_length=None if so_far.by_length is None else so_far.by_length.cpu()
    )


RIDGE = 1e-4  # Relative to the mean of C's diagonal.
_SINGULAR = 1e-12  # Ratio of the smallest to the largest pivot below which C counts as singular.

Covariance = SecondMoment | Tensor


@dataclass(frozen=True, eq=False)
class InverseMoment:
    """C⁻¹ in the form of a Cholesky factor, which takes much longer to compute than the product with a key.

    Attributes:
        covariance: C.
        factor: Float[d_mlp d_mlp], lower triangular factor of C plus the ridge, float64 on the CPU.
        ridge: Number that was added to C's diagonal: 0, or `RIDGE` times its mean if C is singular.
    """

    covariance: Covariance
    factor: Float[Tensor, "d_mlp d_mlp"]
    ridge: float

    @classmethod
    def of(cls, covariance: Covariance) -> "InverseMoment":
        """Factor C in float64.

        C counts as singular, as with fewer keys than rows, if a pivot of the factorisation is not positive, or below
        1e-12 of the largest.

        Raises:
            ValueError: C is not symmetric, not finite, or has negative eigenvalues.
        """
        c = matrix_of(covariance)
        if not bool(c.isfinite().all()) or not torch.allclose(c, c.T, rtol=1e-5, atol=1e-8 * float(c.abs().max())):
            raise ValueError("the second moment is not a symmetric matrix of finite numbers; compute it again")
        ridge = 0.0
        factor, failed = torch.linalg.cholesky_ex(c)
        pivots = factor.diagonal().square()
        if int(failed) or float(pivots.min()) < _SINGULAR * float(pivots.max()):
            ridge = RIDGE * float(c.diagonal().mean())
            factor, failed = torch.linalg.cholesky_ex(c + ridge * torch.eye(len(c), dtype=c.dtype))
            if int(failed) or not ridge > 0:
                raise ValueError(
                    "the second moment is singular even with a ridge: it is zero or has negative eigenvalues, so it is "
                    "not E[k kᵀ] of any keys; compute it again with second_moment(), or edit without one"
                )
        return cls(covariance, factor, ridge)

    def times(self, keys: Float[Tensor, "d_mlp *rest"]) -> Float[Tensor, "d_mlp *rest"]:
        """C⁻¹ k in float64 for one key or for the columns of a matrix."""
        k = keys.cpu().double()
        return torch.cholesky_solve(k.reshape(len(k), -1), self.factor).reshape(k.shape)


def matrix_of(covariance: Covariance) -> Float[Tensor, "d_mlp d_mlp"]:
    """C in float64 on the CPU."""
    matrix = covariance.matrix if isinstance(covariance, SecondMoment) else covariance.detach()
    return matrix.cpu().double()


def require_covariance_of(model: DiffusionTransformer, layer: int, covariance: Covariance) -> None:
    """Raise a `ValueError` unless C may belong to the MLP of this block of this model."""
    if isinstance(covariance, SecondMoment):
        if covariance.layer != layer:
            raise ValueError(f"the edit is of layer {layer}, but the covariance was taken at layer {covariance.layer}")
        require_same_model("covariance", covariance.record, model)
    shape = list((covariance.total if isinstance(covariance, SecondMoment) else covariance).shape)
    n_units = model.blocks[layer].mlp.W_out.shape[0]
    if shape != [n_units, n_units]:
        raise ValueError(
            f"the covariance of layer {layer} is {shape}, and its MLP has {n_units} units; take it from the model that "
            "you edit"
        )


def describe_covariance(covariance: Covariance | None) -> dict[str, Any] | None:
    """What identifies C in a record; the record of a moment has the seed of its noise and the hash of its corpus."""
    if covariance is None:
        return None
    if isinstance(covariance, SecondMoment):
        names = ("key", "corpus_sha256", "corpus_texts", "seed")
        recorded = {name: covariance.record.get(name) for name in names}
        return {"layer": covariance.layer, "count": covariance.count, **recorded, **network_of(covariance.record)}
    return {"sha256": hashlib.sha256(matrix_of(covariance).contiguous().numpy().tobytes()).hexdigest()}


class KeySums(NamedTuple):
    """What a panel adds to a moment: Σ k kᵀ and Σ m_t S_t, stacked, and Σ ‖S_t‖²."""

    matrices: Float[Tensor, "2 d_mlp d_mlp"]
    text_squares: float


@dataclass(frozen=True, eq=False)
class KeyPanel:
    """The texts of a panel, which one task sums: those from the text `first` of the corpus on, joined in one tensor,
    because a worker receives one tensor faster than hundreds."""

    layer: int
    first: int
    tokens: Int[Tensor, "_"]
    lengths: list[int]
    batch_size: int
    seed: int

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"of the texts {self.first} to {self.first + len(self.lengths) - 1}"

    @property
    def size(self) -> int:
        """Number of batches."""
        return -(-len(self.lengths) // self.batch_size)

    @property
    def n_kept(self) -> int:
        """None: only the sums of all its batches are kept."""
        return 0

    def compute(self, model: DiffusionTransformer) -> KeySums:
        """The sums, on the CPU."""
        sums = self.sums(model)
        return sums._replace(matrices=sums.matrices.cpu())

    @torch.no_grad()
    def sums(self, model: DiffusionTransformer, summed: Callable[[], object] = lambda: None) -> KeySums:
        """The sums on the model's device, or on the CPU if that has no float64; `summed` follows each batch."""
        size, device = model.blocks[self.layer].mlp.W_out.shape[0], str(model.cfg.device)
        home = "cpu" if device.startswith("mps") else device
        matrices = torch.zeros(2, size, size, dtype=torch.float64, device=home)
        text_squares, texts = 0.0, self.tokens.split(self.lengths)
        for start in range(0, len(texts), self.batch_size):
            rows = texts[start : start + self.batch_size]
            seeds = [own_seed(self.seed, self.first + start + i) for i in range(len(rows))]
            by_text = _keys(model, self.layer, rows, seeds)
            keys, weighted = torch.cat(by_text), torch.cat([len(own) * own for own in by_text])
            for total, other in zip(matrices, (keys, weighted), strict=True):
                if keys.dtype == total.dtype:
                    total.addmm_(keys.T, other)  # in place, because the matrix is large
                else:
                    total.add_((keys.T @ other).to(home))
            text_squares += sum(float((own @ own.T).square().sum()) for own in by_text)
            summed()
        return KeySums(matrices, text_squares)


def _keys(
    model: DiffusionTransformer, layer: int, rows: Sequence[Tensor], seeds: Sequence[int]
) -> list[Float[Tensor, "pos d_mlp"]]:
    """The keys of each text of a batch, in float64, or in float32 on a device without it."""
    site = key_site(layer)
    keys = _as_in_training(model, rows, seeds).states([site])[site]
    dtype = torch.float32 if keys.device.type == "mps" else torch.float64
    return [of_text[: len(row)].to(dtype) for of_text, row in zip(keys, rows, strict=True)]


def _as_in_training(model: DiffusionTransformer, rows: Sequence[Tensor], seeds: Sequence[int]) -> ForwardPass:
    """The pass on texts as in training: partly noise on a diffusion model."""
    text, real = (x.to(model.cfg.device) for x in padded(model, rows))
    if model.cfg.is_autoregressive:
        return ForwardPass(model, text, real)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    noised_rows = [noised(model, row[None], generator=noise) for row, noise in zip(rows, generators, strict=True)]
    noisy, _ = padded(model, [noisy[0] for noisy, _ in noised_rows])
    p = torch.stack([p[0, 0] for _, p in noised_rows])
    return ForwardPass.under_noise(model, text, noisy.to(text.device), real, p)


def _sums(
    model: DiffusionTransformer, panels: list[KeyPanel], executor: Executes | None, bar: Any
) -> Iterator[KeySums]:
    """The sums of the panels, in order."""
    if executor is None:
        # They stay on the model's device: transferring 2 d_mlp² numbers takes time.
        yield from (panel.sums(model, bar.update) for panel in panels)
        return
    workers, size = Workers.of(executor), model.blocks[panels[0].layer].mlp.W_out.shape[0] if panels else 1
    ahead = workers.ahead or max(4, _WAITING_BYTES // (16 * size**2))
    yield from (sums for _, sums in run_tasks(panels, model, workers, bar, ahead))


def _added(so_far: SecondMoment, panel: KeyPanel, sums: KeySums) -> SecondMoment:
    """The moment with a panel, on the device of the panel's sums, which are overwritten."""
    total, by_length = sums.matrices
    if so_far.texts:
        total.add_(so_far.total.to(total.device))
    added = replace(
        so_far, total=total, count=so_far.count + len(panel.tokens), texts=so_far.texts + len(panel.lengths)
    )
    if so_far.by_length is None or so_far.text_squares is None or so_far.length_squares is None:
        return added  # It was begun without the sums for the error.
    return replace(
        added,
        by_length=by_length.add_(so_far.by_length.to(by_length.device)),
        text_squares=so_far.text_squares + sums.text_squares,
        length_squares=so_far.length_squares + sum(length**2 for length in panel.lengths),
    )


def _rows(model: DiffusionTransformer, corpus: Corpus) -> list[Tensor]:
    """Every text as Int[pos] on the CPU, without padding."""
    if not len(corpus):
        raise ValueError("the corpus is empty: there are no keys to average")
    if isinstance(corpus, Tensor) and corpus.dim() == 2:
        try:
            model.padding.certainly_real(check_tokens(corpus, model.cfg))
        except ValueError as error:
            raise ValueError(
                f"{error}. A corpus has no attention mask: give it as texts, or as a list of rows without padding "
                "(list(tokens) if every token is text)"
            ) from None
    texts = [model.to_tokens(text) if isinstance(text, str) else check_tokens(text, model.cfg) for text in corpus]
    rows = [model.padding.removed(text[0]).cpu() for text in texts]
    if not model.cfg.has_mask:
        return rows
    if masked := [i for i, row in enumerate(rows) if bool((row == model.cfg.blank).any())]:
        raise ValueError(f"text {masked[0]} contains [MASK]; give clean text, which this function masks as in training")
    return rows


def _describe(model: DiffusionTransformer, rows: Sequence[Tensor], layer: int, seed: int) -> dict[str, Any]:
    """The record; its `key` is a hash of everything that the numbers depend on."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little") + row.numpy().tobytes())
    origin = provenance(model, model.cfg)
    content = {
        "architecture": origin["architecture"],
        "weights_sha256": origin["weights_sha256"],
        "hooks": origin["hooks"],
        "modules": origin["modules"],
        "layer": layer,
        "corpus_sha256": digest.hexdigest(),
        "corpus_texts": len(rows),
        "seed": None if model.cfg.is_autoregressive else seed,
    }
    # The rules by which texts get their seeds and are read also affect the numbers.
    hashed = {**content, "noise": "by own_seed"}
    if model.cfg.causal_block is not None:
        hashed["read"] = "each block after clean ones"
    key = hashlib.sha256(json.dumps(as_json(hashed), sort_keys=True).encode()).hexdigest()
    return {"key": key, **content, **origin}


def _load_moment(path: Path, record: dict[str, Any]) -> SecondMoment:
    """The moment in a file, which must have this record's key."""
    moment = SecondMoment.load(path)
    if moment.record.get("key") != record["key"]:
        raise ValueError(
            f"{path} contains another moment than its name says: network, weights, hooks, layer, corpus or seed differ"
            ". Delete the file to compute the moment again, or name another folder"
        )
    there, here = ({name: each.get(name) for name in ("batch_size", "save_every")} for each in (moment.record, record))
    if moment.texts == record["corpus_texts"] or there == here:
        return moment
    warn_user(
        f"{path} is continued, but was begun with other batches ({there} there, {here} here): the last bits of the sum "
        "may differ from those of one call"
    )
    return replace(moment, record={**moment.record, "batch_size": None, "save_every": None})
