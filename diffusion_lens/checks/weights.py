"""What file, config and weights say before the model runs: compared with the catalogue, and with one another.

A trained block reads from the residual stream along directions that other parts write, and writes along directions that
other parts read. Composition scores measure this by ratios of traces (after those of Elhage et al. 2021, "A
Mathematical Framework for Transformer Circuits"): with G = Σ WᵀW over the matrices that read, H = Σ WWᵀ over those that
write, each term scaled to trace 1,

    reads(i)  = d tr(G_i H) / (tr G_i tr H)       i: the attention or the MLP of a block
    writes(i) = d tr(H_i G) / (tr H_i tr G)       H: the embedding and all other blocks, G: the head and these

Both are 1 on average for unrelated matrices, such as those of a block from another seed; in trained blocks both are
above 1. In an untrained network all are 1, and nothing can be concluded.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.checks.report import Finding
from diffusion_lens.loading.catalogue import BUNDLED, PUBLISHED, PublishedFile, unknown_name
from diffusion_lens.model.block import Block
from diffusion_lens.model.transformer import DiffusionTransformer
from weight_conversion import Architecture, n_params, open_checkpoint, read_json, sha256_of_file, unfolded_architecture

# Fields of an architecture that do not describe the network, and are not compared.
NAMES = ("family", "name")
SHOWN = 4
# Excess of both scores together over 2. Parts of the bundled models have 0.33 to 4.4; parts of another seed up to 0.1,
# and trained parts of the other model up to 0.23; parts of the random golden checkpoints are within 0.03 of 0.
FOREIGN = 0.25
# Share of the median of the other parts, so that a part is foreign only where the others belong together. In a small
# random network excesses of a tenth occur by chance.
FOREIGN_SHARE = 0.4
LEAST_MEDIAN = 0.2
PARTS = ("attention", "MLP")


@dataclass(frozen=True)
class Expected:
    """What the catalogue says about a published name.

    Attributes:
        name: Name in the catalogue.
        architecture: Architecture, `None` if it is not to be compared.
        sha256: SHA-256 of the published safetensors file, or of the packaged copy; `None` if unknown.
        n_bytes: Size of that file in bytes.
        tuned_on_reversals: Whether the model was fine-tuned on the facts of the reversal curse.
    """

    name: str
    architecture: Architecture | None
    sha256: str | None = None
    n_bytes: int | None = None
    tuned_on_reversals: bool = False

    @classmethod
    def of(cls, name: str, mode: str | None = None) -> "Expected":
        """Look up a name.

        Args:
            mode: Mode in which the checkpoint is read, as in `from_pretrained`.

        Raises:
            ValueError: The name is not in the catalogue; the message gives the nearest names. Or its checkpoint has one
                mode only.
        """
        lower = name.lower()
        options = {} if mode is None else {"mode": mode}
        if bundled := BUNDLED.get(lower):
            file = bundled.path
            record = read_json(bundled.folder / "results.json")["models"][lower]
            architecture = open_checkpoint(file, options=options).architecture
            return cls(lower, architecture, record["sha256"], file.stat().st_size, True)
        if lower not in PUBLISHED:
            raise unknown_name(name)
        entry = PUBLISHED[lower]
        if isinstance(entry, PublishedFile):
            tuned = entry.tuned_on == "reverse"
            return cls(lower, entry.read(options), entry.sha256, entry.n_bytes, tuned)
        copy = entry.packaged
        known = (copy.sha256, copy.n_bytes) if copy else (None, None)
        return cls(lower, entry.read(options), *known)


@dataclass(frozen=True)
class Composition:
    """The scores of the attention or the MLP of one block."""

    block: int
    part: str
    reads: float
    writes: float

    @property
    def excess(self) -> float:
        """Excess of both scores over chance."""
        return self.reads + self.writes - 2


def check_hash(expected: Expected | None, path: Path | None) -> Finding:
    """Compare the file's SHA-256 with the published one. Another file of the same size is damaged or edited."""
    name = "hash"
    if path is None or not path.is_file():
        return Finding(name, "not run", "the weights are not a single file on this machine")
    sha256, size = sha256_of_file(path), path.stat().st_size
    numbers = {"sha256": sha256, "bytes": size}
    if expected is None or expected.sha256 is None:
        return Finding(name, "noted", f"SHA-256 {sha256}; the catalogue has none to compare with", numbers=numbers)
    numbers |= {"published_sha256": expected.sha256}
    if sha256 == expected.sha256:
        return Finding(name, "ok", f"SHA-256 {sha256[:12]}… is the published one of {expected.name!r}", numbers=numbers)
    said = f"SHA-256 {sha256[:12]}… is not the published {expected.sha256[:12]}… of {expected.name!r}"
    if size != expected.n_bytes:
        return Finding(name, "noted", f"{said}, nor is the size: a conversion, or other weights", numbers=numbers)
    cause = f"the bytes of {path} are not the published ones: damaged in transfer or edited; fetch it again"
    return Finding(name, "off", f"{said}, though the size is the same", cause, numbers)


