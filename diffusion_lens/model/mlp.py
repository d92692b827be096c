"""The MLPs: gated, down(silu(gate x) · up x) (SwiGLU, Shazeer 2020, arXiv 2002.05202), or plain, down(gelu(up x)).

In a mixture of experts (Shazeer et al. 2017, arXiv 1701.06538), a router chooses a few of many MLPs at each position.
The output is Σ_e w_e · MLP_e(x) over the chosen experts e. Their weights w are the router's scores of them, which are
its logits after a softmax over all experts or a sigmoid. `weight_conversion.Experts` says which, and how many are
chosen.

An expert runs only at the positions that chose it. Its own hook points nevertheless pass activations
[batch pos d_mlp], which are zero at the other positions.
"""

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion_lens.model.hook_points import StepHookPoint, hooked_modules, is_hooked
from diffusion_lens.model.layers import WIDE, RMSNorm, beside, bias_of, linear, rms_normalized
from diffusion_lens.model.shapes import Resid
from weight_conversion import Experts


@dataclass(frozen=True)
class SelectedPositions:
    """The positions of a batch at which an MLP runs."""

    index: Int[Tensor, "entry"]  # rows of the flattened batch
    n_batch: int
    n_pos: int

    def through(self, point: nn.Module, x: Float[Tensor, "entry d_mlp"]) -> Float[Tensor, "entry d_mlp"]:
        """An activation after its hooks, which see the whole batch, with zeros at the other positions."""
        if not is_hooked(point):
            return x
        whole = x.new_zeros(self.n_batch * self.n_pos, x.shape[-1]).index_copy(0, self.index, x)
        hooked: Tensor = point(whole.unflatten(0, (self.n_batch, self.n_pos)))
        return hooked.flatten(0, 1)[self.index]


class MLP(nn.Module, ABC):
    """What all MLPs have: a projection `up` that reads the stream, and a projection `down` that writes into it."""

    up: nn.Linear
    down: nn.Linear

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        return self.up.weight.T

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        return self.down.weight.T

    @property
    def b_in(self) -> Float[Tensor, "d_mlp"]:
        return bias_of(self.up)

    @property
    def b_out(self) -> Float[Tensor, "d_model"]:
        return bias_of(self.down)

    @property
    def writers(self) -> tuple[nn.Linear, ...]:
        """The projections that write into the stream."""
        return (self.down,)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_new": partial(F.gelu, approximate="tanh")}


class GatedMLP(MLP):
    """`hook_pre` is the gate before its activation function, `hook_pre_linear` the up-projection, `hook_post` the
    product (ROME's key)."""

    # Only where it is another one is it an attribute: records describe objects by their attributes.
    act_fn: str = "silu"

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, act_fn: str = "silu") -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        if act_fn != "silu":
            self.act_fn = act_fn
        self.hook_pre, self.hook_pre_linear, self.hook_post = (StepHookPoint() for _ in range(3))

    @property
    def W_gate(self) -> Float[Tensor, "d_model d_mlp"]:
        return self.gate.weight.T

    @property
    def b_gate(self) -> Float[Tensor, "d_mlp"]:
        return bias_of(self.gate)

    @property
    def readers(self) -> tuple[nn.Linear, ...]:
        """The projections that read the normalised stream."""
        return self.gate, self.up

    def tl_parameters(self) -> dict[str, Tensor]:
        """The matrices under TransformerLens's names."""
        return {"W_in": self.W_in, "W_gate": self.W_gate, "W_out": self.W_out}

    def forward(
        self, x: Float[Tensor, "*rest d_model"], at: SelectedPositions | None = None
    ) -> Float[Tensor, "*rest d_model"]:
        """Run the MLP, on `x` at all positions, or with `at` on the rows of some of them."""
        act = ACTIVATIONS[self.act_fn]
        if at is None:
            out: Tensor = self.down(self.hook_post(act(self.hook_pre(self.gate(x))) * self.hook_pre_linear(self.up(x))))
            return out
        gate, up = at.through(self.hook_pre, self.gate(x)), at.through(self.hook_pre_linear, self.up(x))
        selected: Tensor = self.down(at.through(self.hook_post, act(gate) * up))
        return selected


class PlainMLP(MLP):
    """`hook_pre` is the up-projection before GELU (by tanh), `hook_post` is after it (ROME's key)."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.hook_pre, self.hook_post = StepHookPoint(), StepHookPoint()

    @property
    def readers(self) -> tuple[nn.Linear, ...]:
        """The projections that read the normalised stream."""
        return (self.up,)

    def tl_parameters(self) -> dict[str, Tensor]:
        """The matrices under TransformerLens's names."""
        return {"W_in": self.W_in, "W_out": self.W_out}

    def forward(self, x: Resid) -> Resid:
        post = self.hook_post(ACTIVATIONS["gelu_new"](self.hook_pre(self.up(x))))
        out: Resid = self.down(post)
        return out


