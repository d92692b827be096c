"""What a sampler decides in a step: the positions to reveal, their tokens, and its random numbers.

A `Sampler` plans the positions (`Plan`), from equal steps of time by default. Its `Proposal` chooses tokens: the
likeliest one, or one that is sampled with Gumbel noise, if requested from the likeliest tokens only (top-p, top-k); and
it scores positions, by the probability of their token, by the margin of the likeliest token over the second, or by
negative entropy. A sampler of transitions gives the probabilities of tokens itself (`Sampler.transition`), from what
the network says (`Prediction`).

Random numbers belong to a row, a step and a position (`PositionNoise`): each sample has a generator of its own, seeded
from (seed of the row, step, position, purpose). A row therefore gets the same numbers in every batch and under every
padding, and an intervention at one position does not change the numbers at another: a run and its patched copy differ
by the patch alone.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.hooks.step import Handed, StepState
from diffusion_lens.model.noise import Absorbing, Head, Noise, Schedule, draw
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.settings import at_least, checked_arguments, one_of, own_seed, whole_number
from weight_conversion import NoiseSchedule, Variant

SCORES = ("probability", "margin", "entropy")
# Why a sampler does not fit the noise of a model.
OTHER_NOISE = {
    "absorbing": "draws every position again in every step, and under the noise of this model, [MASK], a token that is "
    "written stays",
    "uniform": "reveals masked positions, and the noise of this model is uniform: every position has a token, and may "
    "change in every step",
}
# One number for the batch, one for each row (as a list, array or tensor), or the generator of these.
Seed = SupportsIndex | Sequence[SupportsIndex] | torch.Generator


@checked_arguments
@dataclass(frozen=True)
class Proposal:
    """How tokens are proposed, and how positions are ranked.

    Attributes:
        score: Score of a position: "probability" of the proposed token; "margin" of the likeliest token over the
            second; or "entropy", the negative entropy, the sum of p · log(p + 1e-10) over the vocabulary.
        scored_on: Distribution used to compute the score: "model" (softmax of the logits) or "sampled" (after
            temperature, top-p and top-k).
        top_p: Nucleus sampling: sample from the smallest set of most likely tokens whose total probability reaches
            `top_p`; `None` for all tokens.
        top_k: Number of most likely tokens to sample from; `None` for all tokens.
        writes_mask: Whether [MASK] may be proposed, where the head has a column for it. A position where it is proposed
            counts as revealed and stays masked, so that masks can remain at the end. Otherwise the best other token is
            proposed there; the probabilities are still the model's own, in which [MASK] has its share.
        crosses: Whether the token with which the total probability crosses `top_p` is sampled from, too; the likeliest
            always is.
        first: Limit that is applied first where both are given, "top_p" or "top_k".
    """

    score: str = "probability"
    scored_on: str = "model"
    top_p: float | None = None
    top_k: SupportsIndex | None = None
    writes_mask: bool = False
    first: str = "top_p"
    crosses: bool = True

    def __post_init__(self) -> None:
        one_of(*SCORES)("score", self.score)
        one_of("top_p", "top_k")("first", self.first)
        one_of("model", "sampled")("scored_on", self.scored_on)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}; it must be a probability above 0, or None to keep all tokens")
        if self.top_k is not None:
            at_least(1, "top_k", self.top_k, or_none="to keep all tokens")

    @property
    def is_plain(self) -> bool:
        """Whether the score is the probability under the model, which the loop records in any case."""
        return self.score == "probability" and self.scored_on == "model"

    @property
    def filters(self) -> bool:
        """Whether tokens are sampled from the likeliest ones only."""
        return self.top_p is not None or self.top_k is not None

    def propose(
        self,
        logits: Float[Tensor, "selected d_vocab_out"],
        temperature: float = 0.0,
        uniform: Float[Tensor, "selected d_vocab_out"] | None = None,
        mask_id: int | None = None,
    ) -> Int[Tensor, "selected"]:
        """A token for each row of logits: the likeliest, or at a temperature one sampled by Gumbel-max in float64.

        This is argmax exp(logits) / (-log u)^T of ML-GSAI/SMDM `add_gumbel_noise`, in logarithms so that nothing
        overflows. It is in float64 because Gumbel noise of low precision lowers the temperature (Zheng et al. 2024,
        arXiv 2409.02908).

        Args:
            uniform: Random numbers in (0, 1) for sampling at a temperature; `None` takes the likeliest token.
            mask_id: Id of [MASK], if the model has one.
        """
        if uniform is None:
            return self._writable(logits, mask_id).argmax(dim=-1)
        allowed = self.allowed(logits, temperature, mask_id).double()
        return (allowed - temperature * torch.log(-torch.log(uniform))).argmax(dim=-1)

    def allowed(
        self, logits: Float[Tensor, "selected d_vocab_out"], temperature: float, mask_id: int | None
    ) -> Float[Tensor, "selected d_vocab_out"]:
        """The logits, -inf at tokens that are not sampled: [MASK], unless it may be written, and unlikely ones."""
        allowed = self._writable(logits, mask_id)
        if not self.filters:
            return allowed
        likely = self.likeliest(logits / temperature)
        # The best allowed token is always in, also where [MASK] alone reaches top_p.
        likely.scatter_(1, allowed.argmax(dim=-1, keepdim=True), True)
        return allowed.masked_fill(~likely, float("-inf"))

    def scores(
        self, logits: Float[Tensor, "selected d_vocab_out"], tokens: Int[Tensor, "selected"], temperature: float = 0.0
    ) -> Float[Tensor, "selected"]:
        """Score of each proposed token, in float64; tokens of higher score are revealed first."""
        if self.scored_on == "sampled":
            logits = logits.double() / (temperature or 1.0)
            if self.filters:
                logits = logits.masked_fill(~self.likeliest(logits), float("-inf"))
        if self.score == "probability":
            return confidence_of(logits, tokens)
        probabilities = logits.double().softmax(dim=-1)
        if self.score == "margin":
            first, second = probabilities.topk(2, dim=-1).values.unbind(dim=-1)
            return first - second
        return (probabilities * (probabilities + 1e-10).log()).sum(dim=-1)

    def likeliest(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Bool[Tensor, "selected d_vocab_out"]:
        """The tokens that are sampled from: the likeliest that together have more than `top_p`, and of these the
        `top_k` likeliest, or in the other order (`first`).

        Tokens that tie with the last of the `top_k` are included, and at least one token is. Source: DreamLM/Dream
        `generation_utils.py`, `top_p_logits` and `top_k_logits`; transformers has the other order.
        """
        likely = torch.ones_like(logits, dtype=torch.bool)
        for name in ("top_p", "top_k") if self.first == "top_p" else ("top_k", "top_p"):
            remaining = logits.masked_fill(~likely, float("-inf"))
            if name == "top_p" and self.top_p is not None:
                # A token is in if the likelier tokens together do not exceed top_p yet.
                ordered, index = remaining.double().sort(dim=-1, descending=True, stable=True)
                mass = ordered.softmax(dim=-1).cumsum(dim=-1)
                mass_before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
                inside = mass_before <= self.top_p if self.crosses else (mass <= self.top_p) | (mass_before == 0)
                likely &= torch.zeros_like(likely).scatter_(1, index, inside)
            elif name == "top_k" and self.top_k is not None:
                n_kept = min(whole_number("top_k", self.top_k), remaining.shape[-1])
                likely &= remaining >= remaining.topk(n_kept, dim=-1).values[:, -1:]
        return likely

    def _writable(
        self, logits: Float[Tensor, "selected d_vocab_out"], mask_id: int | None
    ) -> Float[Tensor, "selected d_vocab_out"]:
        if mask_id is None or mask_id >= logits.shape[-1] or self.writes_mask:
            return logits
        return logits.index_fill(1, torch.tensor([mask_id], device=logits.device), float("-inf"))


def confidence_of(
    logits: Float[Tensor, "selected d_vocab_out"], tokens: Int[Tensor, "selected"]
) -> Float[Tensor, "selected"]:
    """Softmax probability of each proposed token, in float64; 0 for an id without a logit, such as [MASK]."""
    writable = tokens < logits.shape[-1]
    chosen = torch.softmax(logits.double(), dim=-1).gather(1, tokens.clamp(max=logits.shape[-1] - 1)[:, None])[:, 0]
    return chosen * writable


class PositionNoise:
    """Uniform random numbers on the CPU, in float64, so that a seed means the same on every device.

    It takes a seed for each row, and Int[batch pos], the number of each position among the real ones of its row.
    """

    def __init__(self, seeds: Sequence[int], positions: Tokens) -> None:
        self.seeds = list(seeds)
        self._positions = positions.cpu()

    def by_position(self, step: int, positions: PosMask) -> Float[Tensor, "selected"]:
        """Float[selected], one number in [0, 1) for each selected position, in reading order."""
        width = int(self._positions.max()) + 1
        # The word "place" is part of the hashed key, so another word would give other numbers.
        uniform = torch.stack([_uniform(width, seed, step, "place") for seed in self.seeds])
        return uniform.gather(1, self._positions)[positions.cpu()].to(positions.device)

    def tokens(self, step: int, positions: PosMask, n_tokens: int) -> Int[Tensor, "selected"]:
        """A random token for each selected position, of which each of the `n_tokens` is as likely."""
        return (self.by_token(step, positions, 1)[:, 0] * n_tokens).long()

    def drawn(
        self, step: int, positions: PosMask, p: Float[Tensor, "selected d_vocab"], among: PosMask
    ) -> Int[Tensor, "selected"]:
        """A token for each selected position, with probability proportional to its entry."""
        return draw(p, self.by_token(step, positions, p.shape[-1]))

    def by_row(self, step: int) -> Float[Tensor, "batch"]:
        """One number in [0, 1) for each row, on the CPU."""
        return torch.cat([_uniform(1, seed, step, "row") for seed in self.seeds])

    def by_token(self, step: int, positions: PosMask, n_tokens: int) -> Float[Tensor, "selected d_vocab_out"]:
        """`n_tokens` numbers in (0, 1) for each selected position, in reading order."""
        selected = positions.cpu().nonzero().tolist()
        uniform = [_uniform(n_tokens, self.seeds[row], step, int(self._positions[row, pos])) for row, pos in selected]
        if not uniform:
            return torch.empty(0, n_tokens, dtype=torch.float64, device=positions.device)
        return torch.stack(uniform).clamp_(min=torch.finfo(torch.float64).tiny).to(positions.device)


class SequentialNoise(PositionNoise):
    """Random tokens from one generator, in the order in which authors' code draws them for a batch.

    A run with it cannot be taken up in the middle, since its numbers depend on all that were drawn before.

    Attributes:
        state: Hash of the generator's state before the first number, which a seed alone does not tell.
    """

    def __init__(self, generator: torch.Generator, positions: Tokens) -> None:
        super().__init__([generator.initial_seed()] * len(positions), positions)
        self.generator = generator
        self.state = hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()

    def tokens(self, step: int, positions: PosMask, n_tokens: int) -> Int[Tensor, "selected"]:
        size, device = (int(positions.sum()),), self.generator.device
        return torch.randint(n_tokens, size, generator=self.generator, device=device).to(positions.device)

    def drawn(
        self, step: int, positions: PosMask, p: Float[Tensor, "selected d_vocab"], among: PosMask
    ) -> Int[Tensor, "selected"]:
        # The authors' code draws for the whole batch, also where it keeps what it has.
        of_all = torch.ones(int(among.sum()), p.shape[-1], device=self.generator.device)
        of_all[positions[among].to(of_all.device)] = p.to(of_all)
        drawn = torch.multinomial(of_all, 1, generator=self.generator)[:, 0]
        return drawn.to(positions.device)[positions[among]]


@dataclass(frozen=True)
class Prediction:
    """What the network says at the positions of a step, in the words that proposals and transitions ask for.

    Attributes:
        output: Float[selected d_vocab_out], output of the head after guidance and hooks.
        present: Int[selected], token or [MASK] at each position.
        head: What the output means.
        schedule: Schedule of noise of the run.
        sigma: Noise level that the network read, or that of each position; `None` for a model of next tokens.
        temperature: 1 leaves the model's own probabilities; 0 gives all to the likeliest token.
        proposal: Limits of the likeliest tokens that are sampled from.
    """

    output: Float[Tensor, "selected d_vocab_out"]
    present: Int[Tensor, "selected"]
    head: Head
    schedule: Schedule
    sigma: float | Float[Tensor, "selected"] | None
    temperature: float
    proposal: Proposal

    @cached_property
    def logits(self) -> Float[Tensor, "selected d_vocab_out"]:
        """Logits whose softmax is p(x_0) at temperature 1; the head's own, [MASK] included, where it may be written."""
        if self.proposal.writes_mask or self.sigma is None:
            return self.output
        return self.head.clean_logits(self.output, self.present, self.amount(self.sigma))

    @property
    def noise(self) -> Noise:
        """The kind of noise, which every model has that a sampler of transitions fits."""
        assert self.head.noise is not None
        return self.head.noise

    @property
    def mask(self) -> int | None:
        """Id of [MASK], if there is one."""
        return self.noise.mask if isinstance(self.noise, Absorbing) else None

    @property
    def p_clean(self) -> Float[Tensor, "selected d_vocab_out"]:
        """p(x_0) in float64, at the temperature and over the likeliest tokens, without [MASK]."""
        logits = self.proposal.allowed(self.logits.double(), self.temperature or 1.0, self.mask)
        if not self.temperature:
            return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double()
        return (logits / self.temperature).softmax(dim=-1)

    @property
    def scores(self) -> Float[Tensor, "selected d_vocab"]:
        """The scores in float64: the head's own or, where a setting changes p(x_0), those that follow from it."""
        assert self.sigma is not None
        sigma = self.amount(self.sigma)
        if self.temperature == 1 and not self.proposal.filters:
            return self.head.scores(self.output.double(), self.present, sigma)
        return self.noise.scores(self.p_clean, self.present, sigma)

    def amount(self, sigma: float | Float[Tensor, "selected"]) -> Float[Tensor, "selected"]:
        """An amount of noise as a number for each position, in float64."""
        if isinstance(sigma, Tensor):
            return sigma
        return torch.full(self.present.shape, sigma, dtype=torch.float64, device=self.present.device)


