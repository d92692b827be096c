"""One pre-norm block: x + attn(ln1 x), then x + mlp(ln2 x).

A mixture of experts may have a shared expert, which runs at every position beside those that the router chooses. Its
output is a term of its own: x + mlp(ln2 x) + shared(ln2 x).
"""

from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens.model.attention import Attention, AttentionContext
from diffusion_lens.model.experts import MixtureOfExperts
from diffusion_lens.model.hook_points import NO_POSITIONS, StepHookPoint
from diffusion_lens.model.kv_cache import LayerKeyValues
from diffusion_lens.model.logit_rows import LogitRows
from diffusion_lens.model.mlp import GatedMLP, PlainMLP
from diffusion_lens.model.modulation import Modulation, gated, normed
from diffusion_lens.model.norm import Norm
from diffusion_lens.shapes import Resid


class Block(nn.Module):
    """The residual stream passes `hook_resid_pre`, `hook_resid_mid` and `hook_resid_post`, all [batch pos d_model].

    `hook_attn_out` and `hook_mlp_out` are what is added to it. In a network that is told the time, that is after the
    gate, and `hook_modulation` [batch 6 d_model] is at shift, scale and gate of the attention, then of the MLP. A block
    has `hook_shared_out` only if it has a shared expert.

    Args:
        modulation: Map from the vector of the time to these six vectors, in a network that is told the time.
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
    ) -> None:
        super().__init__()
        self.ln1 = ln1
        self.attn = attn
        self.ln2 = ln2
        self.mlp = mlp
        self.hook_resid_pre = StepHookPoint()
        self.hook_attn_out = StepHookPoint()
        self.hook_resid_mid = StepHookPoint()
        self.hook_mlp_in = StepHookPoint()
        self.hook_mlp_out = StepHookPoint()
        if shared_expert(mlp) is not None:
            self.hook_shared_out = StepHookPoint()
        self.hook_resid_post = StepHookPoint()
        if modulation is not None:
            self.modulation = modulation
            self.hook_modulation = StepHookPoint(NO_POSITIONS)

    def forward(
        self,
        resid: Resid,
        context: AttentionContext,
        past: LayerKeyValues | None = None,
        rows: LogitRows | None = None,
    ) -> Float[Tensor, "batch query d_model"]:
        """Run the block. With `rows`, the output is computed for those rows only."""
        resid_pre = self.hook_resid_pre(resid)
        of_attention, of_mlp = self.modulations(context.condition)
        # A module in the place of the attention takes no modulation.
        more = () if of_attention is None else (of_attention,)
        inputs = self._attention_inputs(resid_pre, context, rows, of_attention)
        attn_out = self.hook_attn_out(self.attn(*inputs, context, past, rows, *more))
        resid_mid = self.hook_resid_mid((resid_pre if rows is None else rows.gather(resid_pre)) + attn_out)
        mlp_in = self.hook_mlp_in(resid_mid.clone()) if context.optional.use_hook_mlp_in else resid_mid
        normalized = normed(self.ln2, mlp_in, of_mlp)
        added = resid_mid + self.hook_mlp_out(gated(self.mlp(normalized), of_mlp))
        if (shared := shared_expert(self.mlp)) is not None:
            added = added + self.hook_shared_out(shared(normalized))
        resid_post: Tensor = self.hook_resid_post(added)
        return resid_post

    def modulations(
        self, condition: Float[Tensor, "batch d_cond"] | None
    ) -> tuple[Modulation | None, Modulation | None]:
        """What the time does to the attention and to the MLP; `None` in a network that is not told the time."""
        if condition is None:
            return None, None
        six = self.hook_modulation(self.modulation(condition).unflatten(-1, (6, -1)))
        return Modulation(*six[:, :3].unbind(1)), Modulation(*six[:, 3:].unbind(1))

    def _attention_inputs(
        self, resid_pre: Resid, context: AttentionContext, rows: LogitRows | None, modulation: Modulation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What queries, keys and values read: the normalised stream, or copies of it for each head."""
        # Rows are selected only in a block where nothing is hooked, which needs no copies.
        if not context.optional.copies_by_head or rows is not None:
            shared = normed(self.ln1, resid_pre, modulation)
            return shared, shared, shared
        q, k, v = (self.ln1.without_hooks(copy, modulation) for copy in self.attn.copies(resid_pre, context))
        return q, k, v


def shared_expert(mlp: nn.Module) -> GatedMLP | None:
    """The expert that runs at every position, if there is one."""
    return mlp.shared if isinstance(mlp, MixtureOfExperts) else None