Scores = Float[Tensor, "batch pos expert"]
Choice = Int[Tensor, "batch pos chosen"]


class Router(nn.Module):
    """The linear map from the normalised stream to a logit for each expert; a bias is added to scores, not logits."""

    def __init__(self, d_model: int, settings: Experts, eps: float) -> None:
        super().__init__()
        self.is_wide = settings.router_dtype == "float32"
        self.weight = nn.Parameter(torch.empty(settings.n_experts, d_model, device="meta"))
        self.bias = nn.Parameter(torch.empty(settings.n_experts, device="meta")) if settings.router_bias else None
        self.expert_scale: nn.Parameter | None = None
        self.scale: nn.Parameter | None = None
        if settings.scales:
            self.expert_scale = nn.Parameter(torch.empty(settings.n_experts, device="meta"))
        if settings.own_norms:
            self.scale, self.eps = nn.Parameter(torch.empty(d_model, device="meta")), eps

    def forward(self, x: Resid) -> Scores:
        if self.scale is not None:
            x = rms_normalized(x, self.eps) * beside(self.scale, x) * x.shape[-1] ** -0.5
        dtype = torch.promote_types(x.dtype, torch.float32) if self.is_wide else x.dtype
        return linear(x.to(dtype), self.weight.to(dtype))


