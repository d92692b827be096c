"""The residual stream of canvases above layer l, where δ is added, and the rows of their logits that are read.

The MLP's output is the last term that a block adds to the residual stream. So adding δ at `hook_mlp_out` is the same as
adding it to the output of the block, and layer l need not be computed again. The caller's hooks on layer l act before δ
is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.analysis.ranking import clean_logits
from diffusion_lens.analysis.rome.blocks_above import BlocksAbove, PackedPass
from diffusion_lens.analysis.rome.keys import key_site
from diffusion_lens.analysis.rome.objective import DISTRIBUTION, ReadCanvas
from diffusion_lens.analysis.rome.prompts import PromptBatch
from diffusion_lens.hook_names import mlp_out
from diffusion_lens.model.packing import is_plain
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Resid


@dataclass(frozen=True, eq=False)
class Canvases:
    """A batch of canvases of several requests.

    Attributes:
        resid: Float[batch pos d_model], residual stream that leaves layer l, without δ.
        real: Bool[batch pos], false at padding.
        positions: Int[batch], position of the subject's last token, where δ is added.
        keys: Float[batch d_mlp], input of the down-projection there.
        outputs: Float[batch d_model], output of the MLP there.
        owner: Int[batch], request of each canvas, in order.
        canvas: Int[selected], canvas of each read.
        row, token, weight: The fields of each `Read`.
        present: Int[selected], token on the canvas at the position that each read predicts.
        origins: Int[batch], the first position that is read in blocks, where canvases differ in it.
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
        batch = PromptBatch.of(model, [query.tokens for _, query, _ in flat])
        device = batch.tokens.device
        positions = torch.tensor([query.subject[1] - 1 for _, query, _ in flat], device=device)
        resid, cache = model.run_with_cache(
            batch.tokens,
            attention_mask=batch.real,
            stop_at_layer=layer + 1,
            names_filter=[key_site(layer), mlp_out(layer)],
            device=device,
        )
        numbers = torch.arange(len(positions), device=device)
        at = numbers, positions
        origins = model.origins_of(batch.tokens, batch.real)
        origins = None if origins is None else origins.repeat(len(numbers) // len(origins))
        canvas = torch.tensor([canvas for canvas, _, _, _ in reads], device=device)
        row = torch.tensor([row for _, row, _, _ in reads], device=device)
        packed = None
        if is_plain(model, layer + 1):
            edited, read = (torch.zeros_like(batch.tokens, dtype=torch.bool) for _ in range(2))
            edited[at] = read[canvas, row] = True
            counted = None if batch.real is None else (batch.real.long().cumsum(dim=1) - 1).clamp(min=0)
            context = model.attention_context(resid, batch.real, counted, 0, origins)
            above = BlocksAbove.of(model, layer + 1, resid, context, edited, read)
            packed = PackedPass.of(above, numbers, positions, (canvas, row))
        return cls(
            resid,
            batch.real,
            positions,
            keys=widened(cache[key_site(layer)][at]),
            outputs=widened(cache[mlp_out(layer)][at]),
            owner=torch.tensor([owner for owner, _, _ in flat], device=device),
            present=torch.tensor([int(flat[canvas][1].tokens[row]) for canvas, row, _, _ in reads], device=device),
            canvas=canvas,
            row=row,
            token=torch.tensor([token for _, _, token, _ in reads], device=device),
            weight=torch.tensor([weight for _, _, _, weight in reads], device=device),
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
                packed.above,
                numbers[selected],
                self.positions[selected],
                (numbers[self.canvas[read]], self.row[read]),
            )
        return Canvases(
            self.resid[selected],
            None if self.real is None else self.real[selected],
            self.positions[selected],
            keys=self.keys[selected],
            outputs=self.outputs[selected],
            owner=torch.searchsorted(requests, self.owner[selected]),
            canvas=(selected.cumsum(dim=0) - 1)[self.canvas[read]],
            row=self.row[read],
            token=self.token[read],
            weight=self.weight[read],
            present=self.present[read],
            origins=None if self.origins is None else self.origins[selected],
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
            return torch.log_softmax(clean_logits(model, widened(logits), self.present), dim=-1)
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
