"""Exact match: a fact counts as known when the model writes its answer, and stops there.

The prompt is completed by the denoising loop (on the autoregressive twin from left to right). Correct means that the
places after the prompt hold the answer's tokens followed by the end token; what comes after that is not looked at.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from diffusion_lens.analysis.usable_facts import sort_out
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.evaluation.batches import by_length
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.identity import begins_run
from diffusion_lens.records import load_result, provenance, save_result
from diffusion_lens.seeds import own_seed


@dataclass(frozen=True)
class Answer:
    """What a model made of one fact: the text it wrote after the prompt, and whether that was right."""

    fact: Fact
    written: str
    correct: bool


@dataclass(frozen=True)
class ExactMatch:
    """The answers, in the order of the facts, and the settings and model they come from."""

    answers: tuple[Answer, ...]
    record: dict[str, Any]

    @property
    def set_aside(self) -> dict[str, str]:
        """Facts that the model cannot be asked, and why."""
        reasons: dict[str, str] = self.record["set_aside"]
        return reasons

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return sum(answer.correct for answer in self.answers) / len(self.answers)

    def table(self) -> dict[tuple[str | None, str | None], float]:
        """Accuracy by (direction trained, direction asked)."""
        cells: dict[tuple[str | None, str | None], list[bool]] = {}
        for answer in self.answers:
            cells.setdefault((answer.fact.trained, answer.fact.asked), []).append(answer.correct)
        return {cell: sum(correct) / len(correct) for cell, correct in cells.items()}

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        correct = torch.tensor([answer.correct for answer in self.answers])
        answers = [{"fact": asdict(answer.fact), "written": answer.written} for answer in self.answers]
        return save_result(path, "exact match", {"correct": correct}, {"answers": answers, "record": self.record})

    @classmethod
    def load(cls, path: str | Path) -> "ExactMatch":
        """Read what `save` wrote."""
        tensors, record = load_result(path, "exact match")
        answers = tuple(
            Answer(Fact(**answer["fact"]), answer["written"], correct)
            for answer, correct in zip(record["answers"], tensors["correct"].tolist(), strict=True)
        )
        return cls(answers, record["record"])


@dataclass(frozen=True)
class _Question:
    """A fact in tokens; `end` follows the answer."""

    index: int
    prompt: tuple[int, ...]
    expected: tuple[int, ...]


@begins_run
def exact_match(
    model: HookedDiffusionTransformer,
    facts: Sequence[Fact],
    *,
    length: int | None = None,
    max_new_tokens: int | None = None,
    steps: int = 8,
    sampler: str | Sampler | None = None,
    cfg_scale: float = 0.0,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 100,
    progress: bool = False,
) -> ExactMatch:
    """Ask every fact once.

    Args:
        length: places in all, prompt, answer and end token included; or
        max_new_tokens: places after the prompt. Exactly one of the two, as in `model.denoise`.
        batch_size: most prompts in one batch; only prompts of equal length share one.

    Raises:
        ValueError: no facts, a setting out of range, or no fact that can be asked. A single one that cannot (its answer
            does not fit behind its prompt, or `Fact.tokenize` refuses it) is set aside: it has no answer in the result,
            and `ExactMatch.set_aside` says why.
    """
    if not facts:
        raise ValueError("there is nothing to ask: facts is empty")
    if (length is None) == (max_new_tokens is None):
        raise ValueError("give either length= (places in all) or max_new_tokens= (places after the prompt)")
    places = {str(index): fact for index, fact in enumerate(facts)}
    asked, refused = sort_out(places, lambda fact: _question(model, fact, length, max_new_tokens))
    questions = [replace(question, index=int(place)) for place, question in asked.items()]
    answers: dict[int, Answer] = {}
    with tqdm(total=len(facts), desc="exact match", unit="fact", disable=not progress) as bar:
        bar.update(len(refused))
        for batch in by_length(questions, lambda question: len(question.prompt), batch_size):
            prompts = torch.tensor([question.prompt for question in batch])
            trajectory = model.denoise(
                prompts,
                attention_mask=torch.ones_like(prompts),
                length=length,
                max_new_tokens=max_new_tokens,
                steps=steps,
                sampler=sampler,
                cfg_scale=cfg_scale,
                temperature=temperature,
                seed=[own_seed(seed, question.index) for question in batch],
            )
            for question, row in zip(batch, trajectory.tokens.tolist(), strict=True):
                written = row[len(question.prompt) :]
                correct = tuple(written[: len(question.expected)]) == question.expected
                answers[question.index] = Answer(facts[question.index], model.to_string(written), correct)
            bar.update(len(batch))
    record = {
        "length": length,
        "max_new_tokens": max_new_tokens,
        "steps": steps,
        "sampler": trajectory.record["sampler"],
        "cfg_scale": cfg_scale,
        "temperature": temperature,
        "seed": seed,
        "set_aside": {places[place].id or f"fact {place}": reason for place, reason in refused.items()},
        **provenance(model, model.cfg),
    }
    return ExactMatch(tuple(answers[index] for index in sorted(answers)), record)


def _question(
    model: HookedDiffusionTransformer, fact: Fact, length: int | None, max_new_tokens: int | None
) -> _Question:
    prompt, answer = fact.tokenize(model)
    end = model.tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"the tokenizer of {model.cfg.model_name!r} has no end token, so no answer can be complete")
    room = max_new_tokens if length is None else length - len(prompt)
    if room is not None and room < len(answer) + 1:
        raise ValueError(
            f"fact {fact.id!r} needs {len(answer) + 1} places after its prompt of {len(prompt)} tokens, the end token "
            f"included; there are {room}"
        )
    return _Question(0, tuple(prompt), (*answer, int(end)))
