"""How a twin learns from its causal model: the loss, the row with which its [MASK] begins, and low-rank additions.

    loss = masked loss of a part of the rows
           + distil · (KL(causal model ‖ twin) + states · distance of residual streams) of the others

The others are cut where the causal model began to write, and everything behind is masked. At the first [MASK], the twin
knows as much as the causal model at its next token, and has to predict the same from the same states.

The first token of a causal model sees only itself, which makes it an attention sink. In a twin whose first token sees
the whole canvas (`causal_first=False`), it is none. There a [MASK] that is a sink makes up for that, so its row of the
embedding begins as that of a special token, the one with which the untrained twin predicts best. It is always trained.

Trained are one row of the embedding and low-rank additions to the projections of every block, with all other weights
frozen (Hu et al. 2021):

    y = W x + (alpha / r) B A x

A begins at random and B at zero, so that the first update starts from the model itself. The additions are parameters of
the projections, `blocks.0.attn.q.lora_a`, so that the trainer updates, saves and hashes them as it does all weights.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion_lens.hooks.clock import restoring
from diffusion_lens.loading.delta import LowRank
from diffusion_lens.model.layers import Embed, Linear, Unembed, linear
from diffusion_lens.model.loss import hide, masked_batch
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.text import require_tokenizer
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings.shared import AdaptSettings
from diffusion_lens.training.corpus import Corpus
from diffusion_lens.training.trainer import Batch, RowOrder, RowSource, sha256_of

_TOGETHER = 20  # distilled rows in one pass
_TRIED = 16  # rows on which beginnings of the [MASK] row are compared
_TRIED_TOKENS = 16  # special tokens that are tried; some tokenizers have hundreds

# Logits, and the residual streams from which they come.
Goal = tuple[Float[Tensor, "batch d_vocab_out"], list[Float[Tensor, "batch d_model"]]]


class TwinLoss(RowSource):
    """The rows of an adaptation, and its loss; the trainer asks for rows, then for their loss."""

    def __init__(self, causal: DiffusionTransformer, corpus: Corpus, settings: AdaptSettings) -> None:
        self.causal, self.corpus, self.settings = causal, corpus, settings
        self.step = 0
        self.rows: Int[Tensor, "batch"] = torch.empty(0, dtype=torch.long)

    @property
    def n_rows(self) -> int:
        return len(self.corpus)

    def sha256(self) -> str:
        return sha256_of(vars(self.corpus))

    def __repr__(self) -> str:
        return f"adapt({self.settings.describe()})"

    def next_batch(self, order: RowOrder, batch_size: int, device: str | torch.device | None) -> Batch:
        self.step, self.rows = order.step, order.take(batch_size)
        return Batch(self.corpus.tokens[self.rows].to(device), None, None)

    def __call__(
        self, model: DiffusionTransformer, tokens: Tokens, generator: torch.Generator | None
    ) -> Float[Tensor, ""]:
        s = self.settings
        n_distilled = round(s.distil_share * len(tokens)) if s.distil else 0
        loss = torch.zeros((), device=tokens.device)
        with self._attention(model):
            if n_distilled < len(tokens):
                length = s.length - int(torch.randint(1 + (s.crop or 0), (), generator=generator))
                loss = loss + masked_loss(model, tokens[n_distilled:, :length], generator)
            if n_distilled:
                canvases = self.canvases(self.rows[:n_distilled], round(s.one_mask * n_distilled), generator)
                # Canvases of about one length pass together, so that few positions are padding.
                for rows, cuts, ends in canvases[:, canvases[2].argsort()].split(_TOGETHER, dim=1):
                    divergence, apart = self.distances(model, rows, cuts, ends, self.goal(rows, cuts))
                    loss = loss + s.distil / n_distilled * (divergence + s.states * apart)
        return loss

    def canvases(
        self, rows: Int[Tensor, "batch"], n_one: int, generator: torch.Generator | None
    ) -> Int[Tensor, "3 batch"]:
        """Rows, the position of their first [MASK] and the length of their canvas; `n_one` of them have one [MASK]."""
        cuts, length = self.corpus.starts[rows], self.settings.length
        drawn = torch.rand(2, len(rows), generator=generator)
        # A text that the model began by itself has no beginning that matters more than others.
        cuts = torch.where(cuts > 1, cuts, 1 + (drawn[0] * (length - 1)).long())
        n_masks = 1 + (drawn[1] * (length - cuts)).long()
        n_masks[:n_one] = 1
        return torch.stack([rows, cuts, cuts + n_masks])

    @torch.no_grad()
    def goal(self, rows: Int[Tensor, "batch"], cuts: Int[Tensor, "batch"]) -> Goal:
        """What the causal model predicts after the first tokens of rows, up to `cuts`, and from which states."""
        given = self.corpus.tokens[rows][:, : int(cuts.max())].to(self.causal.cfg.device)  # it sees nothing after cuts
        states = self.settings.states > 0 and self.settings.readout == "shifted"
        return _read_at(self.causal, given, torch.ones_like(given), cuts - 1, states)

    def distances(
        self,
        twin: DiffusionTransformer,
        rows: Int[Tensor, "batch"],
        cuts: Int[Tensor, "batch"],
        ends: Int[Tensor, "batch"],
        goal: Goal,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """How far the twin is from this goal where it predicts the first [MASK] of rows that are masked from `cuts` to
        `ends`, summed over rows.

        Returns:
            KL(causal model ‖ twin), and the squared distance of the residual streams over the mean of their squared
            norms, mean over all blocks but the last; 0 if these have no weight. It is at most 4, so that the states of
            a sink, which are a thousand times as long as others, do not rule the first updates.
        """
        blank, device = twin.cfg.blank, twin.cfg.device
        position, tokens = torch.arange(int(ends.max())), self.corpus.tokens[rows]
        canvas = torch.where(position < cuts[:, None], tokens[:, : len(position)], blank).to(device)
        real = (position < ends[:, None]).long().to(device)
        predicted, streams = goal
        logits, found = _read_at(twin, canvas, real, twin.readout.rows(cuts), bool(streams))
        p = torch.nn.functional.pad(predicted.float(), (0, logits.shape[1] - predicted.shape[1]), value=-torch.inf)
        p = p.masked_fill(torch.arange(p.shape[1], device=device) == blank, -torch.inf)
        divergence = torch.nn.functional.kl_div(logits.float().log_softmax(-1), p.softmax(-1), reduction="sum")
        apart = [
            (2 * (own - causal).square().sum(-1) / (own.square() + causal.square()).sum(-1)).sum()
            for own, causal in zip(found, streams, strict=True)
        ]
        return divergence, torch.stack(apart).mean() if apart else divergence.new_zeros(())

    def _attention(self, model: DiffusionTransformer) -> Any:
        """As long as attention grows, hooks that hide what is too far to the right."""
        if self.step >= self.settings.anneal:
            return nullcontext()
        reach = self.settings.length * self.step // self.settings.anneal

        def hide_right(scores: Tensor, hook: Any) -> Tensor:
            query, key = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
            return scores.masked_fill(key - query[:, None] > reach, -torch.inf)

        return model.hooks(
            fwd_hooks=[(f"blocks.{i}.attn.hook_attn_scores", hide_right) for i in range(model.cfg.n_layers)]
        )


def _read_at(
    model: DiffusionTransformer, tokens: Tokens, real: Int[Tensor, "batch pos"], at: Int[Tensor, "batch"], states: bool
) -> Goal:
    """The logits at one position of each row, and with `states` the residual stream there after each block but the
    last, of which the logits say enough."""
    place = torch.arange(len(tokens), device=tokens.device), at.to(tokens.device)
    found: list[Tensor] = []

    def keep(resid: Tensor, hook: Any) -> None:
        found.append(resid[place].float())

    hooks = [(f"blocks.{i}.hook_resid_post", keep) for i in range(model.cfg.n_layers - 1)] if states else []
    with model.hooks(fwd_hooks=hooks):
        return model(tokens, attention_mask=real, logits_at=place), found


@torch.no_grad()
def begin_mask_row(twin: DiffusionTransformer, rows: TwinLoss, n_known: int) -> str:
    """Write the row of [MASK] with which the untrained twin is nearest to the causal model; returns what it is made of.

    Compared are its own row, the mean of all, and the rows of the first special tokens, also less three times the mean,
    on canvases with one [MASK] and with many.
    """
    tokenizer, weight, mask = require_tokenizer(twin), twin.embed.weight, twin.cfg.blank
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    mean = weight[:n_known].mean(dim=0)
    tried = {"its own": weight[mask].clone(), "the mean": mean}
    named = list(dict.fromkeys([*tokenizer.all_special_ids, *sorted(special)]))  # BOS, EOS and their like come first
    for id_ in [id_ for id_ in named if id_ != mask and id_ < n_known][:_TRIED_TOKENS]:
        name = repr(tokenizer.convert_ids_to_tokens(id_))
        tried |= {name: weight[id_].clone(), f"{name} less three times the mean": weight[id_] - 3 * mean}
    generator = torch.Generator().manual_seed(rows.settings.seed)
    some, cuts, ends = rows.canvases(torch.arange(min(_TRIED, rows.n_rows)), _TRIED // 2, generator)
    goal = rows.goal(some, cuts)
    found: dict[str, float] = {}
    for name, row in tried.items():
        weight[mask] = row
        found[name] = float(rows.distances(twin, some, cuts, ends, goal)[0])
    best = min(found, key=lambda name: found[name])
    weight[mask] = tried[best]
    return best


def masked_loss(model: DiffusionTransformer, tokens: Tokens, generator: torch.Generator | None) -> Float[Tensor, ""]:
    """The bound on the negative log-likelihood of texts after their first token, in nats per token, as one sample of
    noise estimates it. The first token is given: with a shifted readout, no row predicts it."""
    noisy, p = hide(tokens, model.cfg.blank, generator=generator)
    noisy[:, 0] = tokens[:, 0]
    batch = masked_batch(model, tokens, noisy, p)
    real = torch.ones_like(batch.tokens)
    logits = model(batch.tokens, attention_mask=real, logits_at=batch.rows, **batch.beside)
    return batch.loss(logits) * (tokens.shape[1] / (tokens.shape[1] - 1))


class LowRankLinear(Linear):
    """A projection with an addition of low rank. It has the weights of the projection that it stands for."""

    def __init__(self, projection: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = projection.in_features, projection.out_features
        self.weight, self.bias = projection.weight, projection.bias
        bound = 1 / math.sqrt(self.in_features)  # as torch draws the weights of a projection, and peft A
        drawn = (2 * torch.rand(rank, self.in_features, generator=generator) - 1) * bound
        self.lora_a = nn.Parameter(drawn.to(self.weight))
        self.lora_b = nn.Parameter(self.weight.new_zeros(self.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """W x + b, and the addition."""
        return super().forward(x) + F.linear(self.scale * F.linear(x, self.lora_a), self.lora_b)


class EmbedWithRow(Embed):
    """An embedding one row of which is trained, and counts `SPEED` times as fast as other weights."""

    SPEED = 5.0

    def __init__(self, embed: Embed, token: int) -> None:
        nn.Module.__init__(self)
        self.weight, self.token = embed.weight, token
        self.offset = nn.Parameter(torch.zeros_like(embed.weight[token]))

    @property
    def row(self) -> Tensor:
        """The row as it is now."""
        return self.weight[self.token] + self.SPEED * self.offset

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of tokens."""
        return torch.where(tokens.eq(self.token)[..., None], self.row, super().forward(tokens))


