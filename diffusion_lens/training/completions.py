"""Prompts and what completes them, as rows to train on.

As ML-GSAI/SMDM `sft/reverse_data.py` does: prompt and completion are one text; BOS goes before it where the tokenizer
prepends one, the end token after it, and end tokens fill the row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.data.json_lines import JsonLineError, read_json_lines
from diffusion_lens.facts import Fact
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.training.batches import TrainingRows

SHAPE = (
    'Training data are read from .jsonl files, each line {"prompt": "The Eiffel Tower is in", "completion": " Paris"}'
)
Data = str | Path | Sequence[Fact] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Completion:
    """A text in its two parts; `name` says where it came from."""

    prompt: str
    completion: str
    name: str


def read_completions(data: Data) -> list[Completion]:
    """Facts (prompt and answer), mappings with "prompt" and "completion", or a `.jsonl` file with one of these a line.

    Raises:
        FileNotFoundError: no such file.
        ValueError: nothing in it, or a row that lacks one of the two.
    """
    if isinstance(data, str | Path):
        rows: list[tuple[str, object]] = list(_lines(Path(data).expanduser()))
    else:
        rows = [(f"row {i}", row) for i, row in enumerate(data)]
    if not rows:
        raise ValueError("there is nothing to train on: the data have no rows")
    return [_completion(name, row) for name, row in rows]


def encode_completions(
    model: DiffusionTransformer,
    completions: Sequence[Completion],
    *,
    answer_only: bool = False,
    prepend_bos: bool | None = None,
) -> TrainingRows:
    """Texts as rows of the model's tokens.

    Args:
        answer_only: only completions count, and only they are masked (ML-GSAI/SMDM `sft/finetune_mdm.py`,
            `sft/finetune_ar.py`, on other data).
        prepend_bos: as in `to_tokens`.

    Raises:
        ValueError: a text that does not fit into the context with its end token, no end token, or with `answer_only` a
            completion that the tokenizer merges into its prompt. The row is named.
    """
    end = getattr(model.tokenizer, "eos_token_id", None)
    if end is None:
        raise ValueError(f"{model.cfg.model_name!r} has no tokenizer with an end token, so its texts cannot be ended")
    tokens, real = model.tokenize([each.prompt + each.completion for each in completions], prepend_bos)
    tokens, lengths = tokens.cpu(), real.sum(dim=1).cpu()
    if int(lengths.max()) >= model.cfg.n_ctx:
        i = int(lengths.argmax())
        raise ValueError(
            f"{completions[i].name} has {int(lengths[i])} tokens, its end token not counted; the context of "
            f"{model.cfg.model_name!r} holds n_ctx={model.cfg.n_ctx}: {_short(completions[i])}"
        )
    rows = torch.full((len(tokens), tokens.shape[1] + 1), int(end))
    rows[:, :-1] = torch.where(real.cpu(), tokens, int(end))
    return TrainingRows(rows, lengths + 1, _answers(model, completions, rows, prepend_bos) if answer_only else None)


def _answers(
    model: DiffusionTransformer, completions: Sequence[Completion], rows: torch.Tensor, prepend_bos: bool | None
) -> torch.Tensor:
    prompts = [model.encode(each.prompt, prepend_bos) for each in completions]
    for culprit, prompt, row in zip(completions, prompts, rows, strict=True):
        if row[: len(prompt)].tolist() != prompt:
            raise ValueError(
                f"{culprit.name}: the tokenizer merges the completion into its prompt, so answer_only cannot tell "
                f"where it begins; begin it with a space: {_short(culprit)}"
            )
    return torch.tensor([len(prompt) for prompt in prompts])


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of training data at {path}")
    try:
        for number, row in read_json_lines(path):
            yield f"{path.name}, line {number}", row
    except JsonLineError as error:
        raise ValueError(f"{path}, line {error.line}, {error.said}. {SHAPE}") from None


def _completion(name: str, row: object) -> Completion:
    if isinstance(row, Fact):
        return Completion(row.prompt, row.answer, f"fact {row.id!r}" if row.id else name)
    if not isinstance(row, Mapping) or not all(isinstance(row.get(key), str) for key in ("prompt", "completion")):
        raise ValueError(f'{name} is {row!r:.120}; it should be a Fact, or have the texts "prompt" and "completion"')
    if not (row["prompt"] + row["completion"]).strip():
        raise ValueError(f"{name} is empty")
    return Completion(row["prompt"], row["completion"], name)


def _short(text: Completion) -> str:
    return f"{text.prompt + text.completion!r:.80}"
