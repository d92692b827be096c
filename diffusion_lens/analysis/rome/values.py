"""The value v* that makes a model say an object (Meng et al. 2022, arXiv 2202.05262, section 3.1, step 2).

A vector δ is added to the output m of one MLP at the subject's last token, in every prompt x_j + p and in the essence
p' ("{subject} is a"), and optimised by Adam:

    L(δ) = − 1/N Σ_j log P_δ(o | x_j + p)  +  λ KL(P_δ(· | p') ‖ P(· | p'))  +  w ‖δ‖ / ‖m‖²

log P of an object of several tokens is the mean over its tokens. After each update δ is scaled down to at most
`clamp_norm_factor` times ‖m‖. v* = m + δ, where m is the output in the plain request. The object is the answer of the
request: the one that the model recalls, or another one for an edit. The numbers are those of ROME's `compute_v`.

The caller's hooks on the model also act in the search: with noise on the subject's embeddings, v* is the value that
restores the object in the corrupted run. After the last block's MLP no attention moves δ to other positions, so there
v* = m unless the object is read at the subject itself.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.batching import in_batches
from diffusion_lens.analysis.rome.edited_layer import pick_edited_layer
from diffusion_lens.analysis.rome.objective import ValueObjective, default_essence
from diffusion_lens.analysis.rome.prompts import Request, as_request
from diffusion_lens.analysis.rome.search import SearchResult, ValueSettings, search
from diffusion_lens.display import PicturedResult, Table
from diffusion_lens.facts import Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.settings import Whole, at_least, check_keywords, keywords_of

LOSS_TERMS = ("total", "nll", "kl", "decay")


@dataclass(frozen=True, eq=False, repr=False)
class ValueResult(PicturedResult):
    """The value of one request at one layer.

    Columns of the data frame: iteration, total, nll, kl, decay.

    Attributes:
        initial: Float[d_model], m, the MLP's output in the plain request.
        delta: Float[d_model], δ.
        losses: Float[iteration 4], total, negative log-likelihood, KL and decay before each update; the last two
            include their factors.
        key: Float[d_mlp], k_p, input of the down-projection in the plain request.
        probability_before: p(object) in the plain request, all its positions read from one canvas.
        probability_after: p(object) with δ.
        layer: Number of the block.
        record: Settings, prompts, object, essence, model, weights' hash, versions.
        gate: Float[d_model], by what the MLP's output is multiplied before it is added to the stream, at the time of
            the search; `None` in a network that is not told the time.
    """

    initial: Float[Tensor, "d_model"]
    delta: Float[Tensor, "d_model"]
    losses: Float[Tensor, "iteration 4"]
    key: Float[Tensor, "d_mlp"]
    probability_before: float
    probability_after: float
    layer: int
    record: dict[str, Any]
    gate: Float[Tensor, "d_model"] | None = None

    @property
    def vector(self) -> Float[Tensor, "d_model"]:
        """v* = m + δ."""
        return self.initial + self.delta

    @property
    def output(self) -> Float[Tensor, "d_model"]:
        """m, the MLP's output for `key` in the plain request, where δ starts."""
        return self.initial

    def _table(self) -> Table:
        terms = dict(zip(LOSS_TERMS, self.losses.T, strict=True))
        return Table({"iteration": range(len(self.losses)), **terms})

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "ROME value", self)

    @classmethod
    def load(cls, path: str | Path) -> "ValueResult":
        """Read what `save` wrote."""
        return load_fields(path, "ROME value", cls)

    def plot(self, ax: Any = None) -> Any:
        """The losses by iteration. Returns the matplotlib axes."""
        ax = plots.one_axes(ax, width=4.6, height=3.0)
        for name, losses in zip(LOSS_TERMS, self.losses.T.tolist(), strict=True):
            ax.plot(losses, label=name, color="black" if name == "total" else None)
        ax.set_xlabel("iteration")
        ax.set_ylabel("loss (nats)")
        title = f"v* at layer {self.layer} for {''.join(self.record['object']).strip()!r}"
        ax.set_title(title, fontsize=10, parse_math=False)
        ax.legend(fontsize=8)
        return ax


