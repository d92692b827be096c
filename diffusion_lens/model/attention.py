"""Multi-head attention with grouped key/value heads: which positions see each other, their keys and values, the layer.

A pattern (`AttentionPattern`) says which key positions each query position sees. Padding is handled there and nowhere
else. A `KeyValueCache` keeps keys and values of earlier positions, so that a model processes each filled block once.

The fused kernel computes attention. Scores and pattern are also computed explicitly where a hook is attached at
`hook_attn_scores` or `hook_pattern`. A hook that only reads them does not change the output by a single bit: unless a
hook returned or modified a tensor, the output has the values of the fused kernel and the gradient of the explicit
computation.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from diffusion_lens.model.hook_points import StepHookPoint, is_hooked
from diffusion_lens.model.hooking import OptionalHooks
from diffusion_lens.model.inputs import LogitRows, rows_at
from diffusion_lens.model.layers import Modulation, RMSNorm, beside, bias_of, gated, rms_normalized
from diffusion_lens.model.positions import ScoreBias, Tables, rotate
from diffusion_lens.model.shapes import PosMask, Resid
from diffusion_lens.settings.arguments import kind_of
from weight_conversion import Context, Variant

Heads = Float[Tensor, "batch pos head d_head"]
KVHeads = Float[Tensor, "batch pos kv_head d_head"]
KeyHeads = Float[Tensor, "batch key kv_head d_head"]
Copies = Float[Tensor, "batch pos head d_model"]
KeyCopies = Float[Tensor, "batch pos kv_head d_model"]


@dataclass(frozen=True)
class Visibility:
    """The attention pattern of one forward pass: `allowed` is true where a query sees a key; `None` if the fused kernel
    needs no mask, because every position sees all positions or, with `causal`, all earlier ones."""

    allowed: Bool[Tensor, "#batch 1 query key"] | None
    causal: bool

    def dense(self, n_query: int, n_key: int, device: torch.device) -> Bool[Tensor, "#batch 1 query key"]:
        """The pattern as a mask, for scores that hooks see."""
        if self.allowed is not None:
            return self.allowed
        full = torch.ones(1, 1, n_query, n_key, dtype=torch.bool, device=device)
        return full.tril() if self.causal else full

    def at(self, rows: Int[Tensor, "batch selected"], n_key: int) -> "Visibility":
        """The pattern of some query rows only."""
        if self.allowed is not None:
            return Visibility(rows_at(self.allowed[:, 0], rows)[:, None], causal=False)
        if self.causal:
            allowed = torch.arange(n_key, device=rows.device) <= rows[..., None]
            return Visibility(allowed[:, None], causal=False)
        return self


@dataclass(frozen=True)
class AttentionPattern:
    """Attention by blocks: a position sees its own block of positions and all earlier ones.

    A `block_size` of 1 is causal attention; `None` is one block for the whole text, which is bidirectional attention.
    """

    block_size: int | None
    first_alone: ClassVar[bool] = False  # whether the first token sees only itself, whatever the others see

    @staticmethod
    def of(variant: Variant, window: int | None = None) -> "AttentionPattern":
        """The pattern of a kind of model, in layers with this sliding window."""
        if variant.counts_from_prompt:
            return FromPrompt(variant.block_size, variant.block_context, window)
        return CausalFirst(None) if variant.causal_first else AttentionPattern(variant.block_size)

    @property
    def causal(self) -> bool:
        return self.block_size == 1

    def visibility(
        self,
        n_pos: int,
        device: torch.device,
        real: PosMask | None,
        n_past: int = 0,
        origin: Int[Tensor, "batch"] | None = None,
    ) -> Visibility:
        """The pattern of `n_pos` queries, after `n_past` earlier positions, whose keys come from the cache.

        Padding is seen only by itself, because the softmax of a row that sees nothing is undefined.

        Args:
            real: Bool[batch pos], false at padding; `None` without padding.
            origin: Int[batch], the position of each row from which on blocks are counted, where it is not the first
                token; by default it is behind the last position.
        """
        if real is None and self.block_size is None and (n_past or not self.first_alone):
            return Visibility(None, causal=False)
        if n_past:
            together = torch.arange(n_past + n_pos, device=device)
            return Visibility(None if n_pos == 1 else self.between(together)[None, None, n_past:], causal=False)
        if real is None:
            causal = self.block_size == 1
            if causal or (self.block_size is not None and self.block_size >= n_pos):
                return Visibility(None, causal)
            return Visibility(self.between(torch.arange(n_pos, device=device))[None, None], causal=False)
        itself = torch.eye(n_pos, dtype=torch.bool, device=device)
        # Blocks are counted from the first real token, so that padding on the left shifts none of them.
        allowed = self.between(real.long().cumsum(dim=1) - 1) & real[:, None, :]
        return Visibility((allowed | itself)[:, None], self.causal)

    def beside_clean(self, n_pos: int, device: torch.device, real: PosMask | None) -> Visibility:
        """The pattern of a noisy text that is followed by the clean text, as models of blocks are trained.

        A noisy position sees the noisy positions of its block and the clean ones of earlier blocks. A clean position
        sees clean ones, as far as a finished text is seen. Sources: Arriola et al. 2025, BD3LM, arXiv 2503.09573;
        JetAstra/SDAR `block_attn_mask`. `n_pos` is the length of each of the two.
        """
        assert self.block_size is not None
        numbers = torch.arange(n_pos, device=device)[None] if real is None else real.long().cumsum(dim=1) - 1
        blocks = numbers.div(self.block_size, rounding_mode="floor")
        query, key = blocks[:, :, None], blocks[:, None, :]
        finished = self._finished(numbers, blocks)
        noisy = torch.cat([key == query, key < query], dim=2)
        clean = torch.cat([torch.zeros_like(finished), finished], dim=2)
        allowed = torch.cat([noisy, clean], dim=1)
        if real is not None:
            itself = torch.eye(2 * n_pos, dtype=torch.bool, device=device)
            allowed = (allowed & real.repeat(1, 2)[:, None, :]) | itself
        return Visibility(allowed[:, None], causal=False)

    def between(self, positions: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch query key"]:
        """The pattern among real tokens with these numbers; its last axes are queries and keys."""
        if self.block_size is None:
            return torch.ones_like(positions, dtype=torch.bool)[..., None].expand(*positions.shape, positions.shape[-1])
        return self._finished(positions, positions.div(self.block_size, rounding_mode="floor"))

    def _finished(
        self, numbers: Int[Tensor, "*batch pos"], blocks: Int[Tensor, "*batch pos"]
    ) -> Bool[Tensor, "*batch query key"]:
        """The pattern among the tokens of a finished text, from their numbers and those of their blocks."""
        return blocks[..., None, :] <= blocks[..., :, None]


@dataclass(frozen=True)
class CausalFirst(AttentionPattern):
    """Bidirectional attention of all tokens but the first, which sees only itself, as in a causal model."""

    first_alone: ClassVar[bool] = True

    def between(self, positions: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch query key"]:
        return (positions[..., :, None] > 0) | (positions[..., None, :] == 0)


@dataclass(frozen=True)
class FromPrompt(AttentionPattern):
    """Attention by blocks that are counted from an origin (`model.at_block`), behind the prompt.

    Attributes:
        context: How the positions before the origin see each other: "causal", each sees earlier ones only; or "prompt",
            each sees all of them.
        window: Positions of the context that a position of it sees, itself included. A block sees as many less one
            before it, as many as the authors' cache keeps. `None` for all.
    """

    context: Context = "causal"
    window: int | None = None

    def visibility(
        self,
        n_pos: int,
        device: torch.device,
        real: PosMask | None,
        n_past: int = 0,
        origin: Int[Tensor, "batch"] | None = None,
    ) -> Visibility:
        """The context before the origin, then blocks that see all of themselves and everything before."""
        assert self.block_size is not None
        n_key = n_past + n_pos
        first = torch.full((1, 1), n_key, device=device) if origin is None else origin[:, None]
        numbers = torch.arange(n_key, device=device)[None]
        if real is not None:
            first, numbers = (real & (numbers < first)).sum(dim=1, keepdim=True), real.long().cumsum(dim=1) - 1
        blocks = (numbers - first).div(self.block_size, rounding_mode="floor").clamp(min=-1)
        query, key = blocks[:, n_past:, None], blocks[:, None, :]
        allowed = key <= query
        if self.context == "causal":
            allowed = torch.where(query < 0, numbers[:, None, :] <= numbers[:, n_past:, None], allowed)
        if self.window is not None:
            # Of the context, a position sees the last ones up to itself, a block the last ones before it.
            last = torch.where(blocks < 0, numbers, first + blocks * self.block_size)
            near = numbers[:, None, :] > (last - self.window)[:, n_past:, None]
            allowed = allowed & (near | (key == query) & (query >= 0))
        if real is not None:
            allowed = (allowed & real[:, None, :]) | torch.eye(n_pos, dtype=torch.bool, device=device)
        return Visibility(allowed[:, None], causal=False)

    def _finished(
        self, numbers: Int[Tensor, "*batch pos"], blocks: Int[Tensor, "*batch pos"]
    ) -> Bool[Tensor, "*batch query key"]:
        if self.context == "causal":
            return numbers[..., None, :] <= numbers[..., :, None]
        return super()._finished(numbers, blocks)


class LayerKeyValues:
    """Rotated keys, and values, of one layer in order of position.

    Args:
        copies: Number of copies of these rows that a pass computes, one after the other. They exist in the pass of the
            layer only: nothing is appended.
    """

    approximate = False  # whether what is stored may differ from the keys and values of the present canvas

    def __init__(
        self, keys: KeyHeads | None = None, values: KeyHeads | None = None, *, copies: int | None = None
    ) -> None:
        self.keys = keys
        self.values = values
        self.copies = copies

    @property
    def n_pos(self) -> int:
        """Number of positions stored."""
        return 0 if self.keys is None else self.keys.shape[1]

    def extend(self, keys: KVHeads, values: KVHeads) -> tuple[KeyHeads, KeyHeads]:
        """Append keys and values of new positions; returns those of all positions."""
        if self.keys is not None and self.values is not None:
            # They may have been stored on another device than that of the block.
            earlier_keys, earlier_values = self.keys.to(keys.device), self.values.to(keys.device)
            keys, values = self._joined(earlier_keys, keys), self._joined(earlier_values, values)
        if self.copies is None:
            self.keys, self.values = keys, values
        return keys, values

    def _joined(self, earlier: Float[Tensor, "row column kv_head d_head"], new: KVHeads) -> KeyHeads:
        """The positions of `earlier`, then the new ones."""
        if self.copies is None:
            return torch.cat([earlier, new], dim=1)
        by_copy = new.unflatten(0, (self.copies, -1))
        return torch.cat([earlier.expand(self.copies, -1, -1, -1, -1), by_copy], dim=2).flatten(0, 1)

    def keep(self, n_pos: int) -> None:
        """Forget the positions from `n_pos` on."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :n_pos], self.values[:, :n_pos]


