"""The MLPs: gated, down(silu(gate x) · up x) (SwiGLU, Shazeer 2020, arXiv 2002.05202), or plain, down(gelu(up x))."""

from abc import ABC
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion_lens.model.hook_points import StepHookPoint, is_hooked
from diffusion_lens.shapes import Resid


@dataclass(frozen=True)
class SelectedPositions:
    """The positions of a batch at which an MLP runs.

    Attributes:
        index: Int[entry], rows of the flattened batch.
        n_batch, n_pos: Size of the batch.
    """

    index: Int[Tensor, "entry"]
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


class GatedMLP(MLP):
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
        through = _all_positions if at is None else at.through
        gate = F.silu(through(self.hook_pre, self.gate(x)))
        out: Tensor = self.down(through(self.hook_post, gate * through(self.hook_pre_linear, self.up(x))))
        return out


def _all_positions(point: nn.Module, x: Resid) -> Resid:
    activation: Tensor = point(x)
    return activation


class PlainMLP(MLP):
    """`hook_pre` is the up-projection before GELU (by tanh), `hook_post` is after it (ROME's key)."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.up = up
        self.down = down
        self.hook_pre = StepHookPoint()
        self.hook_post = StepHookPoint()

    @property
    def readers(self) -> tuple[nn.Linear, ...]:
        """The projections that read the normalised stream."""
        return (self.up,)

    def tl_parameters(self) -> dict[str, Tensor]:
        """The matrices under TransformerLens's names."""
        return {"W_in": self.W_in, "W_out": self.W_out}

    def forward(self, x: Resid) -> Resid:
        post = self.hook_post(F.gelu(self.hook_pre(self.up(x)), approximate="tanh"))
        out: Resid = self.down(post)
        return out


def bias_of(linear: nn.Linear) -> Tensor:
    """The bias of a projection; zeros if it has none."""
    if linear.bias is None:
        return linear.weight.new_zeros(linear.out_features)
    return linear.bias
