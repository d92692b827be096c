"""Reads a checkpoint into plain data (`open_checkpoint`), and writes it again (`export`).

The adaptive LayerNorms of a network without time conditioning are folded into its other weights, and unfolded. Such a
network reads the noise level 0 whatever its canvas, so that shift, scale and gate of every part are constants:

    norm weight w · (1 + scale), norm bias shift, and the rows of the output matrix (and its bias) times the gate.

The folded network computes the same up to rounding, and its matrices are those that it applies. The maps from which the
constants come are kept, so that `unfolded` gives the tensors that were folded, to the last digit or the one beside it.
If the folded weights have changed since, what no constant can express is added to the biases of the maps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weight_conversion.architecture import Architecture, Shape
from weight_conversion.families.family import FORMAT, IGNORED_KEYS, Config, Family
from weight_conversion.families.kinds import warn_if_silent, with_block_size
from weight_conversion.files import (
    CHECKPOINT_SUFFIXES,
    INDEX,
    WHOLE,
    TensorSource,
    indexed_files,
    open_tensors,
    read_json_object,
    renamed_when_whole,
    safetensors_size,
    write_json,
    write_safetensors,
)
from weight_conversion.key_map import N_FREQUENCIES, PIECE_BYTES, KeyMap
from weight_conversion.registry import FAMILIES, recognise, warn_of_class


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tensors' names and shapes were checked; the tensors are read on request."""

    architecture: Architecture
    source: TensorSource
    key_map: KeyMap

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in our layout. A tensor may share memory with the file: copy it to keep it."""
        return self._read(sys.maxsize)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in our layout, a large one as several pieces of consecutive rows, each a few megabytes."""
        return self._read(PIECE_BYTES)

    def _read(self, most_bytes: int) -> Iterator[tuple[str, Tensor]]:
        self.key_map.check_repeated(self.source.shapes(), self.source.read, str(self.source.path))
        return self.key_map.to_ours(self.source.read, most_bytes, str(self.source.path))


