"""`HookedDiffusionTransformer`: the network of `model.transformer` with loading, saving, denoising and losses."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from diffusion_lens.denoising.cache import CacheFilter, TrajectoryCache
from diffusion_lens.denoising.canvas import Prompt, lay_out
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.prepare import denoise, denoise_with_cache
from diffusion_lens.denoising.randomness import Seed
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.generation import Generation
from diffusion_lens.hook_names import FwdHooks, NamesFilter
from diffusion_lens.loading import open_pretrained, save_pretrained
from diffusion_lens.loading.given_options import given_options
from diffusion_lens.loading.source import Source, tensors_of
from diffusion_lens.model.caching import PosSlice
from diffusion_lens.model.folding import NOT_EXACT, check_folded, fold_norms
from diffusion_lens.model.placement import DeviceMap
from diffusion_lens.settings import naming_the_nearest


class HookedDiffusionTransformer(Generation):
    """A masked diffusion language model, or its autoregressive (AR) baseline, with TransformerLens's interface.

    `model(tokens)`, `run_with_cache` and `run_with_hooks` work as in TransformerLens. `denoise` runs the denoising
    loop, in which the same hooks work and `hook.step` describes the current step.

    Attributes:
        source: Arguments of the `from_pretrained` call that gave the model; `None` for a model that was built
            otherwise.
    """

    source: Source | None = None

    @classmethod
    @naming_the_nearest
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
        device_map: DeviceMap | None = None,
    ) -> "HookedDiffusionTransformer":
        """Load a model by its published name, from a repository of the Hugging Face hub, or from a file or folder.

        Lookup order: local path, bundled model, published name, hub repository. Only config, safetensors and tokenizer
        of a repository are fetched, and no code of it is run.

        Args:
            name_or_path: "smdm-1028m", "llada-8b-base", "site-mdm" (`list_pretrained()` prints all names), "owner/name"
                of a repository in a known family's format, a `.safetensors` or `.pth` checkpoint, or a folder with one.
            config: The checkpoint's config, as a path or a mapping. By default it is read from the file beside the
                checkpoint, or derived from the tensors' shapes.
            tokenizer: Folder with tokenizer.json and tokenizer_config.json, or a fast Hugging Face tokenizer. By
                default the one beside the checkpoint, or that of the published model; without either the model takes
                token ids only. The tokenizer's settings decide whether BOS is prepended. If it has a chat template,
                `model.tokenizer.apply_chat_template` works.
            device: Device of the model; by default the GPU if there is one.
            dtype: Precision of the weights, torch.bfloat16 or "bfloat16"; they are converted piece by piece.
            revision, cache_dir, token, local_files_only: Arguments of `huggingface_hub.snapshot_download`.
            fold_ln: Whether the norms' weights are folded into the projections that read them, as by
                `enable_compatibility_mode`. A model that was saved folded stays folded (`cfg.layer_norm_folding`).
            block_size: Positions in a block of a block diffusion model whose config does not say it.
            mode: Where one checkpoint is several models: "bidirectional", "block" (block diffusion) or "ar".
            mask_token_id: Id of [MASK], where neither config nor tokenizer says it.
            device_map: Places of the weights, instead of `device`, for a model that is larger than one GPU: "auto",
                "balanced", "balanced_low_0" or "sequential", by which accelerate chooses them; one place; or a map such
                as {"embed": 0, "blocks.0": 0, "blocks.1": "cpu", "": "disk"} from the names of parts, "" for all
                others, to the number of a GPU, "cpu" or "disk" (a file in the folder for temporary files, `TMPDIR`).
                What is not on a GPU runs on the first one, to which its weights are copied at each use
                (`diffusion_lens.model.placement`). Several GPUs, and offloading from a GPU, are not tested on GPUs.

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
            options=given_options(mode, block_size, mask_token_id),
        )
        return cls.from_source(source, device, token=token)

    @classmethod
    def from_source(
        cls,
        source: Source,
        device: str | torch.device | None = None,
        *,
        token: str | bool | None = None,
        mapped: bool | Path = False,
        weights_of: "HookedDiffusionTransformer | None" = None,
    ) -> "HookedDiffusionTransformer":
        """The model that a call of `from_pretrained` gave, as the workers of a study load it.

        Args:
            source: Arguments of that call; `source` of a model that was loaded.
            device, token: Arguments of `from_pretrained`.
            mapped: Whether weights on the CPU stay mapped from the file where it has their dtype, layout and alignment
                (multiples of 64 bytes), so that several processes share one copy; or a file with the model's
                parameters from which they are mapped instead. The file must not be overwritten in place.
            weights_of: The same checkpoint loaded in another mode, whose weights the model shares.
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
            tensors = tensors_of(checkpoint, mapped)
            model = cls(cfg, tokenizer, tensors=tensors, assign=bool(mapped), device_map=source.device_map)
            check_folded(model)
            if source.fold_ln:
                fold_norms(model)
        else:
            model = cls(cfg, tokenizer, weights_of=weights_of)
        model.source = source
        return model

    @naming_the_nearest
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

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write weights, config and tokenizer; `from_pretrained(folder)` reads them.

        To write the checkpoint family's own format, use `weight_conversion.export(model.state_dict(),
        model.cfg.architecture, path)`.
        """
        return save_pretrained(folder, self.state_dict(), self.cfg, self.tokenizer)

    @naming_the_nearest
    def denoise(
        self,
        prompt: Prompt,
        *,
        length: SupportsIndex | None = None,
        max_new_tokens: SupportsIndex | None = None,
        steps: SupportsIndex | None = None,
        sampler: str | Sampler | None = None,
        cfg_scale: SupportsFloat = 0.0,
        temperature: SupportsFloat = 0.0,
        seed: Seed = 0,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        fwd_hooks: FwdHooks = (),
        progress: bool = False,
    ) -> Trajectory:
        """Generate text by unmasking a canvas step by step; on a causal model token by token.

        Under uniform noise nothing is masked: the canvas starts from random tokens, and all may change in every step.

        Args:
            prompt: Text, several texts, or Int[batch pos] tokens. Masks in the prompt are filled too.
            length: Length of the canvas in positions, including the prompt (as in SMDM). By default, if the prompt has
                no masks, `cfg.trained_length` if it is known.
            max_new_tokens: Number of positions to write after the prompt, instead of `length`.
            steps: Number of denoising steps; by default 32, for "llada" one per masked position. `left_to_right` always
                takes one step per token.
            sampler: "confidence" (SMDM's "greedy", the default), "ancestral" (SMDM's "origin"), "remdm", "blocks",
                "left_to_right" (the default, and the only one, of a causal model); by transitions "posterior", "score"
                and under uniform noise "uniform_posterior", its default; block after block "block_confidence", its
                default, "block_posterior", "first_hitting"; a preset ("smdm", "llada", "llada2", "dream", "sdar",
                "nemotron", "diffullama", "mdlm", "bd3lm", "sedd", "udlm", "radd"), or a `Sampler`.
            cfg_scale: Weight w of unsupervised classifier-free guidance; 0 for no guidance.
            temperature: Temperature of the Gumbel noise, in float64; 0 takes the likeliest token. Samplers by
                transitions draw at any temperature when a position changes; their authors' is 1.
            seed: Seed of the random number generator, from which each row derives its own by a hash; or one seed per
                row, such as `trajectory.record["seeds"]`; or a `torch.Generator`.
            attention_mask: [batch pos], 0 at the padding of a token prompt.
            prepend_bos: Whether text begins with BOS, as in TransformerLens.
            fwd_hooks: Pairs (name or predicate, function) on any hook point, including those of the loop
                (`denoise.hook_*`, see `diffusion_lens.denoising.loop`). In a hook, `hook.step` is a `StepState`.
            progress: Whether a progress bar is shown.

        Raises:
            ValueError: A setting is out of range, the sampler is unknown, or the length leaves nothing to fill.
            TypeError: A setting has the wrong type, such as a length that is not a whole number.
            KeyError: A hook point does not exist.
            FloatingPointError: Logits are NaN or +inf, or -inf for every token, at a position that would be revealed.
            RuntimeError: Another denoising loop is running on this model.
        """
        settings = DenoiseSettings(steps, sampler, cfg_scale, temperature, seed)
        canvas = lay_out(self, prompt, length, max_new_tokens, attention_mask, prepend_bos)
        return denoise(self, canvas, settings, fwd_hooks=fwd_hooks, progress=progress)

    @naming_the_nearest
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
        steps: SupportsIndex | None = None,
        sampler: str | Sampler | None = None,
        cfg_scale: SupportsFloat = 0.0,
        temperature: SupportsFloat = 0.0,
        seed: Seed = 0,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        fwd_hooks: FwdHooks = (),
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
            length, max_new_tokens, steps, sampler, cfg_scale, temperature, seed: Arguments of `denoise`.
            attention_mask, prepend_bos, fwd_hooks, progress: Arguments of `denoise`.

        Raises:
            ValueError: The filter selects nothing, a step does not exist, or the cache exceeds `max_bytes` (the message
                lists the largest activations).
        """
        cache_filter = CacheFilter(names_filter, steps_filter, pos_slice, branch, device, dtype, max_bytes)
        settings = DenoiseSettings(steps, sampler, cfg_scale, temperature, seed)
        canvas = lay_out(self, prompt, length, max_new_tokens, attention_mask, prepend_bos)
        return denoise_with_cache(self, canvas, settings, cache_filter, fwd_hooks=fwd_hooks, progress=progress)
