"""Activations of many texts, written to a folder: the training data of a dictionary.

On a masked diffusion model an activation depends on how much of the text is masked. Each text is therefore masked at a
random noise level t, and every stored vector comes with the t of its canvas, as in DLM-Scope (arXiv 2602.05859), which
trains one sparse autoencoder on masked positions and one on unmasked positions. The text is read as in training: a
network that is told the time is told that of t, and one that attends by blocks reads the clean text beside it.

The folder contains `run.json`, which describes the call, and numbered files, each with the vectors of some consecutive
canvases. A file is written as a whole or not at all, so a call that was interrupted continues after the last file. It
computes the same batches as an uninterrupted call, so the files are the same to the last bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.dictionaries.canvases import CanvasBatch, Canvases
from diffusion_lens.analysis.dictionaries.noise import Mask, Noise, NoiseRange, check_mask, spans_of
from diffusion_lens.analysis.dictionaries.splicing import vectors
from diffusion_lens.analysis.dictionaries.store import KIND, ActivationStore, shard_files
from diffusion_lens.analysis.inputs import CleanTexts, ForwardPass, Texts, readable_points
from diffusion_lens.analysis.resumable import begin_folder, study_digest
from diffusion_lens.config import as_dtype
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance, save_result
from diffusion_lens.settings import Whole, at_least, whole_number


@begins_run
@torch.no_grad()
def activations(
    model: DiffusionTransformer,
    texts: Texts,
    names: str | Sequence[str],
    *,
    out: str | Path,
    mask: str = "all",
    t: Noise = None,
    seed: Whole = 0,
    batch_size: Whole = 32,
    shard_bytes: Whole = 2**28,
    dtype: str | torch.dtype | None = None,
    attention_mask: Tensor | None = None,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> ActivationStore:
    """Store the activations of texts at hook points, one row for each position, with the noise level of its canvas.

    Args:
        model: Model, of either variant.
        texts: Texts; facts, of which only the answer is masked and stored; or tokens Int[batch pos].
        names: Hook point or hook points. Axes of heads are flattened, as in `splice`.
        out: Folder of the activations. If an earlier call was interrupted, the same call continues it.
        mask: Positions to store: "masked", "unmasked", or "all". A prepended BOS, the prompt of a fact and padding are
            never stored. Without [MASK] (the AR baseline) it must be "all".
        t: Noise level: a number; several numbers, at each of which every text is masked once; or a `NoiseRange`. By
            default a range from 0.001 to 1, as in training. 0 masks nothing. Refused without [MASK].
        seed: Seed of the noise. Each text has its own random numbers, so its canvas does not depend on the batch.
        batch_size: Number of canvases in one forward pass. It affects the activations by rounding only.
        shard_bytes: Size of the vectors at which a file is written. Memory holds the vectors of one file, twice while
            it is written, and the activations of one batch.
        dtype: Dtype of the stored vectors; by default that of the activations.
        attention_mask: [batch pos], 0 at the padding of token rows.
        prepend_bos: Whether texts begin with BOS; by default as the tokenizer does.
        progress: Whether to show a progress bar.

    Returns:
        The stored activations.

    Raises:
        KeyError: There is no such hook point.
        ValueError: A hook point has no vector for each position, a setting is out of range or does not fit the model,
            no position is selected, a vector is too large for `dtype`, the folder belongs to another call, or the call
            is inside `model.at_time`.
    """
    # 1. Settings.
    model.require_own_times("activations")
    spans = spans_of(model, t, NoiseRange())
    selection = check_mask(model, mask, spans)
    points = readable_points(model, names)
    size, limit = at_least(1, "batch_size", batch_size), at_least(1, "shard_bytes", shard_bytes)
    stored_dtype = None if dtype is None else as_dtype(dtype)
    clean = CleanTexts.of(model, texts, attention_mask, prepend_bos)
    canvases = Canvases(model, clean, spans, whole_number("seed", seed))
    if not any(bool(batch.selected(selection).any()) for batch in canvases.batches(size)):
        raise ValueError(f"mask={mask!r} selects no position of any canvas at t={t}; give another t, or more texts")
    record = {
        "kind": KIND,
        "names": points,
        "mask": selection,
        "spans": [list(span) for span in spans],
        "seed": canvases.seed,
        "batch_size": size,
        "shard_bytes": limit,
        "stored_dtype": None if stored_dtype is None else str(stored_dtype).removeprefix("torch."),
        "texts": clean.describe(),
        "canvases": len(canvases),
        **provenance(model, model.cfg),
    }
    # 2. What an earlier call has stored.
    writer = _Writer(Path(out), limit, study_digest(begin_folder(out, record)))
    done = writer.resume()
    # 3. The rest, batch by batch.
    with tqdm(total=len(canvases), initial=done, desc="activations", unit="canvas", disable=not progress) as bar:
        for batch in canvases.batches(size, done):
            writer.add(_rows(model, batch, points, selection, stored_dtype), len(batch.tokens))
            bar.update(len(batch.tokens))
    writer.flush()
    return ActivationStore.load(out)


def run_to(model: DiffusionTransformer, batch: CanvasBatch, names: Sequence[str]) -> Mapping[str, Tensor]:
    """The activations of a batch at some hook points; the network runs no further than to the last of them."""
    states = ForwardPass.under_noise(model, batch.tokens, batch.noisy, batch.real, batch.t).states(names)
    return {name: vectors(states[name], model.hook_dict[name]) for name in names}


def _rows(
    model: DiffusionTransformer, batch: CanvasBatch, names: Sequence[str], mask: Mask, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The rows of one batch: a vector for each hook point, and what is known of its position."""
    selected = batch.selected(mask)
    canvas, position = (index.cpu() for index in selected.nonzero(as_tuple=True))
    rows = {
        "t": batch.t.cpu()[canvas],
        "masked": batch.masked.cpu()[canvas, position],
        "position": position.int(),
        "text": batch.texts[canvas].int(),
        "token": batch.tokens.cpu()[canvas, position].int(),
    }
    if not len(canvas):
        return rows
    for name, activation in run_to(model, batch, names).items():
        row = activation[selected]
        rows[name] = row.to(device="cpu", dtype=dtype)
        if dtype is not None and not bool(rows[name].isfinite().all()) and bool(row.isfinite().all()):
            raise ValueError(
                f"an activation at {name!r} is {row.abs().max().item():.4g}, too large for dtype={dtype}; use "
                "'bfloat16' or 'float32'"
            )
    return rows