def open_checkpoint(
    path: str | Path, config: str | Path | Config | None = None, options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Recognise the family of a checkpoint and check its tensors.

    Args:
        path: `.safetensors` or `.pth` file, or folder with one checkpoint.
        config: The family's config, as a path or a mapping. By default it is read from the file beside the checkpoint;
            without such a file the architecture is derived from the tensors' shapes.
        options: What the config does not say, or where one checkpoint is several models: "block_size", "mode",
            "mask_token_id" or "ignore_config_keys", as in `from_pretrained`.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        ValueError: The checkpoint is truncated, of no known family, or has missing, unknown or wrongly shaped tensors,
            which the message names.

    Warns:
        UserWarning: Neither config nor name says whether a model made from a causal one was trained by blocks.
    """
    path = Path(path)
    source = open_tensors(path)
    shapes = source.shapes()
    settings, read_from = _read_config(config) if config is not None else _find_config(source.path.parent, shapes)
    config_path = str(Path(config).expanduser()) if isinstance(config, str | Path) else None
    beside = None if config is None else _config_beside(source.path.parent)
    if options:
        settings = {**(settings or {}), **options}
    family = recognise(settings, shapes, str(path), config_path, beside)
    family.check_options(options or {})
    if settings is not None:
        settings = with_block_size(settings, str(path), config_path, beside)
        warn_if_silent(settings, str(path), config_path)
        warn_of_class(settings, family, str(path))
    try:
        architecture = family.read_architecture(settings, shapes)
        family.check_used(options or {}, architecture)
        # Before the table is written out for each layer, the number of layers is compared with the file.
        if architecture.n_layers > len(shapes):
            raise ValueError(
                f"{path} contains {len(shapes)} tensors, too few for the {architecture.n_layers} layers of its config. "
                "Pass the config that belongs to this checkpoint"
            )
        key_map = KeyMap(family.rules, architecture, family.ignored)
        key_map.check(shapes, str(path))
    except ValueError as error:
        raise ValueError(f"{error} [config: {read_from}]") from error
    return Checkpoint(architecture, source, key_map)


def family_of(path: str | Path, options: Mapping[str, Any] | None = None) -> Family:
    """The family of a checkpoint, by the config beside it or its tensors; arguments and errors are those of
    `open_checkpoint`, but whether the tensors fit is not checked."""
    source = open_tensors(Path(path))
    settings, _ = _find_config(source.path.parent, source.shapes())
    return recognise({**(settings or {}), **options} if options else settings, source.shapes(), str(path))


def export(
    tensors: Mapping[str, Tensor],
    architecture: Architecture,
    path: str | Path,
    family: str | None = None,
    beside: Mapping[str, Any] | None = None,
) -> Path:
    """Write `tensors` (our layout) in a family's own format: the inverse of `open_checkpoint`.

    Other weights in the folder stay readable: their config is kept if it describes the same architecture; otherwise
    the export is refused.

    Args:
        path: `.safetensors` file to write. The family's config is written beside it.
        family: Family of the format; by default the family of the architecture.
        beside: Keys for the config that say nothing of the network, such as "architectures" and "eos_token_id".

    Raises:
        ValueError: A tensor is missing or misshapen; the family's config cannot describe this architecture; or the
            folder contains other weights that would be hidden, lose a shard or get another config. Nothing is written
            then.
    """
    target = Path(path)
    layout, key_map, config = _plan(architecture, target, family)
    if layout.name != FORMAT:
        tensors = unfolded(tensors, architecture)
    theirs = dict(key_map.to_theirs(tensors))
    config_file = target.parent / layout.config_file
    if _other_weights(target) and config_file.exists():
        write_safetensors(theirs, target)
        return target
    # The config keeps its temporary name until the weights are written, so that both change together.
    with renamed_when_whole(config_file) as config_part:
        write_json({**config, **(beside or {})}, config_part)
        write_safetensors(theirs, target)
    return target


def check_export(architecture: Architecture, path: str | Path, family: str | None = None) -> None:
    """Raise the `ValueError` that `export` would raise, except for errors in the tensors."""
    _plan(architecture, Path(path), family)


def export_size(architecture: Architecture) -> int:
    """Exact size in bytes of a float32 file in the format of the architecture's family, as `safetensors_size`."""
    architecture = unfolded_architecture(architecture)
    return safetensors_size(KeyMap(FAMILIES[architecture.family].rules, architecture).their_shapes)


def _plan(architecture: Architecture, target: Path, family: str | None) -> tuple[Family, KeyMap, dict[str, Any]]:
    """The family, the key map and the config of an export, checked against the target's folder."""
    if target.suffix != ".safetensors":
        raise ValueError(f"{target} should end in .safetensors")
    name = family or architecture.family
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; known are {', '.join(FAMILIES)}")
    if (kind := architecture.positional_embedding_type) != "rotary" and name != FORMAT:
        raise ValueError(
            f"the {name} format cannot express positional_embedding_type={kind!r}, because its models have rotary "
            f"positions: pass family='{FORMAT}'"
        )
    if name != FORMAT:
        architecture = unfolded_architecture(architecture)
    key_map = KeyMap(FAMILIES[name].rules, architecture)
    config = _config_of(architecture, FAMILIES[name], key_map)
    beside = target.parent / FAMILIES[name].config_file
    others = _other_weights(target)
    if INDEX in others and (target.name == WHOLE or target.name in indexed_files(target.parent / INDEX).values()):
        harm = f"which {WHOLE} beside it would hide" if target.name == WHOLE else f"of which {target.name} is a part"
        raise ValueError(
            f"{target.parent} contains a checkpoint in shards ({INDEX}), {harm}: name another folder. Nothing was "
            "written"
        )
    if others and beside.exists() and not _describes(beside, architecture, FAMILIES[name], key_map):
        raise ValueError(
            f"{target.parent} contains other weights ({', '.join(others[:3])}), which need the {beside.name} that the "
            "export replaces: name another folder. Nothing was written"
        )
    return FAMILIES[name], key_map, config


def _config_of(architecture: Architecture, family: Family, key_map: KeyMap) -> dict[str, Any]:
    """The family's config for an architecture; a `ValueError` unless reading it gives the same architecture."""
    config = family.write_config(architecture)
    before, after = asdict(architecture), asdict(family.read_architecture(config, key_map.their_shapes))
    lost = [
        f"{key}={before[key]!r} (would become {after[key]!r})"
        for key in before
        if key != "family" and before[key] != after[key]
    ]
    if lost:
        raise ValueError(
            f"the {family.name} format cannot express {', '.join(lost)}: pass family='{FORMAT}'"
            + ", or model.export_hf(folder), which measures this change" * ("rotary_dtype" in " ".join(lost))
        )
    return config


def _other_weights(target: Path) -> list[str]:
    """Names of the other weight files in the folder of `target`."""
    folder = target.parent
    names = sorted(file.name for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
    return [name for name in names if name != target.name and (name == INDEX or name.endswith(CHECKPOINT_SUFFIXES))]


def _describes(path: Path, architecture: Architecture, family: Family, key_map: KeyMap) -> bool:
    """Whether the config at `path` describes this architecture, whatever name it gives to it."""
    try:
        described = family.read_architecture(read_json_object(path), key_map.their_shapes)
    except ValueError:
        return False
    return replace(described, name=architecture.name, family=architecture.family) == architecture


def require_config(path: Path) -> None:
    """Raise a `FileNotFoundError` unless there is a config file at `path`."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file at {path}; pass the path of the checkpoint's JSON config")


def _read_config(config: str | Path | Config) -> tuple[Config, str]:
    if isinstance(config, Mapping):
        settings, read_from = config, "the mapping that was passed"
    else:
        path = Path(config).expanduser()
        require_config(path)
        settings, read_from = read_json_object(path), str(path)
    if IGNORED_KEYS in settings:
        raise ValueError(
            f"{IGNORED_KEYS} is in the config itself: {read_from}. Only you can say which keys change nothing in the "
            f"network: remove it there, and pass {IGNORED_KEYS}=[...]"
        )
    return settings, read_from


def _config_beside(folder: Path) -> Config | None:
    """The config.json beside a checkpoint for which the caller passes another config; `None` if it cannot be read."""
    try:
        return read_json_object(folder / "config.json")
    except (OSError, ValueError):
        return None


def _find_config(folder: Path, shapes: Mapping[str, Shape]) -> tuple[Config | None, str]:
    """The config beside a checkpoint, and its name in error messages.

    A config that its family recognises comes first. Otherwise a config with a `model_type` is returned, which says what
    the checkpoint is, unless a family recognises the tensors alone.
    """
    foreign: tuple[Config, str] | None = None
    for family in FAMILIES.values():
        path = folder / family.config_file
        if path.exists():
            settings, read_from = _read_config(path)
            if family.recognises(settings, shapes):
                return settings, read_from
            foreign = (settings, read_from) if "model_type" in settings else foreign
    if foreign and not any(family.recognises(None, shapes) for family in FAMILIES.values()):
        return foreign
    return None, "none was passed or found, so the tensors' shapes were compared with the published sizes"


_ROWS = 64


@dataclass(frozen=True)
class _Constant:
    """The constants of one part of the network, float64.

    Attributes:
        outputs: Names of the tensors whose rows the gate multiplies; empty after the last norm.
        source: Name of the bias of the map, with the index of the shift's first entry; scale and gate follow.
    """

    norm: str
    outputs: tuple[str, ...]
    source: tuple[str, int]
    shift: Tensor
    scale: Tensor
    gate: Tensor | None = None


def is_constant(architecture: Architecture) -> bool:
    """Whether there are constants that are not folded yet."""
    return architecture.time is not None and not architecture.time.conditioned and not architecture.time.folded


def folded_architecture(architecture: Architecture) -> Architecture:
    """The same after `fold`."""
    assert architecture.time is not None
    return replace(architecture, time=replace(architecture.time, folded=True))


def unfolded_architecture(architecture: Architecture) -> Architecture:
    """The same before `fold`; any other architecture as it is."""
    if architecture.time is None or not architecture.time.folded:
        return architecture
    return replace(architecture, time=replace(architecture.time, folded=False))


@torch.no_grad()
def fold(tensors: Mapping[str, Tensor], architecture: Architecture) -> None:
    """Fold the constants in place. The biases of the norms must be there, and 0."""
    for constant in _constants(tensors, architecture):
        _multiply_rows(tensors[f"{constant.norm}.weight"], 1 + constant.scale)
        tensors[f"{constant.norm}.bias"].copy_(constant.shift)
        for name in constant.outputs:
            assert constant.gate is not None
            _multiply_rows(tensors[name], constant.gate)


@torch.no_grad()
def unfolded(tensors: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """The tensors before `fold`, which stay as they are; those of any other architecture as they are."""
    result = dict(tensors)
    if architecture.time is None or not architecture.time.folded:
        return result
    for constant in _constants(tensors, architecture):
        name, start = constant.source
        width = len(constant.shift)
        result[name] = result[name].clone()
        shift, scale, gate = (result[name][start + i * width :][:width] for i in range(3))
        # Where nothing has changed the shift of the norm, the map gives it already.
        present = result.pop(f"{constant.norm}.bias")
        changed = present != constant.shift.to(present.dtype)
        shift += torch.where(changed, present.double() - constant.shift, 0.0).to(shift.dtype)
        scale += _divide(result, (f"{constant.norm}.weight",), 1 + constant.scale).to(scale.dtype)
        if constant.gate is not None:
            gate += _divide(result, constant.outputs, constant.gate).to(gate.dtype)
    return result


def _divide(tensors: dict[str, Tensor], names: Sequence[str], factor: Tensor) -> Tensor:
    """Divide the rows of tensors by a factor; True where it is 0 and a row is not, so that it has to be 1 instead."""
    used = torch.stack([tensors[name].reshape(len(factor), -1).ne(0).any(dim=1) for name in names]).any(dim=0)
    lost = (factor == 0) & used
    divisor = torch.where(factor == 0, 1.0, factor)
    for name in names:
        tensors[name] = (tensors[name].double() / _by_row(divisor, tensors[name])).to(tensors[name].dtype)
    return lost


def _constants(tensors: Mapping[str, Tensor], architecture: Architecture) -> Iterator[_Constant]:
    """The constants of every part, from the maps and the noise level 0."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"].double(), tensors[f"{name}.bias"].double())

    half = N_FREQUENCIES // 2
    waves = torch.cat([torch.ones(half), torch.zeros(half)]).double().to(tensors["embed.weight"].device)
    condition = F.silu(linear("time_embed.out", F.silu(linear("time_embed.hidden", waves))))
    width, biased = architecture.d_model, {True: ("weight", "bias"), False: ("weight",)}
    for i in range(architecture.n_layers):
        block = f"blocks.{i}"
        six = linear(f"{block}.modulation", condition).split(width)
        for j, (norm, output, has_bias) in enumerate(
            (("ln1", "attn.o", architecture.o_bias), ("ln2", "mlp.down", architecture.mlp_bias))
        ):
            names = tuple(f"{block}.{output}.{part}" for part in biased[has_bias])
            source = (f"{block}.modulation.bias", 3 * j * width)
            yield _Constant(f"{block}.{norm}", names, source, *six[3 * j : 3 * j + 3])
    yield _Constant("ln_final", (), ("final_modulation.bias", 0), *linear("final_modulation", condition).split(width))


def _multiply_rows(tensor: Tensor, factor: Tensor) -> None:
    """Multiply rows in place, in double precision, a few at a time so that little memory is taken."""
    for rows, factors in zip(tensor.split(_ROWS), factor.split(_ROWS), strict=True):
        rows.copy_(rows.double() * _by_row(factors, rows))


def _by_row(factor: Tensor, tensor: Tensor) -> Tensor:
    return factor.view(-1, *[1] * (tensor.dim() - 1))
