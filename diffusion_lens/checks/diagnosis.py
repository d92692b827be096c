"""Finds the mistake that explains a failed check, by measuring the model under every alternative.

With a reference, an alternative explains the failure if the logits become those of the reference. Without one, it does
if the loss on the page falls by a clear margin, and to the correct model's loss if that is known: no alternative
improves a correct model. If no alternative explains the failure, three more mistakes are tried: rows of the vocabulary
shifted from some id on, gate and up exchanged in one block, and a block that is foreign to the others, which its
weights show, or an improvement without it.

An alternative undoes one likely mistake by a cheap change of architecture or tensors. A change returns only the tensors
that it changes, in our layout (`weight_conversion.tensor_shapes`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.checks.reference import Distance, Reference
from diffusion_lens.checks.report import Finding
from diffusion_lens.checks.texts import no_better_than_chance, page_losses
from diffusion_lens.checks.weights import Composition
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.model.weights import lent_weights
from weight_conversion import Architecture
from weight_conversion.key_map import GroupMajorQKV

Tensors = Mapping[str, Tensor]
Change = Callable[[Tensors, Architecture], dict[str, Tensor]]
# Rotary bases of published models, and some between them.
BASES = (1_000.0, 10_000.0, 20_000.0, 100_000.0, 500_000.0, 1_000_000.0, 10_000_000.0)
BLOCK_SIZES = (4, 8, 16, 32, 64)
EPSILONS = (1e-5, 1e-6)
# A correcting shift of rows, and where the rows are before it.
WAYS = {-1: "late", 1: "early"}


@dataclass(frozen=True)
class Alternative:
    """A change that undoes one likely mistake.

    Attributes:
        name: Description of the change, such as "with gate and up exchanged".
        cause: Mistake that the change undoes.
        architecture: Architecture after the change.
        change: Function (tensors, architecture) that returns the changed tensors.
        sees_more: Whether tokens are predicted from more of the clean text, which may lower the loss of a correct model
            too: only an exact measure tells whether it undoes a mistake.
    """

    name: str
    cause: str
    architecture: Architecture
    change: Change = lambda tensors, architecture: {}
    sees_more: bool = False


def alternatives(a: Architecture, mask_ids: Sequence[int] = ()) -> list[Alternative]:
    """All alternatives that apply to an architecture; `mask_ids` are candidates for the id of [MASK]."""
    return [*_readings(a, mask_ids), *_layouts(a), *_vocabularies(a)]


def without(a: Architecture, block: int, part: str | None = None) -> Alternative:
    """The network without a block, or without its attention or MLP; this helps only if that part is foreign."""
    outputs = {"attention": (f"blocks.{block}.attn.", ".o."), "MLP": (f"blocks.{block}.mlp.", ".down.")}
    zeroed = list(outputs.values()) if part is None else [outputs[part]]
    what = f"block {block}" if part is None else f"the {part} of block {block}"
    foreign = f"{what} are foreign to the others"
    if part is None and block:
        # Blocks after a foreign one read its wrong output, so omitting one of these may help as much.
        foreign = f"{what}, or of one before it, are foreign"
    cause = f"the weights of {foreign}: of another checkpoint or seed, or damaged"
    return Alternative(f"without {what}", cause, a, partial(zeros, zeroed))


def exchanged_in_each(a: Architecture) -> list[Alternative]:
    """The network with gate and up projections of one block exchanged, for each block; none if MLPs have no gate."""
    return [
        Alternative(
            f"with gate and up of block {block} exchanged",
            f"gate and up projections of block {block} were read as each other",
            a,
            partial(gate_with_up, f"blocks.{block}."),
        )
        for block in range(a.n_layers)
        if a.mlp == "gated"
    ]


def vocabulary_ends(a: Architecture) -> dict[str, str]:
    """The matrices with a row for each token, with their names in messages."""
    return {"embed": "embedding"} if a.tied else {"embed": "embedding", "unembed": "head"}


def moved_from(a: Architecture, end: str, shift: int, first: int, round_the_end: bool) -> Alternative:
    """The network with the rows of "embed" or "unembed" shifted by -1 or 1 from an id on.

    The last row takes part in the shift with `round_the_end`; otherwise it stays.
    """
    word, way = vocabulary_ends(a)[end], " round the end" if round_the_end else ""
    cause = f"the rows of the {word} are one too {WAYS[shift]} from about id {first} on"
    name = f"with {word} rows from {first} on moved by {shift:+d}{way}"
    change = partial(moved, (end,), shift, first, round_the_end)
    return Alternative(name, f"{cause}: an off-by-one in the vocabulary", a, change)


def _readings(a: Architecture, mask_ids: Sequence[int]) -> Iterator[Alternative]:
    """Other settings for the same tensors."""
    direction: Literal["bidirectional", "causal"] = "causal" if a.attention_dir == "bidirectional" else "bidirectional"
    readout: Literal["in_place", "shifted"] = "in_place" if a.readout == "shifted" else "shifted"
    sees, reads = a.attention_dir, a.readout
    wrong_direction = f"the config makes attention {sees}, and the weights were trained with {direction} attention"
    wrong_readout = (
        f"the config reads tokens {reads}, and the weights predict them {readout}: the readout is off by one"
    )
    other = replace(a, attention_dir=direction, causal_block=None, block_context="blocks", causal_first=False)
    both = f"{wrong_direction}; {wrong_readout}"
    for name, cause, reading in (
        (f"with {direction} attention", wrong_direction, other),
        (f"with readout {readout}", wrong_readout, replace(a, readout=readout)),
        (f"with {direction} attention, readout {readout}", both, replace(other, readout=readout)),
    ):
        # Where clean text is predicted in the rows that read it, the loss tells nothing, because it is copied.
        if not (reading.is_autoregressive and reading.readout == "in_place"):
            yield Alternative(name, cause, reading)
    for mask in dict.fromkeys(mask_ids):
        if mask != a.mask_token_id and 0 <= mask < a.d_vocab:
            cause = f"the mask id is wrong: the config says {a.mask_token_id}, and the weights use {mask} as [MASK]"
            yield Alternative(f"with mask id {mask}", cause, replace(a, mask_token_id=mask))
    numbers: dict[str, tuple[str, str, Sequence[float]]] = {
        "rotary_base": ("rotary base", "rotary base", BASES if a.positional_embedding_type == "rotary" else ()),
        "norm_eps": ("norms' epsilon", "norm epsilon", EPSILONS),
        "causal_block": ("block size", "blocks of", BLOCK_SIZES if a.causal_block else ()),
    }
    for name, (what, words, values) in numbers.items():
        for value in (value for value in values if value != getattr(a, name)):
            cause = f"the {what} is wrong: the config says {getattr(a, name):g}, and the weights fit {value:g}"
            changed: dict[str, Any] = {name: value}
            sees_more = name == "causal_block" and value < getattr(a, name)
            yield Alternative(f"with {words} {value:g}", cause, replace(a, **changed), sees_more=sees_more)


def _layouts(a: Architecture) -> Iterator[Alternative]:
    """Other orders of the rows in a block's matrices, and exchanged matrices."""
    if a.positional_embedding_type == "rotary":
        n_turned = a.rotary_dim or a.d_head
        halves = torch.cat([torch.arange(n_turned).view(2, -1).T.flatten(), torch.arange(n_turned, a.d_head)])
        pairs = "rotary positions rotate other pairs of dimensions than in training"
        interleaved = (
            f"{pairs}: the weights are for half-split rotation, and their rows were interleaved in a conversion"
        )
        half_split = f"{pairs}: the weights are for interleaved rotation, and their rows were not rearranged for it"
        yield Alternative("with rotary rows de-interleaved", interleaved, a, partial(by_dimension, halves.argsort()))
        yield Alternative("with rotary rows interleaved", half_split, a, partial(by_dimension, halves))
    if a.mlp == "gated":
        gate = "gate and up projections of the MLP were read as each other"
        yield Alternative("with gate and up exchanged", gate, a, partial(gate_with_up, "blocks."))
    keys = "query and key heads were read as each other"
    yield Alternative("with query and key heads swapped", keys, a, partial(swap_key_with_first_query, False))
    if a.qk_norm:
        swap = partial(swap_key_with_first_query, True)
        yield Alternative("with query and key heads swapped, and their norms", keys, a, swap)
    if a.n_heads > 1:
        order = "the query heads are in another order than the output projection and the keys expect"
        reversed_order = torch.arange(a.n_heads).flip(0)
        neighbours = torch.arange(a.n_heads - a.n_heads % 2).view(-1, 2).flip(1).flatten()
        neighbours = torch.cat([neighbours, torch.arange(len(neighbours), a.n_heads)])
        yield Alternative("with query heads reversed", order, a, partial(by_head, reversed_order, ("q",)))
        yield Alternative("with neighbouring query heads swapped", order, a, partial(by_head, neighbours, ("q",)))
    if 1 < a.n_key_value_heads < a.n_heads:
        tiled = torch.arange(a.n_heads).view(a.n_key_value_heads, -1).T.flatten()
        shared = "query heads use other key/value heads than in training: tiled where they should be grouped"
        yield Alternative("with query heads regrouped", shared, a, partial(by_head, tiled, ("q", "o")))
        yield Alternative("with query heads tiled", shared, a, partial(by_head, tiled.argsort(), ("q", "o")))
    fused = "the fused projection of queries, keys and values was split in the wrong order of rows"
    yield Alternative("with the fused projection read as stacked", fused, a, partial(resplit, False))
    yield Alternative("with the fused projection read group by group", fused, a, partial(resplit, True))


