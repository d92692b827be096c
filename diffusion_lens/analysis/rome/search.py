"""The search for v*: gradient descent on δ, many requests at a time.

The blocks up to l do not depend on δ, so they are computed once. Each iteration computes the blocks above l, there the
positions that δ changes (`blocks_above`), and the logits of the rows that are read. With hooks above layer l, it
computes whole canvases. Essences then share the batch of the objects, or form their own batch if padding them to the
same length would cost more than a second pass. Every request has its own δ and its own end, so its result does not
depend on the others. The canvases of a request that has ended leave the batch.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.rome.canvases import Canvases, widened
from diffusion_lens.analysis.rome.objective import ESSENCE_ROWS, STATES, ReadCanvas, ValueObjective
from diffusion_lens.model.packing import is_plain
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import at_least, not_negative

Number = int | float  # Type checks in tests would refuse the integer 4 for a float.

# Positions of padding that cost about as much as another pass over the weights, measured on a CPU (a GPU: more).
_PADDING_PER_PASS = 64


@dataclass(frozen=True)
class ValueSettings:
    """Settings of the search for v*; the defaults are those of ROME for GPT-2 XL.

    Attributes:
        steps: Largest number of iterations; the last one is only evaluated.
        lr: Learning rate of Adam.
        weight_decay: Factor w of the penalty on ‖δ‖².
        clamp_norm_factor: Largest ‖δ‖, in norms of the MLP's own output (for `memit`, of the residual stream).
        kl_factor: Factor λ of the penalty on a changed essence; 0 leaves the essence out.
        stop_below: Loss below which a request stops.
        essence_at: Position at which the essence is read: "readout" (its [MASK], or the next token) or, as in ROME,
            "subject_last".
        over_states: States of the object on a masked diffusion model, "masked" or "partial" (see
            `diffusion_lens.analysis.rome.objective`); a causal model is teacher-forced either way.
    """

    steps: int = 20
    lr: Number = 0.5
    weight_decay: Number = 0.5
    clamp_norm_factor: Number = 4.0
    kl_factor: Number = 0.0625
    stop_below: Number = 0.05
    essence_at: str = "readout"
    over_states: str = "masked"

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", at_least(1, "steps", self.steps))
        for name in ("lr", "weight_decay", "clamp_norm_factor", "kl_factor", "stop_below"):
            object.__setattr__(self, name, not_negative(name, getattr(self, name)))
        for name, known in (("essence_at", ESSENCE_ROWS), ("over_states", STATES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; it must be one of {', '.join(known)}")


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The result of the search for one request; `ValueResult` describes the fields."""

    initial: Float[Tensor, "d_model"]
    delta: Float[Tensor, "d_model"]
    losses: Float[Tensor, "iteration 4"]
    key: Float[Tensor, "d_mlp"]
    probability_before: float
    probability_after: float
    gate: Float[Tensor, "d_model"] | None


def search(
    model: DiffusionTransformer,
    objectives: Sequence[ValueObjective],
    layer: int,
    settings: ValueSettings,
    measured_by: str = "mlp_out",
) -> list[SearchResult]:
    """The δ of every request.

    Args:
        measured_by: State whose norm is the unit of ‖δ‖ in weight decay and clamp: "mlp_out", the MLP's output as in
            ROME, or "resid_post", the residual stream behind the block as in MEMIT.

    Raises:
        ValueError: A loss is not a finite number.
    """
    with _frozen(model):
        return _Search(model, objectives, layer, settings, measured_by).run()


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
        self.gate = model.gates_at(layer)[1].detach().cpu() if model.cfg.is_told_time else None
        self.losses: list[list[list[float]]] = [[] for _ in objectives]
        self.probabilities: list[list[float]] = [[] for _ in objectives]

    def run(self) -> list[SearchResult]:
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
            self._clamp()
            if ended:
                self._continue_with([n for n, i in enumerate(searching) if i in going])
            searching = going
        found, initial, keys = self.found.cpu(), self.initial.cpu(), self.keys.cpu()
        return [
            SearchResult(
                initial=initial[i],
                delta=found[i],
                losses=torch.tensor(self.losses[i], dtype=found.dtype),
                key=keys[i],
                probability_before=self.probabilities[i][0],
                probability_after=self.probabilities[i][-1],
                gate=self.gate,
            )
            for i in range(len(self.objectives))
        ]

    def _evaluate(self, searching: Sequence[int]) -> Float[Tensor, "request"]:
        """The losses of the requests; their terms and p(object) are recorded."""
        numbers = torch.tensor(searching, device=self.delta.device)
        delta = self.delta[numbers]
        nll, kl, log_p = (delta.new_zeros(len(searching)) for _ in range(3))
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
        """Keep the canvases of some requests only, given by their index among those searched so far."""
        requests = torch.tensor(numbers, device=self.initial.device)
        self.before = [
            before[torch.isin(batch.request[batch.is_distribution], requests)]
            for batch, before in zip(self.batches, self.before, strict=True)
        ]
        self.batches = [batch.of(requests) for batch in self.batches]

    def _check(self, i: int) -> None:
        """Raise a `ValueError` if the latest loss of a request is no finite number."""
        total, nll, kl, decay = self.losses[i][-1]
        if not math.isfinite(total):
            prompt = " ".join(self.model.words(self.objectives[i].objects[0].query.tokens.tolist()))
            raise ValueError(
                f"the loss of {prompt!r} is {total} at iteration {len(self.losses[i]) - 1} (nll {nll}, kl {kl}, "
                f"decay {decay}). At iteration 0 the cause is in the weights or a hook; later, try a lower lr than "
                f"{self.settings.lr}, or float32 weights"
            )

    def _clamp(self) -> None:
        """Scale each δ that is longer than `clamp_norm_factor` allows down to that length."""
        with torch.no_grad():
            radius, length = self.settings.clamp_norm_factor * self.unit, self.delta.norm(dim=1)
            self.delta.mul_(torch.where(length > radius, radius / length, 1.0)[:, None])


def _share(objectives: Sequence[ValueObjective], padded: bool) -> list[list[list[ReadCanvas]]]:
    """The canvases of each request, in one batch or in two.

    Args:
        padded: Whether the blocks above l compute padding too.
    """
    objects = [objective.objects for objective in objectives]
    essences = [objective.essences for objective in objectives]
    lengths = [[len(read.query.tokens) for canvases in kind for read in canvases] for kind in (objects, essences)]
    padding = len(lengths[1]) * (max(lengths[0]) - max(lengths[1], default=0))
    if not padded or padding <= _PADDING_PER_PASS:
        return [[objective.objects + objective.essences for objective in objectives]]
    return [objects, essences]


@contextmanager
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
