"""`Delta`: a low-rank update of the projections of a model, in a folder that peft reads too.

A delta adds to each of its projections W a product of rank r (LoRA, Hu et al. 2021, arXiv 2106.09685),

    W' = W + (alpha / r) B A        A [r d_in], B [d_out r]

and says what model this makes of its base: a causal model becomes a masked diffusion model, its twin, whose attention,
readout and [MASK] are others. The sum is computed in float64 and rounded to the dtype of W. It may bring the row of the
embedding that is [MASK] too. The folder contains

    adapter_config.json, adapter_model.safetensors    peft's files, with the names of transformers' modules
    delta.json                                        base and its hash, architecture of the twin, how it was made
    README.md                                         the card

`with delta.on(model):` applies a delta to its base and takes it off again, bit for bit;
`HookedDiffusionTransformer.from_pretrained(folder)` loads the base and writes the delta into its weights for good.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.loading.source import CAUSAL, trained_length_in, write_trained_length
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.model.weights import Edit
from diffusion_lens.settings import checked_arguments
from weight_conversion import (
    CHECKPOINT_SUFFIXES,
    Architecture,
    Checkpoint,
    SafetensorsFile,
    as_json,
    read_json_object,
    tensor_shapes,
    write_json,
    write_safetensors,
)
from weight_conversion.key_map import KeyMap
from weight_conversion.registry import FAMILIES

ABOUT, ADAPTER, ADAPTER_CONFIG, CARD = "delta.json", "adapter_model.safetensors", "adapter_config.json", "README.md"
FORMAT = "diffusion_lens delta"
# The fields of an architecture in which a twin differs from its base.
OF_TWIN = (
    *("name", "attention_dir", "causal_block", "causal_first", "readout"),
    *("mask_token_id", "d_vocab", "d_vocab_out"),
)
EMBED = "embed.weight"
_ROW = "token_adapter.trainable_tokens_delta"  # peft's name of the rows of an embedding that were trained
# Switches of peft's format by which the update would be another one.
_OTHER_UPDATES: dict[str, Any] = {
    **dict.fromkeys(("use_dora", "use_rslora", "use_qalora", "fan_in_fan_out", "lora_bias"), False),
    **dict.fromkeys(("modules_to_save", "layers_to_transform"), None),
    "rank_pattern": {},
    "alpha_pattern": {},
    "bias": "none",
}


class LowRank(NamedTuple):
    """The factors of an update, A [rank d_in] and B [d_out rank]."""

    a: Float[Tensor, "rank _"]
    b: Float[Tensor, "_ rank"]


@dataclass(frozen=True)
class Base:
    """The model that a delta changes.

    Attributes:
        name: Its name or path. A relative path is looked for in the folder of the delta first.
        sha256: Hash of its weights (`base_sha256`).
        d_vocab: Rows of its embedding. A twin may have one more, for [MASK].
        options: Options of `from_pretrained` with which it was loaded.
    """

    name: str
    sha256: str
    d_vocab: int
    options: Mapping[str, Any] = field(default_factory=dict)


@checked_arguments
@dataclass(frozen=True, eq=False, repr=False)
class Delta:
    """A low-rank update of the projections of a model.

    Attributes:
        factors: The update of each weight, by its name in our layout, such as "blocks.0.attn.q.weight".
        architecture: The model that the delta makes of its base.
        base: The model that it changes.
        mask_row: Row of the embedding that is [MASK]. Without it that of the base, or if that has none, the mean of
            the others.
        alpha: Factor of the updates, times the rank.
        trained_length: Length in positions of the texts of the training; `None` if unknown.
        about: How the delta was made, for records and readers: settings, seed, numbers, versions.
        card: Text of README.md.

    Raises:
        ValueError: A factor has another shape than the weight needs, another rank than the others, or is not finite.
    """

    factors: Mapping[str, LowRank]
    architecture: Architecture
    base: Base
    alpha: float
    mask_row: Float[Tensor, "d_model"] | None = None
    trained_length: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    card: str = ""

    def __post_init__(self) -> None:
        require_projections(self.architecture)
        shapes = tensor_shapes(self.architecture)
        if not self.factors:
            raise ValueError("a delta without factors changes nothing: give the factors of at least one weight")
        for name, (a, b) in self.factors.items():
            if name not in self._their_names:
                raise ValueError(f"{name!r} is no projection of a block of {self.architecture.name!r}")
            wanted = [self.rank, shapes[name][1]], [shapes[name][0], self.rank]
            if (list(a.shape), list(b.shape)) != wanted:
                raise ValueError(
                    f"the factors of {name} are A {list(a.shape)} and B {list(b.shape)}; a weight {list(shapes[name])} "
                    f"and the rank {self.rank} need A {wanted[0]} and B {wanted[1]}"
                )
            if not bool(a.isfinite().all() and b.isfinite().all()):
                raise ValueError(f"the factors of {name} are not finite")
        if self.mask_row is not None and not bool(self.mask_row.isfinite().all()):
            raise ValueError("the row of [MASK] is not finite")
        if self.mask_row is not None and len(self.mask_row) != self.architecture.d_model:
            raise ValueError(
                f"the row of [MASK] has {len(self.mask_row)} entries, and {self.architecture.name!r} has "
                f"d_model={self.architecture.d_model}"
            )

    @property
    def rank(self) -> int:
        """Rank of every update."""
        return int(next(iter(self.factors.values())).a.shape[0])

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the factors, the model that they make and the hash of its base."""
        said = {**self.architecture.to_dict(), "name": "", "alpha": self.alpha, "base": self.base.sha256}
        digest = hashlib.sha256(repr(sorted(said.items())).encode())
        for name, pair in sorted(self.factors.items()):
            for part in pair:
                digest.update(f"{name} {part.dtype} {list(part.shape)}".encode())
                digest.update(_bytes(part))
        if self.mask_row is not None:
            digest.update(_bytes(self.mask_row))
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"Delta({self.architecture.name!r} of {self.base.name!r}, {len(self.factors)} weights, rank {self.rank})"

    def update(self, name: str) -> Float[Tensor, "_ _"]:
        """What is added to a weight; float64 on the CPU."""
        a, b = (part.detach().cpu().double() for part in self.factors[name])
        return (b @ a) * (self.alpha / self.rank)

    @checked_arguments
    def on(self, model: DiffusionTransformer) -> "AppliedDelta":
        """The delta as an edit of its base, read as the twin or causally: `with delta.on(model): ...`.

        Raises:
            ValueError: The model has another architecture than the base of this delta, or attends neither causally nor
                as the twin; or, when the edit is applied, it has other weights.
        """
        return AppliedDelta(self, model)

    @checked_arguments
    def save(self, folder: str | Path) -> Path:
        """Write the folder of the delta; a `ValueError` if the folder is a file or contains the weights of a model."""
        target = Path(folder).expanduser()
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is a file; a delta needs a folder")
        names = {file.name for file in target.glob("*") if file.suffix in CHECKPOINT_SUFFIXES}
        if others := sorted(names - {ADAPTER}):
            raise ValueError(f"{target} contains {', '.join(others)}: a delta needs a folder of its own")
        (target / ABOUT).unlink(missing_ok=True)  # it makes the folder a delta, so it is written last
        tensors = {
            f"{self._their_names[name]}.lora_{kind}.weight": part
            for name, (a, b) in self.factors.items()
            for kind, part in (("A", a), ("B", b))
        }
        if self.mask_row is not None:
            tensors[f"{self._module_of_rows}.{_ROW}"] = self.mask_row[None]
        write_safetensors(tensors, target / ADAPTER, {"format": "pt"})
        write_json(self._adapter_config(), target / ADAPTER_CONFIG)
        write_trained_length(self.trained_length, target)
        if self.card:
            (target / CARD).write_text(self.card, encoding="utf-8")
        said = {"base": vars(self.base), "architecture": self.architecture.to_dict(), "about": as_json(self.about)}
        write_json({"format": FORMAT, **said}, target / ABOUT)
        return target

    @classmethod
    @checked_arguments
    def load(cls, folder: str | Path) -> "Delta":
        """Read what `save` wrote, or peft from it.

        Raises:
            FileNotFoundError: The folder lacks a file; the message names it.
            ValueError: The files do not fit each other, or describe an update of another kind.
        """
        source = Path(folder).expanduser()
        if missing := [name for name in (ABOUT, ADAPTER, ADAPTER_CONFIG) if not (source / name).is_file()]:
            raise FileNotFoundError(f"{source} is not the folder of a delta: it lacks {', '.join(missing)}")
        said, config = read_json_object(source / ABOUT), read_json_object(source / ADAPTER_CONFIG)
        try:
            if said.get("format") != FORMAT:
                raise ValueError(f'its format is {said.get("format")!r}, and should be "{FORMAT}"')
            architecture, base = Architecture.from_dict(said["architecture"]), Base(**said["base"])
            different = [key for key, value in _OTHER_UPDATES.items() if (config.get(key) or value) != value]
            if config.get("peft_type") != "LORA" or different:
                raise ValueError(f"{ADAPTER_CONFIG} describes another update than B A: {['peft_type', *different][-1]}")
            file = SafetensorsFile(source / ADAPTER)
            ours = {theirs: name for name, theirs in _their_names(architecture).items()}
            parts: dict[str, dict[str, Tensor]] = {}
            rows: list[Tensor] = []
            for key in file.shapes():
                if key.endswith(_ROW):
                    rows += file.read(key).clone().unbind()
                    continue
                module, _, kind = key.removesuffix(".weight").rpartition(".lora_")
                if module not in ours or kind not in ("A", "B"):
                    raise ValueError(f"{ADAPTER} contains {key}, which is no factor of {architecture.name!r}")
                parts.setdefault(ours[module], {})[kind] = file.read(key)
            if alone := [name for name, pair in parts.items() if len(pair) < 2]:
                raise ValueError(f"{ADAPTER} contains one factor only of {alone[0]}")
            factors = {name: LowRank(pair["A"].clone(), pair["B"].clone()) for name, pair in parts.items()}
            card = (source / CARD).read_text(encoding="utf-8") if (source / CARD).is_file() else ""
            how: dict[str, Any] = {
                "mask_row": rows[0] if rows else None,
                "trained_length": trained_length_in(None, source),
                "about": said.get("about") or {},
                "card": card,
            }
            delta = cls(factors, architecture, base, float(config["lora_alpha"]), **how)
            trained = config.get("trainable_token_indices") or {}
            if [architecture.mask_token_id][: len(rows)] != [id_ for ids in trained.values() for id_ in ids]:
                raise ValueError(
                    f"{ADAPTER_CONFIG} says that the rows {trained} were trained, and there are {len(rows)}"
                )
            if config.get("r") != delta.rank:
                raise ValueError(f"{ADAPTER_CONFIG} says r={config.get('r')!r}, and the factors have rank {delta.rank}")
            return delta
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{source} is not a delta that can be read: {error}") from error

    def checkpoint(self, base: Checkpoint) -> "TwinCheckpoint":
        """The base with the delta in its weights, as a checkpoint; its tensors are checked as they are read."""
        _require_same_sizes(self, base.architecture)
        return TwinCheckpoint(self.architecture, base.source, base.key_map, base, self)

    @cached_property
    def _their_names(self) -> dict[str, str]:
        return _their_names(self.architecture)

    @property
    def _module_of_rows(self) -> str:
        return _their_modules(self.architecture)[EMBED]

    def _adapter_config(self) -> dict[str, Any]:
        modules = sorted({self._their_names[name].rpartition(".")[2] for name in self.factors})
        rows = {self._module_of_rows.rpartition(".")[2]: [self.architecture.mask_token_id]}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base.name,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "target_modules": modules,
            "trainable_token_indices": None if self.mask_row is None else rows,
            "inference_mode": True,
            **_OTHER_UPDATES,
        }