class HeldKeyValues(LayerKeyValues):
    """Rotated keys, and values, of one layer at all positions of a canvas: a pass renews some, and reads the others as
    an earlier pass left them. On a bidirectional model these are approximate, because they depend on the whole canvas.

    The first pass computes all. A later one computes all positions, or only those of the renewed span.

    Attributes:
        renewed: Bool[batch pos], the positions that the next pass renews.
        start: The first position that the next pass computes.
    """

    approximate = True

    def __init__(self) -> None:
        super().__init__()
        self.renewed: PosMask | None = None
        self.start = 0

    @property
    def n_pos(self) -> int:
        """Number of positions before those that the next pass computes."""
        return self.start

    def extend(self, keys: KVHeads, values: KVHeads) -> tuple[KeyHeads, KeyHeads]:
        """Renew keys and values; returns those of all positions."""
        if self.keys is not None and self.values is not None:
            keys, values = self._renewed(self.keys, keys), self._renewed(self.values, values)
        self.keys, self.values = keys, values
        return keys, values

    def _renewed(self, held: KeyHeads, new: KVHeads) -> KeyHeads:
        assert self.renewed is not None
        if new.shape[1] < held.shape[1]:
            return torch.cat([held[:, : self.start], new, held[:, self.start + new.shape[1] :]], dim=1)
        return torch.where(self.renewed[..., None, None].to(new.device), new, held)


