"""One file of stored activations, which one task computes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffusion_lens.analysis.dictionaries.canvases import CanvasBatch, Canvases
from diffusion_lens.analysis.dictionaries.noise import Mask, Span
from diffusion_lens.analysis.dictionaries.splicing import vectors
from diffusion_lens.analysis.dictionaries.store import KIND
from diffusion_lens.analysis.inputs import CleanTexts, ForwardPass
from diffusion_lens.analysis.workers.shared_folder import SharedFolder
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.denoising.activation_shapes import activation_shape
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import open_result, save_result

_COLUMNS = {
    "t": torch.float32,
    "masked": torch.bool,
    "position": torch.int32,
    "text": torch.int32,
    "token": torch.int32,
}


@dataclass(frozen=True)
class StoredRows:
    """What is stored of a canvas.

    Attributes:
        names: Hook points.
        mask: Positions.
        dtype: Dtype of the vectors; `None` for that of the activations.
    """

    names: Sequence[str]
    mask: Mask
    dtype: torch.dtype | None

    def row_bytes(self, cfg: DiffusionConfig) -> int:
        """Bytes of a row, if activations have the model's dtype."""
        width = sum(torch.Size(activation_shape(name, cfg, 1, 1)).numel() for name in self.names)
        return width * (self.dtype or cfg.dtype).itemsize + sum(dtype.itemsize for dtype in _COLUMNS.values())

    def of(self, model: DiffusionTransformer, batch: CanvasBatch) -> dict[str, Tensor]:
        """The rows of a batch: a vector for each hook point, and what is known of its position.

        Raises:
            ValueError: A vector is too large for the dtype.
        """
        selected = batch.selected(self.mask)
        canvas, position = (index.cpu() for index in selected.nonzero(as_tuple=True))
        columns = {
            "t": batch.t.cpu()[canvas],
            "masked": batch.masked.cpu()[canvas, position],
            "position": position,
            "text": batch.texts[canvas],
            "token": batch.tokens.cpu()[canvas, position],
        }
        rows = {name: column.to(_COLUMNS[name]) for name, column in columns.items()}
        if not len(canvas):
            return rows
        for name, activation in run_to(model, batch, self.names).items():
            row = activation[selected]
            rows[name] = row.to(device="cpu", dtype=self.dtype)
            if self.dtype is not None and not bool(rows[name].isfinite().all()) and bool(row.isfinite().all()):
                raise ValueError(
                    f"an activation at {name!r} is {row.abs().max().item():.4g}, too large for dtype={self.dtype}; use "
                    "'bfloat16' or 'float32'"
                )
        return rows


def run_to(model: DiffusionTransformer, batch: CanvasBatch, names: Sequence[str]) -> Mapping[str, Tensor]:
    """The activations of a batch at some hook points; the network runs no further than to the last of them."""
    states = ForwardPass.under_noise(model, batch.tokens, batch.noisy, batch.real, batch.t).states(names)
    return {name: vectors(states[name], model.hook_dict[name]) for name in names}


@dataclass(frozen=True, eq=False)
class ShardTask:
    """A file of stored activations.

    Attributes:
        number: Number of the file.
        start, stop: First canvas, and one past the last.
        texts: The texts of these canvases.
        offset: First canvas of the first of these texts.
        spans: Bounds of the noise level of each canvas of a text.
        seed: Seed of the noise.
        batch_size: Number of canvases in one forward pass.
        stored: What is stored of a canvas.
        folder: Folder of the files.
    """

    number: int
    start: int
    stop: int
    texts: CleanTexts
    offset: int
    spans: tuple[Span, ...]
    seed: int
    batch_size: int
    stored: StoredRows
    folder: SharedFolder

    @classmethod
    def of(
        cls, number: int, start: int, stop: int, canvases: Canvases, size: int, stored: StoredRows, folder: SharedFolder
    ) -> "ShardTask":
        """The file with the canvases from `start` to `stop`."""
        first, last = start // len(canvases.spans), -(-stop // len(canvases.spans))
        offset, texts = first * len(canvases.spans), canvases.texts.between(first, last)
        return cls(number, start, stop, texts, offset, canvases.spans, canvases.seed, size, stored, folder)

    @property
    def name(self) -> str:
        """What error messages call it."""
        return f"of the file {self.number:06d}.safetensors"

    @property
    def size(self) -> int:
        """Number of canvases."""
        return self.stop - self.start

    @property
    def n_kept(self) -> int:
        """None: a file is written whole."""
        return 0

    def compute(self, model: DiffusionTransformer) -> dict[str, Tensor] | None:
        """The rows; `None` if they are in the folder, which this process sees."""
        if not self.folder.is_here:
            return self.rows(model)
        path = self.folder.path / self._file
        if not path.exists() or open_result(path, KIND)[1] != self._record:
            self.write(self.folder.path, self.rows(model))
        return None

    @torch.no_grad()
    def rows(self, model: DiffusionTransformer, done: Callable[[int], object] = lambda n: None) -> dict[str, Tensor]:
        """The rows of all canvases; empty if no position is selected.

        Args:
            done: Called after each batch with its number of canvases.
        """
        canvases = Canvases(model, self.texts, self.spans, self.seed)
        parts = []
        for batch in canvases.batches(self.batch_size, self.start - self.offset, self.stop - self.offset):
            rows = self.stored.of(model, batch)
            if len(rows["t"]):
                parts.append(rows)
            done(len(batch.tokens))
        return {name: torch.cat([rows[name] for rows in parts]) for name in (parts[0] if parts else ())}

    def write(self, folder: Path, rows: Mapping[str, Tensor]) -> None:
        """Write the file, as a whole."""
        save_result(folder / self._file, KIND, rows, self._record)

    @property
    def _file(self) -> str:
        return f"{self.number:06d}.safetensors"

    @property
    def _record(self) -> dict[str, str | int]:
        return {"call": self.folder.digest, "start": self.start, "stop": self.stop}
