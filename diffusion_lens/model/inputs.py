"""The inputs of a forward pass: their checks, which positions are padding, and which rows of the logits are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.shapes import PosMask, Resid, Tokens
from diffusion_lens.model.text import word_of
from diffusion_lens.settings import warn_user, whole_number
from diffusion_lens.settings.arguments import shown

Rows = Tensor | Sequence[int] | tuple[Tensor, Tensor]
_ROWS = "it must be a list of rows, a mask [batch, pos], or a pair of tensors, the batch and the row of each entry"


def check_tokens(tokens: Tensor, cfg: DiffusionConfig) -> Tensor:
    """Token ids as Int64[batch pos] on the model's device. A single sequence may be given without a batch axis."""
    check_storage(tokens, "tokens")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens are {tokens.dtype}; they must be integers (a residual stream needs start_at_layer=)")
    if tokens.dim() == 1:
        tokens = tokens[None]
    if tokens.dim() != 2:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; they must be [batch, pos]")
    if tokens.numel() == 0:
        raise ValueError(f"tokens have shape {list(tokens.shape)}: the model needs at least one token")
    check_length(tokens.shape[1], cfg)
    tokens = tokens.to(device=cfg.device, dtype=torch.long)
    try:
        smallest, largest = map(int, tokens.aminmax())
        known = smallest >= 0 and largest < cfg.d_vocab
    except RuntimeError:  # under vmap or torch.export, where nothing may depend on values
        return tokens
    if not known:
        hint = " (-1 marks positions that a text has not reached)" if smallest == -1 else ""
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"token id {wrong} is not among the {cfg.d_vocab} tokens of {cfg.model_name!r}{hint}")
    return tokens


def check_readable(given: Int[Tensor, "selected"], cfg: DiffusionConfig) -> None:
    """Raise a `ValueError` if a given token stands for input that this network does not read."""
    for id_ in cfg.unread_tokens:
        if bool((given == id_).any()):
            raise ValueError(
                f"the prompt contains token {id_}, which stands for an image, and the network here is the text network "
                f"of {cfg.model_name!r} without its vision tower: leave images out"
            )


def require_sum(cfg: DiffusionConfig, what: str) -> None:
    """Raise a `ValueError` if the stream is not the sum of what the parts of the network write; `what` needs it."""
    if cfg.layer_scalars:
        raise ValueError(
            f"{what}, and each block of {cfg.model_name!r} ends with a factor of the whole stream, and has norms on "
            "its outputs: patch hook_attn_out, hook_mlp_out or hook_resid_post, or use node_attribution"
        )


def warn_unless_masked(tokens: Tokens, mask_id: int, cfg: DiffusionConfig) -> None:
    """Warn if no token is [MASK], so that the logits are no predictions."""
    try:
        if bool((tokens == mask_id).any()):
            return
    except RuntimeError:  # as in `check_tokens`
        return
    warn_user(
        f"no position of these tokens is [MASK], and {cfg.model_name!r} predicts masked positions: every row of the "
        "logits is about a token that is already there. To read what follows a prompt, take "
        "tokens, rows = model.canvas(prompt, n_masks) and model(tokens)[:, rows] (the row `logits[:, -1]` of "
        "docs/coming_from.md). Where the logits are not read, pass return_type=None; where these rows are meant, "
        "logits_at="
    )


def check_clean(clean: Tensor, noisy: Tensor, cfg: DiffusionConfig) -> Tensor:
    """The clean text of noisy tokens; a `ValueError` if their shapes differ or the model does not attend by blocks."""
    if cfg.causal_block is None:
        raise ValueError(
            f"clean= is what the blocks of a model that attends by blocks see of earlier blocks, and "
            f"{cfg.model_name!r} has no blocks: leave it out"
        )
    clean = check_tokens(clean, cfg)
    if clean.shape != noisy.shape:
        raise ValueError(f"clean is {list(clean.shape)}; it must have the shape of the tokens, {list(noisy.shape)}")
    return clean


