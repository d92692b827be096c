"""Sums of k kᵀ over the keys of a corpus, panel by panel.

A panel is a fixed number of consecutive batches of texts. Each is summed from zero, and the sums of the panels are
added in their order. So it does not change a bit of the total which process sums which panel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.inputs import ForwardPass, padded
from diffusion_lens.analysis.rome.keys import key_site
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.scheduled_loss import noised
from diffusion_lens.seeds import own_seed


@dataclass(frozen=True, eq=False)
class KeySums:
    """Sums over some texts.

    Attributes:
        total: Float[d_mlp d_mlp], Σ k kᵀ.
        count: Number of keys.
        texts: Number of texts.
        text_squares: Σ ‖S_t‖² over the texts, where S_t is the Σ k kᵀ of text t.
        count_squares: Σ m_t², where m_t is the number of keys of text t.
    """

    total: Float[Tensor, "d_mlp d_mlp"]
    count: int = 0
    texts: int = 0
    text_squares: float = 0.0
    count_squares: int = 0


@dataclass(frozen=True, eq=False)
class KeyPanel:
    """The texts of a panel, which one task sums.

    Attributes:
        layer: Number of the block.
        first: Index of its first text in the corpus.
        rows: Int[pos] tokens of each text.
        batch_size: Number of texts in one forward pass.
        seed: Seed of the noise of the corpus.
    """

    layer: int
    first: int
    rows: Sequence[Int[Tensor, "_"]]
    batch_size: int
    seed: int

    def __reduce__(self) -> tuple[Any, ...]:
        # One tensor is sent instead of hundreds, which may be views of a larger one.
        settings = (self.layer, self.first, self.batch_size, self.seed)
        return _received, (torch.cat([*self.rows]), [*map(len, self.rows)], *settings)

    @property
    def name(self) -> str:
        """What error messages call it."""
        return f"of the texts {self.first} to {self.first + len(self.rows) - 1}"

    @property
    def size(self) -> int:
        """Number of batches."""
        return -(-len(self.rows) // self.batch_size)

    @property
    def n_kept(self) -> int:
        """None: only the sums of all its batches are kept."""
        return 0

    def compute(self, model: DiffusionTransformer) -> KeySums:
        """The sums, on the CPU."""
        sums = self.sums(model)
        return replace(sums, total=sums.total.cpu())

    @torch.no_grad()
    def sums(self, model: DiffusionTransformer, summed: Callable[[], object] = lambda: None) -> KeySums:
        """The sums, on the device of the model, or on the CPU if that has no float64.

        Args:
            summed: Called after each batch.
        """
        size, device = model.blocks[self.layer].mlp.W_out.shape[0], str(model.cfg.device)
        home = "cpu" if device.startswith("mps") else device
        sums = KeySums(torch.zeros(size, size, dtype=torch.float64, device=home))
        for seeds, rows in self._batches():
            sums = _with_batch(sums, _keys(model, self.layer, rows, seeds))
            summed()
        return sums

    def _batches(self) -> Iterator[tuple[list[int], list[Tensor]]]:
        """The seeds and the tokens of the texts of each batch."""
        for start in range(0, len(self.rows), self.batch_size):
            batch = list(self.rows[start : start + self.batch_size])
            yield [own_seed(self.seed, self.first + start + i) for i in range(len(batch))], batch


def _received(tokens: Tensor, lengths: list[int], layer: int, first: int, batch_size: int, seed: int) -> KeyPanel:
    return KeyPanel(layer, first, tokens.split(lengths), batch_size, seed)


def _with_batch(sums: KeySums, keys_by_text: Sequence[Float[Tensor, "pos d_mlp"]]) -> KeySums:
    """The sums with the keys of one more batch, in the same matrix."""
    keys = torch.cat([*keys_by_text])
    # In place, because the matrix is large.
    if keys.dtype == sums.total.dtype:
        sums.total.addmm_(keys.T, keys)
    else:
        sums.total.add_((keys.T @ keys).to(sums.total.device))
    return replace(
        sums,
        count=sums.count + len(keys),
        texts=sums.texts + len(keys_by_text),
        text_squares=sums.text_squares + sum(float((k @ k.T).square().sum()) for k in keys_by_text),
        count_squares=sums.count_squares + sum(len(k) ** 2 for k in keys_by_text),
    )


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
    if model.cfg.grows:
        return ForwardPass(model, text, real)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    noised_rows = [noised(model, row[None], generator=noise) for row, noise in zip(rows, generators, strict=True)]
    noisy, _ = padded(model, [noisy[0] for noisy, _ in noised_rows])
    p = torch.stack([p[0, 0] for _, p in noised_rows])
    return ForwardPass.under_noise(model, text, noisy.to(text.device), real, p)
