"""SHA-256 of a model's weights, computed in parallel, and only for tensors that have changed since the last call."""

import functools
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from weight_conversion.aligned_file import bytes_of

_ROW, _ROWS = 1 << 13, 1 << 10  # 8-byte words in a row, which is summed into one; rows summed at once (64 MiB)
# Bytes of weights below which threads cost more time than they save: in the first call, and in later ones.
_SMALL, _SMALL_KNOWN = 1 << 24, 1 << 30


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 of the current weights: over the name, dtype, shape and SHA-256 of the bytes of each tensor.

    Every call reads every byte, so it notices every edit, however it was made (`.data`, numpy, an optimizer). Tensors
    are hashed in parallel, one thread per core: a billion float32 weights take 2.3 seconds of processor time on cores
    with SHA instructions. Later calls take 0.16 seconds: they compare a 128-bit hash of each tensor (XXH3), and compute
    SHA-256 where it has changed. Weights on an accelerator are fingerprinted there (`fingerprint`), and only those that
    have changed are copied to the CPU.
    """
    weights = dict(model.named_parameters())
    known: dict[str, tuple[bytes, str]] = model.__dict__.setdefault("_weight_digests", {})
    n_threads = _n_threads(weights.values(), _SMALL_KNOWN if known else _SMALL)
    with ThreadPoolExecutor(n_threads) as threads:
        digests = (threads.map if n_threads > 1 else map)(lambda name: _digest(weights[name], name, known), weights)
        lines = [
            f"{name} {weight.dtype} {list(weight.shape)} {digest}\n"
            for (name, weight), digest in zip(weights.items(), digests, strict=True)
        ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def fingerprint(weight: Tensor) -> bytes:
    """A hash of a tensor's bytes, computed on the tensor's device.

    Each 64-bit word w is mixed, w ^ (w >> 29), and multiplied by a random odd number, one for each column; each row is
    summed modulo 2^64. The mixing copies changes of the upper bits, where the signs are, to lower bits. Without it the
    highest bit would stay the highest bit under every odd factor, and an even number of changed signs would cancel. Two
    different rows have the same sum with a probability of at most 2^-33. SHA-256 over the sums makes their order count.
    """
    flat = _bytes(weight)
    whole = len(flat) - len(flat) % (8 * _ROW)
    digest = hashlib.sha256(f"{weight.dtype} {list(weight.shape)}".encode())
    digest.update(flat[whole:].cpu().numpy().data)
    if whole:
        factors = _factors().to(flat.device)
        body = flat[:whole] if flat.data_ptr() % 8 == 0 else flat[:whole].clone()
        sums = [
            ((rows ^ ((rows >> 29) & (1 << 35) - 1)) * factors).sum(dim=1)
            for rows in body.view(torch.int64).view(-1, _ROW).split(_ROWS)
        ]
        digest.update(torch.cat(sums).cpu().numpy().data)
    return digest.digest()


def _digest(weight: Tensor, name: str, known: dict[str, tuple[bytes, str]]) -> str:
    """SHA-256 of one tensor's bytes. It is computed, and a tensor on an accelerator is copied, only after a change."""
    current = xxhash.xxh3_128_digest(_bytes(weight).numpy().data) if _is_near(weight) else fingerprint(weight)
    if name not in known or known[name][0] != current:
        known[name] = current, _sha256(weight.cpu())
    return known[name][1]


def _sha256(weight: Tensor) -> str:
    return hashlib.sha256(_bytes(weight).numpy().data).hexdigest()


def _is_near(weight: Tensor) -> bool:
    return weight.device.type == "cpu"


def _bytes(weight: Tensor) -> Tensor:
    return bytes_of(weight.detach())


def _n_threads(weights: Any, small: int) -> int:
    if sum(weight.nbytes for weight in weights) < small:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _factors() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator) | 1