def check_storage(x: Tensor, what: str) -> None:
    """Raise a `TypeError` unless `x` is a dense tensor with values in memory."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: a {type(x).__name__} was given; it must be a tensor, such as torch.as_tensor(...)")
    if x.is_meta:
        raise TypeError(f"{what}: a tensor on the meta device has no values; create it on a real device")
    if x.layout != torch.strided:
        raise TypeError(f"{what}: the tensor's layout is {x.layout}; give a dense one, such as tensor.to_dense()")


def check_length(n_pos: int, cfg: DiffusionConfig) -> None:
    """Raise a `ValueError` unless `n_pos` positions fit into the context."""
    if n_pos > cfg.n_ctx:
        raise ValueError(f"{n_pos} positions do not fit into the context of {cfg.model_name!r}, n_ctx={cfg.n_ctx}")


def check_attention_mask(mask: Tensor, n_batch: int, n_pos: int, device: str | torch.device | None) -> Tensor | None:
    """`attention_mask` (1 or true at real tokens, 0 at padding) as Bool[batch pos]; `None` if nothing is padding."""
    check_storage(mask, "attention_mask")
    if mask.dim() == 1:
        mask = mask[None]
    if tuple(mask.shape) != (n_batch, n_pos):
        raise ValueError(f"attention_mask is {list(mask.shape)}; it must match the tokens, {[n_batch, n_pos]}")
    real = mask.to(device) == 1
    try:
        if not bool((real | (mask.to(device) == 0)).all()):
            wrong = mask[(mask != 0) & (mask != 1)][0].item()
            raise ValueError(
                f"attention_mask contains {wrong}; it must be 1 (or true) at real tokens and 0 at padding. Convert a "
                "mask that is added to scores, 0 at real tokens and very negative elsewhere, with (attention_mask == 0)"
            )
        if not bool(real.any(dim=1).all()):
            row = int((~real.any(dim=1)).nonzero()[0])
            raise ValueError(f"attention_mask has a row without a single real token: row {row} is all padding")
        return None if bool(real.all()) else real
    except RuntimeError:  # as in `check_tokens`
        return real


def check_layers(start: int | None, stop: int | None, n_layers: int) -> tuple[int, int]:
    """First block and end of the block range; negative numbers count from the end, as in TransformerLens."""
    bounds = []
    for name, layer, default in (("start_at_layer", start, 0), ("stop_at_layer", stop, n_layers)):
        layer = default if layer is None else layer if type(layer) is int else whole_number(name, layer)
        resolved = layer + n_layers if layer < 0 else layer
        if not 0 <= resolved <= n_layers:
            raise ValueError(f"{name}={layer} is outside the {n_layers} layers of this model")
        bounds.append(resolved)
    first, last = bounds
    if first > last:
        raise ValueError(f"start_at_layer={start} is after stop_at_layer={stop}")
    return first, last


def check_past(
    layers: Sequence[Any], n_batch: int, n_pos: int, real: Tensor | None, cfg: DiffusionConfig, in_loop: bool
) -> int:
    """Number of earlier positions in a cache, which must be the same in every one of its `layers` that runs."""
    lengths: set[int] = {layer.n_pos for layer in layers}
    if not lengths:
        return 0
    if layers[0].approximate:
        return max(lengths)
    size = cfg.final_together
    if size is None:
        raise ValueError(
            f"past_kv_cache needs a model whose earlier positions never see later ones, causal or by blocks, and "
            f"{cfg.model_name!r} is bidirectional: its earlier positions change with every new token"
        )
    if cfg.counts_from_prompt and not in_loop:
        raise ValueError(
            f"past_kv_cache: {cfg.model_name!r} computes an open block again when it is finished, so only the "
            "denoising loop, which knows the open block, can keep keys and values"
        )
    if real is not None:
        raise ValueError("past_kv_cache cannot be used with padding; pass sequences of one length")
    n_rows = {len(layer.keys) * (layer.copies or 1) for layer in layers if layer.n_pos}
    if n_rows - {n_batch}:
        raise ValueError(f"past_kv_cache has {max(n_rows)} rows, and the input {n_batch}; pass the same rows on")
    if len(lengths) > 1:
        raise ValueError(
            f"past_kv_cache has {sorted(lengths)} positions in different layers; run the same ones in every layer"
        )
    if max(lengths) % size:
        raise ValueError(
            f"past_kv_cache has {max(lengths)} positions, and positions of one block of {size} see each other, "
            f"whichever came first: cache whole blocks, {max(lengths) // size * size} positions "
            "(past_kv_cache.keep), and pass the rest again"
        )
    check_length(n_pos + max(lengths), cfg)
    return max(lengths)


@dataclass(frozen=True)
class Padding:
    """`model.padding`: which positions are padding, by the mask of a call or by a token that only pads."""

    model: Any

    @property
    def id(self) -> int:
        """The id at padding positions: the tokenizer's padding token, else its end token, else 0."""
        tokenizer = self.model.tokenizer
        for candidate in (getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None)):
            if candidate is not None:
                return int(candidate)
        return 0

    @property
    def own_id(self) -> int | None:
        """The id of a token that is used for padding only, so that tokens alone show the padding; otherwise `None`.

        The token's name must contain "pad", and it must not be another special token: if texts end with the token that
        pads them, the model may have written it.
        """
        tokenizer = self.model.tokenizer
        name = None if tokenizer is None else tokenizer.pad_token
        if name is None or "pad" not in name.lower():
            return None
        others = [tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token, tokenizer.mask_token]
        id_ = int(tokenizer.pad_token_id)
        return None if name in others or id_ == self.model.cfg.mask_token_id else id_

    def real(self, tokens: Tokens) -> PosMask | None:
        """Bool[batch pos], true from the first to the last token of each row that is not `own_id`.

        `None` if there is no padding, or if the tokens alone do not show it.

        Raises:
            ValueError: A row has padding only.
        """
        pad = self.own_id
        if pad is None:
            return None
        text = tokens != pad
        try:
            if bool(text.all()):
                return None
            if not bool(text.any(dim=1).all()):
                row, padding = int((~text.any(dim=1)).nonzero()[0]), word_of(self.model, pad)
                raise ValueError(
                    f"row {row} of the tokens is all padding ({padding!r}), but the model needs at least one token"
                )
        except RuntimeError:  # as in `check_tokens`
            pass
        real: PosMask = (text.cumsum(dim=1) > 0) & (text.flip(1).cumsum(dim=1).flip(1) > 0)
        return real

    def all_real(self, tokens: Tokens) -> Tensor | None:
        """An `attention_mask` for tokens without padding; `None` if no token would be read as padding anyway."""
        return None if self.own_id is None else torch.ones_like(tokens)

    def removed(self, row: Int[Tensor, "pos"]) -> Int[Tensor, "selected"]:
        """One row of tokens without the padding around them, if the tokens show it (`real`)."""
        real = self.real(row[None]) if len(row) else None
        return row if real is None else row[real[0]]

    def certainly_real(self, tokens: Tokens) -> PosMask | None:
        """`real`, but an error if padding is possible and the tokens alone do not show it.

        Losses and continuations use it, because padding that is read as text would change their numbers.

        Raises:
            ValueError: The tokenizer has no token that is used for padding only, and some rows, but not all, begin or
                end with the token that pads shorter rows.
        """
        model, pad = self.model, self.id
        if self.own_id is not None or model.tokenizer is None or pad == model.cfg.mask_token_id:
            return self.real(tokens)
        filler = tokens == pad
        if pad == model.tokenizer.bos_token_id and bool(filler[:, 0].all()):
            filler = filler[:, 1:]
        for edge, column in (("begins", slice(1)), ("ends", slice(-1, None))):
            at_edge = filler[:, column].any(dim=1)
            if bool(at_edge.any()) and not bool(at_edge.all()):
                row, other = int(at_edge.long().argmax()), int((~at_edge).long().argmax())
                side = " (with padding_side='left' before a continuation)" * model.cfg.is_autoregressive
                raise ValueError(
                    f"row {row} of the tokens {edge} with {word_of(model, pad)!r} and row {other} does not, and the "
                    "tokenizer has no padding token that is not also text: the tokens alone do not show what is "
                    f"padding. Take tokens, mask = model.tokenize(texts){side} and pass attention_mask=mask with the "
                    "tokens, or pass the texts themselves; if every token here is text, pass "
                    "attention_mask=torch.ones_like(tokens)"
                )
        return None

    def checked(self, tokens: Tensor, attention_mask: Tensor | None = None) -> tuple[Tokens, PosMask | None]:
        """Tokens on the model's device, and which of them are real, by the mask or else by `certainly_real`."""
        tokens = check_tokens(tokens, self.model.cfg)
        if attention_mask is None:
            return tokens, self.certainly_real(tokens)
        return tokens, check_attention_mask(attention_mask, tokens.shape[0], tokens.shape[1], tokens.device)


