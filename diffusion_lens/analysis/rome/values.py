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

The search is gradient descent on the δ of many requests at a time. The blocks up to l do not depend on δ, so they are
computed once. Each iteration computes the blocks above l, there the positions that δ changes (`rome.canvases`), and the
logits of the rows that are read. With hooks above layer l, it computes whole canvases. Essences then share the batch of
the objects, or form their own batch if padding them to the same length would cost more than a second pass. Every
request has its own δ and its own end, so its result does not depend on the others. The canvases of a request that has
ended leave the batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.engine.batching import in_batches
from diffusion_lens.analysis.engine.layout import Queries, as_queries
from diffusion_lens.analysis.rome.canvases import (
    Canvases,
    ReadCanvas,
    ValueObjective,
    default_essence,
    objective_of,
    widened,
)
from diffusion_lens.analysis.rome.keys import pick_edited_layer
from diffusion_lens.facts.fact import Query
from diffusion_lens.hooks.clock import restoring
from diffusion_lens.model.packing import is_plain
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance
from diffusion_lens.settings import Whole, at_least, takes
from diffusion_lens.settings.figures import styled
from diffusion_lens.settings.shared import ValueSettings

# Positions of padding that cost about as much as another pass over the weights, measured on a CPU (a GPU: more).
_PADDING_PER_PASS = 64


LOSS_TERMS = ("total", "nll", "kl", "decay")


