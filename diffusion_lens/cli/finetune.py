"""`diffusion-lens finetune` trains either variant on facts with SMDM's settings."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.report import Report, progress


@app.command()
def finetune(
    model: options.Model,
    out: Annotated[Path, typer.Option(help="Folder for the trained model. An interrupted run resumes from it.")],
    data: Annotated[
        str | None,
        typer.Option(
            help='A .jsonl file with {"prompt": , "completion": } per line, or site, toy, reversal-curse, or a folder '
            "of its files. Default: the facts of a bundled model's training, otherwise reversal-curse."
        ),
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data.", callback=ranges.positive())] = 10,
    batch_size: Annotated[
        int, typer.Option(help="Rows per update, over all devices.", callback=ranges.at_least(1))
    ] = 32,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate. Default: SMDM's 2e-4.", callback=ranges.positive())
    ] = None,
    accumulate: Annotated[
        int,
        typer.Option(
            help="Number of parts of a batch that are processed one after another, to save memory.",
            callback=ranges.at_least(1),
        ),
    ] = 1,
    precision: Annotated[str, typer.Option(help="Autocast: no, bf16 or fp16. The weights stay float32.")] = "no",
    checkpoint_every: Annotated[
        int, typer.Option(help="Number of updates between checkpoints.", callback=ranges.at_least(1))
    ] = 500,
    ask: Annotated[
        int,
        typer.Option(
            help="Number of held-out questions per pair of directions that measure recall at every checkpoint.",
            callback=ranges.at_least(0),
        ),
    ] = 0,
    seed: options.Seed = 3407,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = None,
    block_size: options.BlockSize = None,
    mask_token_id: options.MaskTokenId = None,
    device: options.Device = None,
    json: options.Json = False,
    dry_run: options.DryRun = False,
    flops: options.Flops = None,
) -> None:
    """Fine-tune a model on prompts and completions, and write a model to OUT that every command accepts.

    Both variants use SMDM's recipe for the reversal curse. In a short run the warm-up takes a tenth of the updates. On
    several devices: accelerate launch -m diffusion_lens finetune ...

    Example: diffusion-lens finetune tiny-mdm --epochs 0.02 --lr 1e-4 --out taught
    """
    arguments = dict(locals())
    from diffusion_lens.cost import kind_of_device, training
    from diffusion_lens.data.sources import STUDY_LENGTH, default_source, open_source
    from diffusion_lens.evaluation import recall_by_steps
    from diffusion_lens.evaluation.naming import cell_name
    from diffusion_lens.facts import Fact
    from diffusion_lens.model.transformer import DiffusionTransformer
    from diffusion_lens.records import require_same_settings
    from diffusion_lens.training import finetune as train
    from diffusion_lens.training import smdm_reverse
    from diffusion_lens.training.completions import read_completions
    from diffusion_lens.training.devices import require_gpu
    from diffusion_lens.training.finetune import RUN, require_own_folder

    # 1. Check the folder and the device.
    chosen = ModelChoice(model, config, tokenizer, device, "float32", mode, block_size, mask_token_id)
    require_own_folder(out.expanduser())
    require_gpu(precision, kind_of_device(device) == "cpu")

    # 2. Find the texts to train on, and the questions that measure recall in between.
    rows: Any
    length = STUDY_LENGTH
    questions: list[Fact] = []
    steps: tuple[int, ...] = ()
    cfg_scale = 0.0
    data = data or default_source(model)
    if Path(data).expanduser().is_file():
        rows = Path(data)
    else:
        source = open_source(data, outline_only=dry_run)
        if not source.training:
            raise ValueError(f"{source.name} has no texts to train on; give a .jsonl file of prompts and completions")
        rows, length = list(source.training), chosen.length(None, source.length) or length
        if ask:
            questions, steps, cfg_scale = source.pick(limit=ask), source.steps[-1:], source.cfg_scale
    if ask and not questions:
        raise ValueError(f"--ask needs a data set with questions, such as toy; {data} contains texts only")

    # 3. Make the recipe, and refuse a folder of another one; for a dry run, print the cost.
    count = len(read_completions(rows))
    recipe = smdm_reverse(count, epochs, batch_size, accumulate=accumulate, mixed_precision=precision, seed=seed)
    if lr is not None:
        recipe = replace(recipe, lr=lr, lr_end=lr / 10)
    recipe = replace(recipe, warmup=min(recipe.warmup, recipe.steps // 10))
    require_same_settings(out.expanduser() / RUN, {"config": asdict(recipe)})
    report = Report("finetune", {**arguments, "data": data, "rows": count, **vars(recipe)}, out, json)
    if dry_run:
        work = training(cost.config_of(chosen), recipe.steps, batch_size, length, accumulate)
        cost.show(report, [(chosen, work)], flops)

    # 4. Train.
    loaded = chosen.load()

    def measure_recall(model: DiffusionTransformer) -> dict[str, float]:
        recall = recall_by_steps(loaded, questions, steps, length=length, cfg_scale=cfg_scale)
        return {cell_name(*cell): share.mean for cell, row in recall.table().items() for share in row.values()}

    record = train(
        loaded,
        rows,
        recipe,
        out,
        checkpoint_every=checkpoint_every,
        evaluate=measure_recall if questions else None,
        evaluate_every=checkpoint_every,
        progress=progress(),
    )
    if int(os.environ.get("RANK", 0)):
        return  # Only the first of several processes reports.

    # 5. Report losses and recall.
    final_loss = record.losses[-100:].mean().item()
    losses = f"loss {record.losses[0]:.3f} at first, {final_loss:.3f} in the end"
    report.say(f"{recipe.steps} updates of {batch_size} rows; {losses}")
    for evaluation in record.evaluations:
        shares = (f"{cell} {100 * share:.1f} %" for cell, share in evaluation.items() if cell != "step")
        report.say(f"recall after {evaluation['step']} updates: {', '.join(shares)}")
    results = {"updates": recipe.steps, "last_loss": final_loss, "recall": record.evaluations}
    report.finish(results, record.record, model=out)
