"""What evidence, routes and cuts of edges read, from one forward pass of a batch of canvases."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.kept_run import stream_entering
from diffusion_lens.analysis.signatures.canvases import CanvasBatch


@dataclass(frozen=True, eq=False)
class CanvasReading:
    """The states of one pass, by layer.

    Attributes:
        batch: The canvases.
        losses: Float[fact], -log p(answer).
        values: Float[fact kv_head d_head] of each layer, at the source.
        keys: The same for keys, before norm and rotation.
        queries: Float[fact head d_head] of each layer, at the reader, before norm and rotation.
        scores: Float[fact head] of each layer, from reader to source.
        streams: Float[fact pos d_model] of each layer, the residual stream that enters it.
    """

    batch: CanvasBatch
    losses: Float[Tensor, "fact"]
    values: list[Tensor]
    keys: list[Tensor]
    queries: list[Tensor]
    scores: list[Tensor]
    streams: list[Tensor]

    @classmethod
    def of(cls, batch: CanvasBatch) -> "CanvasReading":
        """One forward pass without gradients."""
        read: dict[str, list[Tensor]] = {name: [] for name in ("values", "keys", "queries", "scores", "streams")}
        each, rows, sources = batch.each, batch.rows, batch.sources
        at: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
            "hook_v": ("values", lambda x: x[each, sources]),
            "hook_k": ("keys", lambda x: x[each, sources]),
            "hook_q": ("queries", lambda x: x[each, rows]),
            "hook_attn_scores": ("scores", lambda x: x[each, :, rows, sources]),
        }

        def reader(name: str, select: Callable[[Tensor], Tensor]) -> Any:
            def keep(x: Tensor, hook: Any) -> None:
                read[name].append(select(x.to(rows.device)))  # blocks may be on several devices

            return keep

        hooks = []
        for layer in range(batch.model.cfg.n_layers):
            if layer:
                hooks.append((stream_entering(layer), reader("streams", lambda x: x)))
            hooks += [(f"blocks.{layer}.attn.{point}", reader(*what)) for point, what in at.items()]
        with torch.no_grad():
            # Not `hook_embed`, which does not have the vectors of learned positions.
            embedded = batch.model(batch.tokens, attention_mask=batch.real, stop_at_layer=0)
            read["streams"].append(embedded)
            losses = batch.losses(batch.logits(hooks, embedded, 0))
        return cls(batch, losses, **read)
