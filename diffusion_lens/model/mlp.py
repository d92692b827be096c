"""The gated MLP (SwiGLU, Shazeer 2020, arXiv 2002.05202): down(silu(gate x) · up x)."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion_lens.model.hook_points import StepHookPoint
from diffusion_lens.shapes import Resid


class GatedMLP(nn.Module):
    """`hook_pre` is the gate before silu, `hook_pre_linear` the up-projection, `hook_post` the product (ROME's key)."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate = gate
        self.up = up
        self.down = down
        self.hook_pre = StepHookPoint()
        self.hook_pre_linear = StepHookPoint()
        self.hook_post = StepHookPoint()

    @property
    def W_gate(self) -> Float[Tensor, "d_model d_mlp"]:
        return self.gate.weight.T

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        return self.up.weight.T

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        return self.down.weight.T

    @property
    def b_gate(self) -> Float[Tensor, "d_mlp"]:
        return bias_of(self.gate)

    @property
    def b_in(self) -> Float[Tensor, "d_mlp"]:
        return bias_of(self.up)

    @property
    def b_out(self) -> Float[Tensor, "d_model"]:
        return bias_of(self.down)

    def forward(self, x: Resid) -> Resid:
        post = self.hook_post(F.silu(self.hook_pre(self.gate(x))) * self.hook_pre_linear(self.up(x)))
        out: Resid = self.down(post)
        return out


def bias_of(linear: nn.Linear) -> Tensor:
    """The bias of a projection; zeros if it has none."""
    if linear.bias is None:
        return linear.weight.new_zeros(linear.out_features)
    return linear.bias
