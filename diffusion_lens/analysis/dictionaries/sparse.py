"""`SparseDictionary`: few features that read an activation and write it, or another one.

    a = x W_enc + b_enc + m b_noise        f = a · [a > threshold]        ŷ = f W_dec + b_dec

Each feature depends on its own pre-activation a alone (JumpReLU, Rajamanoharan et al. 2024, arXiv 2407.14435), and a is
linear in x, so that what excites a feature divides exactly among the writers of x. If y is x, this is a sparse
autoencoder; if x enters an MLP and y leaves it, a transcoder (Dunefsky et al. 2024, arXiv 2406.11944), whose features
take the place of the MLP's neurons.

On a masked diffusion model what a feature means may depend on how much is masked. A conditioned dictionary has a bias
for it: m is the share of the canvas's positions that have [MASK] (compare the conditioned transcoders of arXiv
2606.15796).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens import plots
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import identity_of
from diffusion_lens.records.results import PicturedResult, Saved, Table, shown_model
from diffusion_lens.settings import warn_user
from diffusion_lens.settings.figures import styled

_WEIGHTS = ("W_enc", "b_enc", "W_dec", "b_dec", "b_noise", "threshold", "density", "losses")


@dataclass(eq=False, repr=False)
class SparseDictionary(nn.Module, PicturedResult, Saved):
    """A sparse autoencoder or a transcoder. Its tensors are buffers, which `to` moves and no optimiser changes.

    Columns of the data frame: feature, density, threshold, b_enc, b_noise.

    Attributes:
        W_enc: Float[d feature], directions that the features read.
        b_enc: Float[feature], bias of the pre-activations.
        W_dec: Float[feature d_other], directions that the features write, each of norm 1.
        b_dec: Float[d_other], bias of the output.
        b_noise: Float[feature], what the share of masked positions adds to the pre-activations; zeros unless
            conditioned.
        threshold: Float[feature], the pre-activation above which a feature is active, 0 or more.
        density: Float[feature], share of the last rows of the training at which it was active.
        losses: Float[iteration], share of the variance of a batch that is not explained, before each update.
        reads: Hook point of x.
        writes: Hook point of y; the same for an autoencoder.
        conditioned: Whether `pre` needs the share of masked positions.
        record: Settings, texts, model, hash of the weights, hooks, versions.
    """

    KIND: ClassVar[str] = "sparse dictionary"
    SHOWS: ClassVar[str] = "the share of the variance that a sparse dictionary leaves unexplained, by update"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"model": str}

    W_enc: Float[Tensor, "d feature"]
    b_enc: Float[Tensor, "feature"]
    W_dec: Float[Tensor, "feature d_other"]
    b_dec: Float[Tensor, "d_other"]
    b_noise: Float[Tensor, "feature"]
    threshold: Float[Tensor, "feature"]
    density: Float[Tensor, "feature"]
    losses: Float[Tensor, "iteration"]
    reads: str
    writes: str
    conditioned: bool
    record: dict[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        for name in _WEIGHTS:
            self.register_buffer(name, vars(self).pop(name))

    def pre(self, x: Float[Tensor, "*rest d"], share: float | Tensor | None = None) -> Float[Tensor, "*rest feature"]:
        """The pre-activations, which are linear in x.

        Args:
            x: Activations at `reads`, heads flattened.
            share: Share of the canvas's positions that have [MASK]: a number, or a tensor that broadcasts to x without
                its last axis, such as Float[batch 1]. A conditioned dictionary needs it, others ignore it.

        Raises:
            ValueError: The dictionary is conditioned, and no share is given.
        """
        pre: Tensor = x @ self.W_enc + self.b_enc
        if not self.conditioned:
            return pre
        if share is None:
            raise ValueError(
                "this dictionary is conditioned on the share of masked positions: give share=, between 0 and 1"
            )
        return pre + (share[..., None] if isinstance(share, Tensor) else share) * self.b_noise

    def activate(self, pre: Float[Tensor, "*rest feature"]) -> Float[Tensor, "*rest feature"]:
        """The features: each is its pre-activation, or 0 up to its threshold."""
        return pre.where(pre > self.threshold, 0.0)

    def encode(
        self, x: Float[Tensor, "*rest d"], share: float | Tensor | None = None
    ) -> Float[Tensor, "*rest feature"]:
        """The features of activations at `reads`; the arguments are those of `pre`."""
        return self.activate(self.pre(x, share))

    def decode(self, features: Float[Tensor, "*rest feature"]) -> Float[Tensor, "*rest d_other"]:
        """The approximation of the activation at `writes`."""
        written: Tensor = features @ self.W_dec + self.b_dec
        return written

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The share of the variance that is not explained, by update of the training. Returns the axes."""
        title = title or f"{shown_model(self.record)}: dictionary at {self.writes}"
        return plots.curves_by_iteration({"": self.losses}, "update", "variance unexplained", ax, title)

    def _table(self) -> Table:
        columns = ("density", "threshold", "b_enc", "b_noise")
        return Table({"feature": list(range(len(self.b_enc))), **{name: getattr(self, name) for name in columns}})

    def __repr__(self) -> str:
        points = self.reads if self.reads == self.writes else f"{self.reads} -> {self.writes}"
        return (
            f"SparseDictionary({points} of {shown_model(self.record)}, {len(self.b_enc)} features, "
            f"L0 {self.density.sum().item():.1f}, dead {(self.density == 0).float().mean().item():.0%})"
        )


def warn_of_other_weights(model: DiffusionTransformer, dictionary: Any) -> None:
    """Warn if a dictionary was trained on another network than this one, of which it explains less."""
    if not isinstance(dictionary, SparseDictionary):
        return
    if dictionary.record.get("weights_sha256") not in (None, identity_of(model).weights_sha256):
        warn_user(
            f"the dictionary at {dictionary.writes!r} was trained on {dictionary.record['model']!r}, with other "
            f"weights than those of {model.cfg.model_name!r} now, of which it may explain less"
        )