class UnembedWithRow(Unembed):
    """The head that is tied to such an embedding."""

    def __init__(self, unembed: Unembed, embed: EmbedWithRow) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = unembed.weight, unembed.bias
        self.of_row = (embed,)  # in a tuple, so that it is no part of the head

    def forward(self, resid: Tensor) -> Tensor:
        """Logits."""
        (embed,) = self.of_row
        row = torch.tensor([embed.token], device=resid.device)
        bias = None if self.bias is None else self.bias[row]
        return super().forward(resid).index_copy(-1, row, linear(resid, embed.row[None], bias))


@restoring
def trained_row(model: DiffusionTransformer, token: int) -> Iterator[EmbedWithRow]:
    """Let a row of the embedding be trained, whatever else is frozen, until the block ends."""
    embed, unembed = model.embed, model.unembed
    with model.clock.held():
        try:
            model.embed = made = EmbedWithRow(embed, token)
            if model.cfg.tied:
                model.unembed = UnembedWithRow(unembed, made)
            yield made
        finally:
            model.embed, model.unembed = embed, unembed


@restoring
def low_rank(
    model: DiffusionTransformer, rank: int, alpha: float, generator: torch.Generator
) -> Iterator[Mapping[str, LowRank]]:
    """Attach additions to all projections of the blocks, and freeze everything else, until the block ends.

    Gives the factors by the name of their weight; they are the parameters that a training changes. At the end, also
    after an exception, the model has its own projections, and the same weights require gradients as before.
    """
    before = {name: weight.requires_grad for name, weight in model.named_parameters()}
    replaced: list[tuple[Any, str, nn.Linear]] = []
    factors: dict[str, LowRank] = {}
    with model.clock.held():
        try:
            model.requires_grad_(False)
            for path, module in list(model.blocks.named_modules()):
                if type(module) is Linear:
                    owner, _, name = path.rpartition(".")
                    made = LowRankLinear(module, rank, alpha, generator)
                    replaced.append((model.blocks.get_submodule(owner), name, module))
                    setattr(*replaced[-1][:2], made)
                    factors[f"blocks.{path}.weight"] = LowRank(made.lora_a, made.lora_b)
            yield factors
        finally:
            for owner, name, module in replaced:
                setattr(owner, name, module)
            for name, weight in model.named_parameters():
                weight.requires_grad_(before[name])
