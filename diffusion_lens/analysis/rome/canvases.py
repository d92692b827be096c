"""The canvases on which the search for v* reads a loss, and the blocks that it computes on them.

The object is read on each prompt of the request. On a causal model it is teacher-forced. On a masked diffusion model
its positions are masked, and with "partial" states also partly revealed. A value that was optimised for a completely
masked object may fail as soon as the first token of the object is revealed.

    masked    no token of the object is revealed
    partial   the same, and its first 1, 2, … tokens revealed, and its last 1, 2, … tokens; equal weights for all states

A further prompt, "{subject} is a", measures how much other knowledge about the subject changes (the essence).

δ is added behind layer l at the subject's last token. The MLP's output is the last term that a block adds to the
residual stream, so this is the same as adding it at `hook_mlp_out`, and layer l need not be computed again. The
caller's hooks on layer l act before δ is added.

The attention pattern says where δ can go from there, and what the rows that are read depend on. Above layer l positions
are computed in every iteration if both hold (*moved*). The keys and values of positions that a read row depends on but
δ cannot reach are computed once (*known*); on a causal model, these are the positions before the subject's last token.
All others, such as padding and what follows the last row of a causal model, are left out. On a bidirectional model
every real position is moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.engine.answer import clean_logits
from diffusion_lens.analysis.engine.inputs import as_batch
from diffusion_lens.analysis.rome.keys import check_object, key_site
from diffusion_lens.facts.fact import Query
from diffusion_lens.hooks.names import mlp_out
from diffusion_lens.model.attention import AttentionContext, LayerKeyValues
from diffusion_lens.model.inputs import LogitRows
from diffusion_lens.model.layers import normed
from diffusion_lens.model.noise import hidden_tokens
from diffusion_lens.model.packing import Packing, is_plain, rows_of_least_work, run_blocks
from diffusion_lens.model.shapes import PosMask, Resid
from diffusion_lens.model.text import token_spans
from diffusion_lens.model.transformer import DiffusionTransformer, attention_context, origins_of

Sees = Bool[Tensor, "batch query key"]


@dataclass(frozen=True, eq=False)
class BlocksAbove:
    """The blocks above layer l on a batch of canvases, without δ.

    Attributes:
        first: The first of these blocks; `n_layers` if there is none.
        resid: The stream that enters it.
        moved, known: Positions to compute in every iteration, and those with known keys and values.
        packed: Where the known positions stand in `past`, their keys and values in each block.
    """

    model: DiffusionTransformer
    first: int
    resid: Resid
    context: AttentionContext
    moved: PosMask
    known: PosMask
    packed: Packing | None
    past: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: DiffusionTransformer,
        first: int,
        resid: Resid,
        context: AttentionContext,
        edited: PosMask,
        read: PosMask,
    ) -> "BlocksAbove":
        """Choose the positions, given where δ is added and which rows are read; compute the known keys and values."""
        n_batch, n_pos = edited.shape
        sees = context.visibility.dense(n_pos, n_pos, resid.device)[:, 0].expand(n_batch, -1, -1)
        ends = edited | read
        moved, known = ends, torch.zeros_like(ends)
        if first < model.cfg.n_layers:
            # A read row is computed in any case, and so is every position that sees it.
            reached, needed = closure(ends, sees.mT), closure(ends, sees)
            moved, known = needed & reached, needed & ~reached
        if not bool(known.any()):
            return cls(model, first, resid, context, moved, known, None, ())
        packed = Packing.of(known, assigned_rows(model, known))
        own = packed.context(context, condition=model.time.condition(None, len(packed.sequence), resid.device))
        past = [LayerKeyValues() for _ in range(first, model.cfg.n_layers)]
        run_blocks(model, packed.gather(resid), own, first, past)
        stored = [(each.keys, each.values) for each in past if each.keys is not None and each.values is not None]
        return cls(model, first, resid, context, moved, known, packed, stored)


@dataclass(frozen=True, eq=False)
class PackedPass:
    """A pass through the blocks above layer l, over the positions of some canvases that are moved.

    Attributes:
        numbers: The canvases, by their row in the batch of `above`.
        stream: The stream at the moved positions without δ.
        edited: Row and column of the position of each canvas where δ is added.
    """

    above: BlocksAbove
    numbers: Int[Tensor, "canvas"]
    stream: Float[Tensor, "row column d_model"]
    context: AttentionContext
    past: Sequence[tuple[Tensor, Tensor]]
    edited: tuple[Int[Tensor, "canvas"], Int[Tensor, "canvas"]]
    rows: LogitRows

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        above: BlocksAbove,
        numbers: Int[Tensor, "canvas"],
        positions: Int[Tensor, "canvas"],
        read: tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]],
    ) -> "PackedPass":
        """Pack some canvases, given where δ is added to each, and the canvas and row of each of the logits read."""
        model, device = above.model, above.resid.device
        chosen = torch.zeros_like(above.moved).index_fill(0, numbers, True)
        moved = above.moved & chosen
        rows = assigned_rows(model, moved)
        packing, known, past = Packing.of(moved, rows), None, []
        if above.packed is not None:
            known = Packing.of(above.known & chosen, rows)
            past = [(above.packed.repacked(k, known), above.packed.repacked(v, known)) for k, v in above.past]
        n_rows, n_column = packing.sequence.shape
        condition = model.time.condition(None, n_rows, device)
        return cls(
            above,
            numbers,
            packing.gather(above.resid),
            packing.context(above.context, known, condition),
            past,
            packing.find(numbers, positions),
            LogitRows.parse(packing.find(*read), n_rows, n_column, device),
        )

    def logits(self, edited: Float[Tensor, "canvas d_model"]) -> Float[Tensor, "selected d_vocab_out"]:
        """The logits at the rows that are read, given the stream of each canvas where δ is added, with δ."""
        model, first = self.above.model, self.above.first
        past: list[LayerKeyValues] = [LayerKeyValues(*each) for each in self.past]
        past = past or [LayerKeyValues() for _ in range(first, model.cfg.n_layers)]
        stream = self.stream.index_put(self.edited, edited)
        resid = run_blocks(model, stream, self.context, first, past, self.rows)
        normalized = normed(model.ln_final, resid, model.time.of_final_norm(self.context.condition))
        logits: Tensor = model.unembed(self.rows.without_padding(normalized))
        return logits


def closure(start: PosMask, leads_to: Sees) -> PosMask:
    """The positions that can be reached from those of `start` in any number of steps, each from a row to a column."""
    while True:
        more = start | (leads_to & start[:, :, None]).any(dim=1)
        if torch.equal(more, start):
            return start
        start = more


def assigned_rows(model: DiffusionTransformer, needed: PosMask) -> Int[Tensor, "batch"]:
    """The row of a packed pass for each canvas with positions that are needed."""
    lengths = needed.sum(dim=1)
    canvases = lengths.nonzero().flatten()
    cfg = model.cfg.sizes
    assert cfg.d_mlp is not None
    of_maps = 4 * cfg.d_model**2 + 3 * cfg.d_model * cfg.d_mlp
    rows = rows_of_least_work(lengths[canvases].tolist(), of_maps, 2 * cfg.n_heads * cfg.d_head)
    return torch.zeros_like(lengths).index_copy(0, canvases, torch.tensor(rows, device=lengths.device))


ESSENCE = "{} is a"
DISTRIBUTION = -1


class Read(NamedTuple):
    """One row of a canvas's logits, the token scored there (`DISTRIBUTION`: all should stay), and its weight."""

    row: int
    token: int
    weight: float


