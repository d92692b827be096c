"""What evidence, routes and cuts of edges read, from one forward pass of a batch of canvases."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.kept_run import stream_entering
from diffusion_lens.analysis.signatures.canvases import CanvasBatch
from diffusion_lens.hook_names import Hook
from diffusion_lens.model.hook_points import is_hooked
from diffusion_lens.shapes import Resid


@dataclass(frozen=True, eq=False)
class CanvasReading:
    """The states of one pass, by layer.

    Attributes:
        batch: The canvases.
        losses: Float[fact], -log p(answer).
        keys: Float[fact kv_head d_head] of each layer, at the source, before norm and rotation.
        queries: Float[fact head d_head] of each layer, at the reader, before norm and rotation.
        scores: Float[fact head] of each layer, from reader to source, in float32 at least.
        streams: Float[fact pos d_model] of each layer, the residual stream that enters it.
        attended: Keys, as they meet the queries, and values, Float[fact pos kv_head d_head], of each layer.
    """

    batch: CanvasBatch
    losses: Float[Tensor, "fact"]
    keys: list[Tensor]
    queries: list[Tensor]
    scores: list[Tensor]
    streams: list[Tensor]
    attended: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, batch: CanvasBatch) -> "CanvasReading":
        """One forward pass without gradients."""
        reader = PassReader(batch)
        with torch.no_grad():
            return reader.reading(batch.losses(reader.logits()))

    @property
    def values(self) -> list[Float[Tensor, "fact kv_head d_head"]]:
        """The values at the source, of each layer."""
        return [values[self.batch.each, self.batch.sources] for _, values in self.attended]


class PassReader:
    """Reads the states of one pass of a batch of canvases, with gradients or without.

    Scores are computed from queries and keys, unless they are hooked: attention that computes all of them explicitly
    would have other last bits in its gradients, and a graph with all of them.
    """

    def __init__(self, batch: CanvasBatch) -> None:
        self.batch = batch
        self._read: dict[str, list[Tensor]] = {}
        each, rows, sources = batch.each, batch.rows, batch.sources
        at: dict[str, Callable[[Tensor], Tensor]] = {
            "hook_q": lambda x: x[each, rows],
            "hook_k": lambda x: x[each, sources],
            "hook_rot_q": lambda x: x[each, rows],
            "hook_rot_k": lambda x: x,
            "hook_v": lambda x: x,
        }
        self._hooks: list[tuple[str, Hook]] = []
        for layer, block in enumerate(batch.model.blocks):
            if layer:
                self._hooks.append((stream_entering(layer), self._reader("streams", lambda x: x)))
            self._hooks += [
                (f"blocks.{layer}.attn.{point}", self._reader(point, select)) for point, select in at.items()
            ]
            if is_hooked(block.attn.hook_attn_scores):
                name = f"blocks.{layer}.attn.hook_attn_scores"
                self._hooks.append((name, self._reader(name, lambda x: x[each, :, rows, sources])))

    def logits(self) -> Float[Tensor, "batch d_vocab_out"]:
        """Run the pass. Returns the logits in the row of each canvas."""
        batch = self.batch
        # Not `hook_embed`, which does not have the vectors of learned positions.
        embedded: Resid = batch.model(batch.tokens, attention_mask=batch.real, stop_at_layer=0)
        self._read["streams"] = [embedded.detach()]
        return batch.logits(self._hooks, embedded, 0)

    def reading(self, losses: Float[Tensor, "fact"]) -> CanvasReading:
        """What the pass has read.

        Args:
            losses: Its losses.
        """
        read, n_layers = self._read, self.batch.model.cfg.n_layers
        return CanvasReading(
            self.batch,
            losses,
            keys=read["hook_k"],
            queries=read["hook_q"],
            scores=[self._scores(layer) for layer in range(n_layers)],
            streams=read["streams"],
            attended=list(zip(read["hook_rot_k"], read["hook_v"], strict=True)),
        )

    def _reader(self, name: str, select: Callable[[Tensor], Tensor]) -> Any:
        def keep(x: Tensor, hook: Any) -> None:
            # Blocks may be on several devices.
            self._read.setdefault(name, []).append(select(x.detach().to(self.batch.rows.device)))

        return keep

    def _scores(self, layer: int) -> Float[Tensor, "fact head"]:
        """The scores from reader to source."""
        if hooked := self._read.get(f"blocks.{layer}.attn.hook_attn_scores"):
            return hooked[0].float()
        q, k = (self._read[name][layer] for name in ("hook_rot_q", "hook_rot_k"))
        return scores_between(self.batch, q, k[self.batch.each, self.batch.sources])


def scores_between(
    at: CanvasBatch, q: Float[Tensor, "fact head d_head"], k: Float[Tensor, "fact kv_head d_head"]
) -> Float[Tensor, "fact head"]:
    """The scores of a query at each reader and a key at its source, both rotated, in float32 at least.

    They are those of a reader that sees the source, whether or not it does so.

    Args:
        at: Canvases with the positions of readers and sources.
    """
    by_query_head = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores: Tensor = (q.to(wide) * by_query_head).sum(dim=-1) / at.model.cfg.d_head**0.5
    bias = at.model.positions.score_bias(at.rows[:, None], at.sources[:, None])
    return scores if bias is None else scores + bias[:, :, 0, 0]