def _vocabularies(a: Architecture) -> Iterator[Alternative]:
    """Rows of the vocabulary shifted by one."""
    ends = vocabulary_ends(a)
    for end, word in ends.items():
        for shift, way in WAYS.items():
            cause = f"the rows of the {word} are one too {way}: an off-by-one in the vocabulary"
            yield Alternative(f"with {word} rows moved by {shift:+d}", cause, a, partial(moved, (end,), shift, 0, True))
    for shift in () if a.tied else WAYS:
        cause = "the rows of the embedding and of the head are off by one, both alike"
        yield Alternative(
            f"with embedding and head rows moved by {shift:+d}", cause, a, partial(moved, ends, shift, 0, True)
        )


# The changes. Each takes what selects it first, then the tensors and the architecture.


def _blocks(tensors: Tensors, parts: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of some parts of every block, such as "attn.q"."""
    for name, tensor in tensors.items():
        if name.startswith("blocks.") and name.split(".", 2)[2].rpartition(".")[0] in parts:
            yield name, tensor


def zeros(outputs: Sequence[tuple[str, str]], tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Empties the matrices that write the outputs of some modules, each given by its prefix and the matrix's name."""
    return {
        name: torch.zeros_like(tensor)
        for name, tensor in tensors.items()
        if any(name.startswith(module) and matrix in name for module, matrix in outputs)
    }


def by_dimension(order: Tensor, tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Reorders the rows of queries and keys, and of their norms, in each head."""
    return {
        name: tensor.unflatten(0, (-1, a.d_head))[:, order.to(tensor.device)].flatten(0, 1)
        for name, tensor in _blocks(tensors, ("attn.q", "attn.k", "attn.q_norm", "attn.k_norm"))
    }


def by_head(order: Tensor, parts: Sequence[str], tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Reorders heads: rows of the queries, columns of the output projection."""
    changed = {}
    for name, tensor in _blocks(tensors, [f"attn.{part}" for part in parts]):
        heads = order.to(tensor.device)
        if ".attn.q." in name:
            changed[name] = tensor.unflatten(0, (-1, a.d_head))[heads].flatten(0, 1)
        elif name.endswith("weight"):
            changed[name] = tensor.unflatten(1, (-1, a.d_head))[:, heads].flatten(1, 2)
    return changed


def gate_with_up(blocks: str, tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Exchanges gate and up projections of the MLPs and experts of the blocks whose names begin so."""
    gates = [name for name in tensors if name.startswith(blocks) and ".mlp." in name and ".gate." in name]
    pairs = [(gate, gate.replace(".gate.", ".up.")) for gate in gates]
    return {name: tensors[other] for gate, up in pairs for name, other in ((gate, up), (up, gate))}


def swap_key_with_first_query(norms_too: bool, tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Exchanges each key head with the first query head of its group; without groups, all keys with all queries."""
    changed = {}
    for name, query in _blocks(tensors, ("attn.q",)):
        key_name = name.replace("attn.q", "attn.k")
        queries = query.unflatten(0, (a.n_key_value_heads, -1, a.d_head)).clone()
        keys = tensors[key_name].unflatten(0, (a.n_key_value_heads, a.d_head))
        changed[key_name] = queries[:, 0].clone().flatten(0, 1)
        queries[:, 0] = keys
        changed[name] = queries.flatten(0, 2)
    for name, norm in _blocks(tensors, ("attn.q_norm",)) if norms_too else ():
        key_name = name.replace("q_norm", "k_norm")
        changed[name], changed[key_name] = tensors[key_name], norm
    return changed


def resplit(by_group: bool, tensors: Tensors, a: Architecture) -> dict[str, Tensor]:
    """Splits the fused projection again: group by group, or into all queries, all keys, all values."""
    changed: dict[str, Tensor] = {}
    for name, _ in _blocks(tensors, ("attn.q",)):
        names = [name.replace("attn.q", f"attn.{part}") for part in "qkv"]
        parts = [tensors[part] for part in names]
        if by_group:
            rows = GroupMajorQKV().split(torch.cat(parts), a)
        else:
            rows = GroupMajorQKV().join(parts, a).split([len(part) for part in parts])
        changed |= dict(zip(names, rows, strict=True))
    return changed


def moved(
    ends: Iterable[str], shift: int, first: int, round_the_end: bool, tensors: Tensors, a: Architecture
) -> dict[str, Tensor]:
    """Shifts the rows from `first` on by one. With `round_the_end`, the row left over takes the place at the other
    end; otherwise it stays, and so does the last row (often [MASK]'s)."""
    changed = {}
    stays = slice(-1, None) if shift < 0 else slice(1)
    names = [f"{end}.{kind}" for end in ends for kind in ("weight", "bias")]
    for name in (name for name in names if name in tensors):
        changed[name] = rows = tensors[name].clone()
        shifted = rows[first:] if round_the_end else rows[first:-1]
        left_over = shifted[stays].clone()
        shifted.copy_(shifted.roll(shift, dims=0))
        if not round_the_end:
            shifted[stays] = left_over
    return changed


# "explains": the change undoes the mistake. "helps": the model is better and still wrong. "same": the measure does not
# distinguish the two. "worse": the unchanged model is better.
Verdict = Literal["explains", "helps", "same", "worse"]
# Least difference of two losses on the same tokens under the same noise, in standard errors.
LEAST_Z = 3.0
# Least gain as a share of the loss. A correct model may gain a little from a wrong setting, so a mistake that no other
# check shows must cost a hundredth. A model that is wrong elsewhere may gain a fifth from another wrong setting.
QUIET_SHARE = 0.01
LEAST_SHARE = 0.3
# Least gain of an explanation as a share of the difference from the correct loss.
MOST_OF_IT = 0.95
# Rounding of a loss on one machine, relative to the loss.
ROUNDING = 1e-5
# Largest distance from the correct loss of an explanation that gains little: the rounding of two machines.
EXACT = 3 * ROUNDING
# Least change of the distance to a reference, in the spread of the logits. It falls if a foreign block is omitted, and
# rises if a correct one is.
NEARER = 0.02
# Losses of one text have another shape where there is no noise, so the shape is not named.
Parts = Float[Tensor, "..."]
GOLDEN_RATIO = (5**0.5 - 1) / 2
# Digits to which scores are compared; trials with equal scores are listed in the order in which they were made.
DIGITS = 4


@dataclass(frozen=True)
class Trial:
    """The measure under one alternative, its effect, and the likely mistake if it explains the failure."""

    name: str
    score: float
    verdict: Verdict
    cause: str


class Measure(ABC):
    """A measure of how wrong a model is, as a sum of parts; lower is better."""

    what: str

    @abstractmethod
    def of(self, model: DiffusionTransformer) -> Parts:
        """The measure of the model in its current state."""

    @abstractmethod
    def judge(self, before: Parts, after: Parts) -> Verdict:
        """The effect of a change that takes the parts from `before` to `after`."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether a change with the verdict "explains" is certainly the right one, so that the search can end."""


@dataclass(frozen=True, eq=False)
class PageMeasure(Measure):
    """The loss on rows of clean text, Int[batch pos]; its parts are the losses of the tokens, in each sample of noise.

    Attributes:
        vocabulary: Number of tokens that the model can predict.
        right: Least and largest loss of the correct model, if known; only that model has it.
        share: Least gain of an alternative that explains a mistake, as a share of the loss.
    """

    rows: Tensor
    vocabulary: int
    right: tuple[float, float] | None = None
    share: float = LEAST_SHARE
    what: str = "the loss on the page"

    @property
    def exact(self) -> bool:
        return self.right is not None

    def of(self, model: DiffusionTransformer) -> Parts:
        return page_losses(model, self.rows)

    def judge(self, before: Parts, after: Parts) -> Verdict:
        """Compare the losses token by token: both are of the same tokens under the same noise."""
        # 1. Losses of a model that knows nothing are not compared.
        loss_before, loss_after = float(before.sum()), float(after.sum())
        gain = loss_before - loss_after
        if no_better_than_chance(loss_after, self.vocabulary):
            return "same" if no_better_than_chance(loss_before, self.vocabulary) else "worse"
        # 2. A loss that rises by more than the noise is worse.
        if before.shape != after.shape:  # one of them without noise: next tokens
            before, after = (x.unflatten(0, (len(self.rows), -1)).sum(dim=1) for x in (before, after))
        difference = before - after
        noise = LEAST_Z * float(difference.std()) * difference.numel() ** 0.5
        if gain < -max(noise, ROUNDING * loss_before):
            return "worse"
        # 3. Without a known loss, the size of the gain decides. Comparisons with NaN are false, so any number improves
        #    on NaN.
        if self.right is None:
            return "same" if gain < max(noise, self.share * loss_before) else "explains"
        # 4. Otherwise a change explains the mistake if it alone gives the correct loss.
        least, most = self.right
        if (least <= loss_before <= most) != (least <= loss_after <= most):
            if not least <= loss_after <= most:
                return "worse"
            # Of many small changes some come near the correct loss by chance, so a small gain has to meet it exactly.
            gains_little = gain < min(noise, QUIET_SHARE * loss_before)
            meets = abs(2 * loss_after / (least + most) - 1) <= EXACT
            return "same" if gains_little and not meets else "explains"
        if loss_before < least or gain < noise:
            return "same"
        # Rows of a vocabulary that a mistake dropped do not come back when the others are corrected.
        return "explains" if gain > MOST_OF_IT * (loss_before - most) else "helps"


@dataclass(frozen=True, eq=False)
class ReferenceMeasure(Measure):
    """The distance to a reference: of the logits, and of the revealed tokens."""

    reference: Reference
    tolerance: tuple[float, float]
    what: str = "the distance to the reference"

    @property
    def exact(self) -> bool:
        return True

    def of(self, model: DiffusionTransformer) -> Parts:
        return self.parts(self.reference.distance(model))

    @staticmethod
    def parts(distance: Distance) -> Parts:
        return torch.tensor([distance.apart, 1 - distance.same, 1 - distance.hidden])

    def judge(self, before: Parts, after: Parts) -> Verdict:
        most_apart, least_same = self.tolerance
        if float(after.sum()) <= most_apart + (1 - least_same):
            return "explains"
        gain = float(before[0] - after[0])
        return "helps" if gain > NEARER else "worse" if gain < -NEARER else "same"


@dataclass(frozen=True, eq=False)
class Search:
    """A search for the alternative under which the measure of a model is better than `before`, as it was loaded."""

    model: DiffusionTransformer
    measure: Measure
    before: Parts

    def over(self, candidates: Iterable[Alternative]) -> list[Trial]:
        """Measure the model under each alternative in order, until an exact measure finds the explanation."""
        cfg, trials = self.model.cfg, list[Trial]()
        tensors = {name: weight.detach() for name, weight in self.model.named_parameters()}
        for alternative in candidates:
            changed = DiffusionConfig.from_architecture(
                alternative.architecture,
                device=cfg.device,
                dtype=cfg.dtype,
                model_name=cfg.model_name,
                default_prepend_bos=cfg.default_prepend_bos,
            )
            weights = alternative.change(tensors, alternative.architecture)
            with torch.no_grad(), lent_weights(self.model, changed, weights):
                after = self.measure.of(self.model)
            verdict = self.measure.judge(self.before, after)
            trials.append(Trial(alternative.name, float(after.sum()), verdict, alternative.cause))
            if self.has_found(trials[-1:]):
                break
        return trials

    def has_found(self, trials: Iterable[Trial]) -> bool:
        """Whether the right change is certainly among these trials."""
        return self.measure.exact and any(trial.verdict == "explains" for trial in trials)


def diagnose(
    search: Search, mask_ids: list[int], foreign: list[Composition], *, off: bool, config_known: bool
) -> Finding:
    """Try the alternatives, and report the one that explains a failure.

    Args:
        mask_ids: Candidates for the id of [MASK].
        foreign: Parts that are foreign by their composition scores.
        off: Whether another check failed; then mistakes in single parts of the model are tried too.
        config_known: Whether the config was compared with the catalogue's, so that the text need not confirm it.
    """
    # 1. Alternatives of the whole model.
    a, measure = search.model.cfg.architecture, search.measure
    trials = search.over(one for one in alternatives(a, mask_ids) if measure.exact or not one.sees_more)
    # 2. Parts that are foreign by their weights. If the model is worse without one, it is not foreign.
    if not search.has_found(trials):
        for trial in search.over(without(a, score.block, score.part) for score in foreign):
            trials.append(trial if trial.verdict == "worse" else replace(trial, verdict="explains"))
    # 3. Mistakes in single parts. They are tried even if an alternative explains the failure inexactly, because one of
    #    them may improve more.
    off = off or any(trial.verdict == "explains" for trial in trials)
    if off and not search.has_found(trials):
        trials += search.over(exchanged_in_each(a))
        for try_parts in (_shifted, _without_each):
            if not search.has_found(trials):
                trials += try_parts(search)
    return _conclude(measure, float(search.before.sum()), sorted(trials, key=_order), off, config_known)


def _conclude(measure: Measure, loaded_score: float, trials: list[Trial], off: bool, config_known: bool) -> Finding:
    """The finding for all trials, which are sorted by score."""
    name = "diagnosis"
    numbers = {"measure": measure.what, "as_loaded": loaded_score, "trials": [asdict(trial) for trial in trials]}
    best_by_verdict: dict[Verdict, Trial] = {}
    for trial in trials:
        best_by_verdict.setdefault(trial.verdict, trial)
    if best := best_by_verdict.get("explains"):
        said = f"{measure.what}, {loaded_score:.3g} as loaded, is {best.score:.3g} {best.name}"
        if equal := [trial.name for trial in trials if trial.name != best.name and _order(trial) == _order(best)]:
            said += f", and the same {equal[0]}"
        return Finding(name, "off", said, best.cause, numbers)
    if off:
        said = f"none of {len(trials)} likely mistakes explains {measure.what}, {loaded_score:.3g}"
        if best := best_by_verdict.get("helps"):
            said += f"; it is {best.score:.3g} {best.name}, which helps and is still wrong"
        return Finding(name, "noted", said, numbers=numbers)
    said = f"undoing any of {len(trials)} likely mistakes does not improve {measure.what}"
    indistinct = [trial.name.removeprefix("with ") for trial in trials if trial.verdict == "same"]
    numbers |= {"untold": indistinct}
    if config_known or not indistinct:
        return Finding(name, "ok", said, numbers=numbers)
    said += f"; it hardly changes with {', '.join(indistinct)}, so only the config can tell (--as NAME)"
    return Finding(name, "noted", said, numbers=numbers)


def _without_each(search: Search) -> list[Trial]:
    """Omit each block in turn. With a reference, the block whose omission helps most is foreign.

    Without a reference none is accused: a text may get likelier without a correct block that reads the output of a
    wrong one.
    """
    a = search.model.cfg.architecture
    trials = sorted(search.over(without(a, block) for block in range(a.n_layers)), key=_order)
    trials = [replace(trial, verdict="helps") if trial.verdict == "explains" else trial for trial in trials]
    if isinstance(search.measure, ReferenceMeasure) and trials[0].verdict == "helps":
        trials[0] = replace(trials[0], verdict="explains")
    return trials


def _shifted(search: Search) -> list[Trial]:
    """Shift the rows of one matrix of the vocabulary from some id on: for a few ids, then around the best of these.

    The nearer that id is to the true one, the fewer tokens are wrong, so the score has one minimum.
    """
    a = search.model.cfg.architecture
    trials: dict[tuple[str, int, bool, int], Trial] = {}

    def score(end: str, shift: int, round_the_end: bool, first: int) -> tuple[bool, float]:
        key = end, shift, round_the_end, first
        if key not in trials:
            (trials[key],) = search.over([moved_from(a, end, shift, first, round_the_end)])
        return _order(trials[key])

    eighth = a.d_vocab // 8
    for end, shift, round_the_end, n in product(vocabulary_ends(a), (-1, 1), (False, True), (0, 2, 4, 6, 7)):
        score(end, shift, round_the_end, n * eighth)
    end, shift, round_the_end, first = min(trials, key=lambda key: _order(trials[key]))
    if trials[end, shift, round_the_end, first].verdict in ("helps", "explains"):
        low, high = max(0, first - 2 * eighth), min(first + 2 * eighth, a.d_vocab - 2)
        _search_minimum(partial(score, end, shift, round_the_end), low, high)
    return list(trials.values())


def _search_minimum(score: Callable[[int], tuple[bool, float]], first: int, last: int) -> None:
    """Golden-section search of an interval of whole numbers (Kiefer 1953)."""
    while last - first > 3:
        inner = round((last - first) * GOLDEN_RATIO)
        if score(last - inner) <= score(first + inner):
            last = first + inner
        else:
            first = last - inner
    for number in range(first, last + 1):
        score(number)


def _order(trial: Trial) -> tuple[bool, float]:
    """Sort key of a trial: by score, NaN last."""
    return trial.score != trial.score, round(trial.score, DIGITS)
