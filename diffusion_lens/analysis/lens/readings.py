"""States of the residual stream, and what they become under the last norm and the unembedding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.batching import logits_at_once, reserved, row_bytes
from diffusion_lens.analysis.inputs import ForwardPass
from diffusion_lens.analysis.lens.canvases import NOTHING
from diffusion_lens.analysis.lens.translators import Translators
from diffusion_lens.analysis.ranking import Ranking
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.hook_names import FwdHooks, resid_post, resid_pre
from diffusion_lens.model.hook_points import anything_listens
from diffusion_lens.model.transformer import DiffusionTransformer

# Tensors of the vocabulary's size that are alive at once in `LayerReading.of`, those of the last layer included.
VOCABULARY_TENSORS = 6
# Those that turn log scores into logits of p(x_0), in addition.
TENSORS_OF_SCORES = 3


@dataclass(frozen=True, eq=False)
class LayerReading:
    """What one layer predicts at some rows.

    Attributes:
        top_tokens: Int[entry top], the likeliest tokens.
        top_probabilities: Float[entry top], their probabilities.
        entropy: Float[entry] in nats.
        kl: Float[entry] in nats, KL(last layer || this layer).
        target_ranks: Int[entry target], rank of each target; -1 where there is none.
        target_probabilities: Float[entry target], its probability; NaN where there is none.
    """

    top_tokens: Int[Tensor, "entry top"]
    top_probabilities: Float[Tensor, "entry top"]
    entropy: Float[Tensor, "entry"]
    kl: Float[Tensor, "entry"]
    target_ranks: Int[Tensor, "entry target"]
    target_probabilities: Float[Tensor, "entry target"]

    @classmethod
    def of(
        cls,
        ranking: Ranking,
        last: Float[Tensor, "entry d_vocab_out"],
        targets: Int[Tensor, "entry target"],
        top_k: int,
    ) -> "LayerReading":
        """The reading of one layer's logits.

        Args:
            last: Log probabilities of the last layer.
            targets: Tokens whose rank and probability are read; -1 for none.
        """
        log_p = ranking.log_probabilities
        top, some, is_absent = ranking.top(top_k), targets.clamp(min=0), targets == NOTHING
        return cls(
            top_tokens=top,
            top_probabilities=ranking.probability(top),
            entropy=-(log_p.exp() * log_p).sum(dim=-1),
            kl=divergence(last, log_p),
            target_ranks=ranking.rank(some).masked_fill(is_absent, NOTHING),
            target_probabilities=ranking.probability(some).masked_fill(is_absent, float("nan")),
        )


def divergence(
    last: Float[Tensor, "entry d_vocab_out"], log_p: Float[Tensor, "entry d_vocab_out"]
) -> Float[Tensor, "entry"]:
    """KL(last || p) of log probabilities in nats."""
    return (last.exp() * (last - log_p)).sum(dim=-1)


def stream_point(layer: int, n_layers: int) -> str:
    """The hook point of a layer's state: the stream that enters a block, or after the last block."""
    return resid_pre(layer) if layer < n_layers else resid_post(n_layers - 1)


def require_plain_readout(model: DiffusionTransformer, fwd_hooks: FwdHooks) -> None:
    """Raise a `ValueError` if a hook changes what the last norm or the unembedding does."""
    with model.hooks(fwd_hooks=list(fwd_hooks)):
        hooked = any(map(anything_listens, (model.ln_final, model.unembed)))
    if hooked:
        raise ValueError(
            "a hook is attached to ln_final or unembed, through which the lens reads every layer, while the network "
            "applies them to the last one only: remove it, or attach it to the stream after the last block, "
            f"{resid_post(model.cfg.n_layers - 1)!r}"
        )


def states_of(
    network_input: ForwardPass,
    entries: tuple[Int[Tensor, "entry"], Int[Tensor, "entry"]],
    layers: Sequence[int],
    fwd_hooks: FwdHooks = (),
) -> dict[int, Float[Tensor, "entry d_model"]]:
    """The states of some rows at each layer, from one forward pass; see `ForwardPass.states`."""
    names = {layer: stream_point(layer, network_input.model.cfg.n_layers) for layer in layers}
    states = network_input.states(names.values(), entries, fwd_hooks)
    return {layer: states[name] for layer, name in names.items()}


def logits_of(
    model: DiffusionTransformer, states: Float[Tensor, "entry d_model"], sigma: Float[Tensor, "entry"] | None = None
) -> Tensor:
    """Float[entry d_vocab_out], logits of states that are read as if the network ended there.

    Args:
        sigma: Noise of which a network that is told the time hears; by default that of the step or of `at_time`.
    """
    logits: Tensor = model.unembed(model.normalized(states, sigma))
    return logits


def read(
    model: DiffusionTransformer,
    states: Mapping[int, Float[Tensor, "entry d_model"]],
    layers: Sequence[int],
    targets: Int[Tensor, "entry target"],
    top_k: int,
    translators: Translators | None,
    present: Int[Tensor, "entry"] | None = None,
) -> list[LayerReading]:
    """The reading of each layer.

    Args:
        states: States of the layers, and of the last one.
        present: Token on the canvas at each position that is predicted.
    """
    last = Ranking.of(model, logits_of(model, states[model.cfg.n_layers]), present).log_probabilities

    def reading(layer: int) -> LayerReading:
        # A function, so that nothing of the vocabulary's size outlives the reading of its layer.
        seen = states[layer] if translators is None else translators.translate(states[layer], layer)
        return LayerReading.of(Ranking.of(model, logits_of(model, seen), present), last, targets, top_k)

    return [reading(layer) for layer in layers]


@dataclass(frozen=True)
class Budget:
    """How many states one pass stores, and how many of them are unembedded together.

    Attributes:
        entries_per_pass: Number of rows whose states are stored in one pass.
        entries_at_once: Number of rows whose logits are computed together.
    """

    entries_per_pass: int
    entries_at_once: int

    @classmethod
    def of(
        cls,
        cfg: DiffusionConfig,
        n_states: int,
        shape: tuple[int, int],
        max_bytes: int,
        entries: int,
    ) -> "Budget":
        """The division of `max_bytes`.

        Args:
            n_states: Number of layers whose states are stored.
            shape: Rows and positions of a pass.
            entries: Number of rows that are read in a pass, at most.

        Raises:
            ValueError: The memory does not suffice for one pass that reads one row.
        """
        wide = max(cfg.dtype.itemsize, 4)
        stored = n_states * cfg.d_model * cfg.dtype.itemsize
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
            at_once = min(at_once, logits_at_once(cfg, wide))
        return cls(entries_per_pass, max(1, at_once))
