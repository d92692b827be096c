"""`diffusion-lens demo` shows the reversal curse on the bundled models."""

from pathlib import Path
from typing import Annotated

import typer

from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("demo"),
) -> None:
    """Query both bundled models for one fact, forward and in reverse, and trace where each answer comes from.

    Example: diffusion-lens demo --out demo
    """
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; the figures need a folder", param_hint="--out")
    require("pictures")
    from diffusion_lens.demo import run

    run(out, typer.echo)
