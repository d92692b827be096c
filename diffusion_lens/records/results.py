"""Results: saved with a record of the model and the settings that produced them, and shown in notebooks.

Each result is one safetensors file with its tensors and a JSON record in the metadata. Nothing is pickled. A class
states its table, in tidy long form with a row for each cell, fact or step, and if it has a picture, `plot`. The base
classes make of these the one line, what a notebook shows (HTML without scripts and without ids, in the colours of the
page) and the data frame.
"""

import hashlib
import math
import platform
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from html import escape
from importlib import import_module
from importlib.metadata import version
from inspect import isfunction
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.records.captions import caption_of as caption_of
from diffusion_lens.records.captions import say_settings, selection_of
from diffusion_lens.records.captions import shown_model as shown_model
from diffusion_lens.records.identity import ATTRIBUTES, identity_of, require_named_hooks
from diffusion_lens.records.identity import weights_sha256 as weights_sha256
from diffusion_lens.records.schema import built, checksum
from diffusion_lens.settings import checked_arguments
from diffusion_lens.settings.figures import styled
from weight_conversion import as_json, parse_json, read_json, restore_numbers, to_json, write_safetensors

S = TypeVar("S", bound="Saved")
RECORD = "diffusion_lens"
PART = "diffusion_lens.part"
CHECKSUM = "diffusion_lens.checksum"
_ROOMS = ("denoising", "training", "analysis", "evaluation", "checks")  # that have results
# Architecture and weights are compared, whatever options and deltas gave them.
NOT_COMPARED = ("device", "versions", "failed", "loaded_with", "deltas")
NETWORK = ("model", "dtype", "weights_sha256", "hooks", "modules", "tokenizer_sha256")
SHOWN_ROWS = 10
LONGEST = 60  # characters of a text in the excerpt of a notebook
installed_version = cache(version)  # which reads and parses a file
_START_AGAIN = "Delete the files in this folder and start again, or name another folder"
_SHOWN_PARTS = 3
_CELL = "padding: .1em .6em; border: 0; border-bottom: 1px solid rgba(128, 128, 128, .35); background: none;"
_TOKENIZERS: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
_PART: ContextVar[str | None] = ContextVar("_PART", default=None)


