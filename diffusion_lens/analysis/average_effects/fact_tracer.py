"""One fact among many: laid out, asked whether the model knows it, and if so traced."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from diffusion_lens.analysis.average_effects.token_roles import token_roles
from diffusion_lens.analysis.causal_tracing.answer import Answer
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace, causal_trace
from diffusion_lens.analysis.fact_folder import fact_seed
from diffusion_lens.facts import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance


@dataclass(frozen=True)
class CanvasLayout:
    """How facts are laid out.

    Attributes:
        length: places of the canvas in all, the prompt included, instead of `answer_places`.
        answer_places, first_tokens, occurrence: as in `Fact.to_query`.
    """

    length: int | None = None
    answer_places: int | None = None
    first_tokens: int | None = None
    occurrence: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.answer_places is not None:
            raise ValueError(f"length={self.length} and answer_places={self.answer_places}; give one of them")

    def query(self, model: DiffusionTransformer, fact: Fact) -> Query:
        """A fact on the model's canvas."""
        places = self.answer_places if self.length is None else self.length - len(fact.tokenize(model)[0])
        return fact.to_query(model, answer_places=places, first_tokens=self.first_tokens, occurrence=self.occurrence)


@dataclass(frozen=True)
class FactTracer:
    """A causal trace with the same settings for every fact; the draws are each fact's own.

    Attributes:
        restoration: what is put back.
        corruption: what is disturbed; each fact draws from a seed made of this one's and its id.
        roles: tokens whose states are restored.
        layers: layers whose states are restored.
        max_bytes: memory to use beside the weights.
    """

    restoration: Restoration
    corruption: Corruption
    roles: list[str]
    layers: list[int]
    max_bytes: int

    def trace(self, model: DiffusionTransformer, fact_id: str, query: Query) -> CausalTrace:
        """One fact's trace; its record also holds the fact's id and the role of each place of the canvas.

        The grid of a fact that the model does not know has no row: of it there is the clean run only.
        """
        roles = token_roles(query)
        trace = clean_run(model, query, self.restoration, self.layers)
        if trace.known:
            places = [place for place, role in enumerate(roles) if role in self.roles]
            trace = causal_trace(
                model,
                query,
                self.restoration.kind,
                window=self.restoration.window,
                noise=self.corruption.noise,
                samples=self.corruption.samples,
                seed=fact_seed(self.corruption.seed, fact_id),
                corruption=self.corruption.kind,
                severed=self.restoration.severed,
                positions=places or [query.subject[0]],  # without these roles a fact still has its total effect
                layers=self.layers,
                max_bytes=self.max_bytes,
            )
        return replace(trace, record={**trace.record, "fact": fact_id, "roles": roles})

    def describe(self) -> dict[str, Any]:
        """For a record."""
        return {
            **self.restoration.describe(),
            **self.corruption.describe(),
            "seed": self.corruption.seed,
            "roles": self.roles,
            "layers": self.layers,
        }


@torch.no_grad()
def clean_run(
    model: DiffusionTransformer, query: Query, restoration: Restoration, layers: Sequence[int]
) -> CausalTrace:
    """A trace without rows, from one pass over one row: enough to tell whether the model knows the answer."""
    answer = Answer.of(model, query)
    logits = model(query.tokens.to(model.cfg.device)[None], logits_at=answer.rows)
    scores = answer.probabilities(logits, 1)[0, 0].cpu()
    return CausalTrace(
        scores=scores.new_empty(0, len(layers)),
        token_scores=scores.new_empty(0, len(layers), len(scores)),
        clean_token_scores=scores,
        corrupted_token_scores=torch.full_like(scores, torch.nan),
        clean=scores.prod().item(),
        corrupted=torch.nan,
        known=bool((logits.argmax(dim=-1) == answer.tokens).all()),
        str_tokens=model.words(query.tokens.tolist()),
        subject=query.subject,
        positions=[],
        layers=list(layers),
        record={**restoration.describe(), "answer": model.words(query.answer_tokens), **provenance(model, model.cfg)},
    )
