"""Activations of many texts in a folder: the training data of a dictionary, read from disk when rows are used.

On a masked diffusion model an activation depends on how much of the text is masked. Each text is therefore masked at a
random noise level t, and every stored vector comes with the t of its canvas, as in DLM-Scope (arXiv 2602.05859), which
trains one sparse autoencoder on masked positions and one on unmasked positions. The text is read as in training: a
time-conditioned network gets that of t, and one that attends by blocks reads the clean text beside it.

The folder contains `run.json`, which describes the call, and numbered files, each with the vectors of some consecutive
canvases. Which canvases a file contains follows from the call alone, before anything is computed, and a file is written
as a whole or not at all. So several workers can each write some, and a call that was interrupted writes those that are
missing. It computes the same batches as an uninterrupted call, so the files are the same to the last bit.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.dictionaries.canvases import (
    CanvasBatch,
    Canvases,
    Mask,
    Noise,
    NoiseRange,
    Span,
    check_mask,
    levels_of,
    spans_of,
)
from diffusion_lens.analysis.dictionaries.splice import vectors
from diffusion_lens.analysis.engine.inputs import CleanTexts, ForwardPass, Texts, readable_points
from diffusion_lens.analysis.over_facts.executor import Executes, Workers, run_tasks, with_device
from diffusion_lens.analysis.over_facts.folder import SharedFolder, begin_folder, study_digest
from diffusion_lens.denoising.cache import activation_shape
from diffusion_lens.hooks.names import nearest, own_name
from diffusion_lens.model.config import DiffusionConfig, as_dtype
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import Result, Table, open_result, provenance, read_run, save_result
from diffusion_lens.settings import Whole, at_least, own_seed, whole_number

KIND = "activations"
_COLUMNS = {
    "t": torch.float32,
    "share": torch.float32,
    "masked": torch.bool,
    "position": torch.int32,
    "text": torch.int32,
    "token": torch.int32,
}


@dataclass(frozen=True, eq=False)
class ShardFile:
    """One file of a folder of activations, with those of the canvases from `start` to `stop`."""

    tensors: dict[str, Tensor]  # vectors by hook point, and columns, memory-mapped; empty if no position is selected
    start: int
    stop: int
    number: int  # of the file in the folder

    def __len__(self) -> int:
        return len(self.tensors["t"]) if self.tensors else 0


@dataclass(frozen=True, eq=False)
class ActivationStore(Result):
    """The activations that `activations` has stored.

    A row is one position of one canvas. All rows are ordered by canvas and position.

    Columns of the data frame: point, rows, dtype, bytes.

    Attributes:
        path: Folder.
        shards: Its files.
        record: Hook points, positions (`mask`), bounds of the noise levels, seed, hash of the texts, facts set aside,
            model, hash of its weights, hooks, versions.
    """

    KIND: ClassVar[str] = KIND
    NO_PICTURE: ClassVar[str] = "It holds activations; the results that are computed from them have pictures."

    path: Path
    shards: tuple[ShardFile, ...]
    record: dict[str, Any]

    @classmethod
    def load(cls, folder: str | Path) -> "ActivationStore":
        """Open a folder. Its files are memory-mapped: rows are read from disk when they are used.

        The folder of an interrupted call opens too, with the rows that are stored so far (`is_complete`). Where workers
        have written them, they need not be those of the first canvases.

        Raises:
            FileNotFoundError: There are no activations.
            ValueError: A file is incomplete, belongs to another call, or was renamed.
        """
        file = Path(folder) / "run.json"
        if not file.exists():
            raise FileNotFoundError(f"{folder} contains no activations: there is no {file}")
        record = read_run(file)
        if record.get("kind") != KIND:
            raise ValueError(
                f"{folder} does not contain activations; name the folder that activations(out=) has filled"
            )
        return cls(Path(folder), tuple(shard_files(Path(folder), study_digest(record))), record)

    @property
    def names(self) -> tuple[str, ...]:
        """The hook points."""
        return tuple(self.record["names"])

    @property
    def is_complete(self) -> bool:
        """Whether all canvases of the call are stored."""
        return bool(sum(shard.stop - shard.start for shard in self.shards) == self.record["canvases"])

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    @cached_property
    def t(self) -> Float[Tensor, "entry"]:
        """Noise level of each row's canvas; 0 without [MASK]."""
        return self._column("t")

    @cached_property
    def share(self) -> Float[Tensor, "entry"]:
        """Share of the positions of each row's canvas that are masked, a prompt included."""
        return self._column("share")

    @cached_property
    def masked(self) -> Bool[Tensor, "entry"]:
        """Whether the row's position is masked."""
        return self._column("masked")

    @cached_property
    def position(self) -> Int[Tensor, "entry"]:
        """Position of each row in its text, counted without padding, with the prompt of a fact and with BOS."""
        return self._column("position")

    @cached_property
    def text(self) -> Int[Tensor, "entry"]:
        """Index of each row's text in the list that was given."""
        return self._column("text")

    @cached_property
    def token(self) -> Int[Tensor, "entry"]:
        """Token of the clean text at each row's position, also where the canvas has [MASK]."""
        return self._column("token")

    def select(self, *, t: Noise = None, masked: bool | None = None) -> Int[Tensor, "selected"]:
        """Indices of the rows with a noise level, or one of several, or within the bounds of a `NoiseRange`.

        Args:
            t: Noise levels; by default all.
            masked: Whether the positions are masked; by default both kinds.
        """
        chosen = torch.ones(len(self), dtype=torch.bool)
        if isinstance(t, NoiseRange):
            chosen &= (self.t >= torch.tensor(t.low)) & (self.t <= torch.tensor(t.high))
        elif t is not None:
            chosen &= torch.isin(self.t, torch.tensor(levels_of(t), dtype=self.t.dtype))
        if masked is not None:
            chosen &= self.masked == masked
        return chosen.nonzero()[:, 0]

    def rows(self, name: str, indices: Whole | Iterable[Whole | bool]) -> Float[Tensor, "selected d"]:
        """The vectors of some rows at a hook point, in this order.

        Args:
            name: Hook point.
            indices: Numbers of rows, or a mask Bool[entry] of all rows, such as `store.masked`: a tensor, an array or a
                list. A single number is one row.

        Raises:
            KeyError: The hook point was not stored.
            IndexError: There is no such row.
            TypeError: The indices are no whole numbers.
            ValueError: The indices have several axes, or a mask has another length than the store.
        """
        name = own_name(name)
        if name not in self.names:
            raise KeyError(f"{name!r} was not stored; the nearest are: {nearest(name, self.names)}")
        numbers = self._numbers(indices)
        vectors = [shard.tensors[name] for shard in self.shards if len(shard)]
        file_of = torch.searchsorted(self._ends, numbers, right=True)
        found = vectors[0].new_empty((len(numbers), vectors[0].shape[1]))
        for file in file_of.unique().tolist():
            here = file_of == file
            found[here] = vectors[file][numbers[here] - (self._ends[file] - len(vectors[file]))]
        return found

    def batches(
        self,
        name: str,
        batch_size: Whole,
        *,
        t: Noise = None,
        masked: bool | None = None,
        seed: Whole = 0,
        epochs: Whole | None = 1,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[Float[Tensor, "batch d"]]:
        """The vectors of a hook point in random order, in batches, for the training of a dictionary.

        With `epochs=None` it is an iterator without end, such as the `data_provider` of SAELens's `SAETrainer`. A batch
        may contain the end of one epoch and the beginning of the next, so that only the very last batch is smaller.

        Args:
            name: Hook point.
            batch_size: Number of rows of a batch.
            t, masked: Rows to use, as in `select`.
            seed: Seed of the order; each epoch has an order of its own.
            epochs: Number of passes over the rows; `None` for endless ones.
            device, dtype: Device and dtype of the batches; by default the CPU and the stored dtype.

        Raises:
            KeyError: The hook point was not stored.
            ValueError: No row is selected.
        """
        size, chosen = at_least(1, "batch_size", batch_size), self.select(t=t, masked=masked)
        n_epochs = None if epochs is None else at_least(1, "epochs", epochs)
        if not len(chosen):
            raise ValueError(f"no row of {len(self)} is selected by t={t} and masked={masked}")
        self.rows(name, chosen[:1])
        orders = (
            chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(own_seed(seed, epoch)))]
            for epoch in (itertools.count() if n_epochs is None else range(n_epochs))
        )
        return (self.rows(name, indices).to(device=device, dtype=dtype) for indices in _in_batches(orders, size))

    def _numbers(self, indices: Any) -> Int[Tensor, "selected"]:
        try:
            given = torch.as_tensor(indices).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"the indices of rows are a {type(indices).__name__}; give whole numbers, such as those of "
                "store.select(...), or a mask of all rows"
            ) from error
        if given.dim() > 1 or (given.dtype == torch.bool and given.shape != (len(self),)):
            raise ValueError(
                f"the indices of rows are {given.dtype} {list(given.shape)}; give a list of whole numbers, or a mask "
                f"of all {len(self)} rows"
            )
        if given.dtype == torch.bool:
            return given.nonzero()[:, 0]
        if given.numel() and (given.is_floating_point() or given.is_complex()):
            raise TypeError(f"the indices of rows are {given.dtype}; give whole numbers, or a mask of all rows")
        numbers = given.long().reshape(-1)
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self):
            raise IndexError(f"rows are numbered from 0 to {len(self) - 1}")
        return numbers

    @cached_property
    def _ends(self) -> Int[Tensor, "entry"]:
        """One past the last row of each file that has rows."""
        return torch.tensor([len(shard) for shard in self.shards if len(shard)]).cumsum(dim=0)

    def _column(self, name: str) -> Tensor:
        return torch.cat(
            [torch.empty(0, dtype=_COLUMNS[name]), *(shard.tensors[name] for shard in self.shards if len(shard))]
        )

    def _table(self) -> Table:
        parts = {name: [shard.tensors[name] for shard in self.shards if len(shard)] for name in self.names}
        return Table(
            {
                "point": list(parts),
                "rows": [sum(map(len, each)) for each in parts.values()],
                "dtype": [str(each[0].dtype) if each else "" for each in parts.values()],
                "bytes": [sum(x.nbytes for x in each) for each in parts.values()],
            }
        )

    def __repr__(self) -> str:
        size = sum(x.nbytes for shard in self.shards for x in shard.tensors.values())
        state = "" if self.is_complete else ", incomplete"
        return f"ActivationStore({len(self):,} rows of {', '.join(self.names)}, {size:,} bytes{state})"


