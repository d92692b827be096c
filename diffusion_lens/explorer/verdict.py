"""Where the text of a run ends, what the run wrote up to there, and whether that is the answer.

An answer counts as right where the text after the prompt has it as whole words, ignoring case and outer spaces: " Ann"
is not right in "Annabel Lee". The score "contained" of `evaluation.recall_by_steps`, SMDM's accuracy, takes any part of
the text, so that it counts "Annabel" too. The text is read up to its first end token, which is what a page shows;
`recall_by_steps` also reads what a diffusion model writes behind it.
"""

import re
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any

import torch

from diffusion_lens.denoising.generate import end_tokens
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.text import END_TEXTS, to_completion
from diffusion_lens.model.transformer import DiffusionTransformer


def verdict_of(answer: str | None, wrote: str) -> dict[str, Any] | None:
    """The manifest's entry of a verdict, {"right", "wrote", "answer"}; `None` without an answer."""
    return None if answer is None else {"right": has_words(answer, wrote), "wrote": wrote, "answer": answer}


def has_words(answer: str, wrote: str) -> bool:
    """Whether a text has an answer as whole words, ignoring case and outer spaces.

    No letter, digit or underscore continues a word of the answer on either side. Scripts of wide characters, such as
    Chinese, put no spaces between words, so there the answer may stand anywhere.
    """
    plain, text = answer.strip().lower(), wrote.lower()
    before, after = r"(?<!\w)" if _ends_word(plain[:1]) else "", r"(?!\w)" if _ends_word(plain[-1:]) else ""
    return re.search(f"{before}{re.escape(plain)}{after}", text) is not None


def _ends_word(char: str) -> bool:
    """Whether a letter at the edge of an answer must be the edge of a word."""
    return re.match(r"\w", char) is not None and unicodedata.east_asian_width(char) != "W"


def written_by(model: DiffusionTransformer, run: Trajectory, row: int = 0) -> tuple[int | None, str]:
    """Position of the first end token that the run wrote, `None` if there is none, and its text up to there."""
    end = end_of(run, row, [] if model.tokenizer is None else end_tokens(model, None))
    written = ~run.given[row] & run.real[row]
    return end, to_completion(model, run.tokens[row][:end][written[:end]]) if model.tokenizer is not None else ""


def recorded_by(run: Trajectory, row: int) -> tuple[int | None, str]:
    """The same from the texts of a run alone, of which `END_TEXTS` are end tokens."""
    end, completion = end_of(run, row, _ids(run.words)), run.completion[row]
    if end is None or not completion:
        return end, completion
    written = (~run.given[row] & run.real[row])[:end]
    words = [run.words[token] for token in run.tokens[row][:end][written].tolist()]
    # Tokens of most vocabularies contain their spaces; of a vocabulary of words the completion shows where they stand.
    place = 0
    for word in words:
        found = completion.find(word.strip(), place)
        place = place if found < 0 else found + len(word.strip())
    return end, completion[:place]


def end_of(run: Trajectory, row: int, ends: Collection[int]) -> int | None:
    """The first position of one row at which the run wrote one of these tokens; `None` if there is none."""
    written = ~run.given[row] & run.real[row]
    found = written & torch.isin(run.tokens[row], torch.tensor(list(ends), dtype=torch.long, device=run.tokens.device))
    return int(found.int().argmax()) if bool(found.any()) else None


def _ids(words: Mapping[int, str]) -> list[int]:
    return [token for token, text in words.items() if text.strip() in END_TEXTS]