@dataclass(frozen=True)
class LogitRows:
    """The rows whose logits are returned, padded to equally many per sequence: the last block computes no others.

    No layer mixes positions after the last block's attention: a position whose logits are not returned needs a key and
    a value there, but no query, MLP, norm or logits.

    Attributes:
        grid: Int[batch selected], rows to compute.
        entries: Batch index and column of `grid` of each requested row; `None` if all of `grid` was requested.
        n_pos: Number of rows of a sequence.
    """

    grid: Int[Tensor, "batch selected"]
    entries: tuple[Int[Tensor, "entry"], Int[Tensor, "entry"]] | None
    n_pos: int

    @classmethod
    def parse(cls, rows: Rows, n_batch: int, n_pos: int, device: torch.device) -> "LogitRows":
        """Read `logits_at`: Int[selected], Bool[batch pos], or a pair of batch and row indices."""
        if isinstance(rows, tuple) and len(rows) == 2 and isinstance(rows[0], Tensor) and isinstance(rows[1], Tensor):
            return cls._of_pairs(rows[0].to(device), rows[1].to(device), n_batch, n_pos)
        try:
            index = (
                torch.as_tensor(rows, device=device) if len(rows) else torch.zeros(0, dtype=torch.long, device=device)
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"logits_at={shown(rows)}; {_ROWS}") from error
        if index.dtype == torch.bool and index.shape == (n_batch, n_pos):
            batch, pos = index.nonzero(as_tuple=True)
            return cls._of_pairs(batch, pos, n_batch, n_pos)
        if index.dim() != 1 or index.dtype == torch.bool or index.is_floating_point():
            raise ValueError(f"logits_at is {index.dtype} {list(index.shape)}; {_ROWS}")
        if index.numel() and not -n_pos <= int(index.min()) <= int(index.max()) < n_pos:
            raise ValueError(f"logits_at={index.tolist()} reaches outside the {n_pos} rows")
        return cls((index % n_pos).expand(n_batch, -1), None, n_pos)

    @classmethod
    def _of_pairs(
        cls, batch: Int[Tensor, "entry"], rows: Int[Tensor, "entry"], n_batch: int, n_pos: int
    ) -> "LogitRows":
        for name, index, size in (("batch", batch, n_batch), ("row", rows, n_pos)):
            if index.numel() and not -size <= int(index.min()) <= int(index.max()) < size:
                raise ValueError(f"logits_at reaches {name} indices outside the {size} there are: {index.tolist()}")
        batch, rows = batch % n_batch, rows % n_pos
        column, n_columns = columns_of(batch, n_batch)
        grid = torch.zeros(n_batch, n_columns, dtype=torch.long, device=batch.device)
        grid[batch, column] = rows
        return cls(grid, (batch, column), n_pos)

    def on(self, device: torch.device) -> "LogitRows":
        """The rows for a block on this device."""
        entries = None if self.entries is None else (self.entries[0].to(device), self.entries[1].to(device))
        return LogitRows(self.grid.to(device), entries, self.n_pos)

    def gather(self, x: Resid) -> Float[Tensor, "batch selected d_model"]:
        """The rows of `grid`."""
        return rows_at(x, self.grid)

    def without_padding(self, x: Float[Tensor, "batch selected d_model"]) -> Float[Tensor, "*selected d_model"]:
        """The requested rows among the gathered ones."""
        return x if self.entries is None else x[self.entries]


def rows_at(x: Float[Tensor, "#batch pos *rest"], rows: Int[Tensor, "batch selected"]) -> Tensor:
    """Some rows of each sequence of the batch."""
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
    return x.expand(rows.shape[0], *x.shape[1:])[batch, rows]


def columns_of(rows: Int[Tensor, "entry"], n_rows: int) -> tuple[Int[Tensor, "entry"], int]:
    """The column of each entry, if each is appended to its row, and the number of entries in the longest row."""
    counts, by_row = rows.bincount(minlength=n_rows), rows.argsort(stable=True)
    columns = torch.empty_like(rows)
    columns[by_row] = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows[by_row]]
    return columns, int(counts.max())
