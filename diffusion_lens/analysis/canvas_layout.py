"""How facts are laid out: on which canvas each is asked. Every analysis that is given facts asks here.

A masked diffusion model is asked on a canvas of as many places as the texts that it was trained on, as `denoise` asks
it, unless a length or a number of places is given. On a shorter canvas it has no place to end its text where it learned
to, and may recall nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.facts import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer


@dataclass(frozen=True)
class CanvasLayout:
    """How facts are laid out.

    Attributes:
        length: places of the canvas in all, the prompt included, instead of `answer_places`. With neither, what `on`
            says.
        answer_places, first_tokens, occurrence: as in `Fact.to_query`.
    """

    length: int | None = None
    answer_places: int | None = None
    first_tokens: int | None = None
    occurrence: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.answer_places is not None:
            raise ValueError(f"length={self.length} and answer_places={self.answer_places}; give one of them")

    def on(self, model: DiffusionTransformer) -> "CanvasLayout":
        """This layout with the length that holds on `model`, for records.

        Without `length` and `answer_places`, and whatever `first_tokens` is, it is `cfg.trained_length` of a masked
        diffusion model, if it is known. Elsewhere a canvas has as many places as prompt and answer.
        """
        if not model.cfg.has_mask or self.length is not None or self.answer_places is not None:
            return self
        return replace(self, length=model.cfg.trained_length)

    def query(
        self,
        model: DiffusionTransformer,
        fact: Fact,
        check: Callable[[DiffusionTransformer, Query], object] | None = None,
        prepend_bos: bool | None = None,
    ) -> Query:
        """A fact on the model's canvas.

        Args:
            check: raises a `ValueError` at a canvas that cannot be used.
            prepend_bos: as in `Fact.to_query`.

        Raises:
            ValueError: a fact that the model cannot be asked.
        """
        length, places = self.on(model).length, self.answer_places
        if length is not None:
            prompt, answer = fact.tokenize(model, prepend_bos)
            places = length - len(prompt)
            if places < len(answer):
                whose = ", on which the model was trained," if length == model.cfg.trained_length else ""
                raise ValueError(
                    f"length={length}{whose} counts the prompt too, and {fact.prompt!r} has {len(prompt)} tokens, "
                    f"{fact.answer!r} {len(answer)}: give length={len(prompt) + len(answer)} or more"
                )
        query = fact.to_query(
            model,
            answer_places=places,
            first_tokens=self.first_tokens,
            occurrence=self.occurrence,
            prepend_bos=prepend_bos,
        )
        Answer.of(model, query)
        if check is not None:
            check(model, query)
        return query


def as_query(model: DiffusionTransformer, asked: Fact | Query, length: int | None = None) -> Query:
    """What an analysis of one fact is given, on a canvas: a query as it is, a fact as averages over facts lay it out.

    Args:
        length: places of a fact's canvas, where it is already known.
    """
    if isinstance(asked, Query):
        return asked
    return CanvasLayout(length if model.cfg.has_mask else None).query(model, asked)
