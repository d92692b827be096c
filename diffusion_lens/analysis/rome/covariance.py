"""The second moment of keys, C = E[k kᵀ], with which an edit preserves the other contents of a memory.

ROME's edit changes W along (C⁻¹ k*)ᵀ. Of all changes that give k* its new value, this one changes the values of the
corpus' keys least (Meng et al. 2022, arXiv 2202.05262, section 3.1 and appendix A).

Keys are taken at every position of a corpus that is not padding. A masked diffusion model sees the corpus as in
training: each text samples t ~ U(0, 1) and each of its tokens is masked with probability p = (1 - eps) t + eps
(`hide`). So keys of masked and of unmasked positions have the same proportions as in training. A network that is told
the time is told that of each text, and one that attends by blocks reads each block after the clean ones before it. The
noise does not depend on the batch: text i has its own seed, derived from the given seed and i.

Keys of one text are similar, so texts are the independent units of the error. With T texts, n keys, and S_t = Σ k kᵀ
over the m_t keys of text t,

    E ‖C_n − C‖²  ≈  T / (T − 1) · (Σ_t ‖S_t‖² − Σ_t m_t² ‖C_n‖²) / n²      (Frobenius norms)

which decreases as 1/n.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.rome.edited_layer import pick_edited_layer
from diffusion_lens.analysis.rome.key_sums import KeyPanel, KeySums
from diffusion_lens.analysis.workers.executor import Executes, Workers, with_device
from diffusion_lens.analysis.workers.running import run_tasks
from diffusion_lens.display import Result, Table
from diffusion_lens.identity import begins_run, require_identified
from diffusion_lens.model.inputs import check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.settings import Whole, at_least, whole_number
from diffusion_lens.user_warnings import warn_user
from weight_conversion import as_json

Corpus = Sequence[str] | Sequence[Tensor] | Int[Tensor, "batch pos"]
_WAITING_BYTES = 2**32  # of sums that wait for an earlier one, by default


@dataclass(frozen=True, eq=False, repr=False)
class SecondMoment(Result):
    """C over a corpus, or over the part of it that was processed so far.

    Columns of the data frame: layer, keys, texts.

    Attributes:
        total: Float[d_mlp d_mlp], Σ k kᵀ.
        count: Number of keys so far.
        texts: Number of texts so far.
        text_squares: Σ ‖S_t‖² over the texts, for the error.
        count_squares: Σ m_t² over the texts.
        layer: Number of the block.
        record: Content key, corpus' hash and size, seed, sizes of batches and panels (`None` if it was continued with
            others), model, weights' hash, versions.
    """

    total: Float[Tensor, "d_mlp d_mlp"]
    count: int
    texts: int
    text_squares: float
    count_squares: int
    layer: int
    record: dict[str, Any]

    @property
    def matrix(self) -> Float[Tensor, "d_mlp d_mlp"]:
        """C."""
        return self.total / self.count

    def relative_error(self, count: int | None = None) -> float:
        """Expected ‖C_n − C‖ / ‖C‖ for `count` keys, by default the number of keys here; NaN for a single text."""
        if self.texts < 2:
            return math.nan
        square = float(self.matrix.square().sum())
        spread = max(0.0, self.text_squares - self.count_squares * square) * self.texts / (self.texts - 1)
        return math.sqrt(spread / square / self.count / (count or self.count))

    def _table(self) -> Table:
        return Table({"layer": [self.layer], "keys": [self.count], "texts": [self.texts]})

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "second moment", self)

    @classmethod
    def load(cls, path: str | Path) -> "SecondMoment":
        """Read what `save` wrote."""
        return load_fields(path, "second moment", cls)


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
            network would recognise by its tokens (`model.own_pad_id` around a text) is left out.
        layer: Number of the block; negative ones count from the end.
        folder: Folder for the result, in a file named after the weights, the hooks on the model, layer, corpus and
            seed. A finished file is read, and an unfinished one continued.
        seed: Seed of the noise that masks tokens of a masked diffusion model.
        batch_size: Number of texts in one forward pass. It affects the result by rounding only.
        save_every: Number of batches in a panel, after each of which the state is saved. It affects the result by
            rounding only.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that sums the panels; by default this process does. A
            task is a panel, and its result a matrix, 8 d_mlp² bytes: with a larger `save_every` fewer matrices travel.

    Raises:
        TypeError: The corpus is one text instead of several.
        ValueError: The layer is out of range, the corpus is empty or contains [MASK], the padding of Int[batch pos] is
            ambiguous, a file in the folder is truncated or belongs to another corpus, network or seed, or the call is
            inside `model.at_time`; or a worker does not get the network.
        RuntimeError: A task was given up after its workers died. What was summed before is in the folder.

    Warns:
        UserWarning: An unfinished file was begun with another `batch_size` or `save_every`.
    """
    model.require_own_times("second_moment")
    layer, seed = pick_edited_layer(model, layer), whole_number("seed", seed)
    batch_size, save_every = at_least(1, "batch_size", batch_size), at_least(1, "save_every", save_every)
    rows = _rows(model, corpus)
    settings = {"batch_size": batch_size, "save_every": save_every}
    record = with_device({**_describe(model, rows, layer, seed), **settings}, executor)
    if folder is not None:
        require_identified(record, str(folder))
    path = None if folder is None else Path(folder) / f"second-moment-{record['key'][:16]}.safetensors"
    so_far = _load_moment(path, record) if path is not None and path.exists() else _nothing(model, layer, record)
    starts = range(so_far.texts, len(rows), batch_size * save_every)
    panels = [KeyPanel(layer, i, rows[i : i + starts.step], batch_size, seed) for i in starts]
    n_done, n_left = -(-so_far.texts // batch_size), sum(panel.size for panel in panels)
    title = f"second moment of layer {layer}"
    with tqdm(total=n_done + n_left, initial=n_done, desc=title, unit="batch", disable=not progress) as bar:
        for sums in _sums(model, panels, executor, bar):
            so_far = _added(so_far, sums)
            del sums  # so that no more than three matrices are in memory
            if path is not None:
                so_far.save(path)
    return replace(so_far, total=so_far.total.cpu())


def _sums(
    model: DiffusionTransformer, panels: list[KeyPanel], executor: Executes | None, bar: Any
) -> Iterator[KeySums]:
    """The sums of the panels, in order."""
    if executor is None:
        # They stay on the model's device: transferring d_mlp² numbers takes time.
        yield from (panel.sums(model, bar.update) for panel in panels)
        return
    workers, size = Workers.of(executor), model.blocks[panels[0].layer].mlp.W_out.shape[0] if panels else 1
    ahead = workers.ahead or max(4, _WAITING_BYTES // (8 * size**2))
    yield from (sums for _, sums in run_tasks(panels, model, workers, bar, ahead))


def _added(so_far: SecondMoment, sums: KeySums) -> SecondMoment:
    """The moment with one more panel."""
    return replace(
        so_far,
        total=so_far.total.to(sums.total.device) + sums.total if so_far.texts else sums.total,
        count=so_far.count + sums.count,
        texts=so_far.texts + sums.texts,
        text_squares=so_far.text_squares + sums.text_squares,
        count_squares=so_far.count_squares + sums.count_squares,
    )


def _rows(model: DiffusionTransformer, corpus: Corpus) -> list[Tensor]:
    """Every text as Int[pos] on the CPU, without padding."""
    if isinstance(corpus, str):
        raise TypeError(f"corpus must be a list of texts, not a single text; give [{corpus[:40]!r}]")
    if not len(corpus):
        raise ValueError("the corpus is empty: there are no keys to average")
    if isinstance(corpus, Tensor) and corpus.dim() == 2:
        _require_known_padding(model, corpus)
    texts = [model.to_tokens(text) if isinstance(text, str) else check_tokens(text, model.cfg) for text in corpus]
    rows = [model.without_padding(text[0]).cpu() for text in texts]
    if not model.cfg.has_mask:
        return rows
    if masked := [i for i, row in enumerate(rows) if bool((row == model.cfg.blank).any())]:
        raise ValueError(f"text {masked[0]} contains [MASK]; give clean text, which this function masks as in training")
    return rows


def _require_known_padding(model: DiffusionTransformer, batch: Tensor) -> None:
    """Raise a `ValueError` if it is ambiguous which tokens are padding."""
    try:
        model.checked_real_positions(check_tokens(batch, model.cfg))
    except ValueError as error:
        raise ValueError(
            f"{error}. A corpus has no attention mask: give it as texts, or as a list of rows without padding "
            "(list(tokens) if every token is text)"
        ) from None


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
        "seed": None if model.cfg.grows else seed,
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


def _nothing(model: DiffusionTransformer, layer: int, record: dict[str, Any]) -> SecondMoment:
    size = model.blocks[layer].mlp.W_out.shape[0]
    return SecondMoment(torch.zeros(size, size, dtype=torch.float64), 0, 0, 0.0, 0, layer, record)