class ReadCanvas(NamedTuple):
    """A canvas, and the rows of its logits that are read."""

    query: Query
    reads: list[Read]


class ValueObjective(NamedTuple):
    """The canvases on which the loss of one request is computed: its prompts, the plain one first, and an essence."""

    objects: list[ReadCanvas]
    essences: list[ReadCanvas]


def objective_of(
    model: DiffusionTransformer, request: Sequence[Query], essence: Query | None, essence_at: str, over_states: str
) -> ValueObjective:
    """The objective of a request; without an essence it has no KL term."""
    check_object(model, request)
    objects = []
    for query in request:
        states = _partial(query) if over_states == "partial" and not model.cfg.is_autoregressive else [query]
        for state in states:
            weight = 1 / (len(request) * len(states) * len(state.answer_tokens))
            rows = model.readout.rows(torch.tensor(state.answer_positions)).tolist()
            pairs = zip(rows, state.answer_tokens, strict=True)
            objects.append(ReadCanvas(state, [Read(row, token, weight) for row, token in pairs]))
    if essence is None:
        return ValueObjective(objects, [])
    rows = [essence.subject[1] - 1] if essence_at == "subject_last" else _rows_at_readout(model, essence)
    return ValueObjective(objects, [ReadCanvas(essence, [Read(row, DISTRIBUTION, 1 / len(rows)) for row in rows])])