class AppliedDelta(Edit):
    """A delta on one model, applied and taken off like every `Edit`."""

    def __init__(self, delta: Delta, model: DiffusionTransformer) -> None:
        self.delta, self.model = delta, model
        _require_same_sizes(delta, model.cfg.architecture)
        _require_attention(delta, model.cfg.architecture)

    @property
    def layers(self) -> list[int]:
        return sorted({int(name.split(".")[1]) for name in self.delta.factors})

    @property
    def weights(self) -> list[str]:
        d, rows = self.delta, self.model.cfg.d_vocab
        return [*d.factors, *([EMBED] if d.mask_row is not None and (d.architecture.mask_token_id or 0) < rows else [])]

    def update_of(self, name: str) -> Tensor:
        if name != EMBED:
            return self.delta.update(name)
        rows = self.weight_named(EMBED).detach().cpu().double()
        mask, row = self.delta.architecture.mask_token_id, self.delta.mask_row
        assert mask is not None
        assert row is not None
        update = torch.zeros_like(rows)
        update[mask] = row.cpu().double() - rows[mask]
        return update

    def require_fit(self) -> None:
        _require_base(self.delta, base_sha256(self.model.named_parameters(), self.delta.base.d_vocab))

    def describe(self) -> dict[str, Any]:
        """The hash of the delta, and the name of its base."""
        return {"delta": self.delta.sha256, "base": self.delta.base.name}


