"""The network: embed, blocks, norm, unembed, with every tensor worth patching at a hook point.

`DiffusionTransformer` is abstract; users meet `diffusion_lens.HookedDiffusionTransformer`, which adds loading, the
denoising loop and the losses.
"""

from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from transformer_lens import ActivationCache, HookedRootModule

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.hook_names import NamesFilter, loop_hook, select_names
from diffusion_lens.model import build
from diffusion_lens.model.attention import AttentionContext
from diffusion_lens.model.attention_patterns import PATTERNS
from diffusion_lens.model.hook_points import StepHookPoint
from diffusion_lens.model.inputs import check_attention_mask, check_layers, check_length, check_tokens
from diffusion_lens.model.key_values import KeyValueCache, LayerKeyValues
from diffusion_lens.model.picked_rows import PickedRows, Rows
from diffusion_lens.model.text import TextInterface
from diffusion_lens.model.weights import WeightViews
from diffusion_lens.readout import READOUTS, Readout
from diffusion_lens.shapes import Places, Resid
from diffusion_lens.step_state import StepClock

Input = str | Sequence[str] | Tensor


class LoopHooks(nn.Module):
    """The denoising loop's own hook points, reached as `denoise.hook_*`."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_tokens = StepHookPoint()
        self.hook_logits = StepHookPoint()
        self.hook_candidates = StepHookPoint()
        self.hook_confidence = StepHookPoint()
        self.hook_reveal = StepHookPoint()


class DiffusionTransformer(TextInterface, WeightViews, HookedRootModule, ABC):
    """A masked diffusion transformer, or its causal twin, in hook points.

    Args:
        cfg: the model's facts.
        tokenizer: a fast Hugging Face tokenizer, if text is to go in.
        tensors: the weights in our layout; by default random ones from `seed`.
    """

    # nn.Module's __getattr__ would otherwise give these as "Tensor | Module" to the type checker.
    hook_embed: StepHookPoint
    blocks: Any

    def __init__(
        self,
        cfg: DiffusionConfig,
        tokenizer: Any = None,
        *,
        tensors: Iterable[tuple[str, Tensor]] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        architecture = cfg.architecture
        self.cfg = cfg
        self.embed = build.build_embed(architecture)
        self.hook_embed = StepHookPoint()
        self.blocks = nn.ModuleList(build.build_blocks(architecture))
        self.ln_final = build.build_final_norm(architecture)
        self.unembed = build.build_unembed(architecture)
        self.loop_hooks = LoopHooks()
        self.clock = StepClock()
        self._rotary = build.build_rotary(architecture)
        self._pattern = PATTERNS[cfg.attention_dir]
        if tensors is None:
            tensors = build.random_tensors(architecture, seed)
        self._tie()
        build.load_tensors(self, tensors, cfg.device or "cpu", cfg.dtype)
        self._tie()
        self.set_tokenizer(tokenizer)
        self.setup()
        self.eval()

    def _tie(self) -> None:
        """Let the embedding serve as head where the architecture says so."""
        if self.cfg.tied:
            self.unembed.weight = self.embed.weight

    def setup(self) -> None:
        """Name the hook points and give all of them this model's clock."""
        super().setup()
        # `model.denoise` is the method that runs the loop, so its hook points live elsewhere and are renamed here.
        for name, _ in self.loop_hooks.named_children():
            point: Any = self.hook_dict.pop(f"loop_hooks.{name}")
            del self.mod_dict[f"loop_hooks.{name}"]
            point.name = loop_hook(name)
            self.hook_dict[point.name] = self.mod_dict[point.name] = point
        for hook_point in self.hook_points():
            hook_point.clock = self.clock
        last = (f"blocks.{self.cfg.n_layers - 1}.", "ln_final.")
        self._last_points = [point for name, point in self.hook_dict.items() if name.startswith(last)]
        self._inside = [point for name, point in self.hook_dict.items() if not name.startswith(loop_hook(""))]

    @property
    def readout(self) -> Readout:
        """Where each place's token is predicted."""
        return READOUTS[self.cfg.readout]

    def forward(
        self,
        input: Input,
        return_type: str | None = "logits",
        *,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        logits_at: Rows | None = None,
        past_kv_cache: KeyValueCache | None = None,
    ) -> Tensor | None:
        """Run the network.

        Args:
            input: text, texts, Int[batch pos] tokens, or with `start_at_layer` the residual stream entering that layer.
            return_type: "logits", or `None` to run for the hooks alone.
            attention_mask: [batch pos], 0 at padding. Positions are counted over real tokens, so a padded row computes
                what it computes alone.
            start_at_layer: first block to run (negative: from the end).
            stop_at_layer: block to stop before; the residual stream there is returned.
            logits_at: compute the logits of these rows only. Int[place] picks `logits[:, rows]`; a pair (Int[place],
                Int[place]) of batch and row indices, or Bool[batch pos], picks `logits[batch, rows]`, flattened to
                [place d_vocab_out].
            past_kv_cache: on a causal model, keys and values of the places before `input`, in the layers that run; the
                new ones are appended.

        Returns:
            Float[batch pos d_vocab_out], the picked rows of it, or Float[batch pos d_model] with `stop_at_layer`.
        """
        if return_type not in ("logits", None):
            raise ValueError(f"return_type={return_type!r} is unknown; it is 'logits', 'loss', 'both' or None")
        start, stop = check_layers(start_at_layer, stop_at_layer, self.cfg.n_layers)
        resid, real = self._enter(input, attention_mask, prepend_bos, start_at_layer is not None)
        picked = None
        if logits_at is not None and stop_at_layer is None:
            picked = PickedRows.parse(logits_at, resid.shape[0], resid.shape[1], resid.device)
        # A hook in the last block or after it sees every row, as everywhere.
        early = picked is not None and picked.saves_work and not any(point.is_hooked for point in self._last_points)
        past = [None] * (stop - start) if past_kv_cache is None else past_kv_cache.layers[start:stop]
        context = self._context(resid.shape[1], real, self._n_past(past, resid.shape[1], real))
        for layer, block_past in zip(range(start, stop), past, strict=True):
            only = picked if early and layer == self.cfg.n_layers - 1 else None
            resid = self.blocks[layer](resid, context, block_past, only)
        if stop_at_layer is not None:
            return resid
        if picked is not None and early and start == self.cfg.n_layers:
            resid = picked.of(resid)
        normalized = self.ln_final(resid)
        if return_type is None:
            return None
        if picked is not None:
            normalized = picked.flat(normalized if early else picked.of(normalized))
        logits: Tensor = self.unembed(normalized)
        return logits

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """As in TransformerLens: the output and an `ActivationCache` of the hook points that `names_filter` picks."""
        silent = {
            name: reason for name in select_names(names_filter, self.hook_dict) if (reason := self.why_silent(name))
        }
        names = [name for name in select_names(names_filter, self.hook_dict) if name not in silent]
        if not names or (silent and not callable(names_filter) and names_filter is not None):
            raise ValueError("; ".join(f"{name!r} {reason}" for name, reason in silent.items()))
        out, cache = super().run_with_cache(
            *model_args, names_filter=names, remove_batch_dim=remove_batch_dim, **kwargs
        )
        if return_cache_object:
            return out, ActivationCache(cache, self, has_batch_dim=not remove_batch_dim)
        return out, cache

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Compute each head's result [batch pos head d_model] at `attn.hook_result` (large), as in TransformerLens."""
        self.cfg.use_attn_result = use_attn_result

    @property
    def is_hooked(self) -> bool:
        """Whether anything listens anywhere inside the network; the loop's own hook points do not count."""
        return any(point.is_hooked for point in self._inside)

    def add_hook(self, name: str | Callable[[str], bool], hook: Any, *args: Any, **kwargs: Any) -> None:
        """As in TransformerLens; a name or predicate that picks nothing is an error with the nearest names."""
        self._check_hookable(name)
        super().add_hook(name, hook, *args, **kwargs)

    def _enable_hook(self, name: str | Callable[[str], bool], hook: Any, dir: Literal["fwd", "bwd"]) -> None:
        self._check_hookable(name)
        super()._enable_hook(name, hook, dir)

    def run_with_hooks(
        self, *model_args: Any, fwd_hooks: Sequence[Any] = (), bwd_hooks: Sequence[Any] = (), **kwargs: Any
    ) -> Any:
        """As in TransformerLens; a hook that this run would never reach is an error."""
        for name, _ in [*fwd_hooks, *bwd_hooks]:
            self._check_hookable(name, in_loop=False)
        return super().run_with_hooks(*model_args, fwd_hooks=list(fwd_hooks), bwd_hooks=list(bwd_hooks), **kwargs)

    def get_caching_hooks(self, names_filter: NamesFilter = None, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens; a filter that matches nothing is an error."""
        return super().get_caching_hooks(select_names(names_filter, self.hook_dict), *args, **kwargs)

    def add_caching_hooks(self, names_filter: NamesFilter = None, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens; a filter that matches nothing is an error."""
        return super().add_caching_hooks(select_names(names_filter, self.hook_dict), *args, **kwargs)

    def _check_hookable(self, name: str | Callable[[str], bool], in_loop: bool = True) -> None:
        """Refuse a hook that picks nothing, or only points that never pass (outside the loop, the loop's own)."""
        picked = select_names(name, self.hook_dict)
        reasons = [None if in_loop and each.startswith(loop_hook("")) else self.why_silent(each) for each in picked]
        if all(reasons):
            raise ValueError(f"{picked[0]!r} {reasons[0]}")

    def why_silent(self, name: str) -> str | None:
        """Why a plain forward pass never reaches a hook point, or `None`."""
        if name.startswith(loop_hook("")):
            return "passes only inside the denoising loop: model.denoise(..., fwd_hooks=[...])"
        if name.endswith("hook_result") and not self.cfg.use_attn_result:
            return "passes only after model.set_use_attn_result(True)"
        return None

    def _enter(
        self, input: Input, attention_mask: Tensor | None, prepend_bos: bool | None, is_resid: bool
    ) -> tuple[Resid, Places | None]:
        """The residual stream at the first block, and which places are real (`None`: all)."""
        if is_resid:
            if not isinstance(input, Tensor) or input.dim() != 3 or input.shape[-1] != self.cfg.d_model:
                given = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
                raise ValueError(
                    f"start_at_layer needs a residual stream [batch, pos, {self.cfg.d_model}]; got {given}"
                )
            check_length(input.shape[1], self.cfg)
            resid = input
        else:
            if not isinstance(input, Tensor):
                input, real_tokens = self.tokenize(input, prepend_bos)
                attention_mask = real_tokens if attention_mask is None else attention_mask
            resid = self.hook_embed(self.embed(check_tokens(input, self.cfg)))
        if attention_mask is None:
            return resid, None
        return resid, check_attention_mask(attention_mask, resid.shape[0], resid.shape[1], resid.device)

    def _n_past(self, past: Sequence[LayerKeyValues | None], n_pos: int, real: Places | None) -> int:
        """Places that ran before, the same in every layer that runs now."""
        held = {layer.n_pos for layer in past if layer is not None}
        if not held:
            return 0
        if self.cfg.attention_dir != "causal":
            raise ValueError(f"{self.cfg.model_name!r} is bidirectional: earlier places change with every new token")
        if real is not None:
            raise ValueError("past_kv_cache goes with runs without padding")
        if len(held) > 1:
            raise ValueError(
                f"past_kv_cache holds {sorted(held)} places in different layers; run the same ones in each"
            )
        check_length(n_pos + max(held), self.cfg)
        return max(held)

    def _context(self, n_pos: int, real: Places | None, n_past: int = 0) -> AttentionContext:
        device = self.unembed.weight.device
        positions = None if real is None else (real.long().cumsum(dim=1) - 1).clamp(min=0)
        return AttentionContext(
            self._rotary.tables(n_pos, device, positions, n_past, self.cfg.dtype),
            self._pattern.visibility(n_pos, device, real, n_past),
            self.cfg.use_attn_result,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # .to, .cuda, .half and their kin all pass here: the config must not lag behind the weights.
        super()._apply(fn, recurse)
        self.cfg.device, self.cfg.dtype = str(self.unembed.weight.device), self.unembed.weight.dtype
        return self
