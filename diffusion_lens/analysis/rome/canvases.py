"""Canvases as they leave layer l, where δ joins them, and the rows of their logits that are read.

The MLP's output is the last that a block adds to the residual stream. So δ at `hook_mlp_out` and δ added to what leaves
the block are one thing, and nothing of layer l has to run again. Hooks of the caller on layer l act before δ joins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.rome.keys import key_site
from diffusion_lens.analysis.rome.objective import HELD, Asked
from diffusion_lens.analysis.rome.prompts import PromptBatch
from diffusion_lens.hook_names import mlp_out
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Resid


@dataclass(frozen=True, eq=False)
class Canvases:
    """A batch of canvases of several requests.

    Attributes:
        resid: Float[batch pos d_model], the residual stream leaving layer l, without δ.
        real: Bool[batch pos], false at padding.
        places: Int[batch], where δ joins: the subject's last token.
        keys: Float[batch d_mlp], what enters the down-projection there.
        outputs: Float[batch d_model], what the MLP answers.
        owner: Int[batch], the request of each canvas, in order.
        canvas: Int[selected], the canvas of each read.
        row, token, weight: of each read, as in `Read`.
    """

    resid: Resid
    real: PosMask | None
    places: Int[Tensor, "batch"]
    keys: Float[Tensor, "batch d_mlp"]
    outputs: Float[Tensor, "batch d_model"]
    owner: Int[Tensor, "batch"]
    canvas: Int[Tensor, "selected"]
    row: Int[Tensor, "selected"]
    token: Int[Tensor, "selected"]
    weight: Float[Tensor, "selected"]

    @classmethod
    @torch.no_grad()
    def upon(cls, model: DiffusionTransformer, layer: int, asked: Sequence[Sequence[Asked]]) -> "Canvases":
        """Run all that does not depend on δ, for the canvases of each request."""
        flat = [(owner, *each) for owner, of_request in enumerate(asked) for each in of_request]
        reads = [(canvas, *read) for canvas, (_, _, each) in enumerate(flat) for read in each]
        batch = PromptBatch.of(model, [query.tokens for _, query, _ in flat])
        device = batch.tokens.device
        places = torch.tensor([query.subject[1] - 1 for _, query, _ in flat], device=device)
        resid, cache = model.run_with_cache(
            batch.tokens,
            attention_mask=batch.real,
            stop_at_layer=layer + 1,
            names_filter=[key_site(layer), mlp_out(layer)],
        )
        at = torch.arange(len(places), device=device), places
        return cls(
            resid,
            batch.real,
            places,
            keys=widened(cache[key_site(layer)][at]),
            outputs=widened(cache[mlp_out(layer)][at]),
            owner=torch.tensor([owner for owner, _, _ in flat], device=device),
            canvas=torch.tensor([canvas for canvas, _, _, _ in reads], device=device),
            row=torch.tensor([row for _, row, _, _ in reads], device=device),
            token=torch.tensor([token for _, _, token, _ in reads], device=device),
            weight=torch.tensor([weight for _, _, _, weight in reads], device=device),
        )

    @property
    def asker(self) -> Int[Tensor, "selected"]:
        """The request of each read."""
        return self.owner[self.canvas]

    @property
    def held(self) -> Bool[Tensor, "selected"]:
        """The reads that hold a whole distribution."""
        return self.token == HELD

    @property
    def plain(self) -> Int[Tensor, "request"]:
        """The first canvas of each request."""
        return torch.searchsorted(self.owner, self.owner.unique())

    def of(self, requests: Int[Tensor, "request"]) -> "Canvases":
        """What belongs to some of the requests, in order; they are numbered anew."""
        kept = torch.isin(self.owner, requests)
        read = kept[self.canvas]
        return Canvases(
            self.resid[kept],
            None if self.real is None else self.real[kept],
            self.places[kept],
            keys=self.keys[kept],
            outputs=self.outputs[kept],
            owner=torch.searchsorted(requests, self.owner[kept]),
            canvas=(kept.cumsum(dim=0) - 1)[self.canvas[read]],
            row=self.row[read],
            token=self.token[read],
            weight=self.weight[read],
        )

    def log_probs(
        self, model: DiffusionTransformer, layer: int, delta: Float[Tensor, "request d_model"]
    ) -> Float[Tensor, "selected d_vocab_out"]:
        """What the model says at the rows that are read, with each request's δ."""
        at = torch.arange(len(self.places), device=self.places.device), self.places
        moved = widened(self.resid[at]) + delta[self.owner]
        logits = model(
            self.resid.index_put(at, moved.to(self.resid.dtype)),
            start_at_layer=layer + 1,
            attention_mask=self.real,
            logits_at=(self.canvas, self.row),
        )
        return torch.log_softmax(widened(logits), dim=-1)


def widened(x: Tensor) -> Tensor:
    """In float32, or float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