def provenance(model: nn.Module, cfg: DiffusionConfig) -> dict[str, Any]:
    """Entries of every record besides the settings: model, weights, tokenizer, hooks, modules, dtype, device, versions.

    Weights, hooks and modules are those at the beginning of the computation (`identity.begins_run`).
    """
    identity, clock = identity_of(model), getattr(model, "clock", None)
    return {
        "model": cfg.model_name,
        **({} if cfg.mode is None else {"mode": cfg.mode}),
        **loading_options(model),
        **({"deltas": deltas} if (deltas := _deltas(model)) else {}),
        "architecture": cfg.architecture.to_dict(),
        "weights_sha256": identity.weights_sha256,
        "tokenizer_sha256": tokenizer_sha256(getattr(model, "tokenizer", None), cfg.default_prepend_bos),
        "hooks": identity.hooks,
        "modules": identity.modules,
        "dtype": str(cfg.dtype).removeprefix("torch."),
        "device": str(cfg.device),
        # The time of `model.at_time(t)`, without which the numbers cannot be had again.
        **({} if (time := getattr(clock, "time", None)) is None else {"time": time}),
        # The open blocks of `model.at_block(start)`.
        **({} if (origins := getattr(clock, "origins", None)) is None else {"blocks_from": origins.tolist()}),
        "versions": {
            "diffusion-lens": installed_version("diffusion-lens"),
            "transformer-lens": installed_version("transformer-lens"),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def loading_options(model: nn.Module) -> dict[str, Any]:
    """The options of `from_pretrained` that the config leaves open, as the entry of a record, if there are any."""
    options = getattr(getattr(model, "source", None), "options", None)
    return {"loaded_with": dict(options)} if options else {}


def _deltas(model: nn.Module) -> list[str]:
    """Hashes of the deltas in the weights of a model: the one that it was loaded with, then those applied since."""
    loaded = getattr(getattr(model, "source", None), "delta", None)
    applied = [edit.describe().get("delta") for edit in getattr(model, "_edits", ())]
    return [sha256 for sha256 in (loaded, *applied) if sha256 is not None]


def network_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a record that identify its network, for the record of a result that builds on this one."""
    mode = {"mode": record["mode"]} if "mode" in record else {}
    return {**{name: record.get(name) for name in NETWORK}, **mode}


def tokenizer_sha256(tokenizer: Any, prepend_bos: bool) -> str | None:
    """SHA-256 of a complete fast tokenizer (normaliser and added tokens included) and of `prepend_bos`."""
    if tokenizer is None:
        return None
    # Serialising a large vocabulary takes a tenth of a second, so the hash is cached until tokens are added.
    cached = _TOKENIZERS.get(tokenizer)
    if cached is None or cached[0] != len(tokenizer):
        text = tokenizer.backend_tokenizer.to_str()
        cached = _TOKENIZERS[tokenizer] = (len(tokenizer), hashlib.sha256(text.encode()).hexdigest())
    return hashlib.sha256(f"{cached[1]} {prepend_bos}".encode()).hexdigest()


class Saved:
    """A dataclass that is kept in one `.safetensors` file, its tensors as tensors and all other fields in the record.

    A file is checked against the dataclass when it is read (`records.schema`). Fields that only earlier versions had
    are ignored. `diffusion_lens.load` reads any of them.
    """

    KIND: ClassVar[str]  # what it is, in the file
    ENTRIES: ClassVar[Mapping[str, Any]] = {}  # entries of the record that the class reads, with their types
    # Axes of the tensors, each with its length, or the attribute that says it: a list, a list of lists, or a number.
    AXES: ClassVar[tuple[tuple[str, str | int], ...]] = ()
    # Kinds of earlier versions, each with the present names of the fields that have other names there.
    FORMER: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    @checked_arguments
    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        owner = next(each for each in type(self).__mro__ if "KIND" in vars(each))
        if own := {field.name for field in fields(self)} - {field.name for field in fields(owner)}:  # type: ignore[arg-type]
            raise TypeError(
                f"{type(self).__name__} has {', '.join(sorted(own))} besides the fields of {owner.__name__}, as which "
                "it would be read: give it a KIND of its own, the name of such results in files"
            )
        return save_result(path, self.KIND, *split_fields(self))

    @classmethod
    def load(cls: type[S], path: str | Path) -> S:
        """Read what `save` wrote; a `ValueError` if the file is incomplete, of another kind, or was changed."""
        kind = kind_of(path) if cls.FORMER else cls.KIND
        tensors, record = load_result(path, kind if kind in cls.FORMER else cls.KIND)
        names = cls.FORMER.get(kind, {})
        return built(cls, {names.get(name, name): value for name, value in {**tensors, **record}.items()}, str(path))

    def _axes(self) -> Iterable[tuple[str, Any]]:
        """Axes of the tensors with what says how long they are."""
        return ((axis, getattr(self, size) if isinstance(size, str) else size) for axis, size in self.AXES)

    def _check(self) -> None:
        """Raise a `ValueError` if fields contradict each other in another way."""


@checked_arguments
def load(path: str | Path) -> Any:
    """Any saved result, by its own header: a file, or the folder of a study or of activations.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ValueError: It is not a saved result of this library, or was changed; the message says what it is, if that is
            known, and what reads it.
    """
    source = Path(path)
    if source.is_dir():
        return _class_of_folder(source).load(source)
    if source.suffix == ".json" and source.is_file():
        content = read_json(source)
        kind = content.get("kind") if isinstance(content, dict) else None
    else:
        kind = kind_of(source)
    return class_of(kind, source).load(source)


def class_of(kind: Any, path: str | Path) -> type[Any]:
    """The class of results of this kind, which a file has named."""
    classes = _classes()
    kind = kind if isinstance(kind, str) else None
    if kind not in classes:
        for room in _ROOMS:
            package = import_module(f"diffusion_lens.{room}")
            for module in walk_packages(package.__path__, f"{package.__name__}."):
                import_module(module.name)
        classes = _classes()
    if kind in classes:
        return classes[kind]
    raise ValueError(
        f"{path} contains {'no saved result' if kind is None else f'a {kind}'}, which is none of the results that "
        f"diffusion_lens.load reads: {', '.join(sorted(classes))}. If a class of your own wrote it, import its module "
        "first; a model is loaded by HookedDiffusionTransformer.from_pretrained"
    )


def save_result(path: str | Path, kind: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
    """Write a result in one atomic file; `load_result` is the inverse."""
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"results are safetensors files; {target} should end in .safetensors")
    part = _PART.get()
    described = to_json({"kind": kind, **record, **({} if part is None else {PART: part})})
    write_safetensors(tensors, target, {RECORD: described, CHECKSUM: checksum(tensors, described)})
    return target


def load_result(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and record of a saved result; a `ValueError` if the file is incomplete, of another kind, or was changed.

    Files of earlier versions have no checksum of their content, and no change of their tensors is noticed.
    """
    with _opened(path, kind) as file:
        record, tensors, metadata = _record_of(file, path, kind), _tensors_of(file), file.metadata()
        if others := metadata.keys() - {RECORD, PART, CHECKSUM}:
            raise ValueError(
                f"{path} has {sorted(others)} beside its record, which no result has: "
                "the file was changed or written by another program. Save the result again, or compute it again"
            )
        if CHECKSUM in metadata and metadata[CHECKSUM] != checksum(tensors, metadata[RECORD]):
            raise ValueError(
                f"{path}: the content is not what was saved, by its checksum. The file was damaged or changed: delete "
                "it and save the result again, or compute it again"
            )
        return {name: tensor.clone() for name, tensor in tensors.items()}, record


def open_result(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Like `load_result`, but the tensors are memory-mapped: they stay on disk until they are used, and unchecked."""
    with _opened(path, kind) as file:
        return _tensors_of(file), _record_of(file, path, kind)


def split_fields(result: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a dataclass and its other fields; `records.schema.built` is the inverse.

    Those of a mapping of tensors are named after field and key, and the record lists the keys in their order; those of
    a field that is a dataclass itself are named after both fields, and of a mapping of dataclasses after key and field.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in ((field.name, getattr(result, field.name)) for field in fields(result)):
        if isinstance(value, Tensor):
            tensors[name] = value.contiguous()
        elif isinstance(value, dict) and value and all(isinstance(each, Tensor) for each in value.values()):
            tensors |= {f"{name}/{key}": each.contiguous() for key, each in value.items()}
            others[name] = list(value)
        elif is_dataclass(value):
            own_tensors, others[name] = split_fields(value)
            tensors |= {f"{name}.{key}": each for key, each in own_tensors.items()}
        elif isinstance(value, dict) and value and all(map(is_dataclass, value.values())):
            parts = {str(key): split_fields(each) for key, each in value.items()}
            others[name] = {key: own for key, (_, own) in parts.items()}
            tensors |= {f"{key}.{part}": each for key, (own, _) in parts.items() for part, each in own.items()}
        else:
            others[name] = sorted(value) if isinstance(value, frozenset) else value
    return tensors, others


@contextmanager
def part_of_run(mark: str) -> Iterator[None]:
    """Write `mark` into every result that is saved inside. `mark_of` reads it, to match a part with its study."""
    token = _PART.set(mark)
    try:
        yield
    finally:
        _PART.reset(token)


def mark_of(path: str | Path) -> str | None:
    """The mark that `part_of_run` wrote into a result; `None` if it was saved without one."""
    with _opened(path, "result") as file:
        metadata = file.metadata() or {}
        # Earlier versions, without a checksum, wrote it beside the record.
        return _header_of(file, path).get(PART) if CHECKSUM in metadata else metadata.get(PART)


def kind_of(path: str | Path) -> str:
    """Kind of a saved result, the name that its class has given it; a `ValueError` if the file is none."""
    with _opened(path, "result") as file:
        kind = _header_of(file, path).get("kind")
    if not isinstance(kind, str):
        raise ValueError(
            f"{path} is not a saved result of diffusion_lens: its header does not say which. A model is loaded by "
            "HookedDiffusionTransformer.from_pretrained"
        )
    return kind


def read_run(path: Path) -> dict[str, Any]:
    """The description of a study or a training run, from the `run.json` of its folder; a `ValueError` without one."""
    try:
        run = restore_numbers(read_json(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not describe a study or a training run: {error}. {_START_AGAIN}") from error
    if not isinstance(run, dict):
        raise ValueError(
            f"{path} does not describe a study or a training run: it contains {str(run)[:40]} and not a mapping. "
            f"{_START_AGAIN}"
        )
    return run


def require_same_run(saved: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Raise a `ValueError` with the differences, unless two records describe the same study or training run.

    Entries in `NOT_COMPARED` may differ; the message says `where` the saved record comes from.
    """
    saved, current = {"hooks": {}, **saved}, {"hooks": {}, **current}
    require_named_hooks(saved, where)
    compared = [name for name in {**saved, **current} if name not in NOT_COMPARED]
    if different := "; ".join(differences(saved, current, compared)):
        raise ValueError(
            f"{where} was made with other settings, data, weights or hooks ({different}). Continue with the same ones, "
            "or name another folder"
        )


def require_same_settings(folder: Path, settings: Mapping[str, Any], record: str = "run.json") -> None:
    """Like `require_same_run`, but before the model is loaded: compares only `settings` with what the folder records.

    A folder without the file `record` passes.
    """
    if (folder / record).exists():
        saved = read_run(folder / record)
        require_same_run(saved, {**saved, **as_json(settings)}, str(folder))


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], compared: Iterable[str]) -> list[str]:
    """One text for each of the `compared` entries that differs; values of `saved` are "there", of `current` "here".

    Records of earlier versions describe modules otherwise or not at all; then modules are not compared.
    """
    if any(ATTRIBUTES not in (record.get("modules") or ()) for record in (saved, current)):
        compared = [name for name in compared if name != "modules"]
    return [
        _difference(name, saved.get(name), current.get(name))
        for name in compared
        if saved.get(name) != current.get(name)
    ]


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of one length.

    Attributes:
        columns: Values of each column, by its name.
        most: Column that selects the rows of the excerpt, those with its largest absolute values; by default the
            excerpt consists of the first rows.
    """

    columns: Mapping[str, Any]
    most: str | None = None

    @classmethod
    def of_cells(cls, axes: Mapping[str, Sequence[Any]], values: Mapping[str, Any], most: str | None = None) -> "Table":
        """A row for each cell of a grid, the last axis changing fastest.

        Args:
            axes: Coordinates along each axis of the grid, by the name of the axis.
            values: Numbers or texts of the cells, by name: a tensor or nested lists that broadcast to the grid.
            most: The same as in the class.
        """
        shape = tuple(map(len, axes.values()))
        columns = {}
        for i, (name, coordinates) in enumerate(axes.items()):
            along = _array(list(coordinates)).reshape([-1 if j == i else 1 for j in range(len(shape))])
            columns[name] = np.broadcast_to(along, shape).reshape(-1)
        for name, value in values.items():
            columns[name] = np.broadcast_to(_array(value), shape).reshape(-1)
        return cls(columns, most)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def where(self, keep: Any) -> "Table":
        """The rows at which `keep`, a mask of the rows, is true."""
        selected = np.asarray(keep, dtype=bool).reshape(-1)
        return Table({name: _array(column)[selected] for name, column in self.columns.items()}, self.most)

    def frame(self) -> Any:
        """The table as a `pandas.DataFrame`."""
        import pandas as pd  # TransformerLens installs it; its import takes half a second.

        return pd.DataFrame({name: _array(column) for name, column in self.columns.items()})

    def to_html(self) -> str:
        """An HTML table of a few rows, which says how many there are. It takes over the colours of the page."""
        rows = self._excerpt()
        numeric = {name: _array(column).dtype.kind in "biuf" for name, column in self.columns.items()}
        heads = "".join(_cell("th", escape(name), right) for name, right in numeric.items())
        body = "".join(
            "<tr>"
            + "".join(_cell("td", _shown(_array(self.columns[name])[row]), right) for name, right in numeric.items())
            + "</tr>"
            for row in rows
        )
        return (
            '<div style="overflow-x: auto; max-width: 100%" tabindex="0">'
            f'<table style="border-collapse: collapse; color: inherit; margin: .4em 0"><thead><tr>{heads}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>{self._rest(len(rows))}"
        )

    def _excerpt(self) -> list[int]:
        if self.most is None or len(self) <= SHOWN_ROWS:
            return list(range(min(SHOWN_ROWS, len(self))))
        sizes = np.nan_to_num(np.abs(_array(self.columns[self.most]).astype(float)), nan=-1.0)
        rows: list[int] = np.argsort(-sizes, kind="stable")[:SHOWN_ROWS].tolist()
        return rows

    def _rest(self, n_shown: int) -> str:
        """Which rows the excerpt has, if it does not have all."""
        n_more = len(self) - n_shown
        if not n_more:
            return ""
        order = "" if self.most is None else f"The rows with the largest {escape(self.most)}. "
        rows = "row" if n_more == 1 else "rows"
        return f"<div>{order}... and {n_more:,} more {rows}: <code>to_dataframe()</code></div>"


def shaped(values: Sequence[Any], *shape: int) -> Any:
    """Texts or numbers as an array of this shape, to be broadcast to the cells of a grid; -1 is the length."""
    return _array(values).reshape(shape)


def texts_of(tokens: Int[Tensor, "*rest"], words: Mapping[int, str]) -> Any:
    """The text of each token as an array of the same shape; empty where there is no token (-1)."""
    ids, indices = tokens.unique(return_inverse=True)
    texts = np.asarray([words.get(int(token), "") for token in ids], object)
    return texts[indices.numpy()]


class Result(ABC):
    """A result: one line as text, a table as HTML, and all rows of the table as a data frame.

    A class without a picture says in `NO_PICTURE` why it has none.
    """

    NO_PICTURE: ClassVar[str]
    record: dict[str, Any]

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the arguments of the public methods of every result. Those that draw take the settings of figures."""
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if isfunction(method) and not name.startswith("_"):
                setattr(cls, name, checked_arguments(styled(method) if name.startswith("plot") else method))

    @abstractmethod
    def _table(self) -> Table:
        """The numbers in long form."""

    def to_dataframe(self) -> Any:
        """The table as a `pandas.DataFrame`, a row for each cell. The description of the class names the columns."""
        return self._table().frame()

    def _settings(self) -> Mapping[str, Any]:
        """The record of model and settings."""
        return self.record

    def _repr_html_(self) -> str:
        return self._page("")

    def _page(self, picture: str) -> str:
        """One line, the settings, a picture and the table as HTML."""
        settings = say_settings(self._settings())
        said = f'<div style="opacity: .8">{escape(settings)}</div>' if settings else ""
        return (
            f'<div style="color: inherit; max-width: 100%"><div><strong>{escape(repr(self))}</strong></div>{said}'
            f"{picture}{self._table().to_html()}</div>"
        )

    def __repr__(self) -> str:
        return one_line(self)


class PicturedResult(Result):
    """A result with a picture. A class of your own states in `SHOWS` what its picture shows, for captions."""

    SHOWS: ClassVar[str]
    _SAID: ClassVar[tuple[str, ...]] = ()  # arguments of `plot` by which `_shows` says something else

    @abstractmethod
    def plot(self, *args: Any, **settings: Any) -> Any:
        """Draw the picture; returns the matplotlib axes."""

    def caption(self, **selected: Any) -> str:
        """Two sentences for the legend of the picture: what it shows and of which model, and the settings and the hash
        of the weights that the record has.

        Args:
            selected: The arguments of `plot` that choose what is drawn, such as `step=2` or `show="probability"`.

        Raises:
            TypeError: `plot` has no such argument.
        """
        said = selection_of(self.plot, {name: x for name, x in selected.items() if name not in self._SAID})
        return caption_of(
            self._shows(**{name: x for name, x in selected.items() if name in self._SAID}) + said, self._settings()
        )

    def _shows(self) -> str:
        """What the picture shows; takes the arguments of `plot` that `_SAID` names."""
        return self.SHOWS

    def _picture(self) -> Any:
        """The axes of the picture that stands for the result."""
        return self.plot()

    def _repr_html_(self) -> str:
        return str(self._repr_mimebundle_()["text/html"])

    def _repr_png_(self) -> bytes | None:
        png: bytes | None = self._repr_mimebundle_().get("image/png")
        return png

    def _repr_mimebundle_(self, **selection: Any) -> dict[str, Any]:
        """HTML and PNG from one drawing, which is most of the work. A notebook asks for both at once."""
        from diffusion_lens import plots  # when it is drawn: loading a model should not wait for it

        try:
            with plots.CELL.unshown():
                figure = plots.figure_of(self._picture())
            png = plots.png_of(figure)
        except Exception as error:  # Without matplotlib, or with nothing to draw. A picture must not hide the table.
            said = str(error) if isinstance(error, ImportError | ValueError) else f"{type(error).__name__}: {error}"
            return {"text/html": self._page(f'<div style="opacity: .8">No picture: {escape(said)}</div>')}
        return {"text/html": self._page(_image(png, plots.css_size(figure)[0], repr(self))), "image/png": png}


def one_line(result: Any) -> str:
    """A result in one line, for `__repr__`: its class, model, numbers, and tensors by axis and size."""
    record = getattr(result, "record", {})  # The results of one fact have no record.
    shown = [shown_model(record)] if record.get("model") else []
    for field in fields(result):
        value = getattr(result, field.name)
        if isinstance(value, Tensor):
            axes = getattr(field.type, "dim_str", "").replace("*", "").split()
            named = len(axes) == value.dim()
            sizes = [f"{axis} {size}" for axis, size in zip(axes, value.shape, strict=True)] if named else value.shape
            shown.append(f"{field.name} [{', '.join(map(str, sizes))}]")
        elif isinstance(value, float):
            shown.append(f"{field.name} {value:.3g}")
    more = ["..."] if len(shown) > _SHOWN_PARTS else []
    return f"{type(result).__name__}({', '.join(shown[:_SHOWN_PARTS] + more)})"


@contextmanager
def _opened(path: str | Path, kind: str) -> Iterator[Any]:
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(f"there is no saved {kind} at {source}")
    if not source.is_file():
        what = "a folder; name the file" if source.is_dir() else "no regular file; name that"
        raise ValueError(f"{source} is {what} of the saved {kind}{' in it' if source.is_dir() else ''}")
    try:
        with safe_open(source, framework="pt") as file:
            yield file
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{source} is not a complete safetensors file: {error}. It was truncated or changed: delete it and save "
            "the result again, or name another file or folder"
        ) from error


