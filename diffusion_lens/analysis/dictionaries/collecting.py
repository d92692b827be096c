"""Activations of many texts, written to a folder: the training data of a dictionary.

On a masked diffusion model an activation depends on how much of the text is masked. Each text is therefore masked at a
random noise level t, and every stored vector comes with the t of its canvas, as in DLM-Scope (arXiv 2602.05859), which
trains one sparse autoencoder on masked positions and one on unmasked positions. The text is read as in training: a
network that is told the time is told that of t, and one that attends by blocks reads the clean text beside it.

The folder contains `run.json`, which describes the call, and numbered files, each with the vectors of some consecutive
canvases. Which canvases a file contains follows from the call alone, before anything is computed, and a file is written
as a whole or not at all. So several workers can each write some, and a call that was interrupted writes those that are
missing. It computes the same batches as an uninterrupted call, so the files are the same to the last bit.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.dictionaries.canvases import Canvases
from diffusion_lens.analysis.dictionaries.noise import Noise, NoiseRange, check_mask, spans_of
from diffusion_lens.analysis.dictionaries.shard_task import ShardTask, StoredRows
from diffusion_lens.analysis.dictionaries.store import KIND, ActivationStore, shard_files
from diffusion_lens.analysis.inputs import CleanTexts, Texts, readable_points
from diffusion_lens.analysis.resumable import begin_folder
from diffusion_lens.analysis.workers.executor import Executes, Workers, with_device
from diffusion_lens.analysis.workers.running import run_tasks
from diffusion_lens.analysis.workers.shared_folder import SharedFolder
from diffusion_lens.config import as_dtype
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
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
    executor: Executes | None = None,
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
        shard_bytes: Size of the rows at which a file is full. Memory holds the vectors of one file, twice while it is
            written, and the activations of one batch.
        dtype: Dtype of the stored vectors; by default that of the activations.
        attention_mask: [batch pos], 0 at the padding of token rows.
        prepend_bos: Whether texts begin with BOS; by default as the tokenizer does.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the files; by default this process does. A
            worker that sees the folder writes there itself.

    Returns:
        The stored activations.

    Raises:
        KeyError: There is no such hook point.
        ValueError: A hook point has no vector for each position, a setting is out of range or does not fit the model,
            no position is selected, a vector is too large for `dtype`, the folder belongs to another call, the call is
            inside `model.at_time`, or a worker does not get the network.
        RuntimeError: A task was given up after its workers died. What was computed is in the folder.
    """
    # 1. Settings.
    model.require_own_times("activations")
    spans = spans_of(model, t, NoiseRange())
    selection = check_mask(model, mask, spans)
    points = readable_points(model, names)
    size, limit = at_least(1, "batch_size", batch_size), at_least(1, "shard_bytes", shard_bytes)
    stored = StoredRows(points, selection, None if dtype is None else as_dtype(dtype))
    clean = CleanTexts.of(model, texts, attention_mask, prepend_bos)
    canvases = Canvases(model, clean, spans, whole_number("seed", seed))
    n_selected = canvases.n_selected(selection)
    if not any(n_selected):
        raise ValueError(f"mask={mask!r} selects no position of any canvas at t={t}; give another t, or more texts")
    record = {
        "kind": KIND,
        "names": points,
        "mask": selection,
        "spans": [list(span) for span in spans],
        "seed": canvases.seed,
        "batch_size": size,
        "shard_bytes": limit,
        "stored_dtype": None if stored.dtype is None else str(stored.dtype).removeprefix("torch."),
        "texts": clean.describe(),
        "canvases": len(canvases),
        **provenance(model, model.cfg),
    }
    # 2. The files, and those that an earlier call has written.
    folder = SharedFolder.of(Path(out), begin_folder(out, with_device(record, executor)))
    ends = [0, *_ends(n_selected, size, -(-limit // stored.row_bytes(model.cfg)))]
    tasks = [
        ShardTask.of(number, start, stop, canvases, size, stored, folder)
        for number, (start, stop) in enumerate(pairwise(ends))
    ]
    missing = _missing(tasks, Path(out))
    # 3. The others.
    n_done = len(canvases) - sum(task.size for task in missing)
    with tqdm(total=len(canvases), initial=n_done, desc="activations", unit="canvas", disable=not progress) as bar:
        if executor is None:
            for task in missing:
                task.write(Path(out), task.rows(model, bar.update))
        else:
            for task, rows in run_tasks(missing, model, Workers.of(executor), bar):
                if rows is not None:
                    task.write(Path(out), rows)
    store = ActivationStore.load(out)
    if not store.is_complete:
        raise RuntimeError(
            f"workers have written files to {out} that this process does not see. A network file system may show them "
            "later: call again"
        )
    return store


def _ends(n_selected: Sequence[int], size: int, limit: int) -> Iterator[int]:
    """One past the last canvas of each file: a file ends after the batch with which it is full.

    Args:
        n_selected: Number of rows of each canvas.
        size: Number of canvases of a batch.
        limit: Number of rows at which a file is full.
    """
    n_rows = 0
    for start in range(0, len(n_selected), size):
        n_rows += sum(n_selected[start : start + size])
        stop = min(start + size, len(n_selected))
        if n_rows >= limit or stop == len(n_selected):
            yield stop
            n_rows = 0


def _missing(tasks: Sequence[ShardTask], folder: Path) -> list[ShardTask]:
    """The files that the folder lacks. What an interrupted write has left behind is removed.

    Raises:
        ValueError: A file has other canvases than planned.
    """
    for leftover in folder.glob(".*.safetensors.*.part"):
        leftover.unlink()
    planned = {task.number: (task.start, task.stop) for task in tasks}
    there = {shard.number: (shard.start, shard.stop) for shard in shard_files(folder, tasks[0].folder.digest)}
    if wrong := [number for number, canvases in there.items() if planned.get(number) != canvases]:
        raise ValueError(
            f"{folder} contains {len(wrong)} files with other canvases than this call stores in them, first "
            f"{wrong[0]:06d}.safetensors: delete them and call again"
        )
    return [task for task in tasks if task.number not in there]
