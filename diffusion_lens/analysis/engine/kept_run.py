"""A forward pass that stores the activations from which later passes resume.

A pass that differs from the stored one only from block l on starts at block l, from the stored residual stream. On a
causal model it also starts at the first position that differs, because the keys and values of the earlier positions are
stored; on one that attends by blocks of positions, at the first position of that block. Several texts with common
beginnings may be one row (`model/packing.py`); its positions are then the places of that row.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.engine.batching import graph_row_bytes
from diffusion_lens.denoising.cache import activation_shape
from diffusion_lens.hooks.clock import restoring
from diffusion_lens.hooks.names import resid_post
from diffusion_lens.hooks.step import StepState
from diffusion_lens.interventions import Hook
from diffusion_lens.model.attention import KeyValueCache, LayerKeyValues
from diffusion_lens.model.packing import TextTree, reading_tree
from diffusion_lens.model.shapes import PosMask, Resid, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer, origins_of


def stream_entering(block: int) -> str:
    """The last hook point of the residual stream before a block (`n_layers`: before the final norm).

    In a `KeptRun`, the activation at `hook_embed` includes learned position vectors, so that it is this stream.
    """
    return resid_post(block - 1) if block else "hook_embed"


def keys_and_values(block: int) -> tuple[str, str]:
    """The hook points of a block's rotated keys and of its values."""
    return f"blocks.{block}.attn.hook_rot_k", f"blocks.{block}.attn.hook_v"