class KeyValueCache:
    """A `LayerKeyValues` for each layer. Pass it as `past_kv_cache` with only the new tokens as input."""

    def __init__(self, n_layers: int) -> None:
        self.layers = [LayerKeyValues() for _ in range(n_layers)]

    @property
    def n_pos(self) -> int:
        """Number of positions stored."""
        return self.layers[0].n_pos

    @classmethod
    def of(cls, cache: "KeyValueCache | TransformerLensKeyValueCache") -> "KeyValueCache":
        """The cache itself, or one with what a cache of TransformerLens has."""
        if isinstance(cache, KeyValueCache):
            return cache
        if not hasattr(cache, "entries"):
            raise TypeError(f"past_kv_cache is {kind_of(cache)}; it must be a KeyValueCache")
        own = cls(0)
        own.layers = [
            LayerKeyValues(entry.past_keys, entry.past_values) if entry.past_keys.shape[1] else LayerKeyValues()
            for entry in cache.entries
        ]
        return own

    def write_to(self, cache: Any) -> None:
        """Let the entries of a cache of TransformerLens that are not frozen have what this one has."""
        for layer, entry in zip(self.layers, cache.entries, strict=True):
            if not entry.frozen:
                entry.past_keys, entry.past_values = layer.keys, layer.values
        if not cache.frozen:
            mask = cache.previous_attention_mask
            cache.append_attention_mask(mask.new_ones(len(mask), self.n_pos - mask.shape[1]))

    def keep(self, n_pos: int) -> None:
        """Forget the positions from `n_pos` on."""
        for layer in self.layers:
            layer.keep(n_pos)


