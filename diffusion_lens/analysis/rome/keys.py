"""The key k* of a subject (Meng et al. 2022, arXiv 2202.05262, section 3.1, step 1).

An MLP's down-projection W is interpreted as a memory that maps keys to values, W k = m. The key of a subject is the
input of W at the subject's last token (act(gate) · up in a gated MLP), averaged over prompts x_j + p with different
prefixes x_j:

    k* = 1/N Σ_j k(x_j + p)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.rome.edited_layer import pick_edited_layer
from diffusion_lens.analysis.rome.prompts import PromptBatch, Request, as_request
from diffusion_lens.display import Result, Table
from diffusion_lens.facts import Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.settings import Whole, at_least, naming_the_nearest

KEY_POSITIONS: dict[str, Callable[[Query], int]] = {
    "subject_last": lambda query: query.subject[1] - 1,
    "subject_first": lambda query: query.subject[0],
}


@dataclass(frozen=True, eq=False, repr=False)
class KeyResult(Result):
    """The key of one subject at one layer.

    Columns of the data frame: prompt, norm, cosine (with the mean over the prompts).

    Attributes:
        keys: Float[prompt d_mlp], key in each prompt, float32.
        layer: Number of the block.
        record: Token at which the key was taken, prompts, model, weights' hash, versions.
    """

    keys: Float[Tensor, "prompt d_mlp"]
    layer: int
    record: dict[str, Any]

    @property
    def vector(self) -> Float[Tensor, "d_mlp"]:
        """k*: the mean over the prompts."""
        return self.keys.mean(dim=0)

    def _table(self) -> Table:
        cosines = torch.cosine_similarity(self.keys, self.vector[None], dim=1)
        return Table({"prompt": range(len(self.keys)), "norm": self.keys.norm(dim=1), "cosine": cosines})

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "ROME key", self)

    @classmethod
    def load(cls, path: str | Path) -> "KeyResult":
        """Read what `save` wrote."""
        return load_fields(path, "ROME key", cls)


@naming_the_nearest
def compute_key(
    model: DiffusionTransformer, queries: Request, layer: Whole, at: str = "subject_last", *, max_batch: Whole = 256
) -> KeyResult:
    """k* of one request.

    The key is taken on the canvas as given. The answer is not read, so its positions may be masked, or revealed by a
    later denoising step, or beyond the canvas. On a masked diffusion model the key depends on this, so take k* and v*
    on the same canvas.

    Args:
        queries: The plain request and the same after prefixes (`query_with_prefixes`), or a single query.
        layer: Number of the block; negative ones count from the end.
        at: Token at which the key is taken: "subject_last", as in ROME, or "subject_first".
        max_batch: Largest number of rows in one forward pass.

    Raises:
        ValueError: The layer is out of range, `at` is unknown, or the request is empty.
    """
    return compute_keys(model, [queries], layer, at, max_batch=max_batch)[0]


@begins_run
@torch.no_grad()
def compute_keys(
    model: DiffusionTransformer,
    requests: Sequence[Request],
    layer: Whole,
    at: str = "subject_last",
    *,
    max_batch: Whole = 256,
) -> list[KeyResult]:
    """The keys of many requests, whose prompts share batches; `compute_key` describes the arguments."""
    layer, max_batch = pick_edited_layer(model, layer), at_least(1, "max_batch", max_batch)
    check_key_position(at)
    prompts = [as_request(request) for request in requests]
    queries = [query for request in prompts for query in request]
    counts = [len(request) for request in prompts]
    by_request = states_at(model, queries, key_site(layer), layer, at, max_batch).float().split(counts)
    record = {"at": at, **provenance(model, model.cfg)}
    return [
        KeyResult(keys.clone(), layer, {**record, "prompts": [model.words(q.tokens.tolist()) for q in request]})
        for keys, request in zip(by_request, prompts, strict=True)
    ]


def check_key_position(at: str) -> None:
    """Raise a `ValueError` unless `at` names a token of a query."""
    if at not in KEY_POSITIONS:
        raise ValueError(f"at={at!r} is unknown; it must be one of {', '.join(KEY_POSITIONS)}")


@torch.no_grad()
def states_at(
    model: DiffusionTransformer,
    queries: Sequence[Query],
    site: str,
    layer: int,
    at: str = "subject_last",
    max_batch: int = 256,
) -> Float[Tensor, "query d"]:
    """What passes the hook point `site` of block `layer` at one token of each query, on the CPU."""
    states = [torch.empty(0, 0)]
    for start in range(0, len(queries), max_batch):
        chunk = queries[start : start + max_batch]
        batch = PromptBatch.of(model, [query.tokens for query in chunk])
        positions = [KEY_POSITIONS[at](query) for query in chunk]
        states.append(states_everywhere(model, batch, site, layer)[range(len(chunk)), positions].cpu())
    return torch.cat(states[1:] or states)


def states_everywhere(
    model: DiffusionTransformer, batch: PromptBatch, site: str, layer: int
) -> Float[Tensor, "batch pos d"]:
    """What passes the hook point `site` of block `layer` at every position, padding included."""
    _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.real, names_filter=site, stop_at_layer=layer + 1)
    states: Tensor = cache[site]
    return states


def key_site(layer: int) -> str:
    """The hook point through which keys enter the down-projection of block `layer`."""
    return f"blocks.{layer}.mlp.hook_post"
