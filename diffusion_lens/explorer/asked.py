"""What a spec asks: its answer and subject on the canvas of a run, and the tokens that the lens ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_lens.denoising import Trajectory
from diffusion_lens.explorer.spec import Spec
from diffusion_lens.facts import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.noise import hidden_tokens

KINDS = ("resid", "mlp", "attn")
SAMPLES = 10
NO_TRACE = "Give the answer and select the subject's positions to see which states carry the answer."
_SHARE_OF_LAYERS = 10 / 48  # ROME restores 10 of GPT-2 XL's 48 layers.


def window_of(model: DiffusionTransformer) -> int:
    """Number of blocks whose outputs a trace restores together."""
    return max(1, round(_SHARE_OF_LAYERS * model.cfg.n_layers))


@dataclass(frozen=True, eq=False)
class Asked:
    """The answer that a spec follows through a run.

    Attributes:
        query: Prompt, subject and answer; `None` if the spec has no answer.
        positions: The positions that the model predicts.
        differs: Whether the run ends with another text at the answer's positions.
        final: At each position of the canvas the token whose rank is read: the answer's, elsewhere the final one; -1
            for none.
    """

    query: Query | None
    positions: list[int]
    differs: bool
    final: list[int]

    @classmethod
    def of(cls, model: DiffusionTransformer, spec: Spec, run: Trajectory) -> "Asked":
        """The answer of a spec on the canvas of its run.

        Raises:
            ValueError: The answer does not follow the prompt, or the canvas is too short for it.
        """
        query, tokens = _query(model, spec, run), run.tokens[0].cpu()
        final: list[int] = tokens.masked_fill(~model.cfg.writable(tokens), -1).tolist()
        written = list(final)
        if query is not None:
            for position, token in zip(query.answer_positions, query.answer_tokens, strict=True):
                final[position] = token
        return cls(query, list(range(1 if model.cfg.grows else 0, len(final))), final != written, final)

    @property
    def targets(self) -> Tensor | None:
        """Int[batch selected], the targets of the lens; `None` where they are its default, the final tokens."""
        if not self.differs:
            return None
        return torch.tensor([[self.final[position] for position in self.positions]])


def _query(model: DiffusionTransformer, spec: Spec, run: Trajectory) -> Query | None:
    """The prompt with the spec's answer on the canvas of the run.

    Raises:
        ValueError: The answer does not follow the prompt, or the canvas is too short for it.
    """
    if spec.answer is None:
        return None
    prompt, answer = Fact(prompt=spec.prompt, subject="", answer=spec.answer).tokenize(model)
    n_pos = run.tokens.shape[1]
    if len(prompt) + len(answer) > n_pos:
        raise ValueError(
            f"the answer {spec.answer!r} has {len(answer)} tokens and the prompt {len(prompt)}, but the canvas has "
            f"only {n_pos} positions: give length={len(prompt) + len(answer)} or more"
        )
    if spec.subject is not None and spec.subject[1] > len(prompt):
        raise ValueError(f"the subject {list(spec.subject)} is not within the prompt's {len(prompt)} positions")
    rest = answer[:-1] if model.cfg.grows else hidden_tokens(model.cfg, n_pos - len(prompt), spec.prompt)
    return Query(
        torch.tensor([*prompt, *rest], device=model.cfg.device),
        subject=spec.subject or (0, 1),
        answer_positions=tuple(range(len(prompt), len(prompt) + len(answer))),
        answer_tokens=tuple(answer),
    )
