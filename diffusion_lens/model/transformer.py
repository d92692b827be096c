"""The network: embedding, blocks, norm and unembedding, with a hook point at every tensor worth patching.

`DiffusionTransformer` is abstract. `diffusion_lens.HookedDiffusionTransformer` adds loading, the loop and the losses.
"""

from abc import ABC
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model import build
from diffusion_lens.model.attention import AttentionContext
from diffusion_lens.model.attention_patterns import AttentionPattern
from diffusion_lens.model.block_origins import BlockOrigins
from diffusion_lens.model.hook_points import StepHookPoint, anything_listens
from diffusion_lens.model.hooking import Hooking
from diffusion_lens.model.inputs import (
    check_attention_mask,
    check_clean,
    check_layers,
    check_length,
    check_past,
    check_storage,
    check_tokens,
)
from diffusion_lens.model.kv_cache import KeyValueCache
from diffusion_lens.model.logit_rows import LogitRows, Rows
from diffusion_lens.model.modulation import normed
from diffusion_lens.model.optional_hooks import OptionalHookSettings
from diffusion_lens.model.placed import Placed
from diffusion_lens.model.placement import DeviceMap, Placement
from diffusion_lens.model.reading_head import ReadingHead
from diffusion_lens.model.text import TextInterface
from diffusion_lens.model.weights import WeightViews
from diffusion_lens.readout import READOUTS, Readout
from diffusion_lens.shapes import PosMask, Resid, Tokens
from weight_conversion import fold, folded_architecture, is_constant

Input = str | Sequence[str] | Tensor


