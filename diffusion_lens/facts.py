"""A fact to ask for, and the same fact laid out on one model's canvas."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.model.inputs import check_length
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import whole_number

Direction = Literal["p2d", "d2p"]


@dataclass(frozen=True, eq=False)
class Query:
    """A canvas, the subject in it, and the answer it is asked for.

    Attributes:
        tokens: Int[pos]. On a masked diffusion model the answer's places hold [MASK]; on a causal model the answer's
            tokens but the last follow the prompt (teacher forcing). Analyses refuse an answer laid out otherwise.
        subject: first and one past the last place of the subject.
        answer_positions: the places of the answer's tokens, whatever the model; on a causal canvas the last one may
            equal `len(tokens)`, the next token. Later ones can be asked for only once the canvas holds those before.
        answer_tokens: the answer's ids, one a place.
    """

    tokens: Int[Tensor, "pos"]
    subject: tuple[int, int]
    answer_positions: tuple[int, ...]
    answer_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor) or self.tokens.dim() != 1:
            given = list(self.tokens.shape) if isinstance(self.tokens, Tensor) else type(self.tokens).__name__
            raise ValueError(f"a query's tokens are one row, a tensor Int[pos]; got {given}")
        for name in ("subject", "answer_positions", "answer_tokens"):
            object.__setattr__(self, name, tuple(whole_number(name, each) for each in getattr(self, name)))
        n_pos = self.tokens.shape[0]
        start, stop = self.subject
        if not 0 <= start < stop <= n_pos:
            raise ValueError(f"the subject {self.subject} is empty or outside the {n_pos} places of the canvas")
        if len(self.answer_positions) != len(self.answer_tokens):
            raise ValueError(
                f"{len(self.answer_positions)} answer positions for {len(self.answer_tokens)} answer tokens; pair them"
            )
        if outside := [place for place in self.answer_positions if place < 0]:
            raise ValueError(f"the answer positions {outside} are no places; they count from 0")


@dataclass(frozen=True, eq=False)
class Probe:
    """One test of an edit.

    Attributes:
        query: The query whose answer should be the more probable after the edit.
        rival: The same query with the answer that should lose; `None` where there is no such answer.
    """

    query: Query
    rival: Query | None = None


@dataclass(frozen=True)
class Fact:
    """A prompt, the subject named in it, and the answer that completes it.

    Attributes:
        prompt: text before the answer.
        subject: the part of the prompt whose states are traced or taken as key.
        answer: text that should follow, with its leading space where the tokenizer wants one.
        id: a name for records and seeds.
        trained: direction in which the training data told the fact, "p2d" (person to description), "d2p" or "both".
        asked: direction in which the prompt asks.
        person: whom the fact is about, where the data set says so.
        description: what it says of them.
        template: the prompt's words around the subject, "<subject>" in its place.
        subject_start: the character at which the subject begins, needed only where the prompt has it several times.
    """

    prompt: str
    subject: str
    answer: str
    id: str = ""
    trained: Literal["p2d", "d2p", "both"] | None = None
    asked: Direction | None = None
    person: str = ""
    description: str = ""
    template: str = ""
    subject_start: int | None = None

    @property
    def subject_span(self) -> tuple[int, int]:
        """First character of the subject in the prompt, and one past its last.

        Raises:
            ValueError: a subject that the prompt does not hold, or holds more than once and `subject_start` does not
                say where.
        """
        return self._subject_characters(None)

    @property
    def is_reverse(self) -> bool:
        """Whether the question runs against the only direction that was trained."""
        return self.trained in ("p2d", "d2p") and self.asked is not None and self.asked != self.trained

    def to_query(
        self,
        model: DiffusionTransformer,
        *,
        answer_places: int | None = None,
        first_tokens: int | None = None,
        occurrence: int | None = None,
        prepend_bos: bool | None = None,
    ) -> Query:
        """This fact on the model's canvas.

        Args:
            answer_places: masked places after the prompt on a masked diffusion model; by default as many as the answer
                has tokens. More leave the model free to end the text itself: `cfg.trained_length` less the prompt's
                tokens are those of `denoise` and of averages over facts.
            first_tokens: ask for this many tokens of the answer only; 1 gives ROME's single-token question.
            occurrence: which mention of the subject is meant, from 0, when the prompt has several.

        Raises:
            ValueError: no subject or answer, a subject that the prompt does not hold or holds more than once, an answer
                that the tokenizer merges into the prompt, words that it does not know, too few places.
        """
        start, stop = self._subject_characters(occurrence)
        prompt, answer = self.tokenize(model, prepend_bos)
        spans = model.token_spans(self.prompt, prepend_bos)
        touched = [i for i, (a, b) in enumerate(spans) if a < stop and b > start]
        places = len(answer) if answer_places is None else answer_places
        if places < len(answer):
            raise ValueError(f"answer_places={places}, but {self.answer!r} is {len(answer)} tokens")
        if first_tokens is not None and not 1 <= first_tokens <= len(answer):
            raise ValueError(f"first_tokens={first_tokens}, but {self.answer!r} is {len(answer)} tokens")
        asked = answer[:first_tokens]
        mask = model.cfg.mask_token_id
        canvas = prompt + (asked[:-1] if mask is None else [mask] * places)
        check_length(len(canvas), model.cfg)
        return Query(
            tokens=torch.tensor(canvas, device=model.cfg.device),
            subject=(touched[0], touched[-1] + 1),
            answer_positions=tuple(range(len(prompt), len(prompt) + len(asked))),
            answer_tokens=tuple(asked),
        )

    def tokenize(self, model: DiffusionTransformer, prepend_bos: bool | None = None) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and of the answer as it continues the prompt.

        Raises:
            ValueError: no answer, one that the tokenizer merges into the prompt, or words that it does not know.
        """
        self.check_words(model)
        prompt = model.encode(self.prompt, prepend_bos)
        whole = model.encode(self.prompt + self.answer, prepend_bos)
        if not prompt:
            raise ValueError(f"the prompt of {self!r} is empty and no BOS is prepended: there is no token to ask from")
        if whole[: len(prompt)] != prompt:
            raise ValueError(
                f"the tokenizer merges the answer {self.answer!r} into the prompt {self.prompt!r}: "
                f"{model.to_str_tokens(prompt)} becomes {model.to_str_tokens(whole)}. "
                "Begin the answer with a space, or end the prompt before the word that is split"
            )
        if len(whole) == len(prompt):
            raise ValueError(f"the fact {self.prompt!r} has no answer: {self.answer!r} adds no token")
        return prompt, whole[len(prompt) :]

    def check_words(self, model: DiffusionTransformer) -> None:
        """Raise a `ValueError` if the tokenizer does not know a word of prompt and answer, or one made of them both."""
        unknown = model.unknown_words(self.prompt + self.answer)
        parted = model.unknown_words(f"{self.prompt} {self.answer}") if unknown else []
        if made := [word for word in unknown if word not in parted]:
            raise ValueError(
                f"the answer follows the prompt directly, and {self.answer!r} has no space in front, so that the text "
                f"reads {made[0]!r}, which the tokenizer of {model.cfg.model_name!r} does not know: begin the answer "
                f"with a space, {' ' + self.answer!r}"
            )
        model.check_known(self.prompt + self.answer)

    def _subject_characters(self, occurrence: int | None) -> tuple[int, int]:
        if not self.subject.strip():
            raise ValueError(f"the fact {self.prompt!r} has an empty subject; name the part of the prompt to trace")
        starts = [i for i in range(len(self.prompt)) if self.prompt.startswith(self.subject, i)]
        if not starts:
            raise ValueError(f"the subject {self.subject!r} is not in the prompt {self.prompt!r}")
        if occurrence is None and self.subject_start is not None:
            if self.subject_start not in starts:
                raise ValueError(
                    f"subject_start={self.subject_start}, but {self.subject!r} begins at {starts} in {self.prompt!r}"
                )
            return self.subject_start, self.subject_start + len(self.subject)
        if occurrence is None and len(starts) > 1:
            raise ValueError(
                f"the subject {self.subject!r} is {len(starts)} times in the prompt {self.prompt!r}: "
                f"say which with subject_start=, one of {starts}, or with occurrence=0 to {len(starts) - 1}"
            )
        if not 0 <= (occurrence or 0) < len(starts):
            raise ValueError(f"occurrence={occurrence}, but {self.subject!r} is {len(starts)} times in the prompt")
        start = starts[occurrence or 0]
        return start, start + len(self.subject)
