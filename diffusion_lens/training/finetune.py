"""Fine-tuning on prompts and completions. It reads texts and writes a checkpoint in the family's own format.

Rows are laid out as in ML-GSAI/SMDM `sft/reverse_data.py`. Prompt and completion form one text. BOS precedes it if the
tokenizer prepends one, the end token follows it, and more end tokens fill the row.

Entities, such as names, can be masked as wholes (`mask_entities`; He et al. 2026, arXiv 2601.07347, and `model.loss`).
The data say what they are: the subject and the answer of a fact, without the punctuation that ends it, or the
"entities" of a row, each a text of which every mention counts, or [start, stop] in characters of prompt + completion.
Tokens that contain characters of an entity, spaces aside, belong to it, and entities that share a token are one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.data.download import read_json_lines
from diffusion_lens.facts.fact import Fact, mentions
from diffusion_lens.loading import save_tokenizer, write_trained_length
from diffusion_lens.model.text import token_spans
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import checked_arguments
from diffusion_lens.training.trainer import (
    Evaluate,
    RunFolder,
    TrainingConfig,
    TrainingRecord,
    TrainingRows,
    accelerated,
    describe_run,
    require_noise,
    train,
)
from weight_conversion import CHECKPOINT_SUFFIXES, export, open_checkpoint

WEIGHTS = "model.safetensors"
MARKS = ".,:;?!"  # at the end of an answer, no part of the entity
# The training has its own subfolder, because `from_pretrained` needs a folder with one .safetensors file only.
RUN, RECORD = "training", "record.safetensors"
SHAPE = (
    "Training data are read from .jsonl files with one object per line, such as "
    '{"prompt": "The Eiffel Tower is in", "completion": " Paris"}'
)
Data = str | Path | Sequence[Fact] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Completion:
    """A training text in two parts, and its source for error messages and entities."""

    prompt: str
    completion: str
    name: str
    source: Fact | Mapping[str, Any]


@checked_arguments
def finetune(
    model: DiffusionTransformer,
    data: Data,
    config: TrainingConfig,
    out: str | Path,
    *,
    answer_only: bool = False,
    mask_entities: bool = False,
    prepend_bos: bool | None = None,
    checkpoint_every: int = 500,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 500,
    progress: bool = True,
) -> TrainingRecord:
    """Train `model` in place on texts, and write a folder that `from_pretrained(out)` loads.

    The folder contains the weights and the config in the family's own format, the tokenizer, and `trained_length.json`
    with the canvas length of training, if it is known. The subfolder `training` contains `run.json`, the
    `TrainingRecord` as `record.safetensors`, and the checkpoint until the training is complete. The same call resumes
    an interrupted training, and only reads a complete one.

    Each variant is trained by its own loss: a masked diffusion model with noise on prompt and completion, the AR
    baseline on the next token. Rows are laid out as in SMDM's fine-tuning, whose recipe is `smdm_reverse`.

    Args:
        model: Model to train.
        data: Facts, mappings with "prompt" and "completion", or the path of a `.jsonl` file of such rows.
        config: Recipe of the training.
        out: Folder for the trained model.
        answer_only: Whether only completions count in the loss and only they are masked, as in ML-GSAI/SMDM
            `sft/finetune_mdm.py` and `sft/finetune_ar.py` (on other data).
        mask_entities: Whether the tokens of an entity are masked together or not at all, by one draw. The data say
            what the entities are: subject and answer of facts, or "entities" of the other rows. Of an entity across two
            blocks, a model that attends by blocks still reads the first part where it predicts the second.
        prepend_bos: As in `to_tokens`.
        checkpoint_every, evaluate, evaluate_every, progress: As in `train`.

    Raises:
        ImportError: The package accelerate is not installed.
        FileNotFoundError: The data do not exist.
        ValueError: A row does not fit or does not name its entities (the message names it), an autoregressive model
            is to mask entities, or `out` contains another training or weights.
    """
    completions = read_completions(data)
    rows = encode_completions(
        model, completions, answer_only=answer_only, mask_entities=mask_entities, prepend_bos=prepend_bos
    )
    target = Path(out).expanduser()
    require_own_folder(target)
    home = RunFolder(target / RUN)
    if home.run.exists() and (home.path / RECORD).exists():
        home.start(describe_run(model, rows, config), write=False)
        home.checkpoint.unlink(missing_ok=True)  # The process may have been killed before it deleted the checkpoint.
        load_weights(model, target / WEIGHTS)
        return TrainingRecord.load(home.path / RECORD)
    record = train(
        model,
        rows,
        config,
        folder=home.path,
        checkpoint_every=checkpoint_every,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        progress=progress,
    )
    with accelerated(model) as accelerator:
        if accelerator.is_main_process:
            export(dict(model.named_parameters()), model.cfg.architecture, target / WEIGHTS)
            write_trained_length(model.cfg.trained_length, target)
            save_tokenizer(model.tokenizer, target, prepends_bos=model.cfg.default_prepend_bos)
            # The record comes last, because it marks the training as complete.
            record.save(home.path / RECORD)
            home.checkpoint.unlink()
        accelerator.wait_for_everyone()
    return record


def read_completions(data: Data) -> list[Completion]:
    """Read completions from facts, from mappings with "prompt" and "completion", or from a `.jsonl` file of such rows.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: There are no rows, or a row lacks one of the two texts.
    """
    rows: list[tuple[str, object]]
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file of training data at {path}")
        rows = [(f"{path.name}, line {number}", row) for number, row in read_json_lines(path, SHAPE)]
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
    mask_entities: bool = False,
    prepend_bos: bool | None = None,
) -> TrainingRows:
    """Tokenize texts into training rows, one each; arguments as in `finetune`.

    Raises:
        ValueError: The tokenizer has no end token, a text does not fit into the context with its end token, or the
            tokenizer merges a completion into its prompt (with `answer_only`), or, with `mask_entities`, the model is
            autoregressive, or a row does not name its entities or has one that is only partly in the answer. The
            message names the row.
    """
    if mask_entities:
        require_noise(model)
    end = getattr(model.tokenizer, "eos_token_id", None)
    if end is None:
        raise ValueError(f"{model.cfg.model_name!r} has no tokenizer with an end token, which every row needs")
    tokens, real = model.tokenize([text.prompt + text.completion for text in completions], prepend_bos)
    tokens, lengths = tokens.cpu(), real.sum(dim=1).cpu()
    if int(lengths.max()) >= model.cfg.n_ctx:
        i = int(lengths.argmax())
        raise ValueError(
            f"{completions[i].name} has {int(lengths[i])} tokens without its end token, and the context of "
            f"{model.cfg.model_name!r} has n_ctx={model.cfg.n_ctx}: {_short(completions[i])}"
        )
    rows = torch.full((len(tokens), tokens.shape[1] + 1), int(end))
    rows[:, :-1] = torch.where(real.cpu(), tokens, int(end))
    answers = _answers(model, completions, rows, prepend_bos) if answer_only else None
    entities = _entities(model, completions, rows, answers, prepend_bos) if mask_entities else None
    return TrainingRows(rows, lengths + 1, answers, entities)


def entity_spans(text: Completion) -> list[tuple[int, int]]:
    """First character of each entity of a text, and one past its last, as its source names them.

    Raises:
        ValueError: The source names none, or one that is not in the text.
    """
    whole, source = text.prompt + text.completion, text.source
    if isinstance(source, Fact):
        answer = source.answer.strip().rstrip(MARKS)
        start = len(text.prompt) + text.completion.find(answer)
        return [source.subject_span, *([(start, start + len(answer))] if answer else [])]
    if not isinstance(named := source.get("entities"), Sequence) or isinstance(named, str):
        raise ValueError(
            f"{text.name} has {', '.join(map(repr, source))} and no list of its entities, which mask_entities needs: "
            'add "entities", such as ["Daphne Barrington"], or [[0, 17]] in characters of prompt + completion'
        )
    spans = []
    for entity in named:
        if isinstance(entity, str) and entity.strip():
            found = [(start, start + len(entity)) for start in mentions(entity, whole)]
        else:
            is_span = isinstance(entity, Sequence) and [type(end) for end in entity] == [int, int]
            found = [(entity[0], entity[1])] if is_span and 0 <= entity[0] < entity[1] <= len(whole) else []
        if not found:
            raise ValueError(
                f"{text.name}: the entity {entity!r} is neither a text in {whole!r:.80} nor [start, stop] in its "
                f"{len(whole)} characters"
            )
        spans += found
    return spans


def load_weights(model: DiffusionTransformer, path: Path) -> None:
    """Copy the weights of a checkpoint into a model of the same architecture."""
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in open_checkpoint(path).tensors():
            weights[name].copy_(tensor)


def require_own_folder(target: Path) -> None:
    """Raise a `ValueError` if a folder contains weights that `finetune` did not write."""
    if RunFolder(target / RUN).run.exists():
        return
    if checkpoints := sorted(file.name for file in target.glob("*") if file.suffix in CHECKPOINT_SUFFIXES):
        raise ValueError(
            f"{target} contains {', '.join(checkpoints)}, which no training here wrote; pass another folder as out="
        )


def _answers(
    model: DiffusionTransformer, completions: Sequence[Completion], rows: torch.Tensor, prepend_bos: bool | None
) -> torch.Tensor:
    prompts = [model.encode(text.prompt, prepend_bos) for text in completions]
    for text, prompt, row in zip(completions, prompts, rows, strict=True):
        if row[: len(prompt)].tolist() != prompt:
            raise ValueError(
                f"{text.name}: the tokenizer merges the completion into its prompt, so answer_only cannot determine "
                f"where it begins; begin the completion with a space: {_short(text)}"
            )
    return torch.tensor([len(prompt) for prompt in prompts])


def _entities(
    model: DiffusionTransformer,
    completions: Sequence[Completion],
    rows: torch.Tensor,
    answers: torch.Tensor | None,
    prepend_bos: bool | None,
) -> torch.Tensor:
    """First position of the entity of each position, or its own."""
    first = torch.arange(rows.shape[1]).repeat(len(rows), 1)
    for i, text in enumerate(completions):
        words = text.prompt + text.completion
        of_tokens = token_spans(model, words, prepend_bos)
        wholes: list[range] = []
        for start, stop in sorted(entity_spans(text)):
            inside = [pos for pos, (a, b) in enumerate(of_tokens) if words[max(a, start) : min(b, stop)].strip()]
            if wholes and inside and inside[0] < wholes[-1].stop:
                wholes[-1] = range(wholes[-1].start, max(wholes[-1].stop, inside[-1] + 1))
            elif inside:
                wholes.append(range(inside[0], inside[-1] + 1))
        for whole in wholes:
            first[i, whole.start : whole.stop] = whole.start
        if answers is not None and bool((first[i, int(answers[i]) :] < answers[i]).any()):
            raise ValueError(
                f"{text.name}: an entity begins in the prompt and ends in the completion, of which answer_only masks "
                f"the second part only; end the prompt before the entity: {_short(text)}"
            )
    return first


def _completion(name: str, row: object) -> Completion:
    if isinstance(row, Fact):
        return Completion(row.prompt, row.answer, f"fact {row.id!r}" if row.id else name, row)
    if not isinstance(row, Mapping) or not all(isinstance(row.get(key), str) for key in ("prompt", "completion")):
        raise ValueError(f'{name} is {row!r:.120}; it should be a Fact, or have the texts "prompt" and "completion"')
    if not (row["prompt"] + row["completion"]).strip():
        raise ValueError(f"{name} is empty")
    return Completion(row["prompt"], row["completion"], name, row)


def _short(text: Completion) -> str:
    return f"{text.prompt + text.completion!r:.80}"