def default_essence(model: DiffusionTransformer, query: Query) -> Query:
    """The prompt "{subject} is a"; on a diffusion model followed by a [MASK], or under uniform noise a random token."""
    if model.tokenizer is None:
        raise ValueError(
            f"{model.cfg.model_name!r} has no tokenizer to write '{ESSENCE}' with: pass essence=, a Query over its "
            "tokens with the subject marked, or kl_factor=0.0 for a search without an essence"
        )
    subject = model.to_string(query.tokens[slice(*query.subject)]).strip()
    text = ESSENCE.format(subject)
    of_subject = [i for i, (start, stop) in enumerate(token_spans(model, text)) if start < len(subject) and stop > 0]
    # `encode` does not warn of unknown words: the caller did not choose the words of the template.
    tokens = [*model.encode(text), *([] if model.cfg.is_autoregressive else hidden_tokens(model.cfg, 1, text))]
    return Query(torch.tensor(tokens), (of_subject[0], of_subject[-1] + 1), (), ())


def _partial(query: Query) -> list[Query]:
    n_tokens = len(query.answer_tokens)
    hidden = [range(n_revealed, n_tokens) for n_revealed in range(n_tokens)]
    hidden += [range(n_tokens - n_revealed) for n_revealed in range(1, n_tokens)]
    return [_hide_only(query, tokens) for tokens in hidden]


def _hide_only(query: Query, hidden: Sequence[int]) -> Query:
    """The canvas with the object revealed except for the tokens `hidden`, which become the answer of the query."""
    tokens = query.tokens.clone()
    for i, (position, token) in enumerate(zip(query.answer_positions, query.answer_tokens, strict=True)):
        if i not in hidden:
            tokens[position] = token
    positions = tuple(query.answer_positions[i] for i in hidden)
    return Query(tokens, query.subject, positions, tuple(query.answer_tokens[i] for i in hidden))


def _rows_at_readout(model: DiffusionTransformer, essence: Query) -> list[int]:
    positions = list(essence.answer_positions)
    if not positions:
        real = model.padding.real(essence.tokens.to(model.cfg.device)[None])
        end = len(essence.tokens) if real is None else int(real[0].nonzero().max()) + 1
        if model.cfg.has_mask:
            positions = (essence.tokens == model.cfg.blank).nonzero().flatten().tolist()
        else:
            positions = [end if model.cfg.is_autoregressive else end - 1]
    if not positions:
        raise ValueError(
            "the essence has no position to read: end it with a [MASK], give it answer_positions, or use "
            "essence_at='subject_last'"
        )
    rows: list[int] = model.readout.rows(torch.tensor(positions)).tolist()
    return rows


