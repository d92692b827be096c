"""Multi-head attention with grouped key/value heads.

The fused kernel computes attention. Scores and pattern are also computed explicitly where a hook is attached at
`hook_attn_scores` or `hook_pattern`. A hook that only reads them does not change the output by a single bit: unless a
hook returned or modified a tensor, the output has the values of the fused kernel and the gradient of the explicit
computation.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion_lens.model.attention_patterns import Visibility
from diffusion_lens.model.hook_points import StepHookPoint, is_hooked
from diffusion_lens.model.kv_cache import LayerKeyValues
from diffusion_lens.model.linear import beside
from diffusion_lens.model.logit_rows import LogitRows
from diffusion_lens.model.mlp import bias_of
from diffusion_lens.model.modulation import Modulation, gated
from diffusion_lens.model.norm import RMSNorm
from diffusion_lens.model.optional_hooks import OptionalHooks
from diffusion_lens.model.positions import ScoreBias, Tables
from diffusion_lens.model.rotary import rotate, tables_at
from diffusion_lens.shapes import Resid

Heads = Float[Tensor, "batch pos head d_head"]
KeyHeads = Float[Tensor, "batch key kv_head d_head"]
Copies = Float[Tensor, "batch pos head d_model"]
KeyCopies = Float[Tensor, "batch pos kv_head d_model"]


@dataclass(frozen=True)
class AttentionContext:
    """Positions, attention pattern and optional hook points, which all layers of one forward pass share.

    Attributes:
        visibility: Which positions see which.
        rotary: Tables by which queries and keys are rotated; `None` if they are not.
        query_factors: Float[#batch query 1 1] by which rotated queries are multiplied; `None` if they are not.
        bias: What is added to the scores, -inf where a query may not see a key; `None` if nothing is.
        optional: Hook points that pass on request.
        condition: Vector of the time, in a network that is told it.
    """

    visibility: Visibility
    rotary: Tables | None = None
    query_factors: Float[Tensor, "#batch query 1 1"] | None = None
    bias: ScoreBias | None = None
    optional: OptionalHooks = field(default_factory=OptionalHooks)
    condition: Float[Tensor, "batch d_cond"] | None = None

    def at(self, rows: Int[Tensor, "batch selected"], n_key: int) -> "AttentionContext":
        """The context for queries at some rows only."""
        rotary = None if self.rotary is None else tables_at(self.rotary, rows)
        bias, factors = self.bias, self.query_factors
        batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
        if bias is not None:
            bias = bias.expand(rows.shape[0], -1, -1, -1).transpose(1, 2)[batch, rows].transpose(1, 2)
        if factors is not None:
            factors = factors.expand(rows.shape[0], -1, -1, -1)[batch, rows]
        visibility = self.visibility.at(rows, n_key)
        return replace(self, visibility=visibility, rotary=rotary, query_factors=factors, bias=bias)

    def on(self, device: torch.device) -> "AttentionContext":
        """The context for a block on this device."""
        visibility = replace(self.visibility, allowed=_on(self.visibility.allowed, device))
        rotary = None if self.rotary is None else (self.rotary[0].to(device), self.rotary[1].to(device))
        factors, bias, condition = (_on(each, device) for each in (self.query_factors, self.bias, self.condition))
        return AttentionContext(visibility, rotary, factors, bias, self.optional, condition)

    def turn(self, x: Heads | KeyHeads) -> Heads | KeyHeads:
        """Queries or keys at the positions of the pass."""
        return x if self.rotary is None else rotate(x, self.rotary)

    def turn_queries(self, q: Heads) -> Heads:
        """Queries at the positions of the pass, scaled by these positions where the network does so."""
        turned = self.turn(q)
        return turned if self.query_factors is None else turned * self.query_factors.to(q.dtype)


class Attention(nn.Module):
    """Hook points carry [batch pos head d_head]; `hook_k` and `hook_v` carry the key/value heads.

    `hook_attn_scores` and `hook_pattern` are [batch head query key]. `hook_result`, `hook_attn_in`, `hook_q_input`,
    `hook_k_input` and `hook_v_input` [batch pos head d_model] pass only under their flags (`OptionalHooks`). Where
    heads have norms of their own, `hook_q` and `hook_k` come before them. Where queries, keys and values are clipped,
    `hook_v` comes after that, and `hook_q` and `hook_k` before. `hook_rot_q` carries the query that meets the keys:
    rotated, and scaled where the network scales queries by position.
    """

    # Only where queries, keys and values are clipped is it an attribute: records describe objects by their attributes.
    clip: float | None = None

    def __init__(
        self,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        o: nn.Linear,
        d_head: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.d_head = d_head
        self.q_norm = nn.Identity() if q_norm is None else q_norm
        self.k_norm = nn.Identity() if k_norm is None else k_norm
        if clip is not None:
            self.clip = clip
        self.hook_attn_in = StepHookPoint()
        self.hook_q_input = StepHookPoint()
        self.hook_k_input = StepHookPoint()
        self.hook_v_input = StepHookPoint()
        self.hook_q = StepHookPoint()
        self.hook_k = StepHookPoint()
        self.hook_v = StepHookPoint()
        self.hook_rot_q = StepHookPoint()
        self.hook_rot_k = StepHookPoint()
        self.hook_attn_scores = StepHookPoint(pos_dim=2)
        self.hook_pattern = StepHookPoint(pos_dim=2)
        self.hook_z = StepHookPoint()
        self.hook_result = StepHookPoint()

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        return _by_head(self.q.weight, self.d_head).mT

    @property
    def W_K(self) -> Float[Tensor, "kv_head d_model d_head"]:
        return _by_head(self.k.weight, self.d_head).mT

    @property
    def W_V(self) -> Float[Tensor, "kv_head d_model d_head"]:
        return _by_head(self.v.weight, self.d_head).mT

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        return _by_head(self.o.weight.T, self.d_head)

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"]:
        return _by_head(bias_of(self.q), self.d_head)

    @property
    def b_K(self) -> Float[Tensor, "kv_head d_head"]:
        return _by_head(bias_of(self.k), self.d_head)

    @property
    def b_V(self) -> Float[Tensor, "kv_head d_head"]:
        return _by_head(bias_of(self.v), self.d_head)

    @property
    def b_O(self) -> Float[Tensor, "d_model"]:
        return bias_of(self.o)

    def forward(
        self,
        q_input: Resid | Copies,
        k_input: Resid | KeyCopies,
        v_input: Resid | KeyCopies,
        context: AttentionContext,
        past: LayerKeyValues | None = None,
        rows: LogitRows | None = None,
        modulation: Modulation | None = None,
    ) -> Float[Tensor, "batch query d_model"]:
        """Compute attention. With `rows`, queries and outputs are computed for those rows only.

        Args:
            q_input, k_input, v_input: The normalised residual stream, or a copy of it for each head.
            modulation: What the time does to the attention; its gate multiplies the result of every head.
        """
        q = self.hook_q(self._by_head(self.q, q_input if rows is None else rows.gather(q_input)))
        k = self.hook_k(self._by_head(self.k, k_input))
        v = self.hook_v(self.clipped(self._by_head(self.v, v_input)))
        k = self.hook_rot_k(context.turn(self.clipped(self.k_norm(k))))
        if past is not None:
            k, v = past.extend(k, v)
        query_context = context if rows is None else context.at(rows.grid, k.shape[1])
        q = self.hook_rot_q(query_context.turn_queries(self.clipped(self.q_norm(q))))
        mixed = _fused(q, k, v, query_context)
        if is_hooked(self.hook_attn_scores) or is_hooked(self.hook_pattern):
            mixed = self._explicit(q, k, v, query_context, mixed)
        z = self.hook_z(mixed)
        if context.optional.use_attn_result:
            result = einsum(z, beside(self.W_O, z), "batch pos head d, head d model -> batch pos head model")
            summed: Tensor = self.hook_result(gated(result, modulation)).sum(dim=2)
            return summed + gated(beside(self.b_O, summed).expand(len(summed), 1, -1), modulation)
        out: Tensor = self.o(z.flatten(2))
        return gated(out, modulation)

    def copies(self, resid_pre: Resid, context: AttentionContext) -> tuple[Copies, KeyCopies, KeyCopies]:
        """A copy of the residual stream for each head that reads it: for queries, keys and values."""

        def copy(heads: int) -> Tensor:
            return resid_pre.unsqueeze(2).repeat(1, 1, heads, 1)

        n_heads, n_kv_heads = (linear.out_features // self.d_head for linear in (self.q, self.k))
        if context.optional.use_attn_in:
            shared = self.hook_attn_in(copy(n_heads))
            return shared, shared, shared
        return (
            self.hook_q_input(copy(n_heads)),
            self.hook_k_input(copy(n_kv_heads)),
            self.hook_v_input(copy(n_kv_heads)),
        )

    def clipped(self, x: Heads | KeyHeads) -> Heads | KeyHeads:
        """Queries, keys or values within the bound of this network, if it has one."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def _by_head(self, linear: nn.Linear, x: Resid | Copies) -> Heads:
        """A projection of the stream, or of one copy of it for each head."""
        if x.dim() == 3:
            heads: Heads = linear(x).unflatten(-1, (-1, self.d_head))
            return heads
        weight = _by_head(beside(linear.weight, x), self.d_head)
        heads = einsum(x, weight, "batch pos head model, head d model -> batch pos head d")
        return heads + _by_head(beside(bias_of(linear), heads), self.d_head)

    def _explicit(self, q: Heads, k: KeyHeads, v: KeyHeads, context: AttentionContext, fused: Heads) -> Heads:
        """Attention with scores and pattern passing their hook points."""
        queries_per_key = q.shape[2] // k.shape[2]
        keys, values = (x.repeat_interleave(queries_per_key, dim=2).transpose(1, 2) for x in (k, v))
        scores = q.transpose(1, 2) @ keys.mT / self.d_head**0.5
        if context.bias is not None:
            scores = scores + context.bias.to(scores.dtype)
        else:
            allowed = context.visibility.dense(q.shape[1], k.shape[1], q.device)
            scores = scores.masked_fill(~allowed, float("-inf"))
        scores, scores_unchanged = _pass(self.hook_attn_scores, scores)
        pattern = torch.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1).to(values.dtype)
        pattern, pattern_unchanged = _pass(self.hook_pattern, pattern)
        mixed = (pattern @ values).transpose(1, 2)
        if not (scores_unchanged and pattern_unchanged):
            return mixed
        unchanged: Heads = _ValueOf.apply(mixed, fused)
        return unchanged


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _by_head(weight: Tensor, d_head: int) -> Tensor:
    """The rows of a projection with an axis for the heads, as a view."""
    return weight.view(-1, d_head, *weight.shape[1:])


def _fused(q: Heads, k: KeyHeads, v: KeyHeads, context: AttentionContext) -> Heads:
    mask = context.visibility.allowed if context.bias is None else context.bias.to(q.dtype)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=context.visibility.causal and mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def _pass(point: nn.Module, x: Tensor) -> tuple[Tensor, bool]:
    """`x` after the hooks at `point`, and whether it is unchanged. Values are compared, as hooks may write in place."""
    before = x.detach().clone()
    after = point(x)
    return after, after is x and torch.equal(before, x)


class _ValueOf(torch.autograd.Function):
    """The value of the second tensor with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, differentiated: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