@dataclass(frozen=True)
class Plan:
    """The decision of a sampler for one step.

    Attributes:
        positions: Bool[batch pos], positions where tokens are proposed.
        counts: Int[batch], number of them to reveal in each row; a single entry counts the whole batch as one pool.
        remask: Bool[batch pos], revealed positions that return to [MASK] in this step; `None` for none.
        jitter: Float[batch pos], noise added to the confidence before positions are ranked; `None` for none.
        threshold: Score above which a position is revealed beyond the number; `None` for none.
        factor: The n most confident positions are revealed beyond the number, for the largest n such that each k-th of
            them has a score of at least 1 - factor / (k + 1); the last position with all others; `None` for none.
        bound: Nats: the first positions whose scores, negative entropies, add up to no more are revealed beyond the
            number; `None` for none.
        crosses: Whether the position with which the sum crosses the bound is revealed too.
    """

    positions: PosMask
    counts: Int[Tensor, "#batch"]
    remask: PosMask | None = None
    jitter: Float[Tensor, "batch pos"] | None = None
    threshold: float | None = None
    factor: float | None = None
    bound: float | None = None
    crosses: bool = False

    @classmethod
    def of_all(cls, positions: PosMask, remask: PosMask | None = None) -> "Plan":
        """The plan that reveals all of these positions."""
        return cls(positions, positions.sum(dim=1), remask)


