"""How facts are laid out: on which canvas each is asked."""

from collections.abc import Callable
from dataclasses import dataclass

from diffusion_lens.analysis.causal_tracing.answer import Answer
from diffusion_lens.facts import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer


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

    def query(
        self,
        model: DiffusionTransformer,
        fact: Fact,
        check: Callable[[DiffusionTransformer, Query], object] | None = None,
    ) -> Query:
        """A fact on the model's canvas.

        Args:
            check: raises a `ValueError` at a canvas that cannot be used.

        Raises:
            ValueError: a fact that the model cannot be asked.
        """
        places = self.answer_places if self.length is None else self.length - len(fact.tokenize(model)[0])
        query = fact.to_query(model, answer_places=places, first_tokens=self.first_tokens, occurrence=self.occurrence)
        Answer.of(model, query)
        if check is not None:
            check(model, query)
        return query
