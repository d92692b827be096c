"""The network: embedding, blocks, norm and unembedding, with a hook point at every tensor worth patching.

`diffusion_lens.HookedDiffusionTransformer` is what users load. It adds hooking, losses, loading and the denoising loop.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, replace
from itertools import chain
from threading import get_ident
from typing import TYPE_CHECKING, Annotated, Any, SupportsFloat, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import FactoredMatrix, HookedRootModule
from transformer_lens.utilities.matrix import composition_scores

from diffusion_lens.hooks.clock import StepClock, restoring
from diffusion_lens.model import build
from diffusion_lens.model import text as texts
from diffusion_lens.model.attention import AttentionContext, AttentionPattern, FromPrompt, KeyValueCache, LayerKeyValues
from diffusion_lens.model.build import DeviceMap, Placement
from diffusion_lens.model.config import DTYPES, DiffusionConfig, as_device, as_dtype, reached
from diffusion_lens.model.hook_points import StepHookPoint, hooked_modules
from diffusion_lens.model.hooking import (
    LoopHooks,
    OptionalHooks,
    optional_hooks_of_pass,
    refuse_bypassed,
    refuse_hooks_that_would_stop,
)
from diffusion_lens.model.inputs import (
    LogitRows,
    Padding,
    Rows,
    check_attention_mask,
    check_clean,
    check_layers,
    check_length,
    check_past,
    check_readable,
    check_storage,
    check_tokens,
    warn_unless_masked,
)
from diffusion_lens.model.layers import Embed, PosEmbed, beside, normed
from diffusion_lens.model.mlp import MixtureOfExperts
from diffusion_lens.model.noise import Head, head_of
from diffusion_lens.model.positions import PassPositions, Positions
from diffusion_lens.model.readout import READOUTS, Readout
from diffusion_lens.model.shapes import PosMask, Resid, Tokens
from diffusion_lens.model.time import NetworkTime, SelfConditioning, expected_embedding, one_time_for_all
from diffusion_lens.settings import Whole, check_bool, checked_arguments, pick_layer, whole_number, whole_numbers
from diffusion_lens.settings.arguments import kind_of, shown
from weight_conversion import fold, folded_architecture, is_constant

if TYPE_CHECKING:
    from transformer_lens.model_bridge.composition_scores import CompositionScores

Input = str | Sequence[str] | Tensor


def _stacked(name: str, axes: str) -> Any:
    """A property: a weight of all blocks, copied into one tensor."""

    def stack(model: "DiffusionTransformer") -> Tensor:
        part, _, attribute = name.partition(".")
        parts = [getattr(block, part) for block in model.blocks]
        if with_experts := [i for i, part in enumerate(parts) if isinstance(part, MixtureOfExperts)]:
            first = with_experts[0]
            raise ValueError(
                f"model.{attribute} stacks one MLP of each block, and the blocks {with_experts} have experts: use "
                f"model.blocks[{first}].mlp.experts[0].{attribute}, and likewise for other blocks and experts"
            )
        if len(shapes := {getattr(part, attribute).shape for part in parts}) > 1:
            raise ValueError(
                f"model.{attribute} stacks one matrix of each block, and layers of {model.cfg.model_name!r} have heads "
                f"of different shapes, {sorted(map(list, shapes))}: use model.blocks[i].{name}"
            )
        # Blocks may be on several devices.
        return torch.stack([getattr(part, attribute).to(model.cfg.main_device) for part in parts])

    return property(stack, doc=f"Float [{axes}], a copy that stacks the blocks; `model.blocks[i].{name}` is a view.")


class DiffusionTransformer(HookedRootModule):
    """A diffusion transformer, or its causal AR baseline, with hook points.

    Hooks and the step belong to the model. While one thread is inside `hooks`, `run_with_hooks`, `run_with_cache` or
    the denoising loop, a forward pass of another thread is a `RuntimeError`, and so is attaching or removing hooks
    there. The latter is refused also while a thread is in a plain forward pass. Plain forward passes may run in several
    threads at once.

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
        positions: How the network knows the order of its tokens (`model/positions.py`).
        placement: The places that a `device_map` gave the weights; `None` for a model on one device.
    """

    # For the type checker: nn.Module's __getattr__ returns "Tensor | Module".
    embed: Embed
    hook_embed: StepHookPoint
    blocks: Any
    ln_final: Any
    unembed: Any
    pos_embed: PosEmbed
    hook_pos_embed: StepHookPoint
    self_conditioning: SelfConditioning
    # Their hooks may be pairs of any sequence.
    hooks: Callable[..., Any]
    run_with_hooks: Callable[..., Any]

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
        self.loop_hooks = LoopHooks()
        self.clock = StepClock()
        self._edits: list[Any] = []  # of the weights, as `analysis.RankOneEdit` has written them, the last one last
        # Device, dtype and flags in the config are those of one model, also if several are made from the same config.
        cfg, given = copy(cfg), cfg.architecture
        if folds := is_constant(given):
            cfg.time = folded_architecture(given).time
        architecture = cfg.architecture
        # 1. The parts, without weights.
        for name, part in build.build_parts(architecture).items():
            self.add_module(name, part)
        self._configure(cfg)
        # 2. Their weights.
        self.placement: Placement | None = None
        self._block_devices: tuple[torch.device, ...] | None = None
        if weights_of is not None:
            build.share_tensors(self, weights_of)
            if weights_of.placement is not None:
                self._place(weights_of.placement)
        else:
            if tensors is None:
                tensors = build.random_tensors(given, seed)
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
        # 3. Tokenizer and hook points.
        self.source: Any = None
        self.set_tokenizer(tokenizer)
        self.setup()
        self.eval()

    def _configure(self, cfg: DiffusionConfig) -> None:
        """Take the config, and the positions and the attention pattern that it says."""
        self.cfg = self.config = cfg  # `config` is the name that other libraries look for
        self.positions = build.build_positions(cfg.architecture)
        self._global_positions = build.build_global_positions(cfg.architecture)
        self._pattern, self._global_pattern = AttentionPattern.of(cfg, cfg.window), AttentionPattern.of(cfg)
        if cfg.self_conditioning:
            self.loop_hooks.hook_noise = StepHookPoint()
        self._mask_id = cfg.mask_token_id if cfg.has_mask else None  # where it stands at positions to be predicted

    def _tie(self) -> None:
        if self.cfg.tied:
            self.unembed.weight = self.embed.weight

    def _place(self, placement: Placement) -> None:
        self.cfg.device = str(placement.main)
        if not placement.is_one_device:
            self.placement = placement
            self._block_devices = placement.block_devices(self.blocks)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch; dtypes and devices may be names, as in `model.to("bfloat16")` and `model.to("cuda:1")`.

        Raises:
            ValueError: The model was loaded with a `device_map` that has several places.
        """
        for key, value in [*enumerate(args), *kwargs.items()]:
            if key == "dtype" or isinstance(value, torch.dtype) or str(value).removeprefix("torch.") in DTYPES:
                kwargs["dtype"] = as_dtype(value)
            elif key == "device" or isinstance(value, str | torch.device):
                kwargs["device"] = as_device(value)
        others = [value for value in args if not isinstance(value, str | torch.dtype | torch.device)]
        return super().to(*others, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # torch calls this for .to, .cuda, .half and the like, so the config is updated with the weights here.
        if self.placement is not None:
            raise ValueError(
                "the weights of this model have several places, which its device_map gave, so that it cannot be moved "
                "or converted: load it again with another device_map=, device= or dtype="
            )
        super()._apply(fn, recurse)
        for model in (self, *build.sharing(self)):
            model.cfg.device, model.cfg.dtype = str(self.unembed.weight.device), self.unembed.weight.dtype
        return self

    def restore_edits(self) -> None:
        """Take all edits such as `RankOneEdit` out of the weights, also one whose end was cut off."""
        while self._edits:
            self._edits[-1].put_back()

    # The forward pass

    def _run(
        self,
        input: Any,
        *,
        attention_mask: Tensor | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        logits_at: Rows | None = None,
        past_kv_cache: KeyValueCache | None = None,
        sigma: Float[Tensor, "rest"] | None = None,
        clean: Tensor | None = None,
        self_conditioning: Tensor | None = None,
        unembed: bool = True,
        mask_id: int | None = None,
    ) -> Tensor | None:
        """The logits, or the residual stream at `stop_at_layer`. See the model's `forward` for the other arguments.

        `mask_id` is given where the caller reads predictions: if no token has this id, there are none.
        """
        with self.clock.passes[get_ident()]:
            if self.clock.holder is None:
                if self.clock.drop_hooks is not None:
                    self._drop_dead_hooks()
            elif self.clock.holder != get_ident():
                self.clock.require_free()
            # 1. Check the input and embed it.
            n_layers = self.cfg.n_layers
            start, stop = 0, n_layers
            if start_at_layer is not None or stop_at_layer is not None:
                start, stop = check_layers(start_at_layer, stop_at_layer, n_layers)
            resid, real, tokens = self._enter(input, attention_mask, start_at_layer is not None, clean)
            if mask_id is not None and tokens is not None:
                warn_unless_masked(tokens, mask_id, self.cfg)
            n_read = resid.shape[1] if clean is None else resid.shape[1] // 2
            # 2. Choose the rows. The last block computes only these, unless a hook there expects all rows.
            rows, in_last_block = None, False
            if logits_at is not None and stop_at_layer is None:
                rows = LogitRows.parse(logits_at, resid.shape[0], n_read, resid.device)
                last_parts = (self.blocks[-1], self.ln_final, self.unembed)
                saves_work = 4 * rows.grid.shape[1] <= 3 * rows.n_pos  # gathering costs something too
                in_last_block = saves_work and not any(map(hooked_modules, last_parts))
            # 3. Place the positions: after those of a cache, without padding, and those of both texts alike.
            n_past = 0
            past: Sequence[LayerKeyValues | None] = [None] * (stop - start)
            if past_kv_cache is not None:
                past = past_kv_cache.layers[start:stop]
                in_loop = self.clock.step is not None and self.clock.step.block is not None
                n_batch, n_new = resid.shape[:2]
                n_past = check_past(past_kv_cache.layers[start:stop], n_batch, n_new, real, self.cfg, in_loop)
            positions = None if real is None else (real[:, :n_read].long().cumsum(dim=1) - 1).clamp(min=0)
            if clean is not None:
                positions = torch.arange(n_read, device=resid.device)[None] if positions is None else positions
                positions = positions.expand(len(resid), -1).repeat(1, 2)
            if self.positions.learned and start_at_layer is None:
                places = positions
                if places is None:
                    places = torch.arange(n_past, n_past + resid.shape[1], device=resid.device).expand(len(resid), -1)
                resid = resid + self.hook_pos_embed(self.pos_embed(places))
            origins = None
            if isinstance(self._pattern, FromPrompt) and clean is None and (start < stop or self.cfg.self_conditioning):
                origins = origins_of(self, tokens, real, len(resid))
            if self_conditioning is not None and (start_at_layer is not None or not self.cfg.self_conditioning):
                raise ValueError(
                    "self_conditioning= enters with the embedding of a network that has it: leave it out with "
                    f"start_at_layer=, and of {self.cfg.model_name!r} "
                    + ("give tokens" if self.cfg.self_conditioning else "always, which has none")
                )
            if self.cfg.self_conditioning and start_at_layer is None:
                assert origins is not None
                if tokens is not None and self.clock.step is None:
                    if int(origins.max()) > (n_all := n_past + resid.shape[1]):
                        raise ValueError(
                            f"at_block says that the open canvas begins at position {int(origins.max())}, and the text "
                            f"has {n_all}: give a position of the text, or {n_all} if none of it is open"
                        )
                    check_readable(tokens[~open_positions(resid, origins, None, n_past)], self.cfg)
                resid = self._conditioned(resid, origins, real, n_past, self_conditioning)
            condition = None
            if "hook_time" in self._modules and (start < stop or stop_at_layer is None):
                condition = self.time.condition(sigma, len(resid), resid.device)
            # 4. Run the blocks.
            context = attention_context(self, resid, real, positions, n_past, origins, condition, clean is not None)
            for layer, block, block_past in zip(range(start, stop), list(self.blocks)[start:stop], past, strict=True):
                block_rows = rows if in_last_block and layer == n_layers - 1 else None
                if self._block_devices is None:
                    resid = block(resid, context, block_past, block_rows)
                else:
                    device = self._block_devices[layer]
                    there = None if block_rows is None else block_rows.on(device)
                    resid = block(resid.to(device), context.on(device), block_past, there)
            if self._block_devices is not None:
                resid = resid.to(self.cfg.main_device)
            if stop_at_layer is not None:
                return resid
            # 5. Compute the logits.
            if rows is not None and in_last_block and start == n_layers:
                resid = rows.gather(resid)
            final = None if condition is None else self.time.of_final_norm(condition)
            normalized = normed(self.ln_final, resid, final)
            if not unembed:
                return None
            if rows is None or hooked_modules(self.unembed):
                all_logits: Tensor = self.unembed(normalized)
                return all_logits[:, :n_read] if rows is None else rows.without_padding(rows.gather(all_logits))
            if not in_last_block:
                normalized = rows.gather(normalized)
            logits: Tensor = self.unembed(rows.without_padding(normalized))
            return logits

    def _conditioned(
        self,
        embedded: Resid,
        origins: Int[Tensor, "batch"] | None,
        real: PosMask | None,
        n_past: int,
        logits: Float[Tensor, "batch canvas d_vocab"] | None,
    ) -> Resid:
        """The stream at the first block: the open block is embedded with what the step before predicted."""
        assert origins is not None
        is_open = open_positions(embedded, origins, real, n_past)
        expected: Tensor | None = None
        if logits is not None:
            n_open = is_open.sum(dim=1).tolist()
            if list(logits.shape) != [len(embedded), n_open[0], self.cfg.d_vocab] or len(set(n_open)) > 1:
                raise ValueError(
                    f"self_conditioning is {list(logits.shape)}; it must be the logits at the open block of each row, "
                    f"[batch canvas d_vocab] of {len(embedded)} rows with {n_open} positions and {self.cfg.d_vocab} "
                    "tokens"
                )
            if not logits.is_floating_point():
                raise TypeError(f"self_conditioning is {logits.dtype}; it must be logits, floating-point numbers")
            expected = torch.zeros_like(embedded)
            expected[is_open] = expected_embedding(self.embed, logits).flatten(0, 1).to(embedded)
        elif self.clock.step is not None and self.clock.step.handed is not None:
            of_rows = self.clock.step.handed.expected
            block = torch.arange(of_rows.shape[1], device=embedded.device)
            places = origins.expand(len(embedded))[:, None] - n_past + block
            expected = torch.zeros_like(embedded).scatter(
                1,
                places[..., None].expand(-1, -1, embedded.shape[2]),
                of_rows.to(embedded).repeat(len(embedded) // len(of_rows), 1, 1),
            )
        conditioned: Resid = self.self_conditioning(embedded, expected, is_open)
        return conditioned

    def _drop_dead_hooks(self) -> None:
        """Remove the hooks of `hooks()` contexts whose end was cut off, which no thread is inside any longer."""
        self.clock.drop_hooks = None
        for level in range(1, self.context_level + 1):
            self.remove_all_hook_fns("both", level=level)
        self.context_level = 0

    def _enter(
        self, input: Any, attention_mask: Tensor | None, is_resid: bool, clean: Tensor | None = None
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
            resid = input.to(self.cfg.main_device)
        else:
            tokens = check_tokens(input, self.cfg)
            # The denoising loop passes its own mask: a padding token on its canvas was written by the model.
            if attention_mask is None and self.clock.step is None and self.tokenizer is not None:
                attention_mask = self.padding.real(tokens)
            followed = tokens if clean is None else torch.cat([tokens, check_clean(clean, tokens, self.cfg)], dim=1)
            resid = self.hook_embed(self.embed(followed))
        if attention_mask is None:
            return resid, None, tokens
        copies = 1 if clean is None else 2
        real = check_attention_mask(attention_mask, resid.shape[0], resid.shape[1] // copies, resid.device)
        return resid, None if real is None else real.repeat(1, copies), tokens

    def input_to_embed(
        self,
        input: Input,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Resid, Tokens, None, Tensor | None]:
        """The residual stream entering the first block, as in TransformerLens, for `forward(start_at_layer=0)`.

        The arguments are those of `tokenize`, where `input` may also be tokens Int[batch pos] or Int[pos]. Returns the
        stream Float[batch pos d_model], tokens Int[batch pos], `None`, and the attention mask: the given one, or that
        of the padding, or `None` without padding.
        """
        if isinstance(input, Tensor):
            tokens = input[None] if input.dim() == 1 else input
            real = self.padding.real(tokens)
        else:
            tokens, real = self.tokenize(input, prepend_bos, padding_side)
        padding = None if real is None or bool(real.all()) else real
        mask = padding if attention_mask is None else attention_mask
        resid = self._run(tokens, attention_mask=mask, stop_at_layer=0)
        assert resid is not None
        return resid, tokens, None, mask

    # What the logits mean, and what a pass reads beside its tokens

    @property
    def readout(self) -> Readout:
        """The rule that says which row of the logits predicts the token at each position."""
        return READOUTS[self.cfg.readout]

    @property
    def head(self) -> Head:
        """The meaning of the logits, which turns them into probabilities of clean tokens."""
        return head_of(self.cfg, self.cfg.head, self.cfg.d_vocab_out)

    @property
    def time(self) -> NetworkTime:
        """What the time does to the network, such as `model.time.gates(layer)`."""
        return NetworkTime(self)

    @restoring
    def at_time(self, time: SupportsFloat) -> Iterator[Any]:
        """Give the network this time in every forward pass inside that has no other, so that analyses can run.

            with model.at_time(0.5):
                result = causal_trace(model, query)

        A `time=` of a call, inside the denoising loop the time of the step, and the noise that a loss draws come first.
        Results record the time. Analyses that noise texts give the network the noise of each text; inside, where the
        time is another one, they are refused. Inside, no other thread may use the model. A copy that is made of the
        model inside (`copy.deepcopy`) is given no time. A time outside (0, 1], or a network without time conditioning,
        is a `ValueError`.
        """
        self.time.require_conditioning("at_time")
        with self.clock.telling(time=one_time_for_all(time)):
            yield self

    @restoring
    def at_block(self, start: SupportsIndex | Sequence[int] | Int[Tensor, "batch"]) -> Iterator[Any]:
        """Let the open block begin at this position in every forward pass inside that is no step of the loop.

            with model.at_block(12):
                logits = model(tokens)

        It is needed for a residual stream (`start_at_layer=`), and for a block whose first tokens are written already.
        Results record the positions. Inside, no other thread may use the model. A model whose blocks do not begin at
        the end of the prompt refuses it (`ValueError`).

        Args:
            start: Position in all rows, or one for each row of the batch; 0 or more.
        """
        if not self.cfg.counts_from_prompt:
            raise ValueError(
                f"at_block: {self.cfg.model_name!r} counts no blocks from the end of a prompt, so that its attention "
                "does not depend on where one is open; leave it out"
            )
        given = start.tolist() if isinstance(start, Tensor) else start
        starts = whole_numbers("start", given)
        if not starts or min(starts) < 0:
            raise ValueError(f"start={given}; it must be positions of the canvas, 0 or more")
        with self.clock.telling(origins=torch.tensor(starts, device=self.cfg.device)):
            yield self

    # Hook points that pass on request

    @property
    def is_hooked(self) -> bool:
        """Whether a hook is attached anywhere in the network; the loop's own hook points do not count.

        A hook of torch on a module, `model.blocks[0].mlp.register_forward_hook(...)`, counts as one at a hook point.
        """
        return bool(hooked_modules(self, skip=self.loop_hooks))

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Compute each head's result Float[batch pos head d_model] at `attn.hook_result`, as in TransformerLens.

        A module that would be passed over, here `attn.o`, is a `ValueError` if it was replaced or carries a hook.
        """
        self._set_flag("use_attn_result", use_attn_result)

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Give queries, keys and values of each head their own copy of the residual stream, as in TransformerLens.

        The copies, before the norm, are at `attn.hook_q_input` Float[batch pos head d_model], `attn.hook_k_input` and
        `attn.hook_v_input` Float[batch pos kv_head d_model]. The hook points of `ln1` do not pass while this is on. It
        excludes `use_attn_in`.
        """
        self._set_flag("use_split_qkv_input", use_split_qkv_input, without="use_attn_in")

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Give each head its own copy of the residual stream, as in TransformerLens.

        The copies, before the norm, are at `attn.hook_attn_in` Float[batch pos head d_model]. The hook points of `ln1`
        do not pass while this is on. It excludes `use_split_qkv_input` and query heads that share key/value heads.
        """
        if use_attn_in and self.cfg.n_key_value_heads not in (None, self.cfg.n_heads):
            raise ValueError(
                f"use_attn_in gives every head one input, but here {self.cfg.n_heads} query heads share "
                f"{self.cfg.n_key_value_heads} key/value heads; use set_use_split_qkv_input(True)"
            )
        self._set_flag("use_attn_in", use_attn_in, without="use_split_qkv_input")

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Give the MLP its own copy of the residual stream, before the norm: `hook_mlp_in` Float[batch pos d_model]."""
        self._set_flag("use_hook_mlp_in", use_hook_mlp_in)

    def _set_flag(self, flag: str, value: bool, without: str | None = None) -> None:
        if check_bool(flag, value):
            if without is not None and getattr(self.cfg, without):
                raise ValueError(f"{flag} and {without} exclude each other; call model.set_{without}(False) first")
            refuse_bypassed(self, flag)
        setattr(self.cfg, flag, value)

    @restoring
    def optional_hooks(
        self,
        *,
        use_attn_result: bool = False,
        use_split_qkv_input: bool = False,
        use_attn_in: bool = False,
        use_hook_mlp_in: bool = False,
    ) -> Iterator[None]:
        """Inside, exactly these optional hook points pass; afterwards, those that passed before.

        Inside, no other thread may use the model. A hook at a point that would no longer pass is a `ValueError`.
        """
        with self.clock.held():
            before = asdict(OptionalHooks.of(self.cfg))
            inside = asdict(OptionalHooks(use_attn_result, use_split_qkv_input, use_attn_in, use_hook_mlp_in))
            refuse_hooks_that_would_stop(self, (flag for flag, value in before.items() if value > inside[flag]))
            try:
                self.cfg.use_split_qkv_input = self.cfg.use_attn_in = False  # they exclude each other
                for flag, value in inside.items():
                    getattr(self, f"set_{flag}")(value)
                yield
            finally:
                for flag, value in before.items():
                    setattr(self.cfg, flag, value)

    # Text and tokens

    def set_tokenizer(self, tokenizer: Any, default_prepend_bos: bool | None = None) -> None:
        """Use `tokenizer`; if the id of [MASK] is its next free id, use a copy of it that also contains [MASK]."""
        self.tokenizer = texts.with_mask_token(tokenizer, self.cfg.mask_token_id)
        if default_prepend_bos is not None:
            self.cfg.default_prepend_bos = check_bool("default_prepend_bos", default_prepend_bos)

    @checked_arguments
    def to_tokens(
        self,
        input: Annotated[
            str | Sequence[str],
            "a string or a list of them; pass ids as torch.tensor(ids), of a tokenizer's result its ids, "
            "...['input_ids']",
        ],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Tokens:
        """Token ids Int[batch pos] of a text or of several.

        Shorter texts are padded, on the side of `tokenize`, in two cases: if the tokens alone show the padding
        (`model.padding.own_id`), and on the right for a causal model, where padding on the right does not affect real
        tokens (the loss and continuations still need the mask). `tokenize` pads for any model, and also returns the
        mask. Texts of different lengths in any other case are a `ValueError`: their padding would be read as text.
        """
        tokens, real = self.tokenize(input, prepend_bos, padding_side)
        on_the_right = self.cfg.is_causal and bool(real[:, 0].all())
        if self.padding.own_id is None and not bool(real.all()) and not on_the_right:
            raise ValueError(
                f"the texts have {sorted(set(real.sum(dim=1).tolist()))} tokens, and the tokenizer has no padding "
                "token that is not also text: the tokens alone do not show what is padding. Take "
                "tokens, mask = model.tokenize(texts) and pass attention_mask=mask with the tokens, or pass the "
                "texts themselves to the model"
            )
        if truncate:
            tokens = tokens[:, : self.cfg.n_ctx]
        return tokens if move_to_device else tokens.cpu()

    def tokenize(
        self, input: str | Sequence[str], prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> tuple[Tokens, PosMask]:
        """Token ids Int[batch pos] and Bool[batch pos], false at padding, to be passed as `attention_mask`.

        Shorter texts are padded on the "left" or "right"; by default on that of the tokenizer
        (`model.tokenizer.padding_side`), as in TransformerLens.
        A `UserWarning` names words that the tokenizer replaces by its unknown token.
        """
        return texts.tokenize(self, input, prepend_bos, padding_side)

    def encode(self, text: str, prepend_bos: bool | None = None) -> list[int]:
        """The ids of one text, without a warning for unknown words."""
        return texts.encode_all(self, [text], prepend_bos)[0]

    @checked_arguments
    def to_string(self, tokens: Any) -> Any:
        """Text of one token or sequence, Int[pos], or a list of texts for a batch, such as a `Trajectory`.

        Positions not reached (-1) are left out.
        """
        ids = _ids(getattr(tokens, "tokens", tokens))
        if ids.dim() == 0:
            ids = ids[None]
        if ids.dim() == 2:
            return [self.to_string(row) for row in ids]
        kept = ids[reached(ids)].long().tolist()
        return texts.require_tokenizer(self).decode(kept, clean_up_tokenization_spaces=False)

    @checked_arguments
    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None) -> Any:
        """The text of each token of one sequence, also of a `Trajectory` of one row; for texts, a list for each."""
        input = getattr(input, "tokens", input)
        if isinstance(input, str):
            input = self.to_tokens(input, prepend_bos)[0]
        elif isinstance(input, Sequence) and any(isinstance(each, str) for each in input):
            return [self.to_str_tokens(str(each), prepend_bos) for each in input]
        ids = _ids(input)
        if ids.dim() > 1 and ids.shape[0] != 1:
            raise ValueError(f"to_str_tokens takes one row of tokens, not {list(ids.shape)}; call it for each row")
        return [texts.word_of(self, int(i)) for i in ids.flatten()]

    @checked_arguments
    def to_single_token(self, string: str) -> int:
        """The id of a string that is exactly one known token; otherwise a `ValueError` that shows its tokens."""
        ids = self.encode(string, prepend_bos=False)
        texts.check_known(self, string)
        if len(ids) != 1:
            raise texts.TokenError(f"{string!r} is {len(ids)} tokens, not one: {self.words(ids)}")
        return ids[0]

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one id."""
        return texts.word_of(self, int_token)

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Int[Tensor, "*batch pos"],
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Position of a token, by id or text, in a text or in one sequence of tokens, as in TransformerLens.

        Of several occurrences it is the `mode` one, "first" or "last". A token that does not occur is a `ValueError`.
        """
        if mode not in ("first", "last"):
            raise ValueError(f"mode={mode!r}; it must be 'first' or 'last'")
        tokens = self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, str) else input
        if tokens.dim() > 1 and tokens.shape[0] != 1:
            raise ValueError(f"a token is searched in one row of tokens, not in {list(tokens.shape)}")
        token = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        positions = (tokens.flatten() == token).nonzero().flatten().tolist()
        if not positions:
            raise texts.TokenError(
                f"{self.words([token])[0]!r} does not occur in {self.words(tokens.flatten().tolist())}"
            )
        return int(positions[0 if mode == "first" else -1])

    def words(self, tokens: Sequence[int]) -> list[str]:
        """A label for each id: its text or, without a tokenizer, the id in brackets."""
        return [f"<{token}>" if self.tokenizer is None else texts.word_of(self, token) for token in tokens]

    @property
    def padding(self) -> Padding:
        """Which positions of rows of tokens are text, and the id at the others (`model.padding.id`)."""
        return Padding(self)

    # The weights under TransformerLens's names and shapes

    @property
    def device(self) -> torch.device:
        """The device of tokens, logits and residual streams."""
        return self.cfg.main_device

    @property
    def n_params_total(self) -> int:
        """Number of all parameters, shared ones once; `cfg.n_params` counts weights in attention and MLPs only."""
        return sum(parameter.numel() for parameter in self.parameters())

    W_Q = _stacked("attn.W_Q", "layer head d_model d_head")
    W_K = _stacked("attn.W_K", "layer kv_head d_model d_head")
    W_V = _stacked("attn.W_V", "layer kv_head d_model d_head")
    W_O = _stacked("attn.W_O", "layer head d_head d_model")
    b_Q = _stacked("attn.b_Q", "layer head d_head")
    b_K = _stacked("attn.b_K", "layer kv_head d_head")
    b_V = _stacked("attn.b_V", "layer kv_head d_head")
    b_O = _stacked("attn.b_O", "layer d_model")
    W_in = _stacked("mlp.W_in", "layer d_model d_mlp")
    W_gate = _stacked("mlp.W_gate", "layer d_model d_mlp")
    W_out = _stacked("mlp.W_out", "layer d_mlp d_model")
    b_in = _stacked("mlp.b_in", "layer d_mlp")
    b_gate = _stacked("mlp.b_gate", "layer d_mlp")
    b_out = _stacked("mlp.b_out", "layer d_model")

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "pos d_model"]:
        """The learned vector of each position; an `AttributeError` for a model without them, as in TransformerLens."""
        return self.pos_embed.W_pos

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab_out"]:
        weight: Tensor = self.unembed.W_U
        return weight

    @property
    def b_U(self) -> Float[Tensor, "d_vocab_out"]:
        bias: Tensor = self.unembed.b_U
        return bias

    def tl_parameters(self) -> dict[str, Tensor]:
        """The matrices and norm weights under TransformerLens's names, for its `SVDInterpreter`.

        Key and value heads are repeated for each query head, because tools index them by query head. `W_in` reads the
        stream after the product with `ln2.w`, which is 1 in a model with folded norms. Those of an expert are named
        "mlp.experts.3.W_in" and so on.
        """
        named = {"embed.W_E": self.W_E, "unembed.W_U": self.W_U, "ln_final.w": self.ln_final.w}
        if self.positions.learned:
            named["pos_embed.W_pos"] = self.W_pos
        queries_per_key = self.cfg.n_heads // (self.cfg.n_key_value_heads or self.cfg.n_heads)
        for i, block in enumerate(self.blocks):
            attn, mlp = block.attn, block.mlp
            weights = {
                "ln1.w": block.ln1.w,
                "attn.W_Q": attn.W_Q,
                "attn.W_K": attn.W_K.repeat_interleave(queries_per_key, dim=0),
                "attn.W_V": attn.W_V.repeat_interleave(queries_per_key, dim=0),
                "attn.W_O": attn.W_O,
                "ln2.w": block.ln2.w,
                **{f"mlp.{name}": weight for name, weight in mlp.tl_parameters().items()},
            }
            named |= {f"blocks.{i}.{name}": weight for name, weight in weights.items()}
        return named

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The items of `tl_parameters`."""
        yield from self.tl_parameters().items()

    def blocks_with(self, submodule: str) -> list[tuple[int, nn.Module]]:
        """Index and block of each block that has a submodule of this name: here all blocks or none."""
        return [(i, block) for i, block in enumerate(self.blocks) if submodule in block._modules]

    @property
    def all_head_labels(self) -> list[str]:
        """The names of all query heads, in order: "L0H0", "L0H1" and so on."""
        return [f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads)]

    def all_composition_scores(self, mode: str) -> "CompositionScores":
        """How much each head reads of what each head of an earlier layer writes, by weights alone.

        ‖W_OV W_QK‖ / (‖W_OV‖ ‖W_QK‖) in Frobenius norms (Elhage et al. 2021, A Mathematical Framework for Transformer
        Circuits), as in TransformerLens. The weights of the norms count only in a model with folded norms. In a network
        with time conditioning, what the time multiplies counts too: what a head reads by the scale of its norm, and
        what it writes by the gate, at the time of `model.at_time(t)`.

        Args:
            mode: What the later head composes: "Q", "K" or "V".

        Returns:
            `scores` Float[layer head layer head], earlier head first, 0 unless its layer is earlier.
        """
        # It imports all of TransformerLens's bridges, which would take a third of the time of importing this library.
        from transformer_lens.model_bridge.composition_scores import CompositionScores

        layers = list(range(self.cfg.n_layers))
        scales, gates = (torch.stack(x)[:, None] for x in zip(*map(self.time.attention_factors, layers), strict=True))
        W_Q, W_K, W_V = (scales[..., None] * self._for_each_head(weights) for weights in (self.W_Q, self.W_K, self.W_V))
        QK, OV = FactoredMatrix(W_Q, W_K.transpose(-2, -1)), FactoredMatrix(W_V, self.W_O * gates[..., None, :])
        later = {"Q": QK, "K": QK.T, "V": OV}
        if mode not in later:
            raise ValueError(f"mode={mode!r}; it must be 'Q', 'K' or 'V'")
        scores = composition_scores(OV, later[mode], broadcast_dims=True)
        index = torch.tensor(layers, device=scores.device)
        earlier = index[:, None, None, None] < index[None, None, :, None]
        return CompositionScores(scores * earlier, layers, self.all_head_labels)

    def accumulated_bias(
        self, layer: Whole, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, "d_model"]:
        """Sum of the biases added to the residual stream before `layer`, after the gates of a network with time
        conditioning.

        Args:
            layer: Index of the block, negative from the end; `n_layers` for the stream after the last block.
            mlp_input: Whether the bias of the attention of `layer` is included.
            include_mlp_biases: Whether biases of MLPs are included.
        """
        after_all = not mlp_input and whole_number("layer", layer) == self.cfg.n_layers
        layer = self.cfg.n_layers if after_all else pick_layer(layer, self.cfg.n_layers)
        total = self.W_E.new_zeros(self.cfg.d_model, device=self.cfg.main_device)
        for i in range(layer):
            of_attention, of_mlp = self.time.gates(i)
            total = total + beside(self.blocks[i].attn.b_O, total) * of_attention
            if include_mlp_biases:
                total = total + beside(self.blocks[i].mlp.b_out, total) * of_mlp
        if not mlp_input:
            return total
        return total + beside(self.blocks[layer].attn.b_O, total) * self.time.gates(layer)[0]

    def tokens_to_residual_directions(self, tokens: str | int | Int[Tensor, "*rest"]) -> Float[Tensor, "... d_model"]:
        """The directions whose product with the normalised stream (before ln_final's weight) are the tokens' logits.

        They include the weight of ln_final, as TransformerLens's attribution tools assume, and in a network with time
        conditioning the scale of ln_final at that of `model.at_time(t)`. The biases of ln_final and of the head add a
        constant to each logit.

        Args:
            tokens: Token ids, or the text of a single token; a single id gives [d_model].
        """
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        ids = torch.as_tensor(tokens, device=self.W_U.device)
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.cfg.d_vocab_out):
            raise ValueError(f"the head has columns for tokens 0 to {self.cfg.d_vocab_out - 1}; got {tokens}")
        if ids.numel() == 1:
            ids = ids.reshape(())
        return self.W_U.T[ids] * self.time.final_weight()

    @property
    def QK(self) -> FactoredMatrix:
        """The query-key circuit of each head; grouped keys are repeated for their query heads."""
        return FactoredMatrix(self.W_Q, self._for_each_head(self.W_K).transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """The output-value circuit of each head; grouped values are repeated for their query heads."""
        return FactoredMatrix(self._for_each_head(self.W_V), self.W_O)

    def _for_each_head(self, weights: Tensor) -> Tensor:
        return weights.repeat_interleave(self.cfg.n_heads // weights.shape[1], dim=1)


def attention_context(
    model: DiffusionTransformer,
    resid: Resid,
    real: PosMask | None,
    positions: Tokens | None,
    n_past: int,
    origins: Int[Tensor, "batch"] | None,
    condition: Float[Tensor, "batch d_cond"] | None = None,
    followed: bool = False,
) -> AttentionContext:
    """What the layers of one forward pass share; `followed` says that the clean text follows the noisy one."""
    n_pos, device = resid.shape[1], resid.device
    visibility = (
        model._pattern.beside_clean(n_pos // 2, device, None if real is None else real[:, : n_pos // 2])
        if followed
        else model._pattern.visibility(n_pos, device, real, n_past, origins)
    )
    at = PassPositions(n_pos, device, positions, n_past, model.cfg.dtype)
    rotary, bias = model.positions.of_pass(at)
    if bias is not None:
        bias = bias.masked_fill(~visibility.dense(n_pos, n_past + n_pos, device), float("-inf"))
    factors = None if model.positions.query_scale is None else model.positions.query_factors_of_pass(at)
    context = AttentionContext(visibility, rotary, factors, bias, optional_hooks_of_pass(model), condition)
    if origins is not None and model.cfg.layer_scalars:
        context = replace(context, is_open=open_positions(resid, origins, real, n_past))
    if model.cfg.global_layers is None:
        return context
    sees_all = model._global_pattern.visibility(n_pos, device, real, n_past, origins)
    turned, _ = positions_of(model, model.cfg.global_layers.layers.index(True)).of_pass(at)
    return replace(context, in_global=replace(context, visibility=sees_all, rotary=turned))


def open_positions(
    resid: Resid, origins: Int[Tensor, "batch"], real: PosMask | None, n_past: int = 0
) -> Bool[Tensor, "batch pos"]:
    """The positions of a pass that are in open blocks, which begin at `origins`."""
    places = torch.arange(n_past, n_past + resid.shape[1], device=resid.device)
    is_open = (places >= origins[:, None]).expand(len(resid), -1)
    return is_open if real is None else is_open & real


def positions_of(model: DiffusionTransformer, layer: int) -> Positions:
    """How a layer knows positions: global layers may have their own."""
    own = model._global_positions
    return own if own is not None and model.cfg.is_global(layer) else model.positions


def normalized(
    model: DiffusionTransformer,
    resid: Resid | Float[Tensor, "entry d_model"],
    sigma: Float[Tensor, "rest"] | None = None,
) -> Tensor:
    """The input of the unembedding for a residual stream, at the noise level of all rows or of each: by default that of
    the step, then that of `at_time`."""
    final = model.time.of_final_norm(model.time.condition(sigma, len(resid), resid.device))
    return normed(model.ln_final, resid, final)


def origins_of(
    model: DiffusionTransformer, tokens: Tokens | None, real: PosMask | None = None, n_batch: int | None = None
) -> Int[Tensor, "rest"] | None:
    """The first position of each row that is read in blocks; `None` where it is the first token of every text.

    Of a model that counts blocks from the end of the prompt, the step of the loop knows the position. Outside, it is
    that of `model.at_block`, or else the first [MASK] of a row ends its prompt, as it does in the first step of the
    loop; a row without [MASK] is all prompt, and nothing in it is open.

    Args:
        tokens: Int[batch pos]; `None` for a residual stream.
        real: Bool[batch pos], false at padding.
        n_batch: Number of rows of a pass, which may be copies of those of the step, one after the other.

    Raises:
        ValueError: The input is a residual stream, and nothing says where the open block begins; or `model.at_block`
            was given positions for another number of rows.
    """
    if not model.cfg.counts_from_prompt:
        return None
    if (known := model.clock.origin) is not None:
        if n_batch is not None and n_batch % len(known):
            raise ValueError(
                f"at_block was given {len(known)} positions, and the batch has {n_batch} rows: give one position, or "
                "one for each row"
            )
        return known if n_batch is None else known.repeat(n_batch // len(known))
    if model.cfg.uniform_noise:
        raise ValueError(
            f"{model.cfg.model_name!r} reads the text before its open canvas causally and all of the canvas, and every "
            "position has a token, so that nothing shows where the canvas begins: run the pass inside `with "
            "model.at_block(start):`; of a command, give --steps, which reads the canvases of a run"
        )
    if tokens is None:
        raise ValueError(
            f"a residual stream does not say where the open block begins, and the attention of "
            f"{model.cfg.model_name!r} depends on it: run the pass inside `with model.at_block(start):`, with the "
            "position of the first [MASK], or the number of positions if there is none"
        )
    masked = tokens.eq(model.cfg.blank)
    open_ = masked if real is None else masked & real
    places = torch.arange(open_.shape[1], device=open_.device).expand_as(open_)
    return places.masked_fill(~open_, open_.shape[1]).amin(dim=1)


def _ids(tokens: Any) -> Tensor:
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        ids = torch.as_tensor(tokens)
        if not (ids.is_floating_point() or ids.is_complex()) or not ids.numel():
            return ids
    raise TypeError(f"tokens={shown(tokens)} is {kind_of(tokens)}; give ids of tokens, such as Int[pos]")
