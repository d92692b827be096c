"""Evidence, edge cuts and routes: what the reader of an answer gets from the source of its fact, head by head.

The reader is the position in whose row the answer is predicted, the source a position of the fact's other name.

Evidence: a head that attends to position j with weight 1 adds W_O v_j to the reader's residual stream. Its direct
effect on the logit of token y is

    e(y | j) = (gamma · U_y) · (W_O v_j),

with gamma the weight of the final norm and U_y the column of the head. In a network with time conditioning, W_O v_j
passes the gate and gamma is scaled as at that time. Neither the reader nor a position occurs, so what one direction
has written can be reused by the other. The formula is ours, after the claim of arXiv 2602.02133 that the value side
does not know positions. It follows the direct path only: what later blocks make of the output is not in it.

Edge cut, the causal counterpart: what the answer loses when its reader no longer attends to the source. A cut edge
changes what its block writes at the reader only, so that this block runs at the reader alone, with the keys and values
that the other positions have without the cut, and the later blocks run at all positions. Hooks expect all positions, so
that with hooks the whole block runs.

Routes: the scores with which the reader of each canvas attends to its source. The score of reader i and source j is
q^T R_(j-i) k / sqrt(d_head), with R the rotation. The two directions share q (of [MASK]) and k (of the source) where
these depend on the tokens only, and differ in the offset d = j - i. (With a shifted readout and a name of one token,
the reader is the token before [MASK], and the two queries are those of two words.) For independent isotropic q and k
the correlation of the two scores is `isotropic_route_correlation`, or `correlation_of_frequencies` for scaled
frequencies.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion_lens.analysis.engine.answer import clean_logits
from diffusion_lens.analysis.engine.inputs import padded
from diffusion_lens.analysis.engine.kept_run import stream_entering
from diffusion_lens.facts.taught_pairs import TaughtCanvas, TaughtPair
from diffusion_lens.hooks.names import Hook
from diffusion_lens.model.attention import AttentionPattern, LayerKeyValues
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.hook_points import is_hooked
from diffusion_lens.model.layers import Norm, beside, rows_of
from diffusion_lens.model.packing import Packing, is_plain
from diffusion_lens.model.shapes import PosMask, Resid, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer, attention_context, origins_of, positions_of
from diffusion_lens.settings import Real, Whole, at_least, checked_arguments, plain_number, whole_number

LARGEST = 32
Heads = int | slice


@dataclass(frozen=True, eq=False)
class CanvasBatch:
    """One canvas of each pair, padded on the right."""

    model: DiffusionTransformer
    tokens: Tokens
    real: PosMask | None  # `None` without padding
    rows: Int[Tensor, "batch"]  # of the logits in which the answer is read
    sources: Int[Tensor, "batch"]  # positions
    answers: Int[Tensor, "batch"]  # tokens

    @classmethod
    def of(cls, model: DiffusionTransformer, canvases: Sequence[TaughtCanvas]) -> "CanvasBatch":
        """The canvases as they are, each with the padding that the model sees in its own tokens."""
        device = model.cfg.main_device
        tokens, real = padded(model, [canvas.tokens.to(device) for canvas in canvases])
        for row, canvas in enumerate(canvases):
            own = model.padding.real(tokens[row : row + 1, : len(canvas.tokens)])
            if own is not None:
                real[row, : len(canvas.tokens)] = own[0]
        indices = ([getattr(canvas, name) for canvas in canvases] for name in ("row", "source", "answer_token"))
        rows, sources, answers = (torch.tensor(each, device=device) for each in indices)
        return cls(model, tokens, None if bool(real.all()) else real, rows, sources, answers)

    @property
    def each(self) -> Int[Tensor, "batch"]:
        """The indices of the rows of the batch."""
        return torch.arange(len(self.tokens), device=self.tokens.device)

    @property
    def sees_source(self) -> Bool[Tensor, "batch"]:
        """Whether the reader sees the source."""
        n_pos, device = self.tokens.shape[1], self.tokens.device
        pattern = AttentionPattern.of(self.model.cfg)
        visibility = pattern.visibility(n_pos, device, self.real, origin=origins_of(self.model, self.tokens, self.real))
        allowed = visibility.dense(n_pos, n_pos, device)
        seen: Tensor = allowed[:, 0].expand(len(self.tokens), -1, -1)[self.each, self.rows, self.sources]
        return seen

    def at_rows(self, x: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch d"]:
        """The entry of each canvas at the row that is read."""
        return x[self.each, self.rows]

    def logits(
        self,
        hooks: Sequence[tuple[str, Hook]] = (),
        resid: Float[Tensor, "batch pos d_model"] | None = None,
        start_at_layer: int | None = None,
    ) -> Float[Tensor, "batch d_vocab_out"]:
        """The logits in the row of each canvas, of a whole pass or of one that starts at a layer."""
        with self.model.clock.at(None, origins=origins_of(self.model, self.tokens, self.real)):
            read: Any = self.model.run_with_hooks(
                self.tokens if resid is None else resid,
                attention_mask=self.real,
                start_at_layer=start_at_layer,
                logits_at=(self.each, self.rows),
                fwd_hooks=list(hooks),
            )
        logits: Tensor = read
        return logits

    def losses(self, logits: Float[Tensor, "batch d_vocab_out"]) -> Float[Tensor, "batch"]:
        """-log p(answer) in nats, computed in float64."""
        logits = clean_logits(self.model, logits.double(), self.tokens[self.each, self.rows])
        return -logits.log_softmax(dim=-1)[self.each, self.answers]


@dataclass(frozen=True, eq=False)
class CanvasReading:
    """The states of one pass, in lists by layer."""

    batch: CanvasBatch
    losses: Float[Tensor, "fact"]  # -log p(answer)
    keys: list[Float[Tensor, "fact kv_head d_head"]]  # at the source, before norm and rotation
    queries: list[Float[Tensor, "fact head d_head"]]  # at the reader, before norm and rotation
    scores: list[Float[Tensor, "fact head"]]  # from reader to source, in float32 at least
    streams: list[Float[Tensor, "fact pos d_model"]]  # the residual stream that enters the layer
    attended: list[tuple[Tensor, Tensor]]  # keys, as they meet the queries, and values, [fact pos kv_head d_head]

    @classmethod
    def of(cls, batch: CanvasBatch) -> "CanvasReading":
        """One forward pass without gradients."""
        reader = PassReader(batch)
        with torch.no_grad():
            return reader.reading(batch.losses(reader.logits()))


class PassReader:
    """Reads the states of one pass of a batch of canvases, with gradients or without.

    Scores are computed from queries and keys, unless they are hooked: attention that computes all of them explicitly
    would have other last bits in its gradients, and a graph with all of them.
    """

    def __init__(self, batch: CanvasBatch) -> None:
        self.batch = batch
        self._read: dict[str, list[Tensor]] = {}

    def logits(self) -> Float[Tensor, "batch d_vocab_out"]:
        """Run the pass. Returns the logits in the row of each canvas."""
        batch, hooks = self.batch, []
        each, rows, sources = batch.each, batch.rows, batch.sources
        for layer, block in enumerate(batch.model.blocks):
            attn = f"blocks.{layer}.attn"
            if layer:
                hooks.append(self._hook(stream_entering(layer), "streams"))
            hooks += [self._hook(f"{attn}.{name}", name, (each, rows)) for name in ("hook_q", "hook_rot_q")]
            hooks += [self._hook(f"{attn}.{name}", name) for name in ("hook_rot_k", "hook_v")]
            hooks.append(self._hook(f"{attn}.hook_k", "hook_k", (each, sources)))
            if is_hooked(block.attn.hook_attn_scores):
                hooks.append(self._hook(_scores_of(layer), _scores_of(layer), (each, slice(None), rows, sources)))
        # Not `hook_embed`, which does not have the vectors of learned positions.
        embedded: Resid = batch.model(batch.tokens, attention_mask=batch.real, stop_at_layer=0)
        self._read["streams"] = [embedded.detach()]
        return batch.logits(hooks, embedded, 0)

    def reading(self, losses: Float[Tensor, "fact"]) -> CanvasReading:
        """What the pass has read, with its losses."""
        read, batch, scores = self._read, self.batch, []
        for layer, (q, k) in enumerate(zip(read["hook_rot_q"], read["hook_rot_k"], strict=True)):
            hooked = read.get(_scores_of(layer))
            scores.append(
                hooked[0].float() if hooked else scores_between(batch, layer, q, k[batch.each, batch.sources])
            )
        attended = list(zip(read["hook_rot_k"], read["hook_v"], strict=True))
        return CanvasReading(batch, losses, read["hook_k"], read["hook_q"], scores, read["streams"], attended)

    def _hook(self, point: str, name: str, index: Any = ...) -> tuple[str, Hook]:
        def keep(x: Tensor, hook: Any) -> None:
            # Blocks may be on several devices.
            self._read.setdefault(name, []).append(x.detach().to(self.batch.rows.device)[index])

        return point, keep


@torch.no_grad()
def evidence_of(
    reading: CanvasReading, candidates: Sequence[int], *, by_head: bool = False
) -> Float[Tensor, "fact layer *head candidate"]:
    """The evidence for every candidate, of all heads of a layer together or of each, in float32 at least."""
    model, batch = reading.batch.model, reading.batch
    token_ids = torch.tensor(list(candidates), device=batch.tokens.device)
    wide = torch.promote_types(model.cfg.dtype, torch.float32)
    columns = (
        rows_of(model.unembed.weight, token_ids).to(wide) * beside(model.time.final_weight(), token_ids).to(wide)
    ).T
    by_layer = []
    for layer, (block, (_, at_all)) in enumerate(zip(model.blocks, reading.attended, strict=True)):
        values = at_all[batch.each, batch.sources]
        weights = beside(block.attn.W_O, values).to(wide) * model.time.gates(layer)[0].to(wide)
        by_query_head = values.to(wide).repeat_interleave(len(weights) // values.shape[1], dim=1)
        written = torch.einsum("fhd,hdm->fhm" if by_head else "fhd,hdm->fm", by_query_head, weights)
        by_layer.append(written @ columns)
    return torch.stack(by_layer, dim=1)


def percentiles(
    evidence: Float[Tensor, "fact layer candidate"], right: Sequence[int]
) -> Float[Tensor, "fact estimate layer"]:
    """The share of the other candidates that the right answer of a fact exceeds: by the evidence of the fact's own
    source, and in the mean by that of the sources of all facts. `right` are the answers' indices.

    The second is the baseline: how an answer ranks whatever the source. Its mean is 0.5 if each candidate is the answer
    of equally many of the facts, for each source ranks all candidates; without the fact's own source it would be lower
    the higher the first is. A tie counts half.
    """
    shares = []
    for index in right:
        own = evidence[..., index, None]
        exceeded = (evidence < own).sum(dim=-1) + 0.5 * ((evidence == own).sum(dim=-1) - 1)
        shares.append(exceeded / (evidence.shape[-1] - 1))
    table = torch.stack(shares)
    return torch.stack([table.diagonal().T, table.mean(dim=1)], dim=1)


def reuse(
    one: Float[Tensor, "fact layer candidate"], other: Float[Tensor, "fact layer candidate"]
) -> Float[Tensor, "fact layer"]:
    """The cosine of the evidence on two canvases, each centred over the candidates.

    It is 1 where the value depends on its token only, as in the first block of a model without learned positions.
    """
    centred = [x.double() - x.double().mean(dim=-1, keepdim=True) for x in (one, other)]
    return F.cosine_similarity(centred[0], centred[1], dim=-1).float()


def other_facts(forward: CanvasBatch, reverse: CanvasBatch) -> Bool[Tensor, "fact fact"]:
    """Whether two pairs of a batch are about different facts: no answer and no source of theirs is the same token.

    Another wording about the same person is no baseline for a person.
    """
    sides = (forward, reverse)
    tokens = torch.stack([side.answers for side in sides] + [side.tokens[side.each, side.sources] for side in sides])
    return (tokens[:, :, None] != tokens[:, None, :]).all(dim=0)


def mean_where(
    table: Float[Tensor, "fact fact *rest"], chosen: Bool[Tensor, "fact fact"]
) -> Float[Tensor, "fact *rest"]:
    """The mean of the chosen entries of each row; NaN where none is."""
    where = chosen.view(*chosen.shape, *[1] * (table.dim() - 2))
    return table.masked_fill(~where, 0).sum(dim=1) / where.sum(dim=1)


@torch.no_grad()
def edge_cut_of(reading: CanvasReading, *, by_head: bool = False) -> Float[Tensor, "fact layer *head"]:
    """log p(answer) minus the same with the edge from reader to source cut in one layer, or in one of its heads.

    A cut edge has the score -inf, so that the reader divides its attention among the other positions. In nats, positive
    where the edge helps; NaN where there is no edge to cut, because the reader does not see the source.
    """
    batch = reading.batch
    cfg = batch.model.cfg
    heads: list[Heads] = list(range(cfg.n_heads)) if by_head else [slice(None)]
    alone = batch.tokens.shape[1] > 1 and is_plain(batch.model, 0)
    cut = _cut_at_reader(reading) if alone else _cut_in_whole_block(reading)
    layers = range(cfg.n_layers)
    by_layer = [torch.stack([batch.losses(cut(layer, head)) for head in heads], dim=1) for layer in layers]
    lost = torch.stack(by_layer, dim=1) - reading.losses[:, None, None]
    lost[~batch.sees_source] = torch.nan
    return (lost if by_head else lost[..., 0]).float()


def _cut_in_whole_block(reading: CanvasReading) -> Callable[[int, Heads], Tensor]:
    """The function of layer and heads that returns the logits with the edge cut there."""
    batch = reading.batch

    def logits(layer: int, head: Heads) -> Tensor:
        def cut(scores: Tensor, hook: Any) -> Tensor:
            changed = scores.clone()
            changed[batch.each, head, batch.rows, batch.sources] = float("-inf")
            return changed

        return batch.logits([(_scores_of(layer), cut)], reading.streams[layer], layer)

    return logits


def _cut_at_reader(reading: CanvasReading) -> Callable[[int, Heads], Tensor]:
    """The same function, with the reader as the only position of the block's pass."""
    batch, streams = reading.batch, reading.streams
    model, each = batch.model, batch.each
    origins = origins_of(model, batch.tokens, batch.real)
    origins = None if origins is None else origins.repeat(len(each) // len(origins))
    positions = None if batch.real is None else (batch.real.long().cumsum(dim=1) - 1).clamp(min=0)
    whole = attention_context(model, streams[0], batch.real, positions, 0, origins)
    reads = torch.zeros_like(batch.tokens, dtype=torch.bool)
    reads[each, batch.rows] = True
    readers, others = Packing.of(reads, each), Packing.of(~reads, each)
    context = readers.context(whole, others, model.time.condition(None, len(each), batch.tokens.device))
    is_source = others.before(readers).position == batch.sources[:, None]

    def logits(layer: int, head: Heads) -> Tensor:
        def cut(scores: Tensor, hook: Any) -> Tensor:
            changed = scores.clone()
            where = is_source if isinstance(head, int) else is_source[:, None]
            changed[:, head, 0] = changed[:, head, 0].masked_fill(where, float("-inf"))
            return changed

        known = LayerKeyValues(*(others.gather(states) for states in reading.attended[layer]))
        with model.hooks(fwd_hooks=[(_scores_of(layer), cut)]), model.clock.passes[get_ident()]:
            written = model.blocks[layer](readers.gather(streams[layer]), context, known)
        # Behind the last block, only the rows of the readers are read.
        stream = streams[min(layer + 1, len(streams) - 1)].index_put((each, batch.rows), written[:, 0])
        return batch.logits(resid=stream, start_at_layer=layer + 1)

    return logits


def _scores_of(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_attn_scores"


@torch.no_grad()
def routes_of(forward: CanvasReading, reverse: CanvasReading) -> Float[Tensor, "fact route layer head"]:
    """The scores reader to source of the forward canvas, of the reverse one, and the counterfactual ones (`routes`).

    NaN where the reader of one of the two canvases does not see the source.
    """
    scores = [torch.stack(reading.scores, dim=1).float() for reading in (forward, reverse)]
    routes = torch.stack([*scores, _turned(forward, reverse.batch)], dim=1)
    routes[~(forward.batch.sees_source & reverse.batch.sees_source)] = torch.nan
    return routes


def _turned(reading: CanvasReading, at: CanvasBatch) -> Float[Tensor, "fact layer head"]:
    """The scores of a pass's queries and keys at the positions of reader and source of other canvases.

    NaN with learned positions: they are in queries and keys already, and cannot be exchanged there.
    """
    model, scores = at.model, []
    if model.positions.learned:
        return torch.stack(reading.scores, dim=1).float() * torch.nan

    def normed(norm: nn.Module | None, x: Tensor) -> Tensor:
        return norm.without_hooks(x) if isinstance(norm, Norm) else x

    at_rows, at_sources = at.rows[:, None], at.sources[:, None]
    for layer, (block, q, k) in enumerate(zip(model.blocks, reading.queries, reading.keys, strict=True)):
        positions = positions_of(model, layer)
        turned_q = positions.turn(block.attn.clipped(normed(block.attn.q_norm, q)[:, None]), at_rows)
        turned_q = positions.scale_queries(turned_q, at_rows)[:, 0]
        turned_k = positions.turn(block.attn.clipped(normed(block.attn.k_norm, k)[:, None]), at_sources)[:, 0]
        scores.append(scores_between(at, layer, turned_q, turned_k))
    return torch.stack(scores, dim=1).float()


def scores_between(
    at: CanvasBatch, layer: int, q: Float[Tensor, "fact head d_head"], k: Float[Tensor, "fact kv_head d_head"]
) -> Float[Tensor, "fact head"]:
    """The scores of a rotated query at each reader and a rotated key at its source, in float32 at least.

    They are those of a reader that sees the source, whether or not it does so.
    """
    by_query_head = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores: Tensor = (q.to(wide) * by_query_head).sum(dim=-1) / at.model.blocks[layer].attn.divisor
    bias = at.model.positions.score_bias(at.rows[:, None], at.sources[:, None])
    return scores if bias is None else scores + bias[:, :, 0, 0]


@checked_arguments
def isotropic_route_correlation(d_head: Whole, forward_offset: Whole, reverse_offset: Whole, base: Real) -> float:
    """The correlation of the scores at two offsets, if queries and keys are independent and isotropic.

        rho(a, b) = 2/d_head · Σ_m cos((a - b) · base^(-2m/d_head)),  m = 0 ... d_head/2 - 1

    Args:
        d_head: Dimensions of a head.
        forward_offset, reverse_offset: Position of the source minus position of the reader, in tokens.
        base: Base of the rotary frequencies.

    Raises:
        ValueError: `d_head` is odd or below 2, or the base is not above 0.
    """
    width, frequency_base = at_least(2, "d_head", d_head), plain_number("base", base)
    if width % 2 or width > 2**16 or not 0 < frequency_base < math.inf:
        raise ValueError(
            f"d_head={width}, base={frequency_base}; d_head must be even, at most {2**16}, and the base above 0"
        )
    turned = whole_number("forward_offset", forward_offset) - whole_number("reverse_offset", reverse_offset)
    half = width // 2
    return sum(math.cos(turned * frequency_base ** (-m / half)) for m in range(half)) / half


@checked_arguments
def correlation_of_frequencies(
    frequencies: Float[Tensor, "frequency"], forward_offset: int, reverse_offset: int
) -> float:
    """`isotropic_route_correlation` for a model's own rotary frequencies, such as scaled ones: the mean over m of
    cos((a - b) · frequency_m), with the frequencies in radians per position (`model.positions.frequencies`).

    Raises:
        ValueError: There is no frequency.
    """
    if not len(frequencies):
        raise ValueError("frequencies is empty; give model.positions.frequencies, or some of them")
    return float(((forward_offset - reverse_offset) * frequencies.double()).cos().mean())


def pair_bytes(cfg: DiffusionConfig, n_pos: int, n_facts: int, n_candidates: int = 0) -> int:
    """Bytes to reserve for one pair of canvases of `n_pos` positions in a batch of `n_facts`.

    Gradients need most: inputs and output gradients of every matrix for both canvases, in float32 at least, and the
    graph of one pass. Inner products of a matrix need a table of positions by positions.
    """
    cfg = cfg.sizes
    size, wide = cfg.dtype.itemsize, max(cfg.dtype.itemsize, 4)
    d_attn, d_key_value = (heads * cfg.d_head for heads in (cfg.n_heads, cfg.n_key_value_heads or cfg.n_heads))
    read_and_written = 4 * cfg.d_model + 2 * d_attn + 2 * d_key_value + 4 * cfg.most_units
    graph = cfg.d_model * (2 * size + 2 * wide) + (2 * cfg.most_units + 2 * d_attn) * size
    scores = 3 * cfg.n_heads * n_pos**2 * wide
    tables = 3 * n_facts * n_pos**2 * wide
    head = 5 * cfg.d_vocab_out * 8  # log-probabilities and their gradient are in float64
    evidence = 5 * cfg.n_layers * n_candidates * wide
    return n_pos * cfg.n_layers * (2 * read_and_written * wide + graph) + scores + tables + head + evidence


def longest_canvas(pairs: Sequence[TaughtPair]) -> int:
    """Number of positions of the longest canvas."""
    return max(len(canvas.tokens) for pair in pairs for canvas in (pair.forward, pair.reverse))


def plan_batches(
    cfg: DiffusionConfig, n_pos: int, n_pairs: int, batch_size: Whole | None, max_bytes: int, n_candidates: int = 0
) -> list[range]:
    """The indices of the pairs that are computed together: batches of nearly equal sizes.

    A pair alone has no shuffled pairs, so an odd number of pairs is not divided by two: some batches have three then.

    Args:
        n_pos: Number of positions of the longest canvas.
        batch_size: Largest number of pairs; by default as many as fit `max_bytes`, at most 32.

    Raises:
        ValueError: The budget does not suffice for two pairs, or for `batch_size` pairs.
    """
    least = min(3 if n_pairs % 2 else 2, n_pairs)
    wanted = least if batch_size is None else min(at_least(1, "batch_size", batch_size), n_pairs)
    if wanted == 2:
        wanted = least
    if (needed := wanted * pair_bytes(cfg, n_pos, wanted, n_candidates)) > max_bytes:
        smaller = "" if wanted <= least else ", or choose a smaller batch_size"
        raise ValueError(f"max_bytes={max_bytes:,} is too small: {wanted} pairs take {needed:,} bytes{smaller}")
    if batch_size is None:
        fitting = [n for n in range(least, LARGEST + 1) if n * pair_bytes(cfg, n_pos, n, n_candidates) <= max_bytes]
        wanted = min(fitting[-1], n_pairs)
    n_batches = -(-n_pairs // wanted)
    ends = [n_pairs * i // n_batches for i in range(n_batches + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]
