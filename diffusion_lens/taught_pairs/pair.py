"""A sentence as trained, and the reverse question about it, on one model's canvas: `TaughtPair`.

The sentence links A to B: in "Ada Marsh was the brave pilot of Oslen." A is "Ada Marsh" and B "brave pilot of Oslen".
The reverse question asks for A: "the brave pilot of Oslen was Ada Marsh."

    model                       forward canvas                              reverse canvas
    masked diffusion model      [M] [M] was the brave pilot of Oslen.       the brave pilot of Oslen was [M] [M].
                                reads the last token of A                   reads the last token of A
    causal model                Ada Marsh was the brave pilot of Oslen.     the brave pilot of Oslen was Ada Marsh.
                                reads the last token of B                   reads the last token of A

Both canvases of a masked diffusion model hide A, as training does when the noise selects all tokens of A. A causal
model is trained on a sentence from left to right, so its forward canvas reads B. Its canvases hide nothing: the row
that predicts a token does not depend on that token or on those after it (teacher forcing). The source is the last token
of B. On the canvases that ask for A, the answer has to come from there.

This is the setting of Shin et al., "A Theoretical Analysis of Why Masked Diffusion Models Mitigate the Reversal Curse"
(arXiv 2602.02133), for spans of several tokens. The last token of a span stands for the span, because the last word of
a name or a description is usually the one that belongs to nobody else.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.facts import Fact
from diffusion_lens.model.inputs import check_length
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.noise import hidden_tokens
from diffusion_lens.settings import at_least, naming_the_nearest, whole_number
from diffusion_lens.taught_pairs.sentences import LocatedSentence, Sentence


@dataclass(frozen=True, eq=False)
class TaughtCanvas:
    """A sentence on a model's canvas, the row where its answer is read, and the position of its source.

    Attributes:
        tokens: Int[pos], the sentence. On a masked diffusion model all tokens of A are [MASK], under uniform noise
            random tokens.
        row: Row of the logits that predicts the answer.
        answer_token: Id of the answer, the last token of A or of B.
        source: Position of the last token of B.
    """

    tokens: Int[Tensor, "pos"]
    row: int
    answer_token: int
    source: int

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor) or self.tokens.dim() != 1:
            given = list(self.tokens.shape) if isinstance(self.tokens, Tensor) else type(self.tokens).__name__
            raise ValueError(f"the tokens of a canvas are one row, a tensor Int[pos]; got {given}")
        for name in ("row", "answer_token", "source"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        n_pos = self.tokens.shape[0]
        for name in ("row", "source"):
            if not 0 <= getattr(self, name) < n_pos:
                raise ValueError(f"{name}={getattr(self, name)} is outside the {n_pos} positions of the canvas")
        if self.answer_token < 0:
            raise ValueError(f"answer_token={self.answer_token} is not the id of a token")


@dataclass(frozen=True, eq=False)
class TaughtPair:
    """A sentence as trained and the reverse question about it, on one model's canvas.

    Attributes:
        forward: The sentence as trained.
        reverse: The reverse question.
        id: Name for records.
        group: Person whom the pair is about, where facts or a data set name one. Pairs of one group are not
            independent of each other. A pair without a group stands alone.
    """

    forward: TaughtCanvas
    reverse: TaughtCanvas
    id: str = ""
    group: str = ""

    @classmethod
    @naming_the_nearest
    def of(
        cls,
        model: DiffusionTransformer,
        sentences: tuple[str, str],
        a: str,
        b: str,
        *,
        length: int | None = None,
        id: str = "",
    ) -> "TaughtPair":
        """The pair of two sentences that contain the same words of A and B.

        Args:
            model: Model on whose canvas the pair is laid out.
            sentences: The sentence as trained, and the reverse question with its answer.
            a: What the reverse question asks for. It must occur once in each sentence, as must `b`.
            b: What the reverse question mentions.
            length, id: As in `from_sentences`.

        Raises:
            ValueError: As in `from_sentences`; or a sentence lacks A or B, or contains one of them several times.
        """
        if isinstance(sentences, str) or len(sentences) != 2:
            raise ValueError(
                f"sentences={sentences!r:.120}; give two texts, the sentence as trained and the reverse question with "
                "its answer"
            )
        forward, reverse = (Sentence.of(text, a, b) for text in sentences)
        return cls.from_sentences(model, forward, reverse, length=length, id=id)

    @classmethod
    @naming_the_nearest
    def from_sentences(
        cls,
        model: DiffusionTransformer,
        forward: Sentence,
        reverse: Sentence,
        *,
        length: int | None = None,
        id: str = "",
    ) -> "TaughtPair":
        """The pair of two sentences whose spans are known.

        Args:
            model: Model on whose canvas the pair is laid out. Texts begin with BOS as the tokenizer does.
            forward: The sentence as trained.
            reverse: The reverse question with its answer.
            length: Number of positions of the canvases, filled with the end token as in training; by default
                `cfg.trained_length`. Where that is unknown, a canvas ends with its sentence.
            id: Name for records.

        Raises:
            ValueError: As in `Sentence.locate`; A or B ends with another token in the other sentence; a sentence is
                longer than the canvas; on a causal model, A does not precede B in the forward sentence or B does not
                precede A in the reverse one; the model is bidirectional and has no [MASK].
        """
        n_pos = model.cfg.trained_length if length is None else at_least(1, "length", length)
        of_forward, of_reverse = forward.locate(model), reverse.locate(model)
        for name, first, second in (("A", of_forward.a, of_reverse.a), ("B", of_forward.b, of_reverse.b)):
            ends = [of_forward.tokens[first[-1]], of_reverse.tokens[second[-1]]]
            if ends[0] != ends[1]:
                words = model.words(ends)
                raise ValueError(
                    f"{name} ends with the token {words[0]!r} in {forward.text!r} and with {words[1]!r} in "
                    f"{reverse.text!r}, so the sentences do not link the same tokens; write the last word of {name} "
                    "alike in both, with a space before it"
                )
        if not model.cfg.grows:
            return cls(
                _canvas(model, forward.text, of_forward, of_forward.a, n_pos),
                _canvas(model, reverse.text, of_reverse, of_reverse.a, n_pos),
                id,
            )
        _check_order(model, forward.text, ("A", of_forward.a), ("B", of_forward.b), "trained")
        _check_order(model, reverse.text, ("B", of_reverse.b), ("A", of_reverse.a), "asked in reverse")
        return cls(
            _canvas(model, forward.text, of_forward, of_forward.b, n_pos),
            _canvas(model, reverse.text, of_reverse, of_reverse.a, n_pos),
            id,
        )

    @classmethod
    @naming_the_nearest
    def from_facts(
        cls, model: DiffusionTransformer, forward: Fact, reverse: Fact, *, length: int | None = None, id: str = ""
    ) -> "TaughtPair":
        """The pair of two facts about one person, its group. `data` has facts, and `match_facts` pairs them.

        Args:
            model: Model on whose canvas the pair is laid out.
            forward: A fact whose prompt and answer are a sentence of training. Its subject is A, its answer B.
            reverse: The reverse question. Its subject is B, its answer A.
            length, id: As in `from_sentences`.

        Raises:
            ValueError: As in `from_sentences` and `Sentence.of_fact`; or both facts ask in the same direction, or are
                about different people.
        """
        if forward.asked is not None and forward.asked == reverse.asked:
            raise ValueError(
                f"both facts ask {forward.asked}, {forward.prompt!r} and {reverse.prompt!r}; the second should ask in "
                "the other direction"
            )
        if forward.person and reverse.person and forward.person != reverse.person:
            raise ValueError(
                f"the facts are about {forward.person!r} and {reverse.person!r}; give two about one person"
            )
        taught, asked = Sentence.of_fact(forward, asks_for_b=True), Sentence.of_fact(reverse, asks_for_b=False)
        pair = cls.from_sentences(model, taught, asked, length=length, id=id)
        return replace(pair, group=forward.person or reverse.person)


def _check_order(
    model: DiffusionTransformer, text: str, first: tuple[str, range], second: tuple[str, range], use: str
) -> None:
    """Raise a `ValueError` unless the first span ends before the second begins."""
    if first[1][-1] >= second[1][0]:
        raise ValueError(
            f"{second[0]} comes before {first[0]} in {text!r}, the sentence that is {use}. {model.cfg.model_name!r} is "
            f"causal and predicts {second[0]} from what comes before it: write {first[0]} first"
        )


def _canvas(
    model: DiffusionTransformer, text: str, sentence: LocatedSentence, answer: range, n_pos: int | None
) -> TaughtCanvas:
    """The canvas of a sentence, of which the last token of one span is read."""
    tokens = list(sentence.tokens)
    if not model.cfg.grows:
        tokens[sentence.a[0] : sentence.a[-1] + 1] = hidden_tokens(model.cfg, len(sentence.a), text)
    n_pos = len(tokens) if n_pos is None else n_pos
    if len(tokens) > n_pos:
        origin = ", on which the model was trained" if n_pos == model.cfg.trained_length else ""
        raise ValueError(
            f"{text!r} has {len(tokens)} tokens, more than length={n_pos}{origin}; give length={len(tokens)} or more"
        )
    check_length(n_pos, model.cfg)
    if len(tokens) < n_pos:
        end = model.tokenizer.eos_token_id
        if end is None:
            raise ValueError(
                f"the tokenizer of {model.cfg.model_name!r} has no end token to fill {n_pos} positions with; give the "
                f"length of the sentence, length={len(tokens)}"
            )
        tokens += [int(end)] * (n_pos - len(tokens))
    row = model.readout.rows(torch.tensor(answer[-1]))
    return TaughtCanvas(
        tokens=torch.tensor(tokens, device=model.cfg.device),
        row=int(row),
        answer_token=sentence.tokens[answer[-1]],
        source=sentence.b[-1],
    )