@dataclass
class _Writer:
    """Collects rows, and writes them to numbered files.

    Attributes:
        folder: Folder of the files.
        limit: Bytes of vectors at which a file is written.
        mark: Mark of the call in its files.
        start, stop: First canvas of the next file, and one past the last that was added.
    """

    folder: Path
    limit: int
    mark: str
    n_files: int = 0
    start: int = 0
    stop: int = 0
    n_bytes: int = 0
    rows: list[dict[str, Tensor]] = field(default_factory=list)

    def resume(self) -> int:
        """Number of canvases that the files contain; what an interrupted write has left behind is removed."""
        for leftover in self.folder.glob(".*.safetensors.*.part"):
            leftover.unlink()
        files = shard_files(self.folder, self.mark)
        self.n_files, self.start = len(files), files[-1].stop if files else 0
        self.stop = self.start
        return self.start

    def add(self, rows: dict[str, Tensor], n_canvases: int) -> None:
        """Add the rows of the next canvases, and write a file if there are enough."""
        self.stop += n_canvases
        if len(rows["t"]):
            self.rows.append(rows)
            self.n_bytes += sum(x.nbytes for x in rows.values())
        if self.n_bytes >= self.limit:
            self.flush()

    def flush(self) -> None:
        """Write the rows to the next file, whose record names its canvases."""
        if self.stop == self.start:
            return
        names = list(self.rows[0]) if self.rows else []
        tensors = {name: torch.cat([rows[name] for rows in self.rows]) for name in names}
        path = self.folder / f"{self.n_files:06d}.safetensors"
        save_result(path, KIND, tensors, {"call": self.mark, "start": self.start, "stop": self.stop})
        self.n_files, self.start, self.n_bytes = self.n_files + 1, self.stop, 0
        self.rows.clear()
