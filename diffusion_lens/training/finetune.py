"""Fine-tuning on prompts and completions: text in, a checkpoint in the family's own format out."""

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
# A folder of its own, because a folder with one .safetensors file is a checkpoint that `from_pretrained` takes.
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
    """Train `model` in place on texts, and write what `from_pretrained(out)` reads.

    `out` gets the weights and config in the family's own format, the tokenizer, `trained_length.json` with the length
    that the model was trained for, if it is known, and in `out/training` the run: its `run.json`, its `TrainingRecord`
    as `record.safetensors`, and while it goes on its checkpoint. The same call goes on with a run that was interrupted,
    and reads one that is complete.

    Either variant is trained by its own loss: a masked diffusion model with noise on prompt and completion, its twin on
    the next token. Tokens are laid out as SMDM's fine-tuning does (see `training.completions`); `smdm_reverse` is its
    recipe.

    Args:
        data: facts, mappings with "prompt" and "completion", or the path of a `.jsonl` file of these.
        answer_only: only completions count, and only they are masked.
        prepend_bos: as in `to_tokens`.
        checkpoint_every, evaluate, evaluate_every, progress: as in `train`.

    Raises:
        ImportError: accelerate is not installed.
        FileNotFoundError: no such data.
        ValueError: rows that do not fit (the row is named), or an `out` that holds another run or other weights.
    """
    rows = encode_completions(model, read_completions(data), answer_only=answer_only, prepend_bos=prepend_bos)
    target = Path(out).expanduser()
    require_own_folder(target)
    home = RunFolder(target / RUN)
    if home.run.exists() and (home.path / RECORD).exists():
        home.start(describe_run(model, rows, config), write=False)
        home.checkpoint.unlink(missing_ok=True)  # a run may be killed between its record and this
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
            # Last, because from here on the run is complete.
            record.save(home.path / RECORD)
            home.checkpoint.unlink()
        accelerator.wait_for_everyone()
    return record


def load_weights(model: DiffusionTransformer, path: Path) -> None:
    """Put the weights of a checkpoint into a model of the same architecture."""
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in open_checkpoint(path).tensors():
            weights[name].copy_(tensor)


def require_own_folder(target: Path) -> None:
    """Raise a `ValueError` at a folder with weights that no run of `finetune` wrote."""
    if RunFolder(target / RUN).run.exists():
        return
    if held := sorted(file.name for file in target.glob("*") if file.suffix in CHECKPOINT_SUFFIXES):
        raise ValueError(f"{target} holds {', '.join(held)}, which no run here wrote; pass another folder as out=")
