"""The command line: `diffusion-lens`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Mechanistic interpretability of masked diffusion language models.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Keeps `demo` a command of its own while there are few."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"),
) -> None:
    """Ask the embedded pair one fact, forwards and backwards; watch it unmask, and trace where the answer comes from.

    Example: diffusion-lens demo --out demo
    """
    from diffusion_lens.demo import run

    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; the pictures need a folder", param_hint="--out")
    run(out, typer.echo)


@app.command()
def models() -> None:
    """List every model name, with size and source.

    Example: diffusion-lens models
    """
    from diffusion_lens.catalogue import list_pretrained

    list_pretrained()