class Sampler(ABC):
    """Chooses positions; a sampler of transitions also gives the probabilities of their tokens.

    Attributes:
        name: Name of the sampler in `denoise` and in records.
        noises: Kinds of noise that it undoes.
        eps: Time at which the run ends.
        proposal: Rule by which tokens are proposed and scored.
        schedule: Schedule of noise of the run; `None` takes the model's.
        may_change_nothing: Whether a step that predicts may leave the canvas as it is.
        keeps_prediction: Whether the network is given the time of the last step that changed the canvas, so that a step
            after one that changed nothing predicts the same.
        has_times_of_rows: Whether each row has a time of its own, that of its open block.
        writes: Where it writes: "anywhere" on the canvas, the "next" position, or in the open "block".
        reads_confidence: Whether `plan` reads probabilities of revealed tokens, rather than only where there are any.
            Runs whose canvases agree then still differ.
        hands_on: Whether its steps read what earlier ones predicted (`Handed`), and make noise again of the positions
            of the plan that they do not reveal.
        approximate_cache: Positions outside its open block (`open_block`) whose keys and values the network reads as
            the first step of the block left them: "prefix", those before it, "dual", those after it too. `None` for
            none: keys and values are those of each canvas.
    """

    name: str
    noises: frozenset[str] = frozenset({"absorbing"})
    eps: float = 1e-5
    proposal: Proposal = Proposal()
    schedule: NoiseSchedule | None = None
    may_change_nothing: bool = False
    keeps_prediction: bool = False
    has_times_of_rows: bool = False
    writes: str = "anywhere"
    reads_confidence: bool = True
    hands_on: bool = False
    approximate_cache: str | None = None

    def misfit(self, variant: Variant) -> str | None:
        """Why this sampler cannot write the text of a kind of model; `None` if it can."""
        if variant.noise is not None and variant.noise not in self.noises:
            return OTHER_NOISE[variant.noise]
        if self.writes == "anywhere" and variant.is_autoregressive:
            return "reveals positions in any order, and the text of a causal model without [MASK] grows at its end only"
        if self.writes == "anywhere" and variant.opens_blocks:
            return (
                "shares its steps among all positions of the canvas, and this model writes one block of "
                f"{variant.block_size} positions after another"
            )
        if variant.opens_blocks and variant.time_conditioning and not self.has_times_of_rows:
            return (
                "gives a step one time, that of the run, and this model is conditioned on the time and writes block "
                "after block: each row is at its own time in its own block. Use 'block_posterior' or 'first_hitting'"
            )
        return None

    def couples_rows(self, variant: Variant) -> bool:
        """Whether the run of a row depends on the other rows of its batch."""
        return self.keeps_prediction and not self.has_times_of_rows and variant.time_conditioning

    def by_row(self, variant: Variant) -> "Sampler":
        """The sampler with which every row of a batch runs as it runs alone with this one.

        Raises:
            ValueError: There is none.
        """
        if self.couples_rows(variant):
            raise ValueError(
                f"the sampler {self.name!r} of the run gives the network the time of the last step that changed any "
                "row of a batch, so that corrupted runs which are denoised together would depend on one another. "
                "Denoise with the same sampler and keeps_prediction=False"
            )
        return self

    def adapted(self, variant: Variant) -> "Sampler":
        """This sampler with the settings that follow from the kind of model."""
        return self

    def settled(self, variant: Variant) -> "Sampler":
        """This sampler with the settings that follow from the kind of model, for a run without a number of steps."""
        return self

    def n_steps(self, steps: int | None, blanks: PosMask) -> int:
        """Number of steps of the run; 32 by default, as in SMDM's evaluation.

        Args:
            steps: Number that the caller sets; `None` leaves it to the sampler.
            blanks: Bool[batch pos], positions to be written.
        """
        return 32 if steps is None else steps

    def n_steps_by_blocks(self, steps: int | None, blanks: PosMask, blocks: Int[Tensor, "batch pos"], size: int) -> int:
        """Number of steps of a run that writes block after block: the block of each position, and a block's size."""
        return self.n_steps(steps, blanks)

    def times(self, n_steps: int) -> list[float]:
        """The `n_steps + 1` times of a run, falling from 1."""
        times: list[float] = torch.linspace(1, self.eps, n_steps + 1).tolist()
        return times

    def times_of_rows(self, step: StepState, noise: PositionNoise) -> Float[Tensor, "batch"]:
        """The time of each row, by default that of the run; with `has_times_of_rows`, that of its open block.

        The schedule gives its noise.
        """
        return torch.full((len(step.tokens),), step.t, dtype=torch.float64, device=step.tokens.device)

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"] | None:
        """Probability of each token or [MASK] after the step, up to a factor, at the positions of the plan.

        The loop draws from it, and a position for which [MASK] is drawn stays masked. `None`, the default, leaves the
        choice of a token to `proposal`.
        """
        return None

    def temperature(self, step: StepState, temperature: float) -> float:
        """The temperature of a step, by default that of the run."""
        return temperature

    def finishes(self, step: StepState, handed: Handed, entropy: Float[Tensor, "batch pos"]) -> Bool[Tensor, "batch"]:
        """The rows whose block is written with this step, of a sampler that `hands_on`; they keep the likeliest tokens.

        Args:
            handed: What the step hands to the next one.
            entropy: Entropy of the prediction in nats at the positions of the plan, 0 elsewhere.
        """
        return torch.zeros_like(handed.finished)

    def open_block(self, writable: PosMask, masked: PosMask) -> PosMask:
        """Bool[batch pos], the block that each row writes, none of a filled row; by default all that is written.

        Args:
            writable: Bool[batch pos], the positions that the run writes.
            masked: Bool[batch pos], those of them that are masked.
        """
        return writable & masked.any(dim=1, keepdim=True)

    @abstractmethod
    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        """The positions considered between `step.t` and `step.s`, and the number of them to reveal.

        Args:
            noise: Random numbers by position, for samplers that choose at random.
            confidence: Float[batch pos], probability of each token when it was revealed; NaN where none was revealed
                (given, masked, padding).
        """


