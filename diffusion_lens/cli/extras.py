"""Packages that only some commands need, looked for before the work that would need them in the end."""

from importlib.util import find_spec

# What is wanted, the package it takes, and the extra of diffusion-lens that brings it.
EXTRAS = {
    "pictures": ("pictures need matplotlib", "matplotlib", "plot"),
    "word_bleu": ("BLEU on words needs sacrebleu", "sacrebleu", "eval"),
}


def require(*wanted: str) -> None:
    """Refuse work whose end takes a package that is not there.

    Args:
        wanted: keys of `EXTRAS`.

    Raises:
        ValueError: one of them is missing; the message has the command that installs it.
    """
    for need, package, extra in map(EXTRAS.__getitem__, wanted):
        if find_spec(package) is None:
            raise ValueError(f"{need}, which is not installed: pip install 'diffusion-lens[{extra}]'")
