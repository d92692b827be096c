"""Stored activations: tables whose rows are positions, in files that stay on disk until rows are used."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.dictionaries.noise import Noise, NoiseRange
from diffusion_lens.analysis.resumable import study_digest
from diffusion_lens.display import Result, Table
from diffusion_lens.hook_names import nearest, own_name
from diffusion_lens.records import open_result, read_run
from diffusion_lens.seeds import own_seed
from diffusion_lens.settings import Whole, at_least, plain_number, yes_or_no

KIND = "activations"


@dataclass(frozen=True, eq=False)
class ShardFile:
    """One file of a folder of activations.

    Attributes:
        tensors: Vectors by hook point, and columns, memory-mapped; empty if no position of its canvases is selected.
        start, stop: First canvas, and one past the last.
        number: Its number in the folder.
    """

    tensors: dict[str, Tensor]
    start: int
    stop: int
    number: int

    def __len__(self) -> int:
        return len(self.tensors["t"]) if self.tensors else 0


def shard_files(folder: Path, mark: str) -> list[ShardFile]:
    """The files of a folder, in order. Any of them may be missing, as workers write them in no order.

    Raises:
        ValueError: A file is incomplete, belongs to another call, or was renamed.
    """
    shards: list[ShardFile] = []
    for path in sorted(folder.glob("[0-9]*.safetensors")):
        tensors, record = open_result(path, KIND)
        if record["call"] != mark:
            raise ValueError(f"{path} belongs to another call than {folder / 'run.json'}: delete it and call again")
        number, n_before, end = int(path.stem), len(shards) and shards[-1].number + 1, shards[-1].stop if shards else 0
        if path.stem != f"{number:06d}" or (record["start"] > end) != (number > n_before) or record["start"] < end:
            raise ValueError(
                f"{path} contains the canvases from {record['start']} on, which do not follow those of the file before "
                "it: the file was renamed. Delete it and call again"
            )
        shards.append(ShardFile(tensors, record["start"], record["stop"], number))
    return shards


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
        return self._column("t", torch.float32)

    @cached_property
    def masked(self) -> Bool[Tensor, "entry"]:
        """Whether the row's position is masked."""
        return self._column("masked", torch.bool)

    @cached_property
    def position(self) -> Int[Tensor, "entry"]:
        """Position of each row in its text, counted without padding, with the prompt of a fact and with BOS."""
        return self._column("position", torch.int32)

    @cached_property
    def text(self) -> Int[Tensor, "entry"]:
        """Index of each row's text in the list that was given."""
        return self._column("text", torch.int32)

    @cached_property
    def token(self) -> Int[Tensor, "entry"]:
        """Token of the clean text at each row's position, also where the canvas has [MASK]."""
        return self._column("token", torch.int32)

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
            plain: Any = t.tolist() if hasattr(t, "tolist") else t
            levels = [plain_number("t", level) for level in (plain if isinstance(plain, Iterable) else [plain])]
            chosen &= torch.isin(self.t, torch.tensor(levels, dtype=self.t.dtype))
        if masked is not None:
            chosen &= self.masked == yes_or_no("masked", masked)
        return chosen.nonzero()[:, 0]

    def rows(self, name: str, indices: Whole | Iterable[Whole]) -> Float[Tensor, "selected d"]:
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
        """Numbers of rows, from numbers or from a mask of all rows."""
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

    def _column(self, name: str, dtype: torch.dtype) -> Tensor:
        return torch.cat([torch.empty(0, dtype=dtype), *(shard.tensors[name] for shard in self.shards if len(shard))])

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
