"""Multi-head attention with grouped key/value heads and rotary positions.

The fused kernel runs unless somebody listens at `hook_attn_scores` or `hook_pattern`; then both are written out.
Looking changes nothing, to the bit: unless a hook replaced or wrote into what it saw, the fused kernel's values are
used on, with the gradient of the written-out ones.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion_lens.model.attention_patterns import Visibility
from diffusion_lens.model.hook_points import StepHookPoint, is_hooked
from diffusion_lens.model.kv_cache import LayerKeyValues
from diffusion_lens.model.logit_rows import PickedRows
from diffusion_lens.model.mlp import bias_of
from diffusion_lens.model.norm import RMSNorm
from diffusion_lens.model.rotary import Tables, rotate, tables_at
from diffusion_lens.shapes import Resid

Heads = Float[Tensor, "batch pos head d_head"]
KeyHeads = Float[Tensor, "batch key kv_head d_head"]


@dataclass(frozen=True)
class AttentionContext:
    """What the layers of one forward pass share: rotary tables and who sees whom."""

    rotary: Tables
    visibility: Visibility
    use_attn_result: bool = False

    def at(self, rows: Int[Tensor, "batch selected"], n_key: int) -> "AttentionContext":
        """What queries at some rows only need to know."""
        return replace(self, rotary=tables_at(self.rotary, rows), visibility=self.visibility.at(rows, n_key))


class Attention(nn.Module):
    """Hook points carry [batch pos head d_head]; `hook_k` and `hook_v` carry the key/value heads.

    `hook_attn_scores` and `hook_pattern` are [batch head query key]. `hook_result` [batch pos head d_model] passes only
    when the config's `use_attn_result` is on. Where heads have norms of their own, `hook_q` and `hook_k` come before
    them.
    """

    def __init__(
        self,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        o: nn.Linear,
        d_head: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.d_head = d_head
        self.q_norm = nn.Identity() if q_norm is None else q_norm
        self.k_norm = nn.Identity() if k_norm is None else k_norm
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
        x: Resid,
        context: AttentionContext,
        past: LayerKeyValues | None = None,
        picked: PickedRows | None = None,
    ) -> Float[Tensor, "batch query d_model"]:
        """Attend; with `picked` only those rows ask, and only theirs come out."""
        q = self.hook_q(self.q(x if picked is None else picked.of(x)).unflatten(-1, (-1, self.d_head)))
        k = self.hook_k(self.k(x).unflatten(-1, (-1, self.d_head)))
        v = self.hook_v(self.v(x).unflatten(-1, (-1, self.d_head)))
        k = self.hook_rot_k(rotate(self.k_norm(k), context.rotary))
        if past is not None:
            k, v = past.extend(k, v)
        asking = context if picked is None else context.at(picked.grid, k.shape[1])
        q = self.hook_rot_q(rotate(self.q_norm(q), asking.rotary))
        mixed = _fused(q, k, v, asking.visibility)
        if is_hooked(self.hook_attn_scores) or is_hooked(self.hook_pattern):
            mixed = self._written_out(q, k, v, asking.visibility, mixed)
        z = self.hook_z(mixed)
        if context.use_attn_result:
            result = self.hook_result(einsum(z, self.W_O, "batch pos head d, head d model -> batch pos head model"))
            summed: Tensor = result.sum(dim=2) + self.b_O
            return summed
        out: Tensor = self.o(z.flatten(2))
        return out

    def _written_out(self, q: Heads, k: KeyHeads, v: KeyHeads, visibility: Visibility, fused: Heads) -> Heads:
        shared_by = q.shape[2] // k.shape[2]
        keys, values = (x.repeat_interleave(shared_by, dim=2).transpose(1, 2) for x in (k, v))
        scores = q.transpose(1, 2) @ keys.mT / self.d_head**0.5
        allowed = visibility.dense(q.shape[1], k.shape[1], q.device)
        scores, scores_kept = _show(self.hook_attn_scores, scores.masked_fill(~allowed, float("-inf")))
        pattern = torch.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1).to(values.dtype)
        pattern, pattern_kept = _show(self.hook_pattern, pattern)
        mixed = (pattern @ values).transpose(1, 2)
        if not (scores_kept and pattern_kept):
            return mixed
        kept: Heads = _ValueOf.apply(mixed, fused)
        return kept


def _by_head(weight: Tensor, d_head: int) -> Tensor:
    """The rows of a projection, head by head; a view."""
    return weight.view(-1, d_head, *weight.shape[1:])


def _fused(q: Heads, k: KeyHeads, v: KeyHeads, visibility: Visibility) -> Heads:
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visibility.allowed,
        is_causal=visibility.causal and visibility.allowed is None,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def _show(point: nn.Module, x: Tensor) -> tuple[Tensor, bool]:
    """`x` after the hooks, and whether they left it as it was. Many write in place, so its values are compared."""
    before = x.detach().clone()
    seen = point(x)
    return seen, seen is x and torch.equal(before, x)


class _ValueOf(torch.autograd.Function):
    """The second tensor's value with the first one's gradient."""

    @staticmethod
    def forward(ctx: Any, differentiated: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
