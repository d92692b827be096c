"""`diffusion-lens finetune`: teach either variant facts, with the authors' settings."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_lens.cli import cost, options
from diffusion_lens.cli.app import app
from diffusion_lens.cli.loaded import load
from diffusion_lens.cli.report import Report, progress
from diffusion_lens.data.sources import default_source, open_source
from diffusion_lens.training import finetune as train
from diffusion_lens.training import smdm_reverse
from diffusion_lens.training.completions import read_completions


@app.command()
def finetune(
    model: options.Model,
    out: Annotated[Path, typer.Option(help="Folder for the trained model; a run that was stopped goes on from it.")],
    data: options.Data = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Rows an update sees, over all devices.")] = 32,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate, by default SMDM's 2e-4.")] = None,
    accumulate: Annotated[int, typer.Option(help="Parts of a batch that go through one after another.")] = 1,
    precision: Annotated[str, typer.Option(help="no, bf16 or fp16 autocast; the weights stay float32.")] = "no",
    checkpoint_every: Annotated[int, typer.Option(help="Updates between checkpoints.")] = 500,
    seed: options.Seed = 3407,
    device: options.Device = None,
    json: options.Json = False,
    dry_run: options.DryRun = False,
) -> None:
    """Fine-tune a model on prompts and completions; OUT is then a model that every command takes.

    The recipe is SMDM's for the reversal curse, for either variant; of a short run the warm-up is a tenth. Several
    devices: accelerate launch -m diffusion_lens finetune ...

    Example: diffusion-lens finetune tiny-mdm --epochs 0.05 --lr 1e-4 --out taught
    """
    rows: Any
    longest = 52
    if data is not None and Path(data).expanduser().is_file():
        rows = Path(data)
    else:
        source = open_source(data or default_source(model))
        if not source.training:
            raise ValueError(f"{source.name} has no texts to train on; give a .jsonl file of prompts and completions")
        rows, longest = list(source.training), source.length or longest
    count = len(read_completions(rows))
    recipe = smdm_reverse(count, epochs, batch_size, accumulate=accumulate, mixed_precision=precision, seed=seed)
    if lr is not None:
        recipe = replace(recipe, lr=lr, lr_end=lr / 10)
    recipe = replace(recipe, warmup=min(recipe.warmup, recipe.steps // 10))
    report = Report("finetune", {"model": model, "data": data, "rows": count, **vars(recipe)}, out, json)
    if dry_run:
        work = recipe.steps * batch_size
        at_once = -(-batch_size // accumulate)
        cost.show(report, model, "float32", cost.Cost(work, longest, at_once, backward=work, copies=4))

    loaded = load(model, device, "float32")
    done = train(loaded, rows, recipe, out, checkpoint_every=checkpoint_every, progress=progress())
    last = done.losses[-100:].mean().item()
    report.say(
        f"{recipe.steps} updates of {batch_size} rows; loss {done.losses[0]:.3f} at first, {last:.3f} in the end"
    )
    report.finish({"updates": recipe.steps, "last_loss": last}, done.record, model=out)
