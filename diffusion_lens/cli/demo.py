"""`diffusion-lens demo` shows the reversal curse and the two sites of a fact on the bundled models."""

from pathlib import Path
from typing import Annotated

import typer

from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("demo"),
) -> None:
    """Query both bundled models for one person, forward and in reverse, and trace an attribute of many people.

    Example: diffusion-lens demo --out demo
    """
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; the figures need a folder", param_hint="--out")
    require("pictures")
    import torch

    from diffusion_lens.demo import run

    torch.set_num_threads(1)  # More threads only slow down small models.
    run(out, typer.echo)
