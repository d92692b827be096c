"""`diffusion-lens demo`."""

from pathlib import Path
from typing import Annotated

import typer

from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"),
) -> None:
    """Ask the embedded pair one fact, forwards and backwards; watch it unmask, and trace where the answer comes from.

    Example: diffusion-lens demo --out demo
    """
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; the pictures need a folder", param_hint="--out")
    require("pictures")
    from diffusion_lens.demo import run

    run(out, typer.echo)