def _tensors_of(file: Any) -> dict[str, Tensor]:
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _record_of(file: Any, path: str | Path, kind: str) -> dict[str, Any]:
    """The record of a result, which must be of this kind."""
    record = _header_of(file, path)
    if record.pop("kind", None) != kind:
        raise ValueError(f"{path} is not a saved {kind}")
    record.pop(PART, None)
    return record


def _header_of(file: Any, path: str | Path) -> dict[str, Any]:
    """What a file says about itself; empty if this library did not write it."""
    try:
        record = restore_numbers(parse_json((file.metadata() or {}).get(RECORD, "{}")))
    except ValueError as error:
        raise ValueError(f"{path} is not a saved result: the record in its header was changed ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} is not a saved result: the record in its header is {record!r:.40}, not a mapping")
    return record


def _classes() -> dict[Any, type[Any]]:
    """The classes of results that are imported by now, by their kind, those of the user's own modules included."""
    waiting: list[type[Any]] = [Saved, Result]
    for each in waiting:  # which grows
        waiting += each.__subclasses__()
    kinds = [(each, each.KIND, *getattr(each, "FORMER", ())) for each in waiting if "KIND" in vars(each)]
    return {kind: each for each, *own in kinds for kind in own}


def _class_of_folder(folder: Path) -> type[Any]:
    """The class that reads the folder of a study or of activations."""
    file = folder / "run.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} is a folder without {file.name}, so it is not that of a study or of activations. Name a file of "
            "a result in it; a model is loaded by HookedDiffusionTransformer.from_pretrained"
        )
    if kind := read_run(file).get("kind"):
        return class_of(kind, folder)
    errors = []
    for part in sorted(folder.glob("*.safetensors")):
        try:
            if mark_of(part) is None:  # a result that is no part of a study
                continue
            fact_file = class_of(kind_of(part), part)
        except ValueError as error:  # perhaps a file of another program
            errors.append(error)
            continue
        for each in _classes().values():
            if getattr(each, "FACT_FILE", None) is fact_file:
                return each
    if errors:
        raise errors[0]
    raise ValueError(
        f"{folder} has the {file.name} of a run, but no result of a fact, of which there would be a study. If it is "
        "being computed, load it later; a trained model is loaded by HookedDiffusionTransformer.from_pretrained"
    )