class HeldCache(KeyValueCache):
    """A `HeldKeyValues` for each layer."""

    def __init__(self, n_layers: int) -> None:
        self.held = [HeldKeyValues() for _ in range(n_layers)]
        self.layers = list(self.held)

    def renew(self, positions: PosMask, start: int) -> None:
        """Let the next pass, which computes positions from `start` on, renew these ones."""
        for layer in self.held:
            layer.renewed, layer.start = positions, start


@dataclass(frozen=True)
class AttentionContext:
    """Positions, attention pattern and optional hook points, which all layers of one forward pass share.

    What the network or the pass does not have is `None`.
    """

    visibility: Visibility
    rotary: Tables | None = None  # by which queries and keys are rotated
    query_factors: Float[Tensor, "#batch query 1 1"] | None = None  # by which rotated queries are multiplied
    bias: ScoreBias | None = None  # added to the scores, -inf where a query may not see a key
    optional: OptionalHooks | None = None  # hook points that pass on request
    condition: Float[Tensor, "batch d_cond"] | None = None  # the vector of the time
    is_open: PosMask | None = None  # the positions of open blocks, where a network differs there
    in_global: "AttentionContext | None" = None  # the context of global layers, where it differs

    def at(self, rows: Int[Tensor, "batch selected"], n_key: int) -> "AttentionContext":
        """The context for queries at some rows only."""
        rotary, bias, factors = self.rotary, self.bias, self.query_factors
        if rotary is not None:
            cos, sin = rotary
            shared = cos.dim() == 3  # by all sequences
            rotary = (cos[rows], sin[rows]) if shared else (rows_at(cos, rows), rows_at(sin, rows))
        if bias is not None:
            bias = rows_at(bias.transpose(1, 2), rows).transpose(1, 2)
        if factors is not None:
            factors = rows_at(factors, rows)
        visibility = self.visibility.at(rows, n_key)
        return replace(self, visibility=visibility, rotary=rotary, query_factors=factors, bias=bias)

    def on(self, device: torch.device) -> "AttentionContext":
        """The context for a block on this device."""
        visibility = replace(self.visibility, allowed=_on(self.visibility.allowed, device))
        rotary = None if self.rotary is None else (self.rotary[0].to(device), self.rotary[1].to(device))
        return replace(
            self,
            visibility=visibility,
            rotary=rotary,
            query_factors=_on(self.query_factors, device),
            bias=_on(self.bias, device),
            condition=_on(self.condition, device),
            is_open=_on(self.is_open, device),
            in_global=None if self.in_global is None else self.in_global.on(device),
        )