def most_confident(confidence: Float[Tensor, "batch pos"], plan: Plan) -> PosMask:
    """The `plan.counts` most confident of `plan.positions`; of equal ones, the leftmost come first."""
    pools = plan.counts.numel()
    if plan.jitter is not None:
        confidence = confidence + plan.jitter
    scores = confidence.masked_fill(~plan.positions, float("-inf")).reshape(pools, -1)
    order = scores.argsort(dim=1, descending=True, stable=True)
    counts = plan.counts
    if plan.threshold is not None:
        counts = counts.maximum((scores > plan.threshold).sum(dim=1))
    if plan.factor is not None:
        rank = torch.arange(1, order.shape[1] + 1, device=order.device)
        enough = scores.gather(1, order) >= 1 - plan.factor / (rank + 1)
        counts = counts.maximum(enough.long().cumprod(dim=1).sum(dim=1))
        counts = counts + (counts == plan.positions.reshape(pools, -1).sum(dim=1) - 1).long()
    if plan.bound is not None:
        entropies = -scores.gather(1, order)
        before = entropies.cumsum(dim=1) - (entropies if plan.crosses else 0)
        counts = counts.maximum((before <= plan.bound).sum(dim=1))
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    return (rank < counts[:, None]).reshape(plan.positions.shape) & plan.positions