def _difference(name: str, saved: Any, current: Any) -> str:
    """Text on one entry that differs. For a long mapping, such as facts by id, it names the first keys only."""
    if not isinstance(saved, dict) or not isinstance(current, dict):
        return f"{name}: {saved!r} there, {current!r} here"
    keys = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    if name == "hooks":
        changes = [f"{key} {_hooks(saved.get(key))} there, {_hooks(current.get(key))} here" for key in keys[:3]]
        return f"hooks: {'; '.join(changes)}{'; ...' if len(keys) > 3 else ''}"
    if all(not isinstance(mapping.get(key), dict) for key in keys for mapping in (saved, current)):
        return "; ".join(f"{name}.{key}: {saved.get(key)!r} there, {current.get(key)!r} here" for key in keys)
    return f"{name}: {len(keys)} differ ({', '.join(map(repr, keys[:3]))}{', ...' if len(keys) > 3 else ''})"


def _hooks(attached: Any) -> str:
    return f"[{', '.join(attached)}]" if attached else "none"


def _array(values: Any) -> Any:
    if isinstance(values, Tensor):
        plain = values.detach().cpu()
        return (plain.float() if plain.dtype in (torch.bfloat16, torch.float16) else plain).numpy()
    if isinstance(values, np.ndarray):
        return values
    array = np.asarray(values)
    mixed = array.dtype.kind == "U" and not all(isinstance(value, str) for value in np.asarray(values, object).flat)
    return np.asarray(values, object) if mixed else array


def _cell(tag: str, text: str, right: bool) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    return f'<{tag}{scope} style="{_CELL} text-align: {"right" if right else "left"}; white-space: pre">{text}</{tag}>'


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        return "–"
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    text = str(value)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return escape("".join(char if char.isprintable() else repr(char)[1:-1] for char in text))


def _image(png: bytes, width: int, text: str) -> str:
    """An image in the page itself, of this width in pixels or as wide as the page."""
    return (
        f'<img alt="Picture of {escape(text)}" src="data:image/png;base64,{b64encode(png).decode("ascii")}" '
        f'style="background: white; width: {width}px; max-width: 100%; height: auto; display: block">'
    )