def check_config(expected: Expected | None, architecture: Architecture) -> Finding:
    """Compare every number of the architecture with the catalogue's."""
    name = "config"
    # A constant conditioning on the time is folded into the weights of a loaded model.
    actual = asdict(unfolded_architecture(architecture))
    if expected is None:
        said = f"{n_params(architecture):,} parameters; no name to compare with (--as NAME)"
        return Finding(name, "not run", said, numbers={"architecture": actual})
    if expected.architecture is None:
        said = f"the architecture of {expected.name!r} is not known"
        return Finding(name, "not run", said, numbers={"architecture": actual})
    published = asdict(unfolded_architecture(expected.architecture))
    different = [key for key in published if key not in NAMES and published[key] != actual[key]]
    listed = ", ".join(f"{key} {actual[key]!r} here, {published[key]!r} in the catalogue" for key in different)
    numbers = {"architecture": actual, "differs": different}
    if not different:
        return Finding(name, "ok", f"all {len(published) - len(NAMES)} numbers are the catalogue's", numbers=numbers)
    cause = f"the config is not that of {expected.name!r}: {listed}"
    return Finding(name, "off", f"differs from {expected.name!r}: {listed}", cause, numbers)


@torch.no_grad()
def check_weights(model: DiffusionTransformer, scores: list[Composition]) -> Finding:
    """Check that all weights are finite, that no matrix or norm is constant, and that no block is foreign.

    A block that is foreign by its composition scores is only noted. The diagnosis tests it: texts become less likely if
    a block that belongs to the model is omitted.

    Norms are initialised to ones, so a norm of ones shows that it was missing in the checkpoint or in the conversion.
    Training changes every norm, and never to a constant; biases may stay zero. If all norms of the residual stream are
    constant, they may have been folded into the matrices, which is exact.
    """
    name, count = "weights", 0
    not_finite: list[str] = []
    constant: list[str] = []
    norms: list[str] = []
    for tensor, weight in model.named_parameters():
        count += weight.numel()
        if tensor.endswith(("ln_final.weight", ".ln1.weight", ".ln2.weight")):
            norms.append(tensor)
        if not bool(torch.isfinite(weight).all()):
            not_finite.append(tensor)
        elif not tensor.endswith(".bias") and weight.numel() > 1 and bool((weight == weight.flatten()[0]).all()):
            constant.append(tensor)
    numbers: dict[str, Any] = {"parameters": count, "not_finite": not_finite, "constant": constant}
    if not_finite:
        cause = f"the weights of {_listed(not_finite)} are not finite: a diverged training, or damage in transfer"
        return Finding(name, "off", f"{_listed(not_finite)} contain numbers that are not finite", cause, numbers)
    numbers["composition"] = [asdict(score) for score in scores]
    folded = bool(constant) and constant == norms
    if constant and not folded:
        cause = f"{_listed(constant)}: all values are equal. A norm or matrix was not read from the checkpoint"
        return Finding(name, "off", f"{_listed(constant)}: all values are equal", cause, numbers)
    if foreign := foreign_parts(scores):
        parts = [f"the {score.part} of block {score.block} ({score.excess:.2f})" for score in foreign]
        said = f"{_listed(parts)}: composition with the other blocks is near chance (0), so it may be foreign to them"
        return Finding(name, "noted", said, numbers=numbers)
    if folded:
        said = f"{count:,} numbers, all finite; every norm is constant: folded into the matrices, or not trained"
        return Finding(name, "noted", said, numbers=numbers)
    return Finding(name, "ok", f"{count:,} numbers, all finite, no tensor constant", numbers=numbers)


@torch.no_grad()
def compositions(model: DiffusionTransformer) -> list[Composition]:
    """The scores of every attention and MLP. The time is that of a forward pass of some thousand tokens."""
    width = model.cfg.d_model
    source, target = _directions([model.embed.weight]), _directions([model.unembed.weight * model.ln_final.weight])
    for block in model.blocks:
        for read, write in _parts(block):
            target, source = target + read, source + write
    scores = []
    # The parts are computed again instead of stored: those of a large network would take some gigabytes.
    for i, block in enumerate(model.blocks):
        parts = list(_parts(block))
        others_write = source - sum(write for _, write in parts)
        others_read = target - sum(read for read, _ in parts)
        for part, (read, write) in zip(PARTS, parts, strict=True):
            scores.append(Composition(i, part, _score(read, others_write, width), _score(write, others_read, width)))
    return scores


def foreign_parts(scores: list[Composition]) -> list[Composition]:
    """The scores of the parts that do not belong to the other blocks."""
    foreign = []
    for score in scores:
        others = sorted(other.excess for other in scores if other.block != score.block)
        median = others[len(others) // 2] if others else 0.0
        if median >= LEAST_MEDIAN and score.excess < min(FOREIGN, FOREIGN_SHARE * median):
            foreign.append(score)
    return foreign


def _listed(tensors: list[str]) -> str:
    more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
    return ", ".join(tensors[:SHOWN]) + more


def _parts(block: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """The directions (read, written) of the attention, then those of the MLP."""
    attn, mlp = block.attn, block.mlp
    reads = [weight * block.ln1.weight for weight in (attn.q.weight, attn.k.weight, attn.v.weight)]
    yield _directions(reads), _directions([attn.o.weight.T])
    reads = [reader.weight * block.ln2.weight for reader in mlp.readers]
    yield _directions(reads), _directions([writer.weight.T for writer in mlp.writers])


def _directions(weights: list[Tensor]) -> Tensor:
    """Σ WᵀW [d_model d_model] over matrices [row d_model], each of trace 1."""
    total = torch.zeros(())
    for weight in weights:
        wide = weight.float()
        gram = wide.T @ wide
        total = total.to(gram) + gram / gram.trace()
    return total


def _score(one: Tensor, other: Tensor, width: int) -> float:
    return float(width * (one * other).sum() / (one.trace() * other.trace()))