@dataclass(frozen=True, eq=False)
class NetworkInput:
    """The input of one forward pass, and the rows of its logits that are read.

    Attributes:
        rows: Rows of the logits that are read, negative ones from the end; `None` reads all of them.
        real: False at padding; `None` where there is none.
        step: The denoising step that hooks read; `None` outside the loop.
        hooks: Hooks of this pass, in addition to those of the caller.
        tree: The layout of the tokens, where several texts are one row.
        read_rows: `rows` as they are, counted from 0.
        is_hooked: Whether the caller has hooks inside the network, which may mix positions.
    """

    model: DiffusionTransformer
    tokens: Tokens
    rows: Sequence[int] | None = None
    real: PosMask | None = None
    step: StepState | None = None
    hooks: Sequence[tuple[str, Hook]] = ()
    tree: TextTree | None = None
    n_rows: int = field(init=False)
    n_pos: int = field(init=False)
    read_rows: list[int] = field(init=False)
    is_hooked: bool = field(init=False)

    def __post_init__(self) -> None:
        n_rows, n_pos = self.tokens.shape
        read = list(range(n_pos)) if self.rows is None else [row % n_pos for row in self.rows]
        vars(self).update(n_rows=n_rows, n_pos=n_pos, read_rows=read, is_hooked=self.model.is_hooked)

    @property
    def resumes_at_positions(self) -> bool:
        """Whether a pass may start at a later position: without padding or hooks, if no position sees all others."""
        cfg, size = self.model.cfg, self.model.cfg.block_size
        later_unseen = size is not None and size < self.n_pos and not cfg.counts_from_prompt
        return later_unseen and self.real is None and not self.is_hooked

    def seen_from(self, position: int) -> int:
        """The first position whose states depend on those of this one: that of its block."""
        size = self.model.cfg.block_size
        return 0 if size is None else position // size * size

    def sees_up_to(self, position: int) -> int:
        """One past the last position that this one sees: the end of its block."""
        size = self.model.cfg.block_size
        return self.n_pos if size is None else min((position // size + 1) * size, self.n_pos)

    def seen_until(self, position: int) -> int:
        """One past the last position whose states depend on those of this one."""
        return self.n_pos if self.tree is None else min(self.tree.stops[position], self.n_pos)

    @restoring
    def at_step(self, copies: int = 1) -> Iterator[None]:
        """Hooks read the denoising step, for this many copies of these rows, and passes that begin at a residual stream
        have the attention of these tokens."""
        in_blocks = self.step is None and self.model.cfg.counts_from_prompt
        origins = origins_of(self.model, self.tokens, self.real) if in_blocks else None
        tree = nullcontext() if self.tree is None else reading_tree(self.model, self.tree)
        with self.model.clock.at(self.step, copies, origins), tree:
            yield

    @property
    def stream_bytes(self) -> int:
        """Bytes of one residual stream, or of one output that is added to it."""
        cfg = self.model.cfg.sizes
        return self.n_rows * self.n_pos * cfg.d_model * cfg.dtype.itemsize

    def kept_bytes(self, n_streams: int) -> int:
        """Bytes of so many residual streams, and of the logits that are read."""
        cfg = self.model.cfg.sizes
        by_row = n_streams * self.n_pos * cfg.d_model + len(self.read_rows) * cfg.d_vocab_out
        return self.n_rows * by_row * cfg.dtype.itemsize

    def stored_bytes(self, names: Iterable[str]) -> int:
        """Bytes of the activations at these hook points of the network."""
        cfg = self.model.cfg
        shapes = (activation_shape(name, cfg.sizes, self.n_rows, self.n_pos) for name in names)
        return sum(math.prod(shape) * cfg.dtype.itemsize for shape in shapes)

    @property
    def past_points(self) -> list[str]:
        """Hook points to store if passes resume at positions: the keys and values of all blocks."""
        if not self.resumes_at_positions:
            return []
        return [name for block in range(self.model.cfg.n_layers) for name in keys_and_values(block)]

    @property
    def past_bytes_by_row(self) -> int:
        """Bytes of one row at all `past_points`."""
        cfg = self.model.cfg.sizes
        d_key_value = (cfg.n_key_value_heads or cfg.n_heads) * cfg.d_head
        return len(self.past_points) * self.n_pos * d_key_value * cfg.dtype.itemsize

    @property
    def graph_bytes(self) -> int:
        """Bytes of the tensors of a pass with gradients, of which its graph keeps most."""
        learns = any(parameter.requires_grad for parameter in self.model.parameters())
        return self.n_rows * graph_row_bytes(self.model.cfg, self.n_pos, len(self.read_rows), learns)

    def mask(self, copies: int = 1) -> PosMask | None:
        """The attention mask of this many copies of these rows."""
        return None if self.real is None else self.real.repeat(copies, 1)

    def embed(self) -> Resid:
        """The residual stream that enters the first block."""
        with self.at_step():
            resid: Resid = self.model(self.tokens, attention_mask=self.real, stop_at_layer=0)
        return resid

    def run(self, names: Iterable[str], embedded: Resid | None = None) -> "KeptRun":
        """Compute the pass, from the input of the first block if it is given, and store activations by hook point."""
        stored: dict[str, Tensor] = {} if embedded is None else {"hook_embed": embedded}

        def store(activation: Tensor, hook: Any) -> None:
            stored[hook.name] = activation

        # `store` is attached after all other hooks, so it stores the states with which the pass continues.
        names = set(names)
        vectors: set[str] = set()
        if "hook_embed" in names:  # kept as the stream that enters the first block
            vectors = {"hook_pos_embed"} if self.model.positions.learned else vectors
            vectors = {"blocks.0.hook_resid_pre"} if self.model.cfg.self_conditioning else vectors
        hooks = [*self.hooks, *zip((names | vectors) - stored.keys(), repeat(store), strict=False)]
        with self.at_step(), self.model.hooks(fwd_hooks=hooks):
            logits: Tensor = self.model(
                self.tokens if embedded is None else embedded,
                start_at_layer=None if embedded is None else 0,
                attention_mask=self.real,
                logits_at=self.rows,
            )
        if embedded is None and vectors:
            learned = self.model.positions.learned
            stored["hook_embed"] = (
                stored["hook_embed"] + stored["hook_pos_embed"] if learned else stored["blocks.0.hook_resid_pre"]
            )
        return KeptRun(self, stored, logits)


@dataclass(frozen=True, eq=False)
class KeptRun:
    """A forward pass with its stored activations, by hook point, and the rows of the logits that are read."""

    input: NetworkInput
    activations: Mapping[str, Tensor]
    logits: Float[Tensor, "batch selected d_vocab_out"]

    def stream(self, block: int, offset: int = 0, stop: int | None = None) -> Resid:
        """The residual stream entering a block, from position `offset` on and up to `stop`."""
        # Blocks may be on several devices.
        return self.activations[stream_entering(block)][:, offset:stop].to(self.input.model.cfg.main_device)

    def resume(
        self,
        stream: Resid,
        blocks: range,
        offset: int = 0,
        *,
        hooks: Sequence[tuple[str, Hook]] = (),
        logits_at: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute these blocks on copies of the rows, whose streams, one copy after the other, differ from position
        `offset` on. Returns the stream after them, or after the last block the logits at some rows."""
        model, copies = self.input.model, len(stream) // self.input.n_rows
        # Without hooks no context is opened, because even an empty one visits every hook point of the model.
        attached = model.hooks(fwd_hooks=list(hooks)) if hooks else nullcontext()
        with self.input.at_step(copies), attached:
            out: Tensor = model(
                stream,
                start_at_layer=blocks.start,
                attention_mask=self.input.mask(copies),
                past_kv_cache=self._past(blocks, copies, offset) if offset else None,
                stop_at_layer=blocks.stop if logits_at is None else None,
                logits_at=logits_at,
            )
        return out

    def _past(self, blocks: range, copies: int, offset: int) -> KeyValueCache:
        """Keys and values of the positions before `offset`, for this many copies of the rows."""
        cache = KeyValueCache(self.input.model.cfg.n_layers)
        for block in blocks:
            keys, values = (self.activations[name][:, :offset] for name in keys_and_values(block))
            cache.layers[block] = LayerKeyValues(keys, values, copies=copies)
        return cache