@dataclass(frozen=True, eq=False, repr=False)
class ValueResult(PicturedResult, Saved):
    """The value of one request at one layer.

    Columns of the data frame: iteration, total, nll, kl, decay.

    Attributes:
        initial: Float[d_model], m, the MLP's output for `key` in the plain request, where δ starts.
        delta: Float[d_model], δ.
        losses: Float[iteration 4], total, negative log-likelihood, KL and decay before each update; the last two
            include their factors.
        key: Float[d_mlp], k_p, input of the down-projection in the plain request.
        probability_before: p(object) in the plain request, all its positions read from one canvas.
        probability_after: p(object) with δ.
        layer: Number of the block.
        record: Settings, prompts, object, essence, model, weights' hash, versions.
        gate: Float[d_model], by what the MLP's output is multiplied before it is added to the stream, at the time of
            the search; `None` in a network without time conditioning.
    """

    KIND = "ROME value"
    SHOWS = "the terms of the loss in the search for a value, by iteration"

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

    def _table(self) -> Table:
        terms = dict(zip(LOSS_TERMS, self.losses.T, strict=True))
        return Table({"iteration": range(len(self.losses)), **terms})

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The losses by iteration. Returns the matplotlib axes."""
        iterations = [str(i) for i in range(len(self.losses))]
        title = title or f"v* at layer {self.layer} for {''.join(self.record['object']).strip()!r}"
        return plots.labelled_lines(self.losses.T, LOSS_TERMS, iterations, "iteration", "loss (nats)", title, ax)


@takes(ValueSettings)
@begins_run
def optimize_value(
    model: DiffusionTransformer,
    queries: Queries,
    layer: Whole,
    *,
    settings: ValueSettings,
    essence: Query | None = None,
    progress: bool = False,
) -> ValueResult:
    """v* of one request.

    Args:
        queries: The plain request and the same after prefixes (`query_with_prefixes`), or a single query. Their answer
            is the object. A fact is laid out as in `causal_trace`. On a causal model the sequence contains the object
            except for its last token.
        layer: Number of the block; negative ones count from the end.
        settings: Settings of the search.
        essence: Query whose prediction should not change, with its subject marked; by default "{subject} is a",
            followed by a [MASK] on a masked diffusion model.

    Raises:
        ValueError: A layer or setting is out of range, there is no object, the object has other tokens after a prefix
            or is not masked on a masked diffusion model, there is neither a tokenizer nor an essence, or a loss is not
            a finite number.
    """
    essences = None if essence is None else [essence]
    return optimize_values(model, [queries], layer, essences=essences, settings=settings, progress=progress)[0]


@begins_run
def optimize_values(
    model: DiffusionTransformer,
    requests: Sequence[Queries],
    layer: Whole,
    *,
    essences: Sequence[Query] | None = None,
    settings: ValueSettings | None = None,
    max_batch: Whole = 64,
    progress: bool = False,
) -> list[ValueResult]:
    """v* of many requests, searched together; `optimize_value` describes what is not said here.

    Args:
        essences: One essence per request.
        settings: Settings of the search.
        max_batch: Largest number of canvases in one batch; it is halved while memory does not suffice. The canvases of
            one request always stay together.
    """
    settings = settings or ValueSettings()
    layer, max_batch = pick_edited_layer(model, layer), at_least(1, "max_batch", max_batch)
    prompts = [as_queries(model, request) for request in requests]
    found = search_together(model, prompts, essences, layer, settings, max_batch=max_batch, progress=progress)
    record = {"settings": asdict(settings), **provenance(model, model.cfg)}
    return [replace(result, record={**record, **result.record}) for result in found]


def search_together(
    model: DiffusionTransformer,
    requests: Sequence[Sequence[Query]],
    essences: Sequence[Query] | None,
    layer: int,
    settings: ValueSettings,
    *,
    measured_by: str = "mlp_out",
    max_batch: int = 64,
    progress: bool = False,
) -> list[ValueResult]:
    """The value of each request, recorded without settings and model.

    Args:
        measured_by: State whose norm is the unit of ‖δ‖ in weight decay and clamp: "mlp_out", the MLP's output as in
            ROME, or "resid_post", the residual stream behind the block as in MEMIT.
    """
    used: Sequence[Query | None] = [None] * len(requests)
    if settings.kl_factor:
        used = [default_essence(model, request[0]) for request in requests] if essences is None else essences
    if len(used) != len(requests):
        raise ValueError(
            f"{len(used)} essences for {len(requests)} requests; give one essence per request, or none at all"
        )
    objectives = [
        objective_of(model, request, essence, settings.essence_at, settings.over_states)
        for request, essence in zip(requests, used, strict=True)
    ]

    def search(batch: Sequence[ValueObjective]) -> list[ValueResult]:
        with _frozen(model):
            return _Search(model, batch, layer, settings, measured_by).run()

    largest = max((len(objective.objects) + len(objective.essences) for objective in objectives), default=1)
    results: list[ValueResult] = []
    with tqdm(total=len(requests), desc="v*", unit="fact", disable=not progress) as bar:
        for batch, batch_results in in_batches(search, objectives, max_batch // largest):
            results += batch_results
            bar.update(len(batch))
    for result, request, essence in zip(results, requests, used, strict=True):
        result.record["object"] = model.words(request[0].answer_tokens)
        result.record["prompts"] = [model.words(query.tokens.tolist()) for query in request]
        result.record["essence"] = None if essence is None else model.words(essence.tokens.tolist())
    return results


class _Search:
    """Requests in progress.

    Attributes:
        batches: Canvases of the requests that have not stopped; the first batch contains every plain request.
        before: Distributions of the essences without δ, for each batch.
        unit: Norms that are the unit of ‖δ‖.
        delta: δ of all requests. Adam moves that of a request that has stopped on; its result is in `found`.
    """

    def __init__(
        self,
        model: DiffusionTransformer,
        objectives: Sequence[ValueObjective],
        layer: int,
        settings: ValueSettings,
        measured_by: str,
    ) -> None:
        self.model, self.objectives, self.layer, self.settings = model, objectives, layer, settings
        canvases = _share(objectives, padded=not is_plain(model, layer + 1))
        self.batches = [Canvases.upon(model, layer, each) for each in canvases]
        self.before: list[Tensor] = []
        plain = self.batches[0].plain
        self.initial, self.keys = self.batches[0].outputs[plain], self.batches[0].keys[plain]
        at_subject = plain, self.batches[0].positions[plain]
        unit = self.initial if measured_by == "mlp_out" else widened(self.batches[0].resid[at_subject])
        self.unit = unit.norm(dim=1)
        self.delta = torch.zeros_like(self.initial, requires_grad=True)
        self.found = torch.zeros_like(self.initial)
        self.gate = model.time.gates(layer)[1].detach().cpu() if model.cfg.time_conditioning else None
        self.losses: list[list[list[float]]] = [[] for _ in objectives]
        self.probabilities: list[list[float]] = [[] for _ in objectives]

    def run(self) -> list[ValueResult]:
        optimizer = torch.optim.Adam([self.delta], lr=self.settings.lr)
        searching = list(range(len(self.objectives)))
        for iteration in range(self.settings.steps):
            total = self._evaluate(searching)
            going = [i for i in searching if self.losses[i][-1][0] >= self.settings.stop_below]
            if iteration == self.settings.steps - 1:
                going = []
            ended = [i for i in searching if i not in going]
            self.found[ended] = self.delta.detach()[ended]
            if not going:
                break
            [self.delta.grad] = torch.autograd.grad(total.sum(), [self.delta])
            optimizer.step()
            with torch.no_grad():
                radius, length = self.settings.clamp_norm_factor * self.unit, self.delta.norm(dim=1)
                self.delta.mul_(torch.where(length > radius, radius / length, 1.0)[:, None])
            if ended:
                self._continue_with([n for n, i in enumerate(searching) if i in going])
            searching = going
        found, initial, keys = self.found.cpu(), self.initial.cpu(), self.keys.cpu()
        return [
            ValueResult(
                initial=initial[i],
                delta=found[i],
                losses=torch.tensor(self.losses[i], dtype=found.dtype),
                key=keys[i],
                probability_before=self.probabilities[i][0],
                probability_after=self.probabilities[i][-1],
                layer=self.layer,
                record={},
                gate=self.gate,
            )
            for i in range(len(self.objectives))
        ]

    def _evaluate(self, searching: Sequence[int]) -> Float[Tensor, "request"]:
        """The losses of the requests; their terms and p(object) are recorded."""
        numbers = torch.tensor(searching, device=self.delta.device)
        delta = self.delta[numbers]
        nll, kl, log_p = delta.new_zeros(3, len(searching))
        for n, batch in enumerate(self.batches):
            # 1. One pass from the block of the edit on. The first iteration, with δ = 0, gives the essences' reference.
            log_probs, request = batch.log_probs(self.model, self.layer, delta), batch.request
            essence, objects = batch.is_distribution, ~batch.is_distribution
            if n == len(self.before):
                self.before.append(log_probs[essence].detach())

            # 2. -log p of the object's tokens, and λ KL(essence with δ || essence before).
            scored = log_probs.gather(-1, batch.token.clamp(min=0)[:, None])[objects, 0]
            nll = nll.index_add(0, request[objects], -scored * batch.weight[objects])
            if len(self.before[n]):
                changed = log_probs[essence]
                divergence = (changed.exp() * (changed - self.before[n])).sum(dim=-1)
                kl = kl.index_add(0, request[essence], self.settings.kl_factor * divergence * batch.weight[essence])

            # 3. p(object) is that of the plain canvas, without a random prefix.
            is_plain_canvas = (batch.canvas == batch.plain[request])[objects]
            log_p = log_p.index_add(0, request[objects], scored.detach() * is_plain_canvas)

        # 4. The loss of each request, whose terms are recorded.
        decay = self.settings.weight_decay * delta.norm(dim=1) / self.unit[numbers] ** 2
        total: Tensor = nll + kl + decay
        terms = torch.stack([total, nll, kl, decay, log_p.exp()], dim=1).tolist()
        for i, (*losses, probability) in zip(searching, terms, strict=True):
            self.losses[i].append(losses)
            self.probabilities[i].append(probability)
            self._check(i)
        return total

    def _continue_with(self, numbers: Sequence[int]) -> None:
        """Keep the canvases of some of the requests searched so far."""
        requests = torch.tensor(numbers, device=self.initial.device)
        self.before = [
            before[torch.isin(batch.request[batch.is_distribution], requests)]
            for batch, before in zip(self.batches, self.before, strict=True)
        ]
        self.batches = [batch.of(requests) for batch in self.batches]

    def _check(self, i: int) -> None:
        total, nll, kl, decay = self.losses[i][-1]
        if not math.isfinite(total):
            prompt = " ".join(self.model.words(self.objectives[i].objects[0].query.tokens.tolist()))
            raise ValueError(
                f"the loss of {prompt!r} is {total} at iteration {len(self.losses[i]) - 1} (nll {nll}, kl {kl}, "
                f"decay {decay}). At iteration 0 the cause is in the weights or a hook; later, try a lower lr than "
                f"{self.settings.lr}, or float32 weights"
            )


def _share(objectives: Sequence[ValueObjective], padded: bool) -> list[list[list[ReadCanvas]]]:
    """The canvases of each request, in one batch or in two; `padded`: the blocks above l compute padding too."""
    objects = [objective.objects for objective in objectives]
    essences = [objective.essences for objective in objectives]
    lengths = [[len(read.query.tokens) for canvases in kind for read in canvases] for kind in (objects, essences)]
    padding = len(lengths[1]) * (max(lengths[0]) - max(lengths[1], default=0))
    if not padded or padding <= _PADDING_PER_PASS:
        return [[objective.objects + objective.essences for objective in objectives]]
    return [objects, essences]


@restoring
def _frozen(model: DiffusionTransformer) -> Iterator[None]:
    """Enable gradients, except for the weights. The grad mode and the flags are restored, also after an exception."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in trainable:
            weight.requires_grad_(False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for weight in trainable:
            weight.requires_grad_(True)