class MixtureOfExperts(nn.Module):
    """Hook points in the order in which they pass; what a hook returns decides what follows.

    `hook_router_logits` [batch pos expert] decides everything. `hook_experts` Int[batch pos chosen] is the choice,
    best first: to force one, return other experts; their weights follow from their scores, and an expert that occurs
    twice counts once. `hook_router_weights` [batch pos expert] is what multiplies each expert's output, 0 where it is
    not chosen: set an expert's entries to 0 to ablate it. An expert to which a hook gives a weight here runs too, so
    that the weights of another run can be put in. `hook_expert_out` [batch pos chosen d_model] is the output of each
    chosen expert before its weight, in the order of the choice, followed by the experts that only got a weight.
    """

    # For the type checker: nn.Module's __getattr__ returns "Tensor | Module".
    experts: Any
    shared: GatedMLP | None

    reads_stream = False  # whether it reads the stream before the block's norm too

    def __init__(
        self, settings: Experts, router: Router, experts: Sequence[GatedMLP], shared: GatedMLP | None = None
    ) -> None:
        super().__init__()
        self.settings = settings
        self.router = router
        self.experts = nn.ModuleList(experts)
        # The block runs it, and adds its output beside that of the experts.
        self.shared = shared
        self.hook_router_logits, self.hook_experts = StepHookPoint(), StepHookPoint()
        self.hook_router_weights, self.hook_expert_out = StepHookPoint(), StepHookPoint()

    @property
    def b_out(self) -> Float[Tensor, "d_model"]:
        """The bias of the output, which is the same at all positions only if no expert has one: zeros."""
        if any(expert.down.bias is not None for expert in self.experts):
            raise ValueError(
                "the experts have biases, which differ with the choice of a position: there is no one b_out"
            )
        return self.router.weight.new_zeros(self.router.weight.shape[1])

    @property
    def readers(self) -> tuple[nn.Linear | Router, ...]:
        """The projections that read the normalised stream."""
        return self.router, *(reader for mlp in self._mlps for reader in mlp.readers)

    @property
    def writers(self) -> tuple[nn.Linear, ...]:
        """The projections that write into the stream."""
        return tuple(writer for mlp in self._mlps for writer in mlp.writers)

    @property
    def _mlps(self) -> list[GatedMLP]:
        return [*self.experts, *([] if self.shared is None else [self.shared])]

    def tl_parameters(self) -> dict[str, Tensor]:
        """The matrices of the experts under TransformerLens's names."""
        named = {f"experts.{e}": expert for e, expert in enumerate(self.experts)}
        named |= {} if self.shared is None else {"shared": self.shared}
        return {f"{name}.{W}": weight for name, mlp in named.items() for W, weight in mlp.tl_parameters().items()}

    def forward(self, x: Resid) -> Resid:
        """The weighted sum of the chosen experts' outputs, without that of the shared expert."""
        return self._routed(x, x)

    def _routed(self, x: Resid, chosen_by: Resid) -> Resid:
        """The weighted sum of the outputs for `x` of the experts that the router chooses for `chosen_by`."""
        scores = self._scores(self.hook_router_logits(self.router(chosen_by)))
        choice = self._choose(scores)
        dtype = scores.dtype if self.router.is_wide else x.dtype
        weights = self.hook_router_weights(self._weights(scores, choice).to(dtype))
        choice, weights = self._with_weighted(choice, weights)
        out = self.hook_expert_out(self._run(x, choice))
        added = einsum(out.to(dtype), weights, "batch pos chosen model, batch pos chosen -> batch pos model")
        return added.to(x.dtype)

    def _scores(self, logits: Scores) -> Scores:
        logits = logits if logits.dtype in WIDE else logits.float()
        return logits.softmax(dim=-1) if self.settings.router == "softmax" else logits.sigmoid()

    def _choose(self, scores: Scores) -> Choice:
        """The experts of the highest scores, after the hooks."""
        ranked, s = self._with_bias(scores.detach()), self.settings
        if s.n_chosen_groups < s.n_groups:
            groups = ranked.unflatten(-1, (s.n_groups, -1))
            of_groups = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(dim=-1)
            best = of_groups.topk(s.n_chosen_groups, dim=-1).indices
            left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, best, False)
            ranked = groups.masked_fill(left_out[..., None], float("-inf")).flatten(-2)
        best = ranked.topk(s.n_chosen, dim=-1).indices
        choice: Tensor = self.hook_experts(best)
        if choice is not best and bool(((choice < 0) | (choice >= s.n_experts)).any()):
            raise ValueError(
                f"a hook at {self.hook_experts.name!r} chose experts {int(choice.min())} to {int(choice.max())}; the "
                f"layer has experts 0 to {s.n_experts - 1}"
            )
        return choice

    def _weights(self, scores: Scores, choice: Choice) -> Scores:
        """What multiplies each expert's output; 0 where it is not chosen."""
        s = self.settings
        weights = self._with_bias(scores) if s.bias_weighs else scores
        weights = weights * torch.zeros_like(weights).scatter(-1, choice, 1.0)
        if s.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if self.router.expert_scale is not None:
            weights = weights * beside(self.router.expert_scale, weights)
        return weights * s.scale

    def _with_bias(self, scores: Scores) -> Scores:
        return scores if self.router.bias is None else scores + beside(self.router.bias, scores)

    def _with_weighted(self, choice: Choice, weights: Scores) -> tuple[Choice, Float[Tensor, "batch pos chosen"]]:
        """The experts that run at each position, and the weight of each: the chosen ones, and others with a weight."""
        chosen = weights.gather(-1, choice)
        if is_hooked(self.hook_experts):
            again = (choice[..., None] == choice[..., None, :]).tril(diagonal=-1).any(dim=-1)
            chosen = chosen.masked_fill(again, 0)
        if not is_hooked(self.hook_router_weights):
            return choice, chosen
        others = weights * torch.ones_like(weights).scatter(-1, choice, 0)
        n_others = int((others != 0).sum(dim=-1).max()) if others.numel() else 0
        more = (others != 0).to(torch.uint8).topk(n_others, dim=-1).indices
        return torch.cat([choice, more], dim=-1), torch.cat([chosen, others.gather(-1, more)], dim=-1)

    def _run(self, x: Resid, choice: Choice) -> Float[Tensor, "batch pos chosen d_model"]:
        """The output of each expert at the positions that chose it."""
        rows, n_chosen = x.flatten(0, 1), choice.shape[-1]
        by_expert = choice.flatten().argsort(stable=True)
        counts = choice.flatten().bincount(minlength=len(self.experts)).tolist()
        outputs = [rows[:0]]
        for expert, entries in zip(self.experts, by_expert.split(counts), strict=True):
            hooked = hooked_modules(expert)
            index = entries // n_chosen
            if any(not isinstance(module, StepHookPoint) for module in hooked):
                # Torch's hooks on modules have no positions, so that they are given all of them.
                outputs.append(expert(x).flatten(0, 1)[index])
            elif hooked or len(index):
                outputs.append(expert(rows[index], SelectedPositions(index, x.shape[0], x.shape[1])))
        in_order: Tensor = torch.cat(outputs)[by_expert.argsort()]
        by_position: Tensor = in_order.unflatten(0, choice.shape)
        return by_position


class ExpertsBesideMLP(MixtureOfExperts):
    """Experts and a dense MLP, each with norms of its own, whose sum is one output (Gemma 4).

    The dense MLP, `shared`, reads what the block's norm gives; the experts and the router read the stream, each through
    a norm of its own. `hook_shared_out` and `hook_experts_out` [batch pos d_model] are the outputs of both after their
    norms. The norm of the block on the sum comes after them, so that neither is what the block adds to its stream.
    """

    reads_stream = True

    def __init__(
        self,
        settings: Experts,
        router: Router,
        experts: Sequence[GatedMLP],
        shared: GatedMLP,
        norms: tuple[RMSNorm, RMSNorm, RMSNorm],
    ) -> None:
        super().__init__(settings, router, experts, shared)
        self.experts_norm, self.experts_post, self.shared_post = norms
        self.hook_experts_out, self.hook_shared_out = StepHookPoint(), StepHookPoint()

    def forward(self, x: Resid, stream: Resid) -> Resid:  # type: ignore[override]
        assert self.shared is not None
        dense = self.hook_shared_out(self.shared_post(self.shared(x)))
        routed: Tensor = self.hook_experts_out(self.experts_post(self._routed(self.experts_norm(stream), stream)))
        return dense + routed