@dataclass(frozen=True)
class StoredRows:
    """What is stored of a canvas: hook points, positions, and the dtype of the vectors, by default the model's."""

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
        masked, token = (x.cpu()[canvas, position] for x in (batch.masked, batch.tokens))
        columns = (batch.t.cpu()[canvas], batch.share.cpu()[canvas], masked, position, batch.texts[canvas], token)
        rows = {name: x.to(dtype) for (name, dtype), x in zip(_COLUMNS.items(), columns, strict=True)}
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


@dataclass(frozen=True, eq=False)
class ShardTask:
    """A file of stored activations, of the canvases from `start` to `stop`, as a task of `run_tasks`."""

    number: int
    start: int
    stop: int
    texts: CleanTexts  # of these canvases
    offset: int  # the first canvas of the first of these texts
    spans: tuple[Span, ...]
    seed: int
    batch_size: int
    stored: StoredRows
    folder: SharedFolder

    @classmethod
    def of(
        cls, number: int, start: int, stop: int, canvases: Canvases, size: int, stored: StoredRows, folder: SharedFolder
    ) -> "ShardTask":
        first, last = start // len(canvases.spans), -(-stop // len(canvases.spans))
        offset, texts = first * len(canvases.spans), canvases.texts.between(first, last)
        return cls(number, start, stop, texts, offset, canvases.spans, canvases.seed, size, stored, folder)

    @property
    def name(self) -> str:
        return f"of the file {self._file}"

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def n_kept(self) -> int:
        return 0  # A file is written whole.

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
        """The rows of all canvases; empty if no position is selected. `done` hears how many canvases a batch had."""
        canvases = Canvases(model, self.texts, self.spans, self.seed)
        parts = []
        for batch in canvases.batches(self.batch_size, self.start - self.offset, self.stop - self.offset):
            rows = self.stored.of(model, batch)
            if len(rows["t"]):
                parts.append(rows)
            done(len(batch.tokens))
        return {name: torch.cat([rows[name] for rows in parts]) for name in (parts[0] if parts else ())}

    def write(self, folder: Path, rows: Mapping[str, Tensor]) -> None:
        save_result(folder / self._file, KIND, rows, self._record)

    @property
    def _file(self) -> str:
        return f"{self.number:06d}.safetensors"

    @property
    def _record(self) -> dict[str, str | int]:
        return {"call": self.folder.digest, "start": self.start, "stop": self.stop}


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

    Raises:
        KeyError: There is no such hook point.
        ValueError: A hook point has no vector for each position, a setting is out of range or does not fit the model,
            no position is selected, a vector is too large for `dtype`, the folder belongs to another call, the call is
            inside `model.at_time`, or a worker does not get the network.
        RuntimeError: A task was given up after its workers died. What was computed is in the folder.
    """
    # 1. Settings.
    model.time.require_own("activations")
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


def run_to(model: DiffusionTransformer, batch: CanvasBatch, names: Sequence[str]) -> Mapping[str, Tensor]:
    """The activations of a batch at some hook points; the network runs no further than to the last of them."""
    states = ForwardPass.under_noise(model, batch.tokens, batch.noisy, batch.real, batch.t).states(names)
    return {name: vectors(states[name], model.hook_dict[name]) for name in names}


def shard_files(folder: Path, mark: str) -> list[ShardFile]:
    """The files of a folder, in order. Any of them may be missing, as workers write them in no order.

    Raises:
        ValueError: A file is incomplete, belongs to another call, or was renamed.
    """
    shards: list[ShardFile] = []
    for path in sorted(folder.glob("[0-9]*.safetensors")):
        tensors, record = open_result(path, KIND)
        if record.get("call") != mark:
            raise ValueError(f"{path} belongs to another call than {folder / 'run.json'}: delete it and call again")
        rows, bounds = (
            {len(tensor) for tensor in tensors.values() if tensor.dim()},
            (record.get("start"), record.get("stop")),
        )
        if len(rows) > 1 or (tensors and "t" not in tensors) or not all(isinstance(bound, int) for bound in bounds):
            raise ValueError(f"{path} was changed: its tensors or its canvases do not fit. Delete it and call again")
        number, n_before, end = int(path.stem), len(shards) and shards[-1].number + 1, shards[-1].stop if shards else 0
        if path.stem != f"{number:06d}" or (record["start"] > end) != (number > n_before) or record["start"] < end:
            raise ValueError(
                f"{path} contains the canvases from {record['start']} on, which do not follow those of the file before "
                "it: the file was renamed. Delete it and call again"
            )
        shards.append(ShardFile(tensors, record["start"], record["stop"], number))
    return shards


def _ends(n_selected: Sequence[int], size: int, limit: int) -> Iterator[int]:
    """One past the last canvas of each file: a file ends after the batch of `size` canvases that brings it to `limit`
    rows."""
    n_rows = 0
    for start in range(0, len(n_selected), size):
        n_rows += sum(n_selected[start : start + size])
        stop = min(start + size, len(n_selected))
        if n_rows >= limit or stop == len(n_selected):
            yield stop
            n_rows = 0


def _missing(tasks: Sequence[ShardTask], folder: Path) -> list[ShardTask]:
    """The files that the folder lacks. What an interrupted write has left behind is removed."""
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


def _in_batches(orders: Iterable[Int[Tensor, "entry"]], size: int) -> Iterator[Int[Tensor, "selected"]]:
    """Indices of consecutive orders, `size` at a time."""
    rest = torch.empty(0, dtype=torch.long)
    for order in orders:
        rest = torch.cat([rest, order])
        while len(rest) >= size:
            yield rest[:size]
            rest = rest[size:]
    if len(rest):
        yield rest