@dataclass(frozen=True)
class TwinCheckpoint(Checkpoint):
    """A checkpoint with a delta in its weights."""

    base: Checkpoint
    delta: Delta

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        digest = _Digest(self.delta.base.d_vocab)
        read = ((name, digest.seen(name, tensor)) for name, tensor in self.base.tensors())
        yield from twin_tensors(read, self.architecture, self.delta)
        _require_base(self.delta, digest.sha256)

    pieces = tensors


def twin_tensors(
    tensors: Iterable[tuple[str, Tensor]], twin: Architecture, delta: Delta | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a twin, from those of its base: with the delta, and with a row for [MASK] if the base has none.

    Unless the delta brings it, the row is the mean of all others (Hewitt 2021, "Initializing New Word Embeddings for
    Pretrained Language Models"). It is float32, also beside rows that are stored in half precision, as it was when the
    twin was trained.
    """
    shapes = tensor_shapes(twin)
    for name, tensor in tensors:
        if name in shapes and shapes[name][0] == len(tensor) + 1:
            mean = tensor.detach().mean(dim=0, keepdim=True, dtype=torch.float64)
            tensor = torch.cat([tensor.detach().float(), mean.float()])
        if delta is not None and delta.mask_row is not None and name == EMBED:
            mask = torch.tensor([twin.mask_token_id], device=tensor.device)
            tensor = tensor.detach().float().index_copy(0, mask, delta.mask_row[None].to(tensor.device, torch.float32))
        if delta is not None and name in delta.factors:
            tensor = tensor.detach().cpu().double() + delta.update(name)
        yield name, tensor


def base_sha256(tensors: Iterable[tuple[str, Tensor]], d_vocab: int) -> str:
    """SHA-256 of the weights of a model rounded to bfloat16, whatever the dtype and order in which they were loaded.

    Of embedding and head, the first `d_vocab` rows count, those of a base without a [MASK] of its own.
    """
    digest = _Digest(d_vocab)
    for name, tensor in tensors:
        digest.seen(name, tensor)
    return digest.sha256


def require_projections(architecture: Architecture) -> None:
    """Raise a `ValueError` unless transformers has a model of this family, with our projections as modules."""
    if architecture.family not in CAUSAL:
        raise ValueError(
            f"{architecture.name!r} is of the family {architecture.family!r}, and deltas are of models of the families "
            f"{', '.join(CAUSAL)}: adapt it with rank=0, or as one of these (model.export_hf writes an AR baseline so)"
        )


class _Digest:
    """The hash of weights that pass one by one."""

    def __init__(self, d_vocab: int) -> None:
        self.d_vocab = d_vocab
        self.parts: dict[str, str] = {}

    def seen(self, name: str, tensor: Tensor) -> Tensor:
        """The same tensor, which counts from now on."""
        rows = tensor[: self.d_vocab] if name in ("embed.weight", "unembed.weight") else tensor
        rounded = rows.detach().to(torch.bfloat16)
        self.parts[name] = f"{name} {list(rounded.shape)} {hashlib.sha256(_bytes(rounded)).hexdigest()}\n"
        return tensor

    @property
    def sha256(self) -> str:
        return hashlib.sha256("".join(self.parts[name] for name in sorted(self.parts)).encode()).hexdigest()


def _their_names(architecture: Architecture) -> dict[str, str]:
    """The projections of all blocks, with peft's name of each as a module of transformers."""
    shapes, named = tensor_shapes(architecture), _their_modules(architecture)
    return {name: theirs for name, theirs in named.items() if name.startswith("blocks.") and len(shapes[name]) == 2}


def _their_modules(architecture: Architecture) -> dict[str, str]:
    """The first of our weights of each module of transformers, with peft's name of the module."""
    rules = KeyMap(FAMILIES[architecture.family].rules, architecture).rules
    return {rule.ours[0]: f"base_model.model.{rule.theirs.removesuffix('.weight')}" for rule in rules}


def _require_same_sizes(delta: Delta, architecture: Architecture) -> None:
    same = replace(architecture, **{name: getattr(delta.architecture, name) for name in OF_TWIN})
    rows = (delta.base.d_vocab, delta.base.d_vocab + 1)
    if same != delta.architecture or architecture.d_vocab not in rows:
        raise ValueError(
            f"{architecture.name!r} is another architecture than {delta.base.name!r}, the base of the delta "
            f"{delta.architecture.name!r}: apply the delta to that model"
        )


def _require_attention(delta: Delta, own: Architecture) -> None:
    twin = delta.architecture
    attends = ("attention_dir", "causal_block", "causal_first")
    different = [name for name in attends if getattr(own, name) != getattr(twin, name)]
    if different and own.attention_dir != "causal":
        said = ", ".join(f"{name}={getattr(own, name)!r} and not {getattr(twin, name)!r}" for name in different)
        raise ValueError(
            f"{own.name!r} attends neither causally nor as {twin.name!r}, the model that the delta makes: it has "
            f"{said}. from_pretrained loads the folder of a delta as the twin"
        )


def _require_base(delta: Delta, sha256: str) -> None:
    if sha256 != delta.base.sha256:
        raise ValueError(
            f"the weights are not those of {delta.base.name!r}, the base of the delta {delta.architecture.name!r} "
            f"(SHA-256 {sha256[:12]} here, {delta.base.sha256[:12]} there): load that model in float32 or bfloat16, "
            "without folded norms, and take other edits and deltas out of it first"
        )


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
