"""The key k* of a subject (Meng et al. 2022, arXiv 2202.05262, section 3.1, step 1), and edits of the memory it reads.

An MLP's down-projection W is interpreted as a memory that maps keys to values, W k = m. The key of a subject is the
input of W at the subject's last token (act(gate) · up in a gated MLP), averaged over prompts x_j + p with different
prefixes x_j:

    k* = 1/N Σ_j k(x_j + p)

ROME averages key and value over contexts: the request itself, and the request after short texts that the model wrote
(`get_context_templates` of kmeng01/rome). These prompts differ in length. They are padded on the right, and an
attention mask hides the padding, so the results of a row do not depend on the others, on a bidirectional model either.

An edit, which ROME and MEMIT compute, adds to the down-projection W of each of its blocks a product A Bᵀ of few
columns.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.engine.answer import check_answer
from diffusion_lens.analysis.engine.inputs import as_batch
from diffusion_lens.analysis.engine.layout import CanvasLayout, Queries, as_queries
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.denoising.settings import DenoiseSettings
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.model.weights import Edit
from diffusion_lens.records.results import Result, Saved, Table, provenance
from diffusion_lens.settings import (
    Whole,
    at_least,
    checked_arguments,
    own_seed,
    pick_indices,
    pick_layer,
    takes,
    whole_numbers,
)
from diffusion_lens.settings.shared import check_key_position
from weight_conversion import export

KEY_POSITIONS: dict[str, Callable[[Query], int]] = {
    "subject_last": lambda query: query.subject[1] - 1,
    "subject_first": lambda query: query.subject[0],
}


@dataclass(frozen=True, eq=False, repr=False)
class KeyResult(Result, Saved):
    """The key of one subject at one layer.

    Columns of the data frame: prompt, norm, cosine (with the mean over the prompts).

    Attributes:
        keys: Float[prompt d_mlp], key in each prompt, float32.
        vector: Float[d_mlp], k*, the mean of these.
        layer: Number of the block.
        record: Token at which the key was taken, prompts, model, weights' hash, versions.
    """

    KIND = "ROME key"
    NO_PICTURE = "It is a vector that edits are computed with; the report of an edit has a picture."

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


@checked_arguments
def compute_key(
    model: DiffusionTransformer, queries: Queries, layer: Whole, at: str = "subject_last", *, max_batch: Whole = 256
) -> KeyResult:
    """k* of one request.

    The key is taken on the canvas as given. The answer is not read, so its positions may be masked, or revealed by a
    later denoising step, or beyond the canvas. On a masked diffusion model the key depends on this, so take k* and v*
    on the same canvas.

    Args:
        queries: The plain request and the same after prefixes (`query_with_prefixes`), or a single one. A fact is laid
            out as in `causal_trace`.
        layer: Number of the block; negative ones count from the end.
        at: Token at which the key is taken: "subject_last", as in ROME, or "subject_first".
        max_batch: Largest number of rows in one forward pass.
    """
    return compute_keys(model, [queries], layer, at, max_batch=max_batch)[0]


@checked_arguments
@torch.no_grad()
def compute_keys(
    model: DiffusionTransformer,
    requests: Sequence[Queries],
    layer: Whole,
    at: str = "subject_last",
    *,
    max_batch: Whole = 256,
) -> list[KeyResult]:
    """The keys of many requests, whose prompts share batches; `compute_key` describes the arguments."""
    layer, max_batch = pick_edited_layer(model, layer), at_least(1, "max_batch", max_batch)
    check_key_position("at", at)
    prompts = [as_queries(model, request) for request in requests]
    states = states_at(model, [*chain(*prompts)], key_site(layer), layer, at, max_batch).float()
    record = {"at": at, **provenance(model, model.cfg)}
    return [
        KeyResult(keys.clone(), layer, {**record, "prompts": [model.words(q.tokens.tolist()) for q in request]})
        for keys, request in zip(states.split([*map(len, prompts)]), prompts, strict=True)
    ]


@checked_arguments
def sample_prefixes(
    model: DiffusionTransformer,
    lengths: Iterable[Whole] = (5,) * 10 + (10,) * 10,
    *,
    start: str = "The",
    temperature: float = 1.0,
    seed: int = 0,
) -> list[str]:
    """Sample short texts from the model, each ending in ". ", which ROME puts before a request.

    Args:
        lengths: Number of new tokens of each text, and of the denoising steps that write it.
        start: Words with which every text begins.
        temperature: Temperature of the sampling; at 0 all texts of one length would be the same.
        seed: Text i has its own seed, made of this one and i.
    """
    lengths = [at_least(1, "lengths", length) for length in whole_numbers("lengths", lengths)]
    if not lengths:
        raise ValueError("lengths is empty: give the length of each prefix, or use no prefixes at all")
    texts: dict[int, str] = {}
    for length in dict.fromkeys(lengths):
        rows = [i for i, own_length in enumerate(lengths) if own_length == length]
        canvas = lay_out(model, [start] * len(rows), max_new_tokens=length)
        settings = DenoiseSettings(int(length), temperature=temperature, seed=[own_seed(seed, i) for i in rows])
        trajectory = denoise(model, canvas, settings)
        for i, tokens in zip(rows, trajectory.tokens.tolist(), strict=True):
            words = model.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            texts[i] = " ".join(words.split())
    return [f"{texts[i]}. " for i in range(len(lengths))]


@takes(CanvasLayout)
def query_with_prefixes(
    model: DiffusionTransformer,
    fact: Fact,
    prefixes: Sequence[str],
    *,
    settings: CanvasLayout,
    prepend_bos: bool | None = None,
) -> list[Query]:
    """The plain request, then the request after each prefix, as `compute_key` and `optimize_value` take them.

    Args:
        settings: Layout of every canvas. Mentions, as `subject_start`, are counted in the fact's own prompt.
        prepend_bos: The same as in `Fact.to_query`.

    Raises:
        ValueError: `Fact.to_query` refuses the fact, or the tokenizer splits the object differently after a prefix.
    """
    return lay_out_request(model, fact, prefixes, settings, prepend_bos)


@checked_arguments
def lay_out_request(
    model: DiffusionTransformer,
    fact: Fact,
    prefixes: Sequence[str],
    layout: CanvasLayout,
    prepend_bos: bool | None = None,
) -> list[Query]:
    """The plain request and the request after each prefix, like `query_with_prefixes`, on canvases of this layout."""
    start, _ = fact.subject_characters(layout.occurrence)
    layout = replace(layout, occurrence=None)  # The mention is given by its first character, which a prefix moves.
    queries = []
    for prefix in ["", *prefixes]:
        prefixed = replace(fact, prompt=prefix + fact.prompt, subject_start=len(prefix) + start)
        queries.append(layout.query(model, prefixed, prepend_bos=prepend_bos))
    check_object(model, queries)
    return queries


def check_object(model: DiffusionTransformer, request: Sequence[Query]) -> None:
    """Raise a `ValueError` unless all prompts of a request have the same object, in the same tokens."""
    for i, query in enumerate(request):
        check_answer(model, query, f"queries[{i}]")
        if query.answer_tokens != request[0].answer_tokens:
            raise ValueError(
                f"the object is {model.words(request[0].answer_tokens)} in the plain request and "
                f"{model.words(query.answer_tokens)} in queries[{i}]: either another object, or the tokenizer splits "
                "it differently there; leave that prefix out, or end it with a space or a full stop"
            )


def pick_edited_layer(model: DiffusionTransformer, layer: Whole) -> int:
    """The number of a block, counted from 0, with one MLP: no one down-projection of experts answers a key."""
    layer = pick_layer(layer, model.cfg.n_layers)
    experts = model.cfg.experts
    if experts is not None and experts.layers[layer]:
        dense = [i for i, has_experts in enumerate(experts.layers) if not has_experts]
        others = f"its layers with one MLP are {dense}" if dense else "all of its layers have experts"
        raise ValueError(
            f"layer {layer} of {model.cfg.model_name!r} has {experts.n_experts} experts, and keys and values are those "
            f"of one MLP; {others}. Hooks at blocks.{layer}.mlp.hook_expert_out and hook_router_weights change what "
            "its experts say"
        )
    return layer


def pick_edited_layers(model: DiffusionTransformer, layers: Iterable[Whole]) -> list[int]:
    """The numbers of several blocks, in ascending order; see `pick_edited_layer`."""
    chosen = sorted(pick_indices("layers", layers, model.cfg.n_layers))
    return [pick_edited_layer(model, layer) for layer in chosen]


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

    def store(activation: Tensor, hook: Any) -> None:
        states.append(activation[range(len(chunk)), [KEY_POSITIONS[at](query) for query in chunk]].cpu())

    for start in range(0, len(queries), max_batch):
        chunk = queries[start : start + max_batch]
        tokens, real = as_batch(model, chunk)
        with model.hooks(fwd_hooks=[(site, store)]):
            model(tokens, attention_mask=real, stop_at_layer=layer + 1)
    return torch.cat(states[1:] or states)


def key_site(layer: int) -> str:
    """The hook point through which keys enter the down-projection of block `layer`."""
    return f"blocks.{layer}.mlp.hook_post"


class Factors(NamedTuple):
    """The factors of an update ΔW = A Bᵀ, A and B, in float64 on the CPU."""

    left: Float[Tensor, "d_model rank"]
    right: Float[Tensor, "d_mlp rank"]


def before_gate(added: Float[Tensor, "*rest d_model"], gate: Float[Tensor, "d_model"] | None) -> Tensor:
    """What a down-projection has to write so that `added` is added to the stream behind its gate; a `ValueError` if an
    entry of the gate is 0, so that nothing reaches the stream there."""
    if gate is None:
        return added
    if not bool(gate.all()):
        raise ValueError(
            "the gate of this MLP is 0 in some entries at this time, so no weight can write there: edit another layer, "
            "or at another time, `with model.at_time(t):`"
        )
    return added / gate.cpu().double()


class WeightEdit(Edit):
    """An edit of down-projections of one model, applied and reverted like every `Edit`."""

    @abstractmethod
    def factors(self, layer: int) -> Factors:
        """The update of the down-projection of block `layer`, for the weight as it is now."""

    @property
    def weights(self) -> list[str]:
        return [f"blocks.{layer}.mlp.down.weight" for layer in self.layers]

    def update_of(self, name: str) -> Tensor:
        return self.update(int(name.split(".")[1]))

    def say_weight(self, name: str) -> str:
        return f"the weight of layer {name.split('.')[1]}"

    def weight_of(self, layer: int) -> Float[Tensor, "d_model d_mlp"]:
        """The down-projection of block `layer` as it is now."""
        weight: Tensor = self.model.blocks[layer].mlp.down.weight
        return weight

    @torch.no_grad()
    def update(self, layer: int | None = None) -> Float[Tensor, "d_model d_mlp"]:
        """ΔW of block `layer`, by default the first, for the weight as it is now; float64 on the CPU."""
        left, right = self.factors(self.layers[0] if layer is None else layer)
        return left @ right.T

    def export(self, path: str | Path) -> Path:
        """Write the edited model in its checkpoint's own format; the edit need not be applied."""
        if self.is_applied:
            return export(self.model.state_dict(), self.model.cfg.architecture, path)
        with self:
            return self.export(path)


def require_same_model(name: str, record: Mapping[str, Any] | None, model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if a part was taken from another model. The model's weights may have been edited since."""
    edited = {"model": model.cfg.model_name, "architecture": model.cfg.architecture.to_dict()}
    if record is not None and any(record.get(name, value) != value for name, value in edited.items()):
        raise ValueError(
            f"the {name} was taken from another model or architecture ({record.get('model')!r}) than the edited model "
            f"({model.cfg.model_name!r}); take it from the model that you edit"
        )
