"""`generate` and `canvas`: the two ways in which users of TransformerLens begin, for both variants."""

from abc import ABC
from typing import Any, SupportsFloat, SupportsIndex

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diffusion_lens.denoising.canvas import Prompt, lay_out
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.denoising.prepare import denoise
from diffusion_lens.denoising.randomness import Seed
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.forward import Forward
from diffusion_lens.hook_names import FwdHooks
from diffusion_lens.settings import at_least, check_keywords, keywords_of, naming_the_nearest, not_negative, yes_or_no
from diffusion_lens.shapes import Tokens

RETURN_TYPES = ("trajectory", "tokens", "str", "input")
_LOGITS = "change the logits in a hook at 'denoise.hook_logits'"
_WITH_CACHE = "denoise_with_cache returns activations by step, also those of 'denoise.hook_logits'"
# Arguments of TransformerLens's `generate` that do not exist here, and what to use.
INSTEAD = {
    "input": "pass the prompt as the first argument",
    "top_k": _LOGITS,
    "top_p": _LOGITS,
    "freq_penalty": _LOGITS,
    "repetition_penalty": _LOGITS,
    "forced_bos_token_id": _LOGITS,
    "eos_token_id": "a text ends at the tokenizer's end token",
    "stop_strings": "cut the text that is returned",
    "stopping_criteria": "cut the text that is returned",
    "use_past_kv_cache": "an AR baseline has a key/value cache while nothing is hooked, a diffusion model has none",
    "padding_side": "texts of several lengths are padded as the model needs",
    "output_logits": _WITH_CACHE,
    "return_cache": _WITH_CACHE,
    "names_filter": _WITH_CACHE,
    "return_input_tokens": "the tokens that are returned begin with the prompt",
    "device": "move the model",
    "pixel_values": "these models read text only",
}

# Their values in TransformerLens that change nothing, where these are not `None`.
_DEFAULTS = {
    "freq_penalty": 0.0,
    "repetition_penalty": 1.0,
    "use_past_kv_cache": True,
    "output_logits": False,
    "return_cache": False,
    "return_input_tokens": False,
}


class Generation(Forward, ABC):
    """A model that generates text with the argument names of TransformerLens, and lays out masked prompts."""

    def generate(
        self,
        prompt: Prompt | None = None,
        max_new_tokens: SupportsIndex | None = None,
        *,
        return_type: str = "trajectory",
        do_sample: bool | None = None,
        temperature: SupportsFloat | None = None,
        stop_at_eos: bool = True,
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
            verbose: The same as `progress`.
            attention_mask, prepend_bos, fwd_hooks, progress: Arguments of `denoise`.

        Raises:
            TypeError: An argument of TransformerLens that does not exist here, at another value than its default there
                (the message says what to use), or an unknown one.
            ValueError: Arguments exclude each other, or one does not fit (see `denoise`).
        """
        # 1. Check the arguments.
        check_keywords("generate", others, {*keywords_of(Generation.generate), *INSTEAD})
        if refused := [
            f"{name}: {INSTEAD[name]}" for name, value in others.items() if not _changes_nothing(name, value)
        ]:
            raise TypeError(f"generate does not take {'; '.join(refused)}")
        if prompt is None:
            raise TypeError("generate needs a prompt, text or tokens, as its first argument")
        if return_type not in RETURN_TYPES:
            raise ValueError(f"return_type={return_type!r}; it must be one of {', '.join(map(repr, RETURN_TYPES))}")
        if return_type == "input":
            return_type = "tokens" if isinstance(prompt, Tensor) else "str"
        stops = yes_or_no("stop_at_eos", stop_at_eos)

        # 2. Run the loop.
        settings = DenoiseSettings(steps, sampler, cfg_scale, _temperature(do_sample, temperature), seed)
        canvas = lay_out(self, prompt, length, max_new_tokens, attention_mask, prepend_bos)
        shown = yes_or_no("verbose", verbose) or yes_or_no("progress", progress)
        trajectory = denoise(self, canvas, settings, fwd_hooks=fwd_hooks, progress=shown)

        # 3. Convert the result.
        if return_type == "trajectory":
            return trajectory
        ended = self._ended(trajectory) if stops else torch.zeros_like(trajectory.given)
        if return_type == "tokens":
            return (
                trajectory.tokens.masked_fill(ended, self.tokenizer.eos_token_id) if ended.any() else trajectory.tokens
            )
        texts = [self._text(trajectory, row, ~ended[row]) for row in range(len(trajectory))]
        return texts[0] if len(texts) == 1 else texts

    @naming_the_nearest
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
        if self.cfg.grows and n_masks > 1:
            raise ValueError(
                f"n_masks={n_masks}, but {self.cfg.model_name!r} predicts the next token only: append the tokens that "
                "precede the one to predict, or use generate"
            )
        if isinstance(prompt, Tensor):
            tokens = prompt[None] if prompt.dim() == 1 else prompt
            real = self.checked_real_positions(tokens)
        else:
            tokens, real = self.tokenize(prompt, prepend_bos)
        if real is not None and not bool(real.all()):
            lengths = sorted(set(real.sum(dim=1).tolist()))
            raise ValueError(f"the prompts have {lengths} tokens, so their rows differ; pass one length at a time")
        n_prompt = tokens.shape[1]
        rows = self.readout.rows(torch.arange(n_prompt, n_prompt + n_masks, device=tokens.device))
        if self.cfg.grows:
            return tokens, rows
        return self.cfg.readable(lay_out(self, tokens, max_new_tokens=n_masks).tokens), rows

    def _ended(self, trajectory: Trajectory) -> Bool[Tensor, "batch pos"]:
        """The positions from the first end token on in each stretch of positions that the run wrote."""
        end = getattr(self.tokenizer, "eos_token_id", None)
        written = ~trajectory.given & trajectory.real
        if end is None:
            return torch.zeros_like(written)
        n_ends = (trajectory.tokens == end).cumsum(dim=1)
        n_before_stretch = n_ends.masked_fill(written, 0).cummax(dim=1).values
        ended: Tensor = n_ends > n_before_stretch
        return ended

    def _text(self, trajectory: Trajectory, row: int, kept: Bool[Tensor, "pos"]) -> str:
        """The text of some positions of one row, without a given BOS at the beginning."""
        shown = (trajectory.real[row] & kept).nonzero().flatten()
        bos = self._require_tokenizer().bos_token_id
        if len(shown) and int(trajectory[row][shown[0]]) == bos and bool(trajectory.given[row, shown[0]]):
            shown = shown[1:]
        return str(self.to_string(trajectory[row][shown]))


def _changes_nothing(name: str, value: Any) -> bool:
    """Whether an argument of TransformerLens has its default value there."""
    default = _DEFAULTS.get(name)
    return value is default or (isinstance(value, int | float) and value == default)


def _temperature(do_sample: bool | None, temperature: SupportsFloat | None) -> float:
    """The temperature of the loop."""
    given = None if temperature is None else not_negative("temperature", temperature)
    if do_sample is None:
        return given or 0.0
    if yes_or_no("do_sample", do_sample):
        if given == 0:
            raise ValueError(
                "do_sample=True needs a temperature above 0; leave do_sample out to take the likeliest token"
            )
        return 1.0 if given is None else given
    if given:
        raise ValueError(
            f"do_sample=False takes the likeliest token, so temperature={given} has no effect; leave one out"
        )
    return 0.0
