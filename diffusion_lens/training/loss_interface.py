"""The losses of `training.objectives` as a model's own, under TransformerLens's names."""

from abc import ABC
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.model.inputs import check_attention_mask, check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer, Input
from diffusion_lens.settings import Whole, at_least
from diffusion_lens.training.objectives import LossQuestion, ask, ask_masked, ask_next, hide, noise_of


class LossInterface(DiffusionTransformer, ABC):
    """A model that gives its own loss: `return_type="loss"`, `loss_fn`, and the noise that both are taken under."""

    def forward(
        self,
        input: Input,
        return_type: str | None = "logits",
        *,
        loss_per_token: bool = False,
        samples: Whole = 1,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the network; the arguments are those of `DiffusionTransformer.forward`, and:

        Args:
            return_type: also "loss", the loss the model is trained by, or "both", (logits, loss). A masked diffusion
                model masks the tokens first, as `hide` does: its logits are then those of the masked canvas.
            loss_per_token: give what each place adds instead of the mean over the places that count: of an
                autoregressive model Float[batch pos-1], as in TransformerLens; of a masked diffusion model
                Float[batch pos], its weighted surprise (cross-entropy / p) where the token was hidden. Places that do
                not count hold 0.
            samples: on a masked diffusion model, take the mean over that many noises (as many forward passes).
            generator: source of the noise. By default it is fixed in eval mode, the same for every call with tokens of
                one shape, so that the losses of an original and an ablated run compare; in train mode it is drawn from
                torch's global generator.
        """
        if return_type not in ("loss", "both"):
            if loss_per_token or samples != 1 or generator is not None:
                raise ValueError(
                    "loss_per_token=, samples= and generator= belong to return_type='loss' or 'both', not to "
                    f"{return_type!r}"
                )
            return super().forward(input, return_type, **kwargs)
        real = kwargs.pop("attention_mask", None)
        if not isinstance(input, Tensor):
            input, padded = self.tokenize(input, kwargs.pop("prepend_bos", None))
            real = padded if real is None else real
        if kwargs:
            raise ValueError(
                f"return_type={return_type!r} runs the whole network; it does not go with {sorted(kwargs)}"
            )
        samples = at_least(1, "samples", samples)
        if samples > 1 and return_type == "both":
            raise ValueError(
                f"samples={samples} with return_type='both': each noise has logits of its own, so it is 1 there"
            )
        tokens, real = self._checked(input, real)
        asked = ask(self, tokens, real, generator, samples)
        mask = self.whole(tokens) if real is None else real
        total: Any = 0.0
        starts = range(0, len(asked.tokens), len(tokens))
        for start in starts:
            part = asked.part(start, start + len(tokens))
            if return_type == "both":
                logits: Any = super().forward(part.tokens, attention_mask=mask)
                return logits, self._loss(part, logits[part.rows], loss_per_token)
            picked: Any = super().forward(part.tokens, attention_mask=mask, logits_at=part.rows)
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
        if self.cfg.mask_token_id is None:
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
            return tokens, self.told_places(tokens)
        return tokens, check_attention_mask(attention_mask, tokens.shape[0], tokens.shape[1], tokens.device)

    def _loss(self, asked: LossQuestion, logits: Tensor, per_token: bool) -> Tensor:
        if not per_token:
            return asked.loss(logits)
        by_place = asked.by_place(logits)
        return by_place[:, 1:] if self.cfg.mask_token_id is None else by_place
