"""`HookedDiffusionTransformer`: the network of `model.transformer`, which a user loads, calls, hooks and runs.

The chapters follow a session: load, call, hook, cache, denoise, generate, save.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, SupportsFloat, SupportsIndex

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens import HookedRootModule
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.utilities.slice import Slice

from diffusion_lens.denoising.cache import CacheFilter, TrajectoryCache
from diffusion_lens.denoising.canvas import Prompt, lay_out
from diffusion_lens.denoising.denoise import (
    INSTEAD,
    RETURN_TYPES,
    denoise,
    denoise_and_check_hooks,
    denoise_with_cache,
    end_tokens,
    ended_positions,
    filled_with_ends,
    refuse_others,
    temperature_of,
    text_of,
)
from diffusion_lens.denoising.sampler import Sampler, Seed
from diffusion_lens.denoising.settings import DenoiseSettings
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.clock import held_whole, restoring
from diffusion_lens.hooks.names import ByHookPoint, FwdHooks, NamesFilter, hook_pairs
from diffusion_lens.loading import open_pretrained, save_pretrained
from diffusion_lens.loading.delta import TwinCheckpoint
from diffusion_lens.loading.source import Source, export_hf, given_options
from diffusion_lens.model.attention import KeyValueCache
from diffusion_lens.model.build import DeviceMap
from diffusion_lens.model.hooking import (
    AliasedCache,
    PosSlice,
    caching_hooks,
    check_hookable,
    eager_while_hooked,
    name_hook_points,
    select_passing,
)
from diffusion_lens.model.inputs import Rows
from diffusion_lens.model.loss import LossBatch, loss_batch, masked_batch, next_token_batch, noise_of, noised
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.time import Time
from diffusion_lens.model.transformer import DiffusionTransformer, Input
from diffusion_lens.model.weights import NOT_EXACT, check_folded, fold_norms
from diffusion_lens.settings import (
    Whole,
    at_least,
    check_bool,
    check_keywords,
    checked_arguments,
    keywords_of,
    one_of,
    takes,
    takes_any_keyword,
)
from diffusion_lens.settings.arguments import kind_of, shown


class HookedDiffusionTransformer(DiffusionTransformer):
    """A masked diffusion language model, or its autoregressive (AR) baseline, with TransformerLens's interface.

    `model(tokens)`, `run_with_cache` and `run_with_hooks` work as in TransformerLens. `denoise` runs the denoising
    loop, in which the same hooks work and `hook.step` describes the current step. `source` has the arguments of the
    `from_pretrained` call that gave the model; it is `None` for a model that was built otherwise.
    """

    # Load

    @classmethod
    @checked_arguments
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        config: str | Path | Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = torch.float32,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        fold_ln: bool = False,
        block_size: SupportsIndex | None = None,
        mode: Literal["bidirectional", "block", "ar"] | None = None,
        mask_token_id: SupportsIndex | None = None,
        ignore_config_keys: Sequence[str] | None = None,
        device_map: DeviceMap | None = None,
    ) -> "HookedDiffusionTransformer":
        """Load a model by its published name, from a repository of the Hugging Face hub, or from a file or folder.

        Lookup order: local path, bundled model, published name, hub repository. Only config, safetensors and tokenizer
        of a repository are fetched, and no code of it is run.

        Args:
            name_or_path: "smdm-1028m", "llada-8b-base", "site-mdm" (`list_pretrained()` prints all names), "owner/name"
                of a repository in a known family's format, a `.safetensors` or `.pth` checkpoint, a folder with one or
                with a delta (`loading.delta`), whose base is loaded too, or a `.gguf` file (`loading.gguf`).
            config: The checkpoint's config, as a path or a mapping. By default it is read from the file beside the
                checkpoint, or derived from the tensors' shapes.
            tokenizer: Folder with tokenizer.json and tokenizer_config.json, or a fast Hugging Face tokenizer. By
                default the one beside the checkpoint, or that of the published model; without either the model takes
                token ids only. The tokenizer's settings decide whether BOS is prepended. If it has a chat template,
                `model.tokenizer.apply_chat_template` works.
            device: Device of the model; by default the GPU if there is one.
            dtype: Precision of the weights, torch.bfloat16 or "bfloat16"; they are converted piece by piece.
            revision, cache_dir, token, local_files_only: Arguments of `huggingface_hub.snapshot_download`. Weights of a
                `.gguf` file are kept in `cache_dir` too, by default in `HF_ASSETS_CACHE`.
            fold_ln: Whether the norms' weights are folded into the projections that read them, as by
                `enable_compatibility_mode`. A model that was saved folded stays folded (`cfg.layer_norm_folding`).
            block_size: Positions in a block of a block diffusion model whose config does not say it.
            mode: Where one checkpoint is several models: "bidirectional", "block" (block diffusion) or "ar".
            mask_token_id: Id of [MASK], where neither config nor tokenizer says it.
            ignore_config_keys: Unknown keys of the config that change nothing in the network. Any other unknown key is
                an error.
            device_map: Places of the weights, instead of `device`, for a model that is larger than one GPU: "auto",
                "balanced", "balanced_low_0" or "sequential", by which accelerate chooses them; one place; or a map such
                as {"embed": 0, "blocks.0": 0, "blocks.1": "cpu", "": "disk"} from the names of parts, "" for all
                others, to the number of a GPU, "cpu" or "disk" (a file in the folder for temporary files, `TMPDIR`).
                What is not on a GPU runs on the first one, to which its weights are copied at each use
                (`diffusion_lens.model.build`). Several GPUs, and offloading from a GPU, are not tested on GPUs.

        Raises:
            ValueError: The name (the message gives the nearest), the dtype or the device is unknown; no family supports
                the config; the file is truncated; tensors are missing, unknown or misshapen; both `device` and
                `device_map` are given, or the map names a part that does not exist or leaves one out.
            FileNotFoundError: There is no such file; the repository has no safetensors; or the model is not in the
                cache while the hub is unreachable (the message says which files to put where).
            PermissionError: The repository's terms have not been accepted.
        """
        source = Source(
            name_or_path,
            config=config,
            tokenizer=tokenizer,
            dtype=dtype,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            fold_ln=fold_ln,
            device_map=device_map,
            options=given_options(mode, block_size, mask_token_id, ignore_config_keys),
        )
        return load_source(source, device, token=token, kind=cls)

    @checked_arguments
    def enable_compatibility_mode(
        self,
        disable_warnings: bool = False,
        no_processing: bool = False,
        fold_ln: bool = True,
        center_writing_weights: bool = False,
        center_unembed: bool = False,
        fold_value_biases: bool = False,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Process the weights as TransformerLens does in this mode, as far as that is exact: fold the norms.

        Afterwards `cache.apply_ln_to_stack(resid) @ model.W_U` gives logits, and `W_in`, `W_Q`, `W_K`, `W_V` apply to
        the normalised stream directly. Activations at hook points do not change. Hook points always have
        TransformerLens's names, so no aliases are added.

        Args:
            disable_warnings: Ignored; it exists for compatibility with TransformerLens.
            no_processing: Whether the weights are left unchanged.
            fold_ln: Whether each norm's weight is folded into the projections that read it.
            center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices: Refused if true;
                the error gives the reason of each.

        Raises:
            ValueError: The processing would change the logits, or the weights have less precision than float32.
        """
        requested = {
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
        }
        if no_processing:
            return
        if reasons := [f"{name}=True {NOT_EXACT[name]}" for name, value in requested.items() if value]:
            raise ValueError("; ".join(reasons))
        if fold_ln:
            fold_norms(self)

    # Call

    @eager_while_hooked
    def forward(
        self,
        input: Input,
        return_type: str | None = "logits",
        *,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        logits_at: Rows | None = None,
        past_kv_cache: KeyValueCache | TransformerLensKeyValueCache | None = None,
        time: Time | None = None,
        clean: Tensor | None = None,
        sigma: Tensor | None = None,
        self_conditioning: Tensor | None = None,
        loss_per_token: bool = False,
        samples: Whole = 1,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Run the network.

        Args:
            input: Text, texts, Int[batch pos] tokens, or with `start_at_layer` the residual stream entering that layer.
            return_type: "logits"; `None` if only the hooks matter; "loss", the loss that the model is trained on; or
                "both", (logits, loss). For a loss, a masked diffusion model masks the tokens first, as `hide` does: its
                logits are then those of the masked sequence.
            attention_mask: [batch pos], 1 at real tokens, 0 at padding. Positions are counted over real tokens, so a
                padded row computes what it computes alone. By default it is read off tokens that begin or end with a
                padding token of the tokenizer's own (`model.padding.own_id`). Padding cannot be inferred from a
                residual stream; pass the mask.
            prepend_bos: Whether text begins with BOS; by default as the tokenizer does (`cfg.default_prepend_bos`).
            padding_side: Side on which shorter texts are padded, as in `tokenize`.
            start_at_layer: First block to run (negative: from the end).
            stop_at_layer: Block to stop before; the residual stream there is returned.
            logits_at: Rows whose logits are computed; by default all. Int[selected] picks `logits[:, rows]`; a pair
                (Int[selected], Int[selected]) of batch and row indices, or Bool[batch pos], picks
                `logits[batch, rows]`, flattened to [selected d_vocab_out].
            past_kv_cache: On a causal model, keys and values of the positions before `input`, in the layers that run;
                the new ones are appended. A cache of TransformerLens that is frozen stays as it is.
            time: Time of the canvas, for a network conditioned on it (`cfg.time_conditioning`): a number in (0, 1],
                or Float[batch], one for each row; 1 where all is noise. By default that of `model.at_time(t)`. A loss
                draws its own.
            clean: Int[batch pos], on a model that attends by blocks the clean text of noisy `input`: each block sees
                the earlier blocks as they are there, as in training. The network then reads both texts, one after the
                other, which hooks see; the logits are those of `input`.
            sigma: Noise level of each row, Float[batch], in place of `time`; it may be any that a schedule has.
            self_conditioning: Float[batch canvas d_vocab], for a network with self-conditioning the logits of the step
                before at the open block, divided by their temperature. By default those that the step of the loop
                read; outside the loop none, as in the first step of a block.
            loss_per_token: Whether to return the contribution of each position instead of the mean over the positions
                that count: of an autoregressive model Float[batch pos-1], as in TransformerLens; of a masked diffusion
                model Float[batch pos], its weighted cross-entropy (cross-entropy / p) where the token was masked.
                Positions that do not count have the value 0.
            samples: Number of noise samples over which a masked diffusion model's loss is averaged (as many forward
                passes).
            generator: Random number generator of the loss's noise. By default the noise is fixed in eval mode, the same
                for every call with tokens of one shape, so that the losses of an original and an ablated run can be
                compared; in train mode it is from torch's global generator.

        Returns:
            Float[batch pos d_vocab_out], or the rows of it that `logits_at` selects; Float[batch pos d_model] with
            `stop_at_layer`; the loss, Float[]; or `None`.

        Raises:
            ValueError: Tokens, layers, rows or a mask do not fit the model, or arguments exclude each other.

        Warns:
            UserWarning: All logits are returned, of a model with [MASK] and a tokenizer, and nothing is masked: no row
                is a prediction. `logits_at=` names rows that are meant, and return_type=None leaves the logits out.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"return_type={return_type!r} is unknown; it must be 'logits', 'loss', 'both' or None")
        given: Any = input
        if not isinstance(input, Tensor) and start_at_layer is None:
            given, real = self.tokenize(input, prepend_bos, padding_side)
            attention_mask = real if attention_mask is None else attention_mask
        if return_type in ("logits", None):
            if loss_per_token or samples != 1 or generator is not None:
                raise ValueError(
                    "loss_per_token=, samples= and generator= require return_type='loss' or 'both'; it is "
                    f"{return_type!r}"
                )
            past = KeyValueCache.of(past_kv_cache) if past_kv_cache is not None else None
            reads_all = return_type is not None and logits_at is None and stop_at_layer is None and past is None
            from_text = self.tokenizer is not None and self.clock.step is None
            output = self._run(
                given,
                attention_mask=attention_mask,
                start_at_layer=start_at_layer,
                stop_at_layer=stop_at_layer,
                logits_at=logits_at,
                past_kv_cache=past,
                sigma=self.time.read(time) if sigma is None and time is not None else sigma,
                clean=clean,
                self_conditioning=self_conditioning,
                unembed=return_type is not None,
                mask_id=self._mask_id if reads_all and from_text else None,
            )
            if past is not None and past is not past_kv_cache:
                past.write_to(past_kv_cache)
            return output
        parts: dict[str, Any] = {"start_at_layer": start_at_layer, "stop_at_layer": stop_at_layer}
        parts |= {"logits_at": logits_at, "past_kv_cache": past_kv_cache, "time": time, "clean": clean, "sigma": sigma}
        parts |= {"self_conditioning": self_conditioning}
        if unfit := [name for name, value in parts.items() if value is not None]:
            raise ValueError(f"return_type={return_type!r} runs the whole network; leave out {unfit}")
        both = return_type == "both"
        try:
            return _own_loss(self, given, attention_mask, loss_per_token, samples, generator, return_logits=both)
        except RuntimeError as error:
            if not str(error).startswith("vmap:"):
                raise
            raise ValueError(
                f"return_type={return_type!r} chooses rows by their tokens, which torch.func.vmap does not allow: "
                "compute the loss of model(tokens) inside vmap, or call the model once for each row"
            ) from error

    @checked_arguments
    def loss_fn(
        self,
        logits: Tensor,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        per_token: bool = False,
        *,
        noisy: Tensor | None = None,
        p_mask: Tensor | None = None,
    ) -> Tensor:
        """The loss of logits on tokens, as in TransformerLens.

            noisy, p_mask = model.hide(tokens)
            logits = model.run_with_hooks(noisy, fwd_hooks=hooks)
            loss = model.loss_fn(logits, tokens, noisy=noisy, p_mask=p_mask)

        Args:
            logits: Float[batch pos d_vocab_out]; of a masked diffusion model, its logits on `noisy`, and if it attends
                by blocks, those of `model(noisy, clean=tokens)`.
            tokens: Int[batch pos], the clean text.
            attention_mask: [batch pos], 1 at real tokens, 0 at padding.
            per_token: The same as `loss_per_token` of the model's call.
            noisy, p_mask: On a masked diffusion model, the masked tokens, and the probability with which each position
                was masked.

        Raises:
            ValueError: `noisy` is missing on a masked diffusion model, whose logits on the clean text predict nothing.
        """
        tokens, real = self.padding.checked(tokens, attention_mask)
        if tuple(logits.shape) != (*tokens.shape, self.cfg.d_vocab_out):
            raise ValueError(
                f"the logits have shape {list(logits.shape)}; for these tokens it must be "
                f"{[*tokens.shape, self.cfg.d_vocab_out]}"
            )
        if self.cfg.is_autoregressive:
            batch = next_token_batch(self, tokens, real=real)
        elif noisy is None or p_mask is None:
            raise ValueError(
                f"{self.cfg.model_name!r} predicts masked tokens, so its loss needs the masked tokens behind the "
                "logits: noisy, p_mask = model.hide(tokens); logits = model(noisy); "
                "model.loss_fn(logits, tokens, noisy=noisy, p_mask=p_mask). "
                "Or call model(tokens, return_type='loss')"
            )
        else:
            batch = masked_batch(self, tokens, noisy, p_mask, real=real)
        return _loss(self, batch, logits[batch.rows], per_token)

    @checked_arguments
    def hide(
        self, tokens: Tensor, attention_mask: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mask tokens as `return_type="loss"` does; under uniform noise, replace them by others.

        Args:
            tokens: Int[batch pos], the clean text.
            attention_mask: [batch pos], 1 at real tokens, 0 at padding, which is never masked.
            generator: Random number generator of the noise; by default as in the model's call.

        Returns:
            The masked tokens, Int[batch pos], and the probability with which each position was masked,
            Float[batch pos].
        """
        tokens, real = self.padding.checked(tokens, attention_mask)
        if self.cfg.is_autoregressive:
            raise ValueError(f"{self.cfg.model_name!r} has no [MASK], so none of its tokens can be masked")
        noisy, p_mask = noised(self, tokens, generator=noise_of(self, generator))
        return (noisy if real is None else torch.where(real, noisy, tokens)), p_mask

    # Hook and cache

    @held_whole
    def setup(self) -> None:
        """Name the hook points and give them this model's clock; call it again after adding hook points."""
        with self.clock.held():
            super().setup()
            name_hook_points(self)

    @checked_arguments
    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: FwdHooks = (),
        bwd_hooks: FwdHooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in TransformerLens; a hook that the forward pass would never reach is an error."""
        for name, _ in [*hook_pairs(fwd_hooks), *hook_pairs(bwd_hooks)]:
            check_hookable(self, name, in_loop=False)
        self._check_keywords("run_with_hooks", kwargs)
        return super().run_with_hooks(
            *model_args,
            fwd_hooks=list(fwd_hooks),
            bwd_hooks=list(bwd_hooks),
            reset_hooks_end=reset_hooks_end,
            clear_contexts=clear_contexts,
            **kwargs,
        )

    @restoring
    def hooks(  # type: ignore[override]
        self,
        fwd_hooks: FwdHooks = (),
        bwd_hooks: FwdHooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """As in TransformerLens; inside, no other thread may use the model."""
        # A tensor has no truth value, and is refused by `hook_pairs`.
        forward = hook_pairs(fwd_hooks) if isinstance(fwd_hooks, Tensor) or fwd_hooks else []
        backward = hook_pairs(bwd_hooks) if isinstance(bwd_hooks, Tensor) or bwd_hooks else []
        for flag, value in (("reset_hooks_end", reset_hooks_end), ("clear_contexts", clear_contexts)):
            if not isinstance(value, bool):
                check_bool(flag, value)
        with self.clock.held():
            self.clock.drop_hooks = self._drop_dead_hooks
            try:
                with super().hooks(forward, backward, reset_hooks_end, clear_contexts) as model:
                    yield model
            finally:
                if not self.context_level:  # where detaching was cut off, TransformerLens has not lowered its level
                    self.clock.drop_hooks = None

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: PosSlice = None,
    ) -> Any:
        """As in TransformerLens: a dict to be filled, and the forward and backward hooks that fill it.

        Other names of a hook point (`hooks.names.BLOCK_ALIASES`) reach what the dict has too, unless `cache` is a plain
        one.

        Args:
            pos_slice: Positions to cache (of scores and patterns, the queries): an index (its axis stays), a slice, or
                indices.

        Raises:
            ValueError: A filter that matches nothing, or a named hook point that does not pass.
        """
        self.is_caching = True
        points = {name: self.hook_dict[name] for name in select_passing(self, names_filter)}
        cached: dict[str, Tensor] = ByHookPoint() if cache is None else cache
        return cached, *caching_hooks(points, cached, incl_bwd, device, remove_batch_dim, Slice.unwrap(pos_slice))

    @held_whole
    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> Any:
        """As in TransformerLens, and as in `get_caching_hooks`; a filter that matches nothing is an error."""
        selected = select_passing(self, names_filter)
        cached: dict[str, Tensor] = ByHookPoint() if cache is None else cache
        with self.clock.held():
            return super().add_caching_hooks(selected, incl_bwd, device, remove_batch_dim, cached)

    @checked_arguments
    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """As in TransformerLens: the output and an `ActivationCache` of the hook points that `names_filter` selects."""
        self._check_keywords("run_with_cache", kwargs)
        names = select_passing(self, names_filter, in_loop=False)
        out, cache = super().run_with_cache(
            *model_args,
            names_filter=names,
            remove_batch_dim=remove_batch_dim,
            incl_bwd=incl_bwd,
            reset_hooks_end=reset_hooks_end,
            clear_contexts=clear_contexts,
            **kwargs,
        )
        if return_cache_object:
            return out, AliasedCache(cache, self, has_batch_dim=not remove_batch_dim)
        return out, ByHookPoint(cache)

    @held_whole
    def add_hook(
        self,
        name: str | Callable[[str], bool],
        hook: Callable[..., Any],
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """As in TransformerLens; a name or predicate that selects nothing is an error with the nearest names."""
        for flag, value in (("is_permanent", is_permanent), ("prepend", prepend)):
            if not isinstance(value, bool):
                check_bool(flag, value)
        if not callable(hook):
            raise TypeError(f"hook={shown(hook)} is {kind_of(hook)}; it must be a function fn(activation, hook)")
        if dir not in ("fwd", "bwd"):
            one_of("fwd", "bwd")("dir", dir)
        points = check_hookable(self, name)
        with self.clock.held():
            for point in points:
                handle: Any = self.hook_dict[point].add_hook(hook, dir, is_permanent, level, prepend)
                # A predicate may select points that do not pass, beside others; a name says that the hook matters.
                handle.by_predicate = callable(name)

    @held_whole
    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """As in TransformerLens."""
        one_of("fwd", "bwd", "both")("direction", direction)
        clear_contexts = check_bool("clear_contexts", clear_contexts)
        including_permanent = check_bool("including_permanent", including_permanent)
        with self.clock.held():
            super().reset_hooks(clear_contexts, direction, including_permanent, level)

    def _check_keywords(self, method: str, given: Mapping[str, Any]) -> None:
        forward = vars(self).get("forward") or type(self).forward
        if given and (known := _keywords(method, forward)) is not None:
            check_keywords(method, given, known)

    def _enable_hook(self, name: str | Callable[[str], bool], hook: Any, dir: Literal["fwd", "bwd"]) -> None:
        self.add_hook(name, hook, dir, level=self.context_level)

    # Denoise and generate

    @takes(DenoiseSettings)
    def denoise(
        self,
        prompt: Prompt,
        *,
        length: SupportsIndex | None = None,
        max_new_tokens: SupportsIndex | None = None,
        settings: DenoiseSettings,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        fwd_hooks: FwdHooks = (),
        predictions: SupportsIndex | None = None,
        progress: bool = False,
    ) -> Trajectory:
        """Generate text by unmasking a canvas step by step; on a causal model token by token.

        Under uniform noise nothing is masked: the canvas starts from random tokens, and all may change in every step.

        Args:
            prompt: Text, several texts, or Int[batch pos] tokens. Masks in the prompt are filled too.
            length: Length of the canvas in positions, including the prompt (as in SMDM). By default, if the prompt has
                no masks, `cfg.trained_length` if it is known.
            max_new_tokens: Number of positions to write after the prompt, instead of `length`.
            settings: Settings of the loop.
            attention_mask: [batch pos], 0 at the padding of a token prompt.
            prepend_bos: Whether text begins with BOS, as in TransformerLens.
            fwd_hooks: Pairs (name or predicate, function) on any hook point, including those of the loop
                (`denoise.hook_*`, see `diffusion_lens.denoising.loop`). In a hook, `hook.step` is a `StepState`.
            predictions: Number of likeliest tokens to record at every masked position of every step, as
                `trajectory.predictions`. Every step then takes a forward pass.
            progress: Whether a progress bar is shown.

        Raises:
            ValueError: A setting is out of range, the sampler is unknown, or the length leaves nothing to fill.
            TypeError: A setting has the wrong type, such as a length that is not a whole number.
            KeyError: A hook point does not exist.
            FloatingPointError: Logits are NaN or +inf, or -inf for every token, at a position that would be revealed.
            RuntimeError: Another denoising loop is running on this model.
        """
        canvas = lay_out(self, prompt, length, max_new_tokens, attention_mask, prepend_bos)
        return denoise(self, canvas, settings, fwd_hooks=fwd_hooks, predictions=predictions, progress=progress)

    @takes(DenoiseSettings)
    def denoise_with_cache(
        self,
        prompt: Prompt,
        names_filter: NamesFilter,
        *,
        steps_filter: SupportsIndex | Iterable[SupportsIndex] | None = None,
        pos_slice: PosSlice = None,
        branch: str = "conditional",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        max_bytes: int | None = None,
        length: SupportsIndex | None = None,
        max_new_tokens: SupportsIndex | None = None,
        settings: DenoiseSettings,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        fwd_hooks: FwdHooks = (),
        predictions: SupportsIndex | None = None,
        progress: bool = False,
    ) -> tuple[Trajectory, TrajectoryCache]:
        """`denoise`, and cache activations by step. Canvases are those of `denoise` (confidences to about 1e-6).

        Args:
            prompt: Prompt, as in `denoise`.
            names_filter: Name, names or predicate of the hook points to cache. It is required, because all activations
                of all steps may exceed the memory.
            steps_filter: Step or steps to cache, negative from the end; by default all.
            pos_slice: Positions to cache (query positions for scores and patterns): an index (the axis stays), a slice,
                or several indices.
            branch: Branch to cache with guidance, "conditional" or "unconditional".
            device, dtype: Device and precision of the cache; by default those of the activations.
            max_bytes: Largest estimated size of the cache in bytes; a larger one is refused before the loop starts.
            length, max_new_tokens: Arguments of `denoise`.
            settings: Settings of the loop.
            attention_mask, prepend_bos, fwd_hooks, predictions, progress: Arguments of `denoise`.

        Raises:
            ValueError: The filter selects nothing, a step does not exist, or the cache exceeds `max_bytes` (the message
                lists the largest activations).
        """
        cache_filter = CacheFilter(names_filter, steps_filter, pos_slice, branch, device, dtype, max_bytes)
        canvas = lay_out(self, prompt, length, max_new_tokens, attention_mask, prepend_bos)
        return denoise_with_cache(
            self, canvas, settings, cache_filter, fwd_hooks=fwd_hooks, predictions=predictions, progress=progress
        )

    @checked_arguments
    def generate(
        self,
        prompt: Prompt | None = None,
        max_new_tokens: SupportsIndex | None = None,
        *,
        return_type: str = "trajectory",
        do_sample: bool | None = None,
        temperature: SupportsFloat | None = None,
        stop_at_eos: bool = True,
        eos_token_id: SupportsIndex | Sequence[SupportsIndex] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        use_past_kv_cache: bool = True,
        verbose: bool = False,
        length: SupportsIndex | None = None,
        steps: SupportsIndex | None = None,
        sampler: str | Sampler | None = None,
        cfg_scale: SupportsFloat = 0.0,
        seed: Seed = 0,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        fwd_hooks: FwdHooks = (),
        progress: bool = False,
        **others: Any,
    ) -> Any:
        """`denoise`, with the names of TransformerLens's `generate`.

        Args:
            prompt, max_new_tokens, length, steps, sampler, cfg_scale, seed: Arguments of `denoise`.
            return_type: "trajectory"; "tokens", Int[batch pos] with the prompt; "str", the text with the prompt, or
                a list for several rows; "input", text for text and tokens for tokens, as in TransformerLens.
            do_sample: Whether tokens are sampled, at temperature 1 unless another is given. By default they are if
                `temperature` is not 0.
            temperature: Temperature as in `denoise`; 0 by default.
            stop_at_eos: Whether what the run wrote ends at its first end token: the returned tokens contain only end
                tokens after it, and the returned text contains neither it nor what follows. Given tokens are always
                returned; between them, each stretch that the run wrote ends by itself. A trajectory always contains
                every token, and its `completion` all that a diffusion model wrote, without special tokens.
            eos_token_id: Id or ids of end tokens; by default that of the tokenizer.
            stop_strings: Text or texts at which what the run wrote ends too, with the token that completes one.
            use_past_kv_cache: Ignored: it changes only the speed there. Here a network that can have a key/value cache
                has one while nothing is hooked.
            verbose: The same as `progress`.
            attention_mask, prepend_bos, fwd_hooks, progress: Arguments of `denoise`.

        Raises:
            TypeError: An argument of TransformerLens that does not exist here, at another value than its default there
                (the message says what to use), or an unknown one.
            ValueError: Arguments exclude each other, or one does not fit (see `denoise`).

        Warns:
            UserWarning: A hook changes the last position of the canvas alone, which does not predict the next token.
        """
        # 1. Check the arguments.
        check_keywords("generate", others, {*keywords_of(HookedDiffusionTransformer.generate), *INSTEAD})
        refuse_others(others)
        if prompt is None:
            raise TypeError("generate needs a prompt, text or tokens, as its first argument")
        if return_type not in RETURN_TYPES:
            raise ValueError(f"return_type={return_type!r}; it must be one of {', '.join(map(repr, RETURN_TYPES))}")
        if return_type == "input":
            return_type = "tokens" if isinstance(prompt, Tensor) else "str"
        ends = end_tokens(self, eos_token_id) if stop_at_eos else []

        # 2. Run the loop.
        numbers: Any = (steps, sampler, cfg_scale, temperature_of(do_sample, temperature), seed)
        settings = DenoiseSettings(*numbers)
        canvas = lay_out(self, prompt, length, max_new_tokens, attention_mask, prepend_bos)
        shown = verbose or progress
        trajectory = denoise_and_check_hooks(self, canvas, settings, fwd_hooks=fwd_hooks, progress=shown)

        # 3. Convert the result.
        if return_type == "trajectory":
            return trajectory
        ended = ended_positions(self, trajectory, ends, stop_strings)
        if return_type == "tokens":
            return filled_with_ends(self, trajectory, ended, ends)
        texts = [text_of(self, trajectory, row, ~ended[row]) for row in range(len(trajectory))]
        return texts[0] if len(texts) == 1 else texts

    @checked_arguments
    def canvas(
        self, prompt: Prompt, n_masks: SupportsIndex = 1, prepend_bos: bool | None = None
    ) -> tuple[Tokens, Int[Tensor, "selected"]]:
        """A prompt with [MASK]s after it, and the rows of the logits that predict them.

        This replaces `logits[:, -1]`: `tokens, rows = model.canvas(prompt)`, then `model(tokens)[:, rows]`. On a model
        that reads no masks, an AR baseline, the tokens are the prompt alone, and the row is the last one.

        Args:
            prompt: Text, texts with the same number of tokens, or tokens without padding.
            n_masks: Number of [MASK]s, at least 1; for an AR baseline 1.
            prepend_bos: Whether text begins with BOS, as in `to_tokens`.

        Returns:
            Tokens Int[batch pos], and rows Int[selected] in the order of the masks.

        Raises:
            ValueError: Prompts differ in length, or an AR baseline is to predict several tokens in one forward pass.
        """
        n_masks = at_least(1, "n_masks", n_masks)
        if self.cfg.is_autoregressive and n_masks > 1:
            raise ValueError(
                f"n_masks={n_masks}, but {self.cfg.model_name!r} predicts the next token only: append the tokens that "
                "precede the one to predict, or use generate"
            )
        if isinstance(prompt, Tensor):
            tokens = prompt[None] if prompt.dim() == 1 else prompt
            real = self.padding.certainly_real(tokens)
        else:
            tokens, real = self.tokenize(prompt, prepend_bos)
        if real is not None and not bool(real.all()):
            lengths = sorted(set(real.sum(dim=1).tolist()))
            raise ValueError(f"the prompts have {lengths} tokens, so their rows differ; pass one length at a time")
        n_prompt = tokens.shape[1]
        rows = self.readout.rows(torch.arange(n_prompt, n_prompt + n_masks, device=tokens.device))
        if self.cfg.is_autoregressive:
            return tokens, rows
        return self.cfg.readable(lay_out(self, tokens, max_new_tokens=n_masks).tokens), rows

    # Save

    @checked_arguments
    def save_pretrained(self, folder: str | Path) -> Path:
        """Write weights, config and tokenizer; `from_pretrained(folder)` reads them.

        To write the checkpoint family's own format, use `weight_conversion.export(model.state_dict(),
        model.cfg.architecture, path)`.
        """
        return save_pretrained(folder, self.state_dict(), self.cfg, self.tokenizer)

    @checked_arguments
    def export_hf(self, folder: str | Path) -> Path:
        """Write config, weights and tokenizer in the format that transformers, peft, lm-eval and vLLM read.

        For an AR baseline, `AutoModelForCausalLM.from_pretrained(folder)` gives the same logits. One whose rotary
        tables are rounded, as SMDM's are, is written as a Llama without this rounding. For a diffusion model with the
        shifted readout of the Llama, Qwen2 or Qwen3 from which it was made (`adapt`), the same class gives the same
        logits, in transformers 5. Other diffusion models are written in the format of their authors, whose code reads
        it; transformers has no class for these.

        Raises:
            ValueError: No such format expresses the model, or the folder contains other files. The folder is then as
                it was, also after any other error.

        Warns:
            UserWarning: How far the logits move, if they do; for other diffusion models, what reads the folder.
        """
        return export_hf(self, folder)


def load_source(
    source: Source,
    device: str | torch.device | None = None,
    *,
    token: str | bool | None = None,
    mapped: bool = False,
    weights_of: HookedDiffusionTransformer | None = None,
    kind: type[HookedDiffusionTransformer] = HookedDiffusionTransformer,
) -> HookedDiffusionTransformer:
    """The model that a call of `from_pretrained` gave, as the workers of a study load it.

    Args:
        source: Arguments of that call; `source` of a model that was loaded.
        device, token: Arguments of `from_pretrained`.
        mapped: Whether weights on the CPU stay mapped from the file where it has their dtype, layout and alignment
            (multiples of 64 bytes), so that several processes share one copy. The file must not be overwritten in
            place.
        weights_of: The same checkpoint loaded in another mode, whose weights the model shares.
        kind: Class of the model.
    """
    if source.device_map is not None:
        if device is not None:
            raise ValueError(
                f"device={str(device)!r} and device_map={source.device_map!r} both say where the weights are: give "
                'one of them (device_map={"": ...} puts all weights on one device)'
            )
        device = "cpu"  # until the map is read, which needs the parts of the model
    cfg, checkpoint, tokenizer = open_pretrained(**source.to_open(), device=device, token=token)
    if weights_of is None:
        tensors = checkpoint.tensors() if mapped else checkpoint.pieces()
        model = kind(cfg, tokenizer, tensors=tensors, assign=mapped, device_map=source.device_map)
        check_folded(model)
        if source.fold_ln:
            fold_norms(model)
    else:
        model = kind(cfg, tokenizer, weights_of=weights_of)
    model.source = source
    if isinstance(checkpoint, TwinCheckpoint):
        model.source = replace(source, delta=checkpoint.delta.sha256)
    return model


def _own_loss(
    model: HookedDiffusionTransformer,
    input: Tensor,
    attention_mask: Tensor | None,
    loss_per_token: bool,
    samples: Whole,
    generator: torch.Generator | None,
    *,
    return_logits: bool,
) -> Any:
    """The loss that the model is trained on, or (logits, loss) with `return_logits`; see `forward`."""
    loss_per_token = check_bool("loss_per_token", loss_per_token)
    samples = at_least(1, "samples", samples)
    if samples > 1 and return_logits:
        raise ValueError(
            f"samples={samples} with return_type='both': each noise sample has its own logits; use samples=1 there"
        )
    # 1. Mask the tokens, once for each noise sample.
    tokens, real = model.padding.checked(input, attention_mask)
    batch = loss_batch(model, tokens, real, generator, samples)
    mask = model.padding.all_real(tokens) if real is None else real
    total: Any = 0.0
    starts = range(0, len(batch.tokens), len(tokens))

    # 2. Run the network on one noise sample at a time, and add up the losses.
    for start in starts:
        part = batch.part(start, start + len(tokens))
        if return_logits:
            logits: Any = model._run(part.tokens, attention_mask=mask, **part.beside)
            return logits, _loss(model, part, logits[part.rows], loss_per_token)
        row_logits: Any = model._run(part.tokens, attention_mask=mask, logits_at=part.rows, **part.beside)
        total = total + _loss(model, part, row_logits, loss_per_token)

    # 3. `total` is already averaged over samples. Per-position losses are summed over samples, so divide by their
    #    number.
    return total / len(starts) if loss_per_token else total


def _loss(model: HookedDiffusionTransformer, batch: LossBatch, logits: Tensor, per_token: bool) -> Tensor:
    """The loss, or with `per_token` the contribution of each position that can be predicted."""
    if not per_token:
        return batch.loss(logits)
    by_position = batch.by_position(logits)
    return by_position[:, 1:] if model.cfg.is_autoregressive else by_position


@cache
def _keywords(method: str, forward: Callable[..., Any]) -> Collection[str] | None:
    """Keywords of `run_with_hooks` or `run_with_cache` of a model; `None` if its `forward` takes any keyword."""
    if takes_any_keyword(forward):
        return None
    return keywords_of(getattr(HookedDiffusionTransformer, method), getattr(HookedRootModule, method), forward)
