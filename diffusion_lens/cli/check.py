"""`diffusion-lens check` verifies that a checkpoint is what it claims to be."""

from pathlib import Path
from typing import Annotated

import typer

from diffusion_lens.cli import options
from diffusion_lens.cli.app import app
from diffusion_lens.cli.load_model import name_and_mode


@app.command()
def check(
    model: options.Model,
    claimed: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Published model that a file or folder is expected to be."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="Safetensors file with logits of the original code; its tensors are tokens and logits, or before and "
            "after."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Facts of the reversal curse to test recall: a folder of its files, site or toy."),
    ] = None,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = None,
    block_size: options.BlockSize = None,
    mask_token_id: options.MaskTokenId = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the report, to attach to a bug report.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    json: options.Json = False,
) -> None:
    """Check whether a checkpoint is what it claims to be, and find the likely mistake if it is not.

    The checks compare hash, shapes and config with the catalogue. They measure the training loss on a page of text, in
    order and with shuffled words, query ten common facts, test recall if the model was fine-tuned on the reversal
    curse, and test padding, bfloat16, speed and memory. If a check fails, the command tries likely corrections one by
    one and names the one that explains the failure. The exit code is then 1.

    Example: diffusion-lens check site-ar --out report.json
    """
    from diffusion_lens.checks.load import check_checkpoint
    from weight_conversion import to_json

    name, mode = name_and_mode(model, mode)
    report = check_checkpoint(
        name,
        claimed=claimed,
        reference=reference,
        data=data,
        config=config,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        mode=mode,
        block_size=block_size,
        mask_token_id=mask_token_id,
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
