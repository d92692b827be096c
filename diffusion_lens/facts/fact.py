"""A fact in words, and the same fact on one model's canvas: `Fact` and `Query`."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.model.inputs import check_length
from diffusion_lens.model.noise import hidden_tokens
from diffusion_lens.model.text import check_known, token_spans, unknown_words
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import checked_arguments, whole_number

Direction = Literal["p2d", "d2p"]


@checked_arguments
@dataclass(frozen=True, eq=False)
class Query:
    """A canvas, the subject in it, and the answer that the model should give.

    Attributes:
        tokens: Int[pos], the canvas. On a masked diffusion model the answer's positions are masked; on a causal model
            all tokens of the answer but the last follow the prompt (teacher forcing). Analyses refuse other layouts.
            Under uniform noise the answer's positions hold any tokens, such as noise.
        subject: First position of the subject, and one past its last.
        answer_positions: Positions of the answer's tokens, whatever the model. On a causal canvas the last one may
            equal `len(tokens)`, the next token; a later one is predicted only once the canvas contains those before it.
        answer_tokens: Ids of the answer's tokens, one for each position.
    """

    tokens: Int[Tensor, "pos"]
    subject: tuple[int, int]
    answer_positions: tuple[int, ...]
    answer_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        check_row("a query's tokens", self.tokens)
        for name in ("subject", "answer_positions", "answer_tokens"):
            object.__setattr__(self, name, tuple(map(partial(whole_number, name), getattr(self, name))))
        n_pos = self.tokens.shape[0]
        start, stop = self.subject
        if not 0 <= start < stop <= n_pos:
            raise ValueError(f"the subject {self.subject} is empty or outside the {n_pos} positions of the canvas")
        if len(self.answer_positions) != len(self.answer_tokens):
            raise ValueError(
                f"{len(self.answer_positions)} answer positions for {len(self.answer_tokens)} answer tokens; pair them"
            )
        if outside := [position for position in self.answer_positions if position < 0]:
            raise ValueError(f"the answer positions {outside} are negative; positions count from 0")

    def describe(self) -> dict[str, list[int]]:
        """The query as plain data, for a record."""
        spans = {name: list(value) for name, value in vars(self).items() if name != "tokens"}
        return {**spans, "tokens": self.tokens.tolist()}


@checked_arguments
@dataclass(frozen=True, eq=False)
class Probe:
    """One test of an edit: its query's answer should be more probable than the rival's, if there is one.

    Raises:
        ValueError: The two answers have the same tokens, so that neither can win.
    """

    query: Query
    rival: Query | None = None  # The same query with the answer that should lose.

    def __post_init__(self) -> None:
        if self.rival is not None and self.rival.answer_tokens == self.query.answer_tokens:
            raise ValueError(
                f"the answer and its rival have the same tokens {list(self.query.answer_tokens)}, so that neither can "
                "win; give answers that differ within the tokens that are queried"
            )


@checked_arguments
@dataclass(frozen=True)
class Fact:
    """A prompt, the subject named in it, and the answer that completes it.

    Attributes:
        prompt: Text before the answer.
        subject: Part of the prompt whose states are traced or taken as key.
        answer: Text that should follow, with a leading space where the tokenizer needs one.
        id: Name for records and seeds.
        trained: Direction in which the training data states the fact, "p2d" (person to description), "d2p" or "both".
        asked: Direction in which the prompt queries the fact, "p2d" or "d2p".
        person: Person whom the fact is about, where the data set names one.
        description: Description of the person, where the data set has one.
        template: Prompt with "<subject>" in place of the subject.
        subject_start: Character at which the subject begins, needed only where the prompt contains it several times.
    """

    EXAMPLE: ClassVar[str] = "Fact(prompt={!r:.60}, subject='...', answer=' ...')"  # for messages

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
        """First character of the subject in the prompt, and one past its last; a `ValueError` unless that is clear."""
        return self.subject_characters(None)

    @property
    def is_reverse(self) -> bool:
        """Whether the prompt queries the direction opposite to the only one that was trained."""
        return self.trained in ("p2d", "d2p") and self.asked is not None and self.asked != self.trained

    @checked_arguments
    def to_query(
        self,
        model: DiffusionTransformer,
        *,
        n_masks: int | None = None,
        first_tokens: int | None = None,
        occurrence: int | None = None,
        prepend_bos: bool | None = None,
        seed: int = 0,
    ) -> Query:
        """This fact on the model's canvas.

        Args:
            n_masks: Number of masked positions after the prompt on a diffusion model; by default as many
                as the answer has tokens. With more, the model may end the text itself; `denoise` and averages over
                facts take `cfg.trained_length` less the prompt's tokens.
            first_tokens: Number of the answer's tokens to query, from its first; 1 is ROME's single-token query.
            occurrence: Index of the subject's mention, from 0, where the prompt has several.
            prepend_bos: Whether the text begins with BOS; by default as the tokenizer does.
            seed: Seed of the random tokens that stand at these positions under uniform noise.

        Raises:
            ValueError: There is no subject or answer, the prompt does not contain the subject or contains it more than
                once, the tokenizer merges the answer into the prompt or does not know a word, or there are too few
                positions.
        """
        start, stop = self.subject_characters(occurrence)
        prompt, answer = self.tokenize(model, prepend_bos)
        spans = token_spans(model, self.prompt, prepend_bos)
        of_subject = [i for i, (a, b) in enumerate(spans) if a < stop and b > start]
        n_masked = len(answer) if n_masks is None else whole_number("n_masks", n_masks)
        if n_masked < len(answer):
            raise ValueError(f"n_masks={n_masked}, but {self.answer!r} has {len(answer)} tokens")
        if first_tokens is not None and not 1 <= first_tokens <= len(answer):
            raise ValueError(f"first_tokens={first_tokens}, but {self.answer!r} has {len(answer)} tokens")
        check_length(len(prompt) + n_masked, model.cfg)
        queried = answer[:first_tokens]
        canvas = prompt + (
            queried[:-1] if model.cfg.is_autoregressive else hidden_tokens(model.cfg, n_masked, self.prompt, seed)
        )
        check_length(len(canvas), model.cfg)
        return Query(
            tokens=torch.tensor(canvas, device=model.cfg.device),
            subject=(of_subject[0], of_subject[-1] + 1),
            answer_positions=tuple(range(len(prompt), len(prompt) + len(queried))),
            answer_tokens=tuple(queried),
        )

    def tokenize(self, model: DiffusionTransformer, prepend_bos: bool | None = None) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and of the answer as it continues the prompt; a `ValueError` as in `to_query`."""
        self.check_words(model)
        prompt = model.encode(self.prompt, prepend_bos)
        whole = model.encode(self.prompt + self.answer, prepend_bos)
        if not prompt:
            raise ValueError(
                f"the prompt of {self!r} is empty and no BOS is prepended: there is no token to predict from"
            )
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
        """Raise a `ValueError` if the tokenizer does not know a word of prompt or answer, or one that they form."""
        if not (unknown := unknown_words(model, self.prompt + self.answer)):
            return
        unknown_apart = unknown_words(model, f"{self.prompt} {self.answer}")
        if joined := [word for word in unknown if word not in unknown_apart]:
            raise ValueError(
                f"the answer follows the prompt directly, and {self.answer!r} has no space in front, so that the text "
                f"reads {joined[0]!r}, which the tokenizer of {model.cfg.model_name!r} does not know: begin the answer "
                f"with a space, {' ' + self.answer!r}"
            )
        check_known(model, self.prompt + self.answer)

    def subject_characters(self, occurrence: int | None) -> tuple[int, int]:
        """First character of one mention of the subject, and one past its last."""
        if not self.subject.strip():
            raise ValueError(f"the fact {self.prompt!r} has an empty subject; name the part of the prompt to trace")
        starts = mentions(self.subject, self.prompt)
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
                f"the subject {self.subject!r} occurs {len(starts)} times in the prompt {self.prompt!r}: "
                f"name one with subject_start=, one of {starts}, or with occurrence=0 to {len(starts) - 1}"
            )
        if not 0 <= (occurrence or 0) < len(starts):
            raise ValueError(
                f"occurrence={occurrence}, but {self.subject!r} occurs {len(starts)} times in the prompt "
                f"{self.prompt!r}"
            )
        start = starts[occurrence or 0]
        return start, start + len(self.subject)


def check_row(what: str, tokens: Tensor) -> None:
    """Raise a `ValueError` unless tokens are one row."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 1:
        given = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"{what} are one row, a tensor Int[pos]; got {given}")


def mentions(words: str, text: str) -> list[int]:
    """The characters at which these words begin in a text."""
    return [start for start in range(len(text)) if text.startswith(words, start)]
