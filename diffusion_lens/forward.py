"""`model(...)`: the logits or the loss, with the argument names of TransformerLens."""

from abc import ABC
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.loss_batch import LossBatch
from diffusion_lens.losses import loss_batch, masked_batch, next_token_batch, noise_of
from diffusion_lens.model.kv_cache import KeyValueCache
from diffusion_lens.model.logit_rows import Rows
from diffusion_lens.model.told_time import Time
from diffusion_lens.model.transformer import DiffusionTransformer, Input
from diffusion_lens.scheduled_loss import noised
from diffusion_lens.settings import Whole, at_least, naming_the_nearest


class Forward(DiffusionTransformer, ABC):
    """A callable model, with its training loss (`loss_fn`) and the masking that this loss uses (`hide`)."""

    @naming_the_nearest
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
        time: Time | None = None,
        clean: Tensor | None = None,
        sigma: Tensor | None = None,
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
                padding token of the tokenizer's own (`model.own_pad_id`). Padding cannot be inferred from a residual
                stream; pass the mask.
            prepend_bos: Whether text begins with BOS; by default as the tokenizer does (`cfg.default_prepend_bos`).
            start_at_layer: First block to run (negative: from the end).
            stop_at_layer: Block to stop before; the residual stream there is returned.
            logits_at: Rows whose logits are computed; by default all. Int[selected] picks `logits[:, rows]`; a pair
                (Int[selected], Int[selected]) of batch and row indices, or Bool[batch pos], picks
                `logits[batch, rows]`, flattened to [selected d_vocab_out].
            past_kv_cache: On a causal model, keys and values of the positions before `input`, in the layers that run;
                the new ones are appended.
            time: Time of the canvas, for a network that is told it (`cfg.is_told_time`): a number in (0, 1], or
                Float[batch], one for each row; 1 where all is noise. By default that of `model.at_time(t)`. A loss
                draws its own.
            clean: Int[batch pos], on a model that attends by blocks the clean text of noisy `input`: each block sees
                the earlier blocks as they are there, as in training. The network then reads both texts, one after the
                other, which hooks see; the logits are those of `input`.
            sigma: Noise level of each row, Float[batch], in place of `time`; it may be any that a schedule has.
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
            TypeError: An unknown argument; an argument of a similar name is suggested.
            ValueError: Tokens, layers, rows or a mask do not fit the model, or arguments exclude each other.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"return_type={return_type!r} is unknown; it must be 'logits', 'loss', 'both' or None")
        if return_type in ("logits", None):
            if loss_per_token or samples != 1 or generator is not None:
                raise ValueError(
                    "loss_per_token=, samples= and generator= require return_type='loss' or 'both'; it is "
                    f"{return_type!r}"
                )
            return self.run_layers(
                input,
                attention_mask=attention_mask,
                prepend_bos=prepend_bos,
                start_at_layer=start_at_layer,
                stop_at_layer=stop_at_layer,
                logits_at=logits_at,
                past_kv_cache=past_kv_cache,
                sigma=self.read_time(time) if sigma is None else sigma,
                clean=clean,
                unembed=return_type is not None,
            )
        parts = {
            "start_at_layer": start_at_layer,
            "stop_at_layer": stop_at_layer,
            "logits_at": logits_at,
            "past_kv_cache": past_kv_cache,
            "time": time,
            "clean": clean,
            "sigma": sigma,
        }
        if given := [name for name, value in parts.items() if value is not None]:
            raise ValueError(f"return_type={return_type!r} runs the whole network; leave out {given}")
        return self._own_loss(
            input,
            attention_mask=attention_mask,
            prepend_bos=prepend_bos,
            loss_per_token=loss_per_token,
            samples=samples,
            generator=generator,
            return_logits=return_type == "both",
        )

    def _own_loss(
        self,
        input: Input,
        *,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
        loss_per_token: bool = False,
        samples: Whole = 1,
        generator: torch.Generator | None = None,
        return_logits: bool = False,
    ) -> Any:
        """The loss that the model is trained on, or (logits, loss) with `return_logits`; see `forward`."""
        real = attention_mask
        if not isinstance(input, Tensor):
            input, padded = self.tokenize(input, prepend_bos)
            real = padded if real is None else real
        samples = at_least(1, "samples", samples)
        if samples > 1 and return_logits:
            raise ValueError(
                f"samples={samples} with return_type='both': each noise sample has its own logits; use samples=1 there"
            )
        # 1. Mask the tokens, once for each noise sample.
        tokens, real = self.checked_tokens(input, real)
        batch = loss_batch(self, tokens, real, generator, samples)
        mask = self.all_real(tokens) if real is None else real
        total: Any = 0.0
        starts = range(0, len(batch.tokens), len(tokens))

        # 2. Run the network on one noise sample at a time, and add up the losses.
        for start in starts:
            part = batch.part(start, start + len(tokens))
            if return_logits:
                logits: Any = self.run_layers(part.tokens, attention_mask=mask, **part.beside)
                return logits, self._loss(part, logits[part.rows], loss_per_token)
            row_logits: Any = self.run_layers(part.tokens, attention_mask=mask, logits_at=part.rows, **part.beside)
            total = total + self._loss(part, row_logits, loss_per_token)

        # 3. `total` is already averaged over samples. Per-position losses are summed over samples, so divide by their
        #    number.
        return total / len(starts) if loss_per_token else total

    @naming_the_nearest
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
            ValueError: The logits have another shape, or `noisy` is missing on a masked diffusion model, whose logits
                on the clean text predict nothing.
        """
        tokens, real = self.checked_tokens(tokens, attention_mask)
        if tuple(logits.shape) != (*tokens.shape, self.cfg.d_vocab_out):
            raise ValueError(
                f"the logits have shape {list(logits.shape)}; for these tokens it must be "
                f"{[*tokens.shape, self.cfg.d_vocab_out]}"
            )
        if self.cfg.grows:
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
        return self._loss(batch, logits[batch.rows], per_token)

    @naming_the_nearest
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
        tokens, real = self.checked_tokens(tokens, attention_mask)
        if self.cfg.grows:
            raise ValueError(f"{self.cfg.model_name!r} has no [MASK], so none of its tokens can be masked")
        noisy, p_mask = noised(self, tokens, generator=noise_of(self, generator))
        return (noisy if real is None else torch.where(real, noisy, tokens)), p_mask

    def _loss(self, batch: LossBatch, logits: Tensor, per_token: bool) -> Tensor:
        """The loss, or with `per_token` the contribution of each position that can be predicted."""
        if not per_token:
            return batch.loss(logits)
        by_position = batch.by_position(logits)
        return by_position[:, 1:] if self.cfg.grows else by_position