def optimize_value(
    model: DiffusionTransformer,
    queries: Request,
    layer: Whole,
    *,
    essence: Query | None = None,
    progress: bool = False,
    **settings: Any,
) -> ValueResult:
    """v* of one request.

    Args:
        queries: The plain request and the same after prefixes (`query_with_prefixes`), or a single query. Their answer
            is the object. On a causal model the sequence contains the object except for its last token.
        layer: Number of the block; negative ones count from the end.
        essence: Query whose prediction should not change, with its subject marked; by default "{subject} is a",
            followed by a [MASK] on a masked diffusion model.
        progress: Whether to show a progress bar.
        settings: The fields of `ValueSettings`: steps, lr, weight_decay, clamp_norm_factor, kl_factor, stop_below,
            essence_at, over_states.

    Raises:
        ValueError: A layer or setting is out of range, there is no object, the object has other tokens after a prefix
            or is not masked on a masked diffusion model, there is neither a tokenizer nor an essence, or a loss is not
            a finite number.
    """
    check_keywords("optimize_value", settings, keywords_of(optimize_value, ValueSettings))
    return optimize_values(
        model,
        [queries],
        layer,
        essences=None if essence is None else [essence],
        settings=ValueSettings(**settings),
        progress=progress,
    )[0]


@begins_run
def optimize_values(
    model: DiffusionTransformer,
    requests: Sequence[Request],
    layer: Whole,
    *,
    essences: Sequence[Query] | None = None,
    settings: ValueSettings | None = None,
    max_batch: Whole = 64,
    progress: bool = False,
) -> list[ValueResult]:
    """v* of many requests, searched together.

    Args:
        essences: One essence per request.
        settings: Settings of the search.
        max_batch: Largest number of canvases in one batch; it is halved while memory does not suffice. The canvases of
            one request always stay together.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The same as in `optimize_value`.
    """
    settings = settings or ValueSettings()
    layer, max_batch = pick_edited_layer(model, layer), at_least(1, "max_batch", max_batch)
    prompts = [as_request(request) for request in requests]
    used_essences = essences_of(model, prompts, settings, essences)
    results = search_together(model, prompts, used_essences, layer, settings, max_batch=max_batch, progress=progress)
    record = {"settings": asdict(settings), **provenance(model, model.cfg)}
    return [
        ValueResult(
            **vars(result),
            layer=layer,
            record={
                **record,
                "object": model.words(request[0].answer_tokens),
                "prompts": [model.words(query.tokens.tolist()) for query in request],
                "essence": None if essence is None else model.words(essence.tokens.tolist()),
            },
        )
        for result, request, essence in zip(results, prompts, used_essences, strict=True)
    ]


def essences_of(
    model: DiffusionTransformer,
    requests: Sequence[Sequence[Query]],
    settings: ValueSettings,
    essences: Sequence[Query] | None = None,
) -> Sequence[Query | None]:
    """The essence of each request: the given ones, by default "{subject} is a"; `None` for each without a KL term."""
    used: Sequence[Query | None] = [None] * len(requests)
    if settings.kl_factor:
        used = [default_essence(model, request[0]) for request in requests] if essences is None else essences
    if len(used) != len(requests):
        raise ValueError(
            f"{len(used)} essences for {len(requests)} requests; give one essence per request, or none at all"
        )
    return used


def search_together(
    model: DiffusionTransformer,
    requests: Sequence[Sequence[Query]],
    essences: Sequence[Query | None],
    layer: int,
    settings: ValueSettings,
    *,
    measured_by: str = "mlp_out",
    max_batch: int = 64,
    progress: bool = False,
) -> list[SearchResult]:
    """The δ of each request, in batches of at most `max_batch` canvases; `search` describes `measured_by`."""
    objectives = [
        ValueObjective.of(model, request, essence, settings.essence_at, settings.over_states)
        for request, essence in zip(requests, essences, strict=True)
    ]
    largest = max((len(objective.objects) + len(objective.essences) for objective in objectives), default=1)
    results: list[SearchResult] = []
    with tqdm(total=len(requests), desc="v*", unit="fact", disable=not progress) as bar:
        search_batch = partial(search, model, layer=layer, settings=settings, measured_by=measured_by)
        for batch, batch_results in in_batches(search_batch, objectives, max_batch // largest):
            results += batch_results
            bar.update(len(batch))
    return results