@dataclass(frozen=True, eq=False)
class Canvases:
    """A batch of canvases of several requests.

    Attributes:
        resid: Residual stream that leaves layer l, without δ.
        positions: Position of the subject's last token, where δ is added.
        keys, outputs: Input of the down-projection and output of the MLP there.
        owner: Request of each canvas, in order.
        canvas, row, token, weight: Canvas of each read, and the fields of `Read`.
        present: Token on the canvas in the row that is read.
        origins: The first position that is read in blocks, where canvases differ in it.
        packed: The pass over the positions that δ changes; `None` if hooks above layer l expect whole canvases.
    """

    resid: Resid
    real: PosMask | None
    positions: Int[Tensor, "batch"]
    keys: Float[Tensor, "batch d_mlp"]
    outputs: Float[Tensor, "batch d_model"]
    owner: Int[Tensor, "batch"]
    canvas: Int[Tensor, "selected"]
    row: Int[Tensor, "selected"]
    token: Int[Tensor, "selected"]
    weight: Float[Tensor, "selected"]
    present: Int[Tensor, "selected"]
    origins: Int[Tensor, "batch"] | None = None
    packed: PackedPass | None = None

    @classmethod
    @torch.no_grad()
    def upon(cls, model: DiffusionTransformer, layer: int, requests: Sequence[Sequence[ReadCanvas]]) -> "Canvases":
        """Compute the blocks that do not depend on δ, for the canvases of each request."""
        flat = [(owner, *canvas) for owner, canvases in enumerate(requests) for canvas in canvases]
        reads = [(canvas, *read) for canvas, (_, _, rows) in enumerate(flat) for read in rows]
        tokens, real = as_batch(model, [query for _, query, _ in flat])
        device = tokens.device
        positions = torch.tensor([query.subject[1] - 1 for _, query, _ in flat], device=device)
        resid, cache = model.run_with_cache(
            tokens,
            attention_mask=real,
            stop_at_layer=layer + 1,
            names_filter=[key_site(layer), mlp_out(layer)],
            device=device,
        )
        numbers = torch.arange(len(positions), device=device)
        at = numbers, positions
        origins = origins_of(model, tokens, real)
        origins = None if origins is None else origins.repeat(len(numbers) // len(origins))
        canvas, row, token, weight = (torch.tensor(column, device=device) for column in zip(*reads, strict=True))
        packed = None
        if is_plain(model, layer + 1):
            edited, read = (torch.zeros_like(tokens, dtype=torch.bool) for _ in range(2))
            edited[at] = read[canvas, row] = True
            counted = None if real is None else (real.long().cumsum(dim=1) - 1).clamp(min=0)
            context = attention_context(model, resid, real, counted, 0, origins)
            above = BlocksAbove.of(model, layer + 1, resid, context, edited, read)
            packed = PackedPass.of(above, numbers, positions, (canvas, row))
        return cls(
            resid,
            real,
            positions,
            keys=widened(cache[key_site(layer)][at]),
            outputs=widened(cache[mlp_out(layer)][at]),
            owner=torch.tensor([owner for owner, _, _ in flat], device=device),
            present=torch.tensor([int(flat[canvas][1].tokens[row]) for canvas, row, _, _ in reads], device=device),
            canvas=canvas,
            row=row,
            token=token,
            weight=weight,
            origins=origins,
            packed=packed,
        )

    @property
    def request(self) -> Int[Tensor, "selected"]:
        """The request of each read."""
        return self.owner[self.canvas]

    @property
    def is_distribution(self) -> Bool[Tensor, "selected"]:
        """Whether each read is of a whole distribution."""
        return self.token == DISTRIBUTION

    @property
    def plain(self) -> Int[Tensor, "request"]:
        """The first canvas of each request."""
        return torch.searchsorted(self.owner, self.owner.unique())

    def of(self, requests: Int[Tensor, "request"]) -> "Canvases":
        """The canvases of some requests, which are renumbered in this order."""
        selected = torch.isin(self.owner, requests)
        read, packed = selected[self.canvas], self.packed
        if packed is not None:
            numbers = packed.numbers
            packed = PackedPass.of(
                packed.above, numbers[selected], self.positions[selected], (numbers[self.canvas[read]], self.row[read])
            )
        chosen: dict[str, Any] = {name: getattr(self, name)[read] for name in ("row", "token", "weight", "present")}
        for name in ("resid", "real", "positions", "keys", "outputs", "origins"):
            of_canvases = getattr(self, name)
            chosen[name] = None if of_canvases is None else of_canvases[selected]
        return replace(
            self,
            **chosen,
            owner=torch.searchsorted(requests, self.owner[selected]),
            canvas=(selected.cumsum(dim=0) - 1)[self.canvas[read]],
            packed=packed,
        )

    def log_probs(
        self, model: DiffusionTransformer, layer: int, delta: Float[Tensor, "request d_model"]
    ) -> Float[Tensor, "selected d_vocab_out"]:
        """Log-probabilities at the rows that are read, with each request's δ."""
        at = torch.arange(len(self.positions), device=self.positions.device), self.positions
        edited = (widened(self.resid[at]) + delta[self.owner]).to(self.resid.dtype)
        if self.packed is not None:
            logits = self.packed.logits(edited)
        else:
            with model.clock.at(model.clock.step, origins=self.origins):
                logits = model(
                    self.resid.index_put(at, edited),
                    start_at_layer=layer + 1,
                    attention_mask=self.real,
                    logits_at=(self.canvas, self.row),
                )
        return torch.log_softmax(clean_logits(model, widened(logits), self.present), dim=-1)


def widened(x: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it has that dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
