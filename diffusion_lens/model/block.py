"""One pre-norm block: x + attn(ln1 x), then x + mlp(ln2 x).

A mixture of experts may have a shared expert, which runs at every position beside those that the router chooses. Its
output is a term of its own: x + mlp(ln2 x) + shared(ln2 x).

In some networks the outputs pass norms of their own before they are added, x + ln1_post(attn(ln1 x)), and the whole
stream is multiplied by a factor at the end of the block.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens.model.attention import Attention, AttentionContext, LayerKeyValues
from diffusion_lens.model.hook_points import NO_POSITIONS, StepHookPoint
from diffusion_lens.model.inputs import LogitRows
from diffusion_lens.model.layers import Modulation, Norm, RMSNorm, beside, gated
from diffusion_lens.model.mlp import ExpertsBesideMLP, GatedMLP, MixtureOfExperts, PlainMLP
from diffusion_lens.model.shapes import Resid


class Block(nn.Module):
    """The residual stream passes `hook_resid_pre`, `hook_resid_mid` and `hook_resid_post`, all [batch pos d_model].

    `hook_attn_out` and `hook_mlp_out` are what is added to it. In a network with time conditioning, that is after the
    gate, and `hook_modulation` [batch 6 d_model] is at shift, scale and gate of the attention, then of the MLP. A block
    has `hook_shared_out` only if it has a shared expert.

    Where outputs have norms (`ln1_post`, `ln2_post`), `hook_attn_out` and `hook_mlp_out` come after them. Where the
    block ends with a factor, `hook_resid_post` comes after it: the stream is then factor · (`hook_resid_mid` +
    `hook_mlp_out`).

    Args:
        modulation: Map from the vector of the time to these six vectors, in a network with time conditioning.
        posts: Norms of the outputs of attention and MLP, if they have any.
        scaled: Whether the block ends with a factor: `scale_open` [1] in the open block, `scale_context` [1] elsewhere.
    """

    # For TransformerLens's logit lens: a block's output is one residual stream, not a stack of several.
    hook_out_is_single_residual_stream = True

    mlp: GatedMLP | PlainMLP | MixtureOfExperts

    def __init__(
        self,
        ln1: Norm,
        attn: Attention,
        ln2: Norm,
        mlp: GatedMLP | PlainMLP | MixtureOfExperts,
        modulation: nn.Linear | None = None,
        posts: tuple[RMSNorm, RMSNorm] | None = None,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = ln1, attn, ln2, mlp
        if posts is not None:
            self.ln1_post, self.ln2_post = posts
        if scaled:
            self.scale_context, self.scale_open = (nn.Parameter(torch.empty(1, device="meta")) for _ in range(2))
        self.hook_resid_pre, self.hook_attn_out, self.hook_resid_mid = (StepHookPoint() for _ in range(3))
        self.hook_mlp_in, self.hook_mlp_out = StepHookPoint(), StepHookPoint()
        if shared_expert(mlp) is not None:
            self.hook_shared_out = StepHookPoint()
        self.hook_resid_post = StepHookPoint()
        if modulation is not None:
            self.modulation = modulation
            self.hook_modulation = StepHookPoint(NO_POSITIONS)

    def forward(
        self, resid: Resid, context: AttentionContext, past: LayerKeyValues | None = None, rows: LogitRows | None = None
    ) -> Float[Tensor, "batch query d_model"]:
        """Run the block. With `rows`, the output is computed for those rows only."""
        resid_pre = self.hook_resid_pre(resid)
        if self.attn.is_global and context.in_global is not None:
            context = context.in_global
        optional, condition = context.optional, context.condition
        # 1. Attention. A module in its place, or in that of a norm, takes no modulation.
        of_attention, of_mlp = (None, None) if condition is None else self.modulations(condition)
        if optional is not None and optional.copies_by_head and rows is None:
            q, k, v = (self.ln1.without_hooks(copy, of_attention) for copy in self.attn.copies(resid_pre, context))
        else:  # Rows are selected only in a block where nothing is hooked, which needs no copies.
            q = k = v = self.ln1(resid_pre) if of_attention is None else self.ln1(resid_pre, of_attention)
        more = () if of_attention is None else (of_attention,)
        attn_out = self.attn(q, k, v, context, past, rows, *more)
        attn_out = self.hook_attn_out(self.ln1_post(attn_out) if "ln1_post" in self._modules else attn_out)
        resid_mid = self.hook_resid_mid((resid_pre if rows is None else rows.gather(resid_pre)) + attn_out)
        # 2. MLP or experts.
        mlp_in = self.hook_mlp_in(resid_mid.clone()) if optional is not None and optional.use_hook_mlp_in else resid_mid
        normalized = self.ln2(mlp_in) if of_mlp is None else self.ln2(mlp_in, of_mlp)
        mlp_out = self.mlp(normalized, mlp_in) if isinstance(self.mlp, ExpertsBesideMLP) else self.mlp(normalized)
        if "ln2_post" in self._modules:
            mlp_out = self.ln2_post(mlp_out)
        added = resid_mid + self.hook_mlp_out(mlp_out if of_mlp is None else gated(mlp_out, of_mlp))
        if "hook_shared_out" in self._modules and (shared := shared_expert(self.mlp)) is not None:
            added = added + self.hook_shared_out(shared(normalized))
        if "scale_open" in self._parameters:
            added = added * self._scale(context, rows, added)
        resid_post: Tensor = self.hook_resid_post(added)
        return resid_post

    def _scale(self, context: AttentionContext, rows: LogitRows | None, x: Tensor) -> Float[Tensor, "batch query 1"]:
        """The factor of each position at the end of the block."""
        assert context.is_open is not None
        is_open = context.is_open if rows is None else context.is_open.gather(1, rows.grid)
        return torch.where(is_open[..., None], beside(self.scale_open, x), beside(self.scale_context, x))

    def modulations(self, condition: Float[Tensor, "batch d_cond"]) -> tuple[Modulation, Modulation]:
        """What the time does to the attention and to the MLP."""
        six = self.hook_modulation(self.modulation(condition).unflatten(-1, (6, -1)))
        return Modulation(*six[:, :3].unbind(1)), Modulation(*six[:, 3:].unbind(1))


def shared_expert(mlp: nn.Module) -> GatedMLP | None:
    """The expert that runs at every position as a part of the block, if there is one."""
    return mlp.shared if isinstance(mlp, MixtureOfExperts) and not mlp.reads_stream else None
