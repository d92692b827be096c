"""What the lenses read: canvases, the row of the network at which each position is read, and the logits of its states.

`Translators`: an affine map for each layer, to states that the last norm and the unembedding can read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from diffusion_lens import plots
from diffusion_lens.analysis.engine.batching import CPU_LOGITS_BYTES, reserved, row_bytes
from diffusion_lens.analysis.engine.inputs import ForwardPass, Inputs
from diffusion_lens.hooks.names import FwdHooks, resid_post
from diffusion_lens.model.config import UNREACHED, DiffusionConfig
from diffusion_lens.model.hook_points import hooked_modules
from diffusion_lens.model.transformer import DiffusionTransformer, normalized
from diffusion_lens.records.identity import identity_of
from diffusion_lens.records.results import PicturedResult, Saved, Table, shown_model
from diffusion_lens.settings import Whole, pick_indices
from diffusion_lens.settings.figures import styled

NOTHING = -1


@dataclass(frozen=True, eq=False)
class Canvases:
    """The canvases of one input, a pass for each step or a single one.

    `known` has the token at each position that can be predicted, as far as it is known, otherwise -1. After a text that
    grows, there is one position more than the canvas has.
    """

    canvases: list[ForwardPass]
    steps: list[int] | None  # of each canvas; `None` for an input that is no trajectory
    known: Int[Tensor, "batch _"]

    @classmethod
    def of(cls, inputs: Inputs, steps: Iterable[Whole] | None = None, branch: str = "conditional") -> "Canvases":
        """The canvases of a trajectory, or the single one of any other input."""
        trajectory, picked, cfg = inputs.trajectory, inputs.pick_steps(steps), inputs.model.cfg
        canvases: list[ForwardPass] = []
        for step in [None] if picked is None else picked:
            canvases += inputs.at(step, branch)
        final = canvases[0].tokens if trajectory is None else trajectory.tokens.to(cfg.device)
        known = final.masked_fill(~(canvases[0].real & cfg.writable(final)), NOTHING)
        if trajectory is None and cfg.is_autoregressive:
            # The last row predicts the token after the text.
            known = torch.cat([known, torch.full_like(known[:, :1], NOTHING)], dim=1)
        for row, query in enumerate(canvases[0].queries or ()):
            for position, token in zip(query.answer_positions, query.answer_tokens, strict=True):
                if position < known.shape[1]:
                    known[row, position] = token
        return cls(canvases, picked, known)

    def pick_positions(self, positions: Iterable[Whole] | None) -> list[int]:
        """The positions to read, all that can be predicted by default."""
        model, n_pos = self.canvases[0].model, self.known.shape[1]
        places = torch.arange(n_pos)
        is_predicted = model.readout.rows(places) < places if model.cfg.is_autoregressive else places >= 0
        if positions is None:
            predicted: list[int] = places[is_predicted].tolist()
            return predicted
        picked = pick_indices("positions", positions, n_pos)
        if unread := [position for position in picked if not is_predicted[position]]:
            raise ValueError(f"nothing precedes position {unread[0]}, so a causal model has no prediction there")
        return picked

    def rows(self, positions: list[int]) -> Int[Tensor, "canvas batch selected"]:
        """Row that predicts the token at each position of every canvas; -1 at padding and where no text is before."""
        readout, width = self.canvases[0].model.readout, self.known.shape[1]
        selected = torch.tensor(positions, device=self.known.device)
        tables = torch.full((len(self.canvases), *self.known.shape), NOTHING, device=self.known.device)
        for canvas, table in zip(self.canvases, tables, strict=True):
            present, predicted = canvas.present, table > NOTHING
            # A text that grows is predicted from the tokens before it, all other canvases from the whole canvas.
            grows = canvas.model.cfg.is_autoregressive
            predicted[:, selected] = present[:, readout.rows(selected) if grows else selected]
            real, block = (
                pad(canvas.real, (0, width - present.shape[1])),
                None if canvas.step is None else canvas.step.block,
            )
            table[predicted] = readout.locate(predicted, real, block)[1]
        return tables[..., selected]

    def on_canvas(self, positions: list[int]) -> Int[Tensor, "step batch selected"]:
        """The token at each position of every canvas; -1 where there is none."""
        tokens = torch.stack([canvas.tokens for canvas in self.canvases])
        wide: Tensor = pad(tokens, (0, self.known.shape[1] - tokens.shape[2]), value=UNREACHED)
        return wide[..., positions]


@dataclass(frozen=True, eq=False)
class Translators(PicturedResult, Saved):
    """The affine maps of a tuned lens, h + h W + b; with W = 0 and b = 0, the lens is the direct one.

    Columns of the data frame: iteration, layer, loss.

    Attributes:
        weights: Float[layer d_model d_model], W of each layer.
        biases: Float[layer d_model], b of each layer.
        layers: Number of each layer: layer l is the state that enters block l.
        losses: Float[iteration layer], mean KL in nats of each batch, before its update.
        record: Settings of the fit, model, hash of the weights, hooks, versions.
    """

    KIND = "translators"
    SHOWS = "the loss of the translator of each layer, by iteration of the fit"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"model": str}
    AXES = (("layer", "layers"),)

    weights: Float[Tensor, "layer d_model d_model"]
    biases: Float[Tensor, "layer d_model"]
    layers: list[int]
    losses: Float[Tensor, "iteration layer"]
    record: dict[str, Any] = field(repr=False)

    def translate(self, states: Float[Tensor, "*rest d_model"], layer: int) -> Float[Tensor, "*rest d_model"]:
        """The states of a layer, translated in float32 at least; those of the last layer are returned unchanged."""
        if layer not in self.layers:
            return states
        index = self.layers.index(layer)
        return translated(states, self.weights[index].to(states.device), self.biases[index].to(states.device))

    def require_for(self, model: DiffusionTransformer, layers: Sequence[int]) -> None:
        """Raise a `ValueError` unless the maps were fitted on this model's weights, for all these layers."""
        if self.record["weights_sha256"] != identity_of(model).weights_sha256:
            raise ValueError(
                f"the translators were fitted on other weights ({self.record['model']!r}) than those of "
                f"{model.cfg.model_name!r} now, whose states they do not translate: fit_translators(model, ...)"
            )
        if missing := [layer for layer in layers if layer not in (*self.layers, model.cfg.n_layers)]:
            raise ValueError(
                f"the translators were fitted for the layers {self.layers}, and not for {missing}: fit these too, or "
                f"read layers={[*self.layers, model.cfg.n_layers]}"
            )

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The loss of each layer by iteration; returns the matplotlib axes."""
        curves = {f"layer {layer}": losses for layer, losses in zip(self.layers, self.losses.T, strict=True)}
        title = title or f"{shown_model(self.record)}: fit of the translators"
        return plots.curves_by_iteration(curves, "iteration", "mean KL (nats)", ax, title)

    def _table(self) -> Table:
        return Table.of_cells({"iteration": range(len(self.losses)), "layer": self.layers}, {"loss": self.losses})

    def __repr__(self) -> str:
        return f"Translators({shown_model(self.record)}, layers {self.layers}, {len(self.losses)} iterations)"


def translated(
    states: Float[Tensor, "*rest d_model"], weight: Float[Tensor, "d_model d_model"], bias: Float[Tensor, "d_model"]
) -> Float[Tensor, "*rest d_model"]:
    """h + h W + b, in the dtype of the states."""
    wide = states.to(torch.promote_types(states.dtype, weight.dtype))
    return (wide + wide @ weight.to(wide.dtype) + bias.to(wide.dtype)).to(states.dtype)


def divergence(
    last: Float[Tensor, "entry d_vocab_out"], log_p: Float[Tensor, "entry d_vocab_out"]
) -> Float[Tensor, "entry"]:
    """KL(last || p) of log probabilities in nats."""
    return (last.exp() * (last - log_p)).sum(dim=-1)


def require_plain_readout(model: DiffusionTransformer, fwd_hooks: FwdHooks = ()) -> None:
    """Raise a `ValueError` if a hook changes what the last norm or the unembedding does."""
    with model.hooks(fwd_hooks=list(fwd_hooks)):
        if hooked_modules(model.ln_final) or hooked_modules(model.unembed):
            raise ValueError(
                "a hook is attached to ln_final or unembed, through which the lens reads every layer, while the "
                "network applies them to the last one only: remove it, or attach it to the stream after the last "
                f"block, {resid_post(model.cfg.n_layers - 1)!r}"
            )


def logits_of(
    model: DiffusionTransformer, states: Float[Tensor, "entry d_model"], sigma: Float[Tensor, "entry"] | None = None
) -> Tensor:
    """Float[entry d_vocab_out], logits of states that are read as if the network ended there.

    A time-conditioned network gets the noise `sigma`, by default that of the step or of `at_time`.
    """
    logits: Tensor = model.unembed(normalized(model, states, sigma))
    return logits


# Tensors of the vocabulary's size that are alive at once in the reading of a layer, those of the last layer included,
# and those that turn log scores into logits of p(x_0) in addition.
VOCABULARY_TENSORS, TENSORS_OF_SCORES = 6, 3


@dataclass(frozen=True)
class Budget:
    """How many rows' states one pass stores, and how many rows' logits are computed together."""

    entries_per_pass: int
    entries_at_once: int

    @classmethod
    def of(cls, cfg: DiffusionConfig, n_states: int, shape: tuple[int, int], max_bytes: int, entries: int) -> "Budget":
        """The division of `max_bytes` between the states of `n_states` layers and logits, for passes of a shape (rows,
        positions) that read at most so many entries. Memory for one pass that reads one row is required."""
        wide = max(cfg.dtype.itemsize, 4)
        stored = n_states * cfg.sizes.d_model * cfg.dtype.itemsize
        n_tensors = VOCABULARY_TENSORS + TENSORS_OF_SCORES * (cfg.head == "log_scores")
        head = reserved(cfg, n_tensors * cfg.d_vocab_out * wide)
        one_pass = reserved(cfg, shape[0] * row_bytes(cfg, shape[1], 0))
        # States are stored during the pass and unembedded after it.
        left = max_bytes - max(one_pass, head)
        if left < stored:
            raise ValueError(
                f"max_bytes leaves {max(max_bytes, 0):,} bytes for the passes of the lens, and a pass that reads one "
                f"row takes {max(one_pass, head) + stored:,}: give more, or fewer rows at once"
            )
        entries_per_pass = max(1, min(left // stored, max_bytes // 2 // stored, entries))
        at_once = (max_bytes - entries_per_pass * stored) // head
        if cfg.is_on_cpu:
            at_once = min(at_once, CPU_LOGITS_BYTES // (cfg.d_vocab_out * wide))
        return cls(entries_per_pass, max(1, at_once))
