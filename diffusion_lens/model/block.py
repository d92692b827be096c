"""One pre-norm block: x + attn(ln1 x), then x + mlp(ln2 x).

A mixture of experts may have a shared expert, which runs at every position beside those that the router chooses. Its
output is a term of its own: x + mlp(ln2 x) + shared(ln2 x).
"""

from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens.model.attention import Attention, AttentionContext
from diffusion_lens.model.experts import MixtureOfExperts
from diffusion_lens.model.hook_points import StepHookPoint
from diffusion_lens.model.kv_cache import LayerKeyValues
from diffusion_lens.model.logit_rows import LogitRows
from diffusion_lens.model.mlp import GatedMLP
from diffusion_lens.model.norm import RMSNorm
from diffusion_lens.shapes import Resid


class Block(nn.Module):
    """The residual stream passes `hook_resid_pre`, `hook_resid_mid` and `hook_resid_post`, all [batch pos d_model].

    A block has `hook_shared_out` only if it has a shared expert.
    """

    # For TransformerLens's logit lens: a block's output is one residual stream, not a stack of several.
    hook_out_is_single_residual_stream = True

    mlp: GatedMLP | MixtureOfExperts

    def __init__(self, ln1: RMSNorm, attn: Attention, ln2: RMSNorm, mlp: GatedMLP | MixtureOfExperts) -> None:
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

    def forward(
        self,
        resid: Resid,
        context: AttentionContext,
        past: LayerKeyValues | None = None,
        rows: LogitRows | None = None,
    ) -> Float[Tensor, "batch query d_model"]:
        """Run the block. With `rows`, the output is computed for those rows only."""
        resid_pre = self.hook_resid_pre(resid)
        attn_out = self.hook_attn_out(self.attn(*self._attention_inputs(resid_pre, context, rows), context, past, rows))
        resid_mid = self.hook_resid_mid((resid_pre if rows is None else rows.gather(resid_pre)) + attn_out)
        mlp_in = self.hook_mlp_in(resid_mid.clone()) if context.optional.use_hook_mlp_in else resid_mid
        normalized = self.ln2(mlp_in)
        added = resid_mid + self.hook_mlp_out(self.mlp(normalized))
        if (shared := shared_expert(self.mlp)) is not None:
            added = added + self.hook_shared_out(shared(normalized))
        resid_post: Tensor = self.hook_resid_post(added)
        return resid_post

    def _attention_inputs(
        self, resid_pre: Resid, context: AttentionContext, rows: LogitRows | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What queries, keys and values read: the normalised stream, or copies of it for each head."""
        # Rows are selected only in a block where nothing is hooked, which needs no copies.
        if not context.optional.copies_by_head or rows is not None:
            shared = self.ln1(resid_pre)
            return shared, shared, shared
        q, k, v = map(self.ln1.without_hooks, self.attn.copies(resid_pre, context))
        return q, k, v


def shared_expert(mlp: nn.Module) -> GatedMLP | None:
    """The expert that runs at every position, if there is one."""
    return mlp.shared if isinstance(mlp, MixtureOfExperts) else None
