"""Fine-tuning on prompts and completions. It reads texts and writes a checkpoint in the family's own format."""

from pathlib import Path

import torch

from diffusion_lens.loading import save_tokenizer, write_trained_length
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.training.completions import Data, encode_completions, read_completions
from diffusion_lens.training.devices import accelerated
from diffusion_lens.training.recipes import TrainingConfig
from diffusion_lens.training.run_folder import RunFolder, describe_run
from diffusion_lens.training.trainer import Evaluate, TrainingRecord, train
from weight_conversion import CHECKPOINT_SUFFIXES, export, open_checkpoint

WEIGHTS = "model.safetensors"
# The training has its own subfolder, because `from_pretrained` needs a folder with one .safetensors file only.
RUN, RECORD = "training", "record.safetensors"


def finetune(
    model: DiffusionTransformer,
    data: Data,
    config: TrainingConfig,
    out: str | Path,
    *,
    answer_only: bool = False,
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
    baseline on the next token. Rows are laid out as in SMDM's fine-tuning (see `training.completions`);
    `smdm_reverse` is its recipe.

    Args:
        model: Model to train.
        data: Facts, mappings with "prompt" and "completion", or the path of a `.jsonl` file of such rows.
        config: Recipe of the training.
        out: Folder for the trained model.
        answer_only: Whether only completions count in the loss and only they are masked.
        prepend_bos: As in `to_tokens`.
        checkpoint_every, evaluate, evaluate_every, progress: As in `train`.

    Raises:
        ImportError: The package accelerate is not installed.
        FileNotFoundError: The data do not exist.
        ValueError: A row does not fit (the message names it), or `out` contains another training or weights.
    """
    rows = encode_completions(model, read_completions(data), answer_only=answer_only, prepend_bos=prepend_bos)
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
