"""Optional packages. A command checks for them before it starts long work whose output needs them."""

from importlib.util import find_spec

# By feature: text of the error, package, and extra of diffusion-lens that installs it.
EXTRAS = {
    "pictures": ("figures need matplotlib", "matplotlib", "plot"),
    "live pages": ("the live explorer needs starlette", "starlette", "explore"),
    "servers": ("the live explorer needs uvicorn", "uvicorn", "explore"),
    "Dask": ("a cluster of Dask needs distributed", "distributed", "cluster"),
    "Slurm": ("jobs of Slurm need submitit", "submitit", "cluster"),
    "word_bleu": ("BLEU on words needs sacrebleu", "sacrebleu", "eval"),
}


def require(*features: str) -> None:
    """Check that the packages of these features are installed.

    Args:
        features: Keys of `EXTRAS`.

    Raises:
        ValueError: A package is missing; the message contains the command that installs it.
    """
    for need, package, extra in map(EXTRAS.__getitem__, features):
        if find_spec(package) is None:
            raise ValueError(f"{need}, which is not installed: pip install 'diffusion-lens[{extra}]'")
