"""`model(...)`: the logits, or the loss, under TransformerLens's names."""

from abc import ABC
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.losses import LossQuestion, ask, ask_masked, ask_next, hide, noise_of
from diffusion_lens.model.inputs import check_attention_mask, check_tokens
from diffusion_lens.model.kv_cache import KeyValueCache
from diffusion_lens.model.logit_rows import Rows
from diffusion_lens.model.transformer import DiffusionTransformer, Input
from diffusion_lens.settings import Whole, at_least, naming_the_nearest


class Forward(DiffusionTransformer, ABC):
    """A model that can be called, and that gives its own loss: `loss_fn`, and the noise that losses are taken under."""

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
        loss_per_token: bool = False,
        samples: Whole = 1,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Run the network.

        Args:
            input: text, texts, Int[batch pos] tokens, or with `start_at_layer` the residual stream entering that layer.
            return_type: "logits"; `None` to run for the hooks alone; "loss", the loss the model is trained by, or
                "both", (logits, loss). For a loss a masked diffusion model masks the tokens first, as `hide` does: its
                logits are then those of the masked canvas.
            attention_mask: [batch pos], 1 at real tokens, 0 at padding. Positions are counted over real tokens, so a
                padded row computes what it computes alone. By default it is read off tokens that begin or end with a
                padding token of the tokenizer's own (`model.own_pad_id`); a residual stream says nothing of padding.
            prepend_bos: whether text begins with BOS; by default as the tokenizer does (`cfg.default_prepend_bos`).
            start_at_layer: first block to run (negative: from the end).
            stop_at_layer: block to stop before; the residual stream there is returned.
            logits_at: compute the logits of these rows only. Int[selected] picks `logits[:, rows]`; a pair
                (Int[selected], Int[selected]) of batch and row indices, or Bool[batch pos], picks
                `logits[batch, rows]`, flattened to [selected d_vocab_out].
            past_kv_cache: on a causal model, keys and values of the places before `input`, in the layers that run; the
                new ones are appended.
            loss_per_token: give what each place adds instead of the mean over the places that count: of an
                autoregressive model Float[batch pos-1], as in TransformerLens; of a masked diffusion model
                Float[batch pos], its weighted surprise (cross-entropy / p) where the token was hidden. Places that do
                not count hold 0.
            samples: on a masked diffusion model, take the mean of the loss over that many noises (as many forward
                passes).
            generator: source of the loss's noise. By default it is fixed in eval mode, the same for every call with
                tokens of one shape, so that the losses of an original and an ablated run compare; in train mode it is
                drawn from torch's global generator.

        Returns:
            Float[batch pos d_vocab_out], the picked rows of it, Float[batch pos d_model] with `stop_at_layer`; the
            loss, Float[]; or `None`.

        Raises:
            TypeError: an argument that is none; the nearest one is named.
            ValueError: tokens, layers, rows or a mask that do not fit the model, or arguments that exclude each other.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"return_type={return_type!r} is unknown; it is 'logits', 'loss', 'both' or None")
        if return_type in ("logits", None):
            if loss_per_token or samples != 1 or generator is not None:
                raise ValueError(
                    "loss_per_token=, samples= and generator= belong to return_type='loss' or 'both', not to "
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
                unembed=return_type is not None,
            )
        parts = {
            "start_at_layer": start_at_layer,
            "stop_at_layer": stop_at_layer,
            "logits_at": logits_at,
            "past_kv_cache": past_kv_cache,
        }
        if given := [name for name, value in parts.items() if value is not None]:
            raise ValueError(f"return_type={return_type!r} runs the whole network; it does not go with {given}")
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
        """The loss that the model is trained by, with `return_logits` (logits, loss); `forward` says the rest."""
        real = attention_mask
        if not isinstance(input, Tensor):
            input, padded = self.tokenize(input, prepend_bos)
            real = padded if real is None else real
        samples = at_least(1, "samples", samples)
        if samples > 1 and return_logits:
            raise ValueError(
                f"samples={samples} with return_type='both': each noise has logits of its own, so it is 1 there"
            )
        tokens, real = self._checked(input, real)
        asked = ask(self, tokens, real, generator, samples)
        mask = self.all_real(tokens) if real is None else real
        total: Any = 0.0
        starts = range(0, len(asked.tokens), len(tokens))
        for start in starts:
            part = asked.part(start, start + len(tokens))
            if return_logits:
                logits: Any = self.run_layers(part.tokens, attention_mask=mask)
                return logits, self._loss(part, logits[part.rows], loss_per_token)
            picked: Any = self.run_layers(part.tokens, attention_mask=mask, logits_at=part.rows)
            total = total + self._loss(part, picked, loss_per_token)
        # The loss of each part is a share of the whole's already; a place has its mean over all parts.
        return total / len(starts) if loss_per_token else total

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
        """The loss that logits give the tokens, as in TransformerLens.

            noisy, p_mask = model.hide(tokens)
            logits = model.run_with_hooks(noisy, fwd_hooks=hooks)
            loss = model.loss_fn(logits, tokens, noisy=noisy, p_mask=p_mask)

        Args:
            logits: Float[batch pos d_vocab_out]; of a masked diffusion model, what it gave on `noisy`.
            tokens: Int[batch pos], the clean text.
            per_token: as `loss_per_token` of the model's call.
            noisy, p_mask: on a masked diffusion model, the canvas and the probability with which each place was masked.

        Raises:
            ValueError: logits of another shape; no `noisy` on a masked diffusion model, whose logits on the clean text
                are no predictions.
        """
        tokens, real = self._checked(tokens, attention_mask)
        if tuple(logits.shape) != (*tokens.shape, self.cfg.d_vocab_out):
            raise ValueError(
                f"the logits are {list(logits.shape)}; of these tokens they are {[*tokens.shape, self.cfg.d_vocab_out]}"
            )
        if not self.cfg.has_mask:
            asked = ask_next(self, tokens, real=real)
        elif noisy is None or p_mask is None:
            raise ValueError(
                f"{self.cfg.model_name!r} predicts hidden tokens, so its loss needs the canvas that gave the logits: "
                "noisy, p_mask = model.hide(tokens); logits = model(noisy); "
                "model.loss_fn(logits, tokens, noisy=noisy, p_mask=p_mask). Or take model(tokens, return_type='loss')"
            )
        else:
            asked = ask_masked(self, tokens, noisy, p_mask, real=real)
        return self._loss(asked, logits[asked.rows], per_token)

    def hide(
        self, tokens: Tensor, attention_mask: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The masked canvas of `return_type="loss"`, Int[batch pos], and the probability p of each place to be masked.

        Args:
            generator: source of the noise; the default is that of the model's call.
        """
        tokens, real = self._checked(tokens, attention_mask)
        if self.cfg.mask_token_id is None:
            raise ValueError(f"{self.cfg.model_name!r} has no [MASK], so nothing can be hidden from it")
        noisy, p_mask = hide(tokens, self.cfg.mask_token_id, generator=noise_of(self, generator))
        return (noisy if real is None else torch.where(real, noisy, tokens)), p_mask

    def _checked(self, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens of a loss, and which of them are real; what they say of themselves unless a mask is given."""
        tokens = check_tokens(tokens, self.cfg)
        if attention_mask is None:
            return tokens, self.checked_real_positions(tokens)
        return tokens, check_attention_mask(attention_mask, tokens.shape[0], tokens.shape[1], tokens.device)

    def _loss(self, asked: LossQuestion, logits: Tensor, per_token: bool) -> Tensor:
        if not per_token:
            return asked.loss(logits)
        by_place = asked.by_place(logits)
        return by_place[:, 1:] if not self.cfg.has_mask else by_place