class Attention(nn.Module):
    """Hook points carry [batch pos head d_head]; `hook_k` and `hook_v` carry the key/value heads.

    `hook_attn_scores` and `hook_pattern` are [batch head query key]. `hook_result`, `hook_attn_in`, `hook_q_input`,
    `hook_k_input` and `hook_v_input` [batch pos head d_model] pass only under their flags (`OptionalHooks`). Where
    heads have norms of their own, `hook_q` and `hook_k` come before them, and `hook_v` after its norm. Where queries,
    keys and values are clipped, `hook_v` comes after that, and `hook_q` and `hook_k` before. `hook_rot_q` carries the
    query that meets the keys: rotated, and scaled where the network scales queries by position.
    """

    # Only where queries, keys and values are clipped is it an attribute: records describe objects by their attributes.
    clip: float | None = None
    # Likewise: the divisor of the scores where it is not the root of `d_head`, and the epsilon of the norm of values.
    scale: float | None = None
    v_norm_eps: float | None = None
    is_global = False  # whether it reads the context of global layers

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
        scale: float | None = None,
        v_norm_eps: float | None = None,
        is_global: bool = False,
    ) -> None:
        super().__init__()
        self.is_global = is_global
        for name, value in (("clip", clip), ("scale", scale), ("v_norm_eps", v_norm_eps)):
            if value is not None:
                setattr(self, name, value)
        self.q, self.k, self.v, self.o = q, k, v, o
        self.d_head = d_head
        self.q_norm, self.k_norm = q_norm, k_norm
        self.hook_attn_in = StepHookPoint()
        self.hook_q_input, self.hook_k_input, self.hook_v_input = (StepHookPoint() for _ in range(3))
        self.hook_q, self.hook_k, self.hook_v = (StepHookPoint() for _ in range(3))
        self.hook_rot_q, self.hook_rot_k = StepHookPoint(), StepHookPoint()
        self.hook_attn_scores, self.hook_pattern = StepHookPoint(pos_dim=2), StepHookPoint(pos_dim=2)
        self.hook_z, self.hook_result = StepHookPoint(), StepHookPoint()

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
        """Compute attention, with `rows` for those queries only; inputs are the normalised stream, or copies of it."""
        q, k, v = self._projected(q_input if rows is None else rows.gather(q_input), k_input, v_input)
        v = self.clipped(v) if self.v_norm_eps is None else rms_normalized(v, self.v_norm_eps)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.clip is not None:
            q, k = self.clipped(q), self.clipped(k)
        k = self.hook_rot_k(k if context.rotary is None else rotate(k, context.rotary))
        if past is not None:
            k, v = past.extend(k, v)
        if rows is not None:
            context = context.at(rows.grid, k.shape[1])
        if context.rotary is not None:
            q = rotate(q, context.rotary)
        q = self.hook_rot_q(q if context.query_factors is None else q * context.query_factors.to(q.dtype))
        mask = context.visibility.allowed if context.bias is None else context.bias.to(q.dtype)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=context.visibility.causal and mask is None,
            scale=None if self.scale is None else 1 / self.scale,
            enable_gqa=bool(q.shape[2] != k.shape[2]),  # a tensor while torch.jit traces
        ).transpose(1, 2)
        if is_hooked(self.hook_attn_scores) or is_hooked(self.hook_pattern):
            mixed = self._explicit(q, k, v, context, mixed)
        z = self.hook_z(mixed)
        if context.optional is not None and context.optional.use_attn_result:
            result = einsum(z, beside(self.W_O, z), "batch pos head d, head d model -> batch pos head model")
            summed: Tensor = self.hook_result(gated(result, modulation)).sum(dim=2)
            return summed + gated(beside(self.b_O, summed).expand(len(summed), 1, -1), modulation)
        out: Tensor = self.o(z.flatten(2))
        return out if modulation is None else gated(out, modulation)

    def copies(self, resid_pre: Resid, context: AttentionContext) -> tuple[Copies, KeyCopies, KeyCopies]:
        """A copy of the residual stream for each head that reads it: for queries, keys and values."""

        def copy(heads: int) -> Tensor:
            return resid_pre.unsqueeze(2).repeat(1, 1, heads, 1)

        n_heads, n_kv_heads = (linear.out_features // self.d_head for linear in (self.q, self.k))
        if context.optional is not None and context.optional.use_attn_in:
            shared = self.hook_attn_in(copy(n_heads))
            return shared, shared, shared
        keys, values = copy(n_kv_heads), copy(n_kv_heads)
        return self.hook_q_input(copy(n_heads)), self.hook_k_input(keys), self.hook_v_input(values)

    @property
    def divisor(self) -> float:
        """What products of queries and keys are divided by."""
        return self.d_head**0.5 if self.scale is None else self.scale

    def clipped(self, x: Heads | KeyHeads) -> Heads | KeyHeads:
        """Queries, keys or values within the bound of this network, if it has one."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def _projected(
        self,
        q_input: Float[Tensor, "batch query d_model"] | Copies,
        k_input: Resid | KeyCopies,
        v_input: Resid | KeyCopies,
    ) -> list[Tensor]:
        """Queries, keys and values of the stream, or of one copy of it for each head."""
        projected = []
        for linear, x in ((self.q, q_input), (self.k, k_input), (self.v, v_input)):
            if x.dim() == 3:
                flat = linear(x)
                heads = flat.view(*flat.shape[:-1], flat.shape[-1] // self.d_head, self.d_head)
            else:
                weight = _by_head(beside(linear.weight, x), self.d_head)
                heads = einsum(x, weight, "batch pos head model, head d model -> batch pos head d")
                heads = heads + _by_head(beside(bias_of(linear), heads), self.d_head)
            projected.append(heads)
        return projected

    def _explicit(self, q: Heads, k: KeyHeads, v: KeyHeads, context: AttentionContext, fused: Heads) -> Heads:
        """Attention with scores and pattern passing their hook points."""
        queries_per_key = q.shape[2] // k.shape[2]
        keys, values = (x.repeat_interleave(queries_per_key, dim=2).transpose(1, 2) for x in (k, v))
        scores = q.transpose(1, 2) @ keys.mT / self.divisor
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
