"""`HookedDiffusionTransformer`: the network of `model.transformer`, with its doors to loading, denoising and losses."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from diffusion_lens.denoising.cache import CacheFilter, TrajectoryCache
from diffusion_lens.denoising.canvas import Prompt, lay_out
from diffusion_lens.denoising.denoise import denoise, denoise_with_cache
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.randomness import Seed
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.forward import Forward
from diffusion_lens.hook_names import NamesFilter
from diffusion_lens.loading import open_pretrained, save_pretrained
from diffusion_lens.model.caching import PosSlice
from diffusion_lens.model.folding import NOT_EXACT, check_folded, fold_norms


class HookedDiffusionTransformer(Forward):
    """A masked diffusion language model, or its autoregressive twin, as TransformerLens users know models.

    `model(tokens)`, `run_with_cache` and `run_with_hooks` are TransformerLens's; `denoise` runs the denoising loop, in
    which the same hooks work and `hook.step` says where they are.
    """

    @classmethod
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
    ) -> "HookedDiffusionTransformer":
        """A model by its published name, from a repository of the Hugging Face hub, or from a file or folder.

        What lies here comes before a name, and a name before a repository. Of a repository only config, safetensors and
        tokenizer are fetched, and no code of it is run.

        Args:
            name_or_path: "smdm-1028m", "llada-8b-base", "tiny-mdm" (`list_pretrained()` prints all), "owner/name" of a
                repository in a known family's format, a `.safetensors` or `.pth` checkpoint, or a folder with one.
            config: the checkpoint's config, a path or a mapping. By default the file that lies beside it, or the
                architecture is recognised from the tensors' shapes.
            tokenizer: a folder with tokenizer.json and tokenizer_config.json, or a fast Hugging Face tokenizer. By
                default the one beside the checkpoint, or of the published model; a bare file has none and takes ids.
                Its own habit decides whether BOS is prepended; where it has a chat template,
                `model.tokenizer.apply_chat_template` works.
            device: by default the GPU if there is one.
            dtype: of the weights, torch.bfloat16 or "bfloat16"; converted piece by piece while they are read.
            revision, cache_dir, token, local_files_only: as in `huggingface_hub.snapshot_download`.
            fold_ln: fold the norms' weights into the matrices that read them, as `enable_compatibility_mode` does. A
                folder that `save_pretrained` wrote of a folded model says so, and is folded (`cfg.layer_norm_folding`).

        Raises:
            ValueError: unknown name (nearest names follow), dtype or device, a config of no known family, a file cut
                off, tensors missing, unknown or misshapen.
            FileNotFoundError: nothing there, no safetensors in a repository, or not in the cache while the hub is out
                of reach (says what to put where).
            PermissionError: a repository whose terms have not been accepted.
        """
        cfg, checkpoint, loaded = open_pretrained(
            name_or_path,
            config=config,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
        )
        model = cls(cfg, loaded, tensors=checkpoint.pieces())
        check_folded(model)
        if fold_ln:
            fold_norms(model)
        return model

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
        """Process the weights as TransformerLens does in this mode, where that is exact: fold the norms.

        Afterwards `cache.apply_ln_to_stack(resid) @ model.W_U` are logits, and `W_in`, `W_Q`, `W_K`, `W_V` read the
        normalised stream as it is. Hook points keep their values. The names of TransformerLens's hook points are
        always there, so no aliases are switched on.

        Args:
            disable_warnings: taken for TransformerLens's sake; nothing warns here.
            no_processing: leave the weights as they are.
            fold_ln: fold each norm's weight into the matrices that read it (`model.folding.fold_norms`).
            center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices: refused when
                true; the error gives each one's reason.

        Raises:
            ValueError: a kind of processing that would change the logits, or weights in less than float32.
        """
        asked = {
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
        }
        if no_processing:
            return
        if reasons := [f"{name}=True {NOT_EXACT[name]}" for name, wanted in asked.items() if wanted]:
            raise ValueError("; ".join(reasons))
        if fold_ln:
            fold_norms(self)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write weights, config and tokenizer; `from_pretrained(folder)` reads them back.

        For the checkpoint family's own format: `weight_conversion.export(model.state_dict(), model.cfg.architecture,
        path)`.
        """
        return save_pretrained(folder, self.state_dict(), self.cfg, self.tokenizer)

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
        fwd_hooks: Sequence[tuple[Any, Any]] = (),
        progress: bool = False,
    ) -> Trajectory:
        """Write text by unmasking a canvas step by step; on a causal model token by token.

        Args:
            prompt: text, texts, or Int[batch pos] tokens. Masks inside it are filled too.
            length: places in all, the prompt included (SMDM's meaning). With neither length nor [MASK]s in the prompt,
                `cfg.trained_length`, if it is known.
            max_new_tokens: blanks after the prompt, instead of `length`.
            steps: denoising steps; 32 by default, with "llada" one a blank. `left_to_right` takes one a token whatever
                is asked.
            sampler: "confidence" (SMDM's "greedy", the default), "ancestral" (SMDM's "origin"), "remdm", "blocks",
                "left_to_right" (the default, and the only one, of a causal model), a preset ("smdm", "llada",
                "dream"), or a `Sampler`.
            cfg_scale: weight w of unsupervised classifier-free guidance; 0 is none.
            temperature: 0 takes the likeliest token; otherwise Gumbel noise in float64.
            seed: a whole number, of which row r of a batch makes its own seed (a hash of both, so that seeds share no
                sample); or one seed a row, such as `trajectory.record["seeds"]`; or a `torch.Generator`.
            attention_mask: [batch pos], 0 at the padding of a token prompt.
            prepend_bos: for text; as in TransformerLens.
            fwd_hooks: (name or predicate, function) pairs, on any hook point, the loop's own (`denoise.hook_*`, see
                `diffusion_lens.denoising.loop`) included. Inside, `hook.step` is a `StepState`.
            progress: show a bar.

        Raises:
            ValueError: a setting out of range, an unknown sampler, a length that leaves nothing to fill.
            TypeError: a setting of the wrong kind, such as a length that is no whole number.
            KeyError: a hook point that does not exist.
            FloatingPointError: logits that are NaN or +inf, or -inf for every token, where a token is to be revealed.
            RuntimeError: another run of the loop is under way on this model.
        """
        settings = DenoiseSettings(steps, sampler, cfg_scale, temperature, seed)
        canvas = lay_out(self, prompt, length, max_new_tokens, attention_mask, prepend_bos)
        return denoise(self, canvas, settings, fwd_hooks=fwd_hooks, progress=progress)

    generate = denoise

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
        fwd_hooks: Sequence[tuple[Any, Any]] = (),
        progress: bool = False,
    ) -> tuple[Trajectory, TrajectoryCache]:
        """`denoise`, keeping activations by step. Canvases are as without (confidences to about 1e-6).

        Args:
            names_filter: name, names or predicate of the hook points to keep; required, since everything at every step
                is a question about your disk.
            steps_filter: step or steps to keep, negative ones from the end; by default all.
            pos_slice: places to keep (of scores and patterns, the queries): an index (its axis stays), a slice, or
                indices.
            branch: under guidance, the branch to keep, "conditional" or "unconditional".
            device, dtype: where and in what precision to keep them; by default as they are.
            max_bytes: refuse, before anything runs, a cache estimated larger.
            length, max_new_tokens, steps, sampler, cfg_scale, temperature, seed: as in `denoise`.
            attention_mask, prepend_bos, fwd_hooks, progress: as in `denoise`.

        Raises:
            ValueError: a filter that picks nothing, a step outside the run, a cache over `max_bytes` (with the largest
                contributors).
        """
        cache_filter = CacheFilter(names_filter, steps_filter, pos_slice, branch, device, dtype, max_bytes)
        settings = DenoiseSettings(steps, sampler, cfg_scale, temperature, seed)
        canvas = lay_out(self, prompt, length, max_new_tokens, attention_mask, prepend_bos)
        return denoise_with_cache(self, canvas, settings, cache_filter, fwd_hooks=fwd_hooks, progress=progress)