class DiffusionTransformer(
    TextInterface, ReadingHead, BlockOrigins, WeightViews, OptionalHookSettings, Placed, Hooking, ABC
):
    """A diffusion transformer, or its causal AR baseline, with hook points.

    Args:
        cfg: Config of the model, which is copied. If its conditioning on the time is constant, the model is folded:
            the constants become a part of the norms and of the output matrices (`cfg.time.folded`).
        tokenizer: Fast Hugging Face tokenizer; `None` for a model that takes token ids only.
        tensors: Weights in our layout; by default random weights.
        seed: Seed of the random weights.
        weights_of: Model whose parameters this one shares, instead of `tensors`: a change of one is that of both.
        assign: Whether a tensor of the right dtype on the right device becomes the weight itself instead of being
            copied, as in `torch.nn.Module.load_state_dict`.
        device_map: Places of the weights, as in `from_pretrained`, instead of `cfg.device`.

    Attributes:
        positions: How the network knows the order of its tokens (`model/positions.py`). `positions.turn(x, positions)`
            turns queries and keys, and `positions.score_bias(queries, keys)` is what is added to their scores.
    """

    # For the type checker: nn.Module's __getattr__ returns "Tensor | Module".
    hook_embed: StepHookPoint
    blocks: Any

    def __init__(
        self,
        cfg: DiffusionConfig,
        tokenizer: Any = None,
        *,
        tensors: Iterable[tuple[str, Tensor]] | None = None,
        seed: int = 0,
        weights_of: "DiffusionTransformer | None" = None,
        assign: bool = False,
        device_map: DeviceMap | None = None,
    ) -> None:
        super().__init__()
        # Device, dtype and flags in the config are those of one model, also if several are made from the same config.
        self.cfg = copy(cfg)
        folds = is_constant(cfg.architecture)
        if folds:
            self.cfg.time = folded_architecture(cfg.architecture).time
        architecture = self.cfg.architecture
        self.embed = build.build_embed(architecture)
        self.hook_embed = StepHookPoint()
        self.blocks = nn.ModuleList(build.build_blocks(architecture))
        self.ln_final = build.build_norm(architecture)
        self.unembed = build.build_unembed(architecture)
        self.positions = build.build_positions(architecture)
        if self.positions.learned:
            self.pos_embed = build.build_pos_embed(architecture)
            self.hook_pos_embed = StepHookPoint()
        self._add_time_parts()
        self._pattern = AttentionPattern.of(cfg)
        if weights_of is not None:
            build.share_tensors(self, weights_of)
            if weights_of.placement is not None:
                self._place(weights_of.placement)
        else:
            if tensors is None:
                tensors = build.random_tensors(cfg.architecture, seed)
            if folds:
                tensors = chain(tensors, build.zero_shifts(architecture))
            self._tie()
            placement = Placement.on(cfg.device or "cpu")
            if device_map is not None:
                placement = Placement.of(device_map, self, cfg.dtype)
                self._place(placement)
            build.load_tensors(self, tensors, placement, cfg.dtype, assign)
            self._tie()
            if folds:
                fold(dict(self.named_parameters()), architecture)
        self.set_tokenizer(tokenizer)
        self.setup()
        self.eval()

    def _tie(self) -> None:
        """Use the embedding's weight as the head's if the architecture ties them."""
        if self.cfg.tied:
            self.unembed.weight = self.embed.weight

    @property
    def readout(self) -> Readout:
        """The rule that says which row of the logits predicts the token at each position."""
        return READOUTS[self.cfg.readout]

    def input_to_embed(
        self,
        input: Input,
        prepend_bos: bool | None = None,
        padding_side: str = "right",
        attention_mask: Tensor | None = None,
    ) -> tuple[Resid, Tokens, None, Tensor | None]:
        """The residual stream entering the first block, as in TransformerLens, for `forward(start_at_layer=0)`.

        Args:
            input: Text, texts, or tokens Int[batch pos] or Int[pos].
            prepend_bos: Whether text begins with BOS, as in `to_tokens`.
            padding_side: Side on which shorter texts are padded, "left" or "right".
            attention_mask: [batch pos], 0 at the padding of tokens.

        Returns:
            Residual stream Float[batch pos d_model], tokens Int[batch pos], `None`, and the attention mask: the
            given one, or that of the padding, or `None` without padding.
        """
        if isinstance(input, Tensor):
            tokens = input[None] if input.dim() == 1 else input
            real = self.real_positions(tokens)
        else:
            tokens, real = self.tokenize(input, prepend_bos, padding_side)
        padding = None if real is None or bool(real.all()) else real
        mask = padding if attention_mask is None else attention_mask
        resid = self.run_layers(tokens, attention_mask=mask, stop_at_layer=0)
        assert resid is not None
        return resid, tokens, None, mask

    def run_layers(
        self,
        input: Input,
        *,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        logits_at: Rows | None = None,
        past_kv_cache: KeyValueCache | None = None,
        sigma: Float[Tensor, "rest"] | None = None,
        clean: Tensor | None = None,
        unembed: bool = True,
    ) -> Tensor | None:
        """Compute logits, or the residual stream at `stop_at_layer`. See `Forward.forward` for the other arguments.

        Args:
            sigma: Noise level of all rows or of each, for a network that is told the time.
            unembed: Whether logits are computed after the last norm; otherwise `None` is returned.
        """
        with self.clock.passing():
            # 1. Check the input and embed it.
            start, stop = check_layers(start_at_layer, stop_at_layer, self.cfg.n_layers)
            resid, real, tokens = self._enter(input, attention_mask, prepend_bos, start_at_layer is not None, clean)
            n_read = resid.shape[1] if clean is None else resid.shape[1] // 2
            # 2. Choose the rows. The last block computes only these, unless a hook there expects all rows.
            rows = None
            if logits_at is not None and stop_at_layer is None:
                rows = LogitRows.parse(logits_at, resid.shape[0], n_read, resid.device)
            in_last_block = (
                rows is not None
                and rows.saves_work
                and not any(map(anything_listens, (self.blocks[-1], self.ln_final, self.unembed)))
            )
            # 3. Run the blocks.
            past = [None] * (stop - start) if past_kv_cache is None else past_kv_cache.layers[start:stop]
            n_past = check_past([each.n_pos for each in past if each], resid.shape[1], real, self.cfg, self.in_loop)
            positions = None if real is None else (real[:, :n_read].long().cumsum(dim=1) - 1).clamp(min=0)
            if clean is not None:  # both texts have the same positions
                positions = torch.arange(n_read, device=resid.device)[None] if positions is None else positions
                positions = positions.expand(len(resid), -1).repeat(1, 2)
            if self.positions.learned and start_at_layer is None:
                resid = resid + self._position_vectors(resid.shape[0], resid.shape[1], positions, n_past)
            origins = self._origins_of_pass(tokens, real, len(resid)) if clean is None and start < stop else None
            context = self.attention_context(resid, real, positions, n_past, origins, clean is not None)
            if start < stop or stop_at_layer is None:
                context = replace(context, condition=self.condition_at(sigma, len(resid), resid.device))
            for layer, block_past in zip(range(start, stop), past, strict=True):
                block_rows = rows if in_last_block and layer == self.cfg.n_layers - 1 else None
                resid = self.blocks[layer](*self._for_block(layer, resid, context, block_past, block_rows))
            resid = self._returned(resid)
            if stop_at_layer is not None:
                return resid
            # 4. Compute the logits.
            if rows is not None and in_last_block and start == self.cfg.n_layers:
                resid = rows.gather(resid)
            normalized = normed(self.ln_final, resid, self.final_modulation_at(context.condition))
            if not unembed:
                return None
            if rows is None or anything_listens(self.unembed):
                all_logits: Tensor = self.unembed(normalized)
                return all_logits[:, :n_read] if rows is None else rows.without_padding(rows.gather(all_logits))
            if not in_last_block:
                normalized = rows.gather(normalized)
            logits: Tensor = self.unembed(rows.without_padding(normalized))
            return logits

    def _enter(
        self,
        input: Input,
        attention_mask: Tensor | None,
        prepend_bos: bool | None,
        is_resid: bool,
        clean: Tensor | None = None,
    ) -> tuple[Resid, PosMask | None, Int[Tensor, "batch _"] | None]:
        """The residual stream at the first block, of both texts; Bool[batch pos], false at padding; and the tokens."""
        tokens = None
        if is_resid:
            if isinstance(input, Tensor):
                check_storage(input, "the residual stream")
            if not isinstance(input, Tensor) or input.dim() != 3 or input.shape[-1] != self.cfg.d_model:
                given = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
                raise ValueError(
                    f"start_at_layer needs a residual stream [batch, pos, {self.cfg.d_model}]; got {given}"
                )
            check_length(input.shape[1], self.cfg)
            resid = input.to(self.main_device)
        else:
            if not isinstance(input, Tensor):
                input, real_tokens = self.tokenize(input, prepend_bos)
                attention_mask = real_tokens if attention_mask is None else attention_mask
            tokens = check_tokens(input, self.cfg)
            # The denoising loop passes its own mask: a padding token on its canvas was written by the model.
            if attention_mask is None and self.clock.step is None:
                attention_mask = self.real_positions(tokens)
            followed = tokens if clean is None else torch.cat([tokens, check_clean(clean, tokens, self.cfg)], dim=1)
            resid = self.hook_embed(self.embed(followed))
        if attention_mask is None:
            return resid, None, tokens
        copies = 1 if clean is None else 2
        real = check_attention_mask(attention_mask, resid.shape[0], resid.shape[1] // copies, resid.device)
        return resid, None if real is None else real.repeat(1, copies), tokens

    def _position_vectors(self, n_batch: int, n_pos: int, positions: Tokens | None, n_past: int) -> Resid:
        """The learned vectors of the positions of a pass."""
        if positions is None:
            positions = torch.arange(n_past, n_past + n_pos, device=self.main_device).expand(n_batch, -1)
        vectors: Resid = self.hook_pos_embed(self.pos_embed(positions))
        return vectors

    def attention_context(
        self,
        resid: Resid,
        real: PosMask | None,
        positions: Tokens | None,
        n_past: int,
        origins: Int[Tensor, "batch"] | None,
        followed: bool = False,
    ) -> AttentionContext:
        """What the layers of one forward pass share, apart from the time; `followed` by the clean text."""
        n_pos, device = resid.shape[1], resid.device
        visibility = (
            self._pattern.beside_clean(n_pos // 2, device, None if real is None else real[:, : n_pos // 2])
            if followed
            else self._pattern.visibility(n_pos, device, real, n_past, origins)
        )
        rotary, bias = self.positions.of_pass(n_pos, device, positions, n_past, self.cfg.dtype)
        if bias is not None:
            bias = bias.masked_fill(~visibility.dense(n_pos, n_past + n_pos, device), float("-inf"))
        factors = self.positions.query_factors_of_pass(n_pos, device, positions, n_past)
        return AttentionContext(visibility, rotary, factors, bias, self.optional_hooks_of_pass())