def check_eps(eps: float) -> None:
    """Raise a `ValueError` unless a run can end at this time."""
    if not 0 <= eps < 1:
        raise ValueError(
            f"eps={eps}; the time at which a run ends must be at least 0 and below 1, the time of its start"
        )


def plain_seed(seed: Seed) -> int | tuple[int, ...] | torch.Generator:
    """A seed as Python's own number, the seeds of rows as a tuple of these; a generator is returned as it is.

    Raises:
        TypeError: The seed is none of these.
    """
    if isinstance(seed, torch.Generator):
        return seed
    plain = seed.tolist() if hasattr(seed, "tolist") else seed  # of arrays and tensors
    if isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        return tuple(whole_number(f"seed[{row}]", row_seed) for row, row_seed in enumerate(plain))
    try:
        return whole_number("seed", seed)
    except TypeError as error:
        raise TypeError(f"{error}, or one for each row, or a torch.Generator") from None


def row_seeds(seed: Seed, n_batch: int) -> list[int]:
    """A seed for each row: hashed from one number and the row's index, taken from a list, or from a generator."""
    plain = plain_seed(seed)
    if isinstance(plain, torch.Generator):
        sampled: list[int] = torch.randint(2**62, (n_batch,), generator=plain, device=plain.device).tolist()
        return sampled
    if isinstance(plain, int):
        return list(map(partial(own_seed, plain), range(n_batch)))
    if len(plain) != n_batch:
        raise ValueError(f"{len(plain)} seeds for {n_batch} rows; give one for each row, or a single number")
    return list(plain)


def _uniform(n: int, *key: int | str) -> Tensor:
    """`n` numbers in [0, 1) by a generator that is seeded with a hash of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.rand(n, generator=generator, dtype=torch.float64)
