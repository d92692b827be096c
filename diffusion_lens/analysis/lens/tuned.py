"""The tuned lens (Belrose et al. 2023, arXiv 2303.08112): its translators, their fit, and what both lenses read.

Both lenses read canvases, each position in the row of the network that predicts it, and the logits of its states.
`Translators` map the states of each layer to such as the last norm and the unembedding can read: the affine map h + h W
+ b, which begins as the identity, is fitted so that the lens through it predicts what the network predicts. The loss is
the mean of

    KL(p_last || softmax(W_U ln(h + h W + b)))

over positions that the network predicts; norm and unembedding are frozen. The paper fits causal models on texts. A
masked diffusion model is fitted on texts whose tokens are masked at random, at noise levels that cover (0, 1] evenly as
in its training, and by default at the masked positions only. A time-conditioned network gets that of each canvas.
Unlike the paper, which uses SGD with momentum, the maps are fitted by Adam, with a learning rate that falls linearly to
0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.engine.answer import clean_logits
from diffusion_lens.analysis.engine.batching import CPU_LOGITS_BYTES, reserved, row_bytes
from diffusion_lens.analysis.engine.inputs import CleanTexts, ForwardPass, Inputs, TextsOrRuns, padded, texts_or_runs
from diffusion_lens.hooks.names import FwdHooks, resid_entering, resid_post
from diffusion_lens.model.config import UNREACHED, DiffusionConfig, reached
from diffusion_lens.model.hook_points import hooked_modules
from diffusion_lens.model.loss import noised
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer, normalized
from diffusion_lens.records.identity import begins_run, identity_of
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance, shown_model
from diffusion_lens.settings import Whole, at_least, not_negative, one_of, pick_indices, whole_number, whole_numbers
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


@begins_run
@torch.inference_mode(False)
@torch.no_grad()
def fit_translators(
    model: DiffusionTransformer,
    texts: TextsOrRuns,
    *,
    layers: Iterable[Whole] | None = None,
    mask: str = "masked",
    iterations: Whole = 250,
    batch_size: Whole = 32,
    learning_rate: float = 1e-3,
    seed: Whole = 0,
    attention_mask: Tensor | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> Translators:
    """Fit the maps of a tuned lens, for `logit_lens(..., translators=)`.

    The model stays as it is: no parameter of it gets a gradient. Hooks that are attached to it act, outside the loop.

    Args:
        model: Model, of either variant.
        texts: Texts, facts (prompt and answer), Int[batch pos] tokens without [MASK], or trajectories, whose canvases
            are read as they were recorded. Use texts like those that the model was trained on.
        layers: Layers to fit, from 0 to `n_layers - 1`; layer l is the state that enters block l. By default all.
        mask: Positions of a masked diffusion model: "masked", or "all". Under uniform noise "masked" are those that may
            be noise: all of a text, and of a trajectory those that its steps write. A causal model is fitted at all
            positions that it predicts.
        iterations: Number of updates.
        batch_size: Number of canvases of an update, sampled with replacement, each under new noise.
        learning_rate: Learning rate of the first update.
        seed: Seed of samples and noise.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        max_bytes: Memory to use in addition to the weights.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: There is nothing to fit on, the tokens contain [MASK], a setting is out of range, a hook is attached
            to the last norm or the unembedding, the budget is too small, a loss is not a finite number, or texts are
            given inside `model.at_time`.
    """
    cfg = model.cfg
    one_of("masked", "all")("mask", mask)
    picked = pick_indices("layers", None if layers is None else whole_numbers("layers", layers), cfg.n_layers)
    n_iterations, n_rows = at_least(1, "iterations", iterations), at_least(1, "batch_size", batch_size)
    rate, seed = not_negative("learning_rate", learning_rate), whole_number("seed", seed)
    require_plain_readout(model)
    data = _Data.of(model, texts, attention_mask, masked_only=mask == "masked")
    generator = torch.Generator().manual_seed(seed)

    # 1. Start from the identity.
    wide = torch.promote_types(cfg.dtype, torch.float32)
    weights = [torch.zeros(cfg.d_model, cfg.d_model, dtype=wide, device=cfg.device) for _ in picked]
    biases = [torch.zeros(cfg.d_model, dtype=wide, device=cfg.device) for _ in picked]
    parameters = [x.requires_grad_() for x in (*weights, *biases)]
    optimizer = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, n_iterations)
    # The maps, their gradients, and two moments of Adam.
    left = max_bytes - 4 * sum(x.nbytes for x in parameters)
    beside_clean = isinstance(data.source, CleanTexts) and cfg.causal_block is not None
    n_read = data.tokens.shape[1] * (2 if beside_clean else 1)
    budget = Budget.of(cfg, len(picked) + 1, (n_rows, n_read), left, n_rows * n_read)

    # 2. Descend on new samples in every iteration.
    losses = []
    for iteration in tqdm(range(n_iterations), desc="translators", unit="update", disable=not progress):
        loss = _gradients(data.sample(n_rows, generator), picked, (weights, biases), budget)
        if not bool(loss.isfinite().all()):
            raise ValueError(
                f"a loss is not a finite number at iteration {iteration}: the states or logits of the model are not "
                f"finite, or learning_rate={rate} is too large"
            )
        losses.append(loss)
        optimizer.step()
        schedule.step()
    record = {
        "mask": mask,
        "iterations": n_iterations,
        "batch_size": n_rows,
        "learning_rate": rate,
        "seed": seed,
        "canvases": len(data.tokens),
        "inputs": data.source.describe(),
        **provenance(model, cfg),
    }
    w, b = (torch.stack([x.detach().cpu() for x in maps]) for maps in (weights, biases))
    return Translators(w, b, picked, torch.stack(losses), record)


def _gradients(
    sample: "_Sample", layers: list[int], maps: tuple[list[Tensor], list[Tensor]], budget: Budget
) -> Float[Tensor, "layer"]:
    """Set the gradients of the maps at the entries of a sample, and return the mean KL of each layer."""
    network_input, model = sample.network_input, sample.network_input.model
    for parameter in (*maps[0], *maps[1]):
        parameter.grad = torch.zeros_like(parameter)
    losses, n = torch.zeros(len(layers), dtype=torch.float64), len(sample.rows)
    *points, last_point = [resid_entering(layer, model.cfg.n_layers) for layer in (*layers, model.cfg.n_layers)]
    for stored in torch.arange(n).split(budget.entries_per_pass):
        rows = (sample.batch[stored], sample.rows[stored])
        states = network_input.states([*points, last_point], rows)
        for block in torch.arange(len(stored)).split(budget.entries_at_once):
            present, batch = sample.present[stored[block]], sample.batch[stored[block]]
            sigma = None if network_input.sigma is None else network_input.sigma[batch]
            last = _log_probabilities(model, states[last_point][block], present, sigma)
            for i, (point, weight, bias) in enumerate(zip(points, *maps, strict=True)):
                with torch.enable_grad():
                    log_p = _log_probabilities(model, translated(states[point][block], weight, bias), present, sigma)
                    loss = divergence(last, log_p).sum() / n
                    # Only with respect to the maps: no parameter of the model gets a gradient.
                    gradients = torch.autograd.grad(loss, [weight, bias])
                for parameter, gradient in zip((weight, bias), gradients, strict=True):
                    assert parameter.grad is not None
                    parameter.grad += gradient
                losses[i] += loss.detach().cpu()
    return losses


def _log_probabilities(
    model: DiffusionTransformer,
    states: Float[Tensor, "entry d_model"],
    present: Int[Tensor, "entry"],
    sigma: Float[Tensor, "entry"] | None,
) -> Float[Tensor, "entry d_vocab_out"]:
    logits = clean_logits(model, logits_of(model, states, sigma), present, sigma)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


@dataclass(frozen=True, eq=False)
class _Sample:
    """A pass on some canvases, and the entries at which they are read."""

    network_input: ForwardPass
    batch: Int[Tensor, "entry"]  # index in the batch
    rows: Int[Tensor, "entry"]
    present: Int[Tensor, "entry"]  # token at the position that an entry predicts; -1 after a text that grows


@dataclass(frozen=True, eq=False)
class _Data:
    """Texts, which are noised at random unless they grow, or canvases of trajectories, to fit on."""

    model: DiffusionTransformer
    tokens: Tokens
    real: PosMask
    open: PosMask  # positions that may be masked, or noise
    source: CleanTexts | Inputs
    masked_only: bool  # whether only masked positions, or under uniform noise open ones, are read
    sigma: Float[Tensor, "batch"] | None = None  # noise of each canvas, where the network is given the time

    @classmethod
    def of(
        cls, model: DiffusionTransformer, texts: TextsOrRuns, attention_mask: Tensor | None, *, masked_only: bool
    ) -> "_Data":
        """The data of a call."""
        masked_only = masked_only and not model.cfg.is_autoregressive
        source = texts_or_runs(model, texts, attention_mask)
        if isinstance(source, CleanTexts):
            model.time.require_own("fit_translators")
            tokens, real = (x.to(model.cfg.device) for x in padded(model, source.tokens))
            return cls(model, tokens, real, real, source, masked_only)
        tokens, real, open_, sigma = _of_trajectories(source)
        if masked_only and model.cfg.has_mask:
            has_masks = ((tokens == model.cfg.blank) & real).any(dim=1)
            tokens, real, open_ = tokens[has_masks], real[has_masks], open_[has_masks]
            sigma = None if sigma is None else sigma[has_masks]
            if not len(tokens):
                raise ValueError("no canvas of the trajectories has a masked position")
        return cls(model, tokens, real, open_, source, masked_only, sigma)

    def sample(self, n_rows: int, generator: torch.Generator) -> _Sample:
        """A pass on some canvases, which are read at one entry at least."""
        cfg = self.model.cfg
        while True:
            chosen = torch.randint(len(self.tokens), (n_rows,), generator=generator).to(self.tokens.device)
            tokens, real = self.tokens[chosen], self.real[chosen]
            read = ForwardPass(self.model, tokens, real, sigma=None if self.sigma is None else self.sigma[chosen])
            if not cfg.is_autoregressive and isinstance(self.source, CleanTexts):
                # Every position, as in training, also the prompt of a fact.
                noisy, p = noised(self.model, tokens, generator=generator)
                read = ForwardPass.under_noise(self.model, tokens, torch.where(real, noisy, tokens), real, p[:, 0])
                tokens = read.tokens
            known = (
                torch.cat([tokens, torch.full_like(tokens[:, :1], NOTHING)], dim=1) if cfg.is_autoregressive else tokens
            )
            canvases = Canvases([read], None, known)
            positions = canvases.pick_positions(None)
            rows = canvases.rows(positions)[0]
            is_read = rows != NOTHING
            if self.masked_only:
                hidden = tokens == cfg.blank if cfg.has_mask else self.open[chosen]
                is_read = is_read & hidden[:, positions]
            if bool(is_read.any()):
                batch = is_read.nonzero(as_tuple=True)[0]
                return _Sample(canvases.canvases[0], batch, rows[is_read], known[:, positions][is_read])


def _of_trajectories(inputs: Inputs) -> tuple[Tokens, PosMask, PosMask, Float[Tensor, "batch"] | None]:
    """The canvases of trajectories, one row each (of a text that grows, only the last canvas), their real positions,
    those that were not given, and where the network is given the time, the noise of each canvas."""
    rows, present, written, sigmas, model = [], [], [], [], inputs.model
    if model.cfg.self_conditioning:
        raise ValueError(
            f"a step of {model.cfg.model_name!r} also reads what the step before predicted, and translators learn from "
            "canvases alone: read runs with logit_lens"
        )
    for trajectory in inputs.trajectories:
        canvases, real = (x.to(model.cfg.device) for x in (trajectory.canvases, trajectory.real))
        canvases = canvases[-1:] if model.cfg.is_autoregressive else canvases[:-1]
        rows += list(model.cfg.readable(canvases).flatten(0, 1))
        inside = real & reached(canvases)
        present += list(inside.flatten(0, 1))
        written += list((inside & ~trajectory.given.to(real.device)).flatten(0, 1))
        for step in range(trajectory.first_step, trajectory.first_step + trajectory.n_steps):
            if model.cfg.time_conditioning:
                sigmas.append(torch.tensor(trajectory.state_at(step).sigma).view(-1).expand(canvases.shape[1]))
    inside, open_ = (pad_sequence(of_rows, batch_first=True) for of_rows in (present, written))
    return padded(model, rows)[0], inside, open_, torch.cat(sigmas).to(model.cfg.device) if sigmas else None
