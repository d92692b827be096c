"""The layout of facts on canvases, which every analysis of facts shares.

By default the canvas of a masked diffusion model is as long as the texts that the model was trained on, as in
`denoise`. On a shorter canvas the model cannot end its text where it learned to, and may recall nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from diffusion_lens.analysis.answer import check_answer
from diffusion_lens.facts import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import at_least


@dataclass(frozen=True)
class CanvasLayout:
    """The settings by which facts are laid out.

    Attributes:
        length: Number of positions of the canvas with the prompt, as an alternative to `n_masks`. With neither,
            `on` sets it.
        n_masks, first_tokens, occurrence: Settings of `Fact.to_query`.
    """

    length: int | None = None
    n_masks: int | None = None
    first_tokens: int | None = None
    occurrence: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("n_masks", 1), ("first_tokens", 1), ("occurrence", 0)):
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, at_least(least, name, number))
        if self.length is not None and self.n_masks is not None:
            raise ValueError(f"length={self.length} and n_masks={self.n_masks}; give one of them")

    def on(self, model: DiffusionTransformer) -> "CanvasLayout":
        """This layout with the length that applies to `model`.

        A given length or number of masked positions stays. Otherwise the length is `cfg.trained_length` of a masked
        diffusion model, whatever `first_tokens` is. Where that is unknown, and where the text grows, a canvas has as
        many positions as prompt and answer.
        """
        if model.cfg.grows or self.length is not None or self.n_masks is not None:
            return self
        return replace(self, length=model.cfg.trained_length)

    def query(
        self,
        model: DiffusionTransformer,
        fact: Fact,
        check: Callable[[DiffusionTransformer, Query], object] | None = None,
        prepend_bos: bool | None = None,
    ) -> Query:
        """A fact laid out on the model's canvas.

        Args:
            check: Function that raises a `ValueError` for a canvas that cannot be used.
            prepend_bos: Setting of `Fact.to_query`.

        Raises:
            ValueError: A fact that cannot be laid out for this model.
        """
        length, n_masks = self.on(model).length, self.n_masks
        if length is not None:
            prompt, answer = fact.tokenize(model, prepend_bos)
            n_masks = length - len(prompt)
            if n_masks < len(answer):
                origin = ", on which the model was trained," if length == model.cfg.trained_length else ""
                raise ValueError(
                    f"length={length}{origin} counts the prompt too, and {fact.prompt!r} has {len(prompt)} tokens, "
                    f"{fact.answer!r} {len(answer)}: give length={len(prompt) + len(answer)} or more"
                )
        query = fact.to_query(
            model,
            n_masks=n_masks,
            first_tokens=self.first_tokens,
            occurrence=self.occurrence,
            prepend_bos=prepend_bos,
        )
        check_answer(model, query)
        if check is not None:
            check(model, query)
        return query


def as_query(model: DiffusionTransformer, fact_or_query: Fact | Query, length: int | None = None) -> Query:
    """A query as it is, or a fact laid out on the default canvas.

    Args:
        length: Number of positions of a fact's canvas, where it is already known.
    """
    if isinstance(fact_or_query, Query):
        return fact_or_query
    return CanvasLayout(None if model.cfg.grows else length).query(model, fact_or_query)
