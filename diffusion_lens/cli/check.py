"""`diffusion-lens check`: whether a checkpoint is what it says, the first thing to run on a published weight."""

from pathlib import Path
from typing import Annotated

import typer

from diffusion_lens.cli import options
from diffusion_lens.cli.app import app


@app.command()
def check(
    model: options.Model,
    claimed: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="The published model that a file or folder should be."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="Safetensors file with the original code's logits: tokens, logits; before, after."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Facts of the reversal curse to ask for recall: a folder of its files, or toy."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The checkpoint's config, if it is not beside it.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of the tokenizer, if it is not beside it.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the report, to attach to a bug report.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    json: options.Json = False,
) -> None:
    """Tell whether a checkpoint is what it says, and what is likely wrong if it is not.

    Its hash, shapes and config against the catalogue; the training loss on a page, in order and with its words
    shuffled; ten common facts; recall, if it was fine-tuned on the reversal curse; padding, bfloat16, seconds, memory.
    If something is off, likely mistakes are undone one by one, and the one that explains it is named. Exit code 1 then.

    Example: diffusion-lens check tiny-ar --out report.json
    """
    from diffusion_lens.checks.load import check_checkpoint
    from weight_conversion import to_json

    report = check_checkpoint(
        model,
        claimed=claimed,
        reference=reference,
        data=data,
        config=config,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
    )
    if out is not None:
        report.save(out)
    if json:
        typer.echo(to_json(report.to_dict()))
    else:
        typer.echo(report.to_text())
        if out is not None:
            typer.echo(f"wrote {out}")
    if not report.passed:
        raise typer.Exit(1)
