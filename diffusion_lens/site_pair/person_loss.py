"""The loss that asks for a person at the end of a name: the cross-entropy with the values of the person's relations."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diffusion_lens.data.site_facts import SiteFacts
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import Tokens
from diffusion_lens.training.shaped_loss import EarlyExit, Targets

VALUES_MASKED = 0.9
NAMES_MASKED = 0.15  # Times t; other tokens are masked with probability t.


@dataclass(frozen=True, eq=False)
class PersonTargets:
    """The values of a person as equally likely targets at the last token of each visible name.

    Attributes:
        world: Seed of the world.
        person: Int[d_vocab d_vocab], number of the person with these two names, or -1.
        values: Int[entry candidate], ids of each person's values.
    """

    world: int
    person: Int[Tensor, "d_vocab d_vocab"] = field(repr=False)
    values: Int[Tensor, "entry candidate"] = field(repr=False)

    @classmethod
    def of(cls, world: SiteFacts, tokenizer: PreTrainedTokenizerFast) -> "PersonTargets":
        """The targets of a world."""
        n_tokens = len(tokenizer) + 1  # The last is [MASK].
        names = torch.tensor([tokenizer(person.name)["input_ids"] for person in world.people])
        person = torch.full((n_tokens, n_tokens), -1)
        person[names[:, 0], names[:, 1]] = torch.arange(len(names))
        values = [tokenizer(" ".join(person.values))["input_ids"] for person in world.people]
        return cls(world.seed, person, torch.tensor(values))

    def __call__(self, tokens: Tokens) -> Targets:
        """The targets of an input of the network."""
        person = self.person.to(tokens.device)[tokens[:, :-1], tokens[:, 1:]]
        batch, first = (person >= 0).nonzero(as_tuple=True)
        return Targets((batch, first + 1), self.values.to(tokens.device)[person[batch, first]])


@dataclass(frozen=True)
class PersonLoss:
    """An objective of `train`: values at names, in texts whose values are mostly masked.

    A value is masked with probability .9, a name with .15 t, and another token with t, where t ~ U(0, 1) is the row's.

    Attributes:
        exit: The loss, after the last block.
        values: Ids of all values.
        names: Ids of all names.
    """

    exit: EarlyExit
    values: tuple[int, ...] = field(repr=False)
    names: tuple[int, ...] = field(repr=False)

    def __call__(
        self, model: DiffusionTransformer, tokens: Tokens, generator: torch.Generator | None
    ) -> Float[Tensor, ""]:
        """The loss of a batch."""
        noisy = self.hide(tokens, model.cfg.blank, generator)
        resid = model(noisy, attention_mask=model.all_real(noisy), stop_at_layer=self.exit.layer + 1)
        return self.exit.loss(model, resid, noisy)

    def hide(self, tokens: Tokens, mask_token_id: int, generator: torch.Generator | None) -> Tokens:
        """The tokens with some of them masked."""
        clean = tokens.cpu()
        p = torch.rand(len(clean), 1, generator=generator).expand(clean.shape)
        p = torch.where(torch.isin(clean, torch.tensor(self.names)), NAMES_MASKED * p, p)
        p = torch.where(torch.isin(clean, torch.tensor(self.values)), VALUES_MASKED, p)
        masked = torch.rand(clean.shape, generator=generator) < p
        return tokens.masked_fill(masked.to(tokens.device), mask_token_id)
