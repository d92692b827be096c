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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.inputs import ForwardPass, padded
from diffusion_lens.analysis.rome.edited_layer import pick_edited_layer
from diffusion_lens.analysis.rome.keys import key_site
from diffusion_lens.display import Result, Table
from diffusion_lens.identity import begins_run, require_identified
from diffusion_lens.model.inputs import check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.scheduled_loss import noised
from diffusion_lens.seeds import own_seed
from diffusion_lens.settings import Whole, at_least, whole_number
from weight_conversion import as_json

Corpus = Sequence[str] | Sequence[Tensor] | Int[Tensor, "batch pos"]


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
        record: Content key, corpus' hash and size, seed, model, weights' hash, versions.
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
) -> SecondMoment:
    """C of one layer over a corpus.

    Args:
        corpus: Texts (cut at the context's length), a list of rows of tokens, or Int[batch pos]. Padding that the
            network would recognise by its tokens (`model.own_pad_id` around a text) is left out.
        layer: Number of the block; negative ones count from the end.
        folder: Folder for the result, in a file named after the weights, the hooks on the model, layer, corpus and
            seed. A finished file is read, and an unfinished one continued.
        seed: Seed of the noise that masks tokens of a masked diffusion model.
        batch_size: Number of texts in one forward pass.
        save_every: Number of batches between two saved states.
        progress: Whether to show a progress bar.

    Raises:
        TypeError: The corpus is one text instead of several.
        ValueError: The layer is out of range, the corpus is empty or contains [MASK], the padding of Int[batch pos] is
            ambiguous, a file in the folder is truncated or belongs to another corpus, network or seed, or the call is
            inside `model.at_time`.
    """
    model.require_own_times("second_moment")
    layer, seed = pick_edited_layer(model, layer), whole_number("seed", seed)
    batch_size, save_every = at_least(1, "batch_size", batch_size), at_least(1, "save_every", save_every)
    rows = _rows(model, corpus)
    record = _describe(model, rows, layer, seed)
    if folder is not None:
        require_identified(record, str(folder))
    path = None if folder is None else Path(folder) / f"second-moment-{record['key'][:16]}.safetensors"
    so_far = _load_moment(path, record) if path is not None and path.exists() else _nothing(model, layer, record)
    # The sum stays on the model's device, so that its d_mlp² numbers are not transferred with every batch.
    so_far = replace(so_far, total=so_far.total.to(_home(model)))
    starts = range(so_far.texts, len(rows), batch_size)
    for i, start in enumerate(tqdm(starts, desc=f"second moment of layer {layer}", unit="batch", disable=not progress)):
        so_far = _add(model, so_far, rows[start : start + batch_size], seed)
        if path is not None and (start == starts[-1] or (i + 1) % save_every == 0):
            so_far.save(path)
    return replace(so_far, total=so_far.total.cpu())


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
    return moment


def _nothing(model: DiffusionTransformer, layer: int, record: dict[str, Any]) -> SecondMoment:
    size = model.blocks[layer].mlp.W_out.shape[0]
    return SecondMoment(torch.zeros(size, size, dtype=torch.float64), 0, 0, 0.0, 0, layer, record)


def _add(model: DiffusionTransformer, so_far: SecondMoment, rows: Sequence[Tensor], seed: int) -> SecondMoment:
    """The moment with one more batch of texts."""
    seeds = [own_seed(seed, so_far.texts + i) for i in range(len(rows))]
    site = key_site(so_far.layer)
    keys = _as_in_training(model, rows, seeds).states([site])[site]
    keys_by_text = [_widest(text_keys[: len(row)]) for text_keys, row in zip(keys, rows, strict=True)]
    all_keys = torch.cat(keys_by_text)
    return SecondMoment(
        total=so_far.total + (all_keys.T @ all_keys).to(so_far.total.device).double(),
        count=so_far.count + len(all_keys),
        texts=so_far.texts + len(rows),
        text_squares=so_far.text_squares + sum(float((k @ k.T).square().sum()) for k in keys_by_text),
        count_squares=so_far.count_squares + sum(len(row) ** 2 for row in rows),
        layer=so_far.layer,
        record=so_far.record,
    )


def _as_in_training(model: DiffusionTransformer, rows: Sequence[Tensor], seeds: Sequence[int]) -> ForwardPass:
    """The pass on texts as in training: partly noise on a diffusion model."""
    text, real = (x.to(model.cfg.device) for x in padded(model, rows))
    if model.cfg.grows:
        return ForwardPass(model, text, real)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    noised_rows = [noised(model, row[None], generator=noise) for row, noise in zip(rows, generators, strict=True)]
    noisy, _ = padded(model, [noisy[0] for noisy, _ in noised_rows])
    p = torch.stack([p[0, 0] for _, p in noised_rows])
    return ForwardPass.under_noise(model, text, noisy.to(text.device), real, p)


def _widest(keys: Tensor) -> Tensor:
    """The keys in float64, or in float32 on a device without it."""
    return keys.to(torch.float32 if keys.device.type == "mps" else torch.float64)


def _home(model: DiffusionTransformer) -> str:
    """The device of the sum: the model's device if that supports float64, otherwise the CPU."""
    device = str(model.cfg.device)
    return "cpu" if device.startswith("mps") else device
